"""Devices that are slow in few iterations of a profile: throttled for a while, or shared.

Problem: a profile has two to eight iterations. A device that is throttled in one or two of them is
slow in too few for a level, and as these follow each other, they count as one pause.

Idea: an iteration of a profile holds hundreds of kernels, each of which takes as long as the same
kernel of the same rank in other iterations, within a per cent. So a rank is compared with itself,
kernel by kernel, and what everybody shows in the iteration is taken out:

    change of (rank, iteration, part) = log (its kernels' time / typical in its other iterations)
                                      - median of that log over the other ranks

A device is slow in an iteration where nearly all parts of both passes are, by one factor. Peers are
not needed: neither ranks on the same data nor ranks of the same stage. The data do not explain it,
for other shapes are other launches. Where one iteration alone is slow, the optimizer, which no data
lengthen, has to be slower, too, and by more than any other rank's ever is.

Example: in iteration 102 of four all kernels of rank 11 take 1.60 times as long as in 103 to 105,
its optimizer 1.09 times; no other rank differs by 2 %.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detect.causes.device import waits_beside
from detect.causes.finding import Answer, Claim, Inquiry, build_finding, saved_by_compute
from detect.causes.launching import starvation
from detect.causes.pass_hits import over_quiet
from detect.causes.searches import ADVICE
from detect.observe.observations import Observations
from detect.observe.operations import BACKWARD, FORWARD, Work
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.residuals import t_tail
from detect.stats.search import interval_of_ratio
from detect.stats.stretches import Course, episodes_of
from detect.text import counted, subject_of, times
from detect.thresholds.devices import COMPUTE, SPELLS
from megascan.arrays import Flags, Floats, Integers, mask_of

ALONE = (
    "one iteration alone is slow, and its optimizer, which no data can lengthen, does not show it "
    "beyond what other ranks' optimizers vary by: more iterations in a row decide"
)


@dataclass(frozen=True, kw_only=True)
class _Spell:
    """A row that is slow in some iterations."""

    row: int
    active: Flags
    """(iteration,)"""
    effect: float
    """Log slowdown of the slow iterations."""
    error: float
    optimizer: float
    """Log slowdown of its optimizer in these iterations; NaN where it was not recorded."""
    optimizer_noise: float
    """The most that another rank's optimizer shows in any iteration."""
    q_value: float

    @property
    def is_confirmed(self) -> bool:
        """Return whether a data-dependent length, or a single accident, is excluded."""
        least = max(SPELLS.optimizer_share * self.effect, self.optimizer_noise)
        return bool(self.active.sum() > 1 or self.optimizer > least)


def spells(history: Work, optimizer_ns: Floats, known: Flags, num_tests: int) -> list[_Spell]:
    """Return the rows that are slow in up to half of the iterations, `known` rows left out."""
    own = over_quiet(history.log_ns, 0.5)
    change = own - robust.expected_from_others(own, known)
    level = robust.median(change, axis=2)
    if not np.isfinite(level[~known]).any():
        return []
    noise = _noise(level[~known])
    slow = _slow_iterations(own, change, history.phase)
    with np.errstate(divide="ignore", invalid="ignore"):
        own_steps = over_quiet(np.log(optimizer_ns)[:, :, None], 0.5)[:, :, 0]
        optimizer = own_steps - robust.expected_from_others(own_steps, known)
    found = []
    for row in np.flatnonzero(slow.any(axis=1) & ~known).tolist():
        active = slow[row]
        effect = float(robust.median(level[row][active]))
        others = (level >= SPELLS.agrees_share * effect) & ~known[:, None]
        others[row] = False
        q_value = t_tail(effect / noise, COMPUTE.tail_degrees) * num_tests * len(active)
        if active.mean() > SPELLS.most_share or others.any():
            continue
        found.append(
            _Spell(
                row=row,
                active=active,
                effect=effect,
                error=noise / float(np.sqrt(active.sum())),
                optimizer=float(robust.median(optimizer[row][active])),
                optimizer_noise=float(np.nan_to_num(np.delete(optimizer, row, axis=0)).max()),
                q_value=min(1.0, q_value),
            )
        )
    return found


