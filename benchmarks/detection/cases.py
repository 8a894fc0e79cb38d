"""Which cases are run: quick, and full."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.detection.innocent import null_makers
from benchmarks.detection.jobs import LAYOUTS, SMALL_LAYOUTS, Case, Maker
from benchmarks.detection.planted import fault_makers, few_peer_makers


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is simulated: number of repetitions of each cell, and which cells."""

    repetitions: int
    null_repetitions: int
    cells: tuple[tuple[str, str], ...]
    """(layout, cost model)."""


QUICK = Plan(
    repetitions=1,
    null_repetitions=2,
    cells=(
        ("tp2-pp2-dp2", "compute-bound"),
        ("dp4", "compute-bound"),
        ("pp2-vpp2-dp4", "communication-heavy"),
    ),
)
FULL = Plan(
    repetitions=1,
    null_repetitions=2,
    cells=(
        *(
            (layout, cost)
            for layout in LAYOUTS
            for cost in ("compute-bound", "communication-heavy")
        ),
        ("tp2-pp2-dp2", "cpu"),
        ("pp2-dp4", "cpu"),
    ),
)


def cases(plan: Plan) -> list[Case]:
    """All cases of a plan; the seed numbers them."""
    return [make(seed) for seed, make in enumerate(_makers(plan))]


def _makers(plan: Plan) -> Iterator[Maker]:
    for layout_name in SMALL_LAYOUTS:
        for _ in range(plan.repetitions):
            yield from few_peer_makers(layout_name)
        yield from null_makers(layout_name, "compute-bound")
    for layout_name, cost_name in plan.cells:
        for _ in range(plan.repetitions):
            yield from fault_makers(layout_name, cost_name)
        for _ in range(plan.null_repetitions):
            yield from null_makers(layout_name, cost_name)
