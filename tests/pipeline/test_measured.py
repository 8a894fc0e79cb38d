"""Costs of traced jobs: what was planted is measured, and the model tells the traced step."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from megascan.errors import ConfigError, InputError
from training.pipeline.generators import depth_first
from training.pipeline.measured import measure, with_layers


@pytest.fixture(scope="module")
def slow(traced):
    return measure(
        traced("--pp", "4", "--dp", "2", "--microbatches", "8",
               "--fault", "rank=5,kind=compute,factor=1.4")
    )  # fmt: skip


def test_a_planted_slow_rank_is_in_the_costs_of_its_replica_and_stage(slow):
    healthy, degraded = slow.stages
    ratios = [b.total_s / a.total_s for a, b in zip(healthy, degraded, strict=True)]
    assert ratios[2] == pytest.approx(1.4, abs=0.03)
    assert [ratios[stage] for stage in (0, 1, 3)] == pytest.approx([1.0] * 3, abs=0.03)
    assert slow.ranks[1][2] == (5,)


def test_sizes_layers_and_order_are_read_from_the_spans(slow):
    assert (slow.shape.num_ranks, slow.shape.num_chunks) == (4, 1)
    assert slow.microbatches == (8, 8)
    assert slow.layers == (4, 4, 4, 4)
    assert slow.layer.forward_s * 4 == pytest.approx(slow.stages[0][1].forward_s, rel=0.05)
    assert slow.as_traced.actions == depth_first(slow.shape).actions
    assert not slow.recomputes
    assert not slow.splits_backward


@pytest.mark.parametrize(
    "flags",
    [
        ("--pp", "4", "--microbatches", "8"),
        ("--pp", "2", "--vpp", "2", "--dp", "2", "--microbatches", "8"),
        ("--pp", "2", "--tp", "2", "--microbatches", "4", "--stage-imbalance", "last=1.4"),
    ],
    ids=["pp4", "pp2 vpp2 dp2", "pp2 tp2 heavy last stage"],
)
def test_the_model_tells_the_traced_pipeline(traced, flags):
    job = measure(traced(*flags))
    predicted_s = max(prediction.step_s for prediction in job.predict_as_traced())
    assert predicted_s == pytest.approx(job.pipeline_s, rel=0.03)
    assert job.pipeline_s < job.step_s
    assert not len(job.scales)


def test_uneven_microbatches_are_seen_as_such(traced):
    timeline = traced("--pp", "2", "--microbatches", "4")
    spans = timeline.spans
    is_compute = pc.equal(spans["kind"].cast(pa.string()), "compute")
    third = pc.and_(is_compute, pc.equal(spans["microbatch"], 2))
    stretched = pc.if_else(third, pc.multiply(spans["duration_ns"], 2), spans["duration_ns"])
    place = spans.schema.get_field_index("duration_ns")
    spans = spans.set_column(place, spans.schema.field(place), stretched)
    job = measure(replace(timeline, spans=spans))
    assert job.scales.shape[1:] == (1, 4)
    assert np.median(job.scales[:, 0, 2]) == pytest.approx(2.0, rel=0.1)


def test_without_a_pipeline_there_is_nothing_to_plan(traced):
    with pytest.raises(InputError, match="pipeline size 1"):
        measure(traced("--dp", "2"))


def test_a_trace_without_passes_is_refused(traced):
    timeline = traced("--pp", "2", "--microbatches", "4")
    kept = pc.not_equal(timeline.spans["kind"].cast(pa.string()), "compute")
    with pytest.raises(InputError, match="no forward and backward passes"):
        measure(replace(timeline, spans=timeline.spans.filter(kept)))


def test_layers_may_be_given_where_modules_were_not_traced(traced):
    job = measure(traced("--pp", "4", "--microbatches", "8", "--granularity", "base"))
    assert job.layers is None
    told = with_layers(job, 16)
    assert told.layers == (4, 4, 4, 4)
    assert told.layer.scaled(4).total_s == pytest.approx(job.stages[0][1].total_s, rel=0.02)
    with pytest.raises(ConfigError, match="--num-layers is 10, expected a multiple of the 4"):
        with_layers(job, 10)


def test_a_second_forward_of_a_microbatch_is_its_repetition(traced):
    timeline = traced("--pp", "2", "--microbatches", "4")
    spans = timeline.spans
    forward = pc.equal(spans["name"].cast(pa.string()), "forward")
    first_stage = spans.filter(pc.and_(forward, pc.equal(spans["rank"], 0)))
    backward = pc.equal(spans["name"].cast(pa.string()), "backward")
    gradients = spans.filter(pc.and_(backward, pc.equal(spans["rank"], 0)))
    place = spans.schema.get_field_index("start_ns")
    begins = pc.subtract(gradients["start_ns"], first_stage["duration_ns"])
    again = first_stage.set_column(place, spans.schema.field(place), begins)
    job = measure(replace(timeline, spans=pa.concat_tables([spans, again])))
    assert job.recomputes
    assert job.as_traced.recomputes
    first, last = job.stages[0]
    assert first.recompute_s == pytest.approx(first.forward_s)
    assert last.recompute_s == 0.0


def test_split_backward_passes_are_measured_as_such(traced):
    timeline = traced("--pp", "2", "--microbatches", "4")
    spans = timeline.spans
    backward = pc.equal(spans["name"].cast(pa.string()), "backward")
    half = pc.if_else(backward, pc.divide(spans["duration_ns"], 2), spans["duration_ns"])
    place = spans.schema.get_field_index("duration_ns")
    spans = spans.set_column(place, spans.schema.field(place), half)
    weights = spans.filter(backward)
    names = pa.array(["backward-weights"] * len(weights)).dictionary_encode()
    begins = pc.add(weights["start_ns"], weights["duration_ns"])
    weights = weights.set_column(
        spans.schema.get_field_index("start_ns"), spans.schema.field("start_ns"), begins
    ).set_column(
        spans.schema.get_field_index("name"),
        spans.schema.field("name"),
        names.cast(spans.schema.field("name").type),
    )
    job = measure(replace(timeline, spans=pa.concat_tables([spans, weights]).unify_dictionaries()))
    assert job.splits_backward
    assert job.as_traced.splits_backward
    cost = job.stages[0][0]
    assert cost.weight_gradient_s == pytest.approx(cost.input_gradient_s, rel=0.01)


def test_messages_of_unknown_end_are_seen_in_the_pauses_of_who_waits(traced):
    timeline = traced("--pp", "2", "--microbatches", "4")
    known_s = measure(timeline).message_s
    spans = timeline.spans
    place = spans.schema.get_field_index("transfer_ns")
    unknown = pa.array([-1] * len(spans), spans.schema.field(place).type)
    spans = spans.set_column(place, spans.schema.field(place), unknown)
    seen_s = measure(replace(timeline, spans=spans)).message_s
    assert known_s[0] > 0
    assert seen_s[0] == pytest.approx(known_s[0], rel=0.2)
