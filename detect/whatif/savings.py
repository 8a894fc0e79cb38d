"""Say what mending single ranks would save, and so what a finding costs the step.

The ranks in question are brought to their peers' times and the job is replayed. Wherever the job's
dependency graph can be built, the answer is better than the first estimate of
`detect.causes.finding`: time that a host loses behind its device, and delays that spread over a
pipeline, come out as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from detect.report import Cause, Finding
from detect.stats.robust import ordinary
from detect.thresholds.networks import NETWORKS
from detect.thresholds.verdicts import COSTS
from detect.whatif.graph import (
    BACKWARD,
    DATA,
    FORWARD,
    GC,
    HOST,
    NS_PER_S,
    OPTIMIZER,
    Replay,
    keep_nodes,
    sweep,
)
from megascan.arrays import Flags, Floats, Integers
from megascan.errors import InputError, MegaScanError
from megascan.header import Json

HOURS_A_DAY = 24.0
PEERS = "peers"
UNSEEN_WAITS = (HOST, OPTIMIZER)
"""Types of local work that may hold waiting for others."""
LATENESS = (DATA, GC, HOST)
"""Types of local work that are rare and long: most ranks have none of it in most steps."""
SCATTERED = frozenset({Cause.GC, Cause.HOST, Cause.LOADER})
"""Causes that take much time in some operations and none in others."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Step time now and if `ranks` ran like their peers, seconds, both replayed.

    `compared_with` says who the peers were: "peers" are ranks of the same stage, "stages" the
    other stages where there are none, "nobody" when the job has one rank (and nothing is saved).
    """

    ranks: tuple[int, ...]
    step_s: float
    fixed_step_s: float
    num_gpus: int
    num_steps: int
    compared_with: str
    causes: tuple[Cause, ...] = ()
    """Why findings name these ranks; none when somebody else chose them."""

    @property
    def saved_s(self) -> float:
        """Return by how many seconds a step would be shorter."""
        return self.step_s - self.fixed_step_s

    @property
    def speedup(self) -> float:
        """Return step time now over step time then: 1.1 makes the job 10 % faster."""
        return self.step_s / self.fixed_step_s

    @property
    def gpu_hours(self) -> float:
        """Return the GPU-hours lost to these ranks in the traced steps."""
        return self.saved_s * self.num_steps * self.num_gpus / 3600.0

    @property
    def gpu_hours_per_hour(self) -> float:
        """Return the GPU-hours that an hour of this job loses to these ranks."""
        return self.saved_s / self.step_s * self.num_gpus

    @property
    def gpu_hours_per_day(self) -> float:
        """Return the GPU-hours that a day of this job loses to these ranks."""
        return self.gpu_hours_per_hour * HOURS_A_DAY

    def to_json(self) -> dict[str, Json]:
        """Return one element of the JSON's `savings`."""
        return {
            "ranks": list(self.ranks),
            "step_time_s": self.step_s,
            "fixed_step_time_s": self.fixed_step_s,
            "saved_s": self.saved_s,
            "step_time_cost_ratio": self.speedup,
            "gpu_hours": self.gpu_hours,
            "gpu_hours_per_hour": self.gpu_hours_per_hour,
            "gpu_hours_per_day": self.gpu_hours_per_day,
            "compared_with": self.compared_with,
            "causes": [cause.value for cause in self.causes],
        }


