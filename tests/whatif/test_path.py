"""The critical path of a step: by hand, against the replay it comes from, on simulated faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from detect.optable import read_op_table, replay_of_op_table
from detect.whatif import Replay, replay_of_timeline
from detect.whatif.graph import sweep
from detect.whatif.path import CriticalPath, Share, critical_path, pieces
from detect.whatif.render import link_text, path_to_json, render_path
from megascan.reader import read_timeline
from megascan.schema import Track
from megascan.simulate import Imbalance
from megascan.timeline import Timeline, equals, numbers
from megascan.topology import Layout
from tests.op_tables import PRODUCTION
from tests.whatif.jobs import LAYOUTS, simulated

ROOT = Path(__file__).resolve().parents[2]
UNEXPLAINED = 0.04
"""Share of an iteration that no hop may explain; with sequence parallelism on H100 it is 0.036."""


def replays() -> dict[str, Callable[[], Replay]]:
    """Name replays of every kind of input."""
    made: dict[str, Callable[[], Replay]] = {
        name: lambda layout=layout: replay_of_timeline(simulated(layout))
        for name, layout in LAYOUTS.items()
    }
    for file in sorted((ROOT / "examples").glob("*.json.gz")):
        made[file.name] = lambda file=file: replay_of_timeline(read_timeline(file))
    for table in sorted(PRODUCTION.glob("*.parquet")):
        made[table.name] = lambda table=table: replay_of_op_table(read_op_table(table))
    return made


@pytest.fixture(params=replays())
def path(request: pytest.FixtureRequest, once: Callable[..., object]) -> CriticalPath:
    return once(request.param, lambda: critical_path(replays()[request.param]()))


def length_s(path: CriticalPath, weights: np.ndarray) -> np.ndarray:
    return sweep(path.replay.graph, lambda node: weights[node][:, None])[0]


def on_path(path: CriticalPath) -> np.ndarray:
    """Mark the (node, lane, step) of all paths."""
    marked = np.zeros(path.replay.weights.shape, dtype=bool)
    for number, step in enumerate(path.steps):
        marked[step.nodes, step.lanes, number] = True
    return marked


def test_its_weights_are_the_replayed_step(path: CriticalPath) -> None:
    weights = path.replay.weights
    sums = [weights[step.nodes, step.lanes, n].sum() for n, step in enumerate(path.steps)]
    np.testing.assert_allclose(sums, path.replay.traced_s, rtol=1e-9)


def test_its_hops_lie_end_to_end_and_are_the_recorded_iteration(path: CriticalPath) -> None:
    for step, replayed_s in zip(path.steps, path.replay.traced_s, strict=True):
        assert (np.diff(step.ends_ns) >= 0).all() and step.ends_ns[0] >= step.begin_ns
        assert (step.idle_ns >= 0).all() and (step.work_ns >= 0).all()
        assert int(step.idle_ns.sum() + step.work_ns.sum()) == step.length_ns
        assert step.length_ns / 1e9 == pytest.approx(replayed_s, rel=UNEXPLAINED)
        listed = list(pieces(path, step))
        assert sum(one.end_ns - one.start_ns for one in listed) == step.length_ns
        assert all(a.end_ns == b.start_ns for a, b in pairwise(listed))


def test_shortening_what_is_not_on_it_changes_nothing(path: CriticalPath) -> None:
    """Not even if all of it took no time at all."""
    weights = np.where(on_path(path), path.replay.weights, 0.0)
    np.testing.assert_allclose(length_s(path, weights), path.replay.traced_s, rtol=1e-12)


def test_shortening_what_is_on_it_shortens_the_step(path: CriticalPath) -> None:
    """Each of the path's longest operations, by a hundredth of itself, on all who take part."""
    members = {node: group for group in path.replay.graph.groups for node in group.nodes}
    for number, step in enumerate(path.steps[:3]):
        weights_s = path.replay.weights[step.nodes, step.lanes, number]
        for hop in np.argsort(weights_s)[-3:]:
            weights, node = path.replay.weights.copy(), int(step.nodes[hop])
            if path.replay.graph.nodes[node].is_local:
                weights[node, step.lanes[hop], number] *= 0.99
            else:
                weights[list(members[node].nodes), :, number] *= 0.99
            saved = path.replay.traced_s[number] - length_s(path, weights)[number]
            assert 0 < saved <= 0.01 * weights_s[hop] + 1e-12


