from __future__ import annotations

import numpy as np
import pytest

from megascan.errors import ConfigError, UsageError
from megascan.simulate import Imbalance, parse_stage_imbalance, simulate_trace
from megascan.topology import Layout


def test_a_heavy_last_stage_is_additive_and_the_same_everywhere(exact_job, frame):
    imbalance = Imbalance(stage_ratio={1: 1.4})
    job = exact_job(Layout(pp=2, dp=2), imbalance=imbalance, num_layers=4)
    spans = frame(simulate_trace(job))
    forward = spans[spans["name"] == "forward"].groupby("rank")["duration_ns"].unique()
    assert [value.tolist() for value in forward] == [[20_000], [20_000], [28_000], [28_000]]
    output = spans[spans["name"].str.startswith("output_layer")]
    assert output.groupby("name")["duration_ns"].unique().map(list).to_dict() == {
        "output_layer": [8_000],
        "output_layer-backward": [6_640],
    }


@pytest.mark.parametrize(("stage", "where"), [(0, "embedding"), (1, "transformer_layer")])
def test_other_stages_can_be_heavy_too(exact_job, frame, stage, where):
    job = exact_job(Layout(pp=3), imbalance=Imbalance(stage_ratio={stage: 1.5}), num_layers=6)
    spans = frame(simulate_trace(job))
    forward = spans[spans["name"] == "forward"].groupby("rank")["duration_ns"].max()
    assert forward[stage] == 30_000
    assert set(forward.drop(stage)) == {20_000}
    heavy = spans[(spans["rank"] == stage) & (spans["name"] == where)]
    assert heavy["duration_ns"].max() == {"embedding": 10_000, "transformer_layer": 15_000}[where]


def test_a_long_microbatch_is_long_at_all_stages_of_its_replica(exact_job, frame):
    job = exact_job(
        Layout(pp=2, dp=2),
        num_microbatches=6,
        iterations=4,
        imbalance=Imbalance(sequence_ratio=0.3),
    )
    spans = frame(simulate_trace(job, seed=1))
    forward = spans[spans["name"] == "forward"].sort_values(["iteration", "microbatch"])
    by_rank = np.stack([part["duration_ns"] for _, part in forward.groupby("rank")])
    assert np.abs(by_rank[:2] - by_rank[2:]).max() <= 1
    assert np.std(np.log(by_rank[0])) > 0.15
    assert abs(np.corrcoef(by_rank[0], by_rank[1])[0, 1]) < 0.6


def test_first_iterations_are_slow_and_then_no_more(exact_job, frame):
    job = exact_job(Layout(dp=4), iterations=5, imbalance=Imbalance(warmup_ratio=2.0))
    spans = frame(simulate_trace(job))
    forward = spans[spans["name"] == "forward"].groupby("iteration")["duration_ns"]
    assert forward.min()[1] > 1.9 * forward.min()[5]
    assert forward.max()[5] < 1.01 * 10_000
    first = spans[(spans["name"] == "forward") & (spans["iteration"] == 1)]
    assert first.groupby("rank")["duration_ns"].first().nunique() == 4


def test_checkpoints_stand_between_iterations(exact_job, frame):
    imbalance = Imbalance(checkpoint_interval=2, checkpoint_ns=1e6)
    spans = frame(simulate_trace(exact_job(Layout(dp=2), iterations=5, imbalance=imbalance)))
    saves = spans[spans["name"] == "save-checkpoint"]
    assert sorted(saves["iteration"]) == [2, 2, 4, 4]
    ends = spans[spans["name"] == "iteration"].set_index(["rank", "iteration"])["end"]
    starts = spans[spans["name"] == "iteration"].set_index(["rank", "iteration"])["start"]
    for save in saves.itertuples():
        assert ends[save.rank, save.iteration] <= save.start
        assert save.end <= starts[save.rank, save.iteration + 1]


def test_collector_pauses_of_a_healthy_job_visit_every_rank(exact_job, frame):
    imbalance = Imbalance(gc_interval=4, gc_ns=5e6)
    spans = frame(simulate_trace(exact_job(Layout(dp=4), iterations=40, imbalance=imbalance)))
    pauses = spans[spans["kind"] == "gc"]
    assert set(pauses["rank"]) == {0, 1, 2, 3}
    assert 20 <= len(pauses) <= 60  # 40 expected


def test_an_uneven_stage_outside_the_job_is_refused(exact_job):
    with pytest.raises(ConfigError, match="2 stages"):
        exact_job(Layout(pp=2), imbalance=Imbalance(stage_ratio={2: 1.4}))


def test_uneven_stages_are_read_from_text():
    assert parse_stage_imbalance("last=1.4", 4) == (3, 1.4)
    assert parse_stage_imbalance("first=1.2", 4) == (0, 1.2)
    assert parse_stage_imbalance("2=1.1", 4) == (2, 1.1)


@pytest.mark.parametrize(
    "text", ["last", "last=x", "last=0.5", "4=1.4", "middle=2", "last=inf", ""]
)
def test_uneven_stages_that_cannot_be_are_refused(text):
    with pytest.raises(UsageError, match=r"such as last=1\.4"):
        parse_stage_imbalance(text, 4)
