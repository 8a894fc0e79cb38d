"""Heavy stages and uneven sequences as findings of the job, not of a node."""

from __future__ import annotations

import numpy as np

from detect.causes.imbalance import HeavyStage, SequenceSkew
from detect.findings.finding import Claim, build_finding
from detect.findings.wording import counted, milliseconds, percent, times
from detect.observations import Observations
from detect.report import Cause, Finding, Owner


def stage_finding(seen: Observations, heavy: HeavyStage) -> Finding:
    """A heavy stage; undecided where a lone rank is slower by the same ratio at everything."""
    rows = seen.members.rows_of_stage(heavy.stage)
    ranks = tuple(rank for row in rows for rank in seen.members.workers[row])
    suspicious = heavy.looks_like_device
    last = heavy.stage == int(seen.members.stage.max())
    which = "last stage" if last else "first stage" if heavy.stage == 0 else "stage"
    return build_finding(
        seen,
        Claim(
            ranks=ranks,
            rows=tuple(rows.tolist()),
            cause=Cause.STAGE_IMBALANCE,
            owner=Owner.UNDECIDED if suspicious else Owner.JOB,
            slowdown=heavy.ratio,
            interval=heavy.interval,
            course=None,
            q_value=min(1.0, heavy.p_value * len(np.unique(seen.members.stage))),
            num_peers=len(seen.members) - len(rows),
            saved_ns=heavy.saved_ns,
            subject=f"{which} PP{heavy.stage} ({counted(len(ranks), 'rank')})",
            predicate=f"has {times(heavy.ratio)} the work of the other stages",
            evidence=_stage_evidence(heavy),
        ),
    )


def _stage_evidence(heavy: HeavyStage) -> tuple[str, ...]:
    sentences = []
    if heavy.num_replicas > 1:
        sentences.append(
            f"all {heavy.num_replicas} ranks of the stage agree within "
            f"{percent(float(np.exp(heavy.replica_spread)))}, so no single device is the reason"
        )
    sentences.append(
        f"forward {times(heavy.ratio_forward)} (+{milliseconds(heavy.excess_forward_ns)} a "
        f"microbatch), backward {times(heavy.ratio_backward)} "
        f"(+{milliseconds(heavy.excess_backward_ns)}): "
        + (
            "the same ratio, as a slow device would show, and there is no replica to compare with; "
            "a second replica or a benchmark of that device decides"
            if heavy.looks_like_device
            else "extra work, not a slow device, which would multiply both alike"
            if abs(np.log(heavy.ratio_forward / heavy.ratio_backward)) > 0.06
            else "extra work shared by the stage"
        )
    )
    if np.isfinite(heavy.layer_ratio):
        sentences.append(
            f"its transformer layers take {times(heavy.layer_ratio)} the time of the other stages'"
        )
    return tuple(sentences)


def sequence_finding(seen: Observations, skew: SequenceSkew) -> Finding:
    """Uneven sequences; no rank is named, because none keeps it."""
    spread = percent(float(np.exp(skew.spread)))
    where = (
        "ranks of the same replica are slow on the same microbatches"
        if skew.across_ranks
        else "forward and backward of a microbatch are slow together"
    )
    return build_finding(
        seen,
        Claim(
            ranks=(),
            rows=(),
            cause=Cause.SEQUENCE_IMBALANCE,
            owner=Owner.JOB,
            slowdown=skew.ratio,
            interval=skew.interval,
            course=None,
            q_value=skew.p_value,
            num_peers=len(seen.members),
            saved_ns=skew.saved_ns,
            subject="the microbatches",
            predicate=f"are uneven: the longest replica computes {times(skew.ratio)} the mean",
            evidence=(
                f"the same microbatch slot differs between replicas by {spread} (robust standard "
                "deviation), and other replicas are the longest in other iterations",
                f"{where} (rank correlation {skew.correlation:.2f})",
            ),
        ),
    )
