"""What a cause is, and how a claim of its search becomes a finding: place, time, cost, advice.

The detector walks over its `CAUSES`. Each search gets an `Inquiry` and returns an `Answer`; rows
that an earlier search found slow are handed to the later searches, because a rank that waits for a
slow rank is not at fault. A cause in one file:

    def _search(inquiry: Inquiry) -> Answer: ...

    FANS = CauseSpec(cause=Cause.FANS, search=_search)

**Cost.** The first estimate of what a finding costs the step needs the trace alone:

    saved(t)  = max(0, max over all ranks B(t) − max over all ranks B'(t))
    cost      = mean iteration time / (mean iteration time − mean saved)

with B the compute of a rank in iteration t and B' what it would be at the peers' speed: the step
shrinks by what the suspect is above the next busiest rank. Example: 100 ms of compute against 80 ms
of its peers in a step of 110 ms saves 20 ms: cost 110 / 90 = 1.22.

Limits: a pipeline's order of operations is not replayed, so two slow ranks that hide behind each
other look cheaper than they are, and excess that lands in a bubble looks dearer. Where the
dependency graph can be replayed (`detect.whatif.savings`), the replay's answer is taken.

What findings mean for each other is said in `detect.causes.together`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from detect.observe.members import Members
from detect.observe.observations import Observations
from detect.report import Cause, Finding, Owner
from detect.stats.noise import Noise
from detect.stats.robust import ordinary
from detect.stats.stretches import Course, least_beyond_bursts
from detect.text import HIDES, NOT_SHOWN, percent
from detect.thresholds.adjustable import DetectorSettings
from detect.thresholds.devices import ORDINARY, PAIRS
from detect.thresholds.networks import LINKS, NETWORKS
from detect.thresholds.statistics import POWER
from detect.thresholds.verdicts import COSTS, TRUST
from megascan.arrays import Flags, Floats, Integers, mask_of


@dataclass(frozen=True, kw_only=True)
class Inquiry:
    """What a search is given."""

    seen: Observations
    settings: DetectorSettings
    num_tests: int
    """Rows times causes that are tested: significance is controlled over all of them."""
    slow: Flags
    """(row,): who is already known to compute slowly."""
    found: tuple[Finding, ...] = ()
    """What earlier searches found."""

    @cached_property
    def named(self) -> Flags:
        """Flag the rows that a finding of an earlier search names, of whatever cause, (row,)."""
        return rows_of_findings(self.seen.members, self.found)

    @cached_property
    def blamed(self) -> Flags:
        """Flag the rows whose node an earlier search blames, for whatever cause, (row,)."""
        blaming = [one for one in self.found if one.owner is Owner.NODE]
        return rows_of_findings(self.seen.members, blaming)

    def named_for(self, cause: Cause) -> Flags:
        """Flag the rows whose node an earlier search blames for a `cause`, (row,)."""
        blaming = [one for one in self.found if one.cause is cause and one.owner is Owner.NODE]
        return rows_of_findings(self.seen.members, blaming)

    @property
    def least_of_links(self) -> float:
        """Return from which slowdown on a connection is slow: on CPUs transfers vary by more."""
        is_cpu = self.seen.members.device_kind == "cpu"
        return max(self.settings.min_link_slowdown, LINKS.cpu_min_slowdown if is_cpu else 1.0)

    def detectable_effect(self, noise: Noise) -> float:
        """Return the smallest lasting effect that would have been found, in the values' units.

        The significance level is that of the first of `2 * num_tests` tests: the whole window and
        stretches of it are tested. Example: noise of 0.4 % over 18 iterations and 32 tests give
        0.006. If sound ranks also differ by 0.4 % for good, it is 0.026, most of it not from noise
        in time.
        """
        settings, num_iterations = self.settings, len(self.seen.iterations)
        p_value = settings.false_discovery_rate / max(2 * self.num_tests, 1)
        return max(
            noise.detectable(num_iterations, p_value, settings.power),
            least_beyond_bursts(noise, num_iterations, p_value),
        )

    def limited_by(self, noise: Noise) -> str:
        """Say what keeps the detectable effect from being smaller, as part of a sentence."""
        num_iterations = len(self.seen.iterations)
        if noise.between > noise.chance(num_iterations):
            return f"sound ranks differ by {noise.between:.1%} for good"
        varied = float(np.median(noise.sigma))
        return f"{num_iterations} iterations were traced, and a rank's vary by {varied:.0%} each"


def rows_of_findings(members: Members, findings: Iterable[Finding]) -> Flags:
    """Flag the rows that some findings name, (row,)."""
    rows = members.rows_with(rank for finding in findings for rank in finding.ranks)
    return mask_of(list(rows), len(members))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a search returns. The default says: nothing was found, nothing can be said."""

    findings: tuple[Finding, ...] = ()
    least_slowdown: float | None = None
    """Smallest slowdown that would have been found; None where the trace cannot tell."""
    least_named: float | None = None
    """Smallest slowdown for which a node would have been named; None where no node would be."""
    least_because: str = ""
    """What keeps `least_slowdown` from being smaller, as part of a sentence: "6 iterations that
    vary by 20 % each"."""
    unseen: tuple[int, ...] = ()
    """Ranks that would not be found however slow they were, while other ranks would."""
    hides: str = ""
    """What slowdown of a size that matters the trace could not have shown, as part of a sentence;
    if set, finding nothing does not mean that the job is healthy."""
    caveat: str = ""
    """What slowdown that is worth a word the trace could not have shown, as part of a sentence; it
    is said beside the job's health."""
    slow: Flags | None = None
    """(row,): who computes slowly, for the searches that follow."""
    notes: tuple[str, ...] = ()
    """What this trace could not have shown, one sentence each."""
    explains: Callable[[Finding], bool] = lambda finding: False
    """Which findings of earlier searches are parts of the findings here, and are left out."""


