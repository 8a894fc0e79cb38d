"""The ground of plain PyTorch trainers: its files, its physics, its draws."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.grounds.ground import Planted, Variation
from benchmarks.grounds.kinds import EXPERTS
from benchmarks.grounds.plain import cases, slowness, write, write_varied
from benchmarks.grounds.plain.files import write_files
from benchmarks.grounds.plain.job import Trainer, draw_job
from benchmarks.grounds.plain.run import simulate
from benchmarks.grounds.plain.trouble import Hits, Trouble
from megascan.reader import read_trace
from megascan.schema import Granularity
from tests.benchmarks.nesting import assert_nested

QUIET = {
    "num_ranks": 8,
    "gpus_per_host": 4,
    "chip_spread_ratio": 0.0,
    "is_bound_by_host": False,
    "granularity": Granularity.FULL,
    "layer_stride": 1,
    "is_compiled": False,
    "outlier_share": 0.0,
    "length_ratio": 0.0,
    "collects_every": 0,
    "compress": False,
    "recomputes": False,
}
CASES = {case.name: case for case in cases()}
FAMILIES = sorted({case.family for case in CASES.values()})


def quiet_job(trainer, seed=11, **wanted):
    return draw_job(seed, trainer, {**QUIET, **wanted})


def slow_gpu(rank, factor, **others):
    planted = Planted(
        kind="gpu_clock", cause="compute", owner="node", ranks=(rank,), factor=factor, **others
    )
    return Trouble(planted=planted, hits=(Hits.CLOCK,), ranks=(rank,))


def spans_of(job, directory, troubles=()):
    write_files(job, simulate(job, troubles), troubles, directory)
    return read_trace(directory, allow_missing_ranks=bool(job.tracing.missing)).spans.to_pandas()


def mean_ms(spans, name, rank):
    of_rank = spans[(spans["name"] == name) & (spans["rank"] == rank) & (spans["iteration"] > 2)]
    return of_rank["duration_ns"].mean() / 1e6


@pytest.fixture
def written(once, tmp_path_factory):
    """Writes a case once for all tests; returns its folder and what was planted."""

    def write_once(case):
        def make():
            folder = tmp_path_factory.mktemp(case.name)
            return folder, write(case, folder)

        return once(case.name, make)

    return write_once


def first_of_each_trainer():
    return [
        next(case for case in CASES.values() if case.name.startswith(f"{trainer.value}-gpu_clock-"))
        for trainer in Trainer
    ]


def test_there_are_enough_cases_of_which_nearly_half_have_sound_hardware():
    sound = [case for case in CASES.values() if not case.at_fault]
    assert 220 <= len(CASES) <= 260
    assert len(sound) >= 0.45 * len(CASES)
    assert all(2 <= case.num_ranks <= 64 for case in CASES.values())


def test_who_may_be_named_is_part_of_the_job():
    for case in CASES.values():
        assert case.at_fault <= frozenset(range(case.num_ranks)), case.name
        for planted in case.planted:
            assert planted.owner in ("node", "job")
            assert planted.ranks, case.name


def test_every_draw_has_the_same_catalogue_and_other_seeds():
    other = list(cases(1))
    assert [case.name for case in other] == list(CASES)
    assert not {case.seed for case in other} & {case.seed for case in CASES.values()}


@pytest.mark.parametrize("case", first_of_each_trainer(), ids=lambda case: case.name)
def test_files_are_read_and_nest(case, written):
    folder, _ = written(case)
    trace = read_trace(folder, allow_missing_ranks=True)
    spans = trace.spans.to_pandas()
    assert set(spans["rank"]) <= set(range(case.num_ranks))
    for name in ("iteration", "forward", "backward", "optimizer"):
        assert (spans["name"] == name).any(), name
    assert (spans["duration_ns"] >= 0).all()
    assert_nested(spans)


@pytest.mark.parametrize("family", FAMILIES)
def test_costs_are_those_of_the_cause(family, written):
    for case in [one for one in CASES.values() if one.family == family][:2]:
        for planted in written(case)[1]:
            assert planted.cost_ratio > 0.99, case.name
            assert planted.cost_ratio < 3.0, case.name


def test_most_causes_cost_something(written):
    slow = [case for case in CASES.values() if case.family == "gpu_clock"][::4]
    costs = [written(case)[1][0].cost_ratio for case in slow]
    assert np.median(costs) > 1.01


def test_the_same_case_gives_the_same_bytes_and_another_draw_others(written, tmp_path):
    name = "ddp-gpu_clock-6"
    again = next(case for case in cases(1) if case.name == name)
    first, _ = written(CASES[name])
    write(CASES[name], tmp_path / "same")
    write(again, tmp_path / "other")

    def bytes_of(folder):
        return sorted(path.read_bytes() for path in folder.iterdir())

    assert bytes_of(first) == bytes_of(tmp_path / "same")
    assert bytes_of(first) != bytes_of(tmp_path / "other")


@pytest.mark.parametrize(
    "trainer",
    [Trainer.DDP, Trainer.FSDP, Trainer.HSDP, Trainer.ZERO1, Trainer.PIPELINE, Trainer.PIPELINE_DP],
)
def test_layers_of_a_slow_gpu_take_the_factor(trainer, tmp_path):
    job = quiet_job(trainer, memory_share=0.0, interference_ratio=0.0)
    sound = spans_of(job, tmp_path / "sound")
    slow = spans_of(job, tmp_path / "slow", (slow_gpu(2, 1.5),))
    ratio = mean_ms(slow, "layer-backward", 2) / mean_ms(sound, "layer-backward", 2)
    others = mean_ms(slow, "layer-backward", 3) / mean_ms(sound, "layer-backward", 3)
    assert ratio == pytest.approx(1.5, rel=0.03)
    assert others == pytest.approx(1.0, rel=0.03)


def test_others_wait_for_a_slow_gpu_in_grad_sync_of_ddp(tmp_path):
    job = quiet_job(Trainer.DDP, microbatches=2)
    sound = spans_of(job, tmp_path / "sound")
    slow = spans_of(job, tmp_path / "slow", (slow_gpu(2, 1.5),))
    late_ms = mean_ms(slow, "backward", 2) - mean_ms(slow, "backward", 3)
    assert mean_ms(slow, "grad-sync", 3) - mean_ms(sound, "grad-sync", 3) > late_ms
    assert mean_ms(slow, "grad-sync", 2) <= mean_ms(sound, "grad-sync", 2)


def test_others_wait_for_a_slow_gpu_between_the_layers_of_fsdp(tmp_path):
    job = quiet_job(Trainer.FSDP, keeps_gathered=False, interference_ratio=0.0)
    sound = spans_of(job, tmp_path / "sound")
    slow = spans_of(job, tmp_path / "slow", (slow_gpu(2, 1.5),))
    assert mean_ms(slow, "backward", 3) > 1.2 * mean_ms(sound, "backward", 3)
    assert mean_ms(slow, "layer", 3) == pytest.approx(mean_ms(sound, "layer", 3), rel=0.02)
    assert mean_ms(slow, "all_gather", 3) > 1.2 * mean_ms(slow, "all_gather", 2)
    assert mean_ms(slow, "grad-sync", 3) < 0.1


def test_others_wait_for_a_slow_gpu_within_the_layers_of_zero_3(tmp_path):
    job = quiet_job(Trainer.ZERO3, keeps_gathered=False, interference_ratio=0.0)
    sound = spans_of(job, tmp_path / "sound")
    slow = spans_of(job, tmp_path / "slow", (slow_gpu(2, 1.5),))
    assert mean_ms(slow, "layer", 3) > 1.2 * mean_ms(sound, "layer", 3)
    assert not (slow["name"] == "grad-sync").any()


def test_a_pair_waits_within_the_layer_of_a_tensor_parallel_model(tmp_path):
    job = quiet_job(Trainer.TENSOR)
    slow = spans_of(job, tmp_path, (slow_gpu(2, 1.5),))
    assert mean_ms(slow, "layer", 3) == pytest.approx(mean_ms(slow, "layer", 2), rel=0.02)
    within = slow[slow["group"].astype(str) == "tp@2"]
    assert mean_ms(within, "all_reduce", 3) > 3 * mean_ms(within, "all_reduce", 2)


@pytest.mark.parametrize(
    "trainer", [Trainer.DDP, Trainer.FSDP, Trainer.ZERO2, Trainer.TENSOR, Trainer.MOE_DDP]
)
def test_collectives_end_for_all_at_once(trainer, tmp_path):
    job = quiet_job(trainer, ends_are_bounds=False)
    machine = replace(job.machine, offsets_s=(0.0, 0.0), drifts_ppm=(0.0, 0.0), tie_width_s=0.0)
    spans = spans_of(replace(job, machine=machine), tmp_path)
    spans = spans[spans["kind"] == "collective"].copy()
    spans["end_ns"] = spans["start_ns"] + spans["duration_ns"]
    ends = spans.groupby(["iteration", "group", "op", "sequence"], observed=True)["end_ns"]
    assert (ends.count() > 1).all()
    assert (ends.max() - ends.min()).max() < 20_000


def test_both_ends_of_a_message_are_there(tmp_path):
    spans = spans_of(quiet_job(Trainer.PIPELINE_DP), tmp_path)
    messages = spans[spans["kind"] == "p2p"]
    sent = messages[messages["op"] == "send"]
    received = messages[messages["op"] == "recv"]
    key = ["iteration", "direction", "sequence"]
    there = set(sent[["rank", "peer", *key]].itertuples(index=False, name=None))
    here = set(received[["peer", "rank", *key]].itertuples(index=False, name=None))
    assert there == here
    assert len(there) == len(sent)


def test_a_slow_host_costs_nothing_when_it_is_far_ahead(tmp_path):
    job = quiet_job(Trainer.DDP, launch_s=1e-6, waits_at_end=False, copies_wait=False)
    planted = Planted(kind="host_cpu", cause="host", owner="node", ranks=(0,), factor=1.5)
    trouble = Trouble(planted=planted, hits=(Hits.LAUNCHES,), ranks=(0,))
    iterations = job.tracing.iterations
    priced = planted.priced(
        iterations,
        simulate(job, (trouble,)).iteration_s(iterations),
        simulate(job).iteration_s(iterations),
    )
    assert priced.cost_ratio == pytest.approx(1.0, abs=0.01)


def test_a_slow_nvlink_slows_the_groups_of_its_gpu_only(tmp_path):
    job = quiet_job(Trainer.TENSOR)
    planted = Planted(kind="nvlink", cause="link", owner="node", ranks=(2, 3), factor=4.0)
    spans = spans_of(job, tmp_path, (Trouble(planted=planted, hits=(Hits.NVLINK,), ranks=(2,)),))
    spans = spans[(spans["name"] == "all_reduce") & (spans["iteration"] > 2)]
    shortest = spans.groupby([spans["group"].astype(str), "iteration", "sequence"])["duration_ns"]
    by_group = shortest.min().groupby(level=0).median()
    assert by_group["tp@2"] > 2 * by_group["tp@0"]
    assert by_group["tp@4"] == pytest.approx(by_group["tp@0"], rel=0.3)


def test_slowness_is_that_of_chips_and_cause():
    case = CASES["ddp-gpu_clock-30"]
    (planted,) = case.planted
    found = slowness(case)
    (rank,) = planted.ranks
    others = np.delete(found, rank, axis=0)
    assert found[rank, -1] > 1.0 + 0.7 * (planted.factor - 1.0)
    assert np.abs(others - 1.0).max() < 0.05


def test_a_variation_has_its_own_chips_and_its_slow_gpu(tmp_path):
    case = first_of_each_trainer()[1]
    alike = write_varied(case, Variation(chip_spread_ratio=0.0), None)
    slow = write_varied(case, Variation(chip_spread_ratio=0.0, slow_rank=1, factor=1.4), tmp_path)
    ratio = (slow / alike).mean(axis=1)
    assert 1.2 < ratio[1] <= 1.4
    assert np.delete(ratio, 1) == pytest.approx(1.0, abs=1e-9)
    assert read_trace(tmp_path, allow_missing_ranks=True).spans.num_rows


def with_costs(job, *factors):
    """Return the job with layers that cost so many times what its first one does."""
    times = np.array(factors)
    return replace(
        job,
        model=replace(
            job.model,
            forward_s=job.model.forward_s[0] * times,
            layer_bytes=job.model.layer_bytes[0] * times,
            has_experts=tuple(job.model.has_experts[:1] * len(factors)),
        ),
    )


def kinds_of(job, directory):
    """Return the kinds of each rank's layers, which are the same in all windows."""
    write_files(job, simulate(job), (), directory)
    windows = read_trace(directory).windows
    assert all(window.kinds == own[0].kinds for own in windows.values() for window in own)
    return [windows[rank][0].kinds for rank in range(job.num_ranks)]


