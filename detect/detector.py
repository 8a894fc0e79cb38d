"""From a timeline to a verdict: observe it, ask every cause, put the findings in order.

    timeline ── observe ──> observations ── steady, one_row_a_worker ──> judged window
             ── CAUSES: search ──> answers ── folded ──> findings, by owner and cost ──> report

A report says what stands out. A page also shows how everybody else did, and a comparison of two
traces needs the values of every rank in both: page and comparison take an `Examination`.

`CAUSES` are in the order of search and of the report's power line. The first search finds who
computes slowly and hands that to the others, because a rank that waits for a slow rank is not at
fault. What only some traces show (profiles, probes, several hosts, groups whose communication
nobody recorded) is declared here; the file that searches it is loaded where there are any.
docs/architecture.md says how to add a cause, step by step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from detect.causes import (
    awaited,
    bursts,
    compute,
    everywhere,
    imbalance,
    links,
    losses,
    nvlinks,
    optimizer,
    shares,
    unexplained,
)
from detect.causes.finding import (
    Answer,
    CauseSpec,
    Inquiry,
    rows_of_findings,
    undecided,
    undecided_if_no_gain,
    undecided_if_small_and_free,
)
from detect.causes.searches import in_all_passes
from detect.causes.together import (
    folded,
    gathered,
    undecided_beside_connection,
    undecided_beside_larger,
    with_joint_costs,
)
from detect.observe.axes import cut
from detect.observe.extract import observe
from detect.observe.groups import one_row_a_worker
from detect.observe.observations import Observations
from detect.observe.warmup import num_judgeable, steady
from detect.report import Cause, Finding, Owner, Report
from detect.stats.residuals import compare_within, stage_groups
from detect.text import counted, ranks_text
from detect.thresholds.adjustable import DetectorSettings
from detect.thresholds.observing import WINDOW
from megascan.arrays import Flags, Floats
from megascan.timeline import ShardedTimeline, Timeline

if TYPE_CHECKING:
    from megascan.probes import Probes


def _search_mates(inquiry: Inquiry) -> Answer:
    """Search the slow rank of a group whose communication inside passes nobody recorded."""
    if not inquiry.seen.hidden_axes:
        return Answer()
    from detect.causes.mates import search_mates

    return search_mates(inquiry)


def _search_ends(inquiry: Inquiry) -> Answer:
    """Search the rank that ends its passes late in a TP group that waits for it unseen."""
    if "tp" not in inquiry.seen.hidden_axes:
        return Answer()
    from detect.causes.pass_ends import search_ends

    return search_ends(inquiry)


def _search_changed_ends(inquiry: Inquiry) -> Answer:
    """Search the slow rank of a group that waits unseen, and is slow at times."""
    if not inquiry.seen.hidden_axes:
        return Answer()
    from detect.causes.changed_ends import search_changed_ends

    return search_changed_ends(inquiry)


def _search_own_work(inquiry: Inquiry) -> Answer:
    """Search devices that are slow now and then, by work in which nobody waits for others."""
    if not inquiry.seen.tells_passes:
        return Answer()
    from detect.causes.own_work import search_own_work

    return search_own_work(inquiry)


def _search_spared(inquiry: Inquiry) -> Answer:
    """Search devices that are slow where they multiply matrices, where the trace tells parts."""
    seen = inquiry.seen
    if seen.modules_ns is None or len(seen.members) < 2:
        return Answer()
    from detect.causes.spared import search_spared

    return search_spared(inquiry)


def _search_by_tokens(inquiry: Inquiry) -> Answer:
    """Search devices whose products of matrices take longer for as many tokens."""
    if inquiry.seen.tokenwise is None or len(inquiry.seen.members) < 2:
        return Answer()
    from detect.causes.spared import search_by_tokens

    return search_by_tokens(inquiry)


def _search_held_clocks(inquiry: Inquiry) -> Answer:
    """Let clocks decide what is open, where any were read."""
    if not inquiry.seen.counters or not inquiry.found:
        return Answer()
    from detect.causes.low_clocks import search_held_clocks

    return search_held_clocks(inquiry)


def _search_memory(inquiry: Inquiry) -> Answer:
    """Search slow device memory in a profile of GPUs: only there kernels tell what bounds them."""
    kinds = inquiry.seen.boundness
    if kinds is None:
        return Answer()
    from detect.causes.memory import search_memory

    return search_memory(inquiry, kinds)


def _search_spells(inquiry: Inquiry) -> Answer:
    """Search devices that are slow in few iterations of a profile, kernel by kernel."""
    history = inquiry.seen.history
    if history is None:
        return Answer()
    from detect.causes.spells import search_spells

    return search_spells(inquiry, history)


def _are_several_hosts(seen: Observations) -> bool:
    return len(set(seen.members.hosts)) > 1


def _search_networks(inquiry: Inquiry) -> Answer:
    """Search hosts and rails whose network is slow, and hosts whose GPUs are, beside others."""
    if not _are_several_hosts(inquiry.seen):
        return Answer()
    from detect.causes.networks import search_networks

    return search_networks(inquiry)


def _search_flaps(inquiry: Inquiry) -> Answer:
    """Search ranks and hosts whose network is slow now and then."""
    if not _are_several_hosts(inquiry.seen):
        return Answer()
    from detect.causes.flaps import search_flaps

    return search_flaps(inquiry)


def _search_hosts(inquiry: Inquiry) -> Answer:
    """Search hosts that are slow as a whole, beside others."""
    if not _are_several_hosts(inquiry.seen):
        return Answer()
    from detect.causes.hosts import search_hosts

    return search_hosts(inquiry)


def _search_pauses(inquiry: Inquiry) -> Answer:
    """Search hosts that stall now one of their ranks and now another, beside others."""
    if not _are_several_hosts(inquiry.seen):
        return Answer()
    from detect.causes.paused_hosts import search_pauses

    return search_pauses(inquiry)


def _search_loading(inquiry: Inquiry) -> Answer:
    """Search hosts all of whose ranks load for long, beside others."""
    if not _are_several_hosts(inquiry.seen):
        return Answer()
    from detect.causes.loading_hosts import search_loading

    return search_loading(inquiry)


def _search_far_loaders(inquiry: Inquiry) -> Answer:
    """Search loaders that take many times as long as any other ever does, where time is lost."""
    if not (np.nan_to_num(inquiry.seen.lost_ns.get(Cause.LOADER, 0.0)) > 0.0).any():
        return Answer()
    from detect.causes.far_loaders import search_far_loaders

    return search_far_loaders(inquiry)


def _search_held_up(inquiry: Inquiry) -> Answer:
    """Search ranks whose threads have no core or are held up, where that was recorded."""
    if not inquiry.seen.core_waits:
        return Answer()
    from detect.causes.held_up import search_held_up

    return search_held_up(inquiry)


def _search_shortages(inquiry: Inquiry) -> Answer:
    """Let waiting for memory and disks decide what is open, where that was recorded."""
    if not inquiry.seen.pressure:
        return Answer()
    from detect.causes.shortages import search_shortages

    return search_shortages(inquiry)


def _search_work_done(inquiry: Inquiry) -> Answer:
    """Tell slow devices from more work, where devices count what they do."""
    if not inquiry.seen.work_done or not inquiry.found:
        return Answer()
    from detect.causes.work_done import search_work_done

    return search_work_done(inquiry)


def _search_tcp(inquiry: Inquiry) -> Answer:
    """Search hosts whose network is slow by what TCP carries, where that was recorded."""
    if not inquiry.seen.carried:
        return Answer()
    from detect.causes.tcp import search_tcp

    return search_tcp(inquiry)


def _search_shared_devices(inquiry: Inquiry) -> Answer:
    """Search devices on which other processes compute, where that was read."""
    if not inquiry.seen.counters:
        return Answer()
    from detect.causes.shared_devices import search_shared_devices

    return search_shared_devices(inquiry)


def _search_degraded(inquiry: Inquiry) -> Answer:
    """Let what ports and links say of themselves decide what is open, where they were read."""
    if not inquiry.seen.counters:
        return Answer()
    from detect.causes.degraded import search_degraded

    return search_degraded(inquiry)


def _search_low_clocks(inquiry: Inquiry) -> Answer:
    """Search devices whose clocks are far below all others, where clocks were read."""
    if not inquiry.seen.counters:
        return Answer()
    from detect.causes.low_clocks import search_low_clocks

    return search_low_clocks(inquiry)


def _search_corruption(inquiry: Inquiry) -> Answer:
    """Judge the probes that were stored with the trace, if there are any."""
    if inquiry.seen.probes is None:
        return Answer()
    from detect.causes.corruption import findings_of

    findings, notes = findings_of(inquiry.seen.probes)
    return Answer(findings=findings, notes=notes)


AWAITED_MATE = CauseSpec(cause=Cause.COMPUTE, search=_search_mates)
LATE_END = CauseSpec(cause=Cause.COMPUTE, search=_search_ends)
CHANGED_END = CauseSpec(cause=Cause.COMPUTE, search=_search_changed_ends)
OWN_WORK = CauseSpec(cause=Cause.COMPUTE, search=_search_own_work)
SLOW_MEMORY = CauseSpec(
    cause=Cause.COMPUTE,
    search=_search_memory,
    tests_rows=lambda seen: seen.boundness is not None,
)
SPELLS_OF_DEVICES = CauseSpec(
    cause=Cause.COMPUTE,
    search=_search_spells,
    tests_rows=lambda seen: seen.history is not None,
)
NETWORK = CauseSpec(cause=Cause.LINK, search=_search_networks)
FLAPPING_NETWORK = CauseSpec(cause=Cause.LINK, search=_search_flaps)
WHOLE_HOSTS = CauseSpec(cause=Cause.HOST, search=_search_hosts)
PAUSED_HOSTS = CauseSpec(cause=Cause.HOST, search=_search_pauses)
LOADING_HOSTS = CauseSpec(cause=Cause.LOADER, search=_search_loading)
FAR_LOADERS = CauseSpec(cause=Cause.LOADER, search=_search_far_loaders)
SPARED = CauseSpec(cause=Cause.COMPUTE, search=_search_spared)
BY_TOKENS = CauseSpec(cause=Cause.COMPUTE, search=_search_by_tokens)
HELD_CLOCKS = CauseSpec(cause=Cause.COMPUTE, search=_search_held_clocks)
WORK_DONE = CauseSpec(cause=Cause.COMPUTE, search=_search_work_done)
TCP_BETWEEN_HOSTS = CauseSpec(cause=Cause.LINK, search=_search_tcp)
DEGRADED_LINKS = CauseSpec(cause=Cause.LINK, search=_search_degraded)
SHARED_DEVICES = CauseSpec(cause=Cause.COMPUTE, search=_search_shared_devices)
HELD_UP = CauseSpec(cause=Cause.HOST, search=_search_held_up)
SHORTAGES = CauseSpec(cause=Cause.HOST, search=_search_shortages)
LOW_CLOCKS = CauseSpec(cause=Cause.COMPUTE, search=_search_low_clocks)
CORRUPTION = CauseSpec(cause=Cause.CORRUPTION, search=_search_corruption)

CAUSES: tuple[CauseSpec, ...] = (
    compute.COMPUTE,
    AWAITED_MATE,
    LATE_END,
    CHANGED_END,
    SLOW_MEMORY,
    optimizer.SLOW_OPTIMIZER,
    losses.LOADER,
    losses.COLLECTOR,
    losses.HOST,
    losses.LATE_EXITS,
    links.LINK,
    NETWORK,
    FLAPPING_NETWORK,
    everywhere.UNSPLIT,
    everywhere.CHANGED_LINKS,
    WHOLE_HOSTS,
    SPARED,
    BY_TOKENS,
    LOADING_HOSTS,
    FAR_LOADERS,
    PAUSED_HOSTS,
    SPELLS_OF_DEVICES,
    compute.SLOW_AT_THE_END,
    bursts.BURST,
    OWN_WORK,
    compute.SLOW_ON_THE_MEAN,
    nvlinks.PACE_OF_PCIE,
    nvlinks.UNMATCHED,
    everywhere.LATE_DATA,
    everywhere.PAUSES,
    unexplained.STEP_CHANGE,
    imbalance.STAGES,
    HELD_CLOCKS,
    LOW_CLOCKS,
    imbalance.SEQUENCES,
    shares.SHARES_OF_WORK,
    CORRUPTION,
    awaited.AWAITED,
    everywhere.STOPS,
    everywhere.UNEVEN,
    TCP_BETWEEN_HOSTS,
    DEGRADED_LINKS,
    SHARED_DEVICES,
    WORK_DONE,
    HELD_UP,
    SHORTAGES,
)

WITHOUT_WORK = (
    losses.LOADER,
    losses.COLLECTOR,
    losses.HOST,
    links.LINK,
    NETWORK,
    FLAPPING_NETWORK,
    everywhere.CHANGED_LINKS,
    WHOLE_HOSTS,
    LOADING_HOSTS,
    FAR_LOADERS,
    PAUSED_HOSTS,
    nvlinks.PACE_OF_PCIE,
    nvlinks.UNMATCHED,
    CORRUPTION,
    awaited.AWAITED,
    TCP_BETWEEN_HOSTS,
    DEGRADED_LINKS,
    SHARED_DEVICES,
    HELD_UP,
    SHORTAGES,
)
"""What is asked where no rank's computing can be compared: lost time and transfers still can.
Example: sequences of all lengths, so no two ranks launch the same kernels; two of sixteen devices
wait for their launches for 15 % of the iteration, the others for 3 %."""

POWER_WORDS = {spec.cause: spec.power_words for spec in CAUSES if spec.power_words}
"""What would have been found, by cause."""
QUANTITIES = {spec.cause: spec.quantity for spec in CAUSES if spec.quantity}
"""What the lost time of a cause is called, by cause."""

ONE_ITERATION = (
    "that is one iteration only, the last of so few that nothing else can be judged by them: trace "
    "more of them in a row"
)
IN_ALL_PASSES = (
    "that is one iteration only, in which nearly all passes are slow alike, or the clock was low, "
    "as a slow device, or its host, makes them: trace more iterations to see whether it lasts"
)
RANK_CAUSES = (Cause.COMPUTE, Cause.HOST, Cause.UNKNOWN)
"""Causes that make a rank's own passes longer than those of its peers."""


