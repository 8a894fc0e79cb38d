"""Connections that become slower, or are slow now and then.

**Slower.** A ring through all hosts, or the only group of a host, has no equal. If a NIC or switch
falls to half its speed at iteration 17, every connection of the kind is slower; none stands out.
Such a kind is compared with itself. The iterations are split in two where that leaves the least
variance of the log transfer times, the median of the kind's connections in each:

    effect = median(after) - median(before)
    clear if quarter(after) - three quarters(before) >= effect / 2

and nearly all connections of the kind must have changed by as much. The bytes are the same before
and after, so no data explains it. The trace cannot tell which member is to blame, nor, between
hosts, whether others use the network: undecided. Example: an all-gather of 8 GPUs takes 1.1 ms
until iteration 16 and 8.6 ms from then on.

**Now and then.** A link that flaps has two speeds: the iterations, sorted by their transfer times,
have a gap of effect / 2 and more somewhere. Any choice of as many iterations might have been the
slow ones, so the p-value is multiplied by the number of choices, C(all, slow). Example: an
all-reduce takes 46 to 48 ms in 11 of 28 iterations, and 370 to 395 ms in the 17 others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import special

from detect.causes.finding import (
    Answer,
    CauseSpec,
    Claim,
    Inquiry,
    build_finding,
    connection_advice,
)
from detect.observe.observations import Observations, Transfers
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.search import Course, interval_of_ratio
from detect.text import counted, milliseconds, times
from detect.thresholds import CHANGES, LINKS, NETWORKS, SEARCH
from megascan.arrays import Flags, Floats, Integers
from megascan.errors import listed

BETWEEN_HOSTS = (
    "the network of any of these hosts may be slow then, or others use it: the trace cannot tell"
)


@dataclass(frozen=True, kw_only=True)
class _Change:
    """A kind of transfers that is slower in some iterations than in the others."""

    units: Integers
    """Rows of the transfers."""
    active: Flags
    """(iteration,): the slow ones."""
    effect: float
    error: float
    p_value: float
    usual_ns: float
    """Time of one transfer in the other iterations."""

    @property
    def lasts(self) -> bool:
        """Return whether the kind stays slow from its first slow iteration on."""
        return bool(self.active[int(np.argmax(self.active)) :].all())


def _search(inquiry: Inquiry) -> Answer:
    """Report the one kind that loses most time.

    A kind that is slow now and then must lose as large a share of the step as long iterations must
    to be reported (`CHANGES.lost_share`).
    """
    seen, transfers = inquiry.seen, inquiry.seen.transfers
    if transfers is None or seen.members.device_kind == "cpu":
        return Answer()
    kinds = [np.flatnonzero(transfers.kind == kind) for kind in np.unique(transfers.kind)]
    large = [one for one in kinds if transfers.size_bytes[one[0]] >= NETWORKS.min_bytes]
    step_ns, rate = float(np.median(seen.iteration_ns)), inquiry.settings.false_discovery_rate
    found = []
    for units in large:
        change = _change_of_kind(transfers, units)
        if change is None or change.p_value * len(large) > rate:
            continue
        lost_ns = _lost_by(transfers, change)
        if lost_ns.mean() >= _least_share(change) * step_ns:
            found.append((change, lost_ns))
    if not found:
        return Answer()
    worst, lost_ns = max(found, key=lambda one: float(one[1].mean()))
    return Answer(findings=(_finding_of(seen, worst, lost_ns, len(large)),))


def _least_share(change: _Change) -> float:
    return NETWORKS.min_step_share if change.lasts else CHANGES.lost_share


def _change_of_kind(transfers: Transfers, units: Integers) -> _Change | None:
    """Return when a kind is slower; None where it never is, or not as a whole."""
    time_ns = transfers.transfer_ns[units]
    with np.errstate(divide="ignore", invalid="ignore"):
        log_ns = np.where(time_ns > 0, np.log(time_ns), np.nan)
    level = robust.median(log_ns, axis=0)
    num = len(level)
    if num < 2 * SEARCH.min_own_iterations or not np.isfinite(level).all():
        return None
    split = _split_in_time(level) or _two_speeds(level)
    if split is None:
        return None
    active, num_choices = split
    slow, others = level[active], level[~active]
    effect = float(np.median(slow) - np.median(others))
    change = robust.median(log_ns[:, active], axis=1) - robust.median(log_ns[:, ~active], axis=1)
    if np.mean(change >= effect / 2) < LINKS.all_of_a_rank_share:
        return None
    spread = max(float(np.hypot(others.std(), slow.std())), LINKS.noise_log)
    error = spread * float(np.sqrt(1 / len(others) + 1 / len(slow)))
    return _Change(
        units=units, active=active, effect=effect, error=error,
        p_value=num_choices * float(special.stdtr(num - 2.0, -effect / error)),
        usual_ns=float(np.exp(np.median(others))),
    )  # fmt: skip


def _split_in_time(level: Floats) -> tuple[Flags, float] | None:
    """Return the iterations from the largest rise of log times, (iteration,), on, and how many
    places the rise might have had; None where it is small next to what times vary by.
    """
    num = len(level)
    splits = range(LINKS.min_before, num - SEARCH.min_own_iterations + 1)
    first = min(splits, key=lambda one: level[:one].var() * one + level[one:].var() * (num - one))
    before, after = level[:first], level[first:]
    effect = float(np.median(after) - np.median(before))
    apart = np.quantile(after, NETWORKS.outer_share) - np.quantile(before, 1 - NETWORKS.outer_share)
    if effect < np.log(NETWORKS.min_scaled_slowdown) or apart < effect / 2:
        return None
    return np.arange(num) >= first, float(len(splits))


def _two_speeds(level: Floats) -> tuple[Flags, float] | None:
    """Return the slow iterations of log times, (iteration,), with two levels, and how many choices
    of as many iterations there are; None where no gap between sorted times is wide enough.
    """
    least = SEARCH.min_own_iterations
    ascending = np.sort(level)
    gaps = np.diff(ascending)[least - 1 : len(level) - least]
    num_quick = int(np.argmax(gaps)) + least
    quick, slow = ascending[:num_quick], ascending[num_quick:]
    effect = float(np.median(slow) - np.median(quick))
    if effect < np.log(NETWORKS.min_scaled_slowdown) or gaps.max() < effect / 2:
        return None
    return level >= slow[0], float(special.comb(len(level), len(slow)))


def _lost_by(transfers: Transfers, change: _Change) -> Floats:
    """Return the transfer time that a rank loses to a change in each iteration, (iteration,)."""
    units = change.units
    mean_ns = robust.mean(transfers.transfer_ns[units], axis=1)
    times_an_iteration = float(np.median(transfers.total_ns[units] / mean_ns))
    lost_ns = times_an_iteration * change.usual_ns * np.expm1(change.effect)
    return np.where(change.active, lost_ns, 0.0)


def _finding_of(seen: Observations, change: _Change, lost_ns: Floats, num_kinds: int) -> Finding:
    assert seen.transfers is not None
    transfers, members = seen.transfers, seen.members
    ranks = tuple(sorted({rank for unit in change.units for rank in transfers.members[unit]}))
    is_inside = members.are_inside_a_host(ranks)
    slowdown, active = float(np.exp(change.effect)), change.active
    rows = members.rows_with(ranks)
    kind = transfers.kinds[int(transfers.kind[change.units[0]])]
    where = f"inside host {members.hosts[rows[0]]}".rstrip() if is_inside else "between hosts"
    count = f"{int(active.sum())} of {counted(len(active), 'iteration')}"
    then, before, than = "from then on", "before", "before"
    if not change.lasts:
        then, before, than = f"in {count}", "in the others", "in other iterations"
    evidence = (
        f"one {kind} takes {milliseconds(change.usual_ns * slowdown)} {then} against "
        f"{milliseconds(change.usual_ns)} {before}, counted from the last member's arrival",
        "all connections of the kind become slower together, so none stands out beside others",
    )
    return build_finding(
        seen,
        Claim(
            ranks=ranks,
            rows=rows,
            cause=Cause.LINK,
            owner=Owner.UNDECIDED,
            slowdown=slowdown,
            interval=interval_of_ratio(change.effect, change.error),
            course=Course.of(active, change.effect, change.error),
            q_value=min(1.0, change.p_value * num_kinds),
            num_peers=0,
            saved_ns=lost_ns,
            subject=f"communication {where} (ranks {listed(ranks)})",
            predicate=f"transfers {times(slowdown)} slower than {than}",
            evidence=evidence if is_inside else (*evidence, BETWEEN_HOSTS),
            advice=connection_advice(seen, ranks),
            is_replayed=False,
        ),
    )  # fmt: skip


CHANGED_LINKS = CauseSpec(cause=Cause.LINK, search=_search)