def answer_of_groups(
    members: Members, findings: Sequence[Finding], ranks: Collection[int]
) -> Answer:
    """Return the answer of a search for the slow ranks of groups, whose `ranks` wait for these: all
    of them are slow, and what was undecided of them is explained.
    """
    explained = set(ranks)
    return Answer(
        findings=tuple(findings),
        slow=mask_of(list(members.rows_with(explained)), len(members)),
        explains=lambda one: (
            one.owner is Owner.UNDECIDED and bool(one.ranks) and set(one.ranks) <= explained
        ),
    )


@dataclass(frozen=True, kw_only=True)
class CauseSpec:
    """One cause as the detector, the report and the page use it."""

    cause: Cause
    search: Callable[[Inquiry], Answer]
    tests_rows: Callable[[Observations], bool] = lambda seen: False
    """Whether every row is tested, which counts in `Inquiry.num_tests`."""
    power_words: str = ""
    """What would have been found, for the page's table of power: "a rank waits for its data"."""
    quantity: str = ""
    """What `Observations.lost_ns` of the cause is called on a chart: "data loading"."""


LEFT_OPEN = "by its passes alone this was left open: {statement}"
"""Said where a reading decides what was undecided."""
UNDECIDED_WHY = ", undecided why"
UNDECIDED_WHOSE = ", undecided whose fault that is"
A_LITTLE_SLOWER = (
    "where connections share a port or a switch, one of them may always meet others, and be slower "
    "by as much"
)
GAIN_NOT_SHOWN = (
    "nothing shows that mending it would gain anything, and sound hosts differ by as much: look at "
    "it, but drain nothing for it"
)
NO_GAIN = (
    "mending it would gain next to nothing, and sound hosts and connections differ by as much: "
    "look at it, but drain nothing for it"
)
ADVICE_ON_MODELS = (
    "give each GPU as much work as it is quick for, or run the job on GPUs of one model: the whole "
    "job waits for the slower ones",
)
OTHERS_WAIT = (
    "another rank is slow, or loses time, and others wait for it: mend that first, then trace "
    "again and see whether this remains"
)
SMALL_AND_FREE = (
    "sound devices of one model, or the data of so few iterations, may differ by as much, and "
    "mending this one would gain next to nothing: no reason to change a node"
)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A finding before place, time and cost are put in.

    `subject` and `predicate` make the statement: "rank 5 (…)" "computes 1.31x slower than its 3
    peers". `rows` are the ranks' rows in the observations; `saved_ns` (iteration,) is the gain of
    each iteration without it.
    """

    ranks: tuple[int, ...]
    rows: tuple[int, ...]
    cause: Cause
    owner: Owner
    slowdown: float
    interval: tuple[float, float]
    course: Course | None
    """When it holds; None is the whole window."""
    q_value: float
    num_peers: int
    saved_ns: Floats
    subject: str
    predicate: str
    whose: str = ""
    """What is undecided about it, said after the iterations in which it holds."""
    evidence: tuple[str, ...]
    advice: tuple[str, ...]
    """What to do, in the order in which it is worth doing."""
    is_replayed: bool = True
    """Whether a replay with the ranks brought to their peers' times tells the cost."""
    is_bound: bool = False
    """Whether the true slowdown may be larger."""
    is_read: bool = False
    """Whether the device's own clock shows that the device is slow."""
    most_cost: float = np.inf
    """What an iteration may take at most, as a multiple of what it would take without the fault."""
    is_border: bool = False
    """Whether only what crosses the border of these ranks' host is slower."""
    is_pair: bool = False
    """Whether it is about the connection of two ranks, either of which may be at fault."""
    is_inside: bool = False
    """Whether only what stays inside these ranks' host is slower, with whomever."""
    slow_passes_ratio: float = 1.0
    """How many times as long as usual single passes take, where a rank is slow now and then."""
    recurs: bool = False
    """Whether it comes back all the time, so that its cost is that of an iteration of the whole
    window, not of those in which it came."""


