"""Find hosts that stop their ranks, now one of them and now another.

Problem: a host that is short of memory, or shared with another job, stops whichever process it
meets. Each rank has too few pauses for a proof, and where no modules were recorded, the pauses lie
inside passes.

Idea: count pauses by host, as `detect.causes.bursts` does by rank: in how many iterations does some
rank of the host pause, compared with the other hosts? Time between operations is counted first,
then passes: how far each pass lies above the quiet quarter of its own rank's passes, less what
three quarters of all ranks exceed.

Ranks of one TP group may wait for each other where nobody records it, and so may those of a CP or
EP group. But a rank that waits exceeds the rank that it waits for by noise at most, so the lead
must change: most ranks of the host lead in some pass, and none leads most of the time. Or several
replicas pause, none of which waits for another there.

A rank that has most of the pauses has them for reasons of its own (a collector, a logger). Where
the others alone would not stand out, the host is undecided; not if it is sure as a whole, two
others pause as well, and no other host loses a quarter as much.

For a host that loses a twentieth of all time, the pauses of its ranks, each counted by itself, are
a proof as well: more than half of the ranks have some, so they are no single rank's.

Example: 4 hosts of 4 ranks, 10 iterations. On host 2 passes of every rank take up to 1.6 times as
long, in 6 iterations, others elsewhere never more than 1.02 times: p = 1e-5.

**Noise.** All hosts of a job may be noisy, and of a few one is always the noisiest. Where a pause
shows depends on the stage: between operations where devices wait for their hosts anyway, elsewhere
inside passes. So what ranks lose in either way is added up, and a host compared with the one that
loses most of the others (`_Noise`). A host whose stages are on no other one must lose three times
as much. Where it does, and a twentieth of all time in two iterations or more, that is no chance,
however few they are. Example: a sound host has all of the job's gaps, 5 % of an iteration, but its
passes lose 21 % of it and those of the other host 10 %: 2.3 times as much in all. Hosts that were
short of memory lost 5 to 40 times as much as the next one.

Limits: pauses inside passes of ranks with experts may be tokens that a router sends them: the host
is undecided then. The first stage alone loads, the last one computes the loss. A host that holds
one is named for pauses in backward passes, in which neither happens, and for others where no work
of an end explains them (`_is_no_work_of_an_end`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from detect.causes.finding import (
    Answer,
    Claim,
    Inquiry,
    build_finding,
)
from detect.causes.hits import (
    FEW,
    Burst,
    Tally,
    chance,
    course_of,
    how_often,
    interval_of,
    lost_share,
    over_own_level,
)
from detect.causes.launching import may_wait_unseen
from detect.causes.searches import ADVICE
from detect.observe.axes import cut
from detect.observe.members import Members
from detect.observe.observations import Observations
from detect.observe.operations import BACKWARD, Work
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.text import counted, milliseconds
from detect.thresholds.bursts import BURSTS
from detect.thresholds.devices import PAIRS
from detect.thresholds.hosts import HOSTS
from detect.thresholds.observing import PACE
from megascan.arrays import Flags, Floats, Integers
from megascan.errors import listed

ALONE = (
    "its pipeline stages are on no other host: work of theirs alone that varies (loading, the "
    "output layer) may be the reason as well"
)
ROUTED = (
    "a router sends its ranks more tokens in some passes than in others: their experts would show "
    "the same"
)
NOISY = (
    "ranks of other hosts stand still as well, inside passes: where all hosts are noisy one is "
    "always the noisiest, and whether its pauses show between operations depends on its stage"
)
OF_STAGE = (
    "only ranks of one of its stages stand still, which no other host has, and those of its other "
    "stages never do: what that stage has to do may vary"
)
OF_LOADERS = (
    "just its ranks that load data (TP rank 0) stand still, and none that does not: batches that "
    "come late, from storage that all may share, would show the same"
)
LATE_DATA = (
    "some rank waits for its data for as long meanwhile: its mates, which wait for it inside "
    "passes where nobody recorded it, would show the same"
)
EARLY = (
    "most of its ranks pause only in the run's first iterations, in which each rank compiles and "
    "allocates for a time of its own"
)
OF_ONE = (
    "without one of its ranks the others pause no more often than those elsewhere: that rank's own "
    "work may be the reason as well"
)


@dataclass(frozen=True, kw_only=True)
class PausedHost:
    """A host whose ranks stand still now and then, now one and now another."""

    name: str
    rows: Integers
    burst: Burst
    """The burst with hosts as rows; a host's excess is that of its rank that loses most."""
    lost: Floats
    """(rank of the host, iteration): time lost in pauses beyond the others; 0 elsewhere."""
    is_of_one: bool
    """Whether the host would not stand out without one of its ranks."""
    in_passes: bool = False
    """Whether the pauses lie inside passes."""
    in_backward: bool = False
    """Whether backward passes alone show the host: in them nobody loads, embeds or computes a
    loss."""

    @property
    def pauses(self) -> Flags:
        """Flag the ranks of the host that have pauses."""
        return np.asarray((self.lost > 0).any(axis=1))

    @property
    def is_sure_of_several(self) -> bool:
        """Return whether chance is excluded for the host as a whole, and beside the rank that
        pauses most two others do: what that one does by itself stops no others.
        """
        return self.burst.is_sure and int(self.pauses.sum()) > HOSTS.min_ranks


