"""From a timeline to a Replay: the dependency graph of the job, built from its own spans.

On each rank, communication and the begins and ends of passes cut an iteration into local work:

    … forward ──┐ all_reduce (TP) ┌── forward ── send ── wait for gradient ── backward …
      local     └── transfer ─────┘   local

Local work waits for what precedes it on its rank; a communication waits for the work before it on
all its members. Messages of one exchange are posted together. Communication beside compute waits
for the work at its launch, and holds up what consumes it: a pass, the gradient synchronisation,
the end of the iteration. Waiting is not in the weights; it comes out of the replay.
"""

from __future__ import annotations

import numpy as np

from detect.whatif.graph import EACH_LANE, Floats, Graph, Group, Ints, Node, Partition, partition_of
from detect.whatif.replay import Replay
from detect.whatif.span_columns import SpanColumns
from detect.whatif.stacking import Stack, stack_marks
from detect.whatif.stage_program import DraftNode, StageProgram, stage_program
from detect.whatif.traced_ideal import traced_ideal
from megascan.schema import Granularity
from megascan.timeline import Timeline

_NS = 1e-9


def replay_of_timeline(timeline: Timeline) -> Replay:
    """Graph and weights of a timeline.

    Raises InputError when no iteration can be replayed (no complete replica, no iteration that all
    ranks ran alike).
    """
    stack = stack_marks(timeline)
    spans = SpanColumns.of(timeline, stack.marks)
    lane = stack.complete_lane
    programs = [stage_program(stack, spans, number, lane) for number in range(len(stack.stages))]
    nodes, dependencies, weights = _joined(programs)
    drafts = [draft for program in programs for draft in program.nodes]
    partitions = _partitions(timeline, stack, drafts)
    groups = _groups(drafts, partitions)
    _settle_transfers(drafts, groups, partitions, weights, _clock_error_s(timeline))
    _fill_missing(weights)
    graph = Graph(
        nodes=nodes,
        dependencies=dependencies,
        groups=tuple(groups),
        partitions=partitions,
        finish=_finish(programs),
    )
    layout = timeline.layout
    places = [layout.coordinates(int(rank)) for rank in stack.ranks[0]]
    shared, note = _shared_work(timeline, stack)
    return Replay(
        graph=graph,
        weights=weights,
        ideal=traced_ideal(graph, weights),
        ranks=stack.ranks,
        steps=stack.iterations,
        measured=_measured(stack),
        layout_text=" ".join(
            f"{axis.upper()} {getattr(layout, axis)}"
            for axis in ("dp", "pp", "cp", "ep", "tp")
            if getattr(layout, axis) > 1
        )
        or "single rank",
        labels={int(rank): layout.label(int(rank)) for rank in stack.ranks.ravel()},
        columns=np.array([place.dp for place in places]),
        row_labels=tuple(
            " ".join(
                f"{axis.upper()}{getattr(place, axis)}"
                for axis in ("cp", "tp")
                if getattr(layout, axis) > 1
            )
            for place in places
        ),
        shared_work=shared,
        notes=stack.notes + note,
    )


def _joined(
    programs: list[StageProgram],
) -> tuple[tuple[Node, ...], tuple[tuple[int, ...], ...], Floats]:
    """Nodes of all stages numbered through, and their weights in seconds."""
    nodes: list[Node] = []
    dependencies: list[tuple[int, ...]] = []
    for program in programs:
        offset = len(nodes)
        nodes.extend(draft.node for draft in program.nodes)
        dependencies.extend(
            tuple(sorted(number + offset for number in draft.dependencies))
            for draft in program.nodes
        )
    weights = np.stack([draft.weight_ns for program in programs for draft in program.nodes])
    return tuple(nodes), tuple(dependencies), weights * _NS


def _finish(programs: list[StageProgram]) -> tuple[int, ...]:
    offsets = np.cumsum([0] + [len(program.nodes) for program in programs])
    return tuple(int(offset) - 1 for offset in offsets[1:])


def _groups(drafts: list[DraftNode], partitions: dict[str, Partition]) -> list[Group]:
    """Nodes of several stages that were matched to each other, and all others alone."""
    members: dict[int, list[int]] = {}
    for number, draft in enumerate(drafts):
        members.setdefault(draft.match if draft.match >= 0 else -2 - number, []).append(number)
    return [
        Group(
            nodes=tuple(numbers),
            partition=drafts[numbers[0]].axis if drafts[numbers[0]].axis in partitions else "",
        )
        for numbers in members.values()
    ]