@dataclass(frozen=True)
class When:
    """First and last iteration, episodes, and whether the trace shows the beginning."""

    first: int
    last: int
    share: float
    episodes: tuple[tuple[int, int], ...]
    begins: bool
    ends: bool
    rises_until: int | None = None
    """The iteration until which it rose to its level, where it is not there at once."""

    @property
    def words(self) -> str:
        """Return the ending of a statement: "since iteration 45"."""
        if self.first == self.last:
            return f"in iteration {self.first}"
        if len(self.episodes) > 1:
            return f"on and off between iterations {self.first} and {self.last}"
        rising = "" if self.rises_until is None else f" (rising until {self.rises_until})"
        if self.begins and self.ends:
            return f"in iterations {self.first} to {self.last}{rising}"
        if self.begins:
            return f"since iteration {self.first}{rising}"
        if self.ends:
            return f"until iteration {self.last}"
        return f"in all traced iterations ({self.first} to {self.last})"


def when(course: Course | None, iterations: Integers) -> When:
    """Return the iterations of a course (its episodes are slots); None is the whole window."""
    if course is None:
        return spanning(iterations, int(iterations[0]), int(iterations[-1]))
    episodes = tuple((int(iterations[one]), int(iterations[end])) for one, end in course.episodes)
    whole = spanning(iterations, episodes[0][0], episodes[-1][1])
    return replace(whole, share=course.share, episodes=episodes)


def _since_it_rose(timing: When, course: Course | None, iterations: Integers) -> When:
    """Return the iterations of a course from the one in which it began to rise to its level."""
    if course is None or course.rise is None:
        return timing
    first, until = (int(iterations[one]) for one in course.rise)
    return replace(
        timing, first=first, begins=True, episodes=((first, timing.last),), rises_until=until
    )


def spanning(iterations: Integers, first: int, last: int) -> When:
    """Return that something holds from iteration `first` to `last` of the traced `iterations`."""
    return When(
        first=first,
        last=last,
        share=1.0,
        episodes=((first, last),),
        begins=bool(first > iterations[0]),
        ends=bool(last < iterations[-1]),
    )


def saved_by_compute(seen: Observations, row: int, excess_ns: Floats) -> Floats:
    """Return the iteration time saved, (iteration,), if a row computed `excess_ns` less."""
    busy = np.nan_to_num(seen.busy_ns)
    better = busy.copy()
    better[_waiting_with(seen, row)] -= excess_ns
    saved_ns = np.maximum(busy.max(axis=0) - better.max(axis=0), 0.0)
    return np.asarray(np.minimum(saved_ns, _most_saved(seen, row)))


