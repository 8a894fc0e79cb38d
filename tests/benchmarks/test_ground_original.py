"""Jobs in the original MegaScan's format: their truth holds, their files are read, victims wait."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.grounds.original import cases, write
from benchmarks.grounds.original.catalogue import CAUSES, recipes
from benchmarks.grounds.original.costs import generator
from benchmarks.grounds.original.files import write_files
from benchmarks.grounds.original.job import Effect, Job, Kind, Noise, Shape, Tracer, Tracing
from benchmarks.grounds.original.schedule import Run, simulate

ALL_CASES = {case.name: case for case in cases()}
QUIET = Noise(
    module_ratio=0,
    chip_spread_ratio=0,
    drift_ratio=0,
    host_ratio=0,
    regime_ratio=0,
    transfer_ratio=0,
    spike_probability=0,
)


def first_of(family: str, tracer: Tracer | None = None) -> str:
    return next(
        name
        for name, recipe in recipes().items()
        if recipe.family == family
        and tracer in {None, recipe.job.tracing.tracer}
        and recipe.job.shape.num_ranks <= 16
    )


def quiet_job(*effects: Effect, **sizes: int) -> Job:
    return Job(shape=Shape(**sizes), seed=5, num_steps=3, noise=QUIET, effects=effects)


def run_of(job: Job) -> Run:
    return simulate(job, 1e5, records=True)


def durations_us(run: Run, stage: int, name: str) -> np.ndarray:
    """Return each rank's mean span of this name, shape (dp, tp)."""
    begins = [m.time_us for m in run.marks[stage] if m.name == name and m.phase == "B"]
    ends = [m.time_us for m in run.marks[stage] if m.name == name and m.phase == "E"]
    return np.mean(np.stack(ends) - np.stack(begins), axis=(0, -1))


def test_families_are_many_and_none_is_small() -> None:
    families = Counter(case.family for case in ALL_CASES.values())
    assert 250 <= len(ALL_CASES) <= 350
    assert min(families.values()) >= 8
    at_fault = sum(bool(case.at_fault) for case in ALL_CASES.values())
    assert 0.35 < at_fault / len(ALL_CASES) < 0.65
    assert {2, 64, 128} <= {case.num_ranks for case in ALL_CASES.values()}
    tracers = Counter(recipe.job.tracing.tracer for recipe in recipes().values())
    assert min(tracers[tracer] for tracer in Tracer) > 30


def test_truth_names_ranks_of_the_job_and_never_all_of_them_for_a_fault() -> None:
    for case in ALL_CASES.values():
        job = recipes()[case.name].job
        assert len(case.planted) == sum(effect.kind in CAUSES for effect in job.effects)
        for cause in case.planted:
            assert cause.ranks and set(cause.ranks) <= set(range(case.num_ranks)), case.name
            assert cause.first_iteration <= job.num_steps
            if cause.owner == "node":
                assert len(cause.ranks) < case.num_ranks, case.name
        healthy = case.family.startswith(("healthy", "look_alike"))
        assert healthy != bool(case.at_fault), case.name


def test_cases_are_the_same_in_every_process() -> None:
    script = "from benchmarks.grounds.original import cases; print(list(cases()))"
    once, again = (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        for _ in range(2)
    )
    assert once.stdout == again.stdout


def test_same_case_writes_the_same_bytes(tmp_path: Path) -> None:
    case = ALL_CASES[first_of("throttling", Tracer.JULY)]
    assert write(case, tmp_path / "once") == write(case, tmp_path / "again")
    files = sorted(path.name for path in (tmp_path / "once").iterdir())
    assert len(files) == case.num_ranks
    for name in files:
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@pytest.mark.parametrize("tracer", list(Tracer))
def test_files_are_those_of_the_tracer(tracer: Tracer, tmp_path: Path) -> None:
    tracing = Tracing(tracer=tracer, window=2)
    job = Job(shape=Shape(tp=2, pp=2, dp=2), seed=3, num_steps=4, tracing=tracing)
    write_files(job, run_of(job), tmp_path)
    text = (tmp_path / "benchmark-data-1-pipeline-0-tensor-1.json").read_text()
    records = json.loads(text)
    assert text == json.dumps(records, indent=2)
    own = [record for record in records if "g_rk" in record]
    assert {(r["g_rk"], r["dp_rk"], r["pp_rk"], r["tp_rk"], r["dev"]) for r in own} == {
        (3, 1, 0, 1, 3)
    }
    names = Counter(record["name"] for record in own if record["ph"] == "E")
    assert names["iteration"] == 4 * tracing.num_copies
    assert ("forward" in names) == (tracer is not Tracer.HEAD)
    assert ("transformer_layer" in names) == (tracer is not Tracer.JUNE)
    assert ("transformer_layer_1" in names) == (tracer is Tracer.JUNE)
    reduce = next(record for record in own if record["name"] == "_reduce" and "group" in record)
    assert reduce["group"] == [0, 1, 2]
    nesting: list[str] = []
    for record in records:
        if record["ph"] == "B":
            nesting.append(record["name"])
        else:
            assert nesting.pop() == record["name"]
    assert nesting == []


