"""Devices that are slow where they multiply matrices: of whole hosts, of lone stages, on any data.

Problem: all ranks of a host are slow alike, and no rank of another host does the same: the host is
a replica, whose documents may be longer, or a stage, whose layers may be heavier. Times of passes
do not tell these from a power cap, or from heat, of the whole host.

Idea: what a layer consists of tells them apart. A lower clock slows products of matrices most, and
by less what moves memory, of which attention (norms, masks, rotations, scores) has more than an
MLP. So MLPs are slower by more than attention, and attention is slow as well. Nothing that the job
does looks like that:

    more tokens, longer documents     attention is longer by as much, or by more: its time grows
                                      with the square of the length
    heavier layers                    both are longer by one factor
    wider MLPs, more for experts      attention is as quick as ever
    late launches                     attention is longer by more: its kernels are shorter

Example: a host that is a stage of two. MLPs of all its ranks take 1.17 times the time of those of
the other stage's host, attention 1.12 times; the ranks of the other host differ by 0.5 %.

A stage of one rank is judged alike, but sound chips of a model differ in their clocks by a few per
cent, too: so beside few other ranks its MLPs must be slower by more than that.

Limits: granularity full, and no experts. Where attention is bound by its products of matrices (long
documents, fused), a lower clock slows both alike, and nothing is said. Kernels of a profile do not
tell a lone stage: products that sum over more are longer at equal names and launches.

**On data that vary.** Where documents are packed or padded to unlike lengths, passes of sound ranks
vary by 10 to 40 %, each microbatch anew, and hide a device that is 1.3 times slower; or who is slow
for longer may have got the longer documents. But products (MLPs, the output layer) and lookups (the
embedding, the loss) both take time in proportion to the tokens of a pass. Their ratio has nothing
of the data left, nor of what a router sends to experts: of sound ranks it is the same within a per
cent, and a lower clock hardly lengthens lookups. It needs data that vary: whether lookups follow
the tokens is seen in the trace itself, where the ratio varies by far less than the products do.
Where all passes take as long, short lookups are launches of one length.

Example: passes of six replicas vary by 19 %. Products of rank 3 take 1.24 times the time of its
peers', its loss 1.09 times: 1.14 times for as many tokens, those of its peers 0.99 to 1.01.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from detect.causes.device import GPU_ADVICE, mates_of, over_others
from detect.causes.finding import (
    Answer,
    Claim,
    Inquiry,
    build_finding,
    rows_of_findings,
    saved_by_compute,
)
from detect.causes.launching import half_starved, is_host_bound
from detect.causes.ordinary import reach_of_sound
from detect.observe.observations import Observations
from detect.observe.operations import ATTENTION_OF_MODULES, FORWARD, MLP_OF_MODULES
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.noise import Usual
from detect.stats.residuals import chance_of_mean, stage_groups
from detect.stats.search import SearchTask, Suspect, interval_of_ratio, search
from detect.stats.stretches import Course
from detect.text import counted, place, ranks_text, times
from detect.thresholds.devices import COMPUTE, DEVICE, ORDINARY, PAIRS
from detect.thresholds.statistics import SEARCH
from detect.thresholds.verdicts import IMBALANCE
from megascan.arrays import Flags, Floats, Integers, mask_of

SPARED = (
    "MLPs take {mlp} the time of those of the other ranks, attention {attention}: a lower clock "
    "slows what moves memory by less; longer data lengthen attention by more, heavier layers both "
    "alike"
)
BY_TOKENS = (
    "its products of matrices take {slower} the time for as many tokens, as its {lookups} tells, "
    "which moves memory for each of them: neither longer data nor experts do this, a lower clock "
    "does"
)
LOOKUPS = ("embedding", "loss")


@dataclass(frozen=True, kw_only=True)
class _Spared:
    """Rows whose attention is spared, beside MLPs that are slow."""

    mlp: float
    """Log slowdown of their MLPs."""
    attention: float
    """That of their attention."""
    passes: float
    """That of passes."""
    error: float
    p_value: float


def search_spared(inquiry: Inquiry) -> Answer:
    """Search hosts, and stages of one rank, whose MLPs are slow and attention by less."""
    seen, members = inquiry.seen, inquiry.seen.members
    if not _tells_parts(seen):
        return Answer()
    known = inquiry.blamed
    slow = inquiry.slow | known
    findings, rows_found = [], list[int]()
    for rows in _candidates(seen):
        if known[rows].any():
            continue
        own = mask_of(rows.tolist(), len(members))
        found = _by_modules(seen, own, slow)
        if found is not None and found.p_value <= inquiry.settings.false_discovery_rate:
            findings.append(_finding(seen, rows, found))
            rows_found += rows.tolist()
    ranks = set(members.ranks_of(rows_found))
    return Answer(
        findings=tuple(findings),
        slow=mask_of(rows_found, len(members)),
        explains=lambda one: (
            one.owner is Owner.UNDECIDED and bool(one.ranks) and set(one.ranks) <= ranks
        ),
    )


def _tells_parts(seen: Observations) -> bool:
    """Return whether modules hold nothing but computing on GPUs, the same for all."""
    if seen.modules_ns is None:
        return False
    waits = bool(seen.hidden_axes) or FORWARD in seen.entangled_phases
    waits |= seen.waits_between_layers or seen.hides_waiting
    is_gpu = seen.members.device_kind != "cpu" and not is_host_bound(seen)
    return is_gpu and not waits and seen.members.layout.ep == 1


def _candidates(seen: Observations) -> Iterator[Integers]:
    """Yield the rows of each host, if it has several and there are others, and those that are alone
    on their stage.
    """
    members = seen.members
    hosts = np.array(members.hosts)
    for host in np.unique(hosts[hosts != ""]):
        rows = np.flatnonzero(hosts == host)
        if 1 < len(rows) < len(members):
            yield rows
    for rows in stage_groups(members):
        if len(rows) == 1 < len(members):
            yield rows


def _by_modules(seen: Observations, own: Flags, slow: Flags) -> _Spared | None:
    """Return by how much MLPs and attention of `own` rows, (row,), are slow; None where they are
    not, or not as a lower clock makes them. Rows that are `slow` are nobody's measure.
    """
    groups, excluded = stage_groups(seen.members), own | slow
    assert seen.modules_ns is not None  # of `_tells_parts`
    if not all((~excluded[rows]).any() for rows in groups if own[rows].any()):
        groups = [np.arange(len(own))]
    mlp, attention = (
        over_others(seen.modules_ns[:, :, kind], groups, excluded)
        for kind in (MLP_OF_MODULES, ATTENTION_OF_MODULES)
    )
    levels = np.stack([robust.centre(one) for one in (mlp, attention, mlp - attention)])
    others = ~excluded & np.isfinite(levels).all(axis=0)
    if not np.isfinite(levels[:, own]).all():
        return None
    slower, less, spared = (float(np.median(one)) for one in levels[:, own])
    floor, spreads = ORDINARY.most_log, np.zeros(len(levels))
    if others.sum() >= ORDINARY.min_peers:
        floor = float(np.log(ORDINARY.little_ratio))
        spreads = ORDINARY.rms_factor * np.sqrt(np.mean(levels[:, others] ** 2, axis=1))
    least = max(DEVICE.least_spared * slower, float(spreads[2]))
    is_slow = slower >= max(floor, float(spreads[0]))
    is_spared = least <= spared <= PAIRS.agrees_share * slower
    are_alike = levels[0, own].min() >= DEVICE.alike_share * slower
    are_spared = levels[2, own].min() >= DEVICE.least_spared * slower / 2
    every = np.ones(mlp.shape[1], dtype=bool)
    if not (is_slow and is_spared and are_alike and are_spared) or any(
        half_starved(seen, row, every) for row in np.flatnonzero(own).tolist()
    ):
        return None
    over = np.median((mlp - attention)[own], axis=0)
    over = over[np.isfinite(over)]
    return _Spared(
        mlp=slower,
        attention=less,
        passes=(slower + less) / 2,
        error=(slower - less) / 2,
        p_value=chance_of_mean(over) if len(over) > 1 else 1.0,
    )


def _finding(seen: Observations, rows: Integers, found: _Spared) -> Finding:
    members, num_iterations = seen.members, len(seen.iterations)
    ranks, factor = members.ranks_of(rows), float(np.exp(found.passes))
    busy_ns = np.nan_to_num(seen.busy_ns)
    quicker_ns = busy_ns.copy()
    quicker_ns[rows] *= np.exp(-found.passes)
    saved_ns = np.maximum(busy_ns.max(axis=0) - quicker_ns.max(axis=0), 0.0)
    stages = np.isin(members.stage, members.stage[rows]) & ~mask_of(rows.tolist(), len(members))
    subject = f"host {members.hosts[rows[0]]} ({ranks_text(ranks)})"
    return build_finding(
        seen,
        Claim(
            ranks=ranks,
            rows=tuple(rows.tolist()),
            cause=Cause.COMPUTE,
            owner=Owner.NODE,
            slowdown=factor,
            interval=interval_of_ratio(found.passes, found.error / 2),
            course=Course.of(np.ones(num_iterations, dtype=bool), found.passes, found.error),
            q_value=found.p_value,
            num_peers=len(members) - len(rows),
            saved_ns=saved_ns,
            is_replayed=bool(stages.any()),
            subject=subject if len(rows) > 1 else ranks_text(ranks),
            predicate=f"{'computes' if len(rows) == 1 else 'computes as a whole'} "
            f"{times(factor)} slower than {counted(len(members) - len(rows), 'other rank')}",
            evidence=(
                SPARED.format(
                    mlp=times(float(np.exp(found.mlp))),
                    attention=times(float(np.exp(found.attention))),
                ),
            ),
            advice=GPU_ADVICE,
        ),
    )


def search_by_tokens(inquiry: Inquiry) -> Answer:
    """Name the devices whose products take longer for as many tokens, not named otherwise."""
    seen, members = inquiry.seen, inquiry.seen.members
    if members.device_kind == "cpu" or seen.tokenwise is None or is_host_bound(seen):
        return Answer()
    findings: list[Finding] = []
    for kind in _kinds_that_follow(seen):
        known = inquiry.blamed | rows_of_findings(members, findings)
        suspects = _suspects(inquiry, kind, known)
        slow = known | mask_of([one.row for one in suspects], len(members))
        findings += [
            _finding_by_tokens(seen, one, kind)
            for one in suspects
            if not known[one.row] and _is_device(seen, one, kind, slow)
        ]
    ranks = {one.ranks for one in findings}
    return Answer(
        findings=tuple(findings),
        slow=rows_of_findings(members, findings),
        explains=lambda one: one.owner is Owner.UNDECIDED and one.ranks in ranks,
    )


def _by_tokens(seen: Observations, kind: int, excluded: Flags) -> Floats:
    """Return what products take for as many tokens over those of the stage's others, log."""
    assert seen.tokenwise is not None  # of `search_by_tokens`
    ratio = seen.tokenwise.dense_ns / seen.tokenwise.lookups_ns[:, :, kind]
    return over_others(ratio, stage_groups(seen.members), excluded)


