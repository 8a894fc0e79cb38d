"""Which host, or which of its ranks, is slow, told by rings beside messages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner
from detect.causes.networks import search_networks
from detect.detector import _inquiry, judge
from detect.observe.extract import observe
from detect.observe.transfers import Transfers, UntimedIn
from detect.observe.warmup import steady
from megascan.topology import Layout

MESSAGE, RING = "p2p message of 50 MB", "dp all_reduce of unknown size"


def crossing(job, layout, hosts, units):
    """Observe a job with these transfers only: (members, kind, bytes, ms) each."""
    seen = steady(observe(job(layout=layout, hosts=hosts).timeline()), DetectorSettings())
    shape = (len(seen.members), len(seen.iterations))
    # what is of unknown size is of its stage's kind
    names = [
        f"{kind}/{min(ranks) * layout.pp // layout.world_size if size < 0 else ''}"
        for ranks, kind, size, _ in units
    ]
    kinds = sorted(set(names))
    ms = np.array([one[3] for one in units])
    time_ns = np.outer(ms * 1e6, np.ones(shape[1]))
    wobble = np.exp(0.01 * np.random.default_rng(0).standard_normal(time_ns.shape))
    transfers = Transfers(
        members=tuple(one[0] for one in units),
        kinds=tuple(name.split("/")[0] for name in kinds),
        kind=np.array([kinds.index(name) for name in names]),
        size_bytes=np.array([one[2] for one in units]),
        transfer_ns=time_ns * wobble,
        sum_ns=8 * time_ns,
        late_ns=np.zeros(shape),
        quick_ns=np.zeros(shape),
    )
    return replace(seen, transfers=transfers, costs=None)


def found(seen):
    return [
        (one.ranks, one.owner)
        for one in judge(seen, DetectorSettings()).findings
        if one.cause is Cause.LINK
    ]


def two_stages(rings):
    """Stage 0 on hosts 0 and 1 of four ranks, stage 1 on 2 and 3: 1 and 3 exchange slowly."""
    units = [((rank, rank + 8), MESSAGE, 50_000_000, 2.0 if rank > 3 else 1.0) for rank in range(8)]
    for stage, ms in enumerate(rings):
        first = 8 * stage
        units += [((first + one, first + one + 4), RING, -1, ms) for one in range(4)]
    return units


@pytest.mark.parametrize(
    ("rings", "ranks"),
    [
        ((10.0, 5.0), (4, 5, 6, 7)),
        ((5.0, 10.0), (12, 13, 14, 15)),
        ((6.0, 5.0), (4, 5, 6, 7, 12, 13, 14, 15)),  # another number of parameters
        ((20.0, 5.0), (4, 5, 6, 7, 12, 13, 14, 15)),
    ],
)
def test_rings_of_their_stages_tell_which_of_two_hosts_is_slow(job, rings, ranks):
    seen = crossing(job, Layout(dp=8, pp=2), 4, two_stages(rings))
    owner = Owner.NODE if len(ranks) == 4 else Owner.UNDECIDED
    assert found(seen) == [(ranks, owner)]


@pytest.mark.parametrize(
    ("others", "ranks"), [(1.0, (0, 1)), (3.4, (0, 1, 2, 3)), (1.8, (0, 1, 2, 3))]
)
def test_ranks_whose_messages_are_fine_are_not_slow_with_their_host(job, others, ranks):
    """Rings of a stage's hosts 0 and 1 are slow beside the other stage's; the messages of ranks 0
    and 1 are, and those of 2 and 3 take `others` times as long as usual.
    """
    units = [
        (
            (rank, rank + 8),
            MESSAGE,
            50_000_000,
            {0: 3.4, 1: 3.4, 2: others, 3: others}.get(rank, 1.0),
        )
        for rank in range(8)
    ]
    for first, ms in ((0, 68.0), (1, 68.0), (8, 20.0), (9, 20.0)):
        ring = (first, first + 2, first + 4, first + 6)
        units.append((ring, "dp all_reduce of 1 GB", 10**9, ms))
    assert [one for one, _ in found(crossing(job, Layout(dp=8, pp=2), 4, units))] == [ranks]


def test_who_is_only_the_other_end_of_a_slow_host_is_no_second_fault(job):
    """Host 1's network is slow; rank 8 of host 2 has a message with it, and a ring that is fine."""

    def slow(one, other, iteration):
        return 2.0 if 1 in {one // 4, other // 4} else 1.0

    report = job(layout=Layout(pp=4, dp=4), hosts=4, message_bytes=1 << 20, transfer=slow).report()
    assert [one.ranks for one in report.findings if one.cause is Cause.LINK] == [(4, 5, 6, 7)]


def on_rails(job, exchanging, groups, slow):
    """Return what is found of groups of GPUs on hosts of four, `slow` of which take three times as
    long: (ranks, owner, whether the finding is about a pair) each.
    """
    num_ranks = 1 + max(max(ranks) for ranks in groups)
    timeline = job(layout=Layout(dp=num_ranks), hosts=4).timeline()
    for rank, header in timeline.headers.items():
        timeline.headers[rank] = replace(header, device=replace(header.device, index=rank % 4))
    units = [(ranks, 10**8, 30.0 if slow(ranks) else 10.0) for ranks in groups]
    findings = judge(exchanging(timeline, units), DetectorSettings()).findings
    return [(one.ranks, one.owner, one.is_pair) for one in findings if one.cause is Cause.LINK]


def of_gpus_2_and_3(ranks):
    return ranks[0] % 4 > 1


def test_two_gpus_of_each_host_may_share_a_rail(job, exchanging):
    """Pairs of hosts 0 and 1, and of 2 and 3, and of 0 and 2: all of GPUs 2 and 3 are slow."""
    pairs = [(one + rank, other + rank) for one, other in ((0, 4), (8, 12), (0, 8))
             for rank in range(4)]  # fmt: skip
    rail = (2, 3, 6, 7, 10, 11, 14, 15)
    assert on_rails(job, exchanging, pairs, of_gpus_2_and_3) == [(rail, Owner.NODE, False)]


def test_what_two_gpus_share_between_two_hosts_is_at_either(job, exchanging):
    pairs = [(rank, rank + 4) for rank in range(4)]
    assert on_rails(job, exchanging, pairs, of_gpus_2_and_3) == [((2, 3, 6, 7), Owner.NODE, True)]


def test_messages_to_another_gpu_of_the_next_host_are_no_rail(job, exchanging):
    crosswise = [(rank, 4 + (rank + 2) % 4) for rank in range(4)]
    found_of = on_rails(job, exchanging, crosswise, of_gpus_2_and_3)
    assert all(len(ranks) == 2 for ranks, _, _ in found_of)


def test_a_rail_of_which_one_host_is_in_all_may_be_that_hosts_nic(job, exchanging):
    """Host 1 exchanges with hosts 0, 2 and 3; or rings go through all four."""
    rail = (2, 3, 6, 7, 10, 11, 14, 15)
    star = [(4 + rank, other + rank) for other in (0, 8, 12) for rank in range(4)]
    rings = [tuple(range(rank, 16, 4)) for rank in range(4)]
    for groups in (star, rings):
        found_of = on_rails(job, exchanging, groups, of_gpus_2_and_3)
        assert (rail, Owner.UNDECIDED, False) in found_of
        assert not any(owner is Owner.NODE and set(ranks) == set(rail)
                       for ranks, owner, _ in found_of)  # fmt: skip


def test_three_connections_are_enough_to_show_a_hosts_network(job):
    """Four hosts of two stages each send the whole way: 2 is slow to both of its neighbours."""
    pairs = [(1, 2, 1.0), (3, 4, 2.0), (5, 6, 2.0)]
    units = [((one, other), MESSAGE, 50_000_000, ms) for one, other, ms in pairs]
    assert found(crossing(job, Layout(pp=8), 2, units)) == [((4, 5), Owner.NODE)]
    alike = [(*one[:3], 1.0 + 0.02 * place) for place, one in enumerate(units)]
    assert found(crossing(job, Layout(pp=8), 2, alike)) == []


@pytest.mark.parametrize(("by_one_clock", "is_named"), [(True, True), (False, False)])
def test_a_network_that_is_slow_half_of_the_time_is_so_by_one_clock(job, by_one_clock, is_named):
    """Host 0's messages take 1 and 11 ms by turns; by one clock as well, or 1 ms always."""
    units = [((rank, rank + 4), MESSAGE, 50_000_000, 1.0) for rank in range(12)]
    seen = crossing(job, Layout(dp=4, pp=4), 4, units)
    times = np.array([np.where(np.arange(len(seen.iterations)) % 2, 11.0, 1.0) if rank < 4
                      else np.ones(len(seen.iterations)) for rank in range(12)])  # fmt: skip
    old = seen.transfers
    shortest_ns = old.transfer_ns * (times if by_one_clock else 1.0)
    slow = replace(
        old, transfer_ns=old.transfer_ns * times, sum_ns=old.sum_ns * times, shortest_ns=shortest_ns
    )
    named = [ranks for ranks, owner in found(replace(seen, transfers=slow)) if owner is Owner.NODE]
    assert ((0, 1, 2, 3) in named) is is_named


def test_what_rings_of_unknown_size_cost_is_counted_without_messages(job):
    """A ring loses 40 of its 80 ms an iteration; 8 ms that messages lose are not added."""
    (finding,) = judge(
        crossing(job, Layout(dp=8, pp=2), 4, two_stages((10.0, 5.0))), DetectorSettings()
    ).findings
    assert finding.step_time_cost_ratio == pytest.approx(1.193, abs=0.002)


@pytest.mark.parametrize(
    ("rings", "ranks"), [((10.0, 5.0), (4, 5, 6, 7)), ((5.0, 10.0), (12, 13, 14, 15))]
)
def test_rings_whose_ends_are_bounds_only_tell_which_host_is_slow(job, rings, ranks):
    seen = crossing(job, Layout(dp=8, pp=2), 4, two_stages(()))
    untimed = tuple(
        UntimedIn((first, first + 4), "dp all_reduce", 10**9, True, ms * 1e6)
        for stage, ms in enumerate(rings)
        for first in range(8 * stage, 8 * stage + 4)
    )
    told = replace(seen, transfers=replace(seen.transfers, untimed=untimed))
    assert found(told) == [(ranks, Owner.NODE)]


@pytest.mark.parametrize("is_slow", [True, False])
def test_a_rank_whose_other_connections_are_slow_too_is_a_fault_of_its_own(job, is_slow):
    """Host 1's network is slow; those of rank 8 with hosts 0 and 3 are as slow, or as ever."""
    pairs = [(4 * one + k, 4 * other + k) for one in range(4) for other in range(one + 1, 4)
             for k in range(4)]  # fmt: skip
    units = [
        (pair, MESSAGE, 50_000_000, 4.0 if 1 in {rank // 4 for rank in pair} or
         (is_slow and 8 in pair) else 2.0)
        for pair in pairs
    ]  # fmt: skip
    inquiry = _inquiry(crossing(job, Layout(dp=16), 4, units), DetectorSettings())
    answer = search_networks(inquiry)
    (network,) = answer.findings
    assert network.ranks == (4, 5, 6, 7)
    assert answer.explains(replace(network, ranks=(8,))) is not is_slow