def saved_by_fixing(
    replay: Replay,
    ranks: Sequence[int],
    *,
    links: bool = False,
    scatters: bool = False,
    gaps: bool = True,
    slowdown: float = np.inf,
    during: Flags | None = None,
) -> Saving:
    """Replay with the work of `ranks` brought to what their peers take, step by step.

    For every operation type and step the rank's own times are scaled so that their sum is the
    median of its peers' sums; what is left is the rank's own scatter, as a healthy rank has it. A
    slow host's delays and late loads scatter far more: with `scatters` loads, pauses and gaps are
    those of a peer in another step, as rare and as long, and other work scatters as a peer's does.
    Without `gaps`, time that no span covers stays as it is: a slow device or link does not make it.
    With `links` the transfers that `ranks` take part in (between them, when there are several) are
    brought to those of the other lanes as well. Ranks whose work cannot be told apart from that of
    `ranks` are fixed with them. Where other stages have to stand for peers, whose work is another,
    work becomes quicker by `slowdown` at most, by which the ranks are known to be slow.

    Only steps `during`, (step,), count, in which the ranks are slow
    (None: all steps), without exceptional ones (`stats.robust.ordinary`).
    Raises InputError for a rank that was not recorded.

        one rank computing 1.5x slower in a TP group of two: its group's passes take 1/1.5
    """
    unknown = sorted(set(ranks) - set(replay.ranks.ravel().tolist()))
    if unknown:
        raise InputError(
            f"rank {unknown[0]} is not in this trace, which has ranks {replay.ranks.min()} to "
            f"{replay.ranks.max()}"
        )
    # a connection is its ranks' own, whoever shares their work
    chosen = tuple(sorted(ranks)) if links else replay.with_shared_work(ranks)
    places = replay.mask(chosen)
    weights = replay.weights.copy()
    compared_with = _fix_work(
        replay, places, weights, like_peers=scatters, late=links, gaps=gaps, slowdown=slowdown
    )
    if links:
        behind = _fix_links(replay, places, weights, slowdown)
        _shorten_waits(replay, places | behind, weights)
    elif compared_with == PEERS:
        _shorten_mates(replay, places, weights)
        if scatters:
            _shorten_transfers(replay, places, weights)
    return _saving(replay, chosen, weights, during, compared_with)


def _saving(
    replay: Replay,
    ranks: tuple[int, ...],
    weights: Floats,
    during: Flags | None,
    compared_with: str,
) -> Saving:
    """Return what `weights` save in the ordinary steps of `during`, (step,); None for all steps."""
    fixed = sweep(replay.graph, lambda node: weights[node][:, None, :])[0]
    counted = np.ones(len(replay.steps), dtype=bool) if during is None else during
    counted = ordinary(fixed, counted)
    return Saving(
        ranks=ranks,
        step_s=float(replay.traced_s[counted].mean()),
        fixed_step_s=float(fixed[counted].mean()),
        num_gpus=replay.num_gpus,
        num_steps=int(counted.sum()),
        compared_with=compared_with,
    )


def _fix_work(
    replay: Replay,
    places: Flags,
    weights: Floats,
    *,
    like_peers: bool,
    late: bool,
    gaps: bool,
    slowdown: float,
) -> str:
    """Bring the work of ranks to that of their peers, and return who the peers are.

    With `late`, no work gets longer: a rank that is late waits for nobody, but the times of its
    peers may hold waiting for it. Optimizer steps that begin together hold none, and stay. Where
    other stages stand for peers no work gets longer either: theirs may be another.
    """
    graph = replay.graph
    stays = late and OPTIMIZER not in _unseen_waits(replay)
    stages = np.flatnonzero(places.any(axis=1))
    have_peers = not places[stages].all(axis=1).any()
    if not have_peers and (late or len(stages) == graph.num_stages):
        return PEERS if late else "nobody"  # peers of a connection are other connections
    types = np.array([node.optype for node in graph.nodes])
    before = _step_before(replay)
    changes = graph.is_local & (gaps | (types != HOST)) & ~(stays & (types == OPTIMIZER))
    for optype in np.unique(types[changes]):
        sums = _time_by_rank(replay, types == optype)  # (stage, lane, step)
        for stage in stages:
            nodes = np.flatnonzero((types == optype) & (graph.stage == stage))
            own = places[stage]
            if optype in replay.entangled:  # lanes that wait for these inside such work are as slow
                labels = replay.entangled[optype]
                own = np.isin(labels, labels[own])
            others = sums[stage, ~own]
            if not have_peers or not len(others):
                others = sums[~places.any(axis=1)].reshape(-1, sums.shape[2])
            if not len(others):
                continue
            if like_peers and have_peers and not own.all():
                _borrow_work(weights, nodes, own, before)
                if optype in LATENESS:
                    continue  # scaled to a step's median, which has none, it would be gone
            now, goal = weights[nodes].sum(axis=0), np.median(others, axis=0)
            if not have_peers:
                goal = np.maximum(goal, now / slowdown)
            shorter = late or not have_peers
            ratio = (np.minimum(goal, now) if shorter else goal) / np.maximum(now, 1e-30)
            weights[nodes] *= np.where(own[:, None] & (now > 0), ratio, 1.0)
    return PEERS if have_peers else "stages"