def _most_saved(seen: Observations, row: int) -> Floats:
    """Return by how much iterations may be shorter without a slow row, (iteration,): by what its
    replicas wait at most. Infinite where nobody knows that.

    Profiles of data-parallel jobs have no replay, and gradients that take longer than computing
    hide what a rank is late. Example: a rank computes 10 ms longer; its replicas' reductions, which
    last for most of the step, wait for 6 ms, and the step would be 6 ms shorter.
    """
    layout, others = seen.members.layout, np.arange(len(seen.members)) != row
    unknown = np.full(len(seen.iterations), np.inf)
    if seen.split_wait_ns is None or seen.tells_passes or np.any(seen.unsplit_ns):
        return unknown
    if layout.dp < layout.world_size or not others.any():
        return unknown
    waited_ns = np.nan_to_num(seen.split_wait_ns) + np.nan_to_num(seen.host_gap_ns)
    return np.asarray(np.median(waited_ns[others], axis=0))


def _waiting_with(seen: Observations, row: int) -> Flags:
    """Flag the row, or its whole TP group where waiting hides in compute spans."""
    mine: Flags = np.arange(len(seen.members)) == row
    if not (seen.entangled_phases or seen.holds_tensor_waits):
        return mine
    group = seen.members.tensor_group
    return np.asarray(group == group[row])


def counted_window(seen: Observations, first: int, last: int) -> tuple[int, int]:
    """Return first and last iteration over which the cost of a finding is taken.

    The finding holds from `first` to `last`. The run's warm-up, which is long for everybody, does
    not count, unless the finding holds in no other iteration.
    """
    first_settled = seen.num_warmup_iterations + 1
    is_left = seen.within([(first_settled, last)]).any()
    return (max(first, first_settled) if is_left else first), last


def cost_ratio(seen: Observations, saved_ns: Floats, within: tuple[int, int]) -> float:
    """Return iteration time divided by iteration time without the finding; 1 if it costs nothing.

    Iterations from `within[0]` to `within[1]` count; `saved_ns`, (iteration,), is what each gains.
    """
    holds = seen.within([within])
    left_ns = np.maximum(seen.iteration_ns - saved_ns, 0.0)  # an estimate may exceed the iteration
    holds = ordinary(left_ns, holds)
    total = float(np.mean(seen.iteration_ns[holds]))
    if total <= 0:
        return 1.0
    saved = min(max(float(np.mean(saved_ns[holds])), 0.0), COSTS.max_saved_share * total)
    return total / (total - saved)


def ratio_without(share: float) -> float:
    """Return an iteration's time over its time without a share of it: 0.2 gives 1.25."""
    return 1.0 / (1.0 - min(share, COSTS.max_saved_share))


def ratio_of_half_speed(share: float) -> float:
    """Return the iteration time over what it would be, if connections in which so large a share of
    it goes ran at half their speed.
    """
    return ratio_without(share * (1.0 - 1.0 / NETWORKS.half_speed_ratio))


def replayed_half_speed(
    seen: Observations, ranks: tuple[int, ...], *, inside: bool = False
) -> float | None:
    """Return the same ratio by a replay with twice as quick transfers of `ranks` (`inside` their
    hosts); None where nothing can be replayed, or the trace hides who waits.
    """
    if seen.costs is None or seen.hides_waiting:
        return None
    window = int(seen.iterations[0]), int(seen.iterations[-1])
    return seen.costs.ratio_of_transfers(ranks, NETWORKS.half_speed_ratio, window, inside=inside)


def is_costly(share: float) -> bool:
    """Return whether an iteration without that share of it would be shorter by so much that finding
    nothing does not mean health, as long as the share may be lost unseen.
    """
    return ratio_without(share) >= POWER.healthy_ratio


def _replayed(seen: Observations, claim: Claim, within: tuple[int, int]) -> float | None:
    """Return what an iteration takes over what it would take without the claim, by replay of the
    iterations `within`; None where no replay tells.
    """
    if not seen.costs or not claim.is_replayed:
        return None
    if claim.is_border or claim.is_inside:
        return seen.costs.ratio_of_transfers(
            claim.ranks, claim.slowdown, within, inside=claim.is_inside
        )
    return seen.costs.ratio(
        claim.ranks,
        (claim.cause,),
        within,
        float(np.mean(claim.saved_ns)),
        claim.slowdown if claim.cause in (Cause.COMPUTE, Cause.LINK) else np.inf,
    )


