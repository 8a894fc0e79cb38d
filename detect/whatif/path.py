"""Find the chain of operations that determines a step's end: its critical path.

The replay (`graph`) lets every operation start at the latest end of what it waits for. Walking back
from the last end of a step, from each operation to the one it started at the end of, gives a chain
without a gap: its weights add up to the replayed step, and nothing off the path can make the step
shorter.

    rank 0   ├ forward ┤░░ waits ░░├ all_reduce ┤           the path: forward of rank 1,
    rank 1   ├───── forward ──────┤├ all_reduce ┤├ opt ┤    all_reduce, optimizer of rank 1

The same chain is then looked up among the recorded times. A hop lies from the recorded end of the
hop before it to its own recorded end. So hops lie end to end from the begin of the step on the
path's first rank to the end of the step on the last rank, and their lengths add up to the step as
it was measured. The part of a hop that exceeds its operation's weight is idle time: nobody on the
path worked, and the trace does not say why.

    share       hop                                                         counted by
    compute     passes, optimizer                                           rank
    transfer    communication without its waiting                           link: a group, two ranks
    host        gaps between spans, loading of data, garbage collection     rank
    idle        see above

The bubble is another view of the same time: take the stage that has most of the path; the bubble is
the passes and messages of the other stages. Meanwhile that stage waits for the pipeline to fill or
to drain.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TypeVar

import numpy as np

from detect.whatif.graph import DATA, EACH_LANE, GC, HOST, NS_PER_S, Graph, Group, Replay, sweep
from detect.whatif.ideal import drawn
from megascan.arrays import Floats, Integers, group_starts
from megascan.schema import NOT_APPLICABLE

_HOST_TYPES = frozenset({DATA, GC, HOST})
Who = TypeVar("Who", int, "Link")


class Share(StrEnum):
    """What a step's time goes to on its critical path."""

    COMPUTE = "compute"
    TRANSFER = "transfer"
    HOST = "host"
    IDLE = "idle"


@dataclass(frozen=True, kw_only=True)
class Link:
    """Ranks that exchange data: the ends of a message in its direction, or a group's members."""

    op: str
    ranks: tuple[int, ...]
    is_message: bool


@dataclass(frozen=True, kw_only=True)
class StepPath:
    """The critical path of one step, all arrays (hop,) in the order of time.

    Hop i is operation `nodes[i]` of lane `lanes[i]`. Times are recorded: `ends_ns[i]` is also the
    begin of hop i + 1, `begin_ns` the begin of the first hop. In the first `idle_ns[i]` of hop i
    nobody worked. `rows` are spans of the timeline, -1 for none.
    """

    iteration: int
    nodes: Integers
    lanes: Integers
    begin_ns: int
    ends_ns: Integers
    idle_ns: Integers
    rows: Integers

    @property
    def length_ns(self) -> int:
        """Return the time from the step's begin on the path's first rank to its end on the last."""
        return int(self.ends_ns[-1]) - self.begin_ns

    @property
    def starts_ns(self) -> Integers:
        """Return when the hops begin."""
        return np.concatenate([[self.begin_ns], self.ends_ns[:-1]])

    @property
    def work_ns(self) -> Integers:
        """Return the length of each hop without its idle time."""
        work: Integers = self.ends_ns - self.starts_ns - self.idle_ns
        return work


@dataclass(frozen=True, kw_only=True)
class Makeup:
    """What one step, or the mean one, is made of: ratios of the path's length.

    `compute` and `host` are by rank, `transfer` by link, all in descending order; together with
    `idle` they add up to one. `main_stage` has most of the path, -1 without stages.
    """

    length_ns: float
    compute: dict[int, float]
    transfer: dict[Link, float]
    host: dict[int, float]
    idle: float
    bubble: float
    main_stage: int

    @property
    def shares(self) -> dict[Share, float]:
        """Return the total of each of the four shares."""
        return {
            Share.COMPUTE: sum(self.compute.values()),
            Share.TRANSFER: sum(self.transfer.values()),
            Share.HOST: sum(self.host.values()),
            Share.IDLE: self.idle,
        }


