"""Stages that take longer than the others: clocks tell whether they are slow or have more to do.

Problem: a stage that takes 1.2 times the time of the others may have more to do, or run on devices
whose clocks are held down.

Idea: more work holds no clock down. Clocks of devices were read: those that lie
by a tenth and more below the lowest clock of all other devices of the model, by about as much as
the finding says, are why. At its power limit a device lowers its clock for the work that it is
given, and stages have different work: then only a reason that no other device has (a brake, heat)
or far less power than all others draw counts (`device.low_clocks`).

Example: a stage takes 1.20 times the time of the other one. Its four devices, all of one host, run
at 1470 MHz under a hardware slowdown, those of the other host at 1710 to 1755 MHz: they are slow.

Where only some of the ranks have low clocks, the others must be able to wait for them unseen, and
none of them may have a clock that is lower still. Ranks and groups that are slow beside their peers
are judged by their clocks in `compute.py`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from detect.causes.device import GPU_ADVICE
from detect.causes.finding import (
    Answer,
    Inquiry,
    devices_of,
    rows_of_findings,
    shared_place,
)
from detect.causes.readings import CLOCK_NAME, held_down, low_clocks
from detect.observe.observations import Observations
from detect.report import Cause, Finding, Owner
from detect.text import ranks_text, times
from megascan.arrays import mask_of

LEFT_OPEN = "by its passes alone this was left open: {statement}"


def search_held_clocks(inquiry: Inquiry) -> Answer:
    """Name the ranks of stages that may be heavy or slow whose clocks are held down."""
    seen, members = inquiry.seen, inquiry.seen.members
    if members.device_kind == "cpu" or not seen.counters:
        return Answer()
    known = inquiry.blamed
    found, decided = [], list[Finding]()
    for one in inquiry.found:
        is_open = one.owner is Owner.UNDECIDED and one.cause is Cause.STAGE_IMBALANCE
        if not is_open or known[list(members.rows_with(one.ranks))].any():
            continue
        low = _held(seen, one)
        if low:
            found.append(_finding(seen, one, low))
            decided.append(one)
    return Answer(
        findings=tuple(found),
        slow=rows_of_findings(members, found),
        explains=lambda one: one in decided,
    )


def _held(seen: Observations, of: Finding) -> dict[int, str]:
    """Return the ranks of a finding whose clocks are held down, with a sentence each; none where
    the others cannot be waiting for them.
    """
    members = seen.members
    rows = list(members.rows_with(of.ranks))
    own, low = mask_of(rows, len(members)), dict[int, str]()
    if own.all():
        return low
    for row in rows:
        low |= low_clocks(seen, own, row, float(np.log(of.slowdown)))
    low = {rank: words for rank, words in low.items() if held_down(seen, own, rank)}
    others = [rank for rank in of.ranks if rank not in low]
    clocks = [seen.counters.get(rank, {}).get(CLOCK_NAME, np.inf) for rank in others]
    highest = max((seen.counters[rank][CLOCK_NAME] for rank in low), default=np.inf)
    can_wait = bool(seen.hidden_axes) and min(clocks, default=np.inf) > highest
    return low if can_wait or not others else {}


def _finding(seen: Observations, of: Finding, low: dict[int, str]) -> Finding:
    """Return a finding as that of the devices whose clocks are low."""
    members, ranks = seen.members, tuple(sorted(low))
    rows = members.rows_with(ranks)
    verb, whose = ("computes", "its clock is") if len(ranks) == 1 else ("compute", "clocks are")
    return replace(
        of,
        ranks=ranks,
        cause=Cause.COMPUTE,
        owner=Owner.NODE,
        statement=f"{ranks_text(ranks)} {verb} {times(of.slowdown)} slower than others: {whose} "
        f"held down; without that the job would be "
        f"{times(of.step_time_cost_ratio)} as fast",
        evidence=(*dict.fromkeys(low.values()), LEFT_OPEN.format(statement=of.statement)),
        next_steps=GPU_ADVICE,
        coordinates=shared_place(seen, rows),
        host=", ".join(sorted(members.hosts_of(ranks))),
        device=devices_of(members, rows),
        is_read=True,
    )
