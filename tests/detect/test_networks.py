"""A host's slow network is one finding; hosts that nothing tells apart stay undecided."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner, Verdict, render_text
from detect.causes.networks import OF_TWO_HOSTS, _is_in_most
from detect.detector import judge
from detect.observe.extract import observe
from detect.observe.groups import one_row_a_worker
from detect.observe.transfers import Transfers, _by_wire, _Labels, _reckoned, bus_factor
from detect.observe.warmup import steady
from megascan.topology import Layout

MEGABYTE = 1 << 20


def crossing(hosts, factor):
    """Messages that touch a host of four ranks take `factor` times as long."""
    return lambda one, other, iteration: factor if {one // 4, other // 4} & hosts else 1.0


def test_slow_network_of_a_host_is_one_finding(job):
    report = job(
        layout=Layout(pp=4, dp=4), hosts=4, message_bytes=MEGABYTE, transfer=crossing({2}, 2.0)
    ).report()
    (finding,) = report.findings
    assert (finding.cause, finding.owner) == (Cause.LINK, Owner.NODE)
    assert finding.ranks == (8, 9, 10, 11)
    assert "host n02's network" in finding.headline
    assert 1.9 < finding.slowdown < 2.1


@pytest.mark.parametrize(
    ("factor", "num", "owner"),
    [(1.3, 20, Owner.UNDECIDED), (1.6, 20, Owner.NODE), (1.6, 5, Owner.UNDECIDED),
     (1.9, 5, Owner.NODE)],
)  # fmt: skip
def test_a_network_that_is_slower_by_a_third_may_always_meet_others(job, factor, num, owner):
    report = job(
        layout=Layout(pp=4, dp=4), hosts=4, message_bytes=MEGABYTE, iterations=num,
        transfer=crossing({2}, factor),
    ).report()  # fmt: skip
    (finding,) = report.findings
    assert (finding.ranks, finding.owner) == ((8, 9, 10, 11), owner)


@pytest.mark.parametrize(
    ("of_rings", "owner"), [(1.28, Owner.NODE), (1.36, Owner.UNDECIDED)],
    ids=["one factor", "two factors"],
)  # fmt: skip
def test_a_port_that_lost_a_quarter_slows_all_kinds_by_one_factor(job, exchanging, of_rings, owner):
    """Messages between hosts 0 and 2 take 1.28 times those of 1 and 3, rings of 2 and 3 longer than
    those of 0 and 1: host 2 alone is in both.
    """
    messages = [((rank, rank + 8), 29_000_000, 5.6 * (1.28 if rank < 4 else 1.0))
                for rank in range(8)]  # fmt: skip
    rings = [((rank, rank + 4), 129_000_000, 9.2 * (of_rings if rank >= 8 else 1.0))
             for rank in (0, 1, 2, 3, 8, 9, 10, 11)]  # fmt: skip
    timeline = job(layout=Layout(pp=2, dp=8), hosts=4).timeline()
    (finding,) = judge(exchanging(timeline, messages + rings), DetectorSettings()).findings
    assert (finding.ranks, finding.owner) == ((8, 9, 10, 11), owner)


@pytest.mark.parametrize(
    ("first", "found"), [(5, 5), (8, 8), (4, 3)], ids=["after two", "in the middle", "after one"]
)
def test_a_network_that_becomes_slow_is_dated(job, first, found):
    """Of ten iterations, 3 to 12; before that it is as quick as the others. Since then it is four
    times slower, on the mean of all less.
    """
    quick, slow = crossing({2}, 1.0), crossing({2}, 4.0)
    report = job(
        layout=Layout(pp=4, dp=4), hosts=4, message_bytes=MEGABYTE, iterations=10,
        transfer=lambda one, other, at: (slow if at >= first else quick)(one, other, at),
    ).report()  # fmt: skip
    (finding,) = [one for one in report.findings if one.owner is Owner.NODE]
    assert finding.ranks == (8, 9, 10, 11)
    assert (finding.first_iteration, finding.onset_in_trace) == (found, found > 3)
    if found > 3:
        assert finding.slowdown == pytest.approx(4.0, rel=0.03)
        assert f"since iteration {first}" in finding.headline


def inside(slow, factor):
    """Messages between these pairs of ranks, or inside these hosts of eight, take longer."""

    def transfer(one, other, iteration):
        is_inside = one // 8 == other // 8
        return factor if is_inside and (one // 8 in slow or {one, other} in slow) else 1.0

    return transfer


@pytest.mark.parametrize("factor", [1.6, 3.0])
def test_all_that_stays_inside_a_host_is_slow_together(job, factor):
    """Two stages of four ranks share a host, and their switch: it slows the messages between them,
    not those to other hosts.
    """
    report = job(
        layout=Layout(pp=6, dp=4), hosts=8, message_bytes=MEGABYTE, transfer=inside([1], factor)
    ).report()
    (finding,) = report.findings
    assert (finding.cause, finding.owner) == (Cause.LINK, Owner.NODE)
    assert finding.ranks == tuple(range(8, 16))
    assert "communication inside host n01" in finding.headline
    assert "inside other hosts" in finding.evidence[0]
    assert finding.slowdown == pytest.approx(factor, rel=0.05)


def test_of_two_hosts_one_may_be_built_otherwise_inside(job):
    """Messages inside host 1 take 13 times as long as inside the job's only other host."""
    report = job(
        layout=Layout(pp=4, dp=4), hosts=8, message_bytes=MEGABYTE, transfer=inside([1], 13.0)
    ).report()
    found = [one for one in report.findings if one.cause is Cause.LINK]
    assert [(one.ranks, one.owner) for one in found] == [(tuple(range(8, 16)), Owner.UNDECIDED)]
    assert OF_TWO_HOSTS in found[0].evidence


