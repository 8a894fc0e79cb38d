"""Turn a timeline into a Replay: the job's dependency graph, built from its own spans.

On each rank, communication and the begins and ends of passes cut an iteration into local work:

    … forward ──┐ all_reduce (TP) ┌── forward ── send ── wait for gradient ── backward …
      local     └── transfer ─────┘   local

Local work waits for what precedes it on its rank; a communication waits for the work before it on
all its members. Messages of one exchange are posted together. Communication that overlaps compute
waits for the work at its launch, and holds up what consumes it: a pass, the gradient
synchronisation, the end of the iteration. Waiting is not in the weights; the replay produces it.

One rank's marks give the nodes of its pipeline stage; all ranks of the stage are weighed at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from detect.stats import robust
from detect.thresholds.verdicts import COSTS
from detect.whatif.graph import (
    BACKWARD,
    DATA,
    EACH_LANE,
    FORWARD,
    GC,
    HOST,
    OPTIMIZER,
    Graph,
    Group,
    Node,
    Replay,
    partition_of,
)
from detect.whatif.marks import BEGIN, COMMUNICATION, END, SpanColumns, Stack, stack_marks
from megascan import vocabulary
from megascan.arrays import Flags, Floats, Integers, group_starts
from megascan.schema import NOT_APPLICABLE, Granularity, Kind
from megascan.timeline import Timeline
from megascan.topology import Layout

PASS_TYPES = {
    vocabulary.FORWARD: FORWARD,
    vocabulary.BACKWARD: BACKWARD,
    vocabulary.BACKWARD_WEIGHTS: BACKWARD,
}
_MEETING = int(np.iinfo(np.int64).max)
"""Match of the optimizer steps that begin together; no recorded match is as large."""
_TIED = _MEETING - 1
"""Match of the last reductions of the first and the last stage, where these end together."""
NO_MARK, END_OF_ITERATION = -1, -2
"""Places of a node that no mark of its stage's template gives."""


@dataclass(kw_only=True)
class DraftNode:
    """A node before stages are joined; `dependencies` number nodes of the same stage.

    `weight_ns` (lane, iteration) is NaN where unknown. `match` ties it to nodes of other stages.
    `duration_ns` of a communication includes its wait.
    """

    node: Node
    dependencies: tuple[int, ...]
    weight_ns: Floats
    axis: str = EACH_LANE
    match: int = NOT_APPLICABLE
    duration_ns: Floats | None = None
    is_collective: bool = False
    ends_at: int = NO_MARK
    """Mark of the template that ends it."""
    inside: int = NO_MARK
    """Mark of the template whose span it lies in."""
    begin_ns: Integers | None = None
    """(lane, iteration): when a piece of an optimizer step begins, on the common clock."""
    come_ns: Integers | None = None
    """(lane, iteration): when the last member of a collective has come, on the common clock."""


@dataclass(kw_only=True)
class StageDraft:
    """Nodes of a stage in program order; the last one is the end of the iteration."""

    stage: int
    nodes: list[DraftNode] = field(default_factory=list)
    talks_in: set[tuple[str, str]] = field(default_factory=set)
    """Axes whose groups were seen to communicate, and in which types of passes."""


class _Open(NamedTuple):
    """A pass or optimizer step whose begin the walk has met, and not yet its end."""

    optype: str
    microbatch: int
    chunk: int
    mark: int


_OUTSIDE = _Open(HOST, NOT_APPLICABLE, NOT_APPLICABLE, NO_MARK)
"""Where the walk is when nothing is open: between passes."""


