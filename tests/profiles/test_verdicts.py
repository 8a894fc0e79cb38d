"""Verdicts on folders of profiles: planted faults, healthy jobs, and jobs that look like faults."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aggregate import build_timeline
from benchmarks.profile_jobs import ddp, megatron, pipeline
from detect import Report, detect
from detect.observe.extract import observe
from detect.report import Cause, Owner
from megascan.reader import read_trace

if TYPE_CHECKING:
    from benchmarks.profile_jobs import Job

KINDS = ("ddp", "fsdp", "tp", "pp")


@pytest.fixture
def verdict(job: Callable[..., Job], tmp_path: Path) -> Callable[..., Report]:
    """Return the report on a job's profiles: `verdict("ddp", gpu={2: 1.2})`."""

    def judge(kind: str, **changes: Any) -> Report:
        folder = job(kind, **changes).write(tmp_path / "profiles")
        return detect(build_timeline(read_trace(folder)))

    return judge


def named(report: Report) -> list[tuple[tuple[int, ...], Cause, Owner]]:
    return [(one.ranks, one.cause, one.owner) for one in report.findings]


def accused(report: Report) -> list[tuple[tuple[int, ...], Cause, Owner]]:
    return [one for one in named(report) if one[2] is Owner.NODE]


def with_slow_kernels(
    *kernels: str,
    rank: int,
    factor: float,
    iteration: int | None = None,
    of_all: Callable[..., Any] = ddp,
) -> Callable[..., Any]:
    """Return the program `of_all` ranks, of which one runs some kernels more slowly, always or in
    one iteration.
    """

    def slowness(of: Any, name: str) -> Any:
        is_slow = name in kernels and iteration in (None, of.iteration)
        return type(of).slowness(of, name) * (factor if is_slow else 1.0)

    def program(of: Any, tokens: int) -> Any:
        if of.number == rank:
            of.slowness = partial(slowness, of)
        return of_all(of, tokens)

    return program


def varying(seed: int = 5) -> Callable[[int, int], int]:
    """Return numbers of tokens that differ by key and iteration, the same at each call."""
    return lambda key, iteration: 8 * random.Random(f"{seed} {key} {iteration}").randint(360, 660)


@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_job_is_healthy(verdict, kind):
    report = verdict(kind)
    assert report.judged
    assert report.findings == ()
    assert not [note for note in report.notes if "granularity" in note]


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_gpu_is_named_with_its_factor(verdict, kind):
    report = verdict(kind, gpu={2: 1.15})
    assert named(report) == [((2,), Cause.COMPUTE, Owner.NODE)]
    assert report.findings[0].slowdown == pytest.approx(1.15, abs=0.02)


@pytest.mark.parametrize(("kind", "num_ranks"), [("ddp", 4), ("ddp", 2), ("tp", 8)])
def test_slow_memory_is_told_from_a_slow_clock(verdict, kind, num_ranks):
    report = verdict(kind, num_ranks=num_ranks, memory={1: 1.5})
    assert named(report) == [((1,), Cause.COMPUTE, Owner.NODE)]
    finding = report.findings[0]
    assert finding.slowdown == pytest.approx(1.5, abs=0.03)
    assert finding.headline.startswith("the memory of rank 1")
    assert any("multiply matrices 1.00x; the optimizer takes 1.5" in one
               for one in finding.evidence)  # fmt: skip
    assert any("ECC,ROW_REMAPPER" in step for step in finding.next_steps)


def test_slow_norms_beside_a_sound_optimizer_are_undecided(verdict):
    """Another program on one rank (a norm that is not fused) shows the same."""
    report = verdict("ddp", program=with_slow_kernels("layer_norm", rank=1, factor=1.5))
    assert named(report) == [((1,), Cause.COMPUTE, Owner.UNDECIDED)]
    assert any("the optimizer takes 1.0" in one for one in report.findings[0].evidence)


@pytest.mark.parametrize(("kind", "num_ranks"), [("ddp", 4), ("ddp", 2), ("fsdp", 4), ("pp", 8)])
@pytest.mark.parametrize("slow", [[2], [1, 2]])
def test_a_device_that_is_throttled_in_few_iterations(verdict, kind, num_ranks, slow):
    spell = {1: dict.fromkeys(slow, 1.3)}
    report = verdict(kind, num_ranks=num_ranks, num_iterations=4, throttled=spell)
    assert named(report) == [((1,), Cause.COMPUTE, Owner.NODE)]
    finding = report.findings[0]
    assert finding.slowdown == pytest.approx(1.3, abs=0.05)
    assert (finding.first_iteration, finding.last_iteration) == (slow[0] + 4, slow[-1] + 4)


