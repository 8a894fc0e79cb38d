"""Tell whether a trace can show which device is slow, whoever reads it.

That a device is slow shows where others do equal work in less time: ranks of the same pipeline
stage, be they of another replica or TP and CP mates. Ranks that share each pass wait for the
slowest of them inside it; where none of their communication was recorded, all of their passes last
as long, and such ranks are one **unit**. Units are compared, not ranks: most are a single rank.
EP mates are replicas that exchange tokens inside each pass: peers of each other where this was
recorded, one unit where it was not. That some experts may be busier than others is left out.

Asked in this order; of a fault with several ranks the one counts that shows most, as it is enough
to find one:

    UNSEEN      mates that are not slow are in its unit: their passes last as long
    ALONE       no unit without a fault does equal work
    ONE_OTHER   exactly one does: the two differ, and nothing says which is the odd one
    FEW         too few iterations were traced behind those that warm up
    TOLD        none of these

Read from the trace and the truth alone; nothing that is measured takes part.

Example: TP2 x DP2, rank 0 is slow. If TP's collectives were recorded, rank 0 is compared with ranks
1 to 3: `TOLD`. If not, rank 1 is as slow: `UNSEEN`. If ranks 0 and 1 are slow alike, they are one
unit, and that of ranks 2 and 3 is the only other one: `ONE_OTHER`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np

from benchmarks.grounds.avoided import TOLD
from benchmarks.grounds.ground import NUM_WARMING_UP, Planted
from megascan.schema import COMMUNICATION_KINDS
from megascan.timeline import Timeline, codes, equals, narrow, numbers
from megascan.topology import Layout
from megascan.vocabulary import MODEL_AXES, axis_of_group

UNSEEN = "mates wait for it unseen"
ALONE = "no other rank does equal work"
ONE_OTHER = "one other does equal work"
LEAST_ITERATIONS = 5
"""Behind those that warm up; of fewer, chance may show as much as a small slowdown does."""
FEW = f"fewer than {LEAST_ITERATIONS} iterations"

_WITHIN_PASSES = {
    axis: [name for name in MODEL_AXES if axis in name.split("_")] for axis in ("tp", "cp", "ep")
}
"""Process groups over which mates of an axis wait for each other inside passes: of this axis, and
of it and another one."""

_Unit = frozenset[int]


def told_by_peers(timeline: Timeline, planted: Sequence[Planted]) -> tuple[str, ...]:
    """Return for each planted fault whether the trace can tell it from sound devices: `UNSEEN`,
    `ALONE`, `ONE_OTHER`, `FEW` or `TOLD`; "" for what is no fault of a device.
    """
    faults = [one.cause == "compute" and one.owner == "node" for one in planted]
    if not any(faults):
        return ("",) * len(planted)
    units, num_settled = _units(timeline), _num_settled(timeline)
    at_fault = frozenset(rank for one in planted if one.owner == "node" for rank in one.ranks)
    num_equal = _num_equal(units, at_fault, timeline.layout)

    def told(slow: _Unit) -> str:
        hindrance = _hindrance(slow, units, num_equal)
        return hindrance or (FEW if num_settled < LEAST_ITERATIONS else TOLD)

    return tuple(
        told(frozenset(one.ranks)) if is_device else ""
        for one, is_device in zip(planted, faults, strict=True)
    )


def _hindrance(slow: _Unit, units: Mapping[int, _Unit], num_equal: Mapping[int, int]) -> str:
    """Return why none of the `slow` ranks can be told, however long they are traced; "" if one can.
    Of a rank that was not recorded there is nothing to compare.
    """
    of_each = [
        UNSEEN if units[rank] - slow else (ALONE, ONE_OTHER, "")[min(num_equal[rank], 2)]
        for rank in slow & set(units)
    ]
    return max(of_each, key=(UNSEEN, ALONE, ONE_OTHER, "").index, default=ALONE)


def _num_equal(units: Mapping[int, _Unit], at_fault: _Unit, layout: Layout) -> dict[int, int]:
    """Return for each recorded rank how many units without a fault do the work of its stage."""
    stages = {rank: layout.coordinates(rank).pp for rank in units}
    sound = {(unit, stages[rank]) for rank, unit in units.items() if not unit & at_fault}
    of_stage = Counter(stage for _, stage in sound)
    return {rank: of_stage[stage] for rank, stage in stages.items()}


def _num_settled(timeline: Timeline) -> int:
    """Return how many iterations were traced without those that warm up."""
    return int(np.sum(np.unique(narrow(timeline.spans, "iteration")) > NUM_WARMING_UP))


def _units(timeline: Timeline) -> dict[int, _Unit]:
    """Return the unit of each recorded rank; mates whose files are missing are in units, too."""
    layout, recorded = timeline.layout, _recorded(timeline)

    def is_seen(axis: str, group: Sequence[int]) -> bool:
        return not recorded.isdisjoint(product(_WITHIN_PASSES[axis], group))

    mates = {rank: {rank} for rank in range(layout.world_size)}
    for axis in layout.used(*_WITHIN_PASSES):
        for group in {layout.group(rank, axis) for rank in mates}:
            for rank in () if is_seen(axis, group) else group:
                mates[rank] |= set(group)
    return {rank: _joined(rank, mates) for rank in timeline.headers}


def _joined(rank: int, mates: Mapping[int, set[int]]) -> _Unit:
    """Return a rank with its mates and theirs: those of one axis have others of another axis."""
    unit, grown = set[int](), {rank}
    while grown != unit:
        unit, grown = grown, grown.union(*(mates[one] for one in grown))
    return frozenset(unit)


def _recorded(timeline: Timeline) -> set[tuple[str, int]]:
    """Return over which groups, by what they join, each rank recorded any communication."""
    spans = timeline.spans
    use = equals(spans, "kind", *COMMUNICATION_KINDS)
    group, groups = codes(spans, "group")
    pairs = np.unique(np.stack([group, numbers(spans, "rank")], axis=1)[use], axis=0)
    return {(axis_of_group(groups[code]), rank) for code, rank in pairs.tolist()}
