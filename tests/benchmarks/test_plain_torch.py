"""The benchmark of plain PyTorch: its plans, what it takes for right, and a small run of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.jobs import run_ranks
from benchmarks.layout_cases import Case
from benchmarks.layouts import Result
from benchmarks.plain_torch import (
    FAULTS,
    LAYOUTS,
    NUM_RANKS,
    SIZES,
    Judged,
    Outcome,
    cases_of,
    judge_case,
    plan_of,
    read_costs,
    read_losses,
    render,
)
from benchmarks.plain_torch_models import COMPILED, FSDP, PIPELINE
from benchmarks.plain_torch_ranks import NUM_LOSSES, Plan
from tests import ranks


def result_of(case, accused=(), causes=()):
    return Result(
        case=case, verdict="", accused=accused, causes=causes, slowdowns=(1.5,) * len(accused),
        alignment_p99_us=1.0, iteration_ms=2.0,
    )  # fmt: skip


def outcome(losses, judged=()):
    return Outcome(layout="DDP", losses=losses, judged=tuple(judged), costs=())


def test_plans_survive_the_way_to_the_ranks(tmp_path):
    plan = plan_of("DDP", "gpu", "", tmp_path)
    plan.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == plan
    assert plan.compares_losses
    assert plan.modes
    assert [stage.slow_rank is None for stage in plan.stages] == [True, False]


@pytest.mark.parametrize(
    ("only", "compares_losses", "num_stages", "costs"),
    [
        ("FSDP2", True, 2, True),
        ("losses", True, 0, False),
        ("healthy", False, 1, False),
        ("FSDP2 cost", False, 0, True),
        ("DDP", False, 0, False),
    ],
)
def test_only_what_is_asked_for_is_planned(only, compares_losses, num_stages, costs, tmp_path):
    plan = plan_of(FSDP, "cpu", only, tmp_path)
    assert plan.compares_losses is compares_losses
    assert len(plan.stages) == num_stages
    assert bool(plan.modes) is costs


def test_every_layout_has_another_slow_rank_and_folders_of_its_own():
    cases = [case for layout in LAYOUTS for case in cases_of(layout)]
    assert {case.rank for case in cases if case.fault.cause} == {*range(NUM_RANKS)}
    assert len({case.file_name for case in cases}) == len(cases)
    assert COMPILED in LAYOUTS


def test_pipelines_can_be_cut_in_two():
    assert all(sizes.num_layers % 2 == 0 for sizes in SIZES.values())
    assert all(sizes.hidden % sizes.num_heads == 0 for sizes in SIZES.values())


@pytest.mark.parametrize(
    ("second", "traced", "repeats", "unchanged"),
    [
        ("0x1p0", "0x1p0", True, True),
        ("0x1p0", "0x2p0", True, False),
        ("0x2p0", "0x2p0", False, True),
        ("0x2p0", "0x3p0", False, False),
    ],
)
def test_a_bit_on_one_rank_decides(second, traced, repeats, unchanged):
    same = (("0x1p0",),) * 3
    measured = outcome((same, (("0x1p0",), (second,), (traced,))))
    assert (measured.repeats, measured.unchanged) == (repeats, unchanged)
    assert measured.right is (repeats and unchanged)
    assert ("NO" in measured.loss_rows()[0]) is not measured.right


def test_a_right_verdict_rests_on_matched_communications():
    healthy, slow = cases_of("DDP")
    found = result_of(slow, accused=((slow.rank,),), causes=("compute",))
    assert Judged(result=found, num_unmatched=0).right
    assert not Judged(result=found, num_unmatched=1).right
    assert not Judged(result=result_of(slow), num_unmatched=0).right
    accused = Judged(result=result_of(healthy, ((1,),), ("compute",)), num_unmatched=0)
    assert not outcome(None, [accused]).right
    assert outcome(None, [Judged(result=result_of(healthy), num_unmatched=0)]).right


def test_the_page_says_what_failed():
    judged = [Judged(result=result_of(case), num_unmatched=3) for case in cases_of("DDP")]
    page = render([outcome(None, judged)], [PIPELINE], "cpu", "python -m x")
    assert "Training failed: PP2 DP2." in page
    assert "0 of 2 layouts" in page
    assert page.count("| 3 |\n") == 2


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_a_pipeline_in_short(tmp_path):
    case = Case(layout=PIPELINE, fault=FAULTS[0], rank=0)
    plan = plan_of(PIPELINE, "cpu", "", tmp_path)
    sizes = replace(plan.sizes, hidden=32, sequence=16)
    modes = ("off", "full", "off", "base", "off")
    plan = replace(plan, sizes=sizes, stages=plan.stages[:1], num_iterations=8, modes=modes)
    plan.write(tmp_path / "plan.json")
    with ranks.forked():
        run_ranks(NUM_RANKS, ["benchmarks.plain_torch_ranks", str(tmp_path / "plan.json")])
    losses = read_losses(tmp_path)
    assert [len(runs) for runs in losses] == [3] * NUM_RANKS
    assert outcome(losses).right
    first, last = (len(losses[rank][0]) for rank in (0, NUM_RANKS - 1))
    assert last - first == NUM_LOSSES + 2  # losses, weight and bias of the head
    assert all(cost.untraced_ms > 0 for cost in read_costs(tmp_path, modes))
    assert judge_case(case, tmp_path, None).num_unmatched == 0
    file = tmp_path / case.file_name / "benchmark-data-0-pipeline-0-tensor-0.json"
    spans = json.loads(file.read_text())
    names = {event["name"] for event in spans if event["ph"] == "X"}
    assert {"send_forward", "all_reduce", "layer", "layer-backward", "optimizer"} <= names