@dataclass(frozen=True, kw_only=True)
class Examination:
    """The report, and the observations without warm-up that were judged."""

    report: Report
    seen: Observations

    @cached_property
    def suspects(self) -> Flags:
        """Flag the rows that a finding names as slow themselves, (row,): nobody's peers."""
        slow = [one for one in self.report.findings if one.cause in RANK_CAUSES]
        return rows_of_findings(self.seen.members, slow)

    @cached_property
    def across_stages(self) -> bool:
        """Return whether ranks are compared by the layers of all stages: no rank has peers."""
        return self.seen.layers is not None and all(
            len(rows) < 2 for rows in stage_groups(self.seen.members)
        )

    @cached_property
    def slowness(self) -> Floats:
        """Return how much slower each rank computes than its peers, (row, iteration), log.

        0.26 is 1.30 times the peers' median; NaN where a rank has no peer or recorded nothing.
        """
        members = self.seen.members
        work, groups = self.seen.work, stage_groups(members)
        if self.across_stages and self.seen.layers is not None:
            work, groups = self.seen.layers, [np.arange(len(members))]
        return compare_within(work, members, groups, self.suspects).value


def examine(
    timeline: Timeline,
    settings: DetectorSettings | None = None,
    probes: Probes | None = None,
) -> Examination:
    """Judge a timeline, as `detect.detect` does, and keep what was judged."""
    seen = replace(observe(timeline), probes=probes)
    return examine_observations(seen, settings or DetectorSettings())


