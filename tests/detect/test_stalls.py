"""A device that waits for its host's launches is told from one that is slow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from aggregate import build_timeline
from benchmarks.grounds.fleet.files import write_files
from benchmarks.grounds.fleet.jobs import Job
from benchmarks.grounds.fleet.trainer import Run
from detect import Cause
from detect.observe.extract import observe
from detect.observe.operations import FORWARD
from detect.observe.spans import unsplit_time
from detect.observe.stalls import contents_of, stalled_time
from detect.observe.work import Samples
from megascan.reader import read_trace
from megascan.schema import Track
from megascan.timeline import equals

LAYERS, PASSES = 8, 20
MODULE_NS, REST_NS = 1_000_000, 500_000


@pytest.fixture
def stalls(index_of):
    """Stalled ns by (rank, pass) of passes made of modules (rank, pass, layer) and a gap each, amid
    the modules.

    Of each gap `late_ns` (rank, pass) lay before the next module's launch; None: not recorded. Of
    `num_turns` layers that follow one another one is recorded, another one in the next pass.
    """

    def stalled(module_ns, gap_ns, *, stage=None, num_turns=1, late_ns=None):
        num_ranks, num_passes, num_layers = module_ns.shape
        spans = []
        for rank in range(num_ranks):
            at = 0
            for number in range(num_passes):
                gap = int(gap_ns[rank, number])
                total = int(module_ns[rank, number].sum()) + gap
                whole = {"rank": rank, "kind": "compute", "track": Track.COMPUTE}
                spans.append(whole | {"name": "forward", "start_ns": at, "duration_ns": total})
                begin = at
                for layer in range(num_layers):
                    length, launch = int(module_ns[rank, number, layer]), -1
                    begin += gap * (layer == num_layers // 2)
                    if late_ns is not None:
                        late = int(late_ns[rank, number])
                        launch = late - gap if layer == num_layers // 2 else -10 * MODULE_NS
                    if not (layer - number) % num_turns:
                        spans.append(whole | {
                            "name": "mlp", "layer": layer, "start_ns": begin, "self_ns": length,
                            "duration_ns": length, "launch_ns": launch,
                        })  # fmt: skip
                    begin += length
                at += total + 10
        index = index_of(spans, is_sampled=num_turns > 1)
        passes, modules = (equals(index.table, "name", one) for one in ("forward", "mlp"))
        samples = Samples.of(index, passes, {"forward": FORWARD})
        stage_of = np.zeros(num_ranks, dtype=np.int64) if stage is None else np.array(stage)
        time_ns = index.duration[passes].astype(np.float64)
        contents = contents_of(index, passes, samples, modules)
        found = stalled_time(contents, stage_of[samples.row], time_ns, time_ns)
        return found.reshape(num_ranks, num_passes)

    return stalled


@pytest.fixture
def healthy():
    """Module times with 2 % of noise, and the rest of each pass."""
    draw = np.random.default_rng(3)
    modules = MODULE_NS * draw.normal(1.0, 0.02, size=(4, PASSES, LAYERS))
    rest = REST_NS * draw.normal(1.0, 0.05, size=(4, PASSES))
    return modules, rest


def test_healthy_ranks_never_stall(healthy, stalls):
    assert stalls(*healthy).max() == 0


def test_a_slow_device_does_not_stall(healthy, stalls):
    modules, rest = healthy
    modules[2] *= 1.5
    rest[2] *= 1.5
    assert stalls(modules, rest).max() == 0


def test_a_longer_microbatch_does_not_stall(healthy, stalls):
    modules, rest = healthy
    modules[:, ::4] *= 2.0
    rest[:, ::4] *= 2.0
    assert stalls(modules, rest).max() == 0


def test_unlike_layers_do_not_stall(healthy, stalls):
    modules, rest = healthy
    modules[:, :, 1::2] *= 4.0  # experts in every other layer
    assert stalls(modules, rest).max() == 0


def test_single_modules_in_which_the_queue_ran_dry(healthy, stalls):
    modules, rest = healthy
    for number in range(0, PASSES, 2):
        modules[1, number, number % LAYERS] += 9 * MODULE_NS
    found = stalls(modules, rest)
    assert found[[0, 2, 3]].max() == 0
    assert found[1, ::2] == pytest.approx(9 * MODULE_NS, rel=0.1)
    assert found[1, 1::2].max() == 0


def test_gaps_between_modules_in_every_pass_are_seen_by_the_peers(healthy, stalls):
    modules, rest = healthy
    rest[1] += 6 * MODULE_NS
    found = stalls(modules, rest)
    assert found[[0, 2, 3]].max() == 0
    assert found[1] == pytest.approx(6 * MODULE_NS, rel=0.1)


def test_gaps_in_every_pass_are_the_devices_own_where_modules_were_launched_long_before(
    healthy, stalls
):
    """As when kernels that no span holds take the time; two thirds of a gap are enough."""
    modules, rest = healthy
    rest[1] += 6 * MODULE_NS
    ahead = np.zeros_like(rest)
    assert stalls(modules, rest, late_ns=ahead).max() == 0
    late = ahead.copy()
    late[1] = 4 * MODULE_NS
    found = stalls(modules, rest, late_ns=late)
    assert found[1] == pytest.approx(6 * MODULE_NS, rel=0.1)


def test_a_pause_now_and_then_stalls_however_long_the_queue_was_again(healthy, stalls):
    """A host that lost its core catches up before the next module that is recorded."""
    modules, rest = healthy
    rest[1, ::3] += 6 * MODULE_NS
    found = stalls(modules, rest, late_ns=np.zeros_like(rest))
    assert found[1, ::3] == pytest.approx(6 * MODULE_NS, rel=0.1)


def test_a_rank_alone_in_its_stage_is_measured_by_its_own_modules(healthy, stalls):
    modules, rest = healthy
    rest[1, ::3] += 6 * MODULE_NS
    found = stalls(modules, rest, stage=[0, 1, 2, 3])
    assert found[1, ::3] == pytest.approx(6 * MODULE_NS, rel=0.1)
    assert found[1, 1::3].max() == 0


def test_a_rank_with_more_beside_its_layers_is_not_accused(healthy, stalls):
    modules, rest = healthy
    rest[0] *= 1.8  # sums the losses of its TP group
    assert stalls(modules, rest).max() == 0


def test_layers_in_turns_of_uneven_sequences_do_not_stall(healthy, stalls):
    """One turn of the layers happens to see longer sequences on the median than the other."""
    modules, rest = healthy
    for longer in (slice(0, 14, 2), slice(1, 7, 2)):
        modules[:, longer] *= 1.4
        rest[:, longer] *= 1.4
    assert stalls(modules, rest, num_turns=2).max() == 0
    modules[1, 5, 3] += 9 * MODULE_NS  # recorded
    modules[2, 5, 4] += 9 * MODULE_NS  # not recorded
    found = stalls(modules, rest, num_turns=2)
    assert found[[1, 2], 5] == pytest.approx(9 * MODULE_NS, rel=0.1)
    assert (found > 0).sum() == 2


def test_few_modules_say_nothing(healthy, stalls):
    modules, rest = healthy
    rest[1, ::3] += 20 * MODULE_NS
    assert stalls(modules[:, :, :3], rest).max() == 0


def test_a_pass_that_waits_for_its_parameters_waits_for_no_host(tmp_path):
    """Rank 0 logs before each iteration: the others wait for its share of their parameters, which
    are gathered beside their first forward pass. What they wait there is not their hosts' doing.
    """
    job = Job(
        dp=4, ranks_per_host=1, layers=("dense",) * 4, num_microbatches=2, num_traced=4,
        first_traced=5, noise=0.001, chip_spread=0.0, host_jitter=0.01, log_every=1,
    )  # fmt: skip
    write_files(Run(job, 5, (), recorded=True), 3, tmp_path)
    timeline = build_timeline(read_trace(tmp_path))
    step_ns = float(np.median(observe(timeline).iteration_ns))
    assert observe(timeline).lost(Cause.HOST).max() < 0.01 * step_ns
    gathered = pc.and_(
        pc.equal(timeline.spans["track"], int(Track.OVERLAPPED)),
        pc.equal(pc.cast(timeline.spans["name"], pa.string()), "all_gather"),
    )
    unseen = replace(timeline, spans=timeline.spans.filter(pc.invert(gathered)))
    assert observe(unseen).lost(Cause.HOST)[1:].min(axis=0).max() > 0.03 * step_ns


def test_only_what_goes_on_alone_counts_as_communication_that_nobody_can_split(index_of):
    """
    backward     0 ── 100
    reduction        80 ────────── 180      its end is a bound
    grad-sync            100 ────────── 200      waits for it: 80 alone
    gather                              200 ── 230      split: 30 of it are known
    all-reduce                              220 ── 260      unmatched, 30 beside nothing
    """
    rows = [
        ("compute", "backward", Track.COMPUTE, 0, 100, -1),
        ("collective", "reduce_scatter", Track.OVERLAPPED, 80, 100, -1),
        ("optimizer", "grad-sync", Track.COMPUTE, 100, 100, -1),
        ("collective", "all_gather", Track.COMMUNICATION, 200, 30, 5),
        ("collective", "all_reduce", Track.OVERLAPPED, 220, 40, -1),
    ]
    names = ("kind", "name", "track", "start_ns", "duration_ns", "wait_ns")
    index = index_of([{"rank": 0} | dict(zip(names, row, strict=True)) for row in rows])
    assert unsplit_time(index).tolist() == [[80.0 + 30.0]]
    known = index_of([{"rank": 0} | dict(zip(names, row, strict=True)) for row in rows[3:4]])
    assert unsplit_time(known).tolist() == [[0.0]]
