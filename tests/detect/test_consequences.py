"""One fault, one finding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from detect import Cause, Finding, Owner
from detect.causes.launching import of_far_later_host
from detect.causes.together import folded, undecided_beside_connection
from detect.observe.extract import observe
from detect.observe.groups import one_row_a_worker
from megascan.topology import Layout


@pytest.fixture
def finding():
    return Finding(
        ranks=(2,),
        cause=Cause.LINK,
        owner=Owner.NODE,
        slowdown=1.5,
        slowdown_interval=(1.4, 1.6),
        first_iteration=3,
        last_iteration=14,
        share_of_iterations=1.0,
        q_value=1e-9,
        step_time_cost_ratio=1.4,
        statement="rank 2 is late",
    )


@pytest.mark.parametrize(
    ("cost", "is_replayed", "owner"),
    [(2.26, True, Owner.NODE), (1.11, True, Owner.JOB), (2.26, False, Owner.JOB)],
    ids=["far later", "late as all", "nobody knows"],
)
def test_of_hosts_that_are_late_alike_none_costs_much_by_itself(finding, cost, is_replayed, owner):
    starved = replace(
        finding,
        cause=Cause.HOST,
        owner=Owner.JOB,
        step_time_cost_ratio=cost,
        cost_is_replayed=is_replayed,
    )
    assert of_far_later_host(starved).owner is owner
    slow = replace(starved, cause=Cause.STAGE_IMBALANCE)
    assert of_far_later_host(slow).owner is Owner.JOB


def test_the_link_of_a_late_rank_becomes_its_evidence(finding):
    pair = replace(finding, ranks=(0, 2), step_time_cost_ratio=1.04)
    [only] = folded([pair, finding])
    assert only.ranks == (2,)
    assert "ranks 0 and 2" in only.evidence[-1]


def test_a_pair_that_does_not_hold_the_late_rank_is_a_fault_of_its_own(finding):
    pair = replace(finding, ranks=(0, 1), step_time_cost_ratio=1.04)
    assert len(folded([finding, pair])) == 2


def test_loading_slower_by_the_factor_of_computing_is_no_second_fault(finding):
    compute = replace(finding, cause=Cause.COMPUTE)
    alike = replace(finding, cause=Cause.LOADER, slowdown=1.6)
    worse = replace(finding, cause=Cause.LOADER, slowdown=8.0)
    assert [one.cause for one in folded([alike, compute])] == [Cause.COMPUTE]
    assert len(folded([worse, compute])) == 2
    # batches that wait for their device, and cost little of what it does
    dear, cheap = (replace(one, step_time_cost_ratio=cost)
                   for one, cost in ((compute, 1.5), (worse, 1.05)))  # fmt: skip
    assert [one.cause for one in folded([dear, cheap])] == [Cause.COMPUTE]


def test_the_link_of_a_stage_that_may_be_a_slow_device_is_no_second_fault(finding):
    stage = replace(finding, cause=Cause.STAGE_IMBALANCE, owner=Owner.UNDECIDED, slowdown=1.9)
    link = replace(finding, step_time_cost_ratio=1.03)
    [only] = folded([link, stage])
    assert only.cause == Cause.STAGE_IMBALANCE
    assert "the communication of rank 2 suffers with it" in only.evidence[-1]
    slower, of_the_job = replace(link, slowdown=2.6), replace(stage, owner=Owner.JOB)
    assert len(folded([slower, stage])) == 2
    assert len(folded([link, of_the_job])) == 2


def test_faults_of_one_rank_at_different_times_stay_two(finding):
    compute = replace(finding, cause=Cause.COMPUTE, last_iteration=6)
    later = replace(finding, cause=Cause.HOST, first_iteration=9)
    assert len(folded([compute, later])) == 2


def test_members_that_wait_for_their_slow_link_are_no_slow_devices(finding):
    """Their passes are 1.1 times as long, their transfers twice: no device slows those more."""
    link = replace(finding, ranks=(0, 1, 2, 3), slowdown=2.0)
    waiting = replace(finding, cause=Cause.COMPUTE, owner=Owner.UNDECIDED, slowdown=1.1)
    [only] = folded([waiting, link])
    assert only.cause == Cause.LINK
    of_a_host = replace(link, owner=Owner.UNDECIDED, host="n0")
    assert folded([waiting, of_a_host])[0].cause == Cause.LINK
    assert folded([waiting, replace(of_a_host, host="n0, n1")])[0].cause == Cause.COMPUTE
    for other in (replace(waiting, owner=Owner.NODE), replace(waiting, slowdown=1.6)):
        assert folded([other, link])[0].cause == Cause.COMPUTE


@pytest.mark.parametrize(
    ("link_ratio", "cost", "cause"),
    [(7.0, 1.027, Cause.LINK), (1.1, 1.027, Cause.HOST), (7.0, 1.2, Cause.HOST)],
    ids=["seven times", "as little", "a host that costs more"],
)
def test_a_host_that_launches_on_what_its_devices_send_is_held_up(finding, link_ratio, cost, cause):
    """Messages inside the host take 13 % of the step too long."""
    inside = tuple(range(8))
    link = replace(
        finding, ranks=inside, owner=Owner.UNDECIDED, host="n0", slowdown=link_ratio,
        step_time_cost_ratio=1.13,
    )  # fmt: skip
    host = replace(link, cause=Cause.HOST, owner=Owner.NODE, slowdown=1.08,
                   step_time_cost_ratio=cost)  # fmt: skip
    [only] = folded([host, link])
    assert only.cause is cause


def test_messages_behind_a_slow_network_suffer_with_it(finding):
    network = replace(finding, ranks=(0, 1, 2, 3), host="n0", step_time_cost_ratio=1.2)
    behind = replace(finding, ranks=(4, 8), host="n1, n2", step_time_cost_ratio=1.01)
    [only] = folded([network, behind])
    assert only.ranks == (0, 1, 2, 3) and "ranks 4 and 8" in only.evidence[-1]
    assert len(folded([network, replace(behind, step_time_cost_ratio=1.1)])) == 2
    assert len(folded([network, replace(behind, host="n1")])) == 2


@pytest.mark.parametrize(
    ("ranks", "cost", "is_part"), [((2,), 1.001, True), ((2,), 1.1, False), ((3,), 1.001, False)]
)
def test_a_device_a_little_slower_beside_its_rank_s_collections_goes_with_them(
    finding, ranks, cost, is_part
):
    """After each pause it finds cold caches. What costs something, or another rank's, does not."""
    collects = replace(finding, cause=Cause.GC, owner=Owner.JOB, step_time_cost_ratio=4.5)
    slower = replace(
        finding, cause=Cause.COMPUTE, ranks=ranks, slowdown=1.05, step_time_cost_ratio=cost
    )
    kept = folded([slower, collects])
    assert len(kept) == 2 - is_part
    assert Cause.GC in {one.cause for one in kept}
    assert (
        any("looks like slower computing" in one.evidence[-1] for one in kept if one.evidence)
        == is_part
    )


