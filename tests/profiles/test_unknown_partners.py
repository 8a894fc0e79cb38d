"""Communication of which a profile does not say whose it is, and what queues still held."""

from __future__ import annotations

import numpy as np
import pytest

from aggregate import build_timeline
from benchmarks.grounds.profiles.catalogue import Scenario
from benchmarks.grounds.profiles.engine import Trouble
from benchmarks.grounds.profiles.files import Dress
from benchmarks.grounds.profiles.job import Job
from detect import Verdict, detect
from detect.observe.extract import observe
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
def test_collectives_of_unknown_groups_are_not_taken_for_everybodys(era, tmp_path):
    job = Job(tp=2, dp=2, style="megatron", gpus_per_host=4, era=era, chip="A100", hidden=1024)
    slow_pair = Trouble(kind="nvlink", ranks=(2, 3), factor=8.0)
    timeline = timeline_of(tmp_path, job, slow_pair)
    assert (collectives(timeline).match == -1).all()
    report = detect(timeline)
    assert report.verdict == Verdict.UNDECIDED
    assert "communication in which waiting cannot be told from transfer takes" in report.hides[0]


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