def examine_op_table(path: Path, settings: DetectorSettings | None = None) -> Examination:
    """Judge an op table, and keep what was judged. Raises InputError for a bad file."""
    return examine_observations(_observe_op_table(path), settings or DetectorSettings())


def examine_observations(observations: Observations, settings: DetectorSettings) -> Examination:
    """Judge observations from anywhere, and keep what was judged."""
    return Examination(
        report=judge(observations, settings),
        seen=steady(one_row_a_worker(observations), settings),
    )


def detect(
    timeline: Timeline | ShardedTimeline,
    settings: DetectorSettings | None = None,
    probes: Probes | None = None,
) -> Report:
    """Say which rank is slow, why, since when, how sure, at what cost, and whose fault it is.

    Nothing below `settings.min_slowdown` is reported; the report says what the window could not
    have shown. `probes` are what replicas computed from the same tokens, if that was recorded with
    the trace. Spans that stay in shards are observed there.
    """
    return judge(replace(observe(timeline), probes=probes), settings or DetectorSettings())


def detect_op_table(path: Path, settings: DetectorSettings | None = None) -> Report:
    """Judge an op table; steps stand for iterations. Raises InputError for a bad file."""
    return judge(_observe_op_table(path), settings or DetectorSettings())


def _observe_op_table(path: Path) -> Observations:
    """Observe an op table; import its reader only here, since most verdicts are on timelines."""
    from detect.optable import observe_op_table, read_op_table

    return observe_op_table(read_op_table(path))