@dataclass(frozen=True, kw_only=True)
class _Noise:
    """What the rank of each host loses that loses most, above its own quiet level, (host,) ns on
    the mean of the iterations.
    """

    everywhere_ns: Floats
    """Between operations, waiting for data, and inside passes."""
    inside_ns: Floats
    """Inside passes alone."""

    @classmethod
    def of(cls, seen: Observations) -> _Noise:
        """Add up what the ranks of each host lose."""
        inside_ns = _lost_inside_ns(seen.work, _over_quiet_passes(seen.work).clip(0.0))
        causes = [one for one in (Cause.HOST, Cause.LOADER) if one in seen.lost_ns]
        nobody = np.zeros(len(inside_ns), dtype=bool)
        between = over_own_level(lost_share(seen, causes), nobody) if causes else inside_ns * 0.0
        between = _without_collections(seen, between).clip(0.0)
        lost_ns = inside_ns + between * float(np.median(seen.iteration_ns))
        _, host = np.unique(seen.members.hosts, return_inverse=True)
        everywhere_ns, inside_ns = (
            np.array([time_ns[host == one].max(axis=0).mean() for one in range(host.max() + 1)])
            for time_ns in (lost_ns, inside_ns)
        )
        return cls(everywhere_ns=everywhere_ns, inside_ns=inside_ns)

    def explains(self, number: int, ratio: float) -> bool:
        """Return whether some other host loses a `ratio`-th of what host `number` does, or more."""
        return bool(
            self.everywhere_ns[number] < ratio * np.delete(self.everywhere_ns, number).max()
        )

    def explains_passes(self, number: int, ratio: float) -> bool:
        """Return the same of what is lost inside passes."""
        return bool(self.inside_ns[number] < ratio * np.delete(self.inside_ns, number).max())


def _paused_host(seen: Observations, known: Flags, rate: float) -> PausedHost | None:
    """Return the host whose ranks pause while those of the other hosts do not.

    Memory pressure, or a job of somebody else, stalls whichever process it meets: between passes,
    or, where no modules were recorded, inside them. Each rank has too few pauses for a proof, the
    host has enough. `known` rows are slow or lose time; others may wait for those on other hosts.
    """
    labels, host = np.unique(seen.members.hosts, return_inverse=True)
    names = labels.tolist()
    if len(names) < 2:
        return None
    if Cause.HOST in seen.lost_ns:
        lost = lost_share(seen, (Cause.HOST,))
        over = _without_collections(seen, over_own_level(lost, np.zeros_like(known)))
        paused = _pausing_host(over, names, host, rate)
        is_waiting = paused is None or _knows_others(paused, known, host)
        if paused is not None and not is_waiting and _by_themselves(seen, over, paused):
            return paused
    paused = _pausing_inside(seen, seen.work, names, host, rate)
    if paused is None or _knows_others(paused, known, host):
        return None
    backward = cut(seen.work, "operation", seen.work.phase == BACKWARD)
    again = _pausing_inside(seen, backward, names, host, rate)
    in_backward = again is not None and again.name == paused.name
    return replace(paused, in_passes=True, in_backward=in_backward)