def _shorten_mates(replay: Replay, places: Flags, weights: Floats) -> None:
    """Shorten the passes of ranks that share a TP, CP or EP group with slow ones to what the ranks
    of other groups take: they may wait in them for the slow ones, in communication that the trace
    does not hold. A mate that is slower still waits for nobody, and stays.

    Example: rank 4 of EP 4 takes 40 ms a pass. Its all-to-alls were recorded, what its CP mates
    send each other was not: these take 31 ms, and ranks of other groups 24. Mended, all take 24.
    """
    groups = replay.mates
    types = np.array([node.optype for node in replay.graph.nodes])
    for stage, own in enumerate(places):
        near = np.isin(groups, groups[own])
        if not own.any() or near.all():
            continue
        for optype in (FORWARD, BACKWARD):
            nodes = np.flatnonzero((types == optype) & (replay.graph.stage == stage))
            now = replay.weights[nodes].sum(axis=0)  # (lane, step)
            total = now.sum(axis=1)
            most = total[own].max() * (1.0 + COSTS.most_early_share)
            mates = np.flatnonzero(near & ~own & (total < most))
            ratio = np.median(now[~near], axis=0) / np.maximum(now[mates], 1e-30)
            place = np.ix_(nodes, mates)
            weights[place] = np.minimum(weights[place], replay.weights[place] * ratio)


def _exchanges(
    replay: Replay, places: Flags
) -> Iterator[tuple[tuple[int, ...], Integers, Integers]]:
    """Yield the nodes of each communication, and by lane, (lane,), how many of the ranks that take
    part in it there are among `places`, (stage, lane), and how many it has.
    """
    graph = replay.graph
    for group in graph.groups:
        if graph.nodes[group.nodes[0]].is_local:
            continue
        own = places[[graph.nodes[node].stage for node in group.nodes]].sum(axis=0)
        labels = graph.lane_sets(group.partition, replay.num_lanes)
        num_own = np.bincount(labels, weights=own).astype(np.int64)
        yield group.nodes, num_own[labels], (len(group.nodes) * np.bincount(labels))[labels]


def _shorten_transfers(replay: Replay, places: Flags, weights: Floats) -> None:
    """Shorten collectives of groups that lie within slow hosts to what the same collectives of
    other groups take: a slow host launches its ranks' collectives late, too, all of them alike.

    Example: TP groups of 8, each a host of its own. On the slow host gathers and reductions take
    52 ms an iteration, of which the wires take 14, on the others 14.
    """
    for nodes, num_own, num_members in _exchanges(replay, places):
        are_all, is_free = num_own == num_members, num_own == 0
        if not (are_all.any() and is_free.any()):
            continue
        for node in nodes:
            goal = np.median(weights[node, is_free], axis=0)
            weights[node, are_all] = np.minimum(weights[node, are_all], goal)


def _time_by_rank(replay: Replay, chosen: Flags) -> Floats:
    """Return the time each rank spends in the chosen nodes, (stage, lane, step)."""
    of_stage = [replay.graph.stage == number for number in range(replay.graph.num_stages)]
    return np.stack([replay.weights[chosen & own].sum(axis=0) for own in of_stage])


def _step_before(replay: Replay) -> Integers:
    """Return the step before each, (step,), without exceptional ones: the first has the last, and
    an exceptional one itself.
    """
    step = np.arange(len(replay.steps))
    usual = np.flatnonzero(ordinary(replay.traced_s, np.ones(len(step), dtype=bool)))
    step[usual] = np.roll(usual, 1)
    return step


def _borrow_work(weights: Floats, nodes: Integers, own: Flags, step: Integers) -> None:
    """Give each of the `own` lanes the work of another lane, in turn, from other steps, (step,)."""
    others = np.flatnonzero(~own)
    lenders = others[np.arange(int(own.sum())) % len(others)]
    weights[np.ix_(nodes, np.flatnonzero(own))] = weights[np.ix_(nodes, lenders, step)]


