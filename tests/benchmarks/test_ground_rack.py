"""The ground of a machine room: its files, its physics, its draws."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from aggregate import build_timeline
from benchmarks.grounds.ground import Planted, Variation
from benchmarks.grounds.kinds import EXPERTS
from benchmarks.grounds.rack import cases, slowness, write, write_varied
from benchmarks.grounds.rack.catalogue import FAMILIES, world_of
from benchmarks.grounds.rack.conditions import sound, stacked
from benchmarks.grounds.rack.files import write_files
from benchmarks.grounds.rack.hardware import CHIPS
from benchmarks.grounds.rack.interface import run_of
from benchmarks.grounds.rack.network import Network
from benchmarks.grounds.rack.noise import telegraph, wander
from benchmarks.grounds.rack.passes import Pass
from benchmarks.grounds.rack.places import Map, members
from benchmarks.grounds.rack.roofline import passes_over, product
from benchmarks.grounds.rack.run import variants_of
from benchmarks.grounds.rack.schedule import Order
from benchmarks.grounds.rack.settings import Wish, draw_job
from benchmarks.grounds.rack.trouble import Trouble, holding
from megascan.reader import read_trace
from megascan.schema import Granularity
from tests.benchmarks.nesting import assert_nested

CASES = list(cases())
FULL = {"granularity": Granularity.FULL, "is_small": False, "settled": True, "most_ranks": 8}


def first_of(family):
    return next(case for case in CASES if case.family == family)


def quiet_job(seed=5, **wanted):
    """Return a job without noise, in a cluster of equal chips, with three iterations."""
    wish = Wish(**{**FULL, "chip_spread": 0.0, "collects": False, "loads_much": False, **wanted})
    job = draw_job(seed, wish)
    weather = replace(
        job.weather, chip_wander=0.0, kernel_tail=0.0, warming=0.0, launch_spread=0.0,
        launch_tail=0.0, detour_chance=0.0, network_tail=0.0, network_wander=0.0,
        clock_offset_s=0.0, clock_drift_ppm=0.0, clock_bend_ppm=0.0,
    )  # fmt: skip
    tracing = replace(
        job.tracing, interval=3, window=3, num_windows=1, layer_stride=1, compress=False
    )
    habits = replace(
        job.habits, evaluates_every=0, saves_every=0, recompute="none", is_packed=False,
        offloads_optimizer=False, overlap_grad_reduce=False, overlap_param_gather=False,
        ends_are_bounds=False, reduces_loss_each_microbatch=False,
    )  # fmt: skip
    return replace(job, weather=weather, tracing=tracing, habits=habits)


def job_of(axes, **wanted):
    """Return the first quiet job whose only axes are these."""
    for seed in range(400):
        job = quiet_job(seed, axes=axes, **wanted)
        others = {"tp", "cp", "ep", "pp", "vpp", "dp"} - set(axes)
        if all(getattr(job.layout, axis) == 1 for axis in others):
            return job
    raise AssertionError(f"no job of {axes}")


def trouble(kind, cause, touched, factor, **others):
    planted = Planted(kind=kind, cause=cause, owner="node", ranks=touched, factor=factor, **others)
    return Trouble(planted=planted, touched=touched)


def spans_of(job, directory, *troubles):
    write_files(run_of(job, troubles), troubles, directory)
    return read_trace(directory, allow_missing_ranks=True).spans.to_pandas()


def mean_ms(spans, name, rank, **where):
    chosen = spans[(spans["name"] == name) & (spans["rank"] == rank)]
    for column, value in where.items():
        chosen = chosen[chosen[column] == value]
    return chosen["duration_ns"].mean() / 1e6


def step_ms(job, *troubles):
    """Return the mean iteration with the troubles, and without the first."""
    times = run_of(job, troubles).times_s
    return 1e3 * times[0].mean(), 1e3 * times[1].mean()


def test_there_are_enough_cases_of_which_nearly_half_have_sound_hardware():
    healthy = [case for case in CASES if not case.at_fault]
    assert 190 <= len(CASES) <= 230
    assert 0.42 * len(CASES) <= len(healthy) <= 0.5 * len(CASES)
    assert len(CASES) == len({case.name for case in CASES})
    assert all(4 <= case.num_ranks <= 64 for case in CASES)
    sizes = Counter(case.num_ranks for case in CASES)
    assert sizes[8] + sizes[16] + sizes[32] > 0.85 * len(CASES)


def test_who_may_be_named_is_part_of_the_job():
    for case in CASES:
        assert case.at_fault <= frozenset(range(case.num_ranks)), case.name
        for planted in case.planted:
            assert planted.owner in ("node", "job")
            assert planted.ranks and planted.factor > 0.0, case.name
        if case.family.startswith("look_alike") or case.family == "healthy":
            assert not case.at_fault


def test_two_faults_touch_different_ranks():
    for case in CASES:
        if case.family == "two faults":
            first, second = case.planted
            assert not set(first.ranks) & set(second.ranks)


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_files_are_read_matched_and_nest(family, tmp_path):
    case = min((c for c in CASES if c.family == family), key=lambda c: (c.num_ranks, c.name))
    planted = write(case, tmp_path)
    trace = read_trace(tmp_path, allow_missing_ranks=True)
    spans = trace.spans.to_pandas()
    for name in ("iteration", "forward", "backward", "optimizer", "grad-sync", "batch-generator"):
        assert (spans["name"] == name).any(), name
    assert (spans["duration_ns"] >= 0).all()
    assert_nested(spans)
    job = world_of(case).job
    completeness = build_timeline(trace).completeness
    assert set(completeness.missing_ranks) == set(job.tracing.missing)
    if not job.tracing.missing:
        assert not any(completeness.num_unmatched.values())
    assert not completeness.num_unfinished_spans and not completeness.num_duplicates
    for one in planted:
        assert 0.97 < one.cost_ratio < 12.0


def test_the_same_case_gives_the_same_bytes_and_another_draw_others(tmp_path):
    case = first_of("hbm")
    again = next(other for other in cases(1) if other.family == "hbm")
    for place, one in (("a", case), ("b", case), ("c", again)):
        write(one, tmp_path / place)

    def bytes_of(place):
        return [path.read_bytes() for path in sorted((tmp_path / place).iterdir())]

    assert bytes_of("a") == bytes_of("b")
    assert bytes_of("a") != bytes_of("c")


def test_products_come_in_waves_and_thin_ones_are_bound_by_memory():
    chip = CHIPS[1]
    one_wave = product(chip, 128 * 12, 256 * 11, 4096).product_s
    assert product(chip, 128 * 12, 256 * 10, 4096).product_s == one_wave
    assert product(chip, 128 * 12, 256 * 12, 4096).product_s > 1.9 * one_wave
    assert product(chip, 128, 65_536, 256).memory_s > 0.0
    assert passes_over(chip, 2e9).memory_s > 1.9 * passes_over(chip, 1e9).memory_s


def test_noise_wanders_and_bursts_take_their_share():
    draws = np.random.default_rng(1)
    series = wander(draws, (200, 400), 0.01, 0.9)
    assert series.std() == pytest.approx(0.01, rel=0.15)
    assert np.corrcoef(series[:, 1:].ravel(), series[:, :-1].ravel())[0, 1] > 0.8
    assert telegraph(draws, 40_000, 0.25, 8.0).mean() == pytest.approx(0.25, abs=0.04)


@pytest.mark.parametrize("axes", [("pp",), ("pp", "dp"), ("pp", "dp", "vpp"), ("dp",)])
def test_a_schedule_runs_every_pass_once_and_meets_every_message(axes):
    job = job_of(axes)
    ends = Counter()
    for stage in range(job.num_stages):
        actions = Order(job, stage).actions()
        passes = [each for each in actions if isinstance(each, Pass)]
        found = [(each.microbatch, each.chunk, each.is_forward) for each in passes]
        assert len(set(found)) == len(found) == job.num_slices - 1
        for microbatch, chunk, is_forward in found:
            if not is_forward:
                first = found.index((microbatch, chunk, True))
                assert first < found.index((microbatch, chunk, False))
        for each in actions:
            for end in getattr(each, "ends", ()):
                ends[end.message, end.op] += 1
            if hasattr(each, "end") and type(each).__name__ == "Post":
                ends[each.end.message, each.end.op] += 1
    assert set(ends.values()) <= {1}
    sent = {message for message, op in ends if op == "send"}
    assert sent == {message for message, op in ends if op == "recv"}
    chunks = job.num_stages * job.num_chunks - 1
    assert len(sent) == 2 * chunks * job.habits.num_microbatches


@pytest.mark.parametrize("axes", [("dp",), ("tp", "dp"), ("pp", "dp"), ("tp", "cp", "dp")])
def test_a_slow_gpu_computes_slower_and_the_others_do_not(axes):
    run = run_of(job_of(axes), (trouble("gpu_clock", "compute", (1,), 1.5),))
    busy = run.busy_s.mean(axis=-1)
    ratio = busy[0] / busy[1]
    assert 1.4 < ratio[1] <= 1.5
    assert np.delete(ratio, 1) == pytest.approx(1.0, abs=1e-9)
    assert run.times_s[0].mean() > 1.05 * run.times_s[1].mean()


@pytest.mark.parametrize("axes", [("dp",), ("pp", "dp")])
def test_modules_of_a_slow_gpu_take_the_factor(axes, tmp_path):
    job = job_of(axes)
    before = spans_of(job, tmp_path / "a")
    after = spans_of(job, tmp_path / "b", trouble("gpu_clock", "compute", (1,), 1.5))
    for name in ("mlp", "mlp-backward", "attention-backward"):
        own, other = (mean_ms(after, name, rank) / mean_ms(before, name, rank) for rank in (1, 0))
        assert own == pytest.approx(1.5, rel=0.06)
        assert other == pytest.approx(1.0, rel=0.01)


def test_others_wait_for_a_slow_gpu_where_gradients_are_reduced(tmp_path):
    job = job_of(("dp",))
    before = spans_of(job, tmp_path / "a")
    after = spans_of(job, tmp_path / "b", trouble("gpu_clock", "compute", (1,), 1.5))
    late_ms = mean_ms(after, "backward", 1) - mean_ms(before, "backward", 1)
    assert mean_ms(after, "grad-sync", 0) - mean_ms(before, "grad-sync", 0) > late_ms
    assert mean_ms(after, "grad-sync", 1) == pytest.approx(mean_ms(before, "grad-sync", 1), rel=0.1)


def test_slow_memory_slows_the_update_more_than_products(tmp_path):
    job = job_of(("dp",))
    before = spans_of(job, tmp_path / "a")
    after = spans_of(job, tmp_path / "b", trouble("hbm", "compute", (1,), 2.0))
    assert mean_ms(after, "embedding", 1) > 1.5 * mean_ms(before, "embedding", 1)
    assert mean_ms(after, "attention", 1) < 1.4 * mean_ms(before, "attention", 1)
    assert mean_ms(after, "attention", 0) == pytest.approx(
        mean_ms(before, "attention", 0), rel=0.01
    )


def test_a_slow_host_matters_to_the_job_that_its_hosts_bound():
    fault = {"kind": "host_cpu", "cause": "host", "factor": 1.6}
    large = job_of(("dp",))
    small = quiet_job(3, axes=("dp",), is_small=True)
    with_it, without = step_ms(large, trouble(touched=(0,), **fault))
    assert with_it / without < 1.05
    with_it, without = step_ms(small, trouble(touched=(0,), **fault))
    assert with_it / without > 1.2


def test_a_slow_loader_is_seen_in_its_own_batches_only(tmp_path):
    job = job_of(("dp",))
    habits = replace(job.habits, prepares_s=6.0 * job.habits.prepares_s)
    job = replace(job, habits=habits)
    before = spans_of(job, tmp_path / "a")
    after = spans_of(job, tmp_path / "b", trouble("loader", "loader", (2,), 4.0))
    own = mean_ms(after, "batch-generator", 2) - mean_ms(before, "batch-generator", 2)
    other = mean_ms(after, "batch-generator", 1) - mean_ms(before, "batch-generator", 1)
    assert own > 1.0
    assert other <= 0.2 * own


def test_a_slow_nvlink_slows_the_groups_of_its_gpu_only(tmp_path):
    job = job_of(("tp", "dp"))
    before = spans_of(job, tmp_path / "a")
    after = spans_of(job, tmp_path / "b", trouble("nvlink", "link", (1,), 4.0))

    def shortest(frame, group):
        own = frame[(frame["group"].astype(str) == group) & (frame["size_bytes"] > 1 << 20)]
        ends = own.groupby(["iteration", "op", "sequence"], observed=True)["duration_ns"].min()
        return ends.median()

    mine = next(part for part in members(job.layout, "tp") if 1 in part)
    others = next(part for part in members(job.layout, "tp") if 1 not in part)
    assert shortest(after, f"tp@{mine[0]}") > 2.0 * shortest(before, f"tp@{mine[0]}")
    assert shortest(after, f"tp@{others[0]}") < 1.1 * shortest(before, f"tp@{others[0]}")


def test_a_slow_nic_slows_what_leaves_its_host_only():
    job = quiet_job(7, axes=("pp", "dp"), least_hosts=4, least_ranks=16, most_ranks=32)
    where, touched = Map(job), job.rack.ranks_of(1)
    fault = trouble("nic", "link", touched, 6.0)
    network = Network(job, where, stacked(variants_of(job, where, (fault,))))
    network.begin(0)
    num_slow = 0
    for stage in range(job.num_stages):
        for axis in ("dp", "tp"):
            groups = where.within[stage][axis]
            if groups.size > 1:
                seconds = network.collective(groups, "all_reduce", 1e9, (stage, 0))
                ratio = (seconds[0] / seconds[1]).tolist()
                places = np.array(job.ranks_of_stage(stage))[groups.index]
                for part, far, slower in zip(places, groups.spans_hosts, ratio, strict=True):
                    is_slow = bool(far and set(part.tolist()) & set(touched))
                    assert (slower > 3.0) == is_slow
                    assert is_slow or slower == pytest.approx(1.0)
                    num_slow += is_slow
    run = run_of(job, (fault,))
    assert run.times_s[0].mean() > 1.02 * run.times_s[1].mean()
    assert num_slow or job.layout.pp > 1


def test_bursts_hold_for_a_share_and_an_onset_from_its_iteration_on():
    job = draw_job(3, Wish(least_iterations=10, settled=True, is_contiguous=True))
    numbers = job.tracing.iterations
    late = trouble("gpu_clock", "compute", (0,), 1.5, first_iteration=numbers[4])
    holds = holding(job, late, np.random.default_rng(0))
    assert not holds[:4].any() and holds[4:].all()
    bursts = replace(trouble("throttling", "compute", (0,), 2.0, share_of_time=0.25), length=6.0)
    share = holding(job, bursts, np.random.default_rng(0)).mean()
    assert 0.1 < share < 0.4


@pytest.mark.parametrize(
    "axes", [("tp", "dp"), ("pp", "dp"), ("pp", "dp", "vpp"), ("pp", "dp", "ep"), ("dp", "ep")]
)
def test_nothing_ends_before_it_can_have_begun(axes):
    run = run_of(job_of(axes), ())
    for iteration in run.iterations:
        groups, messages = {}, {}
        for row in iteration.rows:
            for place, rank in enumerate(np.array(run.where.ranks)[row.places].tolist()):
                begin, end = float(row.begin[place]), float(row.end[place])
                arguments = row.arguments
                if row.kind == "collective":
                    key = row.groups[place], row.name, arguments["sequence"]
                    groups.setdefault(key, []).append((begin, end))
                elif row.kind == "p2p":
                    peer = int(row.peers[place])
                    pair = (rank, peer) if arguments["op"] == "send" else (peer, rank)
                    key = *pair, arguments["direction"], arguments["sequence"]
                    messages.setdefault(key, {})[arguments["op"]] = begin, end
        for times in groups.values():
            ends = [end for _, end in times]
            assert len(times) > 1
            assert min(ends) >= max(begin for begin, _ in times)
            assert max(ends) - min(ends) < 1e-4
        for pair in messages.values():
            assert set(pair) == {"send", "recv"}
            assert pair["recv"][1] >= pair["send"][0]


def test_a_stage_that_is_heavy_says_so_by_the_kinds_of_its_layers(tmp_path):
    job = job_of(("pp", "dp"))
    planted = Planted(
        kind="heavy_stage", cause="stage_imbalance", owner="job", ranks=(0,), factor=1.5
    )
    heavy = Trouble(planted=planted, touched=(0,), stage=0)
    spans_of(job, tmp_path, heavy)
    windows = read_trace(tmp_path).windows
    stages = [job.ranks_of_stage(stage) for stage in range(job.num_stages)]
    kinds = [{frozenset(windows[rank][0].kinds) for rank in own} for own in stages]
    assert all(len(each) == 1 for each in kinds)
    assert kinds[0] != kinds[1]


def test_layers_of_experts_have_no_digest_and_packed_sequences_no_tokens(tmp_path):
    job = job_of(("dp", "ep"))
    packed = replace(job, habits=replace(job.habits, is_packed=True))
    spans_of(job, tmp_path / "a")
    spans_of(packed, tmp_path / "b")
    window = read_trace(tmp_path / "a").windows[0][0]
    assert EXPERTS in window.kinds and window.tokens[0] == window.tokens[1] == job.model.tokens
    assert not read_trace(tmp_path / "b").windows[0][0].tokens


def test_longer_sequences_are_written_down(tmp_path):
    job = job_of(("dp",))
    planted = Planted(
        kind="long_sequences", cause="sequence_imbalance", owner="job", ranks=(1,), factor=1.4
    )
    longer = Trouble(planted=planted, touched=(1,))
    spans = spans_of(job, tmp_path, longer)
    windows = read_trace(tmp_path).windows
    assert windows[1][0].tokens[0] > 1.2 * job.model.tokens
    assert windows[0][0].tokens[1] < 1.3 * job.model.tokens
    assert mean_ms(spans, "attention", 1) > 1.4 * mean_ms(spans, "attention", 0)


def test_chips_of_no_spread_are_alike():
    job = draw_job(9, Wish(chip_spread=0.04, most_ranks=16))
    where = Map(job)
    wide, none = (sound(job, where, chip_spread=spread).clock[:, -1, 0] for spread in (0.04, 0.0))
    assert 0.005 < np.ptp(np.log(wide)) < 0.08
    assert np.ptp(np.log(none)) < 0.05


def test_slowness_is_that_of_chips_and_cause():
    case = max(
        (c for c in CASES if c.family == "gpu_clock" and c.num_ranks <= 16),
        key=lambda c: c.planted[0].factor,
    )
    (planted,) = case.planted
    found = slowness(case)
    (rank,) = planted.ranks
    assert found.shape == (case.num_ranks, len(world_of(case).job.tracing.iterations))
    assert found[rank, -1] > 1.0 + 0.6 * (planted.factor - 1.0)
    assert np.abs(np.delete(found, rank, axis=0) - 1.0).max() < 0.05


def test_a_variation_has_its_own_chips_and_its_slow_gpu(tmp_path):
    case = first_of("healthy")
    alike = write_varied(case, Variation(chip_spread_ratio=0.0), None)
    slow = write_varied(case, Variation(chip_spread_ratio=0.0, slow_rank=1, factor=1.4), tmp_path)
    ratio = (slow / alike).mean(axis=1)
    assert 1.2 < ratio[1] <= 1.4
    assert np.delete(ratio, 1) == pytest.approx(1.0, abs=1e-9)
    assert read_trace(tmp_path, allow_missing_ranks=True).spans.num_rows