def test_p2p_spans_say_their_peer_size_and_bandwidth(tmp_path: Path) -> None:
    job = quiet_job(pp=2, dp=2)
    write_files(job, run_of(job), tmp_path)
    records = json.loads((tmp_path / "benchmark-data-1-pipeline-0-tensor-0.json").read_text())
    sends = [record for record in records if record["name"] == "exchange-next" and "data" in record]
    assert {(*record["group"], record["data"]) for record in sends} == {(3, 2 * 33_554_432)}
    assert all(record["bandwidth"] > 0 for record in sends)
    nowhere = [
        record for record in records if record["name"] == "exchange-prev" and "data" in record
    ]
    assert {(record["data"], record["group"], record["bandwidth"]) for record in nowhere} == {
        (None, None, None)
    }


@pytest.mark.parametrize(
    ("family", "tracer"),
    [
        ("healthy, spread 2%", Tracer.JUNE),
        ("gpu_clock", Tracer.HEAD),
        ("rail", None),
        ("look_alike: hot expert", None),
    ],
)
def test_aggregate_reads_a_case_as_complete(
    family: str, tracer: Tracer | None, tmp_path: Path
) -> None:
    case = ALL_CASES[first_of(family, tracer)]
    write(case, tmp_path / "trace")
    command = [sys.executable, "-m", "megascan", "aggregate", "-b", str(tmp_path / "trace")]
    command += ["-o", str(tmp_path / "timeline.json"), "--json", str(tmp_path / "summary.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "unmatched: none" in done.stdout
    assert f"{case.num_ranks} of {case.num_ranks} ranks" in done.stdout
    num_steps = recipes()[case.name].job.num_steps
    assert f"{num_steps * case.num_ranks:,} iteration" in done.stdout


def test_tensor_mates_of_a_slow_chip_wait_in_the_reduction() -> None:
    job = quiet_job(Effect(kind=Kind.GPU_CLOCK, factor=1.5, place=2), tp=4, dp=2)
    waits = durations_us(run_of(job), 0, "_reduce")
    assert np.argmin(waits) == 2
    assert np.all(waits[0, [0, 1, 3]] > waits[0, 2] + 80)
    assert np.ptp(waits[1]) < 10


def test_neighbours_of_a_slow_stage_rank_wait_for_its_messages() -> None:
    sizes = {"pp": 4, "dp": 2}
    calm = run_of(quiet_job(**sizes))
    slow = run_of(quiet_job(Effect(kind=Kind.GPU_CLOCK, factor=2.0, place=2), **sizes))
    for stage in (0, 2, 3):  # rank 2 is replica 0 of stage 1
        grown = durations_us(slow, stage, "forward") / durations_us(calm, stage, "forward")
        assert grown[0, 0] == pytest.approx(1, abs=0.02)
        name = "exchange-next" if stage == 0 else "exchange-prev"
        waited = durations_us(slow, stage, name) - durations_us(calm, stage, name)
        assert waited[0, 0] > 500
    grown = durations_us(slow, 1, "forward") / durations_us(calm, 1, "forward")
    assert grown[0, 0] > 1.6 and grown[1, 0] == pytest.approx(1, abs=0.01)
    assert slow.step_us > 1.3 * calm.step_us


def test_the_other_replica_waits_in_the_gradients_reduction() -> None:
    run = run_of(quiet_job(Effect(kind=Kind.GPU_CLOCK, factor=1.5, place=0), pp=2, dp=2))
    spent = durations_us(run, 0, "allreduce")
    assert spent[1, 0] > spent[0, 0] + 2000


def test_a_slow_link_lengthens_transfers_of_its_groups_only() -> None:
    effect = Effect(kind=Kind.NVLINK, factor=3.0, place=5)
    spent = durations_us(run_of(quiet_job(effect, tp=2, pp=2, dp=2)), 1, "_reduce")
    assert spent[0] == pytest.approx(spent[0, 0], rel=0.05)
    assert np.all(spent[0] > 2 * spent[1])


def test_busy_host_slows_its_ranks_only() -> None:
    effect = Effect(kind=Kind.HOST_CPU, factor=20.0, place=1)
    job = quiet_job(effect, pp=2, dp=4, gpus_per_host=4)
    calm, busy = run_of(quiet_job(pp=2, dp=4, gpus_per_host=4)), run_of(job)
    grown = [
        durations_us(busy, s, "attention") / durations_us(calm, s, "attention") for s in (0, 1)
    ]
    assert np.all(grown[0] < 1.01)
    assert np.all(grown[1] > 1.5)


def test_cost_compares_the_same_draws(tmp_path: Path) -> None:
    name = next(n for n, r in recipes().items() if r.family == "two faults" and "pp2-" in n)
    case, job = ALL_CASES[name], recipes()[name].job
    planted = write(case, tmp_path)
    assert [cause.kind for cause in planted] == [cause.kind for cause in case.planted]
    assert all(cause.cost_ratio >= 1 for cause in planted)
    assert max(cause.cost_ratio for cause in planted) > 1.02
    nothing = Effect(kind=Kind.GPU_CLOCK, factor=1.0, place=0)
    calm, same = (
        simulate(Job(shape=job.shape, seed=9, num_steps=2, effects=effects), 1e5).step_us
        for effects in ((), (nothing,))
    )
    assert calm == same


def test_generators_of_different_purposes_differ() -> None:
    assert generator(1, "chips").random() != generator(1, "clocks").random()