def _knows_others(paused: PausedHost, known: Flags, host: Integers) -> bool:
    """Return whether ranks of other hosts are `known`, (row,), for whom this host's may wait. What
    was found of its own ranks, one by one or together, does not explain why they pause in turn.
    """
    return bool((known & (host != paused.burst.row)).any())


def _without_collections(seen: Observations, over: Floats) -> Floats:
    """Return `over`, (row, iteration), 0 where some rank collects garbage for at least as long: all
    wait for that rank.
    """
    longest = lost_share(seen, (Cause.GC,)).max(axis=0)
    return np.where(over > longest, over, 0.0)


def _pausing_inside(
    seen: Observations, work: Work, names: Sequence[str], host: Integers, rate: float
) -> PausedHost | None:
    """Return the host whose ranks pause inside their passes, if more than one rank of it does.

    Where only some layers stand for the passes, lost time is a share of them, not of the iteration.
    """
    over = _over_quiet_passes(work)
    lost_ns = _lost_inside_ns(work, over)
    has_passes = Cause.HOST in seen.lost_ns
    work_ns = np.nan_to_num(np.exp(work.log_ns)).sum(axis=2)
    whole_ns = np.median(seen.iteration_ns if has_passes else work_ns)
    apart = (over > _least_lead(over)).reshape(len(over), -1)
    paused = _pausing_host(lost_ns / max(float(whole_ns), 1.0), names, host, rate, apart)
    if paused is None:
        return None
    by_itself = _leads_change(over, paused.rows) or _is_of_several_replicas(seen, work, paused)
    return paused if by_itself else None


def _is_of_several_replicas(seen: Observations, work: Work, paused: PausedHost) -> bool:
    """Return whether a host pauses inside passes far more than any other even without the replica
    that pauses most, in a job where nobody waits there for a rank outside of its TP group.

    Mates that wait for each other all have their mates' pauses, and none leads. No rank of another
    replica does, nor has it the same data. Example: of four replicas of two ranks both ranks of one
    lose 20 % of an iteration, those of the others 6, 8 and 10 %, and none elsewhere more than 0.6.
    Not where nearly all passes are longer meanwhile, as on hot devices or for longer data.
    """
    layout = seen.members.layout
    if layout.cp > 1 or layout.ep > 1 or seen.hides_waiting:
        return False
    over = _over_quiet_passes(work)
    long = over[paused.rows][:, paused.burst.hits] > _least_lead(over)
    if float(long.mean()) > BURSTS.long_passes_share:
        return False
    lost_ns = _lost_inside_ns(work, over.clip(0.0)).mean(axis=1)
    replica = seen.members.replica[paused.rows]
    by_replica = sorted(lost_ns[paused.rows[replica == one]].max() for one in np.unique(replica))
    is_repeated = int(paused.burst.hits.sum()) >= BURSTS.min_hits
    least = BURSTS.beyond_noise_ratio * float(np.delete(lost_ns, paused.rows).max())
    return is_repeated and len(by_replica) > 1 and bool(by_replica[-2] >= least)


def _by_themselves(seen: Observations, over: Floats, paused: PausedHost) -> bool:
    """Return whether the ranks that pause are of several TP groups, or pause in turn, or take turns
    at pausing for longest by `over`, (row, iteration): otherwise all may wait for one of them.
    """
    groups = np.unique(seen.members.tensor_group[paused.rows[paused.pauses]])
    by_turns = in_turn(paused.lost) or _leads_change(over[:, :, None], paused.rows)
    return len(groups) > 1 or by_turns