def _falls_short(seen: Observations, claim: Claim, replayed: float, estimate: float) -> bool:
    """Return whether a replay leaves out what others wait for slow or late ranks, or for a slow
    connection, inside their passes and optimizer steps.

    Example: of two replicas with sharded parameters one computes 1.84 times slower, and the other's
    backward passes are longer still, 48 ms of which 17 are layers: with that rank quicker the
    replay is 1.03 times as fast, and a true step 1.7 times. Or a rank loses 58 of 196 ms in
    messages and rings, its TP mates wait for it where nothing was recorded, and the replay, to
    which that is their work, gains nothing.
    """
    if claim.cause == Cause.LINK:
        return bool(seen.hidden_axes) and replayed < COSTS.least_of_network_ratio <= estimate
    return seen.waits_between_layers and estimate > replayed


def _cost(seen: Observations, claim: Claim, within: tuple[int, int]) -> tuple[float, bool]:
    """Return what an iteration `within` takes over what it would take without the claim, and
    whether a replay tells; an estimate does otherwise.
    """
    replayed, estimate = _replayed(seen, claim, within), cost_ratio(seen, claim.saved_ns, within)
    if replayed is None or _falls_short(seen, claim, replayed, estimate):
        if claim.cause == Cause.LINK:
            estimate = min(estimate, claim.slowdown)  # were the step nothing but such transfers
        return min(estimate, claim.most_cost), False
    # mending the ranks mends whatever else is slow on them, too
    cost = min(replayed, estimate) if claim.cause == Cause.LOADER else replayed
    return min(cost, claim.most_cost), True


def build_finding(seen: Observations, claim: Claim) -> Finding:
    """Return the finding of a claim."""
    claim = _of_its_model(seen, claim)
    timing = when(claim.course, seen.iterations)
    reach = when(None if claim.recurs else claim.course, seen.iterations)
    timing = _since_it_rose(timing, claim.course, seen.iterations)
    cost, is_replayed = _cost(seen, claim, counted_window(seen, reach.first, reach.last))
    slowed = slowed_by(seen, reach.first, reach.last)
    return Finding(
        ranks=claim.ranks,
        cause=claim.cause,
        owner=claim.owner,
        slowdown=claim.slowdown,
        slowdown_interval=claim.interval,
        first_iteration=timing.first,
        last_iteration=timing.last,
        share_of_iterations=timing.share,
        q_value=claim.q_value,
        step_time_cost_ratio=cost,
        statement=f"{claim.subject} {claim.predicate} {timing.words}{claim.whose}; "
        f"{gain(slowed, cost, is_replayed=is_replayed)}",
        evidence=claim.evidence,
        next_steps=claim.advice,
        coordinates=shared_place(seen, claim.rows),
        host=", ".join(sorted({seen.members.hosts[row] for row in claim.rows})),
        device=devices_of(seen.members, claim.rows),
        num_peers=claim.num_peers,
        onset_in_trace=timing.begins,
        episodes=timing.episodes,
        cost_is_replayed=is_replayed,
        slowdown_is_bound=claim.is_bound,
        is_read=claim.is_read,
        is_pair=claim.is_pair,
        is_inside=claim.is_inside,
        slow_passes_ratio=claim.slow_passes_ratio,
    )


