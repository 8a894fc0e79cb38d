"""Find ranks that always have more to compute than the others of their stage, who wait for them.

Problem: slow devices are told by what is the same on all ranks. What a place always has beside
that (the experts that everybody wants, a replica's longer documents, other kernels) is taken out,
or cannot be compared. So nobody stands out, and a job of which three ranks in four wait for the
fourth would be called healthy.

Idea: an iteration lasts as long as its busiest rank. If each stage's work were spread evenly over
its ranks, the busiest would have what its stage has on the mean:

    ratio = iteration / (iteration - (longest busy time - longest mean of a stage))

Example: ranks 2 and 6 of a stage of 8 compute 340 ms of an iteration of 500, the others 200 ms;
on the mean 235 ms: the step would be 1.27 times as fast. In a pipeline what one stage computes
longer the others wait for as well: where a replay tells more, with these ranks brought to the mean,
that counts.

Where a router sends tokens to experts, and attention, which no router lengthens, takes as long on
these ranks as on others, the job is the reason; also where it was not recorded, if the ranks with
the same experts in several replicas have more alike. Elsewhere data, other kernels or the devices
may be: undecided.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from detect.causes.device import DATA_ADVICE
from detect.causes.finding import (
    UNDECIDED_WHY,
    Answer,
    CauseSpec,
    Claim,
    Inquiry,
    build_finding,
)
from detect.observe.members import Members
from detect.observe.observations import Observations
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.residuals import chance_of_mean, stage_groups
from detect.stats.search import interval_of_ratio
from detect.text import milliseconds, subject_of_ranks, times
from detect.thresholds.verdicts import SHARES
from megascan.arrays import Flags, Floats, Integers, mask_of

OF_EXPERTS = (
    "attention, which no router lengthens, takes as long there as on others, so no device is slow: "
    "the experts there get more tokens"
)
OF_ONE_PLACE = (
    "the ranks that hold the same experts in all replicas have more alike: these experts get more "
    "tokens, so many devices would hardly be slow alike"
)
OF_SOMETHING = (
    "longer data, other kernels, slower devices or hosts that launch late would show the same, and "
    "nothing in the trace tells them apart"
)
ADVICE_ON_SOMETHING = (
    "compare one of its passes in the timeline with one of another rank of its stage: more or "
    "larger operations are its work, longer ones its device, gaps between them its host",
    f"if its data are longer: {DATA_ADVICE}",
)
EXPERTS_ADVICE = (
    "count the tokens of each expert; a stronger balancing loss (--moe-aux-loss-coeff), a limit "
    "(--moe-expert-capacity-factor), or busy experts on ranks of their own spread them",
)


@dataclass(frozen=True, kw_only=True)
class _Shares:
    """How unevenly work is spread over the ranks of a stage."""

    rows: Integers
    """Those that have more than others in most iterations."""
    ratio: Floats
    """(iteration,): iteration time over what it would be if the work were spread evenly."""
    own_ns: Floats
    """(iteration,): what `rows` compute on the mean."""
    others_ns: Floats
    """(iteration,): what the other ranks of their stages compute on the mean."""
    mean_ns: Floats
    """(iteration,): what all ranks of their stages compute on the mean."""

    @property
    def factor(self) -> float:
        """Return how many times as much as the others the rows compute, typically."""
        return float(robust.median(self.own_ns / self.others_ns))


def _search(inquiry: Inquiry) -> Answer:
    """Report ranks that nothing else was found about; on CPUs nobody knows what a rank computes."""
    seen = inquiry.seen
    if seen.members.device_kind == "cpu":
        return Answer()
    shares = _shares(seen, inquiry.named | inquiry.slow)
    if shares is None or shares.factor < inquiry.settings.min_slowdown:
        return Answer()
    shares = _replayed(seen, shares)
    ratio = float(np.median(shares.ratio))
    is_told = any(one.step_time_cost_ratio >= ratio for one in inquiry.found)
    if ratio < SHARES.least_ratio or is_told:
        return Answer()
    return Answer(findings=(_finding(seen, shares),))


def _shares(seen: Observations, known: Flags) -> _Shares | None:
    """Return the shares of ranks that are not `known` to be slow; None if none has always more."""
    busy_ns = np.where((seen.busy_ns > 0) & ~known[:, None], seen.busy_ns, np.nan)
    mean_ns = np.full_like(busy_ns, np.nan)
    for rows in stage_groups(seen.members):
        mean_ns[rows] = robust.mean(busy_ns[rows], axis=0)
    with np.errstate(invalid="ignore"):
        over_ns = busy_ns - mean_ns
        # of a lone rank nothing can be spread
        saved_ns = np.fmax.reduce(busy_ns, axis=0) - np.fmax.reduce(mean_ns, axis=0)
        is_more = over_ns >= SHARES.near_share * saved_ns
    rows = np.flatnonzero(is_more.mean(axis=1) >= SHARES.mostly_share)
    if not len(rows) or not np.isfinite(saved_ns).all():
        return None
    return _Shares(
        rows=rows,
        ratio=seen.iteration_ns / np.maximum(seen.iteration_ns - saved_ns, 1.0),
        own_ns=robust.mean(busy_ns[rows], axis=0),
        others_ns=robust.mean(busy_ns[_others(seen.members, rows)], axis=0),
        mean_ns=robust.mean(mean_ns[rows], axis=0),
    )


def _others(members: Members, rows: Integers) -> Flags:
    """Flag the other ranks of the stages of `rows`, (row,)."""
    return np.isin(members.stage, members.stage[rows]) & ~mask_of(rows.tolist(), len(members))


def _replayed(seen: Observations, shares: _Shares) -> _Shares:
    """Return the shares with what the step takes longer by replay, where that tells more."""
    to_mean = float(robust.median(shares.own_ns / shares.mean_ns))
    if seen.costs is None or to_mean < SHARES.least_ratio:
        return shares
    window = int(seen.iterations[0]), int(seen.iterations[-1])
    ranks = seen.members.ranks_of(shares.rows.tolist())
    replayed = seen.costs.ratio(ranks, (Cause.COMPUTE,), window, 0.0, to_mean)
    typical = float(np.median(shares.ratio))
    if replayed is None or replayed <= typical:
        return shares
    return replace(shares, ratio=shares.ratio * (replayed / typical))


def _typical_text(time_ns: Floats) -> str:
    return milliseconds(float(robust.median(time_ns)))


def _finding(seen: Observations, shares: _Shares) -> Finding:
    members, rows = seen.members, tuple(shares.rows.tolist())
    ranks = members.ranks_of(list(rows))
    logs, effect = np.log(shares.own_ns / shares.others_ns), float(np.log(shares.factor))
    experts = _busy_experts(seen, shares.rows)
    return build_finding(
        seen,
        Claim(
            ranks=ranks,
            rows=rows,
            cause=Cause.SEQUENCE_IMBALANCE if experts else Cause.UNKNOWN,
            owner=Owner.JOB if experts else Owner.UNDECIDED,
            slowdown=shares.factor,
            interval=interval_of_ratio(effect, robust.standard_error(logs)),
            course=None,
            q_value=chance_of_mean(np.log(shares.ratio)),
            num_peers=int(_others(members, shares.rows).sum()),
            saved_ns=seen.iteration_ns * (1.0 - 1.0 / np.maximum(shares.ratio, 1.0)),
            subject=subject_of_ranks(members, ranks),
            predicate=_predicate(shares, ranks, is_work=bool(experts)),
            whose="" if experts else UNDECIDED_WHY,
            evidence=(
                f"they compute for {_typical_text(shares.own_ns)} of an iteration on the mean, the "
                f"others of their stage for {_typical_text(shares.others_ns)}"
                if len(ranks) > 1
                else f"it computes for {_typical_text(shares.own_ns)} of an iteration, the others "
                f"of its stage for {_typical_text(shares.others_ns)}",
                experts or OF_SOMETHING,
            ),
            advice=EXPERTS_ADVICE if experts else ADVICE_ON_SOMETHING,
            is_replayed=False,
        ),
    )


def _predicate(shares: _Shares, ranks: tuple[int, ...], *, is_work: bool) -> str:
    """Say how much longer the ranks compute: that they have more to do only where it `is_work`."""
    is_one, factor = len(ranks) == 1, times(shares.factor)
    if is_work:
        has = "has" if is_one else "have"
        return f"always {has} {factor} as much to compute as others of the stage, who wait"
    computes = "computes" if is_one else "compute"
    return f"always {computes} for {factor} as long as others of the stage, who wait"


def _busy_experts(seen: Observations, rows: Integers) -> str:
    """Say why it is experts that get more tokens on these rows; empty where it may be anything."""
    members = seen.members
    if members.layout.ep < 2 or not seen.tells_passes:
        return ""
    if seen.attention_ns is not None:
        own, theirs = (
            robust.median(seen.attention_ns[one]) for one in (rows, _others(members, rows))
        )
        if np.isfinite(own / theirs):
            return OF_EXPERTS if own <= SHARES.alike_ratio * theirs else ""
    is_one_place = len(np.unique(members.place["ep"][rows])) == 1
    are_all = set(np.flatnonzero(members.place["ep"] == members.place["ep"][rows[0]])) == set(rows)
    return OF_ONE_PLACE if is_one_place and are_all and len(rows) > 1 else ""


SHARES_OF_WORK = CauseSpec(cause=Cause.SEQUENCE_IMBALANCE, search=_search)
