"""The example traces of real jobs on GPUs: the right rank, the right cause, and silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from detect import Cause, Owner, Verdict, detect
from megascan.reader import read_timeline

EXAMPLES = Path(__file__).parents[2] / "examples"


def report_of(name):
    return detect(read_timeline(EXAMPLES / f"{name}.json.gz"))


def test_a_slow_device_is_named_though_it_has_one_peer_only():
    (finding,) = report_of("h200-pp2-dp2-rank-2-slow").findings
    assert (finding.ranks, finding.cause, finding.owner) == ((2,), Cause.COMPUTE, Owner.NODE)
    assert finding.slowdown == pytest.approx(1.5, rel=0.03)


def test_with_sequence_parallelism_the_slow_device_is_named_and_not_its_host():
    """Its spinning kernels lie in no module's span; every module was launched 100 ms before."""
    (finding,) = report_of("h100-tp2-sp-rank-1-slow").findings
    assert (finding.ranks, finding.cause, finding.owner) == ((1,), Cause.COMPUTE, Owner.NODE)
    assert finding.slowdown == pytest.approx(1.5, rel=0.03)


def test_a_busy_host_is_not_taken_for_a_slow_device():
    (finding,) = report_of("h200-dp4-rank-2-busy-host").findings
    assert (finding.ranks, finding.cause, finding.owner) == ((2,), Cause.HOST, Owner.NODE)
    assert any("nothing to do" in sentence for sentence in finding.evidence)


@pytest.mark.parametrize(
    ("name", "rank"),
    [("h100-pp2-dp2-rank-1-busy-core", 1), ("h100-tp2-dp2-rank-0-busy-core", 0)],
)
def test_a_host_that_shares_its_core_is_not_taken_for_a_link_a_loader_or_an_optimizer(name, rank):
    """Its launches are as quick as its peers', but for the turns of the other processes."""
    named = [one for one in report_of(name).findings if one.owner is Owner.NODE]
    assert [(one.ranks, one.cause) for one in named] == [((rank,), Cause.HOST)]
    assert any("stopped between launches" in sentence for sentence in named[0].evidence)


def test_a_few_bytes_beside_a_shared_gpu_make_no_slow_link():
    """An all-reduce of 4 bytes takes 191 us in a group and 10 us in the other."""
    (finding,) = report_of("h100-tp2-dp2-rank-3-shared-gpu").findings
    assert (finding.ranks, finding.cause, finding.owner) == ((3,), Cause.COMPUTE, Owner.NODE)


def test_nobody_is_named_in_the_healthy_job():
    report = report_of("h200-pp2-dp2-healthy")
    assert report.verdict is Verdict.HEALTHY
    assert not report.findings