def _pausing_host(
    over: Floats, names: Sequence[str], host: Integers, rate: float, apart: Flags | None = None
) -> PausedHost | None:
    """Return the host that loses most of `over`, (row, iteration), if most of its ranks do and
    those of the other hosts, numbered by `host` (row,), do not.

    Pauses count that are longer than noise; where other hosts have some of these, too, those that
    last a third as long as the host's typical one. Example: in 7 of 10 iterations some rank of a
    host loses 5 to 35 % of its passes; three other hosts have 7 iterations with 2 to 4 %.

    `apart` flags the ranks that pause where pauses are told more finely than by iteration, (row,
    event): in an iteration of many passes several ranks may pause, each by itself.
    """
    usual = float(np.quantile(robust.spread(over, axis=1), BURSTS.quiet_share))
    least = max(BURSTS.margin_share, BURSTS.margin_sigmas * usual)
    pauses = _Pauses(over=over, names=names, host=host, apart=apart)
    paused = _beyond(least, pauses, rate)
    if paused is not None and paused.burst.is_sure:
        return paused
    longest = max(pauses.by_host(least), key=lambda one: float(one.mean()))
    if not longest.any():
        return None
    typical = float(longest[longest > 0].mean())
    return _beyond(max(least, BURSTS.others_share * typical), pauses, rate / 2) or paused


@dataclass(frozen=True, kw_only=True)
class _Pauses:
    """What `_pausing_host` looks at."""

    over: Floats
    names: Sequence[str]
    host: Integers
    apart: Flags | None

    def by_host(self, least: float) -> Floats:
        """Return what the rank loses that loses most, if more than `least`, (host, iteration)."""
        lost = np.zeros((len(self.names), self.over.shape[1]))
        np.maximum.at(lost, self.host, np.where(self.over > least, self.over, 0.0))
        return lost


def _beyond(least: float, pauses: _Pauses, rate: float) -> PausedHost | None:
    """Return the host of `_pausing_host`, of pauses that lose more than `least`."""
    over, names, host = pauses.over, pauses.names, pauses.host
    lost_by_host = pauses.by_host(least)
    hits = over > least
    lost = np.where(hits, over, 0.0)
    number = int(np.argmax(lost_by_host.mean(axis=1)))
    own, excess = host == number, lost_by_host[number]
    if excess.mean() < BURSTS.least_host_share or not _most_pause(lost[own]):
        return None
    others = np.arange(len(names)) != number
    pauses_by_host, num_ranks = (lost_by_host > 0).sum(axis=1), np.bincount(host)
    tally = Tally.of(lost_by_host > 0, number, others)
    # of fewer ranks some pause less often: iterations of one rank are an eighth of those of eight
    weight = np.minimum(num_ranks / num_ranks[number], 1.0)
    num_alike = int(weight[others].sum() * over.shape[1])
    tally = replace(tally, num_others=max(num_alike, tally.other_hits))
    most_elsewhere = (pauses_by_host / weight)[others].max()
    is_next = most_elsewhere > PAIRS.agrees_share * pauses_by_host[number]
    if not tally.is_alone or is_next:
        return None
    by_chance = tally.by_chance
    apart = pauses.apart
    events = hits[own] if apart is None or not apart[own].any() else apart[own]
    in_one_go = float(events[:, events.any(axis=0)].mean()) > BURSTS.one_go_share
    if excess.mean() >= BURSTS.sure_host_share and not in_one_go:
        by_chance = min(by_chance, _chance_of_ranks(hits, own))
    q_value = min(1.0, by_chance * len(names))
    rest = _without_heaviest(own, lost)
    compared = rest | ~own
    rest_tally = replace(tally, num_hits=int(hits[rest].any(axis=0).sum()))
    rest_by_chance = min(rest_tally.by_chance, _chance_of_ranks(hits[compared], rest[compared]))
    burst = Burst(
        row=number,
        hits=excess > 0,
        excess=excess,
        q_value=q_value,
        others=others,
        other_hits=tally.other_hits,
        is_sure=q_value <= rate,
    )
    return PausedHost(
        name=names[number],
        rows=np.flatnonzero(own),
        burst=burst,
        lost=lost[own],
        is_of_one=rest_by_chance * len(names) > BURSTS.without_one_q,
    )