@dataclass(frozen=True, kw_only=True)
class CriticalPath:
    """The critical paths of all replayed steps."""

    replay: Replay
    steps: tuple[StepPath, ...]

    @cached_property
    def makeups(self) -> tuple[Makeup, ...]:
        """Return what each step is made of."""
        return tuple(self._makeup([step]) for step in self.steps)

    @cached_property
    def mean(self) -> Makeup:
        """Return what the mean step is made of: times added up over all steps."""
        return self._makeup(self.steps)

    def rank(self, node: int, lane: int) -> int:
        """Return the global rank that ran an operation."""
        return int(self.replay.ranks[self.replay.graph.nodes[node].stage, lane])

    def ranks(self, step: StepPath) -> Integers:
        """Return the global rank of each hop."""
        found: Integers = self.replay.ranks[self.replay.graph.stage[step.nodes], step.lanes]
        return found

    def link_of(self, node: int, lane: int) -> Link:
        """Return what the data of a communication travels over."""
        if (node, lane) not in self._links:
            self._links[node, lane] = self._link(node, lane)
        return self._links[node, lane]

    def share(self, node: int) -> Share:
        """Return what an operation counts as."""
        one = self.replay.graph.nodes[node]
        if not one.is_local:
            return Share.TRANSFER
        return Share.HOST if one.optype in _HOST_TYPES else Share.COMPUTE

    def name(self, node: int) -> str:
        """Return what an operation is called: `forward, microbatch 3`."""
        one = self.replay.graph.nodes[node]
        text = drawn(one).name
        return f"{text}, microbatch {one.microbatch}" if one.microbatch >= 0 else text

    @cached_property
    def _links(self) -> dict[tuple[int, int], Link]:
        return {}

    @cached_property
    def _group_of(self) -> dict[int, Group]:
        return {node: group for group in self.replay.graph.groups for node in group.nodes}

    def _link(self, node: int, lane: int) -> Link:
        replay, group = self.replay, self._group_of[node]
        own, nodes = replay.graph.nodes[node], [replay.graph.nodes[one] for one in group.nodes]
        if own.is_message:
            ends = sorted(nodes, key=lambda one: not one.optype.endswith("-send"))
            op = own.optype.rpartition("-")[0] if len(ends) == 2 else own.optype
            ranks = tuple(int(replay.ranks[one.stage, lane]) for one in ends)
            return Link(op=op, ranks=ranks, is_message=True)
        lane_set = replay.graph.lane_sets(group.partition, replay.num_lanes)
        together = lane_set == lane_set[lane]
        members = np.unique(replay.ranks[[one.stage for one in nodes]][:, together])
        return Link(op=own.optype, ranks=tuple(members.tolist()), is_message=False)

    def _makeup(self, steps: Iterable[StepPath]) -> Makeup:
        steps = tuple(steps)
        total = max(sum(step.length_ns for step in steps), 1)
        by_rank: dict[Share, Counter[int]] = defaultdict(Counter)
        by_link: Counter[Link] = Counter()
        for (node, lane), work_ns in _work_by_place(steps).items():
            share = self.share(node)
            if share is Share.TRANSFER:
                by_link[self.link_of(node, lane)] += work_ns
            else:
                by_rank[share][self.rank(node, lane)] += work_ns
        main, bubble_ns = self._bubble(steps)
        return Makeup(
            length_ns=total / len(steps),
            compute=_ratios(by_rank[Share.COMPUTE], total),
            transfer=_ratios(by_link, total),
            host=_ratios(by_rank[Share.HOST], total),
            idle=sum(int(step.idle_ns.sum()) for step in steps) / total,
            bubble=bubble_ns / total,
            main_stage=main,
        )

    def _bubble(self, steps: tuple[StepPath, ...]) -> tuple[int, int]:
        """Return the stage with most of the path, and the others' passes and messages on it, ns."""
        graph = self.replay.graph
        if graph.num_stages < 2:
            return NOT_APPLICABLE, 0
        within = np.array(
            [one.microbatch >= 0 if one.is_local else one.is_message for one in graph.nodes]
        )
        by_stage = np.zeros(graph.num_stages, dtype=np.int64)
        for step in steps:
            chosen = within[step.nodes]
            np.add.at(by_stage, graph.stage[step.nodes[chosen]], step.work_ns[chosen])
        main = int(np.argmax(by_stage))
        return main, int(by_stage.sum() - by_stage[main])


def _ratios(times_ns: Counter[Who], total_ns: int) -> dict[Who, float]:
    return {who: time_ns / total_ns for who, time_ns in times_ns.most_common() if time_ns > 0}


def _work_by_place(steps: Iterable[StepPath]) -> Counter[tuple[int, int]]:
    """Return the time of each (node, lane) on the paths, ns."""
    found: Counter[tuple[int, int]] = Counter()
    for step in steps:
        places = zip(step.nodes.tolist(), step.lanes.tolist(), strict=True)
        for place, work_ns in zip(places, step.work_ns.tolist(), strict=True):
            found[place] += work_ns
    return found


def critical_path(replay: Replay) -> CriticalPath:
    """Return the critical path of every step of a replay, in time linear in its operations."""
    shape = replay.weights.shape
    ends = np.empty(shape)

    def note(node: int, _: Floats, end: Floats) -> None:
        ends[node] = np.broadcast_to(end[:, 0], shape[1:])

    sweep(replay.graph, replay.traced_row, observe=note)
    walk = _WalkBack(replay.graph, ends)
    return CriticalPath(
        replay=replay,
        steps=tuple(_recorded(replay, step, walk.chain(step)) for step in range(shape[2])),
    )


