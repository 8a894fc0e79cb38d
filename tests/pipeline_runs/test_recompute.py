"""Forwards repeated as actions: where they stand, what they cost in memory and time."""

from __future__ import annotations

from training.pipeline.costs import even_costs, peak_memory
from training.pipeline.generators import one_forward_one_backward, recompute_ahead, zero_bubble_h1
from training.pipeline.plan import PipelineShape, format_plan
from training.pipeline.simulator import check, numerics_note, predict

SHAPE = PipelineShape(num_ranks=4, num_microbatches=8)


def test_each_forward_but_the_last_stages_is_repeated_before_its_backward() -> None:
    small = PipelineShape(num_ranks=2, num_microbatches=2)
    plan = recompute_ahead(one_forward_one_backward(small))
    assert format_plan(plan) == "0F0,0F1,0R0,0B0,0R1,0B1\n1F0,1B0,1F1,1B1\n"


def test_one_microbatch_holds_activations_and_nothing_hangs() -> None:
    plan = recompute_ahead(one_forward_one_backward(SHAPE))
    check(plan)
    assert numerics_note(plan) is None
    assert max(peak_memory(plan)) == 1.0


def test_the_wait_for_the_gradient_is_used() -> None:
    """Against 1F1B whose backward passes repeat their forwards; 44 forwards at 8 microbatches."""
    table = even_costs(SHAPE, message_s=0.0, recomputes=True).table(SHAPE)
    inside = predict(one_forward_one_backward(SHAPE), table).step_s
    assert inside == 44.0
    ahead = predict(recompute_ahead(one_forward_one_backward(SHAPE)), table).step_s
    split = predict(recompute_ahead(zero_bubble_h1(SHAPE)), table).step_s
    assert ahead / inside < 0.94
    assert split / inside < 0.81
