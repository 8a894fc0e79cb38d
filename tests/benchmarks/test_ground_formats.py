"""One physics in three formats: slow parts are slow, mates wait, files agree and are whole."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.grounds.formats import cases, slowness, write, write_varied
from benchmarks.grounds.formats.catalogue import style_of, world_of
from benchmarks.grounds.formats.hardware import CHIPS, Cluster
from benchmarks.grounds.formats.job import Job, Shape
from benchmarks.grounds.formats.kineto import ProfileStyle, write_profiles
from benchmarks.grounds.formats.original import OriginalStyle, write_original
from benchmarks.grounds.formats.program import Code
from benchmarks.grounds.formats.rankfiles import RankFileStyle, write_rank_files
from benchmarks.grounds.formats.troubles import Trouble
from benchmarks.grounds.formats.world import World, pass_times, simulate
from benchmarks.grounds.ground import Variation
from benchmarks.grounds.kinds import EXPERTS
from megascan.reader import read_trace

ALL = list(cases())


def world(shape, *troubles, gpus=4, **habits):
    given = {
        "stage_layers": (1,) * (shape.pp * shape.vpp), "num_microbatches": 2 * shape.pp,
        "iterations": (1, 2, 3, 4), "batch": 2, "vocabulary": 16_000, "chip_spread": 0.0,
    }  # fmt: skip
    return World(
        job=Job(shape=shape, **(given | habits)),
        cluster=Cluster(
            chip=CHIPS["h100"], num_ranks=shape.world, gpus_a_node=gpus, nics_a_node=gpus
        ),
        seed=7,
        troubles=troubles,
    )


def events(path):
    return json.loads(path.read_text())


def spans(folder):
    return [event for path in folder.iterdir() for event in events(path) if event["ph"] == "X"]


def kernels(path):
    return [event for event in events(path)["traceEvents"] if event.get("cat") == "kernel"]


def passes_of(run, rank):
    marks = [(s.begin, s.end) for s in run.program.spans if s.rank == rank and s.name == "forward"]
    return sum(run.start[:, end] - run.start[:, begin] for begin, end in marks)


def waits_of(run, rank, axis):
    joins = [
        n for n, one in enumerate(run.program.operations)
        if one.code is Code.JOIN and one.rank == rank and one.stream.startswith(f"{axis}@")
    ]  # fmt: skip
    return (run.end[:, joins] - run.start[:, joins]).sum()


def test_a_slow_gpu_computes_longer_and_its_mates_wait_for_it():
    slow = world(Shape(dp=4), Trouble(kind="gpu_clock", touched=(2,), factor=1.5))
    run, sound = simulate(slow), simulate(slow.sound())
    assert (passes_of(run, 2) > 1.3 * passes_of(sound, 2)).all()
    assert np.allclose(passes_of(run, 1), passes_of(sound, 1), rtol=0.02)
    for mate in (0, 1, 3):
        assert waits_of(run, mate, "dp_cp") > 2 * waits_of(run, 2, "dp_cp")
    assert (run.iteration_times > 1.2 * sound.iteration_times).all()


def test_all_members_of_a_collective_end_together_and_not_before_the_last_begins():
    run = simulate(world(Shape(tp=2, dp=2, pp=2), overlap=True, distributed_optimizer=True))
    for one in run.program.communications:
        joins = list(one.joins.values())
        assert sorted(one.joins) == sorted(one.members)
        if one.root < 0:
            assert (run.end[:, joins].min(1) >= run.start[:, joins].max(1)).all()
            assert np.ptp(run.end[:, joins], axis=1).max() < 20_000


@pytest.mark.parametrize(
    "shape",
    [Shape(dp=2, pp=4), Shape(tp=2, pp=2, vpp=2), Shape(dp=4, ep=2), Shape(cp=2, dp=2)],
)
@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_of_a_stream_runs_at_the_same_time(shape, overlap):
    run = simulate(world(shape, overlap=overlap, num_experts=2 * (shape.ep > 1)))
    streams = defaultdict(list)
    for number, one in enumerate(run.program.operations):
        if one.code in (Code.KERNEL, Code.JOIN):
            streams[one.rank, one.stream].append(number)
    for numbers in streams.values():
        assert (run.start[:, numbers][:, 1:] >= run.end[:, numbers][:, :-1]).all()


def test_links_hosts_and_loaders_slow_what_they_should():
    sound = world(Shape(tp=2, dp=4))
    nvlink = simulate(replace(sound, troubles=(Trouble(kind="nvlink", touched=(3,), factor=4.0),)))
    even = simulate(sound)
    assert waits_of(nvlink, 2, "tp") > 2 * waits_of(even, 2, "tp")
    assert waits_of(nvlink, 4, "tp") == pytest.approx(waits_of(even, 4, "tp"), rel=0.05)
    nic = Trouble(kind="nic", touched=(4, 5, 6, 7), factor=4.0, node=1)
    run = simulate(replace(sound, troubles=(nic,)))
    assert waits_of(run, 0, "dp_cp") > 2 * waits_of(even, 0, "dp_cp")
    loader = Trouble(kind="loader", touched=(2,), amount_ms=50.0)
    assert simulate(replace(sound, troubles=(loader,))).iteration_times[2] > (
        even.iteration_times[2] + 5e7
    )


def test_bursts_cover_their_share_of_the_time():
    bursts = Trouble(kind="throttling", touched=(1,), factor=1.4, share=0.2, burst=0.4)
    numbers = tuple(range(1, 101))
    job = world(Shape(dp=2), bursts, iterations=numbers)
    slower = pass_times(job, None)[1] / pass_times(job.sound(), None)[1]
    assert 0.04 < (slower - 1).mean() < 0.13
    assert (slower > 1.02).any() and (slower < 1.001).any()


def test_the_same_job_takes_as_long_in_all_three_formats(tmp_path):
    run = simulate(world(Shape(tp=2, dp=2, pp=2), barrier=True, iterations=(1, 2, 3, 4, 5)))
    write_rank_files(run, RankFileStyle(), tmp_path / "rank")
    write_original(run, OriginalStyle(), tmp_path / "original")
    write_profiles(run, ProfileStyle(), tmp_path / "profile")
    truth = (run.end_ns - run.begin_ns)[:, 0] / 1e6
    own = [
        event["dur"] / 1e3 for event in spans(tmp_path / "rank")
        if event["name"] == "iteration" and event["pid"] == 0
    ]  # fmt: skip
    records = events(tmp_path / "original/benchmark-data-0-pipeline-0-tensor-0.json")
    original = [one["duration_cuda"] / 1e6 for one in records if "duration_cuda" in one]
    steps = sorted(
        (event["ts"], event["dur"] / 1e3)
        for event in events(tmp_path / "profile/rank0.json")["traceEvents"]
        if event["name"].startswith("ProfilerStep")
    )
    assert own == pytest.approx(truth, rel=1e-4)
    assert original == pytest.approx(truth, rel=1e-4)
    assert [length for _, length in steps] == pytest.approx(truth, rel=0.15, abs=4)


def check_nesting(folder):
    """Assert that spans of one track lie in each other or beside each other."""
    tracks = defaultdict(list)
    for event in spans(folder):
        if event["tid"] != 4 and event["cat"] != "p2p":  # messages of a batch have the same times
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for moments in tracks.values():
        open_ends = []
        for begin, end in sorted(moments, key=lambda one: (one[0], -one[1])):
            while open_ends and open_ends[-1] <= begin + 1e-3:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 2e-3
            open_ends.append(end)


def check_matching(folder):
    """Assert that all members of a group record the same collectives, both ends each message."""
    collectives, messages = defaultdict(Counter), Counter()
    for event in spans(folder):
        given = event["args"]
        if event["cat"] == "collective":
            key = given["iteration"], given["op"], given["sequence"], given["size_bytes"]
            collectives[given["group"]][key] += 1
        elif event["cat"] == "p2p":
            ends = (event["pid"], given["peer"])
            ends = ends if given["op"] == "send" else ends[::-1]
            key = (*ends, given["direction"], given["sequence"], given["iteration"])
            messages[key] += 1
    for counts in collectives.values():
        assert len(set(counts.values())) == 1
    assert set(messages.values()) <= {2}


def check_original(folder):
    """Assert that scopes end in the order in which they began, and that time does not go back."""
    for path in folder.iterdir():
        stack, last = [], 0
        for record in events(path):
            if record["ph"] == "B":
                stack.append(record["name"])
                last = 0 if record["name"] == "iteration" else last
            else:
                assert stack.pop() == record["name"]
            now = record.get("rel_ts", 0)
            assert now >= last
            last = now
        assert stack == []


def check_profiles(folder):
    """Assert that streams are in order, launches known, and members of a group agree."""
    counts = defaultdict(list)
    for path in folder.iterdir():
        document = events(path)
        launches = {
            event["args"]["correlation"] for event in document["traceEvents"]
            if event.get("cat") == "cuda_runtime"
        }  # fmt: skip
        streams, own = defaultdict(list), Counter()
        for event in document["traceEvents"]:
            if event.get("cat") != "kernel":
                continue
            assert event["args"]["correlation"] in launches
            streams[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            given = event["args"]
            if given.get("Collective name") not in (None, "send", "recv"):
                own[given["Process Group Name"], given["Process Group Ranks"]] += 1
        for moments in streams.values():
            assert all(a[1] <= b[0] + 0.6 for a, b in pairwise(moments))  # doubles of unix µs
        for (_, ranks), count in own.items():
            assert document["distributedInfo"]["rank"] in json.loads(ranks)
            counts[_, ranks].append(count)
    for (_, ranks), found in counts.items():
        assert len(found) == len(json.loads(ranks)) and len(set(found)) == 1


CHECKS = {
    "rank_files": (check_nesting, check_matching),
    "original": (check_original,),
    "kineto": (check_profiles,),
}


@pytest.mark.parametrize("case", ALL[3::17], ids=lambda case: case.name)
def test_files_are_whole_and_causes_cost_something(tmp_path, case):
    planted = write(case, tmp_path)
    for check in CHECKS[style_of(case).format]:
        check(tmp_path)
    assert len(list(tmp_path.iterdir())) == case.num_ranks
    assert [one.kind for one in planted] == [one.kind for one in case.planted]
    for one in planted:
        assert one.cost_ratio > 0.98  # chips are uneven: a slower one may hide behind another


def test_what_is_planted_is_visible_in_what_is_written():
    faulty = [case for case in ALL[:110:3] if case.num_ranks <= 8 and len(case.planted) == 1]
    assert len(faulty) > 8
    for case in faulty:
        job = world_of(case)
        run, sound = simulate(job), simulate(job.sound())
        touched = [
            number for number, one in enumerate(run.program.operations)
            if one.rank in case.planted[0].ranks
        ]  # fmt: skip
        taken = run.end[:, touched] - run.start[:, touched]
        without = sound.end[:, touched] - sound.start[:, touched]
        assert np.abs(taken - without).sum() > 0.001 * sound.iteration_times.sum(), case.name


def test_slowness_tells_the_slow_chip_and_variations_obey():
    case = next(
        case for case in ALL
        if case.family == "gpu_clock" and case.num_ranks <= 8 and len(case.planted) == 1
    )  # fmt: skip
    planted = case.planted[0]
    table = slowness(case)
    num_iterations = len(world_of(case).job.iterations)
    assert table.shape == (case.num_ranks, num_iterations)
    excess = slowness(case).mean(1)[planted.ranks[0]] - 1
    assert abs(excess - (planted.factor - 1)) < 0.08
    even = write_varied(case, Variation(chip_spread_ratio=0.0), None)
    slow = write_varied(case, Variation(chip_spread_ratio=0.0, slow_rank=1, factor=1.4), None)
    ratio = (slow / even).mean(1)
    assert ratio[1] > 1.25 and np.allclose(np.delete(ratio, 1), 1.0)


def test_a_case_is_written_alike_twice_and_draws_differ(tmp_path):
    case = ALL[0]
    for name in ("one", "two"):
        write(case, tmp_path / name)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    drawn = list(cases(1))
    assert Counter(one.family for one in drawn) == Counter(one.family for one in ALL)
    names = {one.name for one in (*ALL, *drawn)}
    assert len(names) == len({one.seed for one in (*ALL, *drawn)}) == 2 * len(ALL)
    sound = [case for case in ALL if not case.at_fault]
    assert len(sound) >= 0.45 * len(ALL)


def kinds_of(folder, job, *, full=True):
    """Return the kinds of each rank's layers: the same in all windows, of the layers in spans."""
    write_rank_files(simulate(job), RankFileStyle(full=full), folder)
    windows = read_trace(folder).windows
    seen = defaultdict(set)
    for event in spans(folder):
        if "layer" in event["args"]:
            seen[event["pid"]].add(event["args"]["layer"])
    for rank, own in windows.items():
        assert all(window.kinds == own[0].kinds for window in own)
        if full:
            assert seen[rank] == {layer for numbers in own[0].kinds.values() for layer in numbers}
    return [windows[rank][0].kinds for rank in range(job.job.shape.world)]


@pytest.mark.parametrize("full", [False, True])
def test_layers_are_of_one_kind_however_many_a_stage_has(tmp_path, full):
    shape = Shape(tp=2, pp=2, vpp=2)
    uneven = world(shape, stage_layers=(1, 2, 1, 1), vocabulary=64_000, iterations=(1, 2, 5))
    kinds = kinds_of(tmp_path, uneven, full=full)
    (kind,) = kinds[0]
    assert len(kind) == 8 and set(kind) <= set("0123456789abcdef")
    assert kinds == [{kind: (1, 4)}] * 2 + [{kind: (2, 3, 5)}] * 2


def test_layers_with_experts_have_no_digest(tmp_path):
    job = world(Shape(dp=2, ep=2), num_experts=4)
    assert kinds_of(tmp_path, job) == [{EXPERTS: (1,)}] * 2
