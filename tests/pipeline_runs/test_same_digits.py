"""Losses, gradient norms and parameters of planned steps, digit by digit Megatron-Core's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from training.pipeline.generators import zero_bubble_h1
from training.pipeline.plan import Action, ActionKind, PipelineShape, Plan, format_plan
from training.pipeline.simulator import check

if TYPE_CHECKING:
    from conftest import Compare, CompareIn, Found

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1000)]

PIPELINE = ["--pipeline-model-parallel-size", "2"]
CHUNKS = ["--num-virtual-stages-per-pipeline-rank", "2"]
DROPOUT = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
NO_DROPOUT = ["--hidden-dropout", "0", "--attention-dropout", "0"]
SHARDED = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
GUIDED = ["--use-dpp", "--dpp-choice", "guided"]


def by(name: object) -> list[str]:
    """The flag that names a schedule."""
    return ["--pipeline-schedule", str(name)]


def last_losses(found: Found, name: str) -> list[float]:
    """Losses as the last rank has them."""
    losses = found[name][-1]["losses"]
    return [float.fromhex(text) for text in losses]  # type: ignore[attr-defined]


def repeating(plan: Plan) -> Plan:
    """The plan with each forward repeated right before its backward."""
    rows = []
    for row in plan.actions:
        longer: list[Action] = []
        for action in row:
            if action.kind is ActionKind.INPUT_GRADIENT:
                longer.append(Action(ActionKind.RECOMPUTE, action.stage, action.microbatch))
            longer.append(action)
        rows.append(tuple(longer))
    return Plan(name="repeating", shape=plan.shape, actions=tuple(rows))


KINDS = {
    "fp32": [],
    "bf16": ["--bf16"],
    "fp16": ["--fp16", "--initial-loss-scale", "1024"],
    "recompute": [
        *("--recompute-granularity", "full", "--recompute-method", "uniform"),
        *("--recompute-num-layers", "1"),
    ],
    "experts": ["--num-experts", "4", "--disable-bias-linear", "--moe-aux-loss-coeff", "0.01"],
}


def runs_of_one_chunk(folder: Path) -> dict[str, list[str]]:
    """Every kind of model by every kind of plan, with dropout."""
    shape = PipelineShape(num_ranks=2, num_microbatches=4)
    named = zero_bubble_h1(shape).with_transfers(ahead=1)
    again = repeating(zero_bubble_h1(shape))
    for name, plan in (("named", named), ("again", again)):
        check(plan)
        (folder / f"{name}.csv").write_text(format_plan(plan))
    mixed = "0F0,0F1,0B0,0I1,0W1,0F2,0F3,0B2,0I3,0W3\n1F0,1B0,1F1,1I1,1W1,1F2,1B2,1F3,1B3\n"
    (folder / "mixed.csv").write_text(mixed)
    runs: dict[str, list[str]] = dict(KINDS)
    runs |= {f"{name} zb-h1": [*own, *by("zb-h1")] for name, own in KINDS.items()}
    for name in ("named", "again", "mixed"):
        runs[f"fp32 {name}"] = by(folder / f"{name}.csv")
    runs["fp32 named copied"] = runs["fp32 named"]
    runs["fp32 1f1b"] = by("1f1b")
    runs["fp32 1f1b ahead"] = [*by("1f1b"), "--recompute-ahead"]
    runs["bf16 zb-h1 ahead"] = ["--bf16", *by("zb-h1"), "--recompute-ahead"]
    flags = [*DROPOUT, "--global-batch-size", "4", "--train-iters", "2"]
    return {name: [*flags, *own] for name, own in runs.items()}


def runs_of_several_chunks() -> dict[str, list[str]]:
    """Orders of two chunks, static and chosen at run time."""
    group = ["--microbatch-group-size-per-virtual-pipeline-stage", "4"]
    runs = {
        "megatron": [],
        "megatron in groups": group,
        "dfc": by("dfc"),
        "dfc in groups": [*by("dfc"), *group],
        "bfc": by("bfc"),
        "auto": by("auto"),
        "auto copied": by("auto"),
        "bfc copied, late": by("bfc"),
        "dfc copied separate": by("dfc"),
        "guided": GUIDED,
        "guided late": GUIDED,
        "guided copied, late": GUIDED,
        "guided with room, late": [*GUIDED, "--dpp-memory-limit", "6"],
        "guided bfc, late": [*GUIDED, *by("bfc")],
        "guided ahead, late": [*GUIDED, "--recompute-ahead"],
    }
    flags = [*CHUNKS, *NO_DROPOUT, "--global-batch-size", "8", "--train-iters", "2"]
    return {name: [*flags, *own] for name, own in runs.items()}


def runs_over_a_restart(folder: Path) -> dict[str, list[str]]:
    """A run whole, and in two parts whose second may have its layers elsewhere."""
    saved = ["--load", str(folder / "kept")]
    layout = ["--pipeline-model-parallel-layout", "Ettt|tL"]
    runs = {
        "whole": [],
        "first": ["--exit-interval", "2", "--save", str(folder / "kept")],
        "even": saved,
        "moved": [*saved, *layout],
        "moved zb-h1": [*saved, *layout, *by("zb-h1")],
    }
    flags = [*NO_DROPOUT, "--global-batch-size", "4"]
    return {name: [*flags, *own] for name, own in runs.items()}


@pytest.fixture(scope="module")
def of_two_stages(
    compare_in: CompareIn, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Found]:
    """All runs on two ranks, in one set of processes, by group."""
    folder = tmp_path_factory.mktemp("two-stages")
    groups = {
        "one chunk": runs_of_one_chunk(folder),
        "several chunks": runs_of_several_chunks(),
        "restart": runs_over_a_restart(folder),
    }
    runs = {
        f"{group}: {name}": flags for group, own in groups.items() for name, flags in own.items()
    }
    found = compare_in(folder, 2, PIPELINE, runs)
    return {
        group: {name: found[f"{group}: {name}"] for name in own} for group, own in groups.items()
    }


def test_any_plan_of_one_chunk_computes_what_megatron_core_computes(
    of_two_stages: dict[str, Found],
) -> None:
    """With dropout: a file's plan names its messages, repeats forwards, or mixes whole and split
    backward passes; half precision, recomputation and experts change nothing in that."""
    found = of_two_stages["one chunk"]
    for name, result in found.items():
        assert result == found[name.partition(" ")[0]], name
    different = {found[kind][0]["parameters"] for kind in KINDS if kind != "recompute"}
    assert len(different) == len(KINDS) - 1
    assert found["recompute"] == found["fp32"]


def test_plans_of_several_chunks_do_also_when_chosen_at_run_time(
    of_two_stages: dict[str, Found],
) -> None:
    """Messages that are late at random change the order of work and no digit, and neither does how
    they are sent."""
    found = of_two_stages["several chunks"]
    for name, result in found.items():
        assert result == found["megatron"], name


def test_layers_move_between_stages_at_a_restart(of_two_stages: dict[str, Found]) -> None:
    """From the checkpoint of an even split; the norm is summed in another order.

    A rank that has saved goes on without a process of Megatron-Core's beside it.
    """
    found = of_two_stages["restart"]
    assert {rank["children"] for rank in found["first"]} == {0}
    expected = last_losses(found, "whole")
    assert last_losses(found, "first") == expected[:2]
    assert last_losses(found, "even") == expected[2:]
    assert last_losses(found, "moved") == pytest.approx(expected[2:], rel=1e-6)
    assert found["moved zb-h1"] == found["moved"]
    assert found["moved"][0]["parameters"] != found["even"][0]["parameters"]


def test_tensor_parallel_ranks_run_in_step(compare: Compare) -> None:
    """With sequence parallelism, where a weight gradient gathers its input anew."""
    flags = [*PIPELINE, *NO_DROPOUT, "--global-batch-size", "4", "--sequence-parallel"]
    flags += ["--tensor-model-parallel-size", "2"]
    runs = {"megatron": [], "zb-h1": by("zb-h1"), "guided late": [*GUIDED, *by("zb-h1")]}
    found = compare(4, flags, runs)
    for name, result in found.items():
        assert result == found["megatron"], name


def test_replicas_reduce_as_before_and_may_take_unequal_shares(compare: Compare) -> None:
    """Unequal shares add the same microbatches up in another order: equal to a millionth."""
    flags = [*PIPELINE, *NO_DROPOUT, "--global-batch-size", "8"]
    runs = {
        "megatron": SHARDED,
        "zb-h1": [*SHARDED, *by("zb-h1")],
        "equal shares": [*SHARDED, "--dpp-microbatches", "4,4"],
        "chunks": [*SHARDED, *CHUNKS],
        "chunks auto": [*SHARDED, *CHUNKS, *by("auto")],
        "chunks guided, late": [*SHARDED, *CHUNKS, *GUIDED],
        "5 + 3": [*SHARDED, "--dpp-microbatches", "5,3"],
        "2 + 6 zb-h1": ["--dpp-microbatches", "2,6", *by("zb-h1")],
    }
    found = compare(4, flags, runs)
    assert found["zb-h1"] == found["megatron"]
    assert found["equal shares"] == found["megatron"]
    assert found["chunks auto"] == found["chunks"]
    assert found["chunks guided, late"] == found["chunks"]
    expected = last_losses(found, "megatron")
    for name in ("5 + 3", "2 + 6 zb-h1"):
        assert found[name] != found["megatron"], name
        assert last_losses(found, name) == pytest.approx(expected, rel=1e-6), name


def test_microbatches_leave_a_slow_replica_while_the_job_runs(compare: Compare) -> None:
    """The parameters show that shares have changed, the losses that nothing else has."""
    flags = [*NO_DROPOUT, "--num-layers", "2", "--global-batch-size", "12", "--train-iters", "12"]
    slow = ["--inject-fault", "rank=1,kind=compute,factor=3"]
    found = compare(2, flags, {"even": [], "auto": ["--dpp-microbatches", "auto", *slow]})
    assert last_losses(found, "auto")[:10] == last_losses(found, "even")[:10]
    assert last_losses(found, "auto") == pytest.approx(last_losses(found, "even"), rel=1e-6)
    assert found["auto"][0]["parameters"] != found["even"][0]["parameters"]
