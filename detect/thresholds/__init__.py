"""Hold every number that decides a verdict: its value, its unit, where it comes from.

Used by all of `detect`; knows nothing of it. A table holds the numbers of one subject, used as
`PAIRS.agrees_share`.

    adjustable.py  what a user may set
    observing.py   what is taken from spans: iterations, passes, kernels, stops, launches
    statistics.py  how far a rank is from its peers, and whom a search names
    devices.py     slow devices, and what else lengthens computing
    bursts.py      slowness that is shorter than an iteration, and lost time
    hosts.py       hosts as units
    networks.py    connections, NICs, switches, NVLink
    verdicts.py    the job's own causes, consequences, costs, trust
    comparison.py  two traces beside each other
    tables.py      all of them, for what lists or moves them

`python -m benchmarks.detection.thresholds` moves each number by a half, down and up, reruns a part
of the detection benchmark and writes what changes into `benchmarks/results/thresholds.md`.

Units: "log" is a natural logarithm of a ratio of times (0.05 is 5.1 % longer); a "share" lies
between 0 and 1; "sigma" counts standard deviations.

To add a threshold: a line in the table of its subject; a new table has its instance at the end of
its file. A test forbids bare fractions in the rooms `causes`, `observe`, `stats` and `comparison`.
"""

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
