"""Predicted steps: textbook cases, bounds, and what the parts of a cost do."""

from dataclasses import replace
from itertools import pairwise

import pytest

from megascan.errors import ConfigError
from tests.pipeline.shapes import shape
from training.pipeline.costs import Costs, StageCost, assumed_cost, even_costs
from training.pipeline.generators import (
    breadth_first,
    depth_first,
    one_forward_one_backward,
    zero_bubble_h1,
)
from training.pipeline.plan import Action, ActionKind, parse_plan
from training.pipeline.simulator import predict, predict_megatron


def even(of, **keywords):
    return even_costs(of, **keywords).table(of)


def relative(plan, of):
    """Time over that of Megatron-Core's 1F1B with the same work, even."""
    usual = shape(of.num_ranks, of.num_microbatches)
    return predict(plan, even(of)).step_s / predict_megatron(usual, even(usual)).step_s


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (8, 16)])
def test_1f1b_waits_for_p_minus_1_of_m_plus_p_minus_1(ranks, microbatches):
    of = shape(ranks, microbatches)
    prediction = predict(one_forward_one_backward(of), even(of, message_s=0.0))
    slots = microbatches + ranks - 1
    assert prediction.step_s == pytest.approx(3.0 * slots)
    assert prediction.bubble_ratio == pytest.approx((ranks - 1) / slots)
    assert max(prediction.peak) == ranks


@pytest.mark.parametrize(
    ("make", "ranks", "microbatches", "chunks", "ratio"),
    [
        (zero_bubble_h1, 4, 8, 1, 0.825),
        (zero_bubble_h1, 4, 16, 1, 0.893),
        (zero_bubble_h1, 8, 16, 1, 0.805),
        (depth_first, 4, 8, 2, 0.862),
        (depth_first, 4, 16, 2, 0.915),
        (breadth_first, 4, 8, 2, 0.857),
        (depth_first, 8, 32, 4, 0.865),
    ],
)
def test_known_schedules_have_their_known_times(make, ranks, microbatches, chunks, ratio):
    of = shape(ranks, microbatches, chunks)
    assert relative(make(of), of) == pytest.approx(ratio, abs=6e-4)


def test_every_action_is_after_what_it_needs_and_alone_on_its_rank():
    of = shape(4, 8, 2)
    table = even(of, message_s=0.1)
    prediction = predict(depth_first(of), table)
    ends = {t.action: t.end_s for row in prediction.timeline for t in row}
    for row in prediction.timeline:
        for before, after in pairwise(row):
            assert after.begin_s >= before.end_s
        for timed in row:
            if timed.action.kind is ActionKind.FORWARD and timed.action.stage:
                sent = ends[timed.action._replace(stage=timed.action.stage - 1)]
                assert timed.begin_s >= sent + 0.1 - 1e-12
    assert prediction.step_s >= table.busiest_rank_s(of)


def test_a_slow_link_delays_and_delays_blocking_exchanges_more():
    of = shape(4, 16)
    slow = even(of, message_s=0.25)
    quick = even(of, message_s=0.0)
    plan = one_forward_one_backward(of)
    asynchronous = predict(plan, slow).step_s
    assert asynchronous > predict(plan, quick).step_s
    assert predict_megatron(of, slow).step_s > asynchronous
    assert predict_megatron(of, quick).step_s == pytest.approx(predict(plan, quick).step_s)


def test_messages_of_a_link_travel_one_after_the_other():
    of = shape(2, 3)
    text = "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n"
    stage = StageCost(forward_s=1.0, input_gradient_s=1.0, weight_gradient_s=0.0)
    costs = Costs(stages=(stage, stage), message_s=(5.0,))
    begins = [t.begin_s for t in predict(parse_plan(text), costs.table(of)).timeline[1][:3]]
    assert begins == [6.0, 11.0, 16.0]


def test_named_transfers_say_when_to_send():
    of = shape(2, 2)
    plan = one_forward_one_backward(of)
    table = even(of)
    assert predict(plan.with_transfers(ahead=1), table) == predict(plan, table)
    late = parse_plan(
        "0F0,0F1,0SEND_F0,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    )
    assert predict(late, table).step_s > predict(plan, table).step_s


def test_a_whole_backward_is_its_two_parts_and_what_it_repeats():
    of = shape(2, 1)
    table = even_costs(of, forward_s=2.0, recomputes=True).table(of)
    whole = table.duration_s(Action(ActionKind.BACKWARD, 0, 0))
    apart = table.duration_s(Action(ActionKind.BACKWARD, 0, 0), recomputed_apart=True)
    assert whole == pytest.approx(6.0)
    assert apart == pytest.approx(4.0)


def test_repeating_forwards_before_their_gradient_comes_saves_time():
    inside = parse_plan("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    ahead = parse_plan("0F0,0F1,0R0,0B0,0R1,0B1\n1F0,1B0,1F1,1B1\n")
    table = even(inside.shape, recomputes=True)
    assert predict(ahead, table).step_s < predict(inside, table).step_s


def test_overhead_is_paid_once_an_action():
    of = shape(2, 4)
    costs = even_costs(of, message_s=0.0)
    usual = predict(one_forward_one_backward(of), costs.table(of)).step_s
    loaded = replace(costs, overhead_s=0.01).table(of)
    assert predict(one_forward_one_backward(of), loaded).step_s == pytest.approx(usual + 0.1)


def test_costs_that_do_not_fit_the_pipeline_are_refused():
    of = shape(4, 8)
    with pytest.raises(ConfigError, match="costs are for 4 stages, the pipeline has 8"):
        even_costs(of).table(shape(4, 8, 2))
    with pytest.raises(ConfigError, match="costs are for 3 microbatches, the step has 8"):
        replace(even_costs(of), microbatch_scales=(1.0, 2.0, 3.0)).table(of)
    with pytest.raises(ConfigError, match="1 messages between 3 stages"):
        Costs(stages=(assumed_cost(1.0),) * 3, message_s=(0.0,))
    with pytest.raises(ConfigError, match="multiples of pp"):
        predict_megatron(shape(4, 7, 2), even(shape(4, 7, 2)))