def _most_pause(lost: Floats) -> bool:
    """Return whether most ranks of a host pause, and none has nearly all that it loses in pauses,
    (rank, iteration), which would be that rank's own doing.
    """
    by_rank = lost.sum(axis=1)
    is_of_one = by_rank.max() > BURSTS.one_rank_share * by_rank.sum()
    return _most_pause_in(lost) and not bool(is_of_one)


def _most_pause_in(lost: Floats) -> bool:
    return bool(np.mean((lost > 0).any(axis=1)) >= BURSTS.most_of_host_share)


def _without_heaviest(own: Flags, lost: Floats) -> Flags:
    """Return a host's `own` rows, (row,), without the one that loses most in pauses."""
    rest, by_rank = own.copy(), lost.sum(axis=1)
    rest[np.argmax(np.where(own, by_rank, -np.inf))] = False
    return rest


def _chance_of_ranks(hits: Flags, own: Flags) -> float:
    """Return the probability of so many pauses on a host's `own` ranks, (row,), each rank's `hits`,
    (row, iteration), counted by itself.

    Example: 9 pauses in 6 iterations of 8 ranks, none on the 8 ranks of the other host: 3e-4.
    Counted by host, 5 of 6 iterations with a pause against 0 of 6, it would be 0.03. Not for ranks
    that pause in one go: two iterations in which all 8 do are 2 pauses, not 16.
    """
    mine, others = hits[own], hits[~own]
    return chance(int(mine.sum()), mine.size, int(others.sum()), others.size)


def _over_quiet_passes(work: Work) -> Floats:
    """Return how far each pass lies above its row's quiet ones, less what three quarters of all
    rows exceed in it, as a share of the pass, (row, iteration, operation).
    """
    over = np.expm1(np.nan_to_num(work.log_ns - _lower_quartile(work.log_ns, axis=1)))
    return np.asarray(over - _lower_quartile(over, axis=0))


def _lost_inside_ns(work: Work, over: Floats) -> Floats:
    """Return what the passes take longer that are `over` their quiet level, (row, iteration) ns."""
    return np.asarray((over / (1.0 + over) * np.nan_to_num(np.exp(work.log_ns))).sum(axis=2))


def _lower_quartile(values: Floats, axis: int) -> Floats:
    """Return the lower quartile along an axis, which stays; 0 where nothing is known."""
    known = np.where(np.isfinite(values), values, np.inf)
    low = np.quantile(known, BURSTS.quiet_share, axis=axis, keepdims=True, method="lower")
    return np.where(np.isfinite(low), low, 0.0)


def _leads_change(over: Floats, rows: Integers) -> bool:
    """Return whether the `rows` take turns at exceeding all others of them: most of them lead for a
    fair part, and none has most of the lead. `over` is (row, iteration, operation).

    A row that waits for another where nobody records it exceeds that other row by noise at most.
    """
    if len(rows) < HOSTS.min_ranks:
        return False
    second, first = np.sort(over[rows], axis=0)[-2:]
    lead = np.where(first - second > _least_lead(over), first - second, 0.0)
    leader = over[rows].argmax(axis=0)
    total = np.bincount(leader.reshape(-1), weights=lead.reshape(-1), minlength=len(rows))
    is_shared = total.max() <= BURSTS.most_of_host_share * total.sum()
    leads = (total > 0) & (total >= BURSTS.others_share * total.mean())
    return bool(is_shared and float(np.mean(leads)) > BURSTS.most_of_host_share)


def _least_lead(over: Floats) -> float:
    """Return by how much a pass of `over`, (row, iteration, operation), exceeds noise for sure."""
    usual = robust.spread(over.reshape(len(over), -1), axis=1)
    margin = BURSTS.margin_sigmas * float(np.quantile(usual, BURSTS.quiet_share))
    return max(BURSTS.margin_share, margin)