def test_throttling_of_all_accuses_nobody(verdict):
    spell = {rank: {1: 1.3} for rank in range(4)}
    assert verdict("ddp", num_iterations=4, throttled=spell).findings == ()


def test_one_slow_iteration_without_an_optimizer_is_undecided(verdict):
    report = verdict("ddp", num_iterations=4, throttled={1: {2: 1.3}}, records_operators=False)
    assert named(report) == [((1,), Cause.COMPUTE, Owner.UNDECIDED)]


@pytest.mark.parametrize(("others", "owner"), [(1.15, Owner.UNDECIDED), (1.03, Owner.NODE)])
def test_one_slow_iteration_needs_an_optimizer_beyond_what_others_vary_by(verdict, others, owner):
    """That of the throttled rank takes 1.09 times as long."""
    program = with_slow_kernels("multi_tensor_apply_kernel", rank=3, factor=others, iteration=0)
    spell = {1: {2: 1.3}}
    report = verdict("ddp", num_iterations=4, throttled=spell, program=program)
    assert named(report) == [((1,), Cause.COMPUTE, owner)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_late_loader_is_named(verdict, kind):
    report = verdict(kind, loader={3: 20.0})
    assert named(report) == [((3,), Cause.LOADER, Owner.NODE)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_host_that_launches_late_is_named(verdict, kind):
    report = verdict(kind, host={1: 30.0})
    assert named(report) == [((1,), Cause.HOST, Owner.NODE)]


def test_hosts_stop_where_their_devices_have_nothing_to_do(job, tmp_path):
    """30 ms ahead of the 20th launch of rank 1; rank 3 waits for its device there."""

    def program(of: Any, tokens: int) -> Any:
        num_before, launch = of.correlation, of.launch

        def stopping() -> float:
            if of.correlation == num_before + 20 and of.number == 1:
                of.now_us += 30_000.0
            if of.correlation == num_before + 20 and of.number == 3:
                of.synchronize()
            return launch()

        of.launch = stopping
        yield from ddp(of, tokens)
        of.launch = launch

    folder = job("ddp", program=program).write(tmp_path / "profiles")
    seen = observe(build_timeline(read_trace(folder)))
    assert seen.stopped_ns is not None
    assert (np.abs(seen.stopped_ns[1] - 30e6) < 5e6).all()
    assert (seen.stopped_ns[[0, 2, 3]] < 1e6).all()


def test_a_slow_link_of_a_tp_group_is_named(verdict):
    report = verdict("tp", link={"TENSOR_MODEL_PARALLEL_GROUP1": 3.0})
    assert named(report) == [((2, 3), Cause.LINK, Owner.NODE)]


def test_two_iterations_show_a_link_that_is_much_slower(verdict):
    slow = "TENSOR_MODEL_PARALLEL_GROUP1"
    report = verdict("tp", num_iterations=2, link={slow: 8.0})
    assert [(one.ranks, one.cause) for one in report.findings] == [((2, 3), Cause.LINK)]
    assert any("pairs of that host's GPUs" in step for step in report.findings[0].next_steps)
    assert verdict("tp", num_iterations=2).findings == ()


def test_a_slow_pass_is_the_device_s_where_its_optimizer_is_slow_as_well(verdict):
    forward = ("layer_norm", "ampere_gemm_qkv", "flash_fwd_kernel", "ampere_gemm_mlp")
    slow = with_slow_kernels(*forward, rank=1, factor=1.4)
    assert named(verdict("ddp", program=slow)) == [((1,), Cause.UNKNOWN, Owner.UNDECIDED)]
    slow = with_slow_kernels(*forward, "multi_tensor_apply_kernel", rank=1, factor=1.4)
    assert named(verdict("ddp", program=slow)) == [((1,), Cause.COMPUTE, Owner.NODE)]


def test_a_pipeline_of_one_rank_a_stage(verdict):
    """Its stages are compared by the kernels that both launch, each rank with itself."""
    lone = {"num_ranks": 2, "groups": megatron(2, "PIPELINE_MODEL_PARALLEL_GROUP")}
    assert verdict("pp", **lone).findings == ()
    slow = verdict("pp", **lone, gpu={0: 1.6})
    assert named(slow) == [((0,), Cause.COMPUTE, Owner.NODE)]
    assert any("same kernels of the other stages" in one for one in slow.findings[0].evidence)
    assert any("only move memory take 1.6" in one for one in slow.findings[0].evidence)
    heavier = with_slow_kernels(*PRODUCTS, rank=0, factor=1.8, of_all=pipeline)
    report = verdict("pp", **lone, program=heavier)  # products that sum over more
    assert named(report) == [((0,), Cause.COMPUTE, Owner.UNDECIDED)]
    slow = verdict("pp", **lone, memory={1: 1.6})
    assert named(slow) == [((1,), Cause.COMPUTE, Owner.UNDECIDED)]
    assert slow.findings[0].headline.startswith("the memory of rank 1")
    spell = verdict("pp", **lone, num_iterations=4, throttled={1: {2: 1.4}})
    assert named(spell) == [((1,), Cause.COMPUTE, Owner.NODE)]


def test_two_ranks_of_which_one_shares_its_gpu(verdict):
    """The recorded case: DDP on two GPUs, steps of 59 ms become 140 ms."""
    report = verdict("ddp", num_ranks=2, gpu={1: 2.4})
    assert named(report) == [((1,), Cause.COMPUTE, Owner.NODE)]
    finding = report.findings[0]
    assert finding.step_time_cost_ratio > 2.0
    assert any("optimizer" in sentence for sentence in finding.evidence)
    assert any("kernels of equal name and launch" in sentence for sentence in finding.evidence)


def test_a_pair_without_recorded_operators_stays_undecided(verdict):
    report = verdict("ddp", num_ranks=2, gpu={1: 1.3}, records_operators=False)
    assert named(report) == [((1,), Cause.COMPUTE, Owner.UNDECIDED)]
    assert any("all count as forward" in note for note in report.notes)


PRODUCTS = tuple(f"ampere_gemm_{part}" for part in ("qkv", "mlp", "dgrad", "wgrad"))


@pytest.mark.parametrize(
    ("num_ranks", "factor", "is_named"), [(4, 1.1, 1), (2, 1.1, 1), (2, 1.07, 0)]
)
def test_slow_products_beside_quick_moves_of_memory_are_a_low_clock(
    verdict, num_ranks, factor, is_named
):
    """The optimizer does not show it; two sound devices may differ by 8 %."""
    program = with_slow_kernels(
        *PRODUCTS, "flash_fwd_kernel", "flash_bwd_kernel", rank=1, factor=factor
    )
    report = verdict("ddp", num_ranks=num_ranks, program=program)
    owner = Owner.NODE if is_named else Owner.UNDECIDED
    assert named(report) == [((1,), Cause.COMPUTE, owner)]
    said = " ".join(report.findings[0].evidence)
    assert ("only move memory hardly or not" in said) == is_named


@pytest.mark.parametrize(
    ("num_ranks", "factor", "owner"),
    [(8, 30.0, Owner.JOB), (2, 30.0, Owner.UNDECIDED), (8, 1.0, None)],
    ids=["heavy", "of one rank a stage", "even"],
)
def test_a_heavy_last_stage_is_the_jobs(verdict, num_ranks, factor, owner):
    """Its head takes most of an iteration, and no kernel of the layers takes longer."""
    program = pipeline
    for rank in range(num_ranks // 2, num_ranks):
        program = with_slow_kernels("ampere_gemm_head", rank=rank, factor=factor, of_all=program)
    lone = {"groups": megatron(2, "PIPELINE_MODEL_PARALLEL_GROUP")} if num_ranks == 2 else {}
    report = verdict("pp", num_ranks=num_ranks, program=program, **lone)
    last = tuple(range(num_ranks // 2, num_ranks))
    heavy = [] if owner is None else [(last, Cause.STAGE_IMBALANCE, owner)]
    assert named(report) == heavy
    if heavy:
        assert any("does not tell forward" in one for one in report.findings[0].evidence)


@pytest.mark.parametrize(("slow_ranks", "num_accused"), [((2,), 1), ((2, 6), 0)])
def test_products_that_are_slow_on_both_stages_of_a_replica_may_have_longer_documents(
    verdict, slow_ranks, num_accused
):
    """Two devices do not become slow alike, two stages have the same documents."""
    program = pipeline
    for rank in slow_ranks:
        program = with_slow_kernels(
            *PRODUCTS, "flash_fwd_kernel", "flash_bwd_kernel", rank=rank, factor=1.3, of_all=program
        )
    report = verdict("pp", program=program)
    assert len(accused(report)) == num_accused
    assert {rank for ranks, _, _ in named(report) for rank in ranks} == set(slow_ranks)


def test_kernels_of_both_kinds_that_are_slow_alike_may_have_more_data(verdict):
    """Whoever wrote the profile may not tell sizes; the optimizer is as quick as ever."""
    everything = (*PRODUCTS, "flash_fwd_kernel", "flash_bwd_kernel", "layer_norm")
    report = verdict("ddp", program=with_slow_kernels(*everything, rank=1, factor=1.3))
    assert named(report) == [((1,), Cause.COMPUTE, Owner.UNDECIDED)]


@pytest.mark.parametrize("records_operators", [True, False])
def test_iterations_that_nobody_marked_are_found(verdict, records_operators):
    report = verdict("ddp", gpu={1: 1.3}, marks_steps=False, records_operators=records_operators)
    assert [(one.ranks, one.cause) for one in report.findings] == [((1,), Cause.COMPUTE)]
    by = "the steps of the optimizer" if records_operators else "kernels that repeat"
    assert any(f"8 iterations were found by {by}" in note for note in report.notes)


def test_longer_data_of_one_rank_are_no_slow_gpu(verdict):
    report = verdict("ddp", tokens=lambda rank, iteration: 5120 if rank == 2 else 4096)
    assert not accused(report)
    assert any("rank 2 spends up to" in note and "not compared" in note for note in report.notes)


def test_longer_data_of_a_replica_are_no_slow_gpus(verdict):
    report = verdict("tp", tokens=lambda rank, iteration: 5120 if rank // 2 == 2 else 4096)
    assert not accused(report)


def test_shapes_that_change_with_every_iteration_are_compared(verdict):
    tokens = varying()
    assert verdict("ddp", tokens=lambda rank, iteration: tokens(0, iteration)).findings == ()


def test_a_slow_gpu_among_changing_shapes(verdict):
    tokens = varying()
    report = verdict("ddp", gpu={1: 1.2}, tokens=lambda rank, iteration: tokens(0, iteration))
    assert named(report) == [((1,), Cause.COMPUTE, Owner.NODE)]
    assert report.findings[0].slowdown == pytest.approx(1.2, abs=0.03)


def test_replicas_of_other_data_are_compared_within_their_tp_groups(verdict):
    tokens = varying()
    report = verdict(
        "tp", gpu={3: 1.3}, tokens=lambda rank, iteration: tokens(rank // 2, iteration)
    )
    assert named(report) == [((3,), Cause.COMPUTE, Owner.NODE)]
    assert report.findings[0].slowdown == pytest.approx(1.3, abs=0.05)


def test_ranks_of_which_each_has_other_data_are_not_compared(verdict):
    report = verdict("ddp", tokens=varying())
    assert not report.judged
    assert not accused(report)
    assert any("their speed is not compared" in note for note in report.notes)


def test_parts_of_unequal_work_in_a_pipeline_are_no_slow_gpus(verdict):
    assert verdict("pp", num_layers=12, seed=9).findings == ()


def test_a_job_that_its_hosts_can_hardly_feed(verdict):
    (finding,) = verdict("ddp", kernel_us=20.0, transfer_us=20.0).findings
    assert (finding.ranks, finding.cause, finding.owner) == ((), Cause.LOADER, Owner.UNDECIDED)


@pytest.mark.parametrize("seed", range(2, 8))
def test_healthy_jobs_on_unequal_chips(verdict, seed):
    report = verdict("ddp", seed=seed, num_ranks=8, chips=0.015)
    assert not accused(report)


def test_the_command_says_it(job, tmp_path, megascan):
    folder = job("ddp", num_ranks=2, gpu={1: 2.4}, num_iterations=6).write(tmp_path / "profiles")
    done = megascan("detect", folder, "--fail-on-finding")
    assert done.returncode == 3, done.stderr
    assert "rank 1" in done.stdout
    assert "nothing could be compared" not in done.stdout