@pytest.mark.parametrize(
    ("slow_ms", "owner"), [(6.0, Owner.NODE), (30.0, Owner.UNDECIDED)], ids=["167 GB/s", "33 GB/s"]
)
def test_two_hosts_that_both_carry_more_than_pcie_can_are_built_alike(
    job, exchanging, slow_ms, owner
):
    """All-reduces of 1 GB in pairs take 3 ms on one host, and longer on the other."""
    timeline = job(layout=Layout(tp=2, dp=4), hosts=4).timeline()
    pairs = [((rank, rank + 1), 10**9, 3.0 if rank < 4 else slow_ms) for rank in range(0, 8, 2)]
    rings = [((0, 2, 4, 6), 10**9, 50.0), ((1, 3, 5, 7), 10**9, 50.0)]
    found = judge(exchanging(timeline, pairs + rings), DetectorSettings()).findings
    assert [(one.ranks, one.owner) for one in found] == [((4, 5, 6, 7), owner)]


def test_a_host_with_a_quick_connection_inside_is_not_slow_inside(job, exchanging):
    """(4, 5), (4, 6) and (5, 7) take three times as long as inside the other host, (6, 7) not."""
    timeline = job(layout=Layout(dp=8), hosts=4).timeline()
    pairs = ((0, 1), (2, 3), (4, 5), (6, 7), (0, 2), (1, 3), (4, 6), (5, 7))
    slow = {(4, 5), (4, 6), (5, 7)}
    sent = [
        (pair, 10**8 if pair[1] - pair[0] == 1 else 2 * 10**8, 60.0 if pair in slow else 20.0)
        for pair in pairs
    ]
    found = judge(exchanging(timeline, sent), DetectorSettings()).findings
    named = [set(one.ranks) for one in found if one.cause is Cause.LINK]
    assert named and all(ranks <= {4, 5} for ranks in named)


def test_a_rank_whose_connections_inside_its_host_are_slow_is_not_the_host(job):
    """Ranks 9 and 13 of host 1: the other three messages inside it are quick."""
    report = job(
        layout=Layout(pp=6, dp=4), hosts=8, message_bytes=MEGABYTE, transfer=inside([{9, 13}], 3.0)
    ).report()
    assert all(set(one.ranks) <= {9, 13} for one in report.findings)
    assert report.findings


def test_hosts_that_are_built_alike_are_not_slow(job):
    """Two hosts of four are quicker inside: the others need not be at fault."""
    report = job(
        layout=Layout(pp=8, dp=4), hosts=8, message_bytes=MEGABYTE, transfer=inside([1, 3], 3.0)
    ).report()
    assert not any(one.owner is Owner.NODE for one in report.findings)


