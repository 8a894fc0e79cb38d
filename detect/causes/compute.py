"""Find ranks that compute slowly, and say it; say which slowness this trace could have shown.

    COMPUTE            who is slower than its peers (`searches.py`) and waits for nobody
    SLOW_ON_THE_MEAN   the same by the mean of a rank's passes, where nobody has been named
    SLOW_AT_THE_END    the same in the last two iterations alone
    _finding           one slow row as a finding: ranks, slowdown, interval, words, evidence
    _reach             the least slowdown that would have been found, and named (`power.py`)

A rank is slow where its passes take longer than those of the ranks that do the same work. Whose
fault that is, and whether it only waits for another one, `compute_owner.py` decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from detect.causes.compute_owner import cause_and_owner, is_one_sided, victims_among
from detect.causes.device import DATA_ADVICE, GPU_ADVICE, host_advice
from detect.causes.finding import (
    UNDECIDED_WHOSE,
    Answer,
    CauseSpec,
    Claim,
    Inquiry,
    build_finding,
    devices_of,
    more_iterations,
    rows_of_findings,
    saved_by_compute,
)
from detect.causes.launching import is_host_bound, most_cost_of_host, of_far_later_host, starvation
from detect.causes.ordinary import Case
from detect.causes.power import Power, limits, planted_power, slowest
from detect.causes.readings import reading_evidence
from detect.causes.searches import (
    ComputeSearch,
    SlowRow,
    in_all_passes,
    least_slowdown,
    search_compute,
    search_means,
)
from detect.observe.axes import cut
from detect.observe.members import Members
from detect.observe.observations import Observations
from detect.observe.operations import PHASE_NAMES
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.residuals import compare_within, peer_groups
from detect.text import counted, peers_text, place, ranks_text, times
from detect.thresholds.devices import COMPUTE as LIMITS
from detect.thresholds.devices import PAIRS
from detect.thresholds.observing import WINDOW
from detect.thresholds.statistics import POWER
from megascan.arrays import Flags, mask_of
from megascan.errors import listed

BOUND = (
    "communication within TP groups was not traced and is part of these times: the rank itself may "
    "be slower still"
)
GATHERED = (
    "parameters are gathered beside the passes, which wait for the slowest rank in it, and no "
    "layers were recorded that would tell how long (granularity full, a model that is not compiled)"
)


def _worth_saying(case: Case) -> bool:
    slow = case.slow
    if slow.across_stages and slow.suspect.course.effect < LIMITS.lone_floor_log:
        return False
    # one pass alone is no known fault of a device: only beyond all doubt, and lasting; but in a
    # profile a host that is late lengthens most the pass whose kernels are short
    lasting = bool(slow.suspect.course.active.all()) and slow.suspect.q_value < LIMITS.surely_q
    if lasting or not is_one_sided(slow):
        return True
    is_profile = not case.seen.tells_passes
    return is_profile and starvation(case.seen, case.row, case.active, case.effect) is not None


def _finding(case: Case) -> Finding:
    seen, slow, row = case.seen, case.slow, case.row
    cause, owner, reasons = cause_and_owner(case)
    in_all = _slowdown_in_all(case)
    share = 1.0 - 1.0 / in_all  # of its compute time, beyond that of its peers
    excess = np.where(case.active, np.nan_to_num(seen.busy_ns[row]) * share, 0.0)
    is_bound = seen.mixes_communication or not seen.splits_tensor_groups
    members, at, ranks = _at_fault(case, owner)
    is_part = len(ranks) > 1 and members is not seen.members
    host = ", ".join(sorted(members.hosts_of(ranks))) if is_part else members.hosts[at]
    finding = build_finding(
        seen,
        Claim(
            ranks=ranks,
            rows=(row,),
            cause=cause,
            owner=owner,
            slowdown=float(np.exp(case.effect)),
            interval=_interval(slow, in_all),
            course=slow.suspect.course,
            q_value=slow.suspect.q_value,
            num_peers=slow.num_peers,
            saved_ns=saved_by_compute(seen, row, excess),
            subject=f"{ranks_text(ranks)} ({f'host {host}' if is_part else place(members, at)})",
            predicate=_predicate(slow, cause, is_bound, is_one=len(ranks) == 1),
            whose=UNDECIDED_WHOSE if owner is Owner.UNDECIDED else "",
            evidence=(
                *_evidence(seen, slow),
                *((BOUND,) if is_bound else ()),
                *reasons,
                *reading_evidence(seen, row),
            ),
            advice=_advice(seen, row, cause, owner),
            is_replayed=cause != Cause.UNKNOWN,
            most_cost=most_cost_of_host(seen, row, case.active) if cause == Cause.HOST else np.inf,
            is_bound=is_bound,
            is_read=case.clock is not None,
        ),
    )
    finding = replace(
        finding,
        coordinates=members.coordinates(at),
        host=host,
        device=devices_of(members, members.rows_with(ranks)),
    )
    return of_far_later_host(finding) if len(ranks) == 1 else finding


def _at_fault(case: Case, owner: Owner) -> tuple[Members, int, tuple[int, ...]]:
    """Return the ranks that a finding is about, and the row of the first of them among its members:
    those of the case, or of the group that its row stands for the ones at fault.
    """
    members, every = case.seen.members, case.seen.workers
    is_group = owner is Owner.NODE and len(members.workers[case.row]) > 1
    slowest = _slow_of_group(case) if is_group else ()
    if slowest and every is not None:
        return every.members, every.members.row(slowest[0]), slowest
    return members, case.row, slowest or members.workers[case.row]


def _slow_of_group(case: Case) -> tuple[int, ...]:
    """Return which ranks are at fault of a row that stands for several; () where none is shown."""
    if case.clock is not None:
        return (case.clock[0],)
    if case.longer_step is not None:
        return tuple(sorted(one.rank for one in case.longer_step.every))
    return () if case.longer_host is None else case.longer_host[0]


def _interval(slow: SlowRow, in_all: float) -> tuple[float, float]:
    """Return the interval of a slowdown, which holds that of all its work, and what peers hide."""
    (low, high), effect = slow.suspect.interval, slow.suspect.course.effect
    return low * in_all * float(np.exp(-effect)), high * float(np.exp(LIMITS.hidden_share * effect))


def _slowdown_in_all(case: Case) -> float:
    """Return how many times as long a row computes in all, at most what its finding states.

    In a profile the two differ: what is stated is that of a typical part of a pass, and a low clock
    slows kernels that move memory by less than products of matrices. Example: 1.96 times in the
    typical part, 1.82 times in all.
    """
    seen, slow, stated = case.seen, case.slow, float(np.exp(case.effect))
    if seen.tells_passes or slow.across_stages or slow.is_mean or not len(slow.peers):
        return stated
    busy_ns = np.where(seen.busy_ns > 0, seen.busy_ns, np.nan)
    beside = busy_ns[case.row] / robust.median(busy_ns[slow.peers], axis=0)
    in_all = float(robust.median(beside[case.active]))
    return min(stated, in_all) if in_all > 1.0 else stated


def _predicate(slow: SlowRow, cause: Cause, is_bound: bool, *, is_one: bool) -> str:
    slowdown = times(float(np.exp(slow.suspect.course.effect)))
    peers = peers_text(slow.num_peers)
    verb, whose = ("computes", "its") if is_one else ("compute", "their")
    how = f"takes {slowdown} the time of its {peers}"
    if cause == Cause.COMPUTE:
        least = "at least " if is_bound else ""
        how = f"{verb} {least}{slowdown} slower than {whose} {peers}"
    elif cause == Cause.HOST:
        how = f"is starved by its host: work takes {slowdown} the time of its {peers}"
    if slow.is_mean:
        how += " on the mean, if not in its typical pass"
    return f"{how}," if slow.is_mean else how


def _evidence(seen: Observations, slow: SlowRow) -> list[str]:
    members, row = seen.members, slow.suspect.row
    phases = [
        f"{name} {times(float(np.exp(value)))}"
        for name, value in zip(PHASE_NAMES, slow.by_phase, strict=True)
        if np.isfinite(value)
    ]
    if np.isfinite(slow.optimizer) and seen.optimizer_ns[row].max() > 0:
        phases.append(f"optimizer {times(float(np.exp(slow.optimizer)))}")
    if slow.across_stages:
        what = "transformer layers" if seen.tells_passes else "same kernels"
        against = f"of the {what} of the other stages"
    else:
        names = listed(members.workers[one][0] for one in slow.peers)
        against = f"of the same work on {'rank' if slow.num_peers == 1 else 'ranks'} {names}"
    course = slow.suspect.course
    samples = counted(int(np.isfinite(seen.work.log_ns).any(axis=(0, 1)).sum()), "pass")
    if not seen.tells_passes:
        samples = "kernels of equal name and launch"
    typical = "mean" if slow.is_mean else "median"
    whose = "only peer" if slow.num_peers == 1 else "peers"
    return [
        f"{', '.join(phases)} {against}, waiting and communication taken out",
        f"slower than its {whose} in {course.share:.0%} of these "
        f"{counted(int(course.active.sum()), 'iteration')}, {typical} over {samples} each",
    ]


def _advice_on_difference(seen: Observations) -> tuple[str, ...]:
    """Return how to see what differs between two ranks' passes."""
    if not seen.tells_passes:
        return (f"compare their kernels in the timeline; {more_iterations(seen)}",)
    if seen.layers is None:
        return ("trace again at granularity full, over more iterations",)
    return (f"compare their modules in the timeline; {more_iterations(seen)}",)


