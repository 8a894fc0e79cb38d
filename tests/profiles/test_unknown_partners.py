"""Communication of which a profile does not say whose it is, and what queues still held."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aggregate import build_timeline
from benchmarks.grounds.profiles.catalogue import Scenario
from benchmarks.grounds.profiles.engine import Trouble
from benchmarks.grounds.profiles.files import Dress
from benchmarks.grounds.profiles.job import Job
from detect import Owner, Verdict, detect
from detect.causes.nvlinks import _slow_inside, _slow_of_kind
from detect.observe.extract import observe
from detect.observe.transfers import UnmatchedIn
from megascan.reader import read_trace

RANK_FILES = Dress(name="rank", informed="head")


def timeline_of(folder, job, *troubles):
    scenario = Scenario(
        name="here", family="here", seed=3, job=job, dress=RANK_FILES, troubles=troubles
    )  # fmt: skip
    scenario.write(folder)
    return build_timeline(read_trace(folder))


def collectives(timeline):
    spans = timeline.spans.to_pandas()
    return spans[spans.kind == "collective"]


def test_what_a_queue_still_held_belongs_to_no_iteration(tmp_path):
    job = Job(
        dp=4, gpus_per_host=4, iterations=3, sync_each_step=False, chip="A100", host_noise=0.4
    )
    timeline = timeline_of(tmp_path, job)
    found = collectives(timeline)
    held = found.iteration < 0
    assert held.groupby(found["rank"]).sum().nunique() > 1  # not the same ones on all ranks
    assert (found.match[held] == -1).all()
    assert (found.match[~held] >= 0).all()
    assert found[~held].groupby(["rank", "iteration"]).size().nunique() == 1
    assert all(fit.residual_p99_ns < 5_000 for fit in timeline.clocks.values())


def test_a_host_that_loads_while_its_device_is_busy_with_what_was_before_loses_nothing(tmp_path):
    job = Job(dp=4, gpus_per_host=4, iterations=3, sync_each_step=False, launch_ratio=0.2)
    seen = observe(timeline_of(tmp_path, job))
    assert (seen.host_gap_ns[:, 0] < 0.02 * seen.iteration_ns[0]).all()


@pytest.mark.parametrize("era", ["2.0", "2.2"])
@pytest.mark.parametrize(("factor", "names"), [(8.0, [(2, 3)]), (2.0, [(2, 3)]), (1.0, [])])
def test_the_quickest_collectives_of_unknown_groups_show_a_slow_pair(era, factor, names, tmp_path):
    """They are not taken for everybody's. The quickest of many waited for nobody."""
    job = Job(tp=2, dp=2, style="megatron", gpus_per_host=4, era=era, chip="A100", hidden=1024)
    troubles = [Trouble(kind="nvlink", ranks=(2, 3), factor=factor)] if factor > 1 else []
    timeline = timeline_of(tmp_path, job, *troubles)
    assert (collectives(timeline).match == -1).all()
    report = detect(timeline)
    assert [one.ranks for one in report.findings if one.owner is Owner.NODE] == names
    assert (report.verdict == Verdict.DEGRADED) == bool(names)


@pytest.mark.parametrize(
    ("quickest_us", "numbers", "slow"),
    [
        ((930, 230, 232, 924), (109, 109, 109, 109), [0, 3]),
        ((930, 230, 232, 924), (109, 109, 70, 109), []),  # other work
        ((930, 230, 232, 924), (4, 4, 4, 4), []),  # each of so few may have waited
        ((230, 230, 232, 924), (109, 109, 109, 109), []),  # one rank has no partner
        ((930, 924, 920, 230), (109, 109, 109, 109), []),  # one rank shows no usual time
        ((230, 930, 924, 920, 230, 230, 232, 232), (99,) * 8, []),  # three wait for their mate
        ((360, 230, 232, 370), (109, 109, 109, 109), []),
        ((930, 230, 332, 924), (109, 109, 109, 109), []),  # the others differ as well
    ],
)
def test_two_even_groups_of_ranks_far_apart_are_slow_and_quick(quickest_us, numbers, slow):
    alike = [
        UnmatchedIn(rank, "all_reduce", -1, number, number / 3, 1e3 * time_us)
        for rank, (time_us, number) in enumerate(zip(quickest_us, numbers, strict=True))
    ]
    assert sorted(one.rank for one in _slow_of_kind(alike)) == slow


def test_a_pair_with_longer_data_is_no_slow_pair(tmp_path):
    """Sizes are unknown: a pair that computes twice as long sends twice as much."""
    job = Job(tp=2, dp=2, style="megatron", gpus_per_host=4, era="2.2", chip="A100", hidden=1024)
    seen = observe(timeline_of(tmp_path, job, Trouble(kind="nvlink", ranks=(2, 3), factor=2.0)))
    alike = [one for one in seen.unmatched if one.size_bytes == seen.unmatched[0].size_bytes]
    assert [one.rank for one in _slow_inside(seen, alike)] == [2, 3]
    longer = seen.busy_ns * np.where(np.arange(4) >= 2, 2.0, 1.0)[:, None]
    assert _slow_inside(replace(seen, busy_ns=longer), alike) == []


@pytest.mark.parametrize(("era", "is_matched"), [("2.0", False), ("2.2", True)])
def test_a_group_as_large_as_the_job_is_everybody_on_whatever_stream(era, is_matched, tmp_path):
    job = Job(dp=4, model="moe", gpus_per_host=4, era=era, chip="A100", launch_ratio=0.1)
    found = collectives(timeline_of(tmp_path, job))
    assert set(found.op) == {"all_reduce", "all_to_all"}
    assert ((found.match >= 0) == is_matched)[found.iteration >= 0].all()


def test_matched_communication_hides_nothing(tmp_path):
    job = Job(tp=2, dp=2, style="megatron", gpus_per_host=4, era="2.7", hidden=1024, iterations=6)
    report = detect(timeline_of(tmp_path, job))
    assert report.verdict == Verdict.HEALTHY
    assert not report.hides
    assert np.isfinite(report.minimum_detectable["compute"])