def _partitions(timeline: Timeline, stack: Stack, drafts: list[DraftNode]) -> dict[str, Partition]:
    """Lanes that share a process group of each axis, after the groups in the headers."""
    member_of: dict[tuple[str, int], str] = {}
    for header in timeline.headers.values():
        for name, ranks in header.groups.items():
            for rank in ranks:
                member_of[name.partition("@")[0], rank] = name
    lanes = stack.ranks[0]
    return {
        axis: partition_of([member_of.get((axis, int(rank)), f"alone {rank}") for rank in lanes])
        for axis in dict.fromkeys(draft.axis for draft in drafts if draft.axis != EACH_LANE)
    }


def _settle_transfers(
    drafts: list[DraftNode],
    groups: list[Group],
    partitions: dict[str, Partition],
    weights: Floats,
    error_s: float,
) -> None:
    """Transfer of collectives where the wait is within the error of the clocks, or unknown.

    The shortest span among the members is the transfer by itself, without a common clock: the last
    to arrive waits for nobody. Beyond the error, the measured end says more, because members need
    not leave together.
    """
    for group in groups:
        if not drafts[group.nodes[0]].is_collective:
            continue
        members = list(group.nodes)
        labels = np.arange(weights.shape[1])
        if group.partition != EACH_LANE:
            labels = partitions[group.partition].labels
        durations = np.stack([_durations(drafts[member]) for member in members]) * _NS
        shortest = _shortest(durations, labels)
        measured = weights[members]
        with np.errstate(invalid="ignore"):
            beyond = measured - shortest > error_s
        weights[members] = np.where(beyond, measured, shortest)


def _durations(draft: DraftNode) -> Floats:
    return draft.weight_ns if draft.duration_ns is None else draft.duration_ns


def _clock_error_s(timeline: Timeline) -> float:
    """How far apart two clocks may be; nothing when all ranks read the same one."""
    fits = timeline.clocks.values()
    if len({fit.domain for fit in fits}) < 2:
        return 0.0
    return 2 * max(max(fit.residual_p99_ns, fit.error_ns) for fit in fits) * _NS


def _shortest(members: Floats, labels: Ints) -> Floats:
    """Least over (node, lane of a set) for each lane, (lane, step).

    Unknown where a set has one known member of several: that one may have waited all along.
    """
    order = np.argsort(labels, kind="stable")
    first = np.flatnonzero(np.diff(labels[order], prepend=-1))
    least = np.fmin.reduceat(np.fmin.reduce(members, axis=0)[order], first, axis=0)
    known = np.add.reduceat((~np.isnan(members)).sum(axis=0)[order], first, axis=0)
    size = np.bincount(labels)[:, None] * len(members)
    return np.asarray(np.where((known >= 2) | (known == size), least, np.nan)[labels])


def _fill_missing(weights: Floats) -> None:
    """Lanes without a record run like the median of the others."""
    for node in np.flatnonzero(np.isnan(weights).any(axis=(1, 2))):
        known = weights[node]
        usable = ~np.isnan(known)
        typical = float(np.median(known[usable])) if usable.any() else 0.0
        some = usable.any(axis=0)
        by_step = np.full(known.shape[1], typical)
        by_step[some] = np.nanmedian(known[:, some], axis=0)
        weights[node] = np.where(usable, known, by_step)


def _measured(stack: Stack) -> Floats:
    """Begin to end of each iteration on the rank that took longest, seconds.

    Ranks do not begin together: a stage that ended the last iteration early begins the next one
    early and then waits. The longest own duration counts no such head start twice.
    """
    present = np.stack([stage.present for stage in stack.stages])
    begins = stack.bounds[present][..., 0]
    ends = stack.bounds[present][..., 1]
    return np.asarray((ends.max(axis=0) - begins.max(axis=0)) * _NS)


def _shared_work(
    timeline: Timeline, stack: Stack
) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """TP groups whose members' compute cannot be told apart: their collectives are not traced."""
    layout = timeline.layout
    granular = all(h.trace.granularity == Granularity.FULL for h in timeline.headers.values())
    if granular or layout.tp * layout.cp * layout.ep == 1:
        return (), ()
    axis = "tp" if layout.tp > 1 else "cp"
    sets = {layout.group(int(rank), axis) for rank in stack.ranks.ravel()}
    note = (
        f"the collectives inside the {axis.upper()} groups were not traced (granularity base), so "
        "each of these groups counts as one worker; trace with --trace-granularity full to tell "
        "its ranks apart"
    )
    return tuple(sorted(sets)), (note,)
