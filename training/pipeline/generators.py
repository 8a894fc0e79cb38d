"""Plans that follow a rule: Megatron-Core's own orders, ZB-H1, and forwards repeated ahead.

    1F1B            as many forwards as stages follow, then one forward, one backward in turn
    depth-first     Megatron-Core's interleaved order: groups of P microbatches through all chunks
    breadth-first   interleaved with one group: all microbatches through a chunk before the next
    ZB-H1           1F1B with weight gradients split off and put where the rank would wait; later
                    ranks put them off longer, so that no rank holds more activations than rank 0
                    of 1F1B

Sources: megatron.core.pipeline_parallel.schedules; Narayanan et al. 2021 (interleaving);
Lamy-Poirier 2023 (breadth-first); Qi et al. 2023 (zero bubble, handcrafted schedule H1).

`recompute_ahead` repeats forwards as actions of the plan, while a rank waits for a gradient. With
Megatron-Core's recomputation the forward is repeated inside the backward pass, when the gradient
has come. As an action of its own the repeated forward needs no gradient and fills the wait:

    1F1B, stage 1 of 4   F0 F1 F2 · · · B0 F3 · B1 …     a backward repeats its forward: 3 times F
    ahead                F0 F1 F2 R0 · B0 F3 R1 B1 …     the same work, the wait is shorter

The first forward then keeps only its input and its random states, and only one microbatch at a time
holds activations. The last stage runs each forward right before its backward and repeats none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, pairwise

from megascan.errors import ConfigError
from training.pipeline.plan import (
    GIVES_INPUT_GRADIENT,
    Action,
    ActionKind,
    PipelineShape,
    Placement,
    Plan,
)

_F, _B, _I, _W = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.INPUT_GRADIENT,
    ActionKind.WEIGHT_GRADIENT,
)


def one_forward_one_backward(shape: PipelineShape) -> Plan:
    """Return 1F1B, the order of Megatron-Core without interleaving."""
    _one_chunk(shape, "1f1b")
    rows = []
    for rank in range(shape.num_ranks):
        forwards = [Action(_F, rank, j) for j in range(shape.num_microbatches)]
        backwards = [Action(_B, rank, j) for j in range(shape.num_microbatches)]
        rows.append(_warmed_up(forwards, backwards, shape.num_ranks - rank - 1))
    return Plan(name="1f1b", shape=shape, actions=tuple(rows))


def depth_first(shape: PipelineShape, *, group_size: int | None = None) -> Plan:
    """Return Megatron-Core's interleaved order.

    `group_size` is Megatron-Core's `microbatch_group_size_per_vp_stage` (default: the number of
    ranks). A number of microbatches that is no multiple of the ranks, which Megatron-Core refuses,
    may make the last group larger; then all ranks begin with more forwards.
    """
    if shape.placement is not Placement.LOOP:
        raise ConfigError("the interleaved order needs stages in a loop, got a V")
    group_size = shape.num_ranks if group_size is None else group_size
    if group_size < 1:
        raise ConfigError(f"microbatch group size is {group_size}, expected 1 or more")
    if shape.num_chunks == 1:
        return one_forward_one_backward(shape).renamed("dfc")
    groups = _groups(shape, group_size)
    order = [(j, c) for group in groups for c in range(shape.num_chunks) for j in group]
    largest = max(map(len, groups))
    rows = []
    for rank in range(shape.num_ranks):
        forwards = [Action(_F, shape.stage_of(rank, c), j) for j, c in order]
        last = shape.num_chunks - 1
        backwards = [Action(_B, shape.stage_of(rank, last - c), j) for j, c in order]
        warm_up = (shape.num_ranks - rank - 1) * 2 + last * largest
        rows.append(_warmed_up(forwards, backwards, warm_up))
    return Plan(name="dfc", shape=shape, actions=tuple(rows))


def breadth_first(shape: PipelineShape) -> Plan:
    """Return the interleaved order with all microbatches in one group."""
    return depth_first(shape, group_size=shape.num_microbatches).renamed("bfc")


def zero_bubble_h1(shape: PipelineShape) -> Plan:
    """Return ZB-H1: the activations of 1F1B, and one third of its bubble.

    Rank r puts its weight gradients off by r microbatches; the last r follow at the end, where 1F1B
    waits.
    """
    _one_chunk(shape, "zb-h1")
    rows = tuple(tuple(_zero_bubble_row(shape, rank)) for rank in range(shape.num_ranks))
    return Plan(name="zb-h1", shape=shape, actions=rows)


GENERATORS: dict[str, Callable[[PipelineShape], Plan]] = {
    "1f1b": one_forward_one_backward,
    "dfc": depth_first,
    "bfc": breadth_first,
    "zb-h1": zero_bubble_h1,
}
"""Plans by the names that `--pipeline-schedule` takes."""


def _one_chunk(shape: PipelineShape, name: str) -> None:
    if shape.num_chunks != 1:
        raise ConfigError(
            f"{name} runs one model chunk on each pipeline rank, got {shape.num_chunks}; "
            "use dfc, bfc or a planned schedule with several chunks"
        )


def _warmed_up(forwards: list[Action], backwards: list[Action], warm_up: int) -> tuple[Action, ...]:
    """Return `warm_up` forwards, then forward and backward in turn, then the other backwards."""
    warm_up = min(warm_up, len(forwards))
    paired = zip(forwards[warm_up:], backwards, strict=False)
    rest = backwards[len(forwards) - warm_up :]
    return (*forwards[:warm_up], *chain.from_iterable(paired), *rest)


def _groups(shape: PipelineShape, group_size: int) -> list[range]:
    """Return the groups of microbatches; each passes all chunks before the next group does.

    A last group of fewer microbatches than ranks would wait for itself and joins the one before.
    """
    count = shape.num_microbatches
    firsts = list(range(0, count, group_size))
    if len(firsts) > 1 and count - firsts[-1] < shape.num_ranks:
        firsts.pop()
    return [range(first, end) for first, end in pairwise([*firsts, count])]


def _zero_bubble_row(shape: PipelineShape, rank: int) -> list[Action]:
    count = shape.num_microbatches
    warm_up = min(shape.num_ranks - rank - 1, count)
    row = [Action(_F, rank, j) for j in range(warm_up)]
    for microbatch in range(count):
        if warm_up + microbatch < count:
            row.append(Action(_F, rank, warm_up + microbatch))
        row.append(Action(_I, rank, microbatch))
        if microbatch >= rank:
            row.append(Action(_W, rank, microbatch - rank))
    row += [Action(_W, rank, j) for j in range(max(0, count - rank), count)]
    return row


def recompute_ahead(plan: Plan) -> Plan:
    """Return the plan with R before each backward, except on the last stage."""
    rows = tuple(tuple(_repeating(plan, listed)) for listed in plan.actions)
    return replace(plan, actions=rows)


def _repeating(plan: Plan, listed: tuple[Action, ...]) -> Iterator[Action]:
    for action in listed:
        if action.kind in GIVES_INPUT_GRADIENT and action.stage < plan.shape.num_stages - 1:
            yield Action(ActionKind.RECOMPUTE, action.stage, action.microbatch)
        yield action