def _fix_links(replay: Replay, places: Flags, weights: Floats, slowdown: float) -> Flags:
    """Bring the transfers of ranks to those of other lanes, and return who takes part in such that
    others do not, (stage, lane). Where all lanes do, what one rank sends, or several send each
    other and nobody else, becomes quicker by `slowdown`; the rest becomes typical of its kind.

    Example: a rank sends 8 times slower. Its TP group is one of four, and mended as quick as these;
    of the one reduction among all ranks an eighth remains.
    """
    least = 2 if int(places.sum()) > 1 else 1  # of several ranks, transfers between them count
    behind = np.zeros_like(places)
    for nodes, num_own, num_members in _exchanges(replay, places):
        lanes = num_own >= least
        is_theirs = least == 1 or bool((num_own == num_members)[lanes].all())
        for node in nodes if lanes.any() else ():
            behind[replay.graph.nodes[node].stage] |= lanes & ~lanes.all()
            others = weights[node, ~lanes]
            if len(others):
                weights[node, lanes] = np.median(others, axis=0)
            elif is_theirs and np.isfinite(slowdown):
                weights[node, lanes] /= slowdown
            else:
                weights[node, lanes] = replay.ideal[node]
    return behind


def _shorten_waits(replay: Replay, places: Flags, weights: Floats) -> None:
    """Shorten the gaps and optimizer steps of all other ranks to those of the ranks at `places`,
    which take part in slow transfers, and passes in which mates wait for each other unseen to those
    of the mates among them.

    The others may wait in them unseen (for the norm of the gradients, say), while who takes part in
    slow transfers arrives last and does not wait. Example: messages reach rank 3 of a TP group 8 ms
    later; its forward takes 18 ms, and those of its three mates, who wait inside, 32.
    """
    everybody = np.zeros(replay.num_lanes, dtype=np.int64)
    unseen = _unseen_waits(replay)
    for number, node in enumerate(replay.graph.nodes):
        if node.optype not in unseen and node.optype not in replay.entangled:
            continue
        mates, own = replay.entangled.get(node.optype, everybody), places[node.stage]
        for label in np.unique(mates[own]).tolist():
            behind, others = own & (mates == label), ~own & (mates == label)
            last = np.median(replay.weights[number][behind], axis=0)
            if node.optype == HOST and others.any():  # a gap of one rank alone is its own
                common = np.median(replay.weights[number][others], axis=0) - last
                last = np.maximum(last, replay.weights[number][others] - np.maximum(common, 0.0))
            weights[number][others] = np.minimum(weights[number][others], last)


def _unseen_waits(replay: Replay) -> tuple[str, ...]:
    """Return the types of work between passes that may hold waiting for others: gaps, and optimizer
    steps unless these begin together.
    """
    graph = replay.graph
    meet = any(len(one.nodes) > 1 and graph.is_local[one.nodes[0]] for one in graph.groups)
    return (HOST,) if meet else UNSEEN_WAITS


def saved_by_quicker_transfers(
    replay: Replay,
    ranks: Sequence[int],
    slowdown: float,
    least_bytes: int,
    during: Flags | None = None,
    *,
    inside: bool = False,
) -> Saving | None:
    """Replay with all that crosses the border of `ranks`, a host's, quicker by a factor, or with
    all that stays `inside` it.

    Messages with one end among them, and collectives that others take part in, cross the border.
    Such transfers take 1/slowdown of their time, and nobody waits for them unseen; what is smaller
    than `least_bytes` is latency and stays. None where there are none. Example: a NIC at half its
    speed, 40 of 200 ms in transfers that cross: a step of 180 ms.
    """
    weights, places = replay.weights.copy(), replay.mask(tuple(ranks))
    behind, has_any = np.zeros_like(places), False
    for nodes, num_own, num_members in _exchanges(replay, places):
        if 0 <= replay.graph.nodes[nodes[0]].size_bytes < least_bytes:
            continue
        are_all = num_own == num_members
        lanes = are_all if inside else (num_own > 0) & ~are_all
        has_any |= bool(lanes.any())
        for node in nodes:
            behind[replay.graph.nodes[node].stage] |= lanes & ~lanes.all()
            weights[node, lanes] /= slowdown
    if not has_any:
        return None
    _shorten_waits(replay, behind, weights)
    return _saving(replay, tuple(ranks), weights, during, PEERS)