def _advice(seen: Observations, row: int, cause: Cause, owner: Owner) -> tuple[str, ...]:
    members = seen.members
    has_gpu, is_group = members.device_kind != "cpu", len(members.workers[row]) > 1
    if cause == Cause.HOST:
        return host_advice(owner)
    if cause in (Cause.SEQUENCE_IMBALANCE, Cause.UNKNOWN):
        return (DATA_ADVICE,) if cause != Cause.UNKNOWN else _advice_on_difference(seen)
    if owner == Owner.UNDECIDED and has_gpu and is_group:
        return (
            "measure the GPUs of these ranks' host against each other, with the job away: python "
            "scripts/healthcheck.py --sweep",
            "or trace again at granularity full, which tells these ranks apart",
        )
    if owner == Owner.UNDECIDED:
        return (
            "run the same GEMM benchmark on this rank's device and on a peer's: slower there, too, "
            "means the device; as fast means the work or the place",
            "or trace again with the two hosts exchanged: a fault of the hardware moves with it",
        )
    if not has_gpu:
        return (
            "on that host: read CPU frequency and throttling (turbostat, or /proc/cpuinfo), and "
            "which cores the rank's process may use (taskset -p PID)",
            "run the same matrix product alone on that host and on a peer's",
        )
    return GPU_ADVICE


