"""Plans that follow a rule have Megatron-Core's order, and hold what they promise."""

import pytest

from megascan.errors import ConfigError
from megascan.schema import Phase
from megascan.simulate.stage_order import Pass, stage_steps
from tests.pipeline.shapes import shape
from training.pipeline.costs import peak_memory
from training.pipeline.generators import (
    GENERATORS,
    breadth_first,
    depth_first,
    one_forward_one_backward,
    zero_bubble_h1,
)
from training.pipeline.plan import Action, ActionKind, PipelineShape, Placement
from training.pipeline.simulator import check, numerics_note


def megatron_order(of):
    """Passes of every rank in Megatron-Core's schedules."""
    kinds = {Phase.FORWARD: ActionKind.FORWARD, Phase.BACKWARD: ActionKind.BACKWARD}
    return tuple(
        tuple(
            Action(kinds[step.phase], of.stage_of(rank, step.chunk), step.microbatch)
            for step in steps
            if isinstance(step, Pass)
        )
        for rank, steps in enumerate(stage_steps(of.num_ranks, of.num_chunks, of.num_microbatches))
    )


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 7, 16])
def test_1f1b_is_megatrons(ranks, microbatches):
    of = shape(ranks, microbatches)
    assert one_forward_one_backward(of).actions == megatron_order(of)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 16)])
@pytest.mark.parametrize("chunks", [2, 4])
def test_depth_first_is_megatrons_interleaved_order(ranks, microbatches, chunks):
    of = shape(ranks, microbatches, chunks)
    assert depth_first(of).actions == megatron_order(of)


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
@pytest.mark.parametrize("microbatches", [1, 3, 4, 9])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_every_rule_makes_plans_that_can_be_carried_out(name, ranks, microbatches, chunks):
    of = shape(ranks, microbatches, chunks)
    if chunks > 1 and name in ("1f1b", "zb-h1"):
        with pytest.raises(ConfigError, match="one model chunk"):
            GENERATORS[name](of)
        return
    plan = GENERATORS[name](of)
    check(plan)
    check(plan.with_transfers(ahead=2))
    assert numerics_note(plan) is None
    assert plan.with_transfers().without_transfers() == plan


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (8, 32)])
def test_zero_bubble_holds_no_more_than_1f1b(ranks, microbatches):
    usual = peak_memory(one_forward_one_backward(shape(ranks, microbatches)))
    assert usual == tuple(float(ranks - rank) for rank in range(ranks))
    assert max(peak_memory(zero_bubble_h1(shape(ranks, microbatches)))) == pytest.approx(ranks)


def test_breadth_first_holds_more_than_depth_first():
    of = shape(4, 8, 2)
    assert max(peak_memory(depth_first(of))) == pytest.approx(5.5)
    assert max(peak_memory(breadth_first(of))) == pytest.approx(7.5)


def test_sizes_that_make_no_pipeline_are_refused():
    with pytest.raises(ConfigError, match="microbatches is 0"):
        shape(2, 0)
    with pytest.raises(ConfigError, match="two model chunks"):
        PipelineShape(num_ranks=2, num_microbatches=2, num_chunks=3, placement=Placement.V)
    with pytest.raises(ConfigError, match="group size is 0"):
        depth_first(shape(2, 4, 2), group_size=0)
