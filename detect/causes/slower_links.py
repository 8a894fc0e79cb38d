"""Find transfers that became slower inside the trace where nothing is left to compare them with.

Problem: a ring through all hosts, or the only group of a host, has no equal. If a NIC or switch
falls to half its speed at iteration 17, every connection of the kind is slower; none stands out.

Idea: such a kind is compared with itself. The iterations are split in two where that leaves the
least variance of the log transfer times, the median of the kind's connections in each:

    effect = median(after) - median(before)
    clear if quarter(after) - three quarters(before) >= effect / 2

and nearly all connections of the kind must have changed by as much. The bytes are the same before
and after, so no data explains it. Which member is to blame the trace cannot tell, nor between hosts
whether others use the network: undecided.

Example: an all-gather of 8 GPUs takes 1.1 ms until iteration 16 and 8.6 ms from then on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import special

from detect.causes.finding import Claim, build_finding, connection_advice
from detect.causes.spec import Answer, CauseSpec, Inquiry
from detect.observe.observations import Observations, Transfers
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.persistence import Course
from detect.text import milliseconds, times
from detect.thresholds import LINKS, NETWORKS, SEARCH
from megascan.arrays import Floats, Integers
from megascan.errors import listed

BETWEEN_HOSTS = (
    "the network of any of these hosts may have become slower, or others use it: the trace cannot "
    "tell"
)


@dataclass(frozen=True, kw_only=True)
class _Slower:
    """A kind of transfers that is slower from one iteration on."""

    units: Integers
    """Rows of the transfers."""
    first: int
    """First slow iteration, as a place in the window."""
    effect: float
    error: float
    p_value: float
    before_ns: float


def _search(inquiry: Inquiry) -> Answer:
    """Name one kind: the one that loses most."""
    seen, transfers = inquiry.seen, inquiry.seen.transfers
    if transfers is None or seen.members.device_kind == "cpu":
        return Answer()
    kinds = [np.flatnonzero(transfers.kind == kind) for kind in np.unique(transfers.kind)]
    large = [one for one in kinds if transfers.size_bytes[one[0]] >= NETWORKS.min_bytes]
    found = [_slower(transfers, units) for units in large]
    sure = [
        one for one in found
        if one and one.p_value * len(large) <= inquiry.settings.false_discovery_rate
    ]  # fmt: skip
    worst = max(sure, key=lambda one: float(_lost_ns(transfers, one).mean()), default=None)
    if worst is None:
        return Answer()
    lost_ns = _lost_ns(transfers, worst)
    if float(lost_ns.mean()) < NETWORKS.min_step_share * float(np.median(seen.iteration_ns)):
        return Answer()
    return Answer(findings=(_finding(seen, worst, lost_ns, len(large)),))


def _slower(transfers: Transfers, units: Integers) -> _Slower | None:
    """Return since when a kind is slower; None where it is not, or not as a whole."""
    time_ns = transfers.transfer_ns[units]
    with np.errstate(divide="ignore", invalid="ignore"):
        log_ns = np.where(time_ns > 0, np.log(time_ns), np.nan)
    level = robust.median(log_ns, axis=0)
    least, num = SEARCH.min_own_iterations, len(level)
    if num < 2 * least or not np.isfinite(level).all():
        return None
    splits = range(least, num - least + 1)
    first = min(splits, key=lambda one: level[:one].var() * one + level[one:].var() * (num - one))
    before, after = level[:first], level[first:]
    effect = float(np.median(after) - np.median(before))
    apart = np.quantile(after, NETWORKS.outer_share) - np.quantile(before, 1 - NETWORKS.outer_share)
    if effect < np.log(NETWORKS.min_scaled_slowdown) or apart < effect / 2:
        return None
    change = robust.median(log_ns[:, first:], axis=1) - robust.median(log_ns[:, :first], axis=1)
    if np.mean(change >= effect / 2) < LINKS.all_of_a_rank_share:
        return None
    spread = max(float(np.hypot(before.std(), after.std())), LINKS.noise_log)
    error = spread * float(np.sqrt(1 / first + 1 / (num - first)))
    return _Slower(
        units=units, first=first, effect=effect, error=error,
        p_value=len(splits) * float(special.stdtr(num - 2.0, -effect / error)),
        before_ns=float(np.exp(np.median(before))),
    )  # fmt: skip


def _lost_ns(transfers: Transfers, slower: _Slower) -> Floats:
    """Return the transfer time that a rank loses by it, (iteration,)."""
    units = slower.units
    mean_ns = robust.mean(transfers.transfer_ns[units], axis=1)
    times_an_iteration = float(np.median(transfers.total_ns[units] / mean_ns))
    lost = np.zeros(transfers.transfer_ns.shape[1])
    lost[slower.first :] = times_an_iteration * slower.before_ns * np.expm1(slower.effect)
    return lost


def _finding(seen: Observations, slower: _Slower, lost_ns: Floats, num_kinds: int) -> Finding:
    assert seen.transfers is not None
    transfers, members = seen.transfers, seen.members
    ranks = tuple(sorted({rank for unit in slower.units for rank in transfers.members[unit]}))
    is_inside = members.are_inside_a_host(ranks)
    slowdown, num = float(np.exp(slower.effect)), len(seen.iterations)
    reach = SEARCH.interval_sigmas * slower.error
    rows = tuple(row for row, own in enumerate(members.workers) if set(own) & set(ranks))
    active = np.arange(num) >= slower.first
    kind = transfers.kinds[int(transfers.kind[slower.units[0]])]
    where = f"inside host {members.hosts[rows[0]]}".rstrip() if is_inside else "between hosts"
    evidence = (
        f"one {kind} takes {milliseconds(slower.before_ns * slowdown)} from then on against "
        f"{milliseconds(slower.before_ns)} before, counted from the last member's arrival",
        "all connections of the kind became slower together, so none stands out beside others",
    )
    return build_finding(
        seen,
        Claim(
            ranks=ranks,
            rows=rows,
            cause=Cause.LINK,
            owner=Owner.UNDECIDED,
            slowdown=slowdown,
            interval=(slowdown * float(np.exp(-reach)), slowdown * float(np.exp(reach))),
            course=Course(
                active=active, effect=slower.effect, standard_error=slower.error, share=1.0,
                episodes=((slower.first, num - 1),),
            ),
            q_value=min(1.0, slower.p_value * num_kinds),
            num_peers=0,
            saved_ns=lost_ns,
            subject=f"communication {where} (ranks {listed(ranks)})",
            predicate=f"transfers {times(slowdown)} slower than before",
            evidence=evidence if is_inside else (*evidence, BETWEEN_HOSTS),
            advice=connection_advice(seen, ranks),
            is_replayed=False,
        ),
    )  # fmt: skip


SLOWER_LINKS = CauseSpec(cause=Cause.LINK, search=_search)