class _WalkBack:
    """Walks from the end of a step to its begin. `ends` (node, lane, step) are replayed."""

    def __init__(self, graph: Graph, ends: Floats) -> None:
        self._ends = ends
        self._finish = np.array(graph.finish)
        self._before: dict[int, Integers] = {}
        self._sets: dict[int, str] = {}
        for group in graph.groups:
            for node in group.nodes:
                others = [member for member in group.nodes if member != node]
                before = [d for member in (node, *others) for d in graph.dependencies[member]]
                self._before[node] = np.array(before, dtype=np.int64)
                self._sets[node] = group.partition
        lane_sets = {
            name: graph.lane_sets(name, ends.shape[1]) for name in {EACH_LANE, *graph.partitions}
        }
        self._lanes = {
            name: [np.flatnonzero(labels == label) for label in labels]
            for name, labels in lane_sets.items()
        }

    def chain(self, step: int) -> tuple[Integers, Integers]:
        """Return nodes and lanes of a step's path in the order of time."""
        last = self._ends[self._finish, :, step]
        place, lane = np.unravel_index(int(np.argmax(last)), last.shape)
        hops = [(int(self._finish[place]), int(lane))]
        while (before := self._latest_before(*hops[-1], step)) is not None:
            hops.append(before)
        nodes, lanes = zip(*reversed(hops), strict=True)
        return np.array(nodes), np.array(lanes)

    def _latest_before(self, node: int, lane: int, step: int) -> tuple[int, int] | None:
        """Return the operation at whose end this one started; of equals, its own rank's."""
        before = self._before[node]
        if not len(before):
            return None
        lanes = self._lanes[self._sets[node]][lane]
        ends = self._ends[before[:, None], lanes, step]
        latest = ends.max()
        own = np.flatnonzero(self._ends[before, lane, step] == latest)
        if len(own):
            return int(before[own[0]]), lane
        place, which = np.unravel_index(int(np.argmax(ends)), ends.shape)
        return int(before[place]), int(lanes[which])


def _recorded(replay: Replay, step: int, chain: tuple[Integers, Integers]) -> StepPath:
    """Look a chain up among the recorded times."""
    nodes, lanes = chain
    weights_ns = np.rint(replay.weights[nodes, lanes, step] * NS_PER_S).astype(np.int64)
    instants = replay.instants
    ends_ns = _known_ends(instants.ends_ns(nodes, lanes, step), weights_ns)
    begin_ns = instants.begin_ns(int(nodes[0]), int(lanes[0]), step)
    if begin_ns == NOT_APPLICABLE:
        begin_ns = int(ends_ns[0] - weights_ns[0])
    ends_ns = np.minimum(np.maximum.accumulate(np.maximum(ends_ns, begin_ns)), ends_ns[-1])
    lengths = np.diff(ends_ns, prepend=begin_ns)
    return StepPath(
        iteration=int(replay.steps[step]),
        nodes=nodes,
        lanes=lanes,
        begin_ns=begin_ns,
        ends_ns=ends_ns,
        idle_ns=np.maximum(lengths - weights_ns, 0),
        rows=instants.rows(nodes, lanes, step),
    )


def _known_ends(ends_ns: Integers, weights_ns: Integers) -> Integers:
    """Fill in ends that were not recorded: the begin of the next hop, or the end of the hop before
    plus the weight.

    Parts of one piece of work (loading, a pause) have no end of their own; nor do operations of a
    rank whose file is missing.
    """
    filled = ends_ns.copy()
    for hop in np.flatnonzero(ends_ns == NOT_APPLICABLE)[::-1].tolist():
        if hop + 1 < len(filled) and filled[hop + 1] != NOT_APPLICABLE:
            filled[hop] = filled[hop + 1] - weights_ns[hop + 1]
    for hop in np.flatnonzero(filled == NOT_APPLICABLE).tolist():
        filled[hop] = (filled[hop - 1] if hop else 0) + weights_ns[hop]
    return filled


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Hops in a row of one rank and one operation, as they are drawn and listed."""

    rank: int
    share: Share
    name: str
    link: Link | None
    start_ns: int
    end_ns: int
    row: int


def pieces(path: CriticalPath, step: StepPath) -> Iterator[Piece]:
    """Yield a step's path in the order of time: idle time on its own, equal neighbours joined."""
    ranks = path.ranks(step)
    rows = np.where(step.rows < 0, -2 - step.nodes, step.rows)  # what has no span stands alone
    hosts = np.array([path.share(node) is Share.HOST for node in step.nodes.tolist()])
    first = group_starts(ranks, rows, hosts, np.cumsum(step.idle_ns > 0))
    last = np.append(first[1:], len(ranks)) - 1
    starts = step.starts_ns
    for low, high in zip(first.tolist(), last.tolist(), strict=True):
        node, lane, rank = int(step.nodes[low]), int(step.lanes[low]), int(ranks[low])
        begin, idle = int(starts[low]), int(step.idle_ns[low])
        if idle:
            yield Piece(
                rank=rank, share=Share.IDLE, name="idle", link=None,
                start_ns=begin, end_ns=begin + idle, row=NOT_APPLICABLE,
            )  # fmt: skip
        if step.ends_ns[high] > begin + idle:
            share = path.share(node)
            yield Piece(
                rank=rank,
                share=share,
                name=path.name(node),
                link=path.link_of(node, lane) if share is Share.TRANSFER else None,
                start_ns=begin + idle,
                end_ns=int(step.ends_ns[high]),
                row=int(step.rows[low]),
            )