def _kinds_that_follow(seen: Observations) -> list[int]:
    """Return the kinds of lookups that follow the tokens, and products with them: these vary, and
    their ratio by far less. The closest first.
    """
    assert seen.tokenwise is not None
    nobody = np.zeros(len(seen.members), dtype=bool)
    products = over_others(seen.tokenwise.dense_ns, stage_groups(seen.members), nobody)
    found = []
    for kind in range(seen.tokenwise.lookups_ns.shape[2]):
        ratio = _by_tokens(seen, kind, nobody)
        both = np.isfinite(ratio) & np.isfinite(products)
        varies, rest = (
            robust.median(robust.spread(np.where(both, one, np.nan), axis=1))
            for one in (products, ratio)
        )
        if varies >= IMBALANCE.min_sequence_spread_log and rest <= COMPUTE.follows_share * varies:
            found.append((float(rest), kind))
    return [kind for _, kind in sorted(found)]


def _suspects(inquiry: Inquiry, kind: int, known: Flags) -> tuple[Suspect, ...]:
    seen = inquiry.seen
    task = SearchTask(
        compare=lambda excluded: _by_tokens(seen, kind, excluded | known),
        num_rows=len(seen.members),
        num_tests=inquiry.num_tests,
        floor=float(np.log(inquiry.settings.min_slowdown)),
        usual=Usual(
            floor=COMPUTE.gpu_noise_log,
            spread=COMPUTE.gpu_spread_log,
            most=COMPUTE.gpu_most_log,
            tail_degrees=COMPUTE.tail_degrees,
        ),
        forbidden=known,
        groups=tuple(stage_groups(seen.members)),
        patience=SEARCH.patience_for_hosts,
    )
    return search(task, inquiry.settings).suspects