@pytest.mark.parametrize(("owner", "count"), [(Owner.NODE, 1), (Owner.UNDECIDED, 2)])
def test_pauses_of_a_rank_whose_host_is_named_are_its_host_s(finding, owner, count):
    loses = replace(finding, cause=Cause.HOST, owner=owner, step_time_cost_ratio=2.0)
    pauses = replace(loses, owner=Owner.UNDECIDED, slowdown=1.4, step_time_cost_ratio=1.9)
    assert len(folded([pauses, loses])) == count


@pytest.mark.parametrize(
    ("slowdown", "owner", "num"),
    [(1.99, Owner.NODE, 2), (1.99, Owner.UNDECIDED, 1), (1.3, Owner.NODE, 1)],
    ids=["slower than the device", "nobody knows whose", "no slower"],
)
def test_a_slow_device_slows_a_pair_by_no_more_than_itself(finding, slowdown, owner, num):
    device = replace(finding, cause=Cause.COMPUTE, slowdown=1.34, step_time_cost_ratio=1.2)
    pair = replace(finding, ranks=(2, 6), owner=owner, slowdown=slowdown, step_time_cost_ratio=1.09)
    assert len(folded([device, pair])) == num


@pytest.mark.parametrize(
    ("of_host", "of_device", "num"),
    [
        (Owner.UNDECIDED, Owner.NODE, 2),
        (Owner.UNDECIDED, Owner.UNDECIDED, 1),
        (Owner.NODE, Owner.NODE, 1),
    ],
    ids=["the device is named", "neither is", "both are"],
)
def test_a_host_that_may_be_slow_explains_no_device_that_is(finding, of_host, of_device, num):
    """Its other ranks wait for the device, and seem to stand still for their host."""
    device = replace(finding, cause=Cause.COMPUTE, owner=of_device, step_time_cost_ratio=1.07)
    host = replace(finding, ranks=(0, 1, 2, 3), cause=Cause.HOST, owner=of_host)
    assert len(folded([device, host])) == num


@pytest.mark.parametrize(
    ("late", "is_traced", "owner"),
    [(1, False, Owner.UNDECIDED), (5, False, Owner.NODE), (0, False, Owner.NODE),
     (1, True, Owner.NODE)],
    ids=["a mate's", "another group's", "its own", "whom nobody waits for unseen"],
)  # fmt: skip
def test_a_device_beside_a_mate_at_a_slow_connection_is_undecided(
    job, slow, late, is_traced, owner
):
    """Ranks 0 and 1 wait for each other inside their passes, so whatever holds up the one holds up
    the other.
    """
    seen = observe(job(layout=Layout(tp=2, dp=4)).timeline())
    merged = one_row_a_worker(replace(seen, splits_tensor_groups=is_traced))
    (device,) = job(layout=Layout(dp=4), work=slow(0, 1.4)).report().findings
    link = replace(device, ranks=(late, 7), cause=Cause.LINK)
    judged = undecided_beside_connection(merged, device, [device, link])
    assert (device.ranks, judged.owner) == ((0,), owner)
    assert undecided_beside_connection(merged, link, [device, link]).owner is Owner.NODE
    doubtful = replace(link, owner=Owner.UNDECIDED)
    assert undecided_beside_connection(merged, device, [doubtful]).owner is Owner.NODE
