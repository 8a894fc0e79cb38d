"""How a threshold is declared: its value, its unit, where it comes from, what it means."""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum
from typing import TypeVar

T = TypeVar("T", int, float)


class Origin(StrEnum):
    """Where a number comes from."""

    BENCHMARK = "benchmark"
    """Chosen with the detection benchmarks (benchmarks/results/detection*.md)."""
    PHYSICS = "physics"
    """What devices, hosts and networks do, measured or published."""
    CONVENTION = "convention"
    """Usual practice, or a judgement of what is worth reporting."""
    MATHEMATICS = "mathematics"
    """Follows from a definition: not to be moved."""


def limit(value: T, unit: str, origin: Origin, meaning: str) -> T:
    """Declare a field with its value, unit, origin and meaning."""
    return field(default=value, metadata={"unit": unit, "origin": origin, "meaning": meaning})