def savings_of(replay: Replay, findings: Sequence[Finding]) -> list[Saving]:
    """Return one saving for each set of ranks, in the order of the findings.

    A rank that computes slowly and whose host is slow as well is mended once. Findings that name no
    rank (uneven sequences), or ranks that are not in the replay, have no saving.
    """
    recorded = set(replay.ranks.ravel().tolist())
    named: dict[tuple[int, ...], list[Finding]] = {}
    for finding in findings:
        ranks = replay.with_shared_work(finding.ranks)
        if ranks and recorded.issuperset(ranks):
            named.setdefault(ranks, []).append(finding)
    savings = []
    for ranks, found in named.items():
        causes = tuple(dict.fromkeys(one.cause for one in found))
        saving = saved_by_fixing(
            replay,
            ranks,
            links=Cause.LINK in causes,
            scatters=not SCATTERED.isdisjoint(causes),
            slowdown=slowdown_of(found),
        )
        savings.append(replace(saving, causes=causes))
    return savings


def slowdown_of(findings: Sequence[Finding]) -> float:
    """Return by how much ranks compute, or transfer, slower at most; inf if findings say anything
    else.
    """
    is_of_one_kind = {one.cause for one in findings} in ({Cause.COMPUTE}, {Cause.LINK})
    return max(one.slowdown for one in findings) if is_of_one_kind else np.inf


@dataclass(frozen=True, kw_only=True)
class Unevenness:
    """How much longer steps are than one in which every operation takes its typical time on all
    ranks, if some operations last as long as they did: 1.2 is 20 % longer.
    """

    computing: Floats
    """(iteration,): passes last as long as they did."""
    transfers: Floats
    """(iteration,): communication does, waiting taken out."""


class ReplayedCosts:
    """Costs of findings on one trace; `build` makes the replay at the first question."""

    def __init__(self, build: Callable[[], Replay]) -> None:
        self._build = build

    @cached_property
    def _replay(self) -> Replay | None:
        try:
            return self._build()
        except MegaScanError:
            return None  # no graph can be built from this trace: estimates remain

    def ratio(
        self,
        ranks: tuple[int, ...],
        causes: Collection[Cause],
        within: tuple[int, int],
        lost_ns: float = 0.0,
        slowdown: float = np.inf,
    ) -> float | None:
        """Return iteration time over iteration time without a finding, at least 1; None if unknown.

        `within` are the first and last iteration in which the ranks are slow, of these `causes`, by
        `lost_ns` an iteration, or `slowdown` times. Where passes are not in the graph, transfers
        beside computing hide the gaps between spans: it tells nothing if the ranks' gaps do not
        hold what they lose.
        Example: 1.22 where the step takes 110 ms and would take 90 ms if they ran like their peers.
        """
        known = self._replayable(ranks, within)
        if known is None or (Cause.COMPUTE in causes and _misses_the_step(*known)):
            return None
        replay, during = known
        links = Cause.LINK in causes
        if not _holds_compute(replay):
            if Cause.COMPUTE in causes:
                return None
            if Cause.HOST in causes and not _gaps_hold(replay, ranks, during, lost_ns):
                return None
        gaps = not set(causes) <= {Cause.COMPUTE, Cause.LINK}
        try:
            saving = saved_by_fixing(
                replay,
                ranks,
                links=links,
                scatters=not SCATTERED.isdisjoint(causes),
                gaps=gaps,
                slowdown=slowdown,
                during=during,
            )
        except MegaScanError:
            return None
        if links:
            return _of_the_step(replay, during, saving)
        # stages differ in their work: what other stages take may be no gain
        is_gain = saving.compared_with == "stages" and saving.speedup >= 1.0
        is_told = is_gain or saving.compared_with == PEERS
        return max(1.0, saving.speedup) if is_told else None

    def ratio_of_transfers(
        self,
        ranks: tuple[int, ...],
        slowdown: float,
        within: tuple[int, int],
        *,
        inside: bool = False,
    ) -> float | None:
        """Return the same for the network of the ranks' host, or for what stays `inside` it, which
        is `slowdown` times slower.
        """
        known = self._replayable(ranks, within)
        if known is None:
            return None
        replay, during = known
        saving = saved_by_quicker_transfers(
            replay, ranks, slowdown, NETWORKS.min_bytes, during, inside=inside
        )
        return None if saving is None else _of_the_step(replay, during, saving)

    def unevenness(self, within: tuple[int, int]) -> Unevenness | None:
        """Return what it costs in some iterations that ranks take unlike times for the same
        operations; None where no replay tells, or passes are not in it.
        """
        replay = self._replay
        if replay is None or not _holds_compute(replay):
            return None
        during = _steps_within(replay, within)
        passes = [node.optype in (FORWARD, BACKWARD) for node in replay.graph.nodes]
        kept = np.array([passes, ~replay.graph.is_local])
        if not during.any() or replay.ideal_s <= 0:
            return None
        computing, transfers = keep_nodes(replay, kept)[:, during] / replay.ideal_s
        return Unevenness(computing=computing, transfers=transfers)

    def _replayable(
        self, ranks: tuple[int, ...], within: tuple[int, int]
    ) -> tuple[Replay, Flags] | None:
        """Return the replay and its steps within these iterations; None where no replay tells."""
        replay = self._replay if ranks else None
        if replay is None:
            return None
        during, places = _steps_within(replay, within), replay.mask(ranks)
        if not during.any() or not places.any():
            return None
        tells = (
            float(replay.recorded[places].mean()) >= COSTS.least_recorded_share
            and _hidden_wait(replay, ranks, during) <= COSTS.max_hidden_share
        )
        return (replay, during) if tells else None


