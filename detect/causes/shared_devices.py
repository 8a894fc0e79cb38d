"""Name devices on which other processes compute, by what NVML counts.

Problem: a process that was left over from an earlier job, or a second job, takes a part of a GPU.
Its kernels and transfers take longer, its stage looks heavy, and of two ranks nobody knows which
one is right.

Idea: NVML says of each process which share of the time kernels of it ran on the device. Neither
data nor layers put another process there. Where it is on this device alone, and its share is a good
part of what an open finding on that rank costs, it is why; a connection of which one end is on such
a device waits for its kernels. Without an open finding it is said in a note.

Example: two replicas on one H200 each; rank 0 computes 1.38 times slower, and may have longer data.
For 32 % of the time kernels of another process ran on its GPU, on the other one never: copies
within its memory, for 0.3 of each 1.5 s.

Limits: NVML samples for a sixth of a second and more, and copies by an engine of their own are no
kernels. Where all devices are shared, as by jobs that run side by side on purpose, nobody is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from detect.causes.device import GPU_ADVICE
from detect.causes.finding import (
    Answer,
    Inquiry,
    decided,
    gain,
    rows_of_findings,
    settle,
    slowed_by,
)
from detect.observe.machines import OTHERS_NAME
from detect.observe.observations import Observations
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.text import percent, subject_of_ranks
from detect.thresholds.devices import SHARED

OPEN_CAUSES = (
    Cause.COMPUTE,
    Cause.HOST,
    Cause.LINK,
    Cause.UNKNOWN,
    Cause.STAGE_IMBALANCE,
)
"""What a rank whose device others use may be taken for."""
EVIDENCE = (
    "NVML counts for which share of the time kernels of other processes ran on its device: "
    "{own}, on the other ranks' {others} at most; neither data nor layers put them there"
)
ADVICE = (
    "see which other process that is (nvidia-smi pmon -i GPU, nvidia-smi --query-compute-apps=pid,"
    "name,used_memory --format=csv) and end it: it may be left over from an earlier job",
    *GPU_ADVICE[1:],
)


def search_shared_devices(inquiry: Inquiry) -> Answer:
    """Name the devices that other processes use: of undecided findings; note the others."""
    seen = inquiry.seen
    shares = _shared(seen)
    if not shares:
        return Answer()

    def decide(one: Finding) -> Finding | None:
        is_open = one.owner is Owner.UNDECIDED and one.cause in OPEN_CAUSES
        ranks = _behind(seen, shares, one) if is_open else ()
        return _decided(seen, shares, one, ranks) if ranks else None

    found, settled = settle(inquiry, decide)
    named = {rank for one in (*inquiry.found, *found) for rank in one.ranks}
    return Answer(
        findings=tuple(found),
        slow=rows_of_findings(seen.members, found),
        explains=lambda one: one in settled or _may_come_of(found, one),
        notes=tuple(_notes(shares, named)),
    )


def _may_come_of(found: list[Finding], other: Finding) -> bool:
    """Return whether a finding is that the longest replica changes, by no more than a shared device
    costs: it is longest where the other process computes.
    """
    cost = max((one.step_time_cost_ratio for one in found), default=0.0)
    return other.cause is Cause.SEQUENCE_IMBALANCE and other.step_time_cost_ratio <= cost


def _shared(seen: Observations) -> dict[int, float]:
    """Return the ranks on whose devices other processes compute for far more of the time than on
    those of most, and for which share of it.
    """
    told = {
        rank: readings[OTHERS_NAME] / 100
        for rank, readings in seen.counters.items()
        if OTHERS_NAME in readings
    }
    if len(told) < 2 or len(told) < len(seen.members.recorded):
        return {}
    usual = robust.usual(np.array(list(told.values())))
    least = max(SHARED.least_share, SHARED.far_ratio * usual)
    return {rank: share for rank, share in told.items() if share >= least}


def _behind(seen: Observations, shares: dict[int, float], of: Finding) -> tuple[int, ...]:
    """Return the ranks of a finding whose devices others use, if that is why: none where it costs
    more than that explains, or other ranks are part of it and cannot be waiting for these.
    """
    ranks = tuple(rank for rank in of.ranks if rank in shares)
    if not ranks or max(shares[rank] for rank in ranks) < SHARED.most_share * of.lost_share:
        return ()
    can_wait = of.cause is Cause.LINK or seen.holds_waiting
    return ranks if can_wait or len(ranks) == len(of.ranks) else ()


def _decided(
    seen: Observations, shares: dict[int, float], of: Finding, ranks: tuple[int, ...]
) -> Finding:
    """Return a finding as that of the devices that others use."""
    first, last = of.first_iteration, of.last_iteration
    subject = subject_of_ranks(seen.members, ranks)
    shares_its, own = ("shares its device", shares[ranks[0]])
    if len(ranks) > 1:
        shares_its, own = "share their devices", min(shares[rank] for rank in ranks)
    others = max(
        seen.counters[rank][OTHERS_NAME] / 100 for rank in seen.counters if rank not in shares
    )
    cost = of.step_time_cost_ratio
    finding = decided(
        seen,
        of,
        ranks,
        cause=Cause.COMPUTE,
        statement=f"{subject} {shares_its} with another process, whose kernels ran for "
        f"{percent(1.0 + own)} of the time in iterations {first} to {last}; "
        f"{gain(slowed_by(seen, first, last), cost, is_replayed=of.cost_is_replayed)}",
        evidence=(EVIDENCE.format(own=percent(1.0 + own), others=percent(1.0 + others)),),
        advice=ADVICE,
    )
    return replace(finding, is_read=True, is_pair=False, is_inside=False)


def _notes(shares: dict[int, float], named: set[int]) -> Iterator[str]:
    """Yield what is worth a word of devices on which nothing was found."""
    for rank, share in sorted(shares.items()):
        if rank not in named:
            yield (
                f"rank {rank}: kernels of other processes ran on its device for "
                f"{percent(1.0 + share)} of the time; no cost of it is seen"
            )