@pytest.mark.parametrize("granularity", Granularity)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_layers_that_cost_alike_are_of_one_kind_on_all_ranks(granularity, is_compiled, tmp_path):
    habits = {"granularity": granularity, "is_compiled": is_compiled}
    job = with_costs(quiet_job(Trainer.DDP, num_ranks=2, **habits), 1.0, 1.0, 1.0)
    first, *others = kinds_of(job, tmp_path)
    (kind,) = first
    assert len(kind) == 8 and set(kind) <= set("0123456789abcdef")
    assert first[kind] == (1, 2, 3)
    assert others == [first]


@pytest.mark.parametrize(
    ("factors", "numbers"),
    [((1.0, 2.0, 1.0, 2.0), [(1, 3), (2, 4)]), ((1.0, 1.0, 1.5), [(1, 2), (3,)])],
)
def test_a_dearer_layer_is_of_another_kind(factors, numbers, tmp_path):
    job = with_costs(quiet_job(Trainer.FSDP, num_ranks=2), *factors)
    first, second = kinds_of(job, tmp_path)
    assert list(first.values()) == numbers
    assert second == first


def test_stages_of_a_pipeline_count_their_equal_layers_anew(tmp_path):
    job = with_costs(quiet_job(Trainer.PIPELINE, num_ranks=4), 1.0, 1.0)
    kinds = kinds_of(job, tmp_path)
    assert list(kinds[0].values()) == [(1, 2)]
    assert kinds == kinds[:1] * 4
    spans = read_trace(tmp_path).spans.to_pandas()
    assert set(spans["layer"][spans["name"] == "layer"]) == {1, 2}


def test_layers_with_experts_have_no_digest(tmp_path):
    job = quiet_job(Trainer.MOE_DDP, num_ranks=4)
    even, odd = (tuple(range(first, job.model.num_layers + 1, 2)) for first in (2, 1))
    for kinds in kinds_of(job, tmp_path):
        assert kinds[EXPERTS] == even
        dense = [each for kind, numbers in kinds.items() if kind != EXPERTS for each in numbers]
        assert tuple(sorted(dense)) == odd