def test_the_shares_are_the_whole_of_every_step(path: CriticalPath) -> None:
    for one in (*path.makeups, path.mean):
        assert sum(one.shares.values()) == pytest.approx(1, abs=1e-9)
        assert min(one.shares.values()) >= 0 and 0 <= one.bubble < 1
        assert (one.main_stage >= 0) == (path.replay.graph.num_stages > 1)
    lengths = [step.length_ns for step in path.steps]
    assert path.mean.length_ns == pytest.approx(np.mean(lengths))
    text, record = render_path(path), path_to_json(path)
    assert len(record["iterations"]) == len(path.steps)
    assert str(path.steps[0].iteration) in text


def test_a_replay_of_a_trace_explains_the_iteration(path: CriticalPath) -> None:
    assert path.mean.idle < UNEXPLAINED


@pytest.fixture
def two_ranks(timeline: Callable[..., Timeline]) -> Timeline:
    """Two DP ranks, 50 ms, and 2 ms of nothing before the optimizer of rank 0.

    rank 0:  forward 0-10   all_reduce 10-45 (30 of it waiting)   …   optimizer 47-50
    rank 1:  forward 0-40   all_reduce 40-45                          optimizer 45-46
    """
    spans = []
    for rank, busy, end in ((0, 10.0, 50.0), (1, 40.0, 46.0)):
        common = {"rank": rank, "track": int(Track.COMPUTE), "iteration": 1}
        for kind, name, low, high in (
            ("iteration", "iteration", 0.0, end),
            ("compute", "forward", 0.0, busy),
            ("collective", "all_reduce", busy, 45.0),
            ("optimizer", "optimizer", 47.0 if rank == 0 else 45.0, end),
        ):
            one = {**common, "kind": kind, "name": name, "start_ns": low, "duration_ns": high - low}
            if kind == "collective":
                wait = 40.0 - busy
                one |= {"op": "all_reduce", "group": "dp@0", "match": 0, "wait_ns": wait}
                one |= {"transfer_ns": 5.0, "track": int(Track.COMMUNICATION)}
            if name == "forward":
                one |= {"microbatch": 0, "chunk": 0}
            spans.append(one)
    return timeline(Layout(dp=2), spans, {"dp@0": (0, 1)})


def test_by_hand(two_ranks: Timeline) -> None:
    path = critical_path(replay_of_timeline(two_ranks))
    found = [
        (one.rank, one.share, one.name, (one.end_ns - one.start_ns) / 1e6)
        for one in pieces(path, path.steps[0])
    ]
    assert found == [
        (1, Share.COMPUTE, "forward, microbatch 0", 40.0),
        (0, Share.TRANSFER, "dp-all_reduce", 5.0),
        (0, Share.HOST, "host", 2.0),
        (0, Share.COMPUTE, "optimizer", 3.0),
    ]
    mean = path.mean
    assert mean.compute == pytest.approx({1: 0.8, 0: 0.06})
    assert [(link.op, link.ranks, ratio) for link, ratio in mean.transfer.items()] == [
        ("dp-all_reduce", (0, 1), pytest.approx(0.1))
    ]
    assert mean.host == pytest.approx({0: 0.04}) and mean.idle == 0 and mean.main_stage == -1


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_is_as_long_as_the_iteration(name: str) -> None:
    timeline = simulated(LAYOUTS[name])
    table = timeline.spans.filter(equals(timeline.spans, "kind", "iteration"))
    rank, iteration, start, length = (
        numbers(table, column) for column in ("rank", "iteration", "start_ns", "duration_ns")
    )
    path = critical_path(replay_of_timeline(timeline))
    stages = [timeline.layout.coordinates(int(one)).pp for one in rank]
    for step in path.steps:
        (first,) = np.flatnonzero(
            (iteration == step.iteration) & (rank == path.rank(step.nodes[0], step.lanes[0]))
        )
        (last,) = np.flatnonzero(
            (iteration == step.iteration) & (rank == path.rank(step.nodes[-1], step.lanes[-1]))
        )
        whole = iteration == step.iteration
        ended = (start + length)[iteration == step.iteration - 1].max(initial=0)
        earliest = max(start[whole & (np.array(stages) == 0)].min(), ended)
        begin = min(start[first], earliest) if stages[first] == 0 else start[first]
        assert step.begin_ns == begin
        assert step.ends_ns[-1] == start[last] + length[last]
        latest = (start + length)[whole].max()
        assert latest - step.ends_ns[-1] <= 0.01 * step.length_ns, "it ends with the last rank"