class _WalkOverMarks:
    """A walk over the marks of one lane of a stage, which weighs every node on all lanes.

    Its state: what the next work waits for, and what it is part of.
    """

    def __init__(self, stack: Stack, spans: SpanColumns, stage: int, lane: int) -> None:
        marks, places = stack.marks, stack.places[stage]
        self.spans = spans
        self.draft = StageDraft(stage=stage)
        self.present = stack.present[stage]
        self.lane_rows = marks.row[places]
        """Spans of all lanes, (lane, iteration, mark); `rows` are those of the template."""
        self.rows, self.edges = self.lane_rows[lane, 0], marks.edge[places[lane, 0]]
        begin, end = np.moveaxis(stack.bounds[stage], -1, 0)
        self.time = (marks.time_ns[places] - begin[:, :, None]).astype(np.float64)
        self.end = (marks.end_ns[places] - begin[:, :, None]).astype(np.float64)
        self.begin_ns = begin
        self.length = (end - begin).astype(np.float64)
        self.pauses = spans.pauses_ns[places].astype(np.float64)
        self.loading = spans.loading_ns[places].astype(np.float64)
        self.until = np.zeros_like(self.length)
        """End of what came before, (lane, iteration)."""
        self.waits_for: tuple[int, ...] = ()
        self.burst: list[int] = []
        """Marks of the communication that was posted together, up to here."""
        self.burst_waits_for: tuple[int, ...] = ()
        self.pending: dict[int, int] = {}
        """Overlapped communication not yet consumed: mark to node."""
        self.last_of_group: dict[str, tuple[int, int]] = {}
        """Mark and node of the latest overlapped collective, by process group."""
        self.open: list[_Open] = []
        self.num_parts: Counter[tuple[str, int, int]] = Counter()
        """Pieces of local work so far, by (type, microbatch, chunk)."""
        ends = np.flatnonzero(self.edges == END).tolist()
        passes = [number for number in ends if spans.name[self.rows[number]] in PASS_TYPES]
        self.last_pass = passes[-1] if passes else NO_MARK

    def finished(self) -> StageDraft:
        """Visit all marks, add the work after the last one, and wait for all still under way."""
        for number in range(len(self.rows)):
            self._visit(number)
        for mark in list(self.pending):
            self._wait_for(mark)
        self._work(END_OF_ITERATION, self.length)
        return self.draft

    def _visit(self, number: int) -> None:
        """Add the work before one mark, then the mark itself."""
        edge = self.edges[number]
        if edge == COMMUNICATION and self._joins_burst(number):
            self._post(number)
            return
        for mark in list(self.pending):
            if self._is_consumed(mark, number):
                self._wait_for(mark)
        self._work(number, self.time[:, :, number])
        self.burst = []
        if edge == COMMUNICATION:
            self.burst_waits_for = self.waits_for
            self._post(number)
        elif edge == BEGIN:
            self.open.append(self._opened_at(number))
        elif edge == END and self.open:
            self.open.pop()

    def _joins_burst(self, number: int) -> bool:
        """Return whether a message is posted while the one before it is still under way."""
        if not self.burst or self.spans.overlapped[self.rows[number]]:
            return False
        return self._mostly(self.time[:, :, number] < self.until)

    def _mostly(self, flags: Flags) -> bool:
        """Return whether flags, (lane, iteration), are set in most of what was recorded."""
        return bool(flags[self.present].mean() > 0.5)

    def _opened_at(self, number: int) -> _Open:
        row, spans = self.rows[number], self.spans
        optype = OPTIMIZER if spans.kind[row] == Kind.OPTIMIZER else PASS_TYPES[spans.name[row]]
        return _Open(optype, int(spans.microbatch[row]), int(spans.chunk[row]), number)

    def _add(self, draft: DraftNode) -> int:
        for times in (draft.weight_ns, draft.duration_ns):
            if times is not None:
                times[~self.present] = np.nan
        self.draft.nodes.append(draft)
        return len(self.draft.nodes) - 1

    def _work(self, mark: int, until: Floats) -> None:
        """Add local work up to a mark, or to the end; none where no rank has time for it.

        Loading and pauses become nodes of their own; a pause only counts as far as the rest of the
        work took longer than usual.
        """
        begin, work = self.until, np.maximum(until - self.until, 0.0)
        self.until = np.maximum(self.until, until)
        if mark == END_OF_ITERATION:
            pauses = loading = np.zeros_like(work)
        elif not work[self.present].any():
            return
        else:
            pauses = self.pauses[:, :, mark]
            loading = np.minimum(self.loading[:, :, mark], work)
        within = self.open[-1] if self.open else _OUTSIDE
        rest = work - loading
        usual = np.median(rest[self.present])
        pauses = np.minimum(pauses, np.maximum(rest - usual, 0.0))
        for kind, part in ((DATA, loading), (GC, pauses)):
            if part[self.present].any():
                self._local(within._replace(optype=kind), part)
        self._local(within, rest - pauses)
        self.draft.nodes[-1].ends_at = mark
        if within.optype == OPTIMIZER:
            self.draft.nodes[-1].begin_ns = self.begin_ns + begin.astype(np.int64)

    def _local(self, within: _Open, weight_ns: Floats) -> None:
        """Add local work, which waits for all before it on its rank."""
        optype, microbatch, chunk, mark = within
        place = (optype, microbatch, chunk)
        node = Node(
            stage=self.draft.stage,
            optype=optype,
            is_local=True,
            microbatch=microbatch,
            chunk=chunk,
            part=self.num_parts[place],
        )
        self.num_parts[place] += 1
        draft = DraftNode(node=node, dependencies=self.waits_for, weight_ns=weight_ns, inside=mark)
        self.waits_for = (self._add(draft),)

    def _post(self, number: int) -> None:
        """Add a communication; a synchronous one holds up what follows."""
        row = self.rows[number]
        if self.spans.overlapped[row]:
            waits_for = {*self.waits_for, *self._still_sending(number)}
            node = self._communication(number, tuple(sorted(waits_for)))
            self.pending[number] = node
            if self.spans.kind[row] == Kind.COLLECTIVE:
                self.last_of_group[self.spans.group[row]] = number, node
            return
        node = self._communication(number, self.burst_waits_for)
        self.waits_for = (node,) if not self.burst else (*self.waits_for, node)
        self.burst.append(number)
        self.until = np.maximum(self.until, self.end[:, :, number])
        if len(self.burst) > 1:
            self._weigh_burst()

    def _still_sending(self, number: int) -> tuple[int, ...]:
        """Return the overlapped collective before in the same process group, whose collectives run
        one after the other; none if this one is recorded to begin before that has ended.
        """
        mark, node = self.last_of_group.get(self.spans.group[self.rows[number]], (NO_MARK, 0))
        if mark == NO_MARK:
            return ()
        before, this = self.spans.duration_ns[self.lane_rows[:, :, [mark, number]]].transpose(
            2, 0, 1
        )
        begins = self.end[:, :, number] - this + COSTS.most_early_share * before
        return (node,) if self._mostly(self.end[:, :, mark] <= begins) else ()

    def _communication(self, number: int, waits_for: tuple[int, ...]) -> int:
        row, spans = self.rows[number], self.spans
        group = vocabulary.axis_of_group(spans.group[row])
        if spans.name[row] == vocabulary.LOSS_SYNC:  # old timelines do not name its group
            group = "dp"
        op = spans.op[row] or spans.name[row]
        direction = spans.direction[row]
        is_message = spans.kind[row] == Kind.P2P
        duration = spans.duration_ns[self.lane_rows[:, :, number]].astype(np.float64)
        if self.open:
            self.draft.talks_in.add((group, self.open[-1].optype))
        waited = spans.wait_ns[self.lane_rows[:, :, number]].astype(np.float64)
        transfer = np.where(waited >= 0, duration - waited, np.nan)
        come = self.begin_ns + np.nan_to_num(self.end[:, :, number] - transfer).astype(np.int64)
        node = Node(
            stage=self.draft.stage,
            optype=f"{direction or 'message'}-{op}" if is_message else f"{group}-{op}",
            is_local=False,
            microbatch=int(spans.microbatch[row]),
            chunk=int(spans.chunk[row]),
            size_bytes=int(spans.size_bytes[row]),
        )
        return self._add(
            DraftNode(
                node=node,
                dependencies=waits_for,
                weight_ns=transfer,
                duration_ns=duration,
                axis=EACH_LANE if is_message else group,
                match=int(spans.match[row]),
                is_collective=not is_message,
                ends_at=number,
                inside=number,
                come_ns=None if is_message else come,
            )
        )

    def _weigh_burst(self) -> None:
        """Weigh the messages of one exchange from the moment its last partner began."""
        posted = self.burst
        waited = self.spans.wait_ns[self.lane_rows[:, :, posted]].astype(np.float64)
        begun = (self.time[:, :, posted] + np.maximum(waited, 0.0)).max(axis=2)
        for number, node in zip(posted, self.waits_for, strict=True):
            draft = self.draft.nodes[node]
            if not draft.is_collective:
                draft.weight_ns = np.maximum(self.end[:, :, number] - begun, 0.0)
                draft.weight_ns[~self.present] = np.nan

    def _is_consumed(self, mark: int, number: int) -> bool:
        """Return whether the work before this mark waits for overlapped communication.

        Gradients are waited for in the optimizer, or behind the last pass if they come there; all
        else as soon as it has arrived.
        """
        spans, row = self.spans, self.rows[mark]
        op = spans.op[row]
        if op == "send":
            return False
        has_come = self._mostly(self.end[:, :, mark] <= self.time[:, :, number])
        if vocabulary.is_data_parallel(spans.group[row]) and op != "all_gather":
            if self.open:
                return has_come and self.open[-1].optype == OPTIMIZER
            return has_come and number > self.last_pass
        if op == "recv" and spans.microbatch[row] >= 0:
            return self.edges[number] == BEGIN and self._feeds(row, number)
        return has_come

    def _feeds(self, row: int, number: int) -> bool:
        """Return whether a received tensor is the input of the pass that begins at a mark."""
        spans = self.spans
        optype, microbatch, chunk, _ = self._opened_at(number)
        received = (PASS_TYPES.get(spans.direction[row]), spans.microbatch[row], spans.chunk[row])
        return received == (optype, microbatch, chunk)

    def _wait_for(self, mark: int) -> None:
        self.waits_for = tuple(sorted({*self.waits_for, self.pending.pop(mark)}))
        self.until = np.maximum(self.until, np.minimum(self.end[:, :, mark], self.length))


