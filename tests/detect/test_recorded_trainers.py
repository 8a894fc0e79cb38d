"""Runs of other people's trainers (`benchmarks.trainers`, gloo) that were judged wrongly once.

What was planted is in each file's name; the files do not say it.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from aggregate import build_timeline
from detect import Cause, Owner, Verdict, detect
from megascan.reader import read_trace

RECORDED = Path(__file__).with_name("recorded")


@pytest.fixture
def report_of(tmp_path):
    def read(name):
        with tarfile.open(RECORDED / f"{name}.tar.xz") as archive:
            archive.extractall(tmp_path, filter="data")
        return detect(build_timeline(read_trace(tmp_path)))

    return read


def named(report):
    return [(one.ranks, one.cause) for one in report.findings if one.owner is Owner.NODE]


def test_a_rank_whose_peers_became_slow_is_not_named_for_the_time_before(report_of):
    """Cores of a machine that others use, too: ranks 0 and 3 take 1.7 times as long since 16."""
    assert not named(report_of("ddp-cores-change"))


def test_a_core_that_is_shared_to_the_end_is_named(report_of):
    report = report_of("ddp-rank-2-core-shared-to-the-end")
    assert named(report) == [((2,), Cause.HOST)]


def test_a_slow_rank_of_four_is_no_uneven_data(report_of):
    """Forward, backward and optimizer all take 1.4 times as long; sequences are equal."""
    uneven, awaited = report_of("ddp-rank-3-slow").findings
    assert {(one.cause, one.owner) for one in (uneven, awaited)} == {
        (Cause.UNKNOWN, Owner.UNDECIDED)
    }
    assert any("DP3 in 10 of 10" in sentence for sentence in uneven.evidence)
    assert awaited.ranks == (3,)  # DDP's reductions run beside what waits for them
    assert "all others wait for it" in awaited.headline


def test_a_tp_rank_whose_layers_take_longer_is_not_healthy(report_of):
    report = report_of("megatron-tp2-rank-0-layers-slow")
    assert report.verdict is Verdict.UNDECIDED
    assert any("the slowest beside its peers is rank 0: 1.41x" in note for note in report.notes)


def test_a_throttled_stage_is_not_put_down_to_the_job(report_of):
    findings = report_of("megatron-pp2-rank-1-throttled").findings
    assert not [one for one in findings if one.owner is Owner.JOB]