def _steps_within(replay: Replay, within: tuple[int, int]) -> Flags:
    """Flag the steps from a first to a last iteration, (step,)."""
    return (replay.steps >= within[0]) & (replay.steps <= within[1])


def _misses_the_step(replay: Replay, during: Flags) -> bool:
    """Return whether the replay of the steps `during`, (step,), is much longer or shorter than they
    were: communication that takes waiting as its own hides what a slow device costs.
    """
    return abs(float(np.median(replay.error_ratio[during]))) > COSTS.max_replay_error


def _of_the_step(replay: Replay, during: Flags, saving: Saving) -> float:
    """Return by what factor the job gets faster with quicker transfers, at least 1.

    A replay that is a little longer than the steps `during`, (step,), leaves out what goes on
    beside slow transfers, which quick ones do not have. Example: 272 ms a step, in truth 261, and
    235 with quicker transfers, in truth as well: 1.109.
    """
    longer = float(np.median(replay.error_ratio[during]))
    known = COSTS.usual_replay_error < longer <= COSTS.max_replay_error
    return max(1.0, saving.speedup / (1.0 + longer * known))


def _holds_compute(replay: Replay) -> bool:
    """Return whether passes are in the graph. Without, computing is in the gaps between spans."""
    return any(node.is_local and node.optype not in UNSEEN_WAITS for node in replay.graph.nodes)


def _gaps(replay: Replay) -> Flags:
    """Flag the nodes that stand for a rank's time between spans, (node,)."""
    return np.array([node.optype == HOST for node in replay.graph.nodes])


def _gaps_hold(replay: Replay, ranks: tuple[int, ...], during: Flags, lost_ns: float) -> bool:
    """Return whether the time of `ranks` between spans exceeds that of the others by a good part of
    `lost_ns`, which they are known to lose there in an iteration.

    Example: a profile of DDP. Rank 0 loses 370 ms to its host, beside an all-reduce that is under
    way for 390; in the graph all ranks have 40 ms between spans.
    """
    sums_s = _time_by_rank(replay, _gaps(replay))[:, :, during].mean(axis=-1)  # (stage, lane)
    own = replay.mask(ranks)
    if own.all():
        return True
    excess_s = float(sums_s[own].mean()) - float(np.median(sums_s[~own]))
    return excess_s >= COSTS.least_held_share * lost_ns / NS_PER_S


def _hidden_wait(replay: Replay, ranks: tuple[int, ...], during: Flags) -> float:
    """Return the share of the steps `during`, (step,), that ranks other than `ranks` spend between
    spans, in the stage where it is largest.

    The median over a stage's ranks counts: if they wait between spans, all of them do, while one
    rank alone may have gaps for reasons of its own.
    """
    stage, gaps = replay.graph.stage, _gaps(replay)
    others = ~replay.mask(ranks)
    steps = ordinary(replay.traced_s, during)
    step_s = float(replay.traced_s[steps].mean())
    lost_s = replay.weights[:, :, steps].mean(axis=-1)  # (node, lane)
    shares = [
        lost_s[gaps & (stage == number)].sum(axis=0)[of_stage] / step_s
        for number, of_stage in enumerate(others)
    ]
    return float(max((np.median(share) for share in shares if len(share)), default=0.0))