def _tie_last_reductions(stages: Sequence[StageDraft], error_ns: float) -> None:
    """Take waiting that nobody recorded out of the last gradient reductions of the first and the
    last stage, and let these end together.

    Both stages hold the word embedding, and reduce its gradients together. Where one span holds
    that exchange and the reduction among replicas, as in the original MegaScan's files, the stage
    that is through early waits in it for the other one:

        stage 0   … backward ───────────────────┤reduce├
        stage 3   … backward ─┤reduce ·················├     68 of its 141 ms are waiting

    They are tied if they end together in nearly all steps though they begin far apart, by more than
    clocks that differ by `error_ns` may seem to.
    """
    ends = (stages[0], stages[-1])
    found = [one for stage in ends if (one := _last_reduction(stage, stages)) is not None]
    if len(stages) == 1 or len(found) < len(ends):
        return
    come_ns = np.stack([come for _, come in found])
    weight_ns = np.stack([one.weight_ns for one, _ in found])
    known = ~np.isnan(weight_ns).any(axis=0)
    apart_ns = np.ptp(come_ns, axis=0)
    ended_apart_ns = np.ptp(come_ns + np.nan_to_num(weight_ns), axis=0)
    tied = (ended_apart_ns <= COSTS.most_early_share * apart_ns) & (apart_ns > error_ns)
    if not known.any() or tied[known].mean() < COSTS.least_waiting_steps:
        return
    for (draft, _), early_ns in zip(found, come_ns.max(axis=0) - come_ns, strict=True):
        draft.weight_ns = np.maximum(draft.weight_ns - early_ns, 0.0)
        draft.match = _TIED


