"""Which rank of a TP group ends its passes late, where nobody recorded what its ranks send."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner
from detect.detector import judge
from detect.observe.extract import observe
from detect.observe.operations import LOSS_OF_LOOKUPS, OUTPUT_OF_MODULES, Tokenwise
from megascan.topology import Layout


def nodes(seen):
    findings = judge(seen, DetectorSettings()).findings
    return [(one.ranks, one.cause) for one in findings if one.owner is Owner.NODE]


def with_ends(seen, *, output=None, loss=None):
    """Add what a span of the output layer and of the loss takes on each rank, ms."""
    shape = seen.busy_ns.shape
    modules_ns, lookups_ns = np.full((*shape, 3), np.nan), np.full((*shape, 2), np.nan)
    noise = np.random.default_rng(1).normal(1.0, 0.002, shape)
    if output is not None:
        modules_ns[:, :, OUTPUT_OF_MODULES] = 1e6 * np.array(output)[:, None] * noise
    if loss is not None:
        lookups_ns[:, :, LOSS_OF_LOOKUPS] = 1e6 * np.array(loss)[:, None] * noise
    told = Tokenwise(dense_ns=np.full(shape, np.nan), lookups_ns=lookups_ns)
    return replace(seen, modules_ns=modules_ns, tokenwise=told)


def of_pair(job, backward=1.0, usual=1.0):
    """Observe a job of one TP group, of which rank 1's backward passes take so much longer."""

    def work(slot):
        return usual * (backward if slot.rank == 1 and slot.phase == "backward" else 1.0)

    return observe(job(layout=Layout(tp=2), work=work).timeline())


@pytest.mark.parametrize(
    ("output", "named"),
    [((2.0, 2.6), [((1,), Cause.COMPUTE)]), ((2.0, 2.06), [])],
    ids=["slow", "chips"],
)
def test_the_output_layer_of_a_lone_group_tells_who_is_slow(job, output, named):
    assert nodes(with_ends(of_pair(job), output=output)) == named


@pytest.mark.parametrize(
    ("loss", "backward", "named"),
    [
        ((4.0, 1.0), 1.08, [((1,), Cause.COMPUTE)]),
        ((4.0, 1.0), 1.0, []),
        ((1.1, 1.0), 1.08, []),
    ],
    ids=["all wait for it", "its backward passes end in time", "they hardly wait"],
)
def test_the_loss_tells_for_whom_the_others_wait(job, loss, backward, named):
    assert nodes(with_ends(of_pair(job, backward), loss=loss)) == named


@pytest.mark.parametrize(("lead_ms", "named"), [(0.12, [((1,), Cause.COMPUTE)]), (0.05, [])])
def test_a_short_loss_that_is_launched_late_is_no_waiting(job, lead_ms, named):
    """Forward passes take 0.6 ms; a host launches some kernels of a loss in 0.1 ms."""
    seen = of_pair(job, 1.2, usual=0.03)
    assert nodes(with_ends(seen, loss=(0.01 + lead_ms, 0.01))) == named


@pytest.mark.parametrize(("elsewhere", "named"), [(1.0, [((5,), Cause.COMPUTE)]), (1.06, [])])
def test_backward_passes_of_other_stages_show_by_how_much_mates_differ(job, elsewhere, named):
    """Rank 5 ends its backward passes 3 % of them later than its mate, and begins late."""

    def work(slot):
        if slot.rank in (0, 2):  # a first stage, whose ranks differ by themselves
            return elsewhere if slot.phase == "backward" else 1.0
        by_phase = {5: {"backward": 1.13, "forward": 1.02}, 4: {"backward": 1.1, "forward": 1.1}}
        return by_phase.get(slot.rank, {}).get(slot.phase, 1.0)

    seen = observe(job(layout=Layout(tp=2, dp=2, pp=2), work=work).timeline())
    found = nodes(replace(seen, splits_tensor_groups=True))
    assert [one for one in found if one[0] == (5,)] == named