def judge(observations: Observations, settings: DetectorSettings) -> Report:
    """Return the report on observations, whatever they were read from."""
    seen = steady(one_row_a_worker(observations), settings)
    if num_judgeable(seen, settings) < WINDOW.min_iterations:
        return _report_on_few(seen, settings, len(observations.iterations))
    causes = CAUSES if _is_comparable(seen) else WITHOUT_WORK
    answers = _answers(seen, settings, causes)
    notes = [note for _, answer in answers for note in answer.notes]
    if seen.alignment is not None and seen.alignment.num_components > 1:
        notes.append(
            "clocks fall into parts that share no collective; links across them are unseen"
        )
    return _report(
        seen,
        settings,
        window=observations,
        findings=_weighed(seen, settings, [answer for _, answer in answers]),
        minimum_detectable={
            cause.value: answer.least_slowdown
            for cause, answer in answers
            if answer.least_slowdown is not None
        },
        limited_by={
            cause.value: answer.least_because for cause, answer in answers if answer.least_because
        },
        minimum_named=next((one.least_named for _, one in answers if one.least_named), None),
        hides=tuple(answer.hides for _, answer in answers if answer.hides),
        caveats=tuple(answer.caveat for _, answer in answers if answer.caveat),
        unseen=tuple(sorted({rank for _, answer in answers for rank in answer.unseen})),
        notes=tuple(notes),
    )


