"""Whether a trace lets anybody tell which device is slow, and how the table counts it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pytest

from benchmarks.grounds.avoided import EVERYTHING
from benchmarks.grounds.compared import ALONE, FEW, ONE_OTHER, TOLD, UNSEEN, told_by_peers
from benchmarks.grounds.ground import Planted
from benchmarks.grounds.outcome import Named, Outcome, table_of_devices, table_of_networks
from megascan.topology import Layout

SLOW = Planted(
    kind="gpu_clock", cause="compute", owner="node", ranks=(0,), factor=1.3, cost_ratio=1.2
)
SETTLED = range(3, 8)


def job(*, seen=(), by=range(64), iterations=SETTLED, missing=(), **sizes):
    """A job whose ranks record a pass in each iteration, and some a collective on axes `seen`."""
    layout = Layout(**sizes)
    recorded = [rank for rank in range(layout.world_size) if rank not in missing]
    rows = [
        (rank, kind, group, iteration)
        for rank in recorded
        for iteration in iterations
        for kind, group in [
            ("compute", ""),
            *(("collective", f"{axis}@0") for axis in seen if rank in by),
        ]
    ]
    rank, kind, group, iteration = zip(*rows, strict=True)
    spans = pa.table({
        "rank": rank,
        "kind": pa.array(kind).dictionary_encode(),
        "group": pa.array(group).dictionary_encode(),
        "iteration": iteration,
    })  # fmt: skip
    return SimpleNamespace(layout=layout, headers=dict.fromkeys(recorded), spans=spans)


@pytest.mark.parametrize(
    ("timeline", "ranks", "told"),
    [
        (job(dp=3), (0,), TOLD),
        (job(tp=2, dp=2), (0,), UNSEEN),
        (job(tp=2, dp=2, seen=["dp"]), (0,), UNSEEN),
        (job(tp=2, dp=2, seen=["tp"]), (0,), TOLD),
        (job(tp=2, dp=3, seen=["tp"], by=[1]), (0,), TOLD),
        (job(tp=2, dp=3, seen=["tp"], by=[2, 3]), (0,), UNSEEN),
        (job(tp=2, dp=2, seen=["tp_cp"]), (0,), TOLD),
        (job(cp=2, dp=2, seen=["dp_cp"]), (0,), UNSEEN),
        (job(tp=2, cp=2, seen=["tp"]), (0,), UNSEEN),
        (job(tp=2, cp=2, seen=["tp", "cp"]), (0,), TOLD),
        (job(ep=2, dp=4, seen=["dp", "expt_dp"]), (0,), UNSEEN),
        (job(ep=2, dp=4, seen=["ep"]), (0,), TOLD),
        (job(ep=2, dp=4, seen=["tp_ep"]), (0,), TOLD),
        (job(ep=2, dp=2, missing=[1]), (0,), UNSEEN),
        (job(tp=2, dp=2), (0, 1), ONE_OTHER),
        (job(tp=2, dp=3), (0, 1), TOLD),
        (job(tp=2, dp=3), (0, 2), UNSEEN),
        (job(tp=2, cp=2, dp=3, seen=["cp"]), (0, 1), TOLD),
        (job(tp=2, cp=2, dp=3), (0, 1), UNSEEN),
    ],
    ids=["nobody to wait for", "TP", "only gradients of TP", "TP seen", "TP seen by a mate",
         "TP seen in another group", "TP seen with CP", "CP",
         "CP beside TP", "both", "experts", "experts seen", "experts seen with TP",
         "mate not recorded", "slow together, one other group", "slow together, two other groups",
         "slow apart", "CP seen, all of TP slow", "a mate of a mate"],
)  # fmt: skip
def test_a_device_hides_among_mates_that_wait_for_it_unseen(timeline, ranks, told):
    assert told_by_peers(timeline, (replace(SLOW, ranks=ranks),)) == (told,)


@pytest.mark.parametrize(
    ("timeline", "ranks", "told"),
    [
        (job(pp=4), (0,), ALONE),
        (job(dp=1), (0,), ALONE),
        (job(pp=2, dp=2), (0,), ONE_OTHER),
        (job(pp=2, dp=2), (0, 2), ONE_OTHER),
        (job(pp=2, dp=2), (0, 1), ALONE),
        (job(dp=4), (0, 1, 2, 3), ALONE),
        (job(dp=4), (0, 1, 2), ONE_OTHER),
        (job(pp=2, dp=4), (0, 1, 2, 3, 4), TOLD),
        (job(tp=2, pp=2, seen=["tp"]), (0,), ONE_OTHER),
        (job(dp=3, missing=[2]), (0,), ONE_OTHER),
        (job(dp=3, missing=[0]), (0,), ALONE),
        (job(dp=3, missing=[0]), (0, 1), ONE_OTHER),
    ],
    ids=["no replica", "one rank", "one replica", "a host of unlike stages", "a host of one stage",
         "all", "all but one", "one rank of a host has peers", "a TP mate", "peer not recorded",
         "not recorded", "one of two recorded"],
)  # fmt: skip
def test_a_device_is_told_by_others_of_equal_work(timeline, ranks, told):
    assert told_by_peers(timeline, (replace(SLOW, ranks=ranks),)) == (told,)


def test_ranks_with_another_fault_are_no_peers():
    other = replace(SLOW, cause="loader", kind="loader", ranks=(1,))
    timeline = job(dp=3)
    assert told_by_peers(timeline, (SLOW, other)) == (ONE_OTHER, "")
    assert told_by_peers(timeline, (SLOW, replace(other, owner="job"))) == (TOLD, "")
    assert told_by_peers(timeline, (other, replace(SLOW, owner="job"))) == ("", "")


@pytest.mark.parametrize(
    ("iterations", "told"),
    [(range(1, 7), FEW), (range(1, 8), TOLD), (range(70, 74), FEW), (range(70, 75), TOLD)],
)
def test_iterations_that_warm_up_do_not_count(iterations, told):
    assert told_by_peers(job(dp=3, iterations=iterations), (SLOW,)) == (told,)
    assert told_by_peers(job(dp=1, iterations=iterations), (SLOW,)) == (ALONE,)


def outcome(told, *, found=False, **given):
    fault = replace(SLOW, **given)
    finding = Named(
        ranks=fault.ranks, cause=fault.cause, owner="node", slowdown=1.3, interval=(1.2, 1.4),
        first_iteration=1, cost_ratio=1.2,
    )  # fmt: skip
    return Outcome(
        ground="g", name="n", family="f", num_ranks=4, verdict="", planted=(fault,),
        findings=(finding,) if found else (), told=told,
    )  # fmt: skip


def test_slow_devices_are_counted_by_what_the_trace_tells():
    outcomes = [
        outcome((TOLD,), found=True), outcome((TOLD,)), outcome((FEW,), found=True),
        outcome((ONE_OTHER,)), outcome((UNSEEN,), factor=1.08),
        outcome((TOLD,), factor=1.07), outcome((ALONE,), factor=1.05, found=True),
        outcome((TOLD,), factor=1.04),
        outcome((TOLD,), share_of_time=0.3, found=True), outcome((UNSEEN,), share_of_time=0.3),
        outcome((TOLD,), cost_ratio=1.0),
        outcome((TOLD,), cause="link", kind="nic", found=True),
        outcome(("",)), outcome(()),  # of before
    ]  # fmt: skip
    assert table_of_devices(outcomes).splitlines() == [
        f"| slow device | due | {UNSEEN} | {ALONE} | {ONE_OTHER} | {FEW} | can be told | "
        "of these found | others found |",
        "|---|---|---|---|---|---|---|---|---|",
        "| in bursts | 2 | 1 | 0 | 0 | 0 | 1 | 1 | 0 |",
        "| lasting, 1.05x to 1.08x | 2 | 0 | 1 | 0 | 0 | 1 | 0 | 1 |",
        "| lasting, 1.08x and more | 5 | 1 | 0 | 1 | 1 | 2 | 1 | 1 |",
        "| lasting, below 1.05x | 1 | 0 | 0 | 0 | 0 | 1 | 0 | 0 |",
        "| all | 10 | 2 | 1 | 1 | 1 | 5 | 2 | 2 |",
    ]
    assert table_of_networks(outcomes).splitlines()[2:] == [
        "| nic | 1 | 0 | 0 | 1 | 1 | 0 |",
        "| all | 1 | 0 | 0 | 1 | 1 | 0 |",
    ]


def test_outcomes_of_before_are_read_and_left_out():
    """Outcomes had no word of any fault at first, then words of networks alone."""
    nic = replace(SLOW, cause="link", kind="nic")
    both = replace(outcome((EVERYTHING, TOLD)), planted=(nic, SLOW))
    assert Outcome.from_json(both.to_json()) == both
    networks_only, oldest = both.to_json() | {"told": [EVERYTHING, ""]}, both.to_json()
    del oldest["told"]
    for record, num_networks in ((networks_only, 1), (oldest, 0)):
        read = Outcome.from_json(record)
        assert table_of_devices([read]).splitlines()[2:] == [
            "| all | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |"
        ]
        assert table_of_networks([read]).splitlines()[-1].startswith(f"| all | {num_networks} |")
