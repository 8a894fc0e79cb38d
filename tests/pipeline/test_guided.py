"""Guided choice: never hangs, keeps its order and memory, gains where messages are late."""

import random

import pytest

from tests.pipeline.shapes import shape
from training.pipeline.costs import disturbed, even_costs, even_memory
from training.pipeline.generators import depth_first, one_forward_one_backward, zero_bubble_h1
from training.pipeline.guided import (
    Patience,
    PlanProgress,
    choose,
    guided_ratio,
    patience_for,
    run_guided,
)
from training.pipeline.plan import Action, ActionKind, Plan, parse_plan
from training.pipeline.planner import Problem, search
from training.pipeline.simulator import check, numerics_note, predict

PATIENT = Patience(announced_s=0.3, unannounced_s=0.15)
F0, F1, B0 = (
    Action(ActionKind.FORWARD, 0, 0),
    Action(ActionKind.FORWARD, 0, 1),
    Action(ActionKind.BACKWARD, 0, 0),
)


def plan_of(ranks, microbatches, chunks):
    of = shape(ranks, microbatches, chunks)
    return zero_bubble_h1(of) if chunks == 1 else depth_first(of)


def with_late_messages(table, seed, *, share, late_s):
    draw = random.Random(seed)
    for by_microbatch in table.forward_message_s + table.backward_message_s:
        for microbatch in range(len(by_microbatch)):
            if draw.random() < share:
                by_microbatch[microbatch] += late_s
    return table


def test_the_plans_next_action_goes_first_when_its_input_is_there():
    progress = PlanProgress(parse_plan("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"), 0)
    assert choose(progress, lambda action: 0.0, 0.0, PATIENT).action == F0


def test_an_announced_input_is_waited_for_and_then_something_else_is_done():
    progress = PlanProgress(parse_plan("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n"), 0, slack=1.0)
    progress.take(F0)
    soon = {B0: 0.2}
    waiting = choose(progress, lambda action: soon.get(action, 0.0), 0.1, PATIENT)
    assert waiting.action is None
    assert waiting.wait_s == pytest.approx(0.2)
    assert choose(progress, lambda action: soon.get(action, 0.0), 0.3, PATIENT).action == F1
    late = {B0: 5.0}
    assert choose(progress, lambda action: late.get(action, 0.0), 0.0, PATIENT).action == F1


def test_what_is_not_announced_is_waited_for_half_as_long():
    progress = PlanProgress(parse_plan("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n"), 0, slack=1.0)
    progress.take(F0)

    def outlook(action):
        return None if action == B0 else 0.0

    assert choose(progress, outlook, 0.0, PATIENT).wait_s == pytest.approx(0.15)
    assert choose(progress, outlook, 0.15, PATIENT).action == F1


def test_a_forward_out_of_turn_leaves_room_for_those_planned_before_it():
    progress = PlanProgress(parse_plan("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n"), 0)
    progress.take(F0)
    choice = choose(progress, lambda action: None if action == B0 else 0.0, 1.0, PATIENT)
    assert choice.action is None
    assert choice.wait_s is None


def test_an_action_out_of_its_order_is_refused():
    progress = PlanProgress(parse_plan("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"), 0)
    with pytest.raises(ValueError, match="0F1 was taken before 0F0"):
        progress.take(F1)


def test_a_finished_rank_has_nothing_to_do():
    progress = PlanProgress(parse_plan("0F0,0B0\n1F0,1B0\n"), 0)
    progress.take(F0)
    progress.take(B0)
    assert choose(progress, lambda action: 0.0, 9.0, PATIENT).action is None


@pytest.mark.parametrize(("ranks", "microbatches", "chunks"), [(4, 8, 1), (4, 8, 2), (8, 16, 1)])
def test_when_all_is_even_guided_choice_costs_next_to_nothing(ranks, microbatches, chunks):
    plan = plan_of(ranks, microbatches, chunks)
    table = even_costs(plan.shape).table(plan.shape)
    run = run_guided(plan, table, expected=table, patience=patience_for(1 / chunks))
    assert run.step_s <= 1.02 * predict(plan, table).step_s


@pytest.mark.parametrize(
    ("ranks", "microbatches", "chunks", "num_draws"),
    [(2, 4, 1, 300), (3, 5, 1, 250), (2, 4, 2, 250), (4, 6, 2, 100), (3, 4, 3, 100)],
)
def test_a_thousand_disturbed_steps_never_hang_and_keep_order_and_memory(
    ranks, microbatches, chunks, num_draws
):
    plan = plan_of(ranks, microbatches, chunks)
    costs = even_costs(plan.shape)
    expected = costs.table(plan.shape)
    for seed in range(num_draws):
        table = disturbed(costs.table(plan.shape), 0.5, seed=seed)
        with_late_messages(table, seed, share=0.2, late_s=3.0)
        slack = (0.0, 1.0)[seed % 2]
        run = run_guided(
            plan, table, expected=expected, patience=patience_for(1 / chunks), slack=slack
        )
        executed = Plan(name="executed", shape=plan.shape, actions=run.order)
        check(executed, memory_limit=max(predict(plan, table).peak) + slack)
        assert numerics_note(executed) is None


def test_repeated_forwards_may_be_guided_too():
    plan = parse_plan("0F0,0F1,0R0,0B0,0R1,0B1\n1F0,1R0,1B0,1F1,1R1,1B1\n")
    costs = even_costs(plan.shape, recomputes=True)
    for seed in range(20):
        table = with_late_messages(costs.table(plan.shape), seed, share=0.5, late_s=3.0)
        run = run_guided(plan, table, expected=costs.table(plan.shape), patience=patience_for(1.0))
        check(Plan(name="executed", shape=plan.shape, actions=run.order))


def test_late_messages_are_outrun():
    of = shape(8, 16, 2)
    costs = even_costs(of)
    expected = costs.table(of)
    problem = Problem(shape=of, table=expected, memory=even_memory(of), memory_limit=9.0)
    plan = search(problem).plan
    ratios = []
    for seed in range(4):
        table = with_late_messages(costs.table(of), seed, share=0.05, late_s=2.0)
        run = run_guided(plan, table, expected=expected, patience=patience_for(0.5), slack=1.0)
        ratios.append(run.step_s / predict(plan, table).step_s)
    assert sum(ratios) / len(ratios) <= 0.96


def test_the_measured_spread_says_whether_guided_choice_pays():
    plan = one_forward_one_backward(shape(4, 8))
    table = even_costs(plan.shape).table(plan.shape)
    assert guided_ratio(plan, table, 0.0) == pytest.approx(1.0)
    assert guided_ratio(plan, table, 0.25) == pytest.approx(1.0, abs=0.05)
