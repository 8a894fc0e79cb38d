"""Devices that multiply matrices slowly beside what they move in memory for the same tokens.

Problem: where documents are packed or padded to unlike lengths, passes of sound ranks vary by 10 to
40 %, each microbatch anew, and hide a device that is 1.3 times slower; or who is slow for longer
may have got the longer documents.

Idea: products of matrices (MLPs, the output layer) and lookups (the embedding, the loss) both take
time in proportion to the tokens of a pass. Their ratio has nothing of the data left, nor of what a
router sends to experts: of sound ranks it is the same within a per cent. A lower clock lengthens
the products, and hardly the lookups, which move memory.

Example: passes of six replicas vary by 19 %. Products of rank 3 take 1.24 times the time of its
peers', its loss 1.09 times: 1.14 times for as many tokens, those of its peers 0.99 to 1.01.

Limits: granularity full, and data that vary. Whether lookups follow the tokens is seen in the trace
itself: the ratio varies by far less than the products do. Where all passes take as long, short
lookups are launches of one length, and longer data would show the same.
"""

from __future__ import annotations

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
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.residuals import Usual, stage_groups
from detect.stats.search import SearchTask, Suspect, search
from detect.text import counted, place, times
from detect.thresholds.devices import COMPUTE, ORDINARY, PAIRS
from detect.thresholds.statistics import SEARCH
from detect.thresholds.verdicts import IMBALANCE
from megascan.arrays import Flags, Floats, mask_of

WHY = (
    "its products of matrices take {slower} the time for as many tokens, as its {lookups} tells, "
    "which moves memory for each of them: neither longer data nor experts do this, a lower clock "
    "does"
)
LOOKUPS = ("embedding", "loss")


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
            _finding(seen, one, kind)
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


def _finding(seen: Observations, suspect: Suspect, kind: int) -> Finding:
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
            evidence=(WHY.format(slower=times(factor), lookups=LOOKUPS[kind]),),
            advice=GPU_ADVICE,
        ),
    )