def _of_its_model(seen: Observations, claim: Claim) -> Claim:
    """Return the claim, or that of the job where devices that compute slowly throughout are of
    another model than most of those beside them: whoever placed the job chose them.

    Example: 8 A100 beside 8 GB200. One of them that is slow beside the other A100 as well, by half
    of what it is slow by, stays the node's.
    """
    members, rows = seen.members, list(claim.rows)
    lasts = claim.course is None or bool(claim.course.active.all())
    if claim.owner is not Owner.NODE or claim.cause is not Cause.COMPUTE or not (lasts and rows):
        return claim
    beside = np.isin(members.stage, members.stage[rows])
    beside[rows] = False
    if not beside.any():
        beside = ~mask_of(rows, len(members))
    models = np.array(members.devices)
    own, usual = str(models[rows[0]]), Counter(models[beside].tolist()).most_common(1)
    if not usual or not own or not usual[0][0] or own == usual[0][0]:
        return claim
    busy_ns = np.median(np.nan_to_num(seen.busy_ns), axis=1)
    alike = beside & (models == own)
    least = float(np.exp(PAIRS.agrees_share * np.log(claim.slowdown)))
    if alike.any() and np.median(busy_ns[rows]) >= least * np.median(busy_ns[alike]):
        return claim
    words = (
        f"its GPU is another model ({own}) than most of those beside it ({usual[0][0]}): how quick "
        "each of them is, whoever placed the job chose"
    )
    return replace(
        claim, owner=Owner.JOB, evidence=(*claim.evidence, words), advice=ADVICE_ON_MODELS
    )


def more_iterations(seen: Observations) -> str:
    """Say how to record more iterations in a row: profiles have no option for that."""
    if seen.tells_passes:
        return "trace more iterations in a row (--continuous-trace-iterations 10)"
    return "profile more steps in a row (active of torch.profiler.schedule)"


def slowed_by(seen: Observations, first: int, last: int) -> str:
    """Say what a cost from iteration `first` to `last` falls on: the job, or these iterations."""
    is_lasting = first <= seen.iterations[0] and last >= seen.iterations[-1]
    these = "this iteration" if first == last else "these iterations"
    return "the job" if is_lasting else these


def gain(slowed: str, cost: float, *, is_replayed: bool) -> str:
    """Say what is gained without a finding that costs so much: "without it the job would be …".

    `slowed` is what `slowed_by` says; `is_replayed` whether a replay told the cost.
    """
    if cost < COSTS.next_to_nothing_ratio and not is_replayed:
        return NOT_SHOWN
    if cost < COSTS.next_to_nothing_ratio:
        return f"{HIDES} and costs the step next to nothing"
    return f"without it {slowed} would be {faster(cost)}"


def faster(cost: float) -> str:
    """Return 1.22 as "about 22 % faster", and 2.5 as "2.5x as fast"."""
    if cost >= COSTS.as_fast_ratio:
        return f"{cost:.1f}x as fast"
    return f"about {percent(cost)} faster"


def shared_place(seen: Observations, rows: tuple[int, ...]) -> dict[str, int]:
    """Return the coordinates that all rows have in common."""
    places = [seen.members.coordinates(row) for row in rows]
    if not places:
        return {}
    return {
        axis: value
        for axis, value in places[0].items()
        if all(place[axis] == value for place in places)
    }


def placed_at(finding: Finding, members: Members, row: int) -> Finding:
    """Return the finding of a group on one rank of it, a row of `members`: at the rank's place."""
    return replace(
        finding,
        coordinates=members.coordinates(row),
        host=members.hosts[row],
        device=devices_of(members, [row]),
    )


def devices_of(members: Members, rows: Iterable[int]) -> str:
    """Return "NVIDIA H200 #3, NVIDIA H200 #5", what some rows run on."""
    return ", ".join(
        sorted({f"{members.devices[row]} #{members.device_index[row]}" for row in rows})
    )


def decided(
    seen: Observations,
    of: Finding,
    ranks: tuple[int, ...],
    *,
    cause: Cause,
    statement: str,
    evidence: tuple[str, ...],
    advice: tuple[str, ...],
) -> Finding:
    """Return an undecided finding as that of the nodes of some ranks, for a cause that a reading
    tells; what it said before ends its evidence.
    """
    members = seen.members
    rows = members.rows_with(ranks)
    return replace(
        of,
        ranks=ranks,
        cause=cause,
        owner=Owner.NODE,
        statement=statement,
        evidence=(*evidence, LEFT_OPEN.format(statement=of.statement)),
        next_steps=advice,
        coordinates=shared_place(seen, rows),
        host=", ".join(sorted(members.hosts_of(ranks))),
        device=devices_of(members, rows),
    )