def _last_reduction(
    stage: StageDraft, stages: Sequence[StageDraft]
) -> tuple[DraftNode, Integers] | None:
    """Return the last reduction among replicas of a stage, behind all messages, and when its last
    member has come; None if there is none.
    """
    for draft in reversed(_after_all_exchange(stage, stages)):
        is_gather = draft.node.optype.endswith("all_gather")
        if draft.come_ns is not None and vocabulary.is_data_parallel(draft.axis) and not is_gather:
            return draft, draft.come_ns
    return None


def _meet_in_optimizers(
    stages: Sequence[StageDraft], layout: Layout, lanes: Integers, error_ns: float
) -> dict[str, Integers]:
    """Take waiting that nobody recorded out of optimizer steps, and let these begin together.

    Returns the partition in which they do, none where nothing changes.

    Ranks agree on the gradients' norm and on overflows. Where such communication was not recorded,
    the step of a rank that comes early lasts until the last one has come:

        stage 0   … backward ───────────────────────┤opt.├
        stage 1   … backward ─┤optimizer ················├     58 of its 62 ms are waiting

    They do if, in nearly all steps, nobody is through before the last rank of all has begun, by
    clocks that differ by `error_ns`, and some rank's step is mostly that; else the same is asked of
    each replica, and of each lane. What stands before a recorded exchange of stages waits for that,
    and stays. `lanes` are the ranks of the first stage.
    """
    pieces = []
    for stage in stages:
        steps = [one for one in _after_all_exchange(stage, stages) if one.begin_ns is not None]
        if not steps:
            return {}
        pieces.append(max(steps, key=lambda draft: float(np.nansum(draft.weight_ns))))
    begin_ns = np.stack([draft.begin_ns for draft in pieces if draft.begin_ns is not None])
    weight_ns = np.stack([draft.weight_ns for draft in pieces])
    known = ~np.isnan(weight_ns)
    begun_ns = np.where(known, begin_ns, np.iinfo(np.int64).min).max(axis=0)  # in all stages
    for axis, labels in _meetings(layout, lanes).items():
        last_ns = np.stack([begun_ns[labels == one].max(axis=0) for one in np.unique(labels)])
        early_ns = np.where(known, last_ns[labels] - begin_ns, 0)
        lasts = early_ns * (1.0 - COSTS.most_early_share) <= weight_ns + error_ns
        waits = lasts[known].mean() >= COSTS.least_waiting_steps
        share = robust.median(early_ns / np.maximum(weight_ns, 1.0), axis=-1)
        if waits and np.nanmax(share) >= COSTS.least_waiting_share:
            for draft, early in zip(pieces, early_ns, strict=True):
                draft.weight_ns = np.maximum(draft.weight_ns - early, 0.0)
                draft.match, draft.axis = _MEETING, axis
            return {axis: labels}
    return {}


