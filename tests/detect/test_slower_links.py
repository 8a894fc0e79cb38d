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


@pytest.mark.parametrize(("hosts", "owner"), [(8, Owner.NODE), (4, Owner.UNDECIDED)])
def test_only_group_that_becomes_slower_is_a_finding(job, exchanging, hosts, owner):
    """On the only host of a job nobody else uses what carries it; between hosts others may."""
    timeline = job(layout=Layout(tp=8), hosts=hosts).timeline()
    seen = exchanging(timeline, [(GROUP, 10**8, since(12, 2.0))])
    found = [one for one in judge(seen, DetectorSettings()).findings if one.cause == Cause.LINK]
    assert [(one.ranks, one.owner) for one in found] == [(GROUP, owner)]
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


SLOW_ITERATIONS = [2, 5, 6, 11, 12, 13, 17]


def test_a_network_that_flaps_is_a_finding(job, exchanging):
    """What is seen of two speeds is seen of the network alone: others may use it, too."""
    times = np.random.default_rng(5).normal(10.0, 0.2, 20)
    times[SLOW_ITERATIONS] *= 8.0
    timeline = job(layout=Layout(tp=8), hosts=8).timeline()
    report = judge(exchanging(timeline, [(GROUP, 10**8, times)]), DetectorSettings())
    (found,) = report.findings
    assert (found.ranks, found.cause, found.owner) == (GROUP, Cause.LINK, Owner.UNDECIDED)
    assert found.slowdown == pytest.approx(8.0, rel=0.05)
    first = report.iterations[0]
    assert found.episodes == tuple(
        (first + a, first + b) for a, b in ((2, 2), (5, 6), (11, 13), (17, 17))
    )
    assert "in 7 of 20 iterations" in " ".join(found.evidence)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("law", ["log-normal", "few long ones", "uniform"])
def test_a_network_that_varies_has_no_second_speed(job, exchanging, law, seed):
    random = np.random.default_rng(seed)
    times = {
        "log-normal": random.lognormal(np.log(30.0), 0.8, 20),
        "few long ones": 30.0 * np.where(np.arange(20) == 7, 8.0, random.normal(1.0, 0.02, 20)),
        "uniform": random.uniform(10.0, 80.0, 20),
    }[law]
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


def test_a_lasting_change_is_found_in_times_that_vary(job, exchanging):
    """By 8 %: no gap divides the sorted times into two speeds, the window's halves differ."""
    noise = np.exp(np.random.default_rng(1).normal(0.0, 0.08, 40))
    timeline = job(layout=Layout(tp=8), hosts=8, iterations=40).timeline()
    seen = exchanging(timeline, [(GROUP, 10**8, noise * since(20, 1.65, 40))])
    (finding,) = (
        one for one in judge(seen, DetectorSettings()).findings if one.cause is Cause.LINK
    )
    assert finding.first_iteration == seen.iterations[20] and finding.onset_in_trace