@pytest.mark.parametrize(
    ("size", "factor", "is_slow"),
    [(MEGABYTE, 10.0, True), (5 * 10**8, 10.0, False), (5 * 10**8, 1.8, True)],
)
def test_what_is_quicker_than_any_nic_is_no_measure_of_one(job, size, factor, is_slow):
    """Messages of 500 MB in a millisecond go over NVLink from host to host, inside a rack. Those of
    host 2 at a tenth of that, 50 GB/s, leave the rack by NICs; at 280 its NVLinks are slow.
    """
    timeline = job(
        layout=Layout(pp=4, dp=4), hosts=4, message_bytes=size, transfer=crossing({2}, factor)
    ).timeline()
    report = judge(observe(timeline), DetectorSettings())
    found = [one.ranks for one in report.findings if one.cause is Cause.LINK]
    assert found == ([(8, 9, 10, 11)] if is_slow else [])
    kinds = {one.partition(" of ")[0] for one in observe(timeline).transfers.kinds}
    assert "p2p message over NVLink" in kinds


@pytest.mark.parametrize(
    ("size", "last_ns", "moved"),
    [(12_600_000, 30e3, 1), (12_600_000, 1.2e6, 0), (4, 0.0, 0)],
    ids=["420 GB/s", "10 GB/s", "few bytes"],
)
def test_large_transfers_by_one_clock_show_a_wire(size, last_ns, moved):
    """Clock errors may leave nothing of a transfer; then it is as quick as nothing is."""
    labels = _Labels(
        unit=np.arange(3), members=[(0, 8), (1, 9), (2, 10)], kind=np.zeros(3, dtype=np.int64),
        kinds=("p2p message of some bytes",), crosses=np.ones(3, bool), between=np.zeros(3, int),
        size=np.full(3, size),
    )  # fmt: skip
    shortest_ns = np.array([1.2e6, 1.2e6, last_ns])
    kind, kinds = _by_wire(np.arange(3), np.full(3, size), shortest_ns, labels)
    assert kind.tolist() == [0, 0, moved]
    assert kinds[1] == "p2p message over NVLink of some bytes"


def test_two_hosts_that_only_talk_to_each_other_stay_undecided(job):
    report = job(
        layout=Layout(pp=2, dp=8), hosts=4, message_bytes=MEGABYTE, transfer=crossing({0, 2}, 2.0)
    ).report()
    (finding,) = report.findings
    assert (finding.owner, finding.ranks) == (Owner.UNDECIDED, (0, 1, 2, 3, 8, 9, 10, 11))
    assert "which of them is slow" in " ".join(finding.evidence)


@pytest.mark.parametrize(("num_ranks", "is_in_most"), [(8, False), (2, True), (1, True)])
def test_one_rank_of_many_is_no_reason_why_all_messages_of_its_host_are_slow(num_ranks, is_in_most):
    units = [{rank, rank + 8} for rank in range(num_ranks)]
    assert _is_in_most({8}, units) == is_in_most