def _meetings(layout: Layout, lanes: Integers) -> dict[str, Integers]:
    """Return who may wait for whom in optimizer steps, by what that is called, as partitions."""
    places = [layout.coordinates(int(rank)) for rank in lanes]
    return {
        "all ranks": np.zeros(len(lanes), dtype=np.int64),
        "replicas": partition_of([(place.dp, place.cp) for place in places]),
        "lanes": np.arange(len(lanes)),
    }


def _after_all_exchange(stage: StageDraft, stages: Sequence[StageDraft]) -> list[DraftNode]:
    """Return the nodes behind the last communication of a stage that others take part in."""
    elsewhere = {draft.match for other in stages if other is not stage for draft in other.nodes}
    exchanges = [
        number
        for number, draft in enumerate(stage.nodes)
        if draft.match >= 0 and draft.match in elsewhere
    ]
    return stage.nodes[max(exchanges, default=-1) + 1 :]


def traced_ideal(graph: Graph, weights: Floats) -> Floats:
    """Return what each operation would take were all of its kind alike, (node,) seconds.

    A forward takes the mean over stages, chunks, microbatches, ranks and steps, and so do backward
    and optimizer; the pieces of one keep their shares of it. Communication takes the median of its
    type and size, loading and gaps the median of the same place in their own stage. A collection
    of garbage takes nothing.
    """
    ideal = np.zeros(len(graph.nodes))
    for optype in graph.optypes:
        if optype in (FORWARD, BACKWARD, OPTIMIZER):
            _set_pooled_means(graph, weights, ideal, optype)
        elif optype != GC:
            _set_medians(graph, weights, ideal, optype)
    return ideal


