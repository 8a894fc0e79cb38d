"""The ground of a campus: its files are read, its physics and its truth are what it says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks.grounds import campus
from benchmarks.grounds.campus.catalogue import FAMILIES, job_of
from benchmarks.grounds.campus.engine import simulate
from benchmarks.grounds.campus.faults import Fault
from benchmarks.grounds.campus.files import Recorder
from benchmarks.grounds.campus.hardware import CHIPS, Site, drawn_clocks, even_chips
from benchmarks.grounds.campus.job import (
    DDP,
    FSDP,
    PACKED,
    PADDED,
    Habits,
    Job,
    Loading,
    Tracing,
    groups_of,
)
from benchmarks.grounds.campus.links import suspects
from benchmarks.grounds.campus.model import DENSE, EXPERTS, MAMBA, Model, product_s
from benchmarks.grounds.campus.world import World
from benchmarks.grounds.ground import Variation
from megascan.reader import read_trace
from megascan.topology import Layout
from tests.benchmarks.catalogues import assert_alike_in_each_process
from tests.benchmarks.nesting import assert_nested

CASES = list(campus.cases())
SMALLEST = {
    family.name: min((c for c in CASES if c.family == family.name), key=lambda c: c.num_ranks)
    for family in FAMILIES
}
SITE = Site(
    chip=CHIPS["NVIDIA H100 80GB HBM3"], ranks_per_host=4, nic_bytes_s=5e10, num_nics=4,
    chip_spread=0.0, thermal_drift=0.0, noise=0.002, tail_share=0.0, host_jitter=0.02,
    host_spread=0.0, link_noise=0.01, clock_offset_s=0.0, clock_drift_ppm=0.0, tie_width_s=0.0,
)  # fmt: skip
QUIET = Job(
    layout=Layout(dp=2), site=SITE, chunks=((DENSE, DENSE),),
    model=Model(hidden=4096, sequence=4096), habits=Habits(loading=Loading(tail_share=0.0)),
    tracing=Tracing(iterations=(11, 12, 16, 17)),
)  # fmt: skip
JOBS = {
    "pair": QUIET,
    "pipeline": replace(
        QUIET, layout=Layout(tp=2, pp=4, dp=2), chunks=((DENSE,) * 2,) * 4, microbatches=(8,),
        habits=Habits(tied_embeddings=True, overlap_gradients=True),
    ),
    "few microbatches": replace(QUIET, layout=Layout(pp=4), chunks=((DENSE,),) * 4,
                                microbatches=(2,)),
    "interleaved": replace(QUIET, layout=Layout(tp=2, pp=2, vpp=2, dp=2), chunks=((DENSE,),) * 4),
    "deep": replace(QUIET, layout=Layout(pp=4, vpp=2), chunks=((DENSE,),) * 8, microbatches=(8,)),
    "context": replace(QUIET, layout=Layout(tp=2, cp=2, dp=2),
                       habits=Habits(context_by_ring=False, sequence_parallel=False)),
    "experts": replace(
        QUIET, layout=Layout(tp=2, dp=4, ep=2, etp=2), chunks=((EXPERTS, EXPERTS),),
        model=replace(QUIET.model, num_experts=8), habits=Habits(distributed_optimizer=False),
    ),
    "hybrid": replace(QUIET, layout=Layout(pp=2), chunks=((MAMBA, DENSE), (MAMBA, MAMBA)),
                      habits=Habits(recompute=True)),
    "base": replace(QUIET, layout=Layout(tp=2, dp=2, pp=2), chunks=((DENSE,),) * 2,
                    tracing=replace(QUIET.tracing, granularity="base")),
    "ddp": replace(QUIET, trainer=DDP, layout=Layout(dp=8), microbatches=(2,)),
    "fsdp": replace(QUIET, trainer=FSDP, layout=Layout(dp=8), chunks=((DENSE,) * 4,),
                    microbatches=(2,)),
    "growing": replace(QUIET, microbatches=(2, 4)),
}  # fmt: skip


def run(job: Job, *faults: Fault, keeps: bool = False):
    every = frozenset(range(len(faults)))
    chips = np.ones((2, job.num_ranks))
    variants = (every, frozenset[int]())
    return simulate(job, 3, chips, faults=faults, variants=variants, keeps=keeps)


def traced(job: Job, folder: Path, *faults: Fault):
    """The trace of a job that is on disk in a folder."""
    outcome = run(job, *faults, keeps=True)
    world = World(
        job=job, seed=3, numbers=job.tracing.iterations, faults=faults,
        num_microbatches=job.microbatches_of(0), chips=even_chips(job.num_ranks)[None],
        variants=(frozenset(range(len(faults))),),
    )  # fmt: skip
    Recorder(job=job, seed=3, outcome=outcome, world=world).write(folder)
    return read_trace(folder)


def spans_of(trace) -> pd.DataFrame:
    spans = trace.spans.to_pandas()
    return spans.assign(end_ns=spans["start_ns"] + spans["duration_ns"])


def cost(job: Job, *faults: Fault) -> float:
    with_it, without = run(job, *faults).iteration_s
    return float(with_it.mean() / without.mean())


def stretched(job: Job, *faults: Fault) -> np.ndarray:
    """How many times longer the passes of each rank take with faults, (rank, iteration)."""
    with_it, without = run(job, *faults, keeps=False).own_s
    return with_it / without


def fault(kind: str, *ranks: int, factor: float = 1.5, **more) -> Fault:
    return Fault(kind=kind, ranks=ranks, factor=factor, **more)


# The catalogue


def test_cases_are_many_and_half_of_them_have_no_fault_of_a_node() -> None:
    assert 300 <= len(CASES) <= 360
    assert len({case.name for case in CASES}) == len({case.seed for case in CASES}) == len(CASES)
    assert all(case.name.endswith(f"-s{case.seed}") for case in CASES)
    assert 0.45 <= sum(not case.at_fault for case in CASES) / len(CASES) <= 0.6
    assert 0.25 < sum(case.unseen for case in CASES) / len(CASES) < 0.42
    sizes = Counter(case.num_ranks for case in CASES)
    assert set(sizes) == {2, 4, 8, 16, 32, 64} and min(sizes.values()) >= 20
    lengths = [len(job_of(case).tracing.iterations) for case in CASES]
    assert min(lengths) == 2 and max(lengths) == 40


def test_cases_are_the_same_in_each_process_and_others_in_other_draws() -> None:
    assert_alike_in_each_process("campus")
    other = list(campus.cases(1))
    assert not {case.name for case in CASES} & {case.name for case in other}
    assert not {case.seed for case in CASES} & {case.seed for case in other}
    assert [case.family for case in CASES] == [case.family for case in other]


def test_only_faults_lie_at_a_node() -> None:
    for case in (*CASES, *campus.cases(2)):
        sound = case.family.startswith(("healthy", "look_alike")) or case.family == "gc"
        assert bool(case.at_fault) != sound, case.name
        assert case.at_fault <= set(range(case.num_ranks))
        assert not (case.family.startswith("healthy") and case.planted)
        assert all(one.ranks for one in case.planted)
        if len(case.planted) > 1 or case.family == "flapping":
            assert len(case.at_fault) < case.num_ranks


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_cases_are_written_as_listed_and_read(family: str, tmp_path: Path) -> None:
    case = SMALLEST[family]
    planted = campus.write(case, tmp_path)
    unpriced = [replace(one, cost_ratio=1.0, held_cost_ratio=1.0) for one in planted]
    assert unpriced == list(case.planted)
    for one in planted:
        assert 0.999 < one.cost_ratio < 30 and 0.999 < one.held_cost_ratio < 30
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 80e6
    trace = read_trace(tmp_path)
    assert set(trace.headers) == set(range(case.num_ranks))
    numbers = np.unique(trace.spans.to_pandas()["iteration"])
    assert tuple(map(int, numbers)) == job_of(case).tracing.iterations


def test_a_case_is_written_alike_each_time(tmp_path: Path) -> None:
    case = SMALLEST["gpu_clock: later"]
    for name in "ab":
        campus.write(case, tmp_path / name)
    first = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert first == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}


# What is recorded


@pytest.mark.parametrize("name", JOBS)
def test_spans_nest_and_lie_within_their_iteration(name: str, tmp_path: Path) -> None:
    spans = spans_of(traced(JOBS[name], tmp_path))
    assert_nested(spans)
    for _, own in spans.groupby(["rank", "iteration"]):
        (whole,) = own[own["kind"] == "iteration"].itertuples()
        on_device = own[own["track"].isin((1, 2))]
        assert on_device["start_ns"].min() >= whole.start_ns
        assert on_device["end_ns"].max() <= whole.end_ns
    for _, own in spans[spans["kind"] == "iteration"].groupby("rank"):
        ordered = own.sort_values("iteration")
        ends = ordered["end_ns"].to_numpy()
        assert (ordered["start_ns"].to_numpy()[1:] >= ends[:-1]).all()


@pytest.mark.parametrize("name", JOBS)
def test_all_members_meet_in_a_collective(name: str, tmp_path: Path) -> None:
    trace = traced(JOBS[name], tmp_path)
    spans = spans_of(trace)
    sizes = {g: len(r) for header in trace.headers.values() for g, r in header.groups.items()}
    meetings = spans[spans["kind"] == "collective"].groupby(
        ["iteration", "group", "op", "sequence"]
    )
    assert len(meetings)
    for (_, group, op, _), members in meetings:
        assert set(members["rank"]) and len(members) == sizes[group]
        if op != "broadcast":
            assert members["end_ns"].min() >= members["start_ns"].max()


@pytest.mark.parametrize("name", ["pipeline", "few microbatches", "interleaved", "deep", "base"])
def test_both_ends_of_a_message_are_recorded_at_one_time(name: str, tmp_path: Path) -> None:
    job = JOBS[name]
    spans = spans_of(traced(job, tmp_path))
    messages = spans[spans["kind"] == "p2p"]
    sent, got = messages[messages["op"] == "send"], messages[messages["op"] == "recv"]
    sent = sent.assign(source=sent["rank"], target=sent["peer"])
    got = got.assign(source=got["peer"], target=got["rank"])
    keys = ["iteration", "source", "target", "direction", "sequence"]
    pairs = sent.merge(got, on=keys, how="outer", indicator=True)
    assert (pairs["_merge"] == "both").all()
    links = job.layout.pp * job.layout.vpp - 1
    lines = job.num_ranks // job.layout.pp
    assert len(pairs) == 2 * links * lines * job.microbatches[0] * len(job.tracing.iterations)
    latest = np.maximum(pairs["start_ns_x"], pairs["start_ns_y"])
    assert (np.minimum(pairs["end_ns_x"], pairs["end_ns_y"]) >= latest).all()
    assert (pairs["microbatch_x"] == pairs["microbatch_y"]).all()


@pytest.mark.parametrize("name", JOBS)
def test_groups_are_those_of_the_layout(name: str) -> None:
    job = JOBS[name]
    if job.trainer != "megatron":
        return
    for rank in range(job.num_ranks):
        groups = groups_of(job, rank)
        for axis in ("tp", "cp", "dp", "pp", "ep"):
            (own,) = (found for name, found in groups.items() if name.split("@")[0] == axis)
            assert own == job.layout.group(rank, axis)


def test_what_is_not_seen_is_waited_for_within_passes(tmp_path: Path) -> None:
    job = replace(QUIET, layout=Layout(tp=4), habits=Habits(unrecorded=frozenset({"tp"})))
    ailing = fault("gpu_clock", 1)
    hidden = spans_of(traced(job, tmp_path / "hidden", ailing))
    seen = spans_of(traced(replace(job, habits=Habits()), tmp_path / "seen", ailing))
    assert not hidden["group"].str.startswith("tp@").any()
    assert seen["group"].str.startswith("tp@").any()
    passes = [
        spans[spans["name"].isin(("forward", "backward"))].groupby("rank")["duration_ns"].mean()
        for spans in (hidden, seen)
    ]
    assert passes[0].max() / passes[0].min() < 1.02
    assert passes[0].mean() == pytest.approx(passes[1].mean(), rel=0.02)


def test_base_has_passes_and_data_parallel_collectives_only(tmp_path: Path) -> None:
    spans = spans_of(traced(JOBS["base"], tmp_path))
    assert {"forward", "backward", "loss", "optimizer", "grad-sync"} <= set(spans["name"])
    assert not spans["name"].str.contains("attention|mlp|transformer_layer").any()
    groups = {name.split("@")[0] for name in spans["group"] if name}
    assert groups == {"dp_cp", "pp"}
    assert (spans["launch_ns"] == -1).all() or spans["launch_ns"].isna().all()


def test_layers_of_the_same_kind_have_one_digest(tmp_path: Path) -> None:
    for name, sizes in (("pipeline", {2}), ("hybrid", set()), ("experts", {2})):
        trace = traced(JOBS[name], tmp_path / name)
        kinds = [window.kinds for own in trace.windows.values() for window in own]
        assert {len(found) for one in kinds for found in one.values()} == sizes
        if name == "experts":
            assert set(kinds[0]) == {""}


def test_tokens_are_told_where_they_tell_all(tmp_path: Path) -> None:
    tokens = QUIET.model.tokens
    for lengths, spread in (("fixed", 0.0), (PADDED, 0.3), (PACKED, 0.3)):
        habits = replace(QUIET.habits, lengths=lengths, length_spread=spread)
        trace = traced(replace(QUIET, habits=habits), tmp_path / lengths)
        told = trace.windows[0][0].tokens
        if lengths == PACKED:
            assert not told
        else:
            assert (told == (tokens, tokens)) is (lengths == "fixed")


# Clocks


def test_clocks_are_those_of_hosts_and_tied_at_each_window(tmp_path: Path) -> None:
    off = replace(SITE, clock_offset_s=0.01, clock_drift_ppm=20.0, tie_width_s=2e-5)
    job = replace(QUIET, layout=Layout(dp=8), site=off)
    clocks = drawn_clocks(off, 8, job.tracing.windows, seed=3)
    by_host = clocks.offset_s.mean(axis=1)
    assert np.ptp(by_host[:4]) < 2e-5 < abs(by_host[0] - by_host[4])
    assert (clocks.offset_s[:, 0] == clocks.offset_s[:, 1]).all()
    assert (clocks.offset_s[:, 1] != clocks.offset_s[:, 2]).all()
    spans = spans_of(traced(job, tmp_path))
    ends = spans[spans["name"] == "grad-sync"].groupby("rank")["end_ns"].min()
    told = (ends[4] - ends[0]) / 1e9
    assert told == pytest.approx(by_host[4] - by_host[0], abs=3e-4)


def test_a_step_of_a_clock_is_one_of_a_host(tmp_path: Path) -> None:
    stepping = replace(SITE, clock_steps=True)
    clocks = drawn_clocks(stepping, 8, (0, 0, 1, 1, 2), seed=5)
    moved = np.abs(np.diff(clocks.offset_s, axis=1)).max(axis=1) > 1e-3
    assert moved.sum() == 4 and (moved[:4].all() or moved[4:].all())


# Physics


def test_a_slow_gpu_shows_in_its_own_kernels_only(tmp_path: Path) -> None:
    job = replace(QUIET, layout=Layout(dp=4))
    slower = stretched(job, fault("gpu_clock", 2)).mean(axis=1)
    assert 1.35 < slower[2] <= 1.5 and np.delete(slower, 2) == pytest.approx(1.0, abs=1e-9)
    spans = spans_of(traced(job, tmp_path, fault("gpu_clock", 2)))
    mean = spans[spans["name"] == "mlp"].groupby("rank")["duration_ns"].mean()
    assert 1.4 < mean[2] / mean[0] < 1.51 and mean[3] / mean[0] == pytest.approx(1.0, abs=0.01)


def test_mates_wait_for_a_slow_gpu(tmp_path: Path) -> None:
    job = replace(QUIET, layout=Layout(tp=2, dp=2))
    spans = spans_of(traced(job, tmp_path, fault("gpu_clock", 3)))
    tensor = spans[spans["group"].str.startswith("tp@") & (spans["op"] != "broadcast")]
    mean = tensor.groupby("rank")["duration_ns"].mean()
    assert mean[2] > 1.3 * mean[3] and mean[0] == pytest.approx(mean[1], rel=0.1)


def test_slow_memory_leaves_products_alone_and_stretches_updates(tmp_path: Path) -> None:
    spans = spans_of(traced(QUIET, tmp_path, fault("gpu_memory", 1, factor=2.0)))
    mean = spans.groupby(["name", "rank"])["duration_ns"].mean()
    assert 1.0 < mean["mlp", 1] / mean["mlp", 0] < 1.4
    assert cost(QUIET, fault("gpu_memory", 1, factor=2.0)) < cost(
        QUIET, fault("gpu_clock", 1, factor=2.0)
    )


def test_throttling_comes_in_bursts() -> None:
    numbers = tuple(range(1, 41))
    job = replace(QUIET, tracing=Tracing(interval=1, window=1, iterations=numbers))
    once = fault("throttling", 0, factor=2.0, share=0.3, burst=4.0)
    ratio = stretched(job, once)[0]
    assert 1.1 < ratio.mean() < 1.6 and ratio.min() < 1.01 and ratio.max() > 1.4


def test_a_fault_costs_nothing_before_it_is_there() -> None:
    outcome = run(QUIET, fault("gpu_clock", 0, first_iteration=16))
    ratio = outcome.iteration_s[0] / outcome.iteration_s[1]
    assert ratio[:2] == pytest.approx(1.0) and (ratio[2:] > 1.2).all()


def test_a_slow_host_costs_where_launches_bound_the_job() -> None:
    ailing = fault("host_cpu", 0, factor=3.0)
    for hidden, least, most in ((4096, 0.99, 1.1), (512, 1.8, 4.0)):
        model = replace(QUIET.model, hidden=hidden, sequence=1024 * hidden // 512)
        assert least < cost(replace(QUIET, model=model, trainer=DDP), ailing) < most


def test_links_slow_what_goes_through_them(tmp_path: Path) -> None:
    job = replace(QUIET, layout=Layout(tp=4, dp=2))
    rail = spans_of(traced(job, tmp_path, fault("rail", 1, factor=4.0)))
    grads = rail[rail["group"].str.startswith("dp_cp@") & (rail["op"] == "reduce_scatter")]
    mean = grads.groupby("group")["duration_ns"].min()
    assert mean["dp_cp@1"] > 3 * mean["dp_cp@0"]
    assert cost(job, fault("nvlink", 1, factor=3.0)) > 1.05
    alone = replace(job, layout=Layout(tp=4), habits=Habits())
    assert cost(alone, fault("nic", 0, 1, factor=4.0)) == pytest.approx(1.0)


def test_faults_that_look_alike_have_both_ends_named() -> None:
    apart = replace(SITE, ranks_per_host=1, num_nics=1)
    pair, line, ring = (
        replace(QUIET, site=apart, layout=layout)
        for layout in (Layout(dp=2), Layout(pp=4), Layout(dp=4))
    )
    assert suspects(pair, fault("nic", 1, host="node02")) == (0, 1)
    assert suspects(line, fault("nic", 1, host="node02")) == (1,)
    assert suspects(ring, fault("nic", 1, host="node02")) == (1,)
    assert suspects(replace(QUIET, layout=Layout(tp=2, dp=4)), fault("nvlink", 2)) == (2, 3)


def test_a_loader_that_keeps_up_costs_nothing() -> None:
    for factor, dear in ((1.5, False), (3000.0, True)):
        assert bool(cost(QUIET, fault("loader", 0, factor=factor)) > 1.2) is dear


def test_longer_data_are_no_slow_machine() -> None:
    habits = replace(QUIET.habits, lengths=PADDED, length_spread=0.1)
    job = replace(QUIET, habits=habits, layout=Layout(dp=4))
    longer = fault("long_sequences", 2, factor=1.3)
    ratio = stretched(job, longer).mean(axis=1)
    assert ratio[2] > 1.3 and np.delete(ratio, 2) == pytest.approx(1.0)
    case = SMALLEST["look_alike: longer replica"]
    assert campus.slowness(case) == pytest.approx(1.0, abs=0.06)
    assert not case.at_fault and case.planted[0].owner == "job"


def test_experts_share_all_tokens() -> None:
    job = replace(JOBS["experts"], habits=replace(JOBS["experts"].habits, expert_spread=0.2))
    hot = [rank for rank in range(8) if job.layout.coordinates(rank).ep == 1]
    mean = stretched(job, fault("hot_expert", *hot, factor=2.0)).mean(axis=1)
    assert (mean[hot] > 1.05).all() and (np.delete(mean, hot) < 1.0).all()


def test_products_go_in_whole_waves() -> None:
    chip = SITE.chip
    one_wave, a_tile_more = (product_s(chip, 128 * 12, 256 * n, 256 * 11 + 0) for n in (8, 8))
    assert one_wave == a_tile_more
    assert product_s(chip, 128 * 12, 2048, 256 * 12) == pytest.approx(2 * one_wave)


def test_attention_grows_with_the_square_of_documents() -> None:
    habits = replace(QUIET.habits, lengths=PACKED, length_spread=0.4)
    world = World(
        job=replace(QUIET, habits=habits, layout=Layout(dp=8)), seed=4, numbers=(11, 12),
        num_microbatches=4, chips=np.ones((1, 8)), faults=(), variants=(frozenset(),),
    )  # fmt: skip
    linear, square = world.lengths
    assert (linear == 1).all() and 0.05 < square.min() < square.mean() < 0.8
    assert square.std() > 0.02


# For judges of figures


def test_slowness_is_that_of_chips_and_faults() -> None:
    case = SMALLEST["gpu_clock: strong"]
    ratios = campus.slowness(case).mean(axis=1)
    (culprit,) = case.planted[0].ranks
    assert ratios.shape == (case.num_ranks,)
    assert 1.2 < ratios[culprit] < 2.1
    assert np.delete(ratios, culprit) == pytest.approx(1.0, abs=0.05)


def test_a_varied_job_has_the_chips_that_were_asked_for(tmp_path: Path) -> None:
    case = next(one for one in CASES if one.family == "two faults" and one.num_ranks <= 16)
    even = campus.write_varied(case, Variation(chip_spread_ratio=0.0), None)
    slow = campus.write_varied(
        case, Variation(chip_spread_ratio=0.0, slow_rank=2, factor=1.5), tmp_path
    )
    assert even.shape == (case.num_ranks, len(job_of(case).tracing.iterations))
    ratios = (slow / even).mean(axis=1)
    assert ratios[2] > 1.15 and np.delete(ratios, 2) == pytest.approx(1.0, abs=0.02)
    assert len(list(tmp_path.iterdir())) == case.num_ranks