def _report_on_few(seen: Observations, settings: DetectorSettings, num_traced: int) -> Report:
    """Report what so few iterations show: wrong numbers, and devices that are far too slow."""
    num_iterations = num_judgeable(seen, settings)
    is_warming = num_iterations < len(seen.iterations)
    note = (
        f"{counted(num_iterations, 'iteration')} can be judged, of "
        f"{counted(num_traced, 'traced one')}"
        f"{', the others are the run warming up' * is_warming}: a verdict needs "
        f"{WINDOW.min_iterations} at least, and 10 or more to see small slowdowns"
    )
    inquiry = _inquiry(seen, settings)
    wrong = CORRUPTION.search(inquiry)
    # a slow clock or a starved device may name a node here; all else is undecided
    found = compute.COMPUTE.search(inquiry).findings if is_warming else ()
    if not any(one.owner is Owner.NODE for one in found):
        found = _slow_in_the_last(seen, settings) or found
    least = settings.min_slowdown
    found = tuple(with_joint_costs(seen, folded(list(found))))
    found = tuple(undecided_if_small_and_free(seen, one, found, least) for one in found)
    found = tuple(gathered(seen, list(found)))
    return _report(
        seen,
        settings,
        window=seen,
        findings=(*wrong.findings, *found),
        notes=(note, *wrong.notes),
    )