def in_turn(lost: Floats) -> bool:
    """Return whether the rows of `lost`, (row, iteration), pause in turn, while the others lose
    less. Ranks that wait for a mate where nobody records it lose time together with the mate.
    """
    lost = lost[:, (lost > 0).any(axis=0)]
    ordered = np.sort(lost, axis=0)
    turns = np.bincount(lost.argmax(axis=0))
    together = ordered[:-1].mean(axis=0) > BURSTS.others_share * ordered[-1]
    return not together.any() and turns.max() <= BURSTS.most_of_host_share * turns.sum()


def _finding(seen: Observations, paused: PausedHost) -> Finding:
    members, burst = seen.members, paused.burst
    ranks = members.ranks_of(paused.rows)
    lost_ns = burst.excess * float(np.median(seen.iteration_ns))
    doubts = _doubts(seen, paused)
    share = float(burst.excess.mean())
    return build_finding(
        seen,
        Claim(
            ranks=ranks,
            rows=tuple(paused.rows.tolist()),
            cause=Cause.HOST,
            owner=Owner.UNDECIDED if doubts else Owner.NODE,
            slowdown=1.0 + share,
            interval=interval_of(burst, share),
            course=course_of(burst, share),
            q_value=burst.q_value,
            num_peers=len(members) - len(paused.rows),
            saved_ns=lost_ns,
            subject=f"host {paused.name} (ranks {listed(ranks)})",
            predicate=f"stalls one or another of its ranks {how_often(burst)}, "
            f"{milliseconds(float(lost_ns[burst.hits].mean()))} each on the mean,",
            evidence=(
                f"{paused.pauses.sum()} of its {counted(len(paused.rows), 'rank')} stand still in "
                f"some; on the other {counted(int(burst.others.sum()), 'host')} {burst.other_hits} "
                "iterations lose as much",
                *doubts,
            ),
            advice=ADVICE[Cause.HOST],
        ),
    )


def _doubts(seen: Observations, paused: PausedHost) -> list[str]:
    """Return what else may be the reason of a host's pauses; none where nothing is."""
    doubts, number, noise = [], paused.burst.row, _Noise.of(seen)
    is_repeated = int(paused.burst.hits.sum()) >= BURSTS.min_hits
    is_heavy = is_repeated and paused.burst.excess.mean() >= BURSTS.sure_host_share
    is_beyond = is_heavy and not noise.explains(number, BURSTS.noise_ratio)
    if not (paused.burst.is_sure or is_beyond):
        doubts.append(FEW)
    if paused.is_of_one and not (is_beyond and paused.is_sure_of_several):
        doubts.append(OF_ONE)
    if paused.in_passes and seen.members.layout.ep > 1:
        doubts.append(ROUTED)
    later = seen.iterations > seen.num_warmup_iterations
    if not _most_pause_in(paused.lost[:, later]):
        doubts.append(EARLY)
    unseen = may_wait_unseen(seen, paused.rows, paused.burst.hits)
    doubts += [unseen] if unseen else []
    if paused.in_passes and _may_wait_for_loaders(seen, paused.burst):
        doubts.append(LATE_DATA)
    if paused.in_passes and _is_of_one_stage(seen.members, paused):
        doubts.append(OF_STAGE)
    if _are_those_that_load(seen.members, paused):
        doubts.append(OF_LOADERS)
    is_end = not paused.in_backward and _holds_an_end_alone(seen.members, paused.rows)
    is_work = noise.explains_passes(number, BURSTS.beyond_noise_ratio)
    if is_end and is_work and not _is_no_work_of_an_end(seen, paused):
        doubts.append(ALONE)
    stage = seen.members.stage
    are_elsewhere = np.isin(stage[paused.rows], np.delete(stage, paused.rows)).all()
    if not are_elsewhere and noise.explains(number, BURSTS.noise_ratio):
        doubts.append(NOISY)
    return doubts


