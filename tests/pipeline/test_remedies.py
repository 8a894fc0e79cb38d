"""Advice: what moves work makes up for a slow rank, what orders it does not, and by how much."""

from dataclasses import replace

import numpy as np
import pytest

from training.pipeline.costs import StageCost, assumed_cost
from training.pipeline.generators import depth_first, one_forward_one_backward, zero_bubble_h1
from training.pipeline.measured import AS_TRACED, Circumstances, MeasuredJob, Predictor
from training.pipeline.plan import PipelineShape
from training.pipeline.remedies import (
    Effort,
    HelperOffer,
    RemedyKind,
    advise,
    balanced_layers,
    balanced_microbatches,
    hill,
    layout_text,
)
from training.pipeline.simulator import predict_megatron

LAYER = assumed_cost(0.010)


def job_of(ranks=4, microbatches=16, *, stages=None, recomputes=False, scales=None):
    """Replicas of 8 layers a stage; `stages` (replica) → costs."""
    shape = PipelineShape(num_ranks=ranks, num_microbatches=microbatches)
    stages = stages or ((LAYER.scaled(8),) * ranks,)
    job = MeasuredJob(
        shape=shape,
        ranks=tuple(
            tuple((replica * ranks + p,) for p in range(ranks)) for replica in range(len(stages))
        ),
        stages=stages,
        microbatches=(microbatches,) * len(stages),
        message_s=(0.001,) * (ranks - 1),
        overhead_s=0.0,
        step_s=0.0,
        pipeline_s=0.0,
        spread_ratio=0.01,
        as_traced=depth_first(shape),
        replicas_coupled=False,
        recomputes=recomputes,
        splits_backward=False,
        scales=np.empty((0, 0, 0)) if scales is None else scales,
        layers=(8,) * ranks,
        layer=LAYER,
    )
    traced_s = max(prediction.step_s for prediction in job.predict_as_traced())
    return replace(job, step_s=traced_s + 0.1, pipeline_s=traced_s)


def with_slow(ranks=4, replicas=2, *, rank=2, ratio=1.4):
    """One pipeline rank of replica 0 slower than the others."""
    healthy = (LAYER.scaled(8),) * ranks
    degraded = tuple(c.scaled(ratio) if p == rank else c for p, c in enumerate(healthy))
    return (degraded, *(healthy,) * (replicas - 1))


def best_of(advice, kind):
    return min((r.step_s for r in advice.remedies if r.kind is kind), default=None)


def test_a_healthy_job_is_offered_schedules_and_no_repair():
    advice = advise(Predictor(job_of(), {}))
    kinds = {remedy.kind for remedy in advice.remedies}
    assert not kinds & {RemedyKind.MICROBATCHES, RemedyKind.DRAIN, RemedyKind.ORDER}
    assert advice.best.kind is RemedyKind.SCHEDULE
    assert max(advice.best.peak) <= 4.0
    assert advice.best.step_s < 0.92 * advice.now.step_s


def test_a_slow_replica_gets_fewer_microbatches_and_no_order_makes_up_for_it():
    model = Predictor(job_of(stages=with_slow()), {})
    assert model.slow_ranks == (2,)
    counts = balanced_microbatches(model, one_forward_one_backward)
    assert sum(counts) == 32
    assert counts[0] < 16 < counts[1]
    advice = advise(model)
    one_chunk = [
        r for r in advice.remedies if r.kind is RemedyKind.SCHEDULE and not r.circumstances.layers
    ]
    moved = best_of(advice, RemedyKind.MICROBATCHES)
    assert moved < min(remedy.step_s for remedy in one_chunk)
    assert moved / advice.now.step_s < 0.85
    at_once = [r for r in advice.remedies if r.effort is Effort.BOUNDARY]
    assert min(r.step_s for r in at_once) / advice.now.step_s < 0.90


def test_of_many_replicas_the_slow_one_alone_gives_away():
    model = Predictor(job_of(stages=with_slow(replicas=4)), {})
    counts = balanced_microbatches(model, zero_bubble_h1)
    assert counts[0] < 15
    assert all(count >= 16 for count in counts[1:])
    assert sum(counts) == 64


def test_replicas_that_share_experts_keep_equal_numbers():
    job = replace(job_of(stages=with_slow()), replicas_coupled=True)
    advice = advise(Predictor(job, {}))
    assert best_of(advice, RemedyKind.MICROBATCHES) is None
    assert any("experts" in note for note in advice.notes)


def test_without_replicas_the_verdict_says_who_is_slow():
    stages = with_slow(replicas=1)
    silent = Predictor(job_of(stages=stages), {})
    assert silent.slow_ranks == ()
    told = Predictor(job_of(stages=stages), {2: 1.4})
    assert told.slow_ranks == (2,)
    layers = balanced_layers(told, zero_bubble_h1)
    assert layers[2] < 7
    assert sum(layers) == 32
    advice = advise(told)
    assert best_of(advice, RemedyKind.LAYERS) / advice.now.step_s < 0.85
    healthy_s = job_of().step_s
    assert best_of(advice, RemedyKind.DRAIN) == pytest.approx(healthy_s, rel=0.01)