def _noise(level: Floats) -> float:
    """Return by how much `level`, (row, iteration), varies in iterations in which no row is slow,
    or looks far too quick next to a slow one.
    """
    quiet = (np.abs(np.nan_to_num(level)) < SPELLS.floor_log).all(axis=0)
    usual = robust.spread(level[:, quiet] if quiet.any() else level)
    return max(SPELLS.noise_log, float(np.nan_to_num(usual)))


def _slow_iterations(own: Floats, change: Floats, phase: Integers) -> Flags:
    """Flag the iterations in which nearly all parts of both passes are slow, (row, iteration)."""
    level = robust.median(change, axis=2)
    least = SPELLS.agrees_share * level
    slow: Flags = level >= SPELLS.floor_log
    for one in (FORWARD, BACKWARD):
        of_phase = change[:, :, phase == one]
        num_known = np.isfinite(of_phase).sum(axis=2)
        num_slow = (of_phase >= least[:, :, None]).sum(axis=2)
        slow &= num_slow >= SPELLS.parts_share * num_known
    return np.asarray(slow & (robust.median(own, axis=2) >= least))  # else others were quick


def _finding(seen: Observations, spell: _Spell) -> Finding:
    row, active, effect = spell.row, spell.active, spell.effect
    own = mask_of([row], len(seen.members))
    starved = starvation(seen, row, active, effect)
    owner = Owner.NODE if spell.is_confirmed else Owner.UNDECIDED
    reasons = () if spell.is_confirmed else (ALONE,)
    if starved is not None:
        owner, reasons = starved[0], (starved[1],)
    elif beside := waits_beside(seen, own, ~own, active, effect):
        owner, reasons = Owner.UNDECIDED, (beside,)
    share = np.where(active, -np.expm1(-effect), 0.0)
    factor = float(np.exp(effect))
    return build_finding(
        seen,
        Claim(
            ranks=seen.members.workers[row],
            rows=(row,),
            cause=Cause.COMPUTE if starved is None else Cause.HOST,
            owner=owner,
            slowdown=factor,
            interval=interval_of_ratio(effect, spell.error),
            course=Course(active, effect, spell.error, 1.0, episodes_of(active)),
            q_value=spell.q_value,
            num_peers=len(seen.members) - 1,
            saved_ns=saved_by_compute(seen, row, np.nan_to_num(seen.busy_ns[row]) * share),
            subject=subject_of(seen.members, row),
            predicate=f"computes {times(factor)} slower than in its other iterations",
            evidence=(*_evidence(spell), *reasons),
            advice=ADVICE[Cause.COMPUTE],
        ),
    )


def _evidence(spell: _Spell) -> tuple[str, ...]:
    optimizer = "its optimizer was not recorded"
    if np.isfinite(spell.optimizer):
        optimizer = f"its optimizer takes {np.exp(spell.optimizer):.2f}x the time"
    num_slow, num_iterations = int(spell.active.sum()), len(spell.active)
    return (
        f"in {num_slow} of {counted(num_iterations, 'iteration')} the same kernels take "
        f"{np.exp(spell.effect):.2f}x the time, those of both passes alike; {optimizer}",
        "no other rank changed by half as much in any iteration",
    )


def search_spells(inquiry: Inquiry, history: Work) -> Answer:
    """Compare each rank of a profile with itself, kernel by kernel; `history` is what it ran."""
    seen = inquiry.seen
    if seen.members.device_kind == "cpu" or len(seen.members) < 2:
        return Answer()
    known = inquiry.slow | inquiry.named
    found = [
        one for one in spells(history, seen.optimizer_ns, known, inquiry.num_tests)
        if one.q_value <= inquiry.settings.false_discovery_rate
    ]  # fmt: skip
    slow = mask_of([one.row for one in found], len(known))
    return Answer(findings=tuple(_finding(seen, one) for one in found), slow=slow)