def _may_wait_for_loaders(seen: Observations, burst: Burst) -> bool:
    """Return whether some rank loses as much to its loader as the host does inside passes, where
    waiting for mates is not recorded. Example: pauses of 7 % of an iteration, and 46 % lost to
    loading, by storage that is slow for all.
    """
    loading = lost_share(seen, (Cause.LOADER,)).max(axis=0)
    is_loading = float(np.median((loading - burst.excess)[burst.hits])) >= 0.0
    return bool(seen.hidden_axes) and is_loading


def _is_of_one_stage(members: Members, paused: PausedHost) -> bool:
    """Return whether all ranks that pause are of one stage of several of the host, which no other
    host has. A host stops whichever process it meets.
    """
    stages = members.stage[paused.rows]
    own = np.unique(stages[paused.pauses])
    is_elsewhere = np.isin(own, np.delete(members.stage, paused.rows)).any()
    return len(own) == 1 < len(np.unique(stages)) and not is_elsewhere


def _are_those_that_load(members: Members, paused: PausedHost) -> bool:
    """Return whether those of a host's ranks pause that load for their TP groups, two and more, and
    no other. A host stops whichever process it meets. Example: ranks 0, 2, 4 and 6 of eight, in TP
    groups of two.
    """
    loads = members.place["tp"][paused.rows] == 0
    is_alike = bool((paused.pauses == loads).all())
    return is_alike and bool((~loads).any()) and int(loads.sum()) >= HOSTS.min_ranks


def _is_no_work_of_an_end(seen: Observations, paused: PausedHost) -> bool:
    """Return whether nothing that only ends of a pipeline do explains the pauses: no router sends
    ranks more tokens than others, and either loading was recorded, on whatever ranks, and no other
    host pauses as long; or all ranks pause and hardly any elsewhere. Files that are read slowly
    would stop the other end, too, which loads as well. Nor do its ranks launch more slowly than all
    others, throughout: a stage that has more to launch runs out of work whenever it is a little
    late. Example: 1.4 to 1.9 times as long from launch to launch, and gaps in 7 of 10 iterations.
    """
    if paused.in_passes and seen.members.layout.ep > 1:
        return False
    if _launches_more_slowly(seen, paused.rows):
        return False
    other_hits, most = paused.burst.other_hits, BURSTS.other_end_share * paused.burst.hits.sum()
    if paused.pauses.all() and other_hits <= most:
        return True
    return other_hits == 0 and bool((np.nan_to_num(seen.lost(Cause.LOADER)) > 0).any())


def _launches_more_slowly(seen: Observations, rows: Integers) -> bool:
    """Return whether each of `rows` takes far longer from launch to launch than all other rows."""
    if seen.launch_pace is None:
        return False
    pace = robust.median(seen.launch_pace, axis=1)
    elsewhere = np.delete(pace, rows)
    if not np.isfinite(elsewhere).any():
        return False
    return float(np.nan_to_num(pace[rows]).min()) - float(np.nanmax(elsewhere)) >= PACE.slow_log


def _holds_an_end_alone(members: Members, rows: Integers) -> bool:
    """Return whether no other host has a part of the first or of the last stage, of which `rows`
    have some. Stages in between have nothing but layers, which all stages have.
    """
    stages = members.stage[rows]
    alone = stages[~np.isin(stages, np.delete(members.stage, rows))]
    return bool(np.isin(alone, (int(members.stage.min()), int(members.stage.max()))).any())


def search_pauses(inquiry: Inquiry) -> Answer:
    """Search hosts that stall their ranks; on GPUs only, as for single ranks."""
    seen, rate = inquiry.seen, inquiry.settings.false_discovery_rate
    if seen.members.device_kind == "cpu" or len(seen.iterations) < BURSTS.min_hits:
        return Answer()
    paused = _paused_host(seen, inquiry.slow | inquiry.named, rate)
    if paused is None:
        return Answer()
    finding = _finding(seen, paused)
    ranks = set(finding.ranks)
    return Answer(
        findings=(finding,),
        explains=lambda other: other.owner != Owner.NODE and set(other.ranks) <= ranks,
    )
