"""Ranks whose device memory is slow: kernels that move bytes take longer, others do not.

Problem: memory that corrects errors all the time, or runs hot and slower, slows activations, norms,
lookups and the optimizer by one factor. Matrix products hardly notice, and they are most of a pass:
the median over the parts of a pass is as quick as ever.

Idea: of a profile, kernels that are bound by memory are compared apart from those that multiply
matrices, each with the same kernels of the peers. The search is that of compute. What speaks
against other reasons:

* matrix products are not slower: a low clock slows them most, and longer data slow them as well;
* the optimizer, which no data lengthen and which does not overlap with communication, is slower by
  about as much.

Example: rank 5's norms and activations take 1.78 times its peers' time, its optimizer 1.77 times,
its matrix products 1.00 times.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detect.causes.device import answer_of_slow_parts, optimizer_residuals
from detect.causes.finding import Answer, Claim, Inquiry, build_finding, saved_by_compute
from detect.observe.members import Members
from detect.observe.observations import Observations
from detect.observe.operations import Boundness
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.noise import Usual
from detect.stats.residuals import compare_within, stage_groups
from detect.stats.search import SearchTask, Suspect, search
from detect.text import counted, place, ranks_of, times
from detect.thresholds.devices import COMPUTE, MEMORY
from megascan.arrays import Integers, mask_of

ADVICE = (
    "read that GPU's memory errors, remapped rows and temperature: nvidia-smi -i GPU -q -d "
    "ECC,ROW_REMAPPER,TEMPERATURE,CLOCK, beside a peer's",
    "measure its memory bandwidth against the node's other GPUs with the job away (nvbandwidth, or "
    "a large device-to-device copy); reset or replace it when it is slow alone",
)
UNCONFIRMED = (
    "its optimizer, whose kernels are bound by memory as well, does not confirm it: communication "
    "that runs beside these kernels may be the reason as well as the device"
)
OTHER_STAGES = (
    "no other rank shares its stage, so that its optimizer, which updates other parameters, cannot "
    "confirm it: communication that runs beside these kernels may be the reason as well"
)


@dataclass(frozen=True, kw_only=True)
class _SlowMemory:
    """A row whose memory is slow; `matrix` and `optimizer` are log slowdowns against its peers."""

    suspect: Suspect
    num_peers: int
    matrix: float
    optimizer: float
    """NaN where the optimizer was not recorded."""

    @property
    def effect(self) -> float:
        """Return the log slowdown of the kernels that are bound by memory."""
        return self.suspect.course.effect

    @property
    def is_confirmed(self) -> bool:
        """Return whether the optimizer is slower by about as much."""
        low, high = MEMORY.agrees_share * self.effect, self.effect / MEMORY.agrees_share
        return low <= self.optimizer <= high


def slow_memories(inquiry: Inquiry, kinds: Boundness) -> list[_SlowMemory]:
    """Return the rows whose kernels are slow where they are bound by memory, and only there."""
    seen = inquiry.seen
    members = seen.members
    groups = _groups(members)

    task = SearchTask(
        compare=lambda excluded: compare_within(kinds.memory, members, groups, excluded).value,
        num_rows=len(members),
        num_tests=inquiry.num_tests,
        floor=MEMORY.floor_log,
        usual=Usual(
            floor=COMPUTE.gpu_noise_log,
            spread=COMPUTE.gpu_spread_log,
            most=COMPUTE.gpu_most_log,
            tail_degrees=COMPUTE.tail_degrees,
        ),
        forbidden=np.zeros(len(members), dtype=bool),
        groups=tuple(groups),
        own=robust.median(kinds.memory.log_ns, axis=2),
    )
    suspects = search(task, inquiry.settings).suspects
    slow = mask_of([one.row for one in suspects], len(members))
    matrix = compare_within(kinds.matrix, members, groups, slow).value
    optimizer = optimizer_residuals(seen, stage_groups(members), slow)
    found = []
    for one in suspects:
        active = one.course.active
        group = next(rows for rows in groups if one.row in rows)
        peers = ~slow[group[group != one.row]]
        found.append(
            _SlowMemory(
                suspect=one,
                num_peers=int(peers.sum()),
                matrix=float(robust.median(matrix[one.row][active])),
                optimizer=float(robust.median(optimizer[one.row][active])),
            )
        )
    return [one for one in found if one.matrix < MEMORY.most_matrix_share * one.effect]


def _groups(members: Members) -> list[Integers]:
    """Return the rows of each stage; where each stage is one rank, all rows as one group."""
    groups = stage_groups(members)
    return groups if max(map(len, groups)) > 1 else [np.arange(len(members))]


def _finding(seen: Observations, kinds: Boundness, slow: _SlowMemory) -> Finding:
    row, course = slow.suspect.row, slow.suspect.course
    lost = np.where(course.active, kinds.memory_ns[row] * -np.expm1(-slow.effect), 0.0)
    factor = float(np.exp(slow.effect))
    return build_finding(
        seen,
        Claim(
            ranks=seen.members.workers[row],
            rows=(row,),
            cause=Cause.COMPUTE,
            owner=Owner.NODE if slow.is_confirmed else Owner.UNDECIDED,
            slowdown=factor,
            interval=slow.suspect.interval,
            course=course,
            q_value=slow.suspect.q_value,
            num_peers=slow.num_peers,
            saved_ns=saved_by_compute(seen, row, lost),
            subject=f"the memory of {ranks_of(seen.members, row)} ({place(seen.members, row)})",
            predicate=f"is {times(factor)} slower than that of its "
            f"{counted(slow.num_peers, 'peer')}",
            evidence=_evidence(seen, kinds, slow),
            advice=ADVICE,
        ),
    )


def _evidence(seen: Observations, kinds: Boundness, slow: _SlowMemory) -> tuple[str, ...]:
    row, active = slow.suspect.row, slow.suspect.course.active
    with np.errstate(divide="ignore", invalid="ignore"):
        share = float(np.median((kinds.memory_ns[row] / seen.busy_ns[row])[active]))
    optimizer = "the optimizer was not recorded beside another one"
    if np.isfinite(slow.optimizer):
        optimizer = f"the optimizer takes {np.exp(slow.optimizer):.2f}x"
    facts = (
        f"kernels that are bound by memory take {np.exp(slow.effect):.2f}x the time of its peers', "
        f"those that multiply matrices {np.exp(slow.matrix):.2f}x; {optimizer}",
        f"the former, with the optimizer, are {share:.0%} of what it computes",
    )
    if slow.is_confirmed:
        return facts
    alone = int((seen.members.stage == seen.members.stage[row]).sum()) == 1
    return (*facts, OTHER_STAGES if alone else UNCONFIRMED)


def search_memory(inquiry: Inquiry, kinds: Boundness) -> Answer:
    """Compare what kernels bound by memory take, where a profile tells them from the others."""
    seen = inquiry.seen
    if len(seen.members) < 2:
        return Answer()
    slow = [
        one for one in slow_memories(inquiry, kinds)
        if one.is_confirmed or not inquiry.named[one.suspect.row]
    ]  # fmt: skip
    return answer_of_slow_parts(seen, tuple(_finding(seen, kinds, one) for one in slow))