@pytest.mark.parametrize("name", ["plain", "deep", "interleaved", "no pipeline"])
def test_a_slow_rank_has_most_of_the_compute(name: str) -> None:
    layout = LAYOUTS[name]
    slow = critical_path(replay_of_timeline(simulated(layout, "rank=1,kind=compute,factor=3"))).mean
    assert next(iter(slow.compute)) == 1
    healthy = critical_path(replay_of_timeline(simulated(layout))).mean
    assert slow.compute[1] > healthy.compute.get(1, 0.0) + 0.1


def test_a_slow_link_has_most_of_the_transfer() -> None:
    fault = "kind=link,rank=0,peer=2,factor=40"
    mean = critical_path(replay_of_timeline(simulated(LAYOUTS["deep"], fault))).mean
    link = next(iter(mean.transfer))
    assert link.is_message and set(link.ranks) == {0, 2}


def test_a_pause_of_the_host_is_the_host_s() -> None:
    fault = "rank=1,kind=gc,factor=1.3"
    layout = Layout(dp=4)
    mean = critical_path(replay_of_timeline(simulated(layout, fault, device="cpu"))).mean
    assert next(iter(mean.host)) == 1 and mean.host[1] > 0.01


def test_a_heavy_stage_is_the_main_one_and_the_rest_is_bubble() -> None:
    heavy = Imbalance(stage_ratio={2: 2.0})
    few, many = (
        critical_path(replay_of_timeline(simulated(LAYOUTS["deep"], imbalance=heavy, **job))).mean
        for job in ({}, {"num_microbatches": 16})
    )
    assert few.main_stage == many.main_stage == 2
    # it fills and drains once, however many microbatches there are
    assert 0.2 < few.bubble < 0.45
    assert many.bubble * many.length_ns == pytest.approx(few.bubble * few.length_ns, rel=0.1)


def test_messages_are_named_in_their_direction() -> None:
    mean = critical_path(replay_of_timeline(simulated(LAYOUTS["deep"]))).mean
    messages = {(link.op, link.ranks) for link in mean.transfer if link.is_message}
    assert {op for op, _ in messages} == {"forward", "backward"}
    for op, (source, target) in messages:
        assert target - source == (2 if op == "forward" else -2)


def test_messages_of_no_direction_have_a_name() -> None:
    """As profiles have them."""
    timeline = simulated(LAYOUTS["deep"])
    place = timeline.spans.schema.get_field_index("direction")
    none = pa.array([""] * timeline.spans.num_rows).dictionary_encode()
    spans = timeline.spans.set_column(place, timeline.spans.schema.field(place), none)
    mean = critical_path(replay_of_timeline(replace(timeline, spans=spans))).mean
    names = [link_text(link) for link in mean.transfer if link.is_message]
    assert names
    assert all(name.startswith("message") for name in names)


def test_a_missing_rank_leaves_no_hole() -> None:
    timeline = simulated(LAYOUTS["plain"], missing_ranks=(3,))
    path = critical_path(replay_of_timeline(timeline))
    for step in path.steps:
        assert step.length_ns / 1e9 == pytest.approx(path.replay.traced_s.mean(), rel=0.05)


def test_equal_ranks_stay_with_their_own_work() -> None:
    """Where several are last at once the path does not jump to and fro."""
    replay = replay_of_timeline(simulated(Layout(dp=4)))
    flat = replace(replay, weights=np.broadcast_to(replay.weights[:, :1], replay.weights.shape))
    assert all(len(set(step.lanes.tolist())) == 1 for step in critical_path(flat).steps)


def test_it_passes_every_operation_once_at_most(path: CriticalPath) -> None:
    for step in path.steps:
        assert len({*zip(step.nodes.tolist(), step.lanes.tolist(), strict=True)}) == len(step.nodes)
