"""What mending a rank saves, against the simulator's own run without the fault.

The same seed draws the same noise, so the two simulated runs differ by the fault alone.
"""

from __future__ import annotations

import numpy as np
import pytest

from aggregate import build_timeline
from detect import Cause
from detect.whatif import Replay, replay_of_timeline, saved_by_fixing
from detect.whatif.savings import ReplayedCosts
from detect.whatif.slowness import analyze, worst_ranks
from megascan.schema import Granularity
from megascan.simulate import JobModel, compute_bound, parse_fault, simulate_trace
from megascan.topology import Layout

LAYOUTS = {
    "no pipeline": Layout(dp=4),
    "tensor": Layout(tp=4, dp=2),
    "context": Layout(cp=2, dp=2),
    "expert": Layout(ep=2, dp=4),
    "pipeline": Layout(pp=4, dp=2),
    "interleaved": Layout(pp=2, vpp=2, dp=2),
    "all": Layout(tp=2, pp=2, dp=2, cp=2),
}


def replayed(layout: Layout, *faults: str, granularity: Granularity = Granularity.FULL) -> Replay:
    job = JobModel(
        layout=layout,
        granularity=granularity,
        costs=compute_bound(layout),
        iterations=8,
        num_layers=2 * layout.pp * layout.vpp,
        num_microbatches=8,
    )
    return replay_of_timeline(
        build_timeline(simulate_trace(job, [parse_fault(one) for one in faults], seed=11))
    )


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_a_mended_rank_saves_what_the_fault_cost(layout: Layout) -> None:
    slow = layout.world_size - 1
    faulty = replayed(layout, f"rank={slow},kind=compute,factor=1.4")
    healthy_s = float(replayed(layout).measured.mean())
    saving = saved_by_fixing(faulty, [slow])
    assert saving.fixed_step_s == pytest.approx(healthy_s, rel=0.02)
    assert saving.speedup == pytest.approx(float(faulty.measured.mean()) / healthy_s, rel=0.02)
    assert worst_ranks(analyze(faulty)) == (slow,)


def test_what_mates_wait_for_inside_their_passes_is_saved_with_a_link() -> None:
    """At granularity base nobody records that TP mates wait for the one whose messages are late."""
    layout, base = Layout(tp=2, pp=4), Granularity.BASE
    faulty = replayed(layout, "rank=1,peer=3,kind=link,factor=20", granularity=base)
    healthy_s = float(replayed(layout, granularity=base).measured.mean())
    truth = float(faulty.measured.mean()) / healthy_s
    assert truth > 1.3
    assert saved_by_fixing(faulty, [1, 3], links=True).speedup == pytest.approx(truth, rel=0.01)


def test_what_other_stages_wait_for_in_the_optimizer_is_saved_as_well() -> None:
    """At granularity base nobody records the norm's exchange, in which they wait for stage 0."""
    layout, base = LAYOUTS["pipeline"], Granularity.BASE
    faulty = replayed(layout, "rank=0,kind=compute,factor=1.4", granularity=base)
    healthy_s = float(replayed(layout, granularity=base).measured.mean())
    truth = float(faulty.measured.mean()) / healthy_s
    assert truth > 1.02
    assert saved_by_fixing(faulty, [0]).speedup == pytest.approx(truth, abs=0.004)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_the_replay_agrees_with_the_simulator(layout: Layout) -> None:
    assert np.abs(replayed(layout).error_ratio).max() < 0.02


def test_a_slow_link_saves_what_it_cost() -> None:
    layout = Layout(pp=2, dp=2)
    faulty = replayed(layout, "rank=1,peer=3,kind=link,factor=40")
    healthy_s = float(replayed(layout).measured.mean())
    cost = float(faulty.measured.mean()) / healthy_s
    assert cost > 1.02
    saving = saved_by_fixing(faulty, [1, 3], links=True)
    assert saving.speedup == pytest.approx(cost, rel=0.02)


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        (Layout(dp=4), "rank=1,kind=link,factor=8"),  # all ranks take part in its one reduction
        (Layout(pp=4), "rank=1,peer=2,kind=link,factor=40"),  # each stage is a single rank
    ],
    ids=["of all ranks", "of two stages"],
)
def test_transfers_that_no_other_ranks_have_become_quicker_by_what_they_are_slow_by(
    layout: Layout, fault: str
) -> None:
    faulty, sound = replayed(layout, fault), replayed(layout)
    truth = float(faulty.measured.mean() / sound.measured.mean())
    assert truth > 1.01
    slowdown, ranks = float(fault.rpartition("=")[2]), (1,) if layout.pp == 1 else (1, 2)
    costs = ReplayedCosts(lambda: faulty)
    told = costs.ratio(ranks, (Cause.LINK,), (1, 99), slowdown=slowdown)
    assert told == pytest.approx(truth, rel=0.01)
