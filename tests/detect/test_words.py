"""Sentences look at the data they speak of: where their condition does not hold, others stand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from detect import Cause, Owner, Verdict, detect
from detect.causes.device import HOST_ADVICE, JOB_ADVICE, host_advice
from detect.text import render_text
from megascan.timeline import numbers
from megascan.topology import Layout


def without(timeline, rank):
    """Return the timeline of a job in which one rank's file ends before its first window."""
    kept = numbers(timeline.spans, "rank") != rank
    return replace(timeline, spans=timeline.spans.filter(pa.array(kept)))


def text_of(report):
    return " ".join(render_text(report).split())


def test_a_rank_that_recorded_nothing_is_missing_and_not_healthy(job):
    report = detect(without(job(layout=Layout(dp=4)).timeline(), 2))
    assert report.unrecorded_ranks == (2,)
    assert report.to_json()["unrecorded_ranks"] == [2]
    assert "nothing is known of rank 2, which is missing" in text_of(report)
    assert any(note.startswith("of rank 2 no iteration was recorded") for note in report.notes)


def test_nobody_is_called_missing_where_all_ranks_recorded(job):
    report = job(layout=Layout(dp=4)).report()
    assert report.unrecorded_ranks == ()
    assert "missing" not in text_of(report)


def test_too_few_iterations_are_counted_as_they_were_traced(job):
    report = job(layout=Layout(dp=4), iterations=1).report()
    assert report.verdict == Verdict.UNDECIDED
    assert any(
        note.startswith("1 iteration can be judged, of 1 traced one") for note in report.notes
    )


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(), "the job has one rank"),
        (Layout(pp=4), "one rank a stage, and no transformer layers that are alike"),
    ],
)
def test_why_nobody_can_be_compared(job, layout, words):
    report = job(layout=layout).report()
    assert any(words in note for note in report.notes), report.notes


def test_clocks_that_nothing_ties_together_do_not_agree(job):
    timeline = job(layout=Layout(dp=4, pp=2), transfer=lambda *_: 1.0).timeline()
    assert "clocks agree within" in text_of(detect(timeline))
    loose = {
        rank: replace(fit, num_anchors=0, residual_median_ns=0.0, residual_p99_ns=0.0)
        for rank, fit in timeline.clocks.items()
    }
    text = text_of(detect(replace(timeline, clocks=loose)))
    assert "nothing in this trace was matched that would show how well they agree" in text
    assert "clocks agree within" not in text


def test_the_jobs_own_hosts_are_no_reason_to_move_a_rank():
    assert host_advice(Owner.NODE) == HOST_ADVICE
    assert host_advice(Owner.JOB) == JOB_ADVICE
    assert not any("restart the rank" in step for step in JOB_ADVICE)
    assert not any("no node is at fault" in step for step in (*JOB_ADVICE, *HOST_ADVICE))


def test_equal_connections_are_those_of_the_same_kind(job):
    """DP 4, PP 3: four pairs between stages 0 and 1, four between 1 and 2, in both directions."""

    def transfer(rank, peer, iteration):
        return 3.0 if (rank, peer) == (1, 5) else 1.0

    report = job(layout=Layout(dp=4, pp=3), transfer=transfer).report()
    (finding,) = [one for one in report.findings if one.cause == Cause.LINK]
    assert 3 <= finding.num_peers <= 7


@pytest.mark.parametrize(("same", "words"), [
    (True, "the same replica is the longest in every iteration"),
    (False, "replicas are the longest in one iteration or another"),
])  # fmt: skip
def test_who_is_longest_is_counted(job, same, words):
    draw = np.random.default_rng(5)
    lengths = np.exp(0.15 * draw.standard_normal((64, 4, 64)))
    if same:
        lengths[:, 2] *= 1.6

    def uneven(slot):
        if slot.name == "optimizer":
            return 1.0
        return float(lengths[slot.iteration, slot.replica, slot.microbatch])

    report = job(layout=Layout(dp=4, tp=2), work=uneven).report()
    found = [one for one in report.findings if one.cause == Cause.SEQUENCE_IMBALANCE]
    assert found, report.findings
    assert any(words in sentence for sentence in found[0].evidence)
