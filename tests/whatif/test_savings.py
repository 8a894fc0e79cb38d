"""What is worth mending: the detector's findings, or the ranks and stages that stand out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from aggregate import build_timeline
from detect import Cause, Finding, Owner
from detect.whatif import (
    Replay,
    replay_of_timeline,
    saved_by_fixing,
    saved_by_quicker_transfers,
    savings_of,
)
from detect.whatif.graph import sweep
from detect.whatif.render import render_text, to_json
from detect.whatif.slowness import analyze, heavy_stages, savings_of_standouts
from megascan.simulate import Imbalance, JobModel, communication_heavy, simulate_trace
from megascan.topology import Layout

MakeReplay = Callable[[Sequence[float]], Replay]


def finding(*ranks: int, cause: Cause = Cause.COMPUTE) -> Finding:
    return Finding(
        ranks=ranks,
        cause=cause,
        owner=Owner.NODE,
        slowdown=2.0,
        slowdown_interval=(1.9, 2.1),
        first_iteration=1,
        last_iteration=2,
        share_of_iterations=1.0,
        q_value=0.0,
        step_time_cost_ratio=1.5,
        statement="slow",
    )


def test_every_finding_has_its_saving(data_parallel_replay: MakeReplay) -> None:
    replay = data_parallel_replay([1, 2, 1.5, 1])
    savings = savings_of(replay, [finding(1), finding(2)])
    assert [one.ranks for one in savings] == [(1,), (2,)]
    assert savings[0].fixed_step_s == saved_by_fixing(replay, [1]).fixed_step_s


def test_a_rank_that_is_named_twice_is_mended_once(data_parallel_replay: MakeReplay) -> None:
    replay = data_parallel_replay([1, 2, 1, 1])
    (saving,) = savings_of(replay, [finding(1), finding(1, cause=Cause.HOST)])
    assert saving.causes == (Cause.COMPUTE, Cause.HOST)
    text = render_text(analyze(replay), [saving])
    assert text.count("rank 1 (DP1 PP0) [compute, host]: step 6.75 s") == 1
    assert to_json(analyze(replay), [saving])["savings"][0]["causes"] == ["compute", "host"]


def test_findings_without_recorded_ranks_have_none(data_parallel_replay: MakeReplay) -> None:
    replay = data_parallel_replay([1, 2])
    skew, foreign = finding(cause=Cause.SEQUENCE_IMBALANCE), finding(1, 99)
    assert savings_of(replay, [skew, foreign]) == []


def test_ranks_that_cannot_be_told_apart_are_mended_together(
    data_parallel_replay: MakeReplay,
) -> None:
    replay = replace(data_parallel_replay([1, 1, 2, 2]), shared_work=((0, 1), (2, 3)))
    (saving,) = savings_of(replay, [finding(2), finding(3)])
    assert saving.ranks == (2, 3)


def test_gpu_hours_are_those_of_the_whole_job(data_parallel_replay: MakeReplay) -> None:
    """6 of 12.75 s saved on 4 GPUs: 1.88 GPU-hours an hour."""
    saving = saved_by_fixing(data_parallel_replay([1, 2, 1, 1]), [1])
    assert saving.gpu_hours_per_hour == pytest.approx(4 * 6 / 12.75)
    assert saving.gpu_hours_per_day == pytest.approx(24 * saving.gpu_hours_per_hour)
    record = saving.to_json()
    assert record["gpu_hours_per_hour"] == saving.gpu_hours_per_hour


def test_a_stage_alone_is_mended_by_what_it_is_slow_by_and_not_to_another_stages_work() -> None:
    """Stage 1 has twice the work of stage 0, and its device is 1.1 times slower: without that a
    step is a tenth shorter at most, though another stage takes half as long.
    """
    layout = Layout(pp=2)
    job = JobModel(
        layout=layout,
        costs=communication_heavy(layout),
        iterations=6,
        imbalance=Imbalance(stage_ratio={1: 2.0}),
    )
    replay = replay_of_timeline(build_timeline(simulate_trace(job, seed=3)))
    slow = replace(finding(1), slowdown=1.1)
    (known,) = savings_of(replay, [slow])
    unknown = saved_by_fixing(replay, [1])
    assert known.compared_with == unknown.compared_with == "stages"
    assert 1.03 < known.speedup <= 1.1 < unknown.speedup
    light = saved_by_fixing(
        replay, [0]
    )  # whatever it costs, stage 1's work does not become its own
    assert light.compared_with == "stages" and light.speedup >= 1.0


def test_what_hides_is_not_called_healthy(data_parallel_replay: MakeReplay) -> None:
    """Rank 2 is slow, but rank 1 is slower: mending rank 2 alone gains nothing."""
    replay = data_parallel_replay([1, 2, 1.5, 1])
    text = render_text(analyze(replay), savings_of(replay, [finding(2)]))
    assert "rank 2 (DP2 PP0) [compute]: nothing gained, it hides in time" in text


def test_standouts_are_slow_ranks_and_heavy_stages(data_parallel_replay: MakeReplay) -> None:
    slow = analyze(data_parallel_replay([1, 2, 1, 1]))
    assert [one.ranks for one in savings_of_standouts(slow)] == [(1,)]
    assert savings_of_standouts(analyze(data_parallel_replay([1, 1, 1]))) == []


def test_one_slow_rank_makes_no_heavy_stage(data_parallel_replay: MakeReplay) -> None:
    result = analyze(data_parallel_replay([1, 1, 1, 1]))
    two_stages = replace(result.replay, ranks=np.arange(8).reshape(2, 4))
    cost = np.array([[1.0, 1.0, 1.0, 1.0], [2.0, 1.0, 1.0, 1.0]])
    assert heavy_stages(replace(result, replay=two_stages, rank_ratio=cost)) == ()
    cost[1] = 1.2
    assert heavy_stages(replace(result, replay=two_stages, rank_ratio=cost)) == (1,)


def test_a_quicker_network_speeds_up_what_crosses_the_border_and_nothing_else() -> None:
    """Stage 0 and 1 of two replicas are a host each: only what both stages take part in crosses."""
    layout = Layout(pp=2, dp=2)
    job = JobModel(layout=layout, costs=communication_heavy(layout), iterations=2,
                   num_microbatches=4)  # fmt: skip
    replay = replay_of_timeline(build_timeline(simulate_trace(job, seed=3)))
    host = [int(rank) for rank in replay.ranks[1]]
    quicker = [saved_by_quicker_transfers(replay, host, factor, 0) for factor in (1.0, 2.0, 4.0)]
    savings = [one.saved_s for one in quicker if one is not None]
    assert len(savings) == 3 and savings[0] == pytest.approx(0.0, abs=1e-9)
    assert 0 < savings[1] < savings[2]

    graph = replay.graph
    crosses = np.zeros(len(graph.nodes), dtype=bool)
    for group in graph.groups:
        places = list(group.nodes)
        crosses[places] = len(set(graph.stage[places])) > 1 and not graph.is_local[places[0]]
    weights = np.where(crosses[:, None, None], replay.weights / 2.0, replay.weights)
    mended = sweep(graph, lambda node: weights[node][:, None, :]).mean()
    assert quicker[1] is not None and quicker[1].fixed_step_s == pytest.approx(float(mended))

    everybody = [int(rank) for rank in replay.ranks.ravel()]
    assert saved_by_quicker_transfers(replay, everybody, 2.0, 0) is None  # nothing leaves
    assert saved_by_quicker_transfers(replay, host, 2.0, 10**15) is None  # all of it is latency