def _set_pooled_means(graph: Graph, weights: Floats, ideal: Floats, optype: str) -> None:
    pieces: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for number in graph.of_type(optype).tolist():
        node = graph.nodes[number]
        pieces[node.stage, node.chunk, node.part].append(number)
    means = {piece: float(weights[nodes].mean()) for piece, nodes in pieces.items()}
    totals: dict[tuple[int, int], float] = defaultdict(float)
    for (stage, chunk, _), mean in means.items():
        totals[stage, chunk] += mean
    pooled = float(np.mean(list(totals.values())))
    for (stage, chunk, part), nodes in pieces.items():
        total = totals[stage, chunk]
        ideal[nodes] = pooled * (means[stage, chunk, part] / total if total else 0.0)


def _set_medians(graph: Graph, weights: Floats, ideal: Floats, optype: str) -> None:
    pools: dict[tuple[int, int, int, int], list[int]] = defaultdict(list)
    for number in graph.of_type(optype).tolist():
        node = graph.nodes[number]
        if node.is_local:
            single = -1 if node.microbatch >= 0 else number
            pools[node.stage, node.chunk, node.part, single].append(number)
        else:
            pools[-1, -1, -1, node.size_bytes].append(number)
    for nodes in pools.values():
        pool = weights[nodes]
        if optype == DATA and pool.any():
            pool = pool[pool > 0]  # one rank of a TP group loads for all of it
        ideal[nodes] = float(np.median(pool))


@dataclass(frozen=True, kw_only=True)
class TracedInstants:
    """When the operations of a timeline took place, looked up by their marks; (node,) each."""

    stack: Stack
    stage: Integers
    is_local: Flags
    ends_at: Integers
    """See `DraftNode`, and so of `inside`."""
    inside: Integers

    def begin_ns(self, node: int, lane: int, step: int) -> int:
        """Return when the rank that ran a node began the iteration."""
        stage, stack = self.stage[node], self.stack
        is_known = stack.present[stage, lane]
        return int(stack.bounds[stage, lane, step, 0]) if is_known else NOT_APPLICABLE

    def ends_ns(self, nodes: Integers, lanes: Integers, step: int) -> Integers:
        """Return when operations ended: work where a mark begins, -1 where nothing was recorded."""
        marks, place = self.stack.marks, self._marks(self.ends_at, nodes, lanes, step)
        ends = np.where(self.is_local[nodes], marks.time_ns[place], marks.end_ns[place])
        ends[place < 0] = NOT_APPLICABLE
        last = self.ends_at[nodes] == END_OF_ITERATION
        ends[last] = self.stack.bounds[self.stage[nodes[last]], lanes[last], step, 1]
        ends[ends == 0] = NOT_APPLICABLE
        return ends

    def rows(self, nodes: Integers, lanes: Integers, step: int) -> Integers:
        """Return the pass that operations are part of, or the communication that they are."""
        place = self._marks(self.inside, nodes, lanes, step)
        return np.where(place >= 0, self.stack.marks.row[place], NOT_APPLICABLE)

    def _marks(self, of_node: Integers, nodes: Integers, lanes: Integers, step: int) -> Integers:
        place = np.full(len(nodes), NOT_APPLICABLE)
        for number, places in enumerate(self.stack.places):
            here = (self.stage[nodes] == number) & (of_node[nodes] >= 0)
            place[here] = places[lanes[here], step, of_node[nodes[here]]]
        return place


_NS = 1e-9