def _search(inquiry: Inquiry) -> Answer:
    seen = inquiry.seen
    found = search_compute(inquiry)
    reach = _reach(inquiry, found) if found.num_compared else Answer()
    least = reach.least_slowdown
    is_blind = least is not None and (least >= POWER.healthy_ratio or bool(reach.unseen))
    floor, cases = least_slowdown(seen, inquiry.settings), _cases(inquiry, found)
    return replace(
        reach,
        findings=tuple(_finding(one) for one in _reported(cases)),
        least_because=_why_no_less(inquiry, found, least),
        slow=found.slow_rows & ~_unsaid(cases, len(found.slow_rows)),
        notes=(
            *reach.notes,
            *(slowest(seen, found.residuals, floor) if is_blind and not found.slow else ()),
            *limits(seen, found.residuals),
        ),
    )


def _cases(inquiry: Inquiry, found: ComputeSearch) -> list[Case]:
    return [Case.of(inquiry, found, one) for one in found.slow]


def _reported(cases: Sequence[Case]) -> list[Case]:
    """Return those of the slow rows that a finding is made of."""
    victims = victims_among(cases)
    return [one for one in cases if one.row not in victims and _worth_saying(one)]


def _unsaid(cases: Sequence[Case], num_rows: int) -> Flags:
    """Flag the rows that are slow by too little, or in one pass only: they may have bursts."""
    return mask_of([one.row for one in cases if not _worth_saying(one)], num_rows)


def _reach(inquiry: Inquiry, found: ComputeSearch) -> Answer:
    """Return which slowdowns would have been found and named: tried on the ranks of this trace,
    where its noise and its waits let any be seen.
    """
    effect = inquiry.detectable_effect(found.noise)
    effect = max(float(np.log(least_slowdown(inquiry.seen, inquiry.settings))), effect)
    if effect >= np.log(POWER.blind_ratio):
        return Answer(least_slowdown=float(np.exp(effect)))
    if is_host_bound(inquiry.seen) or inquiry.seen.hides_waiting:
        return Answer(least_slowdown=POWER.blind_ratio)
    power = planted_power(inquiry, effect, found.slow_rows, _owner_of)
    if not np.isfinite(power.found):
        return Answer(least_slowdown=POWER.blind_ratio)
    unseen = inquiry.seen.members.ranks_of(power.unseen)
    return Answer(
        least_slowdown=float(np.exp(power.found)),
        least_named=float(np.exp(power.named)) if np.isfinite(power.named) else None,
        unseen=unseen,
        notes=tuple(_notes_on(power, unseen)),
    )


