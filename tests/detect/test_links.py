"""Slow connections: the pair, the rank whose connections are all slow, or nobody."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner, Verdict
from detect.causes.links import _guilty_end, _is_isolated, _Units
from detect.detector import judge
from detect.observe.extract import observe
from detect.observe.observations import Transfers, cut, one_row_a_worker
from detect.stats.persistence import Course
from detect.stats.search import Suspect
from megascan.topology import Layout


def test_half_bandwidth_names_the_pair(job):
    def transfer(rank, peer, iteration):
        return 2.0 if (rank, peer) == (1, 5) else 1.0

    report = job(layout=Layout(dp=4, pp=2), transfer=transfer).report()
    assert [(one.ranks, one.cause) for one in report.findings] == [((1, 5), Cause.LINK)]
    assert report.findings[0].slowdown == pytest.approx(2.0, rel=0.05)


def test_all_connections_of_a_rank_name_the_rank(job):
    def transfer(rank, peer, iteration):
        return 2.0 if 5 in (rank, peer) else 1.0

    report = job(layout=Layout(dp=4, pp=3), transfer=transfer).report()
    assert [(one.ranks, one.cause) for one in report.findings] == [((5,), Cause.LINK)]


def test_two_slow_pairs_are_two_findings(job):
    def transfer(rank, peer, iteration):
        return 3.0 if (rank, peer) in ((0, 4), (2, 6)) else 1.0

    report = job(layout=Layout(dp=4, pp=2), transfer=transfer).report()
    assert sorted(one.ranks for one in report.findings) == [(0, 4), (2, 6)]


def test_a_link_that_breaks_down_inside_the_trace(job):
    def transfer(rank, peer, iteration):
        return 2.0 if (rank, peer) == (1, 5) and iteration >= 12 else 1.0

    report = job(layout=Layout(dp=4, pp=2), transfer=transfer).report()
    assert report.findings[0].first_iteration == 12


def test_equal_links_are_silent(job):
    report = job(layout=Layout(dp=4, pp=2), transfer=lambda *_: 1.0).report()
    assert report.verdict == Verdict.HEALTHY
    assert report.minimum_detectable["link"] == pytest.approx(1.25)


def test_messages_across_hosts_are_not_compared_with_those_inside(job):
    """Ranks 0-3 on a host, 4-5 on another: stages 0-1 talk inside it, 1-2 across."""

    def transfer(rank, peer, iteration):
        return 4.0 if rank // 4 != peer // 4 else 1.0

    report = job(layout=Layout(dp=2, pp=3), transfer=transfer, hosts=4).report()
    assert report.verdict == Verdict.HEALTHY


def test_losses_below_the_clocks_error_are_not_links(job):
    """2 µs of error; transfers of 1 µs that double cannot be told from it."""

    def transfer(rank, peer, iteration):
        return 0.002 if (rank, peer) == (1, 5) else 0.001

    report = job(layout=Layout(dp=4, pp=2), transfer=transfer).report()
    assert report.verdict == Verdict.HEALTHY


def test_one_end_of_a_pair_is_told_by_what_its_other_connections_do():
    """The pair 0-4 takes twice as long; of 4's other group a little more, of 0's not."""
    members = ((0, 1, 2, 3), (0, 4), (4, 5, 6, 7))
    transfers = Transfers(
        members=members, kinds=("ep all_to_all of 9 MB", "dp all_reduce of 9 MB"),
        kind=np.array([0, 1, 0]), size_bytes=np.full(3, 9_000_000),
        transfer_ns=np.ones((3, 4)), total_ns=np.ones(3), late_ns=np.zeros((8, 4)),
        quick_ns=np.zeros((8, 4)),
    )  # fmt: skip
    nowhere = np.zeros(3, bool)
    units = _Units(
        members=members, unit=np.arange(3), transfers=transfers, crosses=nowhere,
        way=nowhere.astype(np.int64),
    )  # fmt: skip
    course = Course(np.ones(4, bool), float(np.log(2.0)), 0.01, 1.0, ((0, 3),))
    worst = Suspect(row=1, course=course, q_value=1e-6)
    assert _guilty_end(units, np.array([0.0, 0.7, 0.3]), (0, 4), worst) == (4,)
    assert _guilty_end(units, np.array([0.0, 0.7, 0.0]), (0, 4), worst) == (0, 4)
    assert _guilty_end(units, np.array([0.0, 0.7, np.nan]), (0, 4), worst) == (0, 4)


def test_one_slow_rail_of_two_hosts_names_both_ends(job):
    """The same GPU of both hosts; their neighbours' rails are fine."""

    def transfer(rank, peer, iteration):
        return 2.0 if (rank, peer) == (1, 9) else 1.0

    report = job(layout=Layout(tp=2, dp=4, pp=2), hosts=8, transfer=transfer).report()
    (finding,) = report.findings
    assert finding.ranks == (1, 9) and finding.owner == Owner.NODE


def test_a_rail_is_one_where_rows_stand_for_whole_groups(job):
    """The second GPUs of four hosts; each row is a TP group of two, known by its first rank."""
    seen = observe(job(layout=Layout(tp=2, dp=4), hosts=2, transfer=lambda *_: 1.0).timeline())
    of_hosts = replace(seen.members, device_index=(0, 1) * 4)
    merged = one_row_a_worker(replace(seen, members=of_hosts, splits_tensor_groups=False))
    assert len(merged.members) == 4
    units = _Units(
        members=((1, 3, 5, 7),), unit=np.zeros(0, dtype=np.int64), transfers=seen.transfers,
        crosses=np.ones(1, dtype=bool), way=np.zeros(1, dtype=np.int64),
    )  # fmt: skip
    nobody = np.zeros(1, dtype=bool)
    assert _is_isolated(merged, units, nobody, (1, 3, 5, 7), 0)
    assert not _is_isolated(merged, units, nobody, (1, 3, 5, 6), 0)


def test_without_host_names_only_the_same_axis_is_a_witness(job):
    """Links 1-5 and 5-9 are slow: rank 5 has no other message, and fine reductions say nothing."""

    def transfer(rank, peer, iteration):
        return 2.0 if (rank, peer) == (1, 5) else 1.0

    seen = observe(job(layout=Layout(dp=4, pp=2), transfer=transfer).timeline())
    members = replace(seen.members, hosts=("",) * 8, device_index=(-1,) * 8)
    units = _Units(
        members=((1, 5), (1, 2), (5, 6)), unit=np.arange(3), transfers=seen.transfers,
        crosses=np.zeros(3, dtype=bool), way=np.array([0, 1, 1]),
    )  # fmt: skip
    fine = np.array([False, True, True])
    unknown = replace(seen, members=members)
    assert not _is_isolated(unknown, units, fine, (1, 5), 0)
    assert _is_isolated(unknown, replace(units, way=np.zeros(3, dtype=np.int64)), fine, (1, 5), 0)


def test_a_pair_with_an_end_that_was_not_recorded_is_undecided(job):
    def transfer(rank, peer, iteration):
        return 3.0 if (rank, peer) == (5, 9) else 1.0

    pairs = job(layout=Layout(dp=4, pp=4), hosts=16, transfer=transfer)
    seen = observe(pairs.timeline())
    owners = [
        [(one.ranks, one.owner) for one in judge(some, DetectorSettings()).findings]
        for some in (seen, cut(seen, "row", np.delete(np.arange(16), 5)))
    ]
    assert owners == [[((5, 9), Owner.NODE)], [((5, 9), Owner.UNDECIDED)]]