def _weighed(
    seen: Observations, settings: DetectorSettings, answers: list[Answer]
) -> tuple[Finding, ...]:
    """Return the findings of all searches, the most important first: those that others explain left
    out, with what they cost together, and undecided where mending gains next to nothing.
    """
    least = settings.min_slowdown
    findings = with_joint_costs(seen, folded(_unexplained(answers)))
    findings = [
        undecided_if_no_gain(undecided_if_small_and_free(seen, one, findings, least))
        for one in findings
    ]
    findings = [undecided_beside_larger(one, findings, least) for one in findings]
    findings = [undecided_beside_connection(seen, one, findings) for one in findings]
    return tuple(sorted(gathered(seen, findings), key=_importance))


def _slow_in_the_last(seen: Observations, settings: DetectorSettings) -> tuple[Finding, ...]:
    """Return findings on ranks that compute far slower in the last iteration alone, for their
    device or their host.

    One iteration has many passes, and the last is the least disturbed by warm-up. Not on CPUs,
    where processes take each other's time by as much. Example: in iterations 1 and 2 ranks compile
    and allocate, for 35 to 48 ms a pass at first; iteration 2 shows rank 5 at 34.4 ms and the seven
    others at 26.9 to 27.5. What one rank does once (allocation, compilation) lengthens single
    passes: a node is named only where nearly all passes are slow alike, or its clock is read low.
    """
    if not len(seen.iterations) or seen.members.device_kind == "cpu":
        return ()
    last = cut(seen, "iteration", np.arange(len(seen.iterations)) == len(seen.iterations) - 1)
    found = compute.COMPUTE.search(_inquiry(last, settings)).findings
    slow = rows_of_findings(seen.members, found)
    # the run's first iterations take each rank its own time, in all of its passes
    is_early = seen.iterations[-1] <= settings.num_warmup_iterations
    return tuple(
        replace(one, evidence=(*one.evidence, IN_ALL_PASSES))
        if one.owner is Owner.NODE
        and (one.is_read or (not is_early and _in_all_passes(last, one, slow)))
        else undecided(one, ONE_ITERATION)
        for one in found
        if one.cause in (Cause.COMPUTE, Cause.HOST)
        and one.owner is not Owner.JOB
        and one.slowdown >= WINDOW.one_iteration_ratio
    )


def _in_all_passes(seen: Observations, finding: Finding, slow: Flags) -> bool:
    """Return whether nearly all passes of a finding's ranks are slow by half of it and more."""
    rows = sorted(seen.members.rows_with(finding.ranks))
    return in_all_passes(seen, rows, float(np.log(finding.slowdown)), slow)


def _is_comparable(seen: Observations) -> bool:
    """Return whether any rank's computing can be compared: with peers, other stages, or itself."""
    known = [one for one in (seen.work, seen.layers, seen.history) if one is not None]
    return any(bool(np.isfinite(one.log_ns).any()) for one in known)