def _notes_on(power: Power, unseen: tuple[int, ...]) -> Iterator[str]:
    """Say where a slow rank is found and its node not named, or where it is not found at all."""
    least = times(float(np.exp(power.found)))
    if not np.isfinite(power.named):
        yield (
            f"a rank that computes {least} slower would be found, but not said to be its node's "
            "fault: ranks of this trace that were slowed by up to a factor of "
            f"{POWER.blind_ratio:.0f} stayed undecided"
        )
    elif power.named > power.found:
        yield (
            f"a rank that computes {least} slower is found, but its node is sure to be named only "
            f"from {times(float(np.exp(power.named)))} on: of the ranks of this trace that were "
            "slowed by less, some stayed undecided"
        )
    if unseen:
        yield (
            f"{ranks_text(unseen)}: {POWER.blind_ratio:.0f} times slower would not be found there "
            "(few iterations, or no peer)"
        )


def _why_no_less(inquiry: Inquiry, found: ComputeSearch, least: float | None) -> str:
    """Say what keeps the smallest slowdown found from being smaller, as part of a sentence."""
    if is_host_bound(inquiry.seen):
        return "the devices wait for their hosts, whose pace hides their own"
    if inquiry.seen.hides_waiting:
        return GATHERED
    if least == POWER.blind_ratio:
        return "none of the ranks that were slowed to try it was found"
    by_noise = float(np.exp(inquiry.detectable_effect(found.noise)))
    floor = least_slowdown(inquiry.seen, inquiry.settings)
    if least is not None and least > max(by_noise, floor) ** POWER.rung_ratio:
        return "ranks of this trace that were slowed by less, to try it, were not found"
    return inquiry.limited_by(found.noise)


def _owner_of(inquiry: Inquiry, row: int) -> Owner | None:
    """Return who owns the slowness of a row; None where it is not found, or is no slow compute."""
    found = search_compute(inquiry)
    case = next((one for one in _reported(_cases(inquiry, found)) if one.row == row), None)
    if case is None:
        return None
    cause, owner, _ = cause_and_owner(case)
    return owner if cause == Cause.COMPUTE else None


COMPUTE = CauseSpec(
    cause=Cause.COMPUTE,
    search=_search,
    tests_rows=lambda seen: True,
    power_words="a rank computes slower than its peers",
)


def _search_means(inquiry: Inquiry) -> Answer:
    """Search ranks that are slow on the mean, only where nobody has been named: a rank that stands
    still now and then has longer passes as well.
    """
    if inquiry.seen.members.device_kind == "cpu" or inquiry.named.any():
        return Answer()
    found = search_means(inquiry)
    if found is None:
        return Answer()
    return Answer(findings=tuple(_finding(one) for one in _reported(_cases(inquiry, found))))


SLOW_ON_THE_MEAN = CauseSpec(cause=Cause.COMPUTE, search=_search_means)


def _search_end(inquiry: Inquiry) -> Answer:
    """Search the last two iterations of the window as a window of their own, for a rank that was as
    quick as its peers before.

    Two slow iterations are too few among many to be told from bursts of noise or data, unless they
    are the last, nearly all of their passes are slow alike, and all that is asked of a window of
    two is true of them. Example: a rank's passes beside its peers' in six iterations, log: 0.002,
    0.002, 0.000, -0.001, 0.187, 0.187.
    """
    seen = inquiry.seen
    num, num_last = len(seen.iterations), WINDOW.min_iterations
    if seen.members.device_kind == "cpu" or num < num_last + PAIRS.min_normal_iterations:
        return Answer()
    is_last = np.arange(num) >= num - num_last
    end = replace(inquiry, seen=cut(seen, "iteration", is_last))
    found = search_compute(end)
    if not found.slow:
        return Answer()
    groups = peer_groups(seen.work, seen.members)
    before = compare_within(seen.work, seen.members, groups, found.slow_rows).value[:, ~is_last]
    cases = [
        one
        for one in _reported(_cases(end, found))
        if not (inquiry.blamed[one.row] or one.slow.across_stages)
        and one.effect >= np.log(WINDOW.one_iteration_ratio)
        and np.abs(before[one.row]).max() <= PAIRS.elsewhere_share * one.effect
        and in_all_passes(end.seen, [one.row], one.effect, found.slow_rows)
    ]
    findings = tuple(one for one in map(_finding, cases) if one.owner is Owner.NODE)
    ranks = {one.ranks for one in findings}
    return Answer(
        findings=findings,
        slow=rows_of_findings(seen.members, findings),
        explains=lambda one: one.owner is Owner.UNDECIDED and one.ranks in ranks,
    )


SLOW_AT_THE_END = CauseSpec(cause=Cause.COMPUTE, search=_search_end)