def test_slow_pair_of_hosts_accuses_neither(job):
    """Between hosts 1 and 2 everything is slow, and each of them is quick elsewhere."""
    report = job(
        layout=Layout(pp=4, dp=4),
        hosts=4,
        message_bytes=MEGABYTE,
        transfer=lambda one, other, iteration: 2.0 if {one // 4, other // 4} == {1, 2} else 1.0,
    ).report()
    assert not any("network" in one.headline for one in report.findings)


def test_messages_that_are_all_slow_name_nobody(job):
    report = job(
        layout=Layout(pp=2, dp=4), hosts=4, message_bytes=MEGABYTE, transfer=crossing({0, 1}, 4.0)
    ).report()
    assert report.findings == ()


def test_latency_of_short_messages_is_no_bandwidth(job):
    report = job(layout=Layout(pp=4, dp=4), hosts=4, transfer=crossing({2}, 2.0)).report()
    assert not any("network" in one.headline for one in report.findings)


def _ring(units):
    """Transfers of rings: (members, bytes, ms of a message) each, of one iteration."""
    kinds = sorted({size for _, size, _ in units})
    return Transfers(
        members=tuple(members for members, _, _ in units),
        kinds=tuple(f"dp all_reduce of {size} bytes" for size in kinds),
        kind=np.array([kinds.index(size) for _, size, _ in units]),
        size_bytes=np.array([size for _, size, _ in units]),
        transfer_ns=np.array([[time_ms * 1e6] for _, _, time_ms in units]),
        sum_ns=np.array([[time_ms * 1e6] for _, _, time_ms in units]),
        late_ns=np.zeros((16, 1)),
        quick_ns=np.zeros((16, 1)),
    )


def _with_rings(job, slow_ms):
    """TP4 x PP2 x DP2 on 4 hosts: rings of 0-1 and 2-3, whose stages hold unlike parameters; the
    second takes `slow_ms`, the messages between hosts 1 and 3 three times the others'.
    """
    timeline = job(
        layout=Layout(tp=4, pp=2, dp=2), hosts=4, message_bytes=MEGABYTE,
        transfer=lambda one, other, iteration: 3.0 if {one // 4, other // 4} == {1, 3} else 1.0,
    ).timeline()  # fmt: skip
    seen = steady(observe(timeline), DetectorSettings())
    messages = seen.transfers
    rings = _ring(
        [((rank, rank + 4), 100 * MEGABYTE, 10.0) for rank in range(4)]
        + [((rank, rank + 4), 160 * MEGABYTE, slow_ms) for rank in range(8, 12)]
    )
    num_iterations = len(seen.iterations)
    both = replace(
        messages,
        members=(*messages.members, *rings.members),
        kinds=(*messages.kinds, *rings.kinds),
        kind=np.concatenate([messages.kind, rings.kind + len(messages.kinds)]),
        size_bytes=np.concatenate([messages.size_bytes, rings.size_bytes]),
        transfer_ns=np.concatenate(
            [messages.transfer_ns, np.repeat(rings.transfer_ns, num_iterations, axis=1)]
        ),
        sum_ns=np.concatenate([messages.sum_ns, np.repeat(rings.sum_ns, num_iterations, axis=1)]),
        shortest_ns=None,
    )
    return judge(replace(seen, transfers=both, costs=None), DetectorSettings())


def test_rings_of_unlike_sizes_tell_which_end_is_slow(job):
    """Messages accuse 1 and 3 alike; the ring of 3 is slow by the byte, that of 1 is not."""
    report = _with_rings(job, 48.0)
    (finding,) = report.findings
    assert (finding.owner, finding.ranks) == (Owner.NODE, (12, 13, 14, 15))


def test_a_ring_that_is_longer_by_its_size_accuses_nobody_more(job):
    report = _with_rings(job, 16.0)
    assert not any("network" in one.headline for one in report.findings)


def test_what_cannot_be_seen_of_a_network_is_said(job):
    """Hosts 0 and 1 are a chain's ends: of messages between them alone nothing is left over."""
    ring = job(layout=Layout(pp=2, dp=4), hosts=4, message_bytes=MEGABYTE, transfer=lambda *_: 1.0)
    assert any("a slow network of one host" in note for note in ring.report().notes)
    chain = job(layout=Layout(pp=3, dp=4), hosts=4, message_bytes=MEGABYTE, transfer=lambda *_: 1.0)
    notes = chain.report().notes
    assert any("a slow network of n01 cannot be seen here" in note for note in notes)
    # eight messages on either side of a rank, a megabyte and about a millisecond each, in 245 ms
    (hidden,) = [note for note in notes if "cannot be seen here" in note]
    found = re.search(r"such transfers take (\d+)% .* one p2p message .* \((\S+) GB/s\)", hidden)
    assert found, hidden
    assert float(found[1]) == pytest.approx(6.5, abs=1.0)
    assert float(found[2]) == pytest.approx(1.05, rel=0.1)
    far = job(layout=Layout(pp=4, dp=4), hosts=4, message_bytes=MEGABYTE, transfer=lambda *_: 1.0)
    assert not any("cannot be seen here" in note for note in far.report().notes)


def test_slow_rail_of_three_iterations_is_one_finding(job):
    """No message of GPU 3 is sure by itself in so short a window; all of them together are."""
    report = job(
        layout=Layout(pp=4, dp=8), hosts=8, iterations=3, microbatches=2, message_bytes=MEGABYTE,
        transfer=lambda one, other, iteration: 2.0 if one % 8 == 3 else 1.0,
    ).report()  # fmt: skip
    (finding,) = report.findings
    assert (finding.ranks, finding.owner) == ((3, 11, 19, 27), Owner.NODE)
    assert "the rail of GPU 3 of every host" in finding.headline


def test_a_link_there_and_back_is_no_rail(job):
    """Rank 3's messages with rank 11 alone, in both directions: two hosts, one message a rail."""
    report = job(
        layout=Layout(pp=2, dp=8), hosts=8, iterations=6, message_bytes=MEGABYTE,
        transfer=lambda one, other, iteration: 2.0 if {one, other} == {3, 11} else 1.0,
    ).report()  # fmt: skip
    (finding,) = report.findings
    assert finding.ranks == (3, 11) and "link between ranks 3 and 11" in finding.headline


def test_rails_that_always_go_together_stay_undecided(job, exchanging):
    """GPU 1 of one host talks to GPU 2 of the other only."""
    units = [((rank, 4 + (3 - rank)), 10**8, 20.0 if rank in (1, 2) else 10.0) for rank in range(4)]
    timeline = job(layout=Layout(dp=8), hosts=4).timeline()
    for rank, header in timeline.headers.items():
        timeline.headers[rank] = replace(header, device=replace(header.device, index=rank % 4))
    (finding,) = judge(exchanging(timeline, units), DetectorSettings()).findings
    assert (finding.ranks, finding.owner) == ((1, 2, 5, 6), Owner.UNDECIDED)
    assert "the rails of GPUs 1 and 2" in finding.headline


def test_messages_that_find_their_nic_taken_now_and_then_are_judged_by_their_mean(job, exchanging):
    """Alone on its NIC a message takes 2 ms, 4 ms from host 2; beside another one twice that: a
    median is the one or the other by chance.
    """
    turns = {0: [1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2], 1: [2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1]}
    units = [
        ((rank, rank + 4), 10**8, np.resize(turns[rank % 2], 20) * (4.0 if rank >= 4 else 2.0))
        for rank in range(12)
    ]
    timeline = job(layout=Layout(pp=4, dp=4), hosts=4).timeline()
    found = judge(exchanging(timeline, units), DetectorSettings()).findings
    assert [(one.ranks, one.owner) for one in found] == [((8, 9, 10, 11), Owner.NODE)]


@pytest.mark.parametrize(("factor", "names"), [(2.0, [(4, 5, 6, 7)]), (1.0, [])])
def test_messages_that_meet_at_their_nic_are_judged_by_the_quickest(job, exchanging, factor, names):
    """Alone on its NIC a message takes 2 ms, one from or to host 1 `factor` times that; up to four
    meet there, as it happens.
    """
    meet = np.random.default_rng(3).choice([1, 1, 2, 3, 4], (12, 20))
    meet[:, 4] = 1
    units = [
        ((rank, rank + 4), 10**8, 2.0 * meet[rank] * (factor if rank < 8 else 1.0))
        for rank in range(12)
    ]
    timeline = job(layout=Layout(pp=4, dp=4), hosts=4).timeline()
    found = judge(exchanging(timeline, units), DetectorSettings()).findings
    named = [one.ranks for one in found if one.owner is Owner.NODE]
    assert named == names


def test_transfers_that_clocks_make_vanish_make_no_others_slow(job, exchanging):
    """Without host 1 every third message seems to take no time; the others take as long."""
    units = [
        ((rank, rank + 4), 10**8, 10.0 if rank < 8 else np.resize([10.0, 10.0, 0.0], 20))
        for rank in range(12)
    ]
    timeline = job(layout=Layout(pp=4, dp=4), hosts=4).timeline()
    assert judge(exchanging(timeline, units), DetectorSettings()).findings == ()


def test_half_an_iteration_in_rings_through_all_hosts_is_no_health(job, exchanging):
    """The iteration lasts 245 ms: a NIC at half its speed may be half of 150 ms, or of 50 ms."""
    timeline = job(layout=Layout(dp=16), hosts=8).timeline()
    ring = tuple(range(16))
    long, short = (
        judge(exchanging(timeline, [(ring, 10**9, ms)]), DetectorSettings()) for ms in (150.0, 50.0)
    )
    assert (long.verdict, short.verdict) == (Verdict.UNDECIDED, Verdict.HEALTHY)
    assert "a network at half its speed" in " ".join(render_text(long).split())
    assert any("cannot be seen here" in note for note in short.notes)


def test_one_slow_connection_of_two_is_not_the_hosts(job, exchanging):
    """Between a slow connection and a fine one lies no typical one."""
    slow, both = (
        [((0, 4), 10**8, 10.0), ((1, 5), 10**8, 10.0), ((2, 6), 10**8, 30.0), ((3, 7), 10**8, last)]
        for last in (10.0, 30.0)
    )
    timeline = job(layout=Layout(tp=2, pp=2, dp=2), hosts=2).timeline()
    one, other = (
        [each.ranks for each in judge(exchanging(timeline, units), DetectorSettings()).findings]
        for units in (slow, both)
    )
    assert (2, 3) not in one and (2, 3, 6, 7) not in one
    assert (2, 3, 6, 7) in other


def test_connections_between_hosts_whose_clocks_are_off_accuse_nobody(job, exchanging):
    """Each host a stage: one bad fit of a host's clocks is one of all its connections."""
    units = [((rank, rank + 4), 10**8, 4.0 if rank < 4 else 1.0) for rank in range(12)]
    sound = exchanging(job(layout=Layout(pp=4, dp=4), hosts=4).timeline(), units)
    assert [one.ranks for one in judge(sound, DetectorSettings()).findings] == [(0, 1, 2, 3)]
    assert sound.transfers is not None
    for slow_ns, is_named in ((4e6, True), (1.5e6, False), (1e6, False)):
        spans = np.where(np.arange(12)[:, None] < 4, slow_ns, np.full(20, 1e6))
        by_one_clock = replace(sound, transfers=replace(sound.transfers, shortest_ns=spans))
        found = judge(by_one_clock, DetectorSettings()).findings
        assert ((0, 1, 2, 3) in [one.ranks for one in found]) is is_named


def _on(device, seen):
    """The same observations, on devices of that name."""
    return replace(seen, members=replace(seen.members, devices=(device,) * len(seen.members)))


H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("device", "size", "ms", "hosts", "is_slow"),
    [
        (H100, 10**8, 8.75, 8, True),  # 7/4 of 100 MB in 8.75 ms: 20 GB/s
        (H100, 10**8, 0.5, 8, False),  # 350 GB/s
        (H100, 10**8, 1.75, 8, False),  # 100 GB/s, a fifth and more of 450
        ("NVIDIA A100-SXM4-80GB", 10**8, 8.75, 8, True),
        ("NVIDIA H100 PCIe", 10**8, 8.75, 8, False),
        ("NVIDIA H100 NVL", 10**8, 8.75, 8, False),
        ("", 10**8, 8.75, 8, False),
        (H100, 10**6, 8.75, 8, False),  # latency
        (H100, -1, 8.75, 8, False),
        (H100, 10**8, 8.75, 4, False),  # between hosts
    ],
)
def test_a_group_of_one_host_that_runs_at_the_pace_of_pcie(
    job, exchanging, device, size, ms, hosts, is_slow
):
    group = tuple(range(8))
    timeline = job(layout=Layout(tp=8), hosts=hosts).timeline()
    report = judge(_on(device, exchanging(timeline, [(group, size, ms)])), DetectorSettings())
    found = [(one.ranks, one.owner) for one in report.findings if one.cause == Cause.LINK]
    assert found == ([(group, Owner.UNDECIDED)] if is_slow else [])


def test_a_slow_pace_that_costs_next_to_nothing_is_not_worth_a_word(job, exchanging):
    timeline = job(layout=Layout(tp=8), microbatches=40).timeline()
    seen = _on(H100, exchanging(timeline, [(tuple(range(8)), 10**8, 8.75)]))
    assert float(np.median(seen.iteration_ns)) > 50 * 8.75e6 / 2
    report = judge(seen, DetectorSettings())
    assert not [one for one in report.findings if one.cause == Cause.LINK]


@pytest.mark.parametrize(
    ("device", "gbytes_per_s", "share", "is_said"),
    [
        ("", 100, 0.3, True),  # 0.3 of the step: 1.18 times without half of it
        ("", 100, 0.1, False),
        (H100, 150, 0.3, True),  # a third of 450: sound, or half of the links' two thirds
        (H100, 250, 0.3, False),  # no link is at half its speed
    ],
)
@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_group_without_an_equal_may_hide_a_slow_link(
    job, exchanging, device, gbytes_per_s, share, is_said, num_groups
):
    timeline = job(layout=Layout(tp=8, dp=num_groups)).timeline()
    step_ms = float(np.median(observe(timeline).iteration_ns)) / 1e6
    size = int(share * step_ms * 1e6 * gbytes_per_s / bus_factor("all_reduce", 8))
    groups = [tuple(range(first, first + 8)) for first in range(0, 8 * num_groups, 8)]
    seen = exchanging(timeline, [(group, size, share * step_ms) for group in groups])
    report = judge(_on(device, seen), DetectorSettings())
    words = "a connection inside a host at half its speed would look the same"
    assert report.findings == ()
    assert (words in " ".join(report.caveats)) == (is_said and num_groups == 1)


@pytest.mark.parametrize(
    ("operation", "factor"),
    [("all_reduce", 1.75), ("reduce_scatter", 0.875), ("all_gather", 7.0), ("send", None)],
)
def test_bus_bandwidth_is_that_of_nccl_tests(operation, factor):
    assert bus_factor(operation, 8) == factor


@pytest.mark.parametrize(("slow", "owner"), [({0}, Owner.UNDECIDED), ({0, 16}, Owner.NODE)])
def test_a_rail_that_one_ring_alone_shows_may_be_any_of_its_nics(job, exchanging, slow, owner):
    """Rings of GPU 0 of four hosts, of stages on hosts of their own: both of them, or one."""
    units = [
        (tuple(range(first + gpu, first + 16, 4)), 10**8, 40.0 if first + gpu in slow else 10.0)
        for first in (0, 16)
        for gpu in range(4)
    ]
    timeline = job(layout=Layout(tp=4, dp=4, pp=2), hosts=4).timeline()
    for rank, header in timeline.headers.items():
        timeline.headers[rank] = replace(header, device=replace(header.device, index=rank % 4))
    found = judge(exchanging(timeline, units), DetectorSettings()).findings
    ranks = tuple(rank for first in sorted(slow) for rank in range(first, first + 16, 4))
    assert [(one.ranks, one.owner) for one in found] == [(ranks, owner)]


@pytest.mark.parametrize(("share", "verdict", "caveat"), [
    (0.05, Verdict.HEALTHY, ""),
    (0.12, Verdict.HEALTHY, "; but a host whose network runs at half its speed"),  # 1.06 times
    (0.3, Verdict.HEALTHY, "; but a host whose network runs at half its speed would look the same"),
    (0.6, Verdict.UNDECIDED, ""),
])  # fmt: skip
def test_a_network_that_could_not_be_seen_is_said_beside_health(
    job, exchanging, share, verdict, caveat
):
    """One ring through two hosts, which nothing is to be compared with."""
    timeline = job(layout=Layout(dp=8), hosts=4).timeline()
    step_ms = float(np.median(observe(timeline).iteration_ns)) / 1e6
    ring = [(tuple(range(8)), 100 * MEGABYTE, share * step_ms)]
    report = judge(exchanging(timeline, ring), DetectorSettings())
    assert (report.verdict, report.findings) == (verdict, ())
    first = render_text(report).splitlines()[0]
    assert ("would look the same" in first) == (share > 0.05)
    assert caveat in first
    assert report.to_json()["caveats"] == list(report.caveats)
    assert bool(report.caveats) == bool(caveat)


@pytest.mark.parametrize(
    ("device", "share", "verdict"),
    [("cuda", 0.05, ""), ("cuda", 0.15, "caveat"), ("cuda", 0.4, "hides"), ("cpu", 0.4, "")],
)
def test_much_communication_that_nobody_can_split_is_no_health(job, device, share, verdict):
    seen = observe(job(layout=Layout(dp=4), device=device).timeline())
    blind = np.tile(share * seen.iteration_ns, (4, 1))
    report = judge(replace(seen, unsplit_ns=blind), DetectorSettings())
    assert report.verdict is (Verdict.UNDECIDED if verdict == "hides" else Verdict.HEALTHY)
    words = "waiting cannot be told from transfer takes"
    assert [words in " ".join(getattr(report, name)) for name in ("caveats", "hides")] == [
        verdict == "caveat",
        verdict == "hides",
    ]


def test_what_a_quicker_network_saves_by_replay_counts(job, exchanging):
    timeline = job(layout=Layout(dp=8), hosts=4).timeline()
    step_ms = float(np.median(observe(timeline).iteration_ns)) / 1e6
    for share, saved, verdict in (
        (0.55, 1.05, Verdict.HEALTHY),
        (0.55, 1.4, Verdict.UNDECIDED),
        (0.75, 1.0, Verdict.UNDECIDED),  # passes that wait for them hide the gain
        (0.75, 1.2, Verdict.HEALTHY),
    ):
        ring = [(tuple(range(8)), 100 * MEGABYTE, share * step_ms)]
        costs = SimpleNamespace(
            ratio_of_transfers=lambda *_, inside=False, saved=saved: saved,
            unevenness=lambda within: None,
        )
        seen = exchanging(timeline, ring, costs=costs)
        assert judge(seen, DetectorSettings()).verdict is verdict, (share, saved)


def test_a_group_on_several_hosts_is_on_none_and_its_ranks_are_where_they_are(job):
    """Groups of four ranks, of whose waiting for each other nothing was recorded, on hosts of two:
    the second half of a group is not on the host of the first.
    """
    seen = observe(job(layout=Layout(tp=4, dp=2), hosts=2).timeline())
    merged = one_row_a_worker(replace(seen, splits_tensor_groups=False)).members
    assert merged.workers == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert merged.hosts == ("", "")
    assert [merged.device_of(rank)[0] for rank in range(4)] == ["n00", "n00", "n01", "n01"]
    alone = observe(job(layout=Layout(tp=2, dp=4), hosts=2).timeline())
    together = one_row_a_worker(replace(alone, splits_tensor_groups=False)).members
    assert together.hosts == ("n00", "n01", "n02", "n03")


@pytest.mark.parametrize(
    ("sizes", "reckoned"),
    [
        ((30, 20, 24, 36, 28, 40), 29),
        ((30, 30, 30, 30, 30, 30), 30),
        ((30, 60, 30, 60, 30, 60), None),  # the same two in each iteration
        ((3, 2, 2.4, 3.6, 2.8, 4), None),  # latency is part of them
    ],
    ids=["vary", "one", "two", "small"],
)
def test_messages_of_sizes_that_vary_are_compared_by_the_byte(sizes, reckoned):
    """Two messages in each of three iterations."""
    size = (np.array(sizes) * 1e6).astype(np.int64)
    num = len(size)
    slot = np.arange(num) // 2
    found = _reckoned(np.zeros(num, np.int64), np.zeros(num, np.int64), slot, size)
    assert found.tolist() == ([reckoned * 10**6] * num if reckoned else size.tolist())


def test_a_slow_rank_is_found_by_messages_of_sizes_that_vary(job):
    """Of three stages; documents are packed to unlike lengths, and rank 5's NIC is slow."""

    def message_bytes(number):
        return 25_000_000 + 7_919 * (number * 37 % 1_000)

    def transfer(one, other, iteration):
        return 4.0 if 5 in (one, other) else 1.0

    report = job(
        layout=Layout(pp=3, dp=4), hosts=4, message_bytes=message_bytes, transfer=transfer
    ).report()
    assert (5,) in [one.ranks for one in report.findings]
