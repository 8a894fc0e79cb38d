"""What cannot be carried out is refused with one sentence that says where and why."""

import random

import pytest

from megascan.errors import ConfigError
from tests.pipeline.shapes import shape
from training.pipeline.channels import Link, link_of, most_under_way, proved_by
from training.pipeline.costs import ActivationMemory, peak_memory
from training.pipeline.generators import (
    breadth_first,
    depth_first,
    one_forward_one_backward,
    zero_bubble_h1,
)
from training.pipeline.plan import (
    ActionKind,
    Message,
    PipelineShape,
    Plan,
    format_plan,
    message_made,
    message_needed,
    parse_plan,
)
from training.pipeline.simulator import check, forward_order, numerics_note, order_of_completion


def refused(text):
    with pytest.raises(ConfigError) as caught:
        check(parse_plan(text, name="mine.csv"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0B0\n1F0\n", "microbatch 0 on stage 1 has nothing for its backward"),
        ("0F0,0I0\n1F0,1B0\n", "has I for its backward, expected B, or I and W"),
        ("0F0,0B0,0W0\n1F0,1B0\n", "has B and W for its backward"),
        ("0B0\n1F0,1B0\n", "microbatch 0 on stage 0 has no forward"),
        ("0F0,0F0,0B0\n1F0,1B0\n", "has 0F0 2 times"),
        ("0F0,0B0,1F0\n1B0\n", "1F0 stands on rank 0, but stage 1 lies on rank 1"),
        ("0B0,0F0\n1F0,1B0\n", "rank 0 at 0B0 waits for 0F0, rank 1 at 1F0 waits for 0F0"),
        ("0F0,0W0,0I0\n1F0,1B0\n", "rank 0 at 0W0 waits for 0I0"),
        ("0F0,0B0,0R0\n1F0,1B0\n", "rank 0 at 0B0 waits for 0R0"),
        ("0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0\n", "what 0B0 needs is never sent on rank 1"),
        ("0F0,0SEND_F0,0SEND_B0,0B0\n1F0,1B0\n", "0SEND_B0 on rank 0 has no stage to talk to"),
    ],
)
def test_what_is_wrong_is_said(text, words):
    assert words in refused(text)


def test_receives_come_in_the_order_of_sends():
    plan = one_forward_one_backward(shape(2, 2)).with_transfers()
    text = format_plan(plan)
    swapped = text.replace("1RECV_F0", "x").replace("1RECV_F1", "1RECV_F0").replace("x", "1RECV_F1")
    assert "receive in the order of sends" in refused(swapped)


def test_two_chunks_that_wait_for_each_other_hang():
    words = refused("0F0,2F0,2B0,0B0\n3F0,1F0,1B0,3B0\n")
    assert "hangs: rank 0 at 2F0 waits for 1F0, rank 1 at 3F0 waits for 2F0" in words


def test_memory_above_the_limit_is_refused_with_rank_and_figures():
    plan = one_forward_one_backward(shape(4, 8))
    check(plan, memory_limit=4.0)
    with pytest.raises(ConfigError, match="rank 0 holds activations of 4 at most, the limit is 3"):
        check(plan, memory_limit=3.0)


def test_memory_counts_stages_microbatches_and_recomputation():
    by_hand = ActivationMemory(by_stage=(10.0, 20.0), sizes=(1.0, 3.0))
    plan = one_forward_one_backward(shape(2, 2))
    assert peak_memory(plan, by_hand) == (40.0, 60.0)
    repeated = parse_plan("0F0,0F1,0R0,0B0,0R1,0B1\n1F0,1B0,1F1,1B1\n")
    check(repeated)
    assert peak_memory(repeated, by_hand) == (30.0, 60.0)
    kept = ActivationMemory(by_stage=(1.0, 1.0), kept_for_weights_ratio=0.4)
    assert peak_memory(zero_bubble_h1(shape(2, 4)), kept) == pytest.approx((2.0, 1.4))


def test_the_order_of_sums_is_a_property_and_no_fault():
    ordered = parse_plan("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert numerics_note(ordered) is None
    turned = parse_plan("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n")
    check(turned)
    assert "0B1 before 0B0" in str(numerics_note(turned))
    weights = parse_plan("0F0,0F1,0B0,0B1\n1F0,1F1,1I0,1I1,1W1,1W0\n")
    assert "1W1 before 1W0" in str(numerics_note(weights))


def test_forwards_of_several_chunks_may_have_another_order():
    deep = depth_first(shape(2, 4, 2))
    wide = depth_first(shape(2, 4, 2), group_size=4)
    assert numerics_note(wide) is None
    assert forward_order(deep, 0) != forward_order(wide, 0)


@pytest.mark.parametrize("seed", range(20))
def test_shuffled_plans_complete_or_are_refused_and_never_pass_half_done(seed):
    draw = random.Random(seed)
    plan = zero_bubble_h1(shape(3, 3))
    rows = [list(listed) for listed in plan.actions]
    for _ in range(2):
        row = draw.choice(rows)
        first = draw.randrange(len(row) - 1)
        row[first], row[first + 1] = row[first + 1], row[first]
    shuffled = Plan(name="shuffled", shape=plan.shape, actions=tuple(map(tuple, rows)))
    try:
        order = order_of_completion(shuffled)
    except ConfigError as error:
        assert "hangs" in str(error)
    else:
        assert sorted(order) == sorted(a for listed in plan.actions for a in listed)


def test_a_message_proves_what_its_sender_had_before():
    plan = one_forward_one_backward(PipelineShape(num_ranks=3, num_microbatches=6))
    forward, backward = ActionKind.FORWARD, ActionKind.BACKWARD
    assert proved_by(plan, 0)[Message(backward, 0, 0)] == [
        Message(forward, 1, 0),
        Message(forward, 1, 1),
    ]
    assert proved_by(plan, 2)[Message(forward, 2, 2)] == [Message(backward, 1, 0)]


def test_few_messages_of_a_link_are_under_way_at_a_time():
    """Two outputs go ahead of the first gradient in 1F1B, all of a chunk's breadth-first."""
    outputs = Link(sender=0, receiver=1, forward=True)
    plan = one_forward_one_backward(shape(2, 8))
    assert most_under_way(plan, outputs) == 2
    assert most_under_way(plan.with_transfers(ahead=1), outputs) == 2
    assert most_under_way(depth_first(shape(2, 4, 2)), outputs) == 3
    assert most_under_way(breadth_first(shape(2, 4, 2)), outputs) == 4


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_all_outputs_and_nothing_too_early_is_proved(num_chunks):
    shape = PipelineShape(num_ranks=4, num_microbatches=8, num_chunks=num_chunks)
    plan = depth_first(shape)
    for rank in range(4):
        proofs = proved_by(plan, rank)
        outputs = {a for a in plan.work_of(rank) if a.kind == "F" and message_made(shape, a)}
        assert {message_made(shape, a) for a in outputs} <= {
            m for ms in proofs.values() for m in ms
        }
        for proof, had in proofs.items():
            work = plan.work_of(link_of(shape, proof).sender)
            made = next(i for i, a in enumerate(work) if message_made(shape, a) == proof)
            assert set(had) <= {message_needed(shape, a) for a in work[: made + 1]}