def test_a_heavy_last_stage_gives_layers_away():
    usual = LAYER.scaled(8)
    model = Predictor(job_of(stages=((usual, usual, usual, usual + LAYER.scaled(3)),)), {})
    layers = balanced_layers(model, one_forward_one_backward)
    assert layers[-1] < 7
    advice = advise(model)
    assert best_of(advice, RemedyKind.LAYERS) < 0.9 * advice.now.step_s
    assert any("--pipeline-model-parallel-layout" in r.flags for r in advice.remedies)


def test_layers_that_fit_best_stay():
    model = Predictor(job_of(), {})
    assert balanced_layers(model, one_forward_one_backward) == (8, 8, 8, 8)


def test_uneven_lengths_are_ordered_short_long_short():
    assert hill((3.0, 1.0, 6.0, 2.0, 5.0, 4.0)) == (1.0, 3.0, 5.0, 6.0, 4.0, 2.0)
    draw = np.random.default_rng(3)
    scales = np.exp(draw.normal(0, 0.7, size=(3, 1, 16)))
    advice = advise(Predictor(job_of(scales=scales), {}))
    ordered = [r for r in advice.remedies if r.kind is RemedyKind.ORDER]
    assert ordered[0].flags[:2] == ("--order-microbatches", "hill")
    same_rule = next(r for r in advice.remedies if r.what == "1f1b")
    hill_1f1b = next(r for r in ordered if r.what.endswith("1f1b"))
    assert hill_1f1b.step_s < 0.85 * same_rule.step_s


def test_a_limit_keeps_what_holds_more_from_being_recommended():
    model = Predictor(job_of(), {})
    tight = advise(model, memory_limit=4.0)
    loose = advise(model, memory_limit=6.0)
    assert max(tight.best.peak) <= 4.0
    assert max(loose.best.peak) <= 6.0
    assert loose.best.step_s <= tight.best.step_s


def test_what_is_not_worth_a_restart_is_not_recommended():
    ranks, microbatches = 2, 64
    light = StageCost(forward_s=0.001, input_gradient_s=0.001, weight_gradient_s=0.0)
    job = job_of(ranks, microbatches, stages=((light,) * ranks,))
    advice = advise(Predictor(replace(job, step_s=job.step_s * 20, layers=None), {}))
    assert advice.best is advice.now


def test_helpers_are_tried_when_offered_and_told_when_they_lose():
    recomputing = tuple(
        StageCost(forward_s=0.08, input_gradient_s=0.08, weight_gradient_s=0.08, recompute_s=0.08)
        for _ in range(4)
    )
    pays = replace(job_of(8 // 2, 8, stages=(recomputing,), recomputes=True), layers=None)
    offered = advise(Predictor(pays, {}), helpers=HelperOffer())
    assert best_of(offered, RemedyKind.HELPER) < 0.80 * offered.now.step_s
    assert offered.best.kind is not RemedyKind.HELPER
    loses = advise(Predictor(job_of(4, 8), {}), helpers=HelperOffer(speed_ratio=0.5))
    assert any("a helper loses" in note for note in loses.notes)
    assert any("does not recompute" in note for note in loses.notes)
    replicas = advise(Predictor(job_of(stages=with_slow()), {}), helpers=HelperOffer())
    assert any("helpers were not tried" in note for note in replicas.notes)


def test_costs_follow_layers_chunks_and_mended_ranks():
    model = Predictor(job_of(stages=with_slow()), {})
    moved = model.costs(0, Circumstances(layers=(9, 8, 7, 8)))
    assert moved.stages[2].total_s == pytest.approx(LAYER.total_s * 7 * 1.4)
    halves = model.costs(0, Circumstances(layers=(4,) * 8))
    assert len(halves.stages) == 8
    assert len(halves.message_s) == 7
    assert halves.stages[6].total_s == pytest.approx(LAYER.total_s * 4 * 1.4)
    mended = model.costs(0, Circumstances(healthy_ranks=frozenset({2})))
    assert mended.stages == model.costs(1, AS_TRACED).stages


def test_the_traced_step_is_megatrons_own_exchange():
    job = job_of()
    model = Predictor(job, {})
    table = job.costs(0).table(job.shape)
    assert model.traced.pipeline_s == pytest.approx(predict_megatron(job.shape, table).step_s)
    assert model.step_s(model.traced) == pytest.approx(job.step_s)


def test_layouts_are_written_as_megatron_reads_them():
    assert layout_text((3, 4, 1)) == "Ettt|tttt|tL"


def test_forwards_repeated_ahead_are_offered_to_jobs_that_recompute():
    recomputing = (assumed_cost(0.08, recomputes=True),) * 4
    job = replace(job_of(4, 8, stages=(recomputing,), recomputes=True), layers=None)
    advice = advise(Predictor(job, {}))
    ahead = {r.what.split(",")[0]: r for r in advice.remedies if "--recompute-ahead" in r.flags}
    inside = {r.what: r for r in advice.remedies}
    for rule in ("1f1b", "zb-h1"):
        assert ahead[rule].step_s < 0.97 * inside[rule].step_s
        assert max(ahead[rule].peak) > max(inside[rule].peak)
    assert "--recompute-ahead" not in advice.best.flags
    roomy = advise(Predictor(job, {}), memory_limit=80.0)
    assert "--recompute-ahead" in roomy.best.flags