def replay_of_timeline(timeline: Timeline) -> Replay:
    """Return graph and weights of a timeline.

    Raises InputError when no iteration can be replayed (no complete replica, no iteration that all
    ranks ran alike).
    """
    stack = stack_marks(timeline)
    spans = SpanColumns.of(timeline, stack.marks)
    lane = stack.complete_lane
    stages = [
        _WalkOverMarks(stack, spans, number, lane).finished() for number in range(len(stack.ranks))
    ]
    error_s = _clock_error_s(timeline)
    _tie_last_reductions(stages, error_s / _NS)
    meeting = _meet_in_optimizers(stages, timeline.layout, stack.ranks[0], error_s / _NS)
    drafts = [draft for stage in stages for draft in stage.nodes]
    graph = _joined_stages(stages, meeting | _partitions(timeline, stack, drafts, meeting))
    weights = np.stack([draft.weight_ns for draft in drafts]) * _NS
    _take_shortest_transfers(graph, drafts, weights, error_s)
    _fill_missing(weights)
    layout = timeline.layout
    places = [layout.coordinates(int(rank)) for rank in stack.ranks[0]]
    inner = layout.used("cp", "tp")
    shared, note = _shared_work(timeline, stack)
    return Replay(
        graph=graph,
        weights=weights,
        ideal=traced_ideal(graph, weights),
        ranks=stack.ranks,
        steps=stack.iterations,
        measured=_measured(stack),
        recorded=stack.present,
        instants=TracedInstants(
            stack=stack,
            stage=graph.stage,
            is_local=graph.is_local,
            ends_at=np.array([draft.ends_at for draft in drafts]),
            inside=np.array([draft.inside for draft in drafts]),
        ),
        layout_text=_sizes_text(layout),
        labels={int(rank): layout.label(int(rank)) for rank in stack.ranks.ravel()},
        columns=np.array([place.dp for place in places]),
        row_labels=tuple(
            " ".join(f"{axis.upper()}{getattr(place, axis)}" for axis in inner) for place in places
        ),
        shared_work=shared,
        entangled=_entangled(layout, stack, stages),
        mates=joined_groups(layout, stack.ranks[0], layout.used("tp", "cp", "ep")),
        notes=stack.notes + note,
    )


def _sizes_text(layout: Layout) -> str:
    """Return the sizes of the axes that the job uses ("DP 2 TP 4")."""
    used = layout.used("dp", "pp", "cp", "ep", "tp")
    sizes = " ".join(f"{axis.upper()} {getattr(layout, axis)}" for axis in used)
    return sizes or "single rank"


def _joined_stages(stages: list[StageDraft], partitions: dict[str, Integers]) -> Graph:
    """Return the nodes of all stages, numbered from 0, as one graph.

    Nodes of several stages that were matched to each other are a group; all others stand alone.
    """
    drafts = [draft for stage in stages for draft in stage.nodes]
    firsts = np.cumsum([0, *(len(stage.nodes) for stage in stages)]).tolist()
    dependencies = [
        tuple(sorted(number + first for number in draft.dependencies))
        for first, stage in zip(firsts, stages, strict=False)
        for draft in stage.nodes
    ]
    members: dict[int, list[int]] = defaultdict(list)
    for number, draft in enumerate(drafts):
        members[draft.match if draft.match >= 0 else -2 - number].append(number)
    axes = [drafts[numbers[0]].axis for numbers in members.values()]
    groups = [
        Group(nodes=tuple(numbers), partition=axis if axis in partitions else EACH_LANE)
        for numbers, axis in zip(members.values(), axes, strict=True)
    ]
    return Graph(
        nodes=tuple(draft.node for draft in drafts),
        dependencies=tuple(dependencies),
        groups=tuple(groups),
        partitions=partitions,
        finish=tuple(first - 1 for first in firsts[1:]),
    )


def _partitions(
    timeline: Timeline, stack: Stack, drafts: list[DraftNode], known: Collection[str]
) -> dict[str, Integers]:
    """Return, by axis but `known` ones, which lanes share a process group, as the headers say."""
    used = dict.fromkeys(draft.axis for draft in drafts)
    axes = [axis for axis in used if axis != EACH_LANE and axis not in known]
    groups = {one for header in timeline.headers.values() for one in header.groups.items()}
    member_of = {
        (axis, rank): name
        for name, ranks in sorted(groups)
        if (axis := vocabulary.axis_of_group(name)) in axes
        for rank in ranks
    }
    lanes = stack.ranks[0]
    return {
        axis: partition_of([member_of.get((axis, int(rank)), f"alone {rank}") for rank in lanes])
        for axis in axes
    }