def _answers(
    seen: Observations, settings: DetectorSettings, causes: tuple[CauseSpec, ...]
) -> list[tuple[Cause, Answer]]:
    """Ask every one of some causes, and tell it which rows earlier causes found slow, and which
    they named.
    """
    inquiry = _inquiry(seen, settings)
    answers = []
    for spec in causes:
        answer = spec.search(inquiry)
        answers.append((spec.cause, answer))
        if answer.slow is not None:
            inquiry = replace(inquiry, slow=inquiry.slow | answer.slow)
        inquiry = replace(inquiry, found=(*inquiry.found, *answer.findings))
    return answers


def _inquiry(seen: Observations, settings: DetectorSettings) -> Inquiry:
    """Return the inquiry for the first search: nobody is slow, nobody is named."""
    num_rows = len(seen.members)
    return Inquiry(
        seen=seen,
        settings=settings,
        num_tests=num_rows * sum(spec.tests_rows(seen) for spec in CAUSES),
        slow=np.zeros(num_rows, dtype=bool),
    )


def _unexplained(answers: list[Answer]) -> list[Finding]:
    """Return the findings that are no part of what a later search found."""
    findings: list[Finding] = []
    for answer in answers:
        findings = [one for one in findings if not answer.explains(one)] + [*answer.findings]
    return findings


def _unrecorded(seen: Observations) -> tuple[int, ...]:
    """Return ranks whose files hold nothing of the judged iterations, or end before the first."""
    busy = np.nan_to_num(seen.busy_ns).sum(axis=1) + np.nan_to_num(seen.optimizer_ns).sum(axis=1)
    idle = (busy <= 0) & ~np.isfinite(seen.work.log_ns).any(axis=(1, 2))
    if idle.all():
        return ()
    return seen.members.ranks_of(np.flatnonzero(idle))


def _importance(finding: Finding) -> tuple[bool, float, float, float]:
    """Order findings: what a node is to blame for first, then by cost, then by certainty."""
    cost = max(finding.step_time_cost_ratio, finding.joint_cost_ratio)
    is_others = finding.owner is not Owner.NODE
    return is_others, -cost, -finding.step_time_cost_ratio, finding.q_value


def _report(
    seen: Observations,
    settings: DetectorSettings,
    *,
    window: Observations,
    findings: tuple[Finding, ...] = (),
    minimum_detectable: Mapping[str, float] | None = None,
    limited_by: Mapping[str, str] | None = None,
    minimum_named: float | None = None,
    hides: tuple[str, ...] = (),
    caveats: tuple[str, ...] = (),
    unseen: tuple[int, ...] = (),
    notes: tuple[str, ...],
) -> Report:
    """Return a report; `window` has the iterations that were traced, `seen` those judged."""
    least = minimum_detectable or {}
    iterations = window.iterations if len(window.iterations) else np.zeros(1, dtype=np.int64)
    unrecorded = _unrecorded(seen)
    if unrecorded:
        words = f"of {ranks_text(unrecorded)} no iteration was recorded: missing, and not judged"
        notes = (words, *notes)
    return Report(
        world_size=seen.members.layout.world_size,
        unrecorded_ranks=unrecorded,
        iterations=(int(iterations[0]), int(iterations[-1])),
        num_iterations=len(seen.iterations),
        findings=findings,
        minimum_detectable=least,
        minimum_named_slowdown=minimum_named,
        limited_by=limited_by or {},
        iteration_ns=float(np.median(seen.iteration_ns)) if len(seen.iteration_ns) else 0.0,
        alignment=seen.alignment,
        completeness=seen.completeness,
        notes=(*seen.notes, *notes),
        unseen_ranks=unseen,
        hides=hides,
        caveats=caveats,
        source=seen.source,
        min_slowdown=settings.min_slowdown,
        false_discovery_rate=settings.false_discovery_rate,
        power=settings.power,
    )