def settle(
    inquiry: Inquiry, decide: Callable[[Finding], Finding | None]
) -> tuple[list[Finding], list[Finding]]:
    """Return what findings of earlier searches become by a reading, and those that it settles.

    `decide` returns None for a finding of which the reading tells nothing. A node that is blamed
    already, by an earlier search or here, is not blamed again.
    """
    members, blamed = inquiry.seen.members, inquiry.blamed
    found, settled = list[Finding](), list[Finding]()
    for one in inquiry.found:
        decision = decide(one)
        if decision is None:
            continue
        settled.append(one)
        if decision.owner is Owner.NODE:
            rows = list(members.rows_with(decision.ranks))
            if blamed[rows].any():
                continue
            blamed = blamed | mask_of(rows, len(members))
        found.append(decision)
    return found, settled


def undecided(finding: Finding, why: str) -> Finding:
    """Return the finding with nobody to blame, and with the sentence that says why in evidence."""
    return replace(finding, owner=Owner.UNDECIDED, evidence=(*finding.evidence, why))


def undecided_if_free(finding: Finding, why: str, *, is_estimated: bool = False) -> Finding:
    """Return the finding, undecided where the step would be as long without it.

    The cost must come from a replay, or with `is_estimated` from the estimate.
    """
    is_free = finding.step_time_cost_ratio < COSTS.next_to_nothing_ratio
    is_known = finding.cost_is_replayed or is_estimated
    if finding.owner is not Owner.NODE or not is_known or not is_free:
        return finding
    return undecided(finding, why)


def undecided_if_small_and_free(
    seen: Observations, finding: Finding, findings: Sequence[Finding], min_slowdown: float
) -> Finding:
    """Return the finding, undecided where a device is a little slower and mending it gains nothing.

    This holds for few iterations or a single peer: sound devices of one model differ by a few per
    cent, and so do the documents of few iterations. The gain is that of mending the device alone or
    with those it hides behind. If no replay tells it, the device must be hardly slower than
    `min_slowdown`. Example: 1.039x in five iterations of a step that would be 0.2 % shorter.

    In some more iterations, or beside more peers, what gains little must be beyond doubt, whatever
    noise is at work. What is gained with others of the `findings` counts as far as these alone do
    not gain it.

    Where no communication was recorded, so that nobody knows who waits, only a device that is
    hardly slower than `min_slowdown` in few iterations counts as small. Unchanged where a low clock
    was read, passes are far slower now and then, or several devices are slow together by more than
    a little: chips do not differ so.
    """
    is_named = finding.owner is Owner.NODE and finding.cause is Cause.COMPUTE
    is_plain = finding.is_read or finding.slow_passes_ratio >= ORDINARY.at_times_ratio
    is_plain |= len(finding.ranks) > 1 and finding.slowdown >= ORDINARY.little_ratio
    if not is_named or is_plain:
        return finding
    is_small = _is_small_and_free(seen, finding, min_slowdown)
    if seen.transfers is None:
        is_few = len(seen.iterations) < ORDINARY.few_iterations
        is_least = finding.slowdown < min_slowdown**ORDINARY.small_floors
        return undecided(finding, SMALL_AND_FREE) if is_small and is_few and is_least else finding
    if is_small or _is_in_doubt(seen, finding, findings):
        return undecided(finding, SMALL_AND_FREE)
    return finding


def _is_small_and_free(seen: Observations, finding: Finding, min_slowdown: float) -> bool:
    """Return whether a device is a little slower and mending it gains nothing, in few iterations or
    beside one peer; or hardly slower than `min_slowdown`, in any number, while chance leaves doubt.

    Example: in 26 iterations 1.04 times beside 15 peers, q = 0.004, and no step would be shorter.
    """
    cost = max(finding.step_time_cost_ratio, finding.joint_cost_ratio)
    most = min_slowdown**ORDINARY.small_floors
    if len(seen.iterations) >= ORDINARY.few_iterations and finding.num_peers > 1:
        is_free = cost < ORDINARY.worthwhile_ratio and finding.slowdown < most
        return is_free and finding.q_value > TRUST.good_q
    if finding.cost_is_replayed:
        return cost < ORDINARY.worthwhile_ratio and finding.slowdown < ORDINARY.little_ratio
    return cost < COSTS.next_to_nothing_ratio and finding.slowdown < most


