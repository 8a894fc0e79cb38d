"""Sentences look at the data they speak of: where their condition does not hold, others stand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from detect import Cause, DetectorSettings, Owner, Verdict, detect
from detect.causes.device import HOST_ADVICE, JOB_ADVICE, host_advice
from detect.causes.finding import (
    GAIN_NOT_SHOWN,
    NO_GAIN,
    more_iterations,
    slowed_by,
    undecided_if_no_gain,
)
from detect.causes.losses import AT_THE_END_ADVICE
from detect.causes.readings import reading_evidence
from detect.causes.together import what_follows
from detect.detector import judge
from detect.observe.extract import observe
from detect.text import owner_text, render_text, slowdown_text
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


def gaps_of(rank: int, gap_ms: float, iterations: frozenset[int] | None = None):
    """One rank has a gap in these iterations, or in all of them."""

    def gap(slot):
        is_due = iterations is None or slot.iteration in iterations
        return gap_ms if slot.rank == rank and is_due else 0.0

    return gap


def test_a_host_is_looked_at_and_not_its_device(job):
    (finding,) = job(layout=Layout(dp=4), gap_ms=gaps_of(3, 30.0)).report().findings
    assert (finding.cause, finding.owner) == (Cause.HOST, Owner.NODE)
    assert owner_text(finding) == "the node: look at this host"
    assert owner_text(replace(finding, cause=Cause.COMPUTE)).endswith("look at this hardware")
    assert owner_text(replace(finding, owner=Owner.UNDECIDED)) == "undecided"


def test_what_sound_ranks_lose_nothing_to_is_no_number_to_read(job):
    (finding,) = job(layout=Layout(dp=4), gap_ms=gaps_of(3, 30.0)).report().findings
    assert slowdown_text(finding).startswith("1.")
    far = replace(finding, slowdown=160_913_212.0, slowdown_interval=(1.6e8, 1.7e8))
    assert slowdown_text(far) == "more than 1,000"


@pytest.mark.parametrize(
    ("dp", "word", "whose"), [(2, "it", "its only peer"), (4, "them", "its 3 peers")]
)
def test_one_peer_is_not_spoken_of_as_several(job, slow, dp, word, whose):
    (finding,) = job(layout=Layout(dp=dp), gap_ms=gaps_of(1, 60.0)).report().findings
    evidence = " ".join(finding.evidence)
    assert f"of {whose} above {word} in 100%" in evidence
    computing = job(layout=Layout(dp=dp), work=slow(1, 1.5)).report().findings[0]
    of_some = "its only peer" if dp == 2 else "its peers"
    assert any(one.startswith(f"slower than {of_some} in 100%") for one in computing.evidence)


@pytest.mark.parametrize(("dp", "whose"), [(2, "its peer's 500"), (4, "its peers' 500")])
def test_readings_are_those_of_one_peer_or_of_several(job, dp, whose):
    counters = {rank: {"power_w": 500.0 if rank else 300.0} for rank in range(dp)}
    seen = observe(job(layout=Layout(dp=dp), counters=counters).timeline())
    assert reading_evidence(seen, 0) == [f"counter power_w is 300 against {whose}"]


def test_time_that_lies_between_operations_alone_is_not_said_to_be_inside_passes_too(job):
    seen = observe(job(layout=Layout(dp=4), gap_ms=gaps_of(1, 30.0)).timeline())
    nothing = np.zeros_like(seen.stalled_ns)
    (finding,) = judge(replace(seen, stalled_ns=nothing), DetectorSettings()).findings
    words = "between operations, where the device had nothing to do: its host was late"
    assert any(one.startswith("of it 30 ms " + words) for one in finding.evidence)


def test_time_between_operations_that_is_at_the_end_of_an_iteration_says_so(job):
    seen = observe(job(layout=Layout(dp=4), gap_ms=gaps_of(1, 30.0)).timeline())
    ending_ns = np.zeros_like(seen.stalled_ns)
    ending_ns[1] = 29e6
    (finding,) = judge(replace(seen, ending_ns=ending_ns), DetectorSettings()).findings
    assert any("(29 ms at the end of an iteration)" in one for one in finding.evidence)
    assert finding.next_steps[0] == AT_THE_END_ADVICE
    (other,) = judge(seen, DetectorSettings()).findings
    assert AT_THE_END_ADVICE not in other.next_steps


def test_what_comes_now_and_then_is_one_iteration(job):
    seen = observe(job(layout=Layout(dp=8), iterations=10).timeline())
    assert slowed_by(seen, 7, 7) == "this iteration"
    assert slowed_by(seen, 7, 8) == "these iterations"
    assert slowed_by(seen, 3, 12) == "the job"
    paused = job(
        layout=Layout(dp=16), iterations=10, gap_ms=gaps_of(5, 600.0, frozenset({4, 7, 10}))
    )
    text = text_of(paused.report())
    assert "600 ms each on the mean" in text and "episodes iterations 4, 7 and 10" in text
    assert "to the usual step on the mean of all iterations; of the others' 150 iterations" in text
    assert "none lost as much" in text


def test_a_gain_that_nothing_shows_is_not_said_to_be_small(job):
    (finding,) = job(layout=Layout(dp=4), gap_ms=gaps_of(3, 30.0)).report().findings
    small = replace(finding, cost_is_replayed=False, step_time_cost_ratio=1.003)
    unknown = replace(finding, cost_is_replayed=False, step_time_cost_ratio=1.0)
    assert undecided_if_no_gain(small).evidence[-1] == NO_GAIN
    assert undecided_if_no_gain(unknown).evidence[-1] == GAIN_NOT_SHOWN


@pytest.mark.parametrize(("layout", "axis"), [(Layout(cp=2), "CP"), (Layout(tp=2), "TP")])
def test_who_shares_microbatches_is_told_by_the_axis(job, slow, layout, axis):
    (finding,) = job(layout=layout, work=slow(1, 1.5)).report().findings
    assert finding.owner is Owner.NODE
    assert any(f"share every microbatch ({axis})" in one for one in finding.evidence)


@pytest.mark.parametrize(("cost", "words"), [(1.0, "next to nothing"), (1.031, "3.1 % of the")])
def test_what_follows_and_costs_nothing_has_no_percentage(job, cost, words):
    (finding,) = job(layout=Layout(dp=4), gap_ms=gaps_of(3, 30.0)).report().findings
    said = what_follows(replace(finding, cause=Cause.COMPUTE, step_time_cost_ratio=cost))
    assert f"looks like slower computing, too ({words}" in said


def test_a_profile_is_not_told_of_options_that_it_has_not(job):
    seen = observe(job(layout=Layout(dp=2)).timeline())
    assert "--continuous-trace-iterations" in more_iterations(seen)
    assert "torch.profiler.schedule" in more_iterations(replace(seen, tells_passes=False))