def _take_shortest_transfers(
    graph: Graph, drafts: list[DraftNode], weights: Floats, error_s: float
) -> None:
    """Replace measured transfers of collectives that the clocks cannot tell from the shortest.

    The shortest span among the members is the transfer by itself, without a common clock: the last
    to arrive waits for nobody. Beyond the error, the measured end says more, because members need
    not leave together.
    """
    for group in graph.groups:
        if not drafts[group.nodes[0]].is_collective:
            continue
        members = list(group.nodes)
        labels = graph.lane_sets(group.partition, weights.shape[1])
        durations = [drafts[member].duration_ns for member in members]
        known = np.stack([time_ns for time_ns in durations if time_ns is not None])
        shortest = _shortest(known * _NS, labels)
        measured = weights[members]
        with np.errstate(invalid="ignore"):
            beyond = measured - shortest > error_s
        weights[members] = np.where(beyond, measured, shortest)


def _clock_error_s(timeline: Timeline) -> float:
    """Return how far apart two clocks may be; 0 when all ranks read the same one."""
    fits = timeline.clocks.values()
    if len({fit.domain for fit in fits}) < 2:
        return 0.0
    return 2 * max(max(fit.residual_p99_ns, fit.error_ns) for fit in fits) * _NS


def _shortest(members: Floats, labels: Integers) -> Floats:
    """Return the least over (node, lane of a set) for each lane, (lane, step).

    Unknown where a set has one known member of several: that one may have waited all along.
    """
    order = np.argsort(labels, kind="stable")
    first = group_starts(labels[order])
    least = np.fmin.reduceat(np.fmin.reduce(members, axis=0)[order], first, axis=0)
    known = np.add.reduceat((~np.isnan(members)).sum(axis=0)[order], first, axis=0)
    size = np.bincount(labels)[:, None] * len(members)
    return np.asarray(np.where((known >= 2) | (known == size), least, np.nan)[labels])


def _fill_missing(weights: Floats) -> None:
    """Give lanes without a record the median of the others."""
    for node in np.flatnonzero(np.isnan(weights).any(axis=(1, 2))):
        known = weights[node]
        by_step = robust.median(known, axis=0)
        by_step[np.isnan(by_step)] = np.nan_to_num(robust.median(known))
        weights[node] = np.where(np.isnan(known), by_step, known)


def _measured(stack: Stack) -> Floats:
    """Return the time from the latest begin to the latest end of each iteration, seconds.

    Ranks do not begin together: a stage that ended the last iteration early begins the next one
    early and then waits. From the latest begin on, this head start is not counted twice. Who begins
    late for what nobody traces has that time within its bounds (`detect.whatif.marks`).
    """
    begins, ends = np.moveaxis(stack.bounds[stack.present], -1, 0)
    return np.asarray((ends.max(axis=0) - begins.max(axis=0)) * _NS)


def _entangled(layout: Layout, stack: Stack, stages: list[StageDraft]) -> Mapping[str, Integers]:
    """Return, by type of pass, which lanes wait for each other unseen in passes of the type: those
    of a TP or EP group whose communication was not traced there.
    """
    seen = {one for stage in stages for one in stage.talks_in}
    found = {}
    for optype in (FORWARD, BACKWARD):
        hidden = [axis for axis in layout.used("tp", "ep") if (axis, optype) not in seen]
        if hidden:
            found[optype] = joined_groups(layout, stack.ranks[0], hidden)
    return found


def joined_groups(layout: Layout, ranks: Integers, axes: Sequence[str]) -> Integers:
    """Number the groups of `ranks` along some axes, (rank,); groups that share a rank are one.

    Example: ranks 0 to 7 of TP 2, DP 4 and EP 4, along TP and EP: 0 0 0 0 1 1 1 1.
    """
    number = np.arange(len(ranks))
    for axis in axes:
        for group in {layout.group(rank, axis) for rank in ranks.tolist()}:
            own = np.isin(ranks, group)
            number[np.isin(number, number[own])] = number[own].min()
    return partition_of(number.tolist())


def _shared_work(
    timeline: Timeline, stack: Stack
) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Return groups whose members' compute cannot be told apart, and a note that says so."""
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
