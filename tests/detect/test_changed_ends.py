"""Which rank of a group that waits unseen is slow at times: its ends are late in just these."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner
from detect.causes import changed_ends
from detect.detector import judge
from detect.observe.extract import observe
from detect.observe.operations import LOSS_OF_LOOKUPS, Tokenwise
from megascan.topology import Layout

SLOW = range(10, 15)
"""Iterations in which a group takes 1.25 times as long."""


def nodes(seen):
    findings = judge(seen, DetectorSettings()).findings
    return [(one.ranks, one.cause) for one in findings if one.owner is Owner.NODE]


def observed(job, layout, group, changes, slow=SLOW):
    """Observe a job of which a `group` is slow in some iterations; `changes` says by which factor
    the work of a rank of a phase, or of the optimizer, differs from its mates' then.
    """

    def work(slot):
        if slot.rank not in group or slot.iteration not in slow:
            return 1.0
        kind = slot.name if slot.name == "optimizer" else slot.phase
        usual = 1.0 if kind == "optimizer" else 1.25
        return usual * changes.get((slot.rank, kind), 1.0)

    seen = observe(job(layout=layout, work=work, noise=0.002).timeline())
    return replace(seen, splits_tensor_groups=layout.tp == 1)


def with_loss(seen, ranks, longer_ms, slow=SLOW):
    """Add losses of 1 ms, and longer ones of some ranks where a group is slow."""
    shape = seen.busy_ns.shape
    loss_ns = 1e6 * np.random.default_rng(1).normal(1.0, 0.002, shape)
    at = np.isin(seen.iterations, list(slow))
    for rank in ranks:
        loss_ns[rank, at] += 1e6 * longer_ms
    lookups_ns = np.full((*shape, 2), np.nan)
    lookups_ns[:, :, LOSS_OF_LOOKUPS] = loss_ns
    return replace(
        seen, tokenwise=Tokenwise(dense_ns=np.full(shape, np.nan), lookups_ns=lookups_ns)
    )


LATE = {(3, "backward"): 1.05, (3, "forward"): 0.9}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (LATE, [((3,), Cause.COMPUTE)]),
        ({}, []),
        ({(3, "backward"): 1.05}, []),
        ({(3, "backward"): 1.2, (3, "forward"): 0.6}, []),
    ],
    ids=["ends late", "none does", "nothing agrees", "a pause at the end of its passes"],
)
def test_the_rank_that_ends_late_while_its_group_is_slow_is_named(job, changes, named):
    seen = observed(job, Layout(tp=2, dp=2, pp=2), {2, 3}, changes)
    assert nodes(seen) == named


def test_who_ends_late_in_a_group_that_nobody_waits_for_is_undecided(job, monkeypatch):
    """Its group may wait inside its passes, for another stage that is slow at other times."""
    seen = observed(job, Layout(tp=2, dp=2, pp=2), {2, 3}, LATE)
    made = changed_ends.build_finding

    def free(*claim):
        return replace(made(*claim), step_time_cost_ratio=1.0, cost_is_replayed=True)

    monkeypatch.setattr(changed_ends, "build_finding", free)
    assert nodes(seen) == []
    (finding,) = [one for one in judge(seen, DetectorSettings()).findings if one.ranks == (3,)]
    assert changed_ends.NOBODY_WAITS in finding.evidence


def test_a_rank_that_always_ends_late_says_nothing_of_when_its_group_is_slow(job):
    def work(slot):
        usual = 1.25 if slot.rank in (2, 3) and slot.iteration in SLOW else 1.0
        return usual * LATE.get((slot.rank, slot.phase), 1.0)

    seen = observe(job(layout=Layout(tp=2, dp=2, pp=2), work=work, noise=0.002).timeline())
    assert nodes(replace(seen, splits_tensor_groups=False)) == []


@pytest.mark.parametrize(
    ("ranks", "longer_ms", "named"),
    [
        ((7,), 0.1, [((7,), Cause.COMPUTE)]),  # its own loss takes longer
        ((6,), 3.0, [((7,), Cause.COMPUTE)]),  # its mate waits for it in the loss
        ((), 0.0, []),
    ],
    ids=["loss", "waits in the loss", "neither"],
)
def test_on_the_last_stage_the_loss_tells_which_end_is_late(job, ranks, longer_ms, named):
    """Forward passes end with the output layer: where the loss does not wait for a rank that is
    late, its backward passes begin late and are shorter than its mate's.
    """
    changes = {(7, "backward"): 1.05 if longer_ms > 1.0 else 0.95}
    if ranks == (7,):
        changes[7, "optimizer"] = 1.05
    seen = observed(job, Layout(tp=2, dp=2, pp=2), {6, 7}, changes)
    assert nodes(with_loss(seen, ranks, longer_ms) if ranks else seen) == named


@pytest.mark.parametrize(
    ("layout", "changes", "named"),
    [
        (Layout(ep=2, dp=4), {(3, "optimizer"): 1.05}, [((3,), Cause.COMPUTE)]),
        (Layout(ep=2, dp=4), {}, []),  # longer data lengthen a loss as well
        (Layout(ep=2, dp=4, pp=2), LATE, [((3,), Cause.COMPUTE)]),  # data are its last stage's too
    ],
    ids=["step", "data", "another stage"],
)
def test_ranks_of_experts_get_data_of_their_own(job, layout, changes, named):
    seen = observed(job, layout, {2, 3}, changes)
    assert seen.hidden_axes == ("ep",)
    assert nodes(with_loss(seen, (3,), 0.1)) == named
