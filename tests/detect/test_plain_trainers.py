"""Jobs of plain PyTorch, from the ground "plain": what was wrong or missed at first sight there."""

from __future__ import annotations

from pathlib import Path

import pytest

from aggregate import build_timeline
from benchmarks.grounds.ground import Planted
from benchmarks.grounds.plain import cases, write
from detect import Cause, Owner, Report, Verdict, detect
from megascan.reader import read_trace


def judged(name: str, folder: Path, draw: int = 0) -> tuple[Report, tuple[Planted, ...]]:
    (case,) = (case for case in cases(draw) if case.name == name)
    planted = write(case, folder)
    return detect(build_timeline(read_trace(folder))), planted


def named(report: Report) -> set[int]:
    return {
        rank for one in report.findings if one.owner is Owner.NODE for rank in one.ranks
    }  # fmt: skip


@pytest.mark.parametrize("name", ["zero1-throttling-4", "zero2-throttling-5"])
def test_who_is_waited_for_behind_the_last_pass_costs_the_step(name, tmp_path):
    """ZeRO's reductions end in a gap before the optimizer, which all others wait through."""
    report, (planted,) = judged(name, tmp_path)
    (finding,) = report.findings
    assert (finding.ranks, finding.owner) == (planted.ranks, Owner.NODE)
    assert finding.cost_is_replayed
    assert finding.step_time_cost_ratio == pytest.approx(planted.held_cost_ratio, abs=0.01)


def test_a_host_that_launches_slowly_is_told_in_a_job_bound_by_its_hosts(tmp_path):
    """Everybody's devices wait for launches; those of one host come half as quickly."""
    report, (planted,) = judged("tensor-host_cpu-7", tmp_path)
    assert [(one.ranks, one.cause, one.owner) for one in report.findings] == [
        (planted.ranks, Cause.HOST, Owner.NODE)
    ]


def test_a_low_clock_is_no_difference_of_sound_chips(tmp_path):
    report, (planted,) = judged("hsdp-gpu_clock-20", tmp_path)
    (finding,) = report.findings
    assert (finding.ranks, finding.owner) == (planted.ranks, Owner.NODE)
    assert any("held down by hardware slowdown" in sentence for sentence in finding.evidence)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("fsdp-evaluations-0", "so few iterations may be chance"),  # one pause of a starved device
        ("zero3-long_sequences-3", "without one of its ranks"),  # that rank has longer sequences
    ],
)
def test_nobody_is_named_in_sound_jobs(name, sentence, tmp_path):
    report, _ = judged(name, tmp_path)
    assert named(report) == set()
    assert any(sentence in words for one in report.findings for words in one.evidence)


@pytest.mark.parametrize("name", ["hsdp-nic-0", "fsdp-tp-nic-1"])
def test_passes_that_all_last_as_long_as_the_slowest_are_no_health(name, tmp_path):
    """Parameters are gathered beside them, over a network at a quarter of its rate; of a compiled
    model no layers are recorded.
    """
    report, _ = judged(name, tmp_path, draw=301)
    assert (report.verdict, report.findings) == (Verdict.UNDECIDED, ())
    assert "no layers were recorded" in report.limited_by[Cause.COMPUTE]


def test_a_device_that_waits_for_its_launches_is_not_slow(tmp_path):
    """No modules were recorded; what its passes stand still for is launched just in time."""
    report, _ = judged("tensor-healthy-22", tmp_path, draw=301)
    assert named(report) == set()


def test_slow_passes_that_cost_nothing_name_nobody(tmp_path):
    """Rank 5 is a little slow in seven of eight iterations, others in four of ten."""
    report, (planted,) = judged("pipeline-dp-gpu_clock-15", tmp_path)
    assert named(report) <= set(planted.ranks)
    (other,) = (one for one in report.findings if one.ranks == (5,))
    assert other.owner is Owner.UNDECIDED


def test_trainers_that_reduce_in_their_own_way_are_not_told_to_enclose_it(tmp_path):
    (case,) = (case for case in cases() if case.name == "zero1-throttling-4")
    write(case, tmp_path)
    assert not [note for note in read_trace(tmp_path).completeness.notes if "grad-sync" in note]
