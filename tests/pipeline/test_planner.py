"""The search: known figures at known memory, never worse than a rule, honest about limits."""

from dataclasses import replace
from itertools import pairwise

import pytest

from megascan.errors import ConfigError
from training.pipeline.costs import assumed_cost, even_costs, even_memory
from training.pipeline.plan import PipelineShape
from training.pipeline.planner import Problem, least_memory_found, rule_plans, search
from training.pipeline.simulator import check, numerics_note, predict, predict_megatron


def problem(ranks, microbatches, chunks, limit, *, costs=None, splits=True):
    of = PipelineShape(num_ranks=ranks, num_microbatches=microbatches, num_chunks=chunks)
    return Problem(
        shape=of,
        table=(costs or even_costs(of)).table(of),
        memory=even_memory(of),
        memory_limit=limit,
        splits_backward=splits,
    )


def megatron_s(ranks, microbatches):
    of = PipelineShape(num_ranks=ranks, num_microbatches=microbatches)
    return predict_megatron(of, even_costs(of).table(of)).step_s


@pytest.mark.parametrize(
    ("ranks", "microbatches", "chunks", "limit", "ratio"),
    [
        (4, 8, 1, 4, 0.825),
        (4, 8, 1, 5, 0.811),
        (4, 8, 2, 4, 0.797),
        (4, 8, 2, 5, 0.766),
        (4, 16, 2, 5, 0.859),
        (8, 16, 2, 8, 0.754),
    ],
)
def test_even_stages_reach_their_known_time(ranks, microbatches, chunks, limit, ratio):
    found = search(problem(ranks, microbatches, chunks, limit))
    assert found.prediction.step_s / megatron_s(ranks, microbatches) <= ratio + 1e-3


@pytest.mark.parametrize("what", ["even", "slow rank", "heavy last stage", "slow link", "lengths"])
@pytest.mark.parametrize(("chunks", "splits"), [(1, True), (2, True), (2, False)])
def test_plans_are_valid_fit_and_beat_the_rules(what, chunks, splits):
    of = PipelineShape(num_ranks=4, num_microbatches=8, num_chunks=chunks)
    costs = even_costs(of)
    if what == "slow rank":
        costs = costs.slowed(of, 2, 1.4)
    elif what == "heavy last stage":
        costs = replace(costs, stages=(*costs.stages[:-1], costs.stages[-1] + assumed_cost(0.3)))
    elif what == "slow link":
        costs = replace(costs, message_s=(0.5, *costs.message_s[1:]))
    elif what == "lengths":
        costs = replace(costs, microbatch_scales=(0.3, 0.5, 2.0, 1.0, 3.0, 0.2, 0.6, 0.4))
    asked = problem(4, 8, chunks, 6.0, costs=costs, splits=splits)
    found = search(asked)
    check(found.plan, memory=asked.memory, memory_limit=6.0)
    assert numerics_note(found.plan) is None
    assert found.plan.splits_backward in (splits, False)
    assert found.prediction.step_s >= asked.table.busiest_rank_s(of) - 1e-9
    for plan in rule_plans(asked):
        if max(predict(plan, asked.table).peak) <= 6.0:
            assert found.prediction.step_s <= predict(plan, asked.table).step_s + 1e-9


def test_the_prediction_is_what_the_simulator_says_of_the_plan():
    asked = problem(4, 8, 2, 5.0)
    found = search(asked)
    again = predict(found.plan, asked.table, asked.memory)
    assert found.prediction.step_s == pytest.approx(again.step_s)


def test_more_memory_is_never_slower():
    times = [search(problem(4, 8, 2, limit)).prediction.step_s for limit in (4.0, 5.0, 6.0, 8.0)]
    assert all(more <= less + 1e-9 for less, more in pairwise(times))


def test_an_impossible_limit_names_one_that_is_not():
    asked = problem(4, 8, 2, 1.0)
    with pytest.raises(ConfigError, match="fits activations of 1; one was found for"):
        search(asked)
    need = least_memory_found(asked)
    assert need <= 3.0  # interleaved 1F1B holds 5.5
    found = search(replace(asked, memory_limit=need))
    assert max(found.prediction.peak) <= need + 1e-9