def _is_in_doubt(seen: Observations, finding: Finding, findings: Sequence[Finding]) -> bool:
    """Return whether a device is not much slower, mending it, alone or with those it hides behind,
    gains little, and not too many iterations leave it in doubt. Of 47 such names 11 were wrong.
    """
    if len(seen.iterations) >= ORDINARY.many_iterations:
        return False
    others = [one for one in findings if one != finding and {*one.ranks} <= {*finding.joint_ranks}]
    least = max((one.step_time_cost_ratio for one in others), default=1.0)
    cost = max(finding.step_time_cost_ratio, finding.joint_cost_ratio / least)
    is_sure = finding.q_value < ORDINARY.certain_q or finding.slowdown >= ORDINARY.plain_ratio
    return cost < ORDINARY.small_gain_ratio and not is_sure


def undecided_if_no_gain(finding: Finding) -> Finding:
    """Return the finding, undecided where one rank or more lose time to their host, or a network is
    slow, and mending it gains next to nothing.

    Ranks of a host-bound job differ by a little, and next to a slow network the messages of other
    hosts are late as well. A finding that gains nothing is worth a look, but not worth draining a
    node. Example: a rank loses 20 % of its passes to its host; the step would be 0.8 % shorter.
    An estimate says the same, if it is half of a per cent at most; beside one peer, which is always
    the quicker or the slower of two, as much as a replay. What a rank loses in each iteration is
    the most that it costs: a replay may gain more by a single pause, which is another matter.
    """
    if finding.owner is not Owner.NODE:
        return finding
    cost = max(finding.step_time_cost_ratio, finding.joint_cost_ratio)
    is_lone_host = finding.cause is Cause.HOST and len(finding.ranks) == 1
    if is_lone_host and finding.share_of_iterations == 1.0 and len(finding.episodes) == 1:
        cost = min(cost, finding.slowdown)
    if not finding.cost_is_replayed:
        of_two = finding.num_peers == 1
        least = COSTS.least_of_host_ratio if of_two else COSTS.least_estimated_ratio
        is_shown = finding.step_time_cost_ratio >= COSTS.next_to_nothing_ratio
        why = NO_GAIN if is_shown else GAIN_NOT_SHOWN
        return undecided(finding, why) if is_lone_host and cost < least else finding
    is_host = finding.cause is Cause.HOST
    least = COSTS.least_of_host_ratio if is_lone_host else COSTS.least_of_whole_host_ratio
    is_network = finding.cause is Cause.LINK and len(finding.ranks) != 2  # no pair told by others
    gains_nothing = (is_host and cost < least) or (
        is_network and cost < COSTS.least_of_network_ratio
    )
    return undecided(finding, NO_GAIN) if gains_nothing else finding


def undecided_if_little(finding: Finding, *, is_few: bool) -> Finding:
    """Return the finding of a slow connection, undecided where it is slower by no more than one
    that always meets others at a port or a switch; in few iterations (`is_few`) that may be more.
    """
    least = LINKS.named_in_few if is_few else LINKS.named_slowdown
    is_little = finding.owner is Owner.NODE and finding.slowdown < least
    return undecided(finding, A_LITTLE_SLOWER) if is_little else finding


def connection_advice(seen: Observations, ranks: tuple[int, ...]) -> tuple[str, ...]:
    """Return what to do about a slow connection of these ranks."""
    has_gpu = seen.members.device_kind != "cpu"
    if len(ranks) > 1 and seen.members.are_inside_a_host(ranks):
        return (
            "run all_reduce_perf (nccl-tests) on pairs of that host's GPUs, with the job away: who "
            "is slow with each of the others is at fault",
            "read the links' error counters and speeds on that host: nvidia-smi nvlink -e, "
            "nvidia-smi nvlink -s, nvidia-smi topo -m",
        )
    test = "all_reduce_perf (nccl-tests)" if has_gpu else "iperf3"
    where = "between these two hosts" if len(ranks) == 2 else "from that host to two others"
    return (
        f"run {test} {where} and between two hosts that are fine",
        "read the ports' error and congestion counters (ethtool -S, ibstat, perfquery)"
        + ("; nvidia-smi nvlink -e on that host" if has_gpu else ""),
    )
