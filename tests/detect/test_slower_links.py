"""Transfers that have no equal are compared with themselves before and after."""

from __future__ import annotations

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner
from detect.detector import judge
from megascan.topology import Layout

GROUP = tuple(range(8))


def since(place, factor, num=20):
    """10 ms a transfer, `factor` times that from a place in the window on."""
    return np.where(np.arange(num) >= place, 10.0 * factor, 10.0)


@pytest.mark.parametrize("hosts", [8, 4])
def test_only_group_that_becomes_slower_is_a_finding(job, exchanging, hosts):
    timeline = job(layout=Layout(tp=8), hosts=hosts).timeline()
    seen = exchanging(timeline, [(GROUP, 10**8, since(12, 2.0))])
    found = [one for one in judge(seen, DetectorSettings()).findings if one.cause == Cause.LINK]
    assert [(one.ranks, one.owner) for one in found] == [(GROUP, Owner.UNDECIDED)]
    assert found[0].first_iteration == seen.iterations[12] and 1.9 < found[0].slowdown < 2.1


@pytest.mark.parametrize(
    "times",
    [since(12, 1.2), since(19, 3.0), 1 / since(12, 3.0), np.resize([10.0, 20.0], 20)],
    ids=["a little", "one iteration", "quicker", "on and off"],
)
def test_no_lasting_change_is_no_finding(job, exchanging, times):
    timeline = job(layout=Layout(tp=8), hosts=8).timeline()
    report = judge(exchanging(timeline, [(GROUP, 10**8, times)]), DetectorSettings())
    assert not any(one.cause == Cause.LINK for one in report.findings)


@pytest.mark.parametrize(("size", "device"), [(-1, "cuda"), (1024, "cuda"), (10**8, "cpu")])
def test_unknown_or_small_transfers_and_those_of_cpus_are_not_judged(job, exchanging, size, device):
    timeline = job(layout=Layout(tp=8), hosts=8, device=device).timeline()
    report = judge(exchanging(timeline, [(GROUP, size, since(12, 3.0))]), DetectorSettings())
    assert not any(one.cause == Cause.LINK for one in report.findings)


def test_one_group_among_equals_that_stay_is_left_to_the_comparison_with_them(job, exchanging):
    timeline = job(layout=Layout(tp=2, dp=4), hosts=8).timeline()
    units = [
        ((rank, rank + 1), 10**8, since(12, 2.0 if rank == 2 else 1.0)) for rank in (0, 2, 4, 6)
    ]
    found = judge(exchanging(timeline, units), DetectorSettings()).findings
    assert [one.ranks for one in found if one.cause == Cause.LINK] == [(2, 3)]