def _is_device(seen: Observations, suspect: Suspect, kind: int, slow: Flags) -> bool:
    """Return whether a row is slower than one more sound device may be, for itself (no TP mate is
    as slow), does not wait for its host, and none of its peers has slow memory.
    """
    row, course = suspect.row, suspect.course
    members, active = seen.members, course.active
    level = robust.centre(_by_tokens(seen, kind, slow)[:, active])
    peers = members.rows_of_stage(int(members.stage[row]))
    others = level[peers[~slow[peers]]]
    others = others[np.isfinite(others)]
    if len(others) < ORDINARY.min_peers or half_starved(seen, row, active):
        return False
    if np.nan_to_num(level[mates_of(members, row)]).max(initial=0.0) > (
        PAIRS.agrees_share * course.effect
    ):
        return False
    return course.effect >= max(
        reach_of_sound([others], len(others)), float(np.log(ORDINARY.steps_alike_ratio))
    )


def _finding_by_tokens(seen: Observations, suspect: Suspect, kind: int) -> Finding:
    members, row, course = seen.members, suspect.row, suspect.course
    factor = float(np.exp(course.effect))
    num_peers = len(members.rows_of_stage(int(members.stage[row]))) - 1
    lost_ns = np.where(course.active, np.nan_to_num(seen.busy_ns[row]) * (1.0 - 1.0 / factor), 0.0)
    return build_finding(
        seen,
        Claim(
            ranks=members.workers[row],
            rows=(row,),
            cause=Cause.COMPUTE,
            owner=Owner.NODE,
            slowdown=factor,
            interval=suspect.interval,
            course=course,
            q_value=suspect.q_value,
            num_peers=num_peers,
            saved_ns=saved_by_compute(seen, row, lost_ns),
            subject=f"rank {members.ranks[row]} ({place(members, row)})",
            predicate=f"computes {times(factor)} slower for as many tokens than its "
            f"{counted(num_peers, 'peer')}",
            evidence=(BY_TOKENS.format(slower=times(factor), lookups=LOOKUPS[kind]),),
            advice=GPU_ADVICE,
        ),
    )
