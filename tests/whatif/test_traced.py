"""Replays of timelines: hand-made ones with known answers, simulated ones of every layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from detect.report import Cause
from detect.whatif import Replay, replay_of_timeline, saved_by_fixing
from detect.whatif.graph import FORWARD, HOST, Node, sweep
from detect.whatif.savings import ReplayedCosts
from detect.whatif.slowness import analyze, keep_each_rank, keep_places
from detect.whatif.traced import DraftNode, StageDraft, _after_all_exchange
from megascan.errors import InputError
from megascan.schema import Granularity, Track
from megascan.simulate import Imbalance
from megascan.timeline import Timeline
from megascan.topology import Layout
from tests.whatif.jobs import LAYOUTS, simulated

Span = dict[str, object]


def span(rank: int, kind: str, name: str, start: float, end: float, **more: object) -> Span:
    return {
        "rank": rank,
        "kind": kind,
        "name": name,
        "track": int(Track.COMPUTE),
        "iteration": 1,
        "start_ns": start,
        "duration_ns": end - start,
        "self_ns": end - start,
        **more,
    }


def collective(
    rank: int, start: float, end: float, wait: float, op: str = "all_reduce", **more: object
) -> Span:
    return span(
        rank,
        "collective",
        op,
        start,
        end,
        op=op,
        wait_ns=wait,
        transfer_ns=end - start - wait,
        self_ns=-1,
        **{"group": "dp@0", "match": 0, "track": int(Track.COMMUNICATION), **more},
    )


def passes(rank: int, forward: tuple[float, float], backward: tuple[float, float]) -> list[Span]:
    slot = {"microbatch": 0, "chunk": 0}
    return [
        span(rank, "compute", "forward", *forward, phase="forward", **slot),
        span(rank, "compute", "backward", *backward, phase="backward", **slot),
    ]


@pytest.fixture
def two_replicas(timeline: Callable[..., Timeline]) -> Timeline:
    """Two DP ranks, 50 ms; rank 1's forward takes 20 ms instead of 10.

    rank 0:  forward 0-10   backward 10-30  all_reduce 30-45 (10 of it waiting)  optimizer 45-50
    rank 1:  forward 0-20   backward 20-40  all_reduce 40-45                     optimizer 45-50
    """
    spans = []
    for rank, late in ((0, 0.0), (1, 10.0)):
        spans += [
            span(rank, "iteration", "iteration", 0, 50),
            *passes(rank, (0, 10 + late), (10 + late, 30 + late)),
            collective(rank, 30 + late, 45, 10 - late),
            span(rank, "optimizer", "optimizer", 45, 50),
        ]
    return timeline(Layout(dp=2), spans, {"dp@0": (0, 1)})


def test_two_replicas_by_hand(two_replicas: Timeline) -> None:
    replay = replay_of_timeline(two_replicas)
    result = analyze(replay)
    assert result.traced_s == pytest.approx(0.050)
    assert result.measured_s == pytest.approx(0.050)
    assert result.ideal_s == pytest.approx(0.015 + 0.020 + 0.005 + 0.005)
    assert result.type_ratio["forward-compute"] == pytest.approx(50 / 45)
    assert result.type_ratio["backward-compute"] == pytest.approx(1)
    assert result.rank_ratio[0].tolist() == pytest.approx([1, 50 / 45])
    transfers = replay.weights[~replay.graph.is_local]
    np.testing.assert_allclose(transfers, 0.005)


def test_fixing_a_rank_by_hand(two_replicas: Timeline) -> None:
    saving = saved_by_fixing(replay_of_timeline(two_replicas), [1])
    assert saving.step_s == pytest.approx(0.050)
    assert saving.fixed_step_s == pytest.approx(0.040)
    assert saving.speedup == pytest.approx(1.25)
    assert saving.gpu_hours_per_day == pytest.approx(2 * 24 * 0.2)
    assert saving.gpu_hours == pytest.approx(2 * 0.010 / 3600)


def test_a_rank_that_is_not_there(two_replicas: Timeline) -> None:
    with pytest.raises(InputError, match="rank 7 is not in this trace, which has ranks 0 to 1"):
        saved_by_fixing(replay_of_timeline(two_replicas), [7])


def test_overlapped_gradients_are_waited_for_in_the_optimizer(
    timeline: Callable[..., Timeline],
) -> None:
    """The reduction is launched 20 ms into the backward and takes 26; grad-sync waits 6 of them."""
    spans = []
    for rank in range(2):
        spans += [
            span(rank, "iteration", "iteration", 0, 50),
            *passes(rank, (0, 10), (10, 40)),
            collective(rank, 20, 46, 0, track=int(Track.OVERLAPPED)),
            span(rank, "optimizer", "grad-sync", 40, 46),
            span(rank, "optimizer", "optimizer", 46, 50),
        ]
    replay = replay_of_timeline(timeline(Layout(dp=2), spans, {"dp@0": (0, 1)}))
    assert replay.traced_s.tolist() == pytest.approx([0.050])
    work = replay.weights[replay.graph.of_type("optimizer"), 0, 0].sum()
    assert work == pytest.approx(0.004), "the wait in grad-sync is no work of the rank"
    # without the communication the backward alone decides: 40 + 4
    weights = np.where(replay.graph.is_local[:, None, None], replay.weights, 0.0)
    assert sweep(replay.graph, lambda n: weights[n][:, None]).item() == pytest.approx(0.044)


@pytest.mark.parametrize("group", ["dp@0", "dp_cp@0", "expt_dp@0", "dp-dp_shard@0"])
def test_gradients_that_arrive_early_hold_up_no_later_pass(
    timeline: Callable[..., Timeline], group: str
) -> None:
    """The reduction ends at 20 ms, the second backward begins at 25, the optimizer at 40."""
    spans = []
    for rank in range(2):
        first, second = passes(rank, (0, 5), (10, 25)), passes(rank, (5, 10), (25, 40))
        spans += [
            span(rank, "iteration", "iteration", 0, 50),
            first[0],
            {**second[0], "microbatch": 1},
            first[1],
            collective(rank, 12, 20, 0, group=group, track=int(Track.OVERLAPPED)),
            {**second[1], "microbatch": 1},
            span(rank, "optimizer", "optimizer", 40, 50),
        ]
    replay = replay_of_timeline(timeline(Layout(dp=2), spans, {group: (0, 1)}))
    longer = np.where(replay.graph.is_local[:, None, None], replay.weights, 0.026)
    assert sweep(replay.graph, lambda n: longer[n][:, None]).item() == pytest.approx(0.050)


def test_garbage_collection_is_told_from_compute(timeline: Callable[..., Timeline]) -> None:
    """Rank 1's forward holds a pause of 10 ms; without pauses all are equal."""
    spans = []
    for rank, late in ((0, 0.0), (1, 10.0), (2, 0.0)):
        spans += [
            span(rank, "iteration", "iteration", 0, 50),
            *passes(rank, (0, 10 + late), (10 + late, 30 + late)),
            collective(rank, 30 + late, 45, 10 - late),
            span(rank, "optimizer", "optimizer", 45, 50),
        ]
    spans.append(span(1, "gc", "gc-generation-2", 3, 13, track=int(Track.HOST)))
    spans.sort(key=lambda s: (s["rank"], s["start_ns"]))
    result = analyze(replay_of_timeline(timeline(Layout(dp=3), spans, {"dp@0": (0, 1, 2)})))
    assert result.ideal_s == pytest.approx(0.040)
    assert result.type_ratio["gc"] == pytest.approx(50 / 40)
    assert result.type_ratio["forward-compute"] == pytest.approx(1)


def test_no_common_iteration_is_an_error(timeline: Callable[..., Timeline]) -> None:
    spans = [span(0, "iteration", "iteration", 0, 50, iteration=1)]
    spans += [span(1, "iteration", "iteration", 0, 50, iteration=2)]
    for one in spans:
        rank, iteration = int(str(one["rank"])), int(str(one["iteration"]))
        spans = [*spans, {**span(rank, "optimizer", "optimizer", 1, 2), "iteration": iteration}]
    with pytest.raises(InputError, match="none of the 2 traced iterations ran the same operations"):
        replay_of_timeline(timeline(Layout(dp=2), spans, {}))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_replay_takes_as_long_as_the_run(name: str) -> None:
    replay = replay_of_timeline(simulated(LAYOUTS[name]))
    assert len(replay.steps) == 4, "two of six iterations are warm-up"
    assert replay.num_gpus == LAYOUTS[name].world_size
    assert analyze(replay).error_ratio < 0.01


@pytest.mark.parametrize("name", ["plain", "interleaved", "no pipeline", "context and experts"])
def test_exact_ranks_agree_with_one_scenario_each(name: str) -> None:
    replay = replay_of_timeline(simulated(LAYOUTS[name]))
    ranks_s, _ = keep_each_rank(replay)
    stages, lanes = replay.ranks.shape
    kept = np.eye(stages * lanes, dtype=bool).reshape(-1, stages, lanes)
    brute = keep_places(replay, kept).reshape(ranks_s.shape)
    np.testing.assert_allclose(ranks_s, brute)


@pytest.mark.parametrize("name", ["plain", "deep", "interleaved", "no pipeline"])
def test_a_slow_rank_has_the_highest_ratio_and_the_truth_is_saved(name: str) -> None:
    """What fixing it would bring is known: the same job, same seed, without the fault."""
    layout = LAYOUTS[name]
    result = analyze(replay_of_timeline(simulated(layout, "rank=1,kind=compute,factor=1.5")))
    healthy = analyze(replay_of_timeline(simulated(layout)))
    saving = saved_by_fixing(result.replay, [1])
    assert saving.speedup > 1.03
    assert saving.fixed_step_s == pytest.approx(healthy.measured_s, rel=0.02)
    if name in ("plain", "no pipeline"):
        assert result.replay.ranks.ravel()[result.rank_ratio.argmax()] == 1


def test_fixing_a_healthy_rank_brings_nothing() -> None:
    replay = replay_of_timeline(simulated(LAYOUTS["plain"]))
    for rank in range(8):
        assert saved_by_fixing(replay, [rank]).speedup == pytest.approx(1, abs=0.01)


def test_fixing_a_link() -> None:
    layout = LAYOUTS["deep"]
    faults = ("kind=link,rank=0,peer=2,factor=40",)
    slow = replay_of_timeline(simulated(layout, *faults))
    healthy = replay_of_timeline(simulated(layout))
    assert saved_by_fixing(slow, [0, 2]).speedup == pytest.approx(1, abs=0.01)
    saving = saved_by_fixing(slow, [0, 2], links=True)
    assert saving.speedup > 1.05
    assert saving.fixed_step_s == pytest.approx(float(healthy.measured.mean()), rel=0.03)


def test_a_heavy_stage_is_no_rank() -> None:
    heavy = Imbalance(stage_ratio={1: 2.5})
    result = analyze(replay_of_timeline(simulated(LAYOUTS["deep"], imbalance=heavy)))
    assert int(np.argmax(result.stage_ratio)) == 1
    assert result.factors.stage > 1.1
    assert result.factors.worker < 1.02
    assert saved_by_fixing(result.replay, [2]).speedup < 1.01


def test_a_missing_rank_is_replayed_like_its_peers() -> None:
    replay = replay_of_timeline(simulated(LAYOUTS["plain"], missing_ranks=(3,)))
    assert replay.notes[0].startswith("1 rank(s) without a usable record (3)")
    assert np.isfinite(replay.weights).all()
    assert analyze(replay).error_ratio < 0.02


def test_a_stage_without_any_record_is_an_error() -> None:
    with pytest.raises(InputError, match="no replica of the model has a usable record"):
        replay_of_timeline(simulated(LAYOUTS["plain"], missing_ranks=(4, 5, 6, 7)))


def test_without_collectives_a_tensor_group_counts_as_one() -> None:
    fault, base = "rank=1,kind=compute,factor=1.5", Granularity.BASE
    replay = replay_of_timeline(simulated(LAYOUTS["plain"], fault, granularity=base))
    assert replay.shared_work == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert "counts as one worker" in replay.notes[-1]
    saving = saved_by_fixing(replay, [1])
    assert saving.ranks == (0, 1)
    assert saving.speedup > 1.05


@pytest.mark.parametrize("axis", ["tp", "ep"])
def test_mates_that_wait_unseen_are_mended_with_the_slow_one(axis: str) -> None:
    """Communication inside passes that no span shows: its waiting is in the mates' own times."""
    layout = Layout(tp=2, dp=4) if axis == "tp" else Layout(dp=4, ep=2)
    timeline = simulated(layout, "rank=1,kind=compute,factor=1.5")
    groups = timeline.spans.column("group").to_pylist()
    inside = np.array([str(group).startswith(axis) for group in groups])
    hidden = replace(timeline, spans=timeline.spans.filter(pa.array(~inside)))
    assert inside.any()
    told, untold = (
        saved_by_fixing(replay_of_timeline(one), [1]).speedup for one in (timeline, hidden)
    )
    assert told > 1.1
    assert untold == pytest.approx(told, abs=0.03)


def test_a_mended_host_scatters_like_its_peers() -> None:
    """Ranks 0 and 1 of a TP group pause in turn: each waits for the other's pauses, too."""
    replay = replay_of_timeline(simulated(LAYOUTS["no pipeline"]))
    weights, longest = replay.weights.copy(), float(replay.weights.max())
    local = np.flatnonzero(replay.graph.is_local)
    weights[local[::2], 0] += longest
    weights[local[1::2], 1] += longest
    paused = replace(replay, weights=weights)
    sound_s = float(replay.traced_s.mean())
    as_host = saved_by_fixing(paused, [0, 1], scatters=True).fixed_step_s
    assert as_host == pytest.approx(sound_s, rel=0.02)
    assert saved_by_fixing(paused, [0, 1]).fixed_step_s > 1.1 * sound_s


def test_a_rank_that_collects_garbage_costs_its_pauses_and_a_slow_device_its_sum() -> None:
    """Rank 0 stands still once in a step, inside a pass that TP communication cuts in pieces. Were
    all of its pieces quicker by as much, most of the pause would stay. The device of the look-alike
    is slower by as much in all pieces, and is mended either way.
    """
    replay = replay_of_timeline(simulated(LAYOUTS["no pipeline"]))
    pass_like = [node.optype == FORWARD for node in replay.graph.nodes]
    own = np.ix_(np.flatnonzero(pass_like), [0])
    paused, slow = replay.weights.copy(), replay.weights.copy()
    paused[own[0][0], 0] += replay.traced_s
    slow[own] *= 1.0 + replay.traced_s / slow[own].sum(axis=0)
    for weights in (paused, slow):
        job = replace(replay, weights=weights)
        told = ReplayedCosts(lambda job=job: job).ratio((0,), (Cause.GC,), (1, 99))
        assert told == pytest.approx(float(job.traced_s.mean() / replay.traced_s.mean()), rel=0.02)


def test_a_mended_loader_is_late_as_often_as_its_peers() -> None:
    """Each rank is late once in a while, and the slow one always: as its peers are late in other
    steps, it will be, too, and not by the median of the step, which is none.
    """
    replay = replay_of_timeline(simulated(LAYOUTS["no pipeline"]))
    weights, late_s = replay.weights.copy(), float(replay.traced_s.mean())
    node = int(np.flatnonzero(replay.graph.is_local)[0])
    nodes = list(replay.graph.nodes)
    nodes[node] = replace(nodes[node], optype="data-loading")
    steps = np.arange(weights.shape[2])
    for lane in range(replay.num_lanes):  # in turn
        weights[node, lane] += late_s * (steps % replay.num_lanes == lane)
    sound = replace(replay, graph=replace(replay.graph, nodes=tuple(nodes)), weights=weights)
    slow = weights.copy()
    slow[node, 0] = weights[node].max()
    mended = saved_by_fixing(replace(sound, weights=slow), [0], scatters=True)
    assert mended.fixed_step_s > 1.2 * late_s, "others are late in most steps all the same"
    assert mended.fixed_step_s <= mended.step_s


def test_messages_beside_compute_may_come_in_any_order(timeline: Callable[..., Timeline]) -> None:
    """A message begins when its stream is free: behind the pass in one iteration, within the next
    pass in another. Both iterations are replayed.
    """
    spans = []
    for iteration, begin in ((3, 10.0), (4, 12.0), (5, 10.0), (6, 12.0)):
        for rank, op in ((0, "send"), (1, "recv")):
            at = 100.0 * iteration
            talk: Span = {"op": op, "direction": "forward", "peer": 1 - rank, "microbatch": 0}
            talk |= {"group": "pp@0", "match": iteration, "track": int(Track.OVERLAPPED)}
            talk |= {"wait_ns": 0.0, "transfer_ns": 5.0, "self_ns": -1}
            first = span(rank, "compute", "forward", at, at + 10, microbatch=0, chunk=0)
            second = span(rank, "compute", "forward", at + 11, at + 30, microbatch=1, chunk=0)
            message = span(rank, "p2p", f"{op}_forward", at + begin, at + begin + 5, **talk)
            whole = span(rank, "iteration", "iteration", at, at + 50)
            spans += [{**one, "iteration": iteration} for one in (whole, first, second, message)]
    made = timeline(Layout(pp=2), spans, {"pp@0": (0, 1)})
    assert replay_of_timeline(made).steps.tolist() == [3, 4, 5, 6]


def test_what_mostly_runs_beside_compute_does_so_always(timeline: Callable[..., Timeline]) -> None:
    """A profile tells by what lies beside a collective; here a pass does in three iterations of
    four.
    """
    spans = []
    for iteration in (3, 4, 5, 6):
        at = 100.0 * iteration
        track = Track.COMMUNICATION if iteration == 5 else Track.OVERLAPPED
        for rank in range(2):
            here = [
                span(rank, "iteration", "iteration", at, at + 50),
                *passes(rank, (at, at + 10), (at + 10, at + 40)),
                collective(rank, at + 20, at + 46, 0, track=int(track)),
                span(rank, "optimizer", "optimizer", at + 46, at + 50),
            ]
            spans += [{**one, "iteration": iteration, "match": iteration} for one in here]
    replay = replay_of_timeline(timeline(Layout(dp=2), spans, {"dp@0": (0, 1)}))
    assert replay.steps.tolist() == [3, 4, 5, 6]


def test_who_waits_unseen_for_a_slow_link_is_mended_with_it() -> None:
    """The norm of the gradients is reduced inside the optimizer: there all others wait for rank 1,
    which arrives last and waits for nobody.
    """
    replay = replay_of_timeline(simulated(LAYOUTS["no pipeline"]))
    weights, sound_s = replay.weights.copy(), float(replay.traced_s.mean())
    late = next(group for group in replay.graph.groups if group.partition.startswith("dp"))
    labels = replay.graph.partitions[late.partition]
    slow = labels == labels[1]
    weights[np.ix_(late.nodes, np.flatnonzero(slow))] += sound_s
    weights[np.ix_(replay.graph.of_type("optimizer"), np.flatnonzero(~slow))] += sound_s
    ranks = replay.ranks[0, slow].tolist()
    mended = saved_by_fixing(replace(replay, weights=weights), ranks, links=True)
    assert mended.step_s > 1.9 * sound_s
    assert mended.fixed_step_s == pytest.approx(sound_s, rel=0.02)


def test_a_gap_of_one_other_rank_is_no_waiting_for_a_slow_link() -> None:
    """All ranks but those behind the link wait for it between spans; one loads there besides."""
    replay = replay_of_timeline(simulated(Layout(tp=2, dp=4)))
    weights, sound_s = replay.weights.copy(), float(replay.traced_s.mean())
    late = next(group for group in replay.graph.groups if group.partition.startswith("dp"))
    labels = replay.graph.partitions[late.partition]
    slow = labels == labels[1]
    gap, alone = replay.graph.of_type(HOST)[-1], int(np.flatnonzero(~slow)[-1])
    weights[np.ix_(late.nodes, np.flatnonzero(slow))] += sound_s
    weights[gap, ~slow] += sound_s
    ranks = replay.ranks[0, slow].tolist()
    for loads, mended_s in ((0.0, sound_s), (sound_s, 2 * sound_s)):
        weights[gap, alone] += loads
        mended = saved_by_fixing(replace(replay, weights=weights.copy()), ranks, links=True)
        assert mended.fixed_step_s == pytest.approx(mended_s, rel=0.03)


@pytest.mark.parametrize(("ranks", "least", "most"), [((0, 1), 1.0, 1.01), ((0,), 1.05, 4.0)])
def test_collectives_with_other_ranks_are_no_transfers_between_those_of_a_link(
    ranks: tuple[int, ...], least: float, most: float
) -> None:
    """All four ranks are one TP group: what ranks 0 and 1 send each other is not all that it does,
    while everything that rank 0 alone sends is slow.
    """
    replay = replay_of_timeline(simulated(Layout(tp=4)))
    costs = ReplayedCosts(lambda: replay)
    told = costs.ratio(ranks, (Cause.LINK,), (1, 99), slowdown=4.0)
    assert told is not None and least <= told <= most


def test_ranks_without_peers_are_judged_by_other_stages() -> None:
    fault = "rank=0,kind=compute,factor=1.5"
    replay = replay_of_timeline(simulated(Layout(pp=2), fault))
    saving = saved_by_fixing(replay, [0])
    assert saving.compared_with == "stages"
    assert saving.speedup > 1.05
    alone = saved_by_fixing(replay_of_timeline(simulated(Layout(), fault)), [0])
    assert alone.compared_with == "nobody"
    assert alone.saved_s == 0


def test_gaps_that_do_not_hold_what_a_host_loses_tell_no_cost(
    timeline: Callable[..., Timeline],
) -> None:
    """No passes were marked; rank 0 arrives 88 ms later than rank 1 at an all-reduce.

    Of the gaps of rank 0 the replay knows 88 ms, and tells what they cost. What is lost beside
    transfers that are under way is in no gap.
    """
    spans = [
        *(span(rank, "iteration", "iteration", 0, 101) for rank in (0, 1)),
        collective(0, 90, 100, 0),
        collective(1, 2, 100, 88),
    ]
    costs = ReplayedCosts(
        lambda: replay_of_timeline(timeline(Layout(dp=2), spans, {"dp@0": (0, 1)}))
    )
    host, lost_ns = (Cause.HOST,), 88e6
    assert costs.ratio((0,), host, (1, 1), lost_ns) == pytest.approx(101 / 13, rel=0.02)
    assert costs.ratio((0,), host, (1, 1), 5 * lost_ns) is None
    assert costs.ratio((0,), (Cause.LINK,), (1, 1), 5 * lost_ns) is not None


def pipeline_of_two(
    early: tuple[float, float], ranks: tuple[int, int] = (0, 1), ahead: float = 0
) -> list[Span]:
    """Two stages of a replica; the second is through with its passes 20 ms before the first.

    stage 0:  forward 0-20   backward 20-45   optimizer 45-50
    stage 1:  forward 0-10   backward 10-25   optimizer as given

    The clocks of its `ranks` are `ahead` ms ahead.
    """
    spans = []
    for rank, (turn, done), (begin, end) in zip(
        ranks, ((20, 45), (10, 25)), ((45, 50), early), strict=True
    ):
        spans += [
            span(rank, "iteration", "iteration", ahead, ahead + 50),
            *passes(rank, (ahead, ahead + turn), (ahead + turn, ahead + done)),
            span(rank, "optimizer", "optimizer", ahead + begin, ahead + end),
        ]
    return spans


def optimizer_ms(replay: Replay) -> list[float]:
    """Return what the optimizer step takes in stage 0 and in stage 1, the mean of all lanes."""
    nodes = replay.graph.of_type("optimizer")
    stages = replay.graph.stage[nodes]
    return [1e3 * float(replay.weights[nodes[stages == n]].mean()) for n in (0, 1)]


def test_waiting_for_a_stage_in_the_optimizer_is_no_work(timeline: Callable[..., Timeline]) -> None:
    """Nobody recorded the norm's exchange: 20 of 25 ms are waiting, gone with quicker passes."""
    replay = replay_of_timeline(timeline(Layout(pp=2), pipeline_of_two((25, 50)), {}))
    assert optimizer_ms(replay) == pytest.approx([5, 5])
    assert replay.traced_s.tolist() == pytest.approx([0.05])
    is_pass = np.array([node.optype != "optimizer" for node in replay.graph.nodes])
    quick = is_pass & (replay.graph.stage == 0)
    halved = np.where(quick[:, None, None], replay.weights / 2, replay.weights)
    assert sweep(replay.graph, lambda node: halved[node][:, None, :]).item() == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("step", "taken"),
    [((25, 30), 5), ((25, 44), 19), ((43, 50), 7)],
    ids=["through before the last begins", "just before it", "mostly work"],
)
def test_a_stage_that_waits_for_nobody_keeps_its_optimizer(
    timeline: Callable[..., Timeline], step: tuple[float, float], taken: float
) -> None:
    replay = replay_of_timeline(timeline(Layout(pp=2), pipeline_of_two(step), {}))
    assert optimizer_ms(replay) == pytest.approx([5, taken])
    assert all(len(group.nodes) == 1 for group in replay.graph.groups)


def test_steps_that_end_as_the_last_one_begins_are_waiting_all_through(
    timeline: Callable[..., Timeline],
) -> None:
    """By clocks that are a little apart: it ends 0.2 ms before the last one begins."""
    replay = replay_of_timeline(timeline(Layout(pp=2), pipeline_of_two((25, 44.8)), {}))
    assert optimizer_ms(replay) == pytest.approx([5, 0])


@pytest.mark.parametrize(
    ("layout", "second", "met"),
    [
        (Layout(pp=2, dp=2, order="tp-cp-ep-pp-dp"), (2, 3), "replicas"),
        (Layout(pp=2, tp=2), (1, 3), "lanes"),
    ],
    ids=["replicas", "TP mates"],
)
def test_ranks_whose_clocks_are_far_apart_meet_among_themselves(
    timeline: Callable[..., Timeline], layout: Layout, second: tuple[int, int], met: str
) -> None:
    first = (0, 1) if met == "replicas" else (0, 2)
    spans = [*pipeline_of_two((25, 50), first), *pipeline_of_two((25, 50), second, ahead=100)]
    replay = replay_of_timeline(timeline(layout, spans, {}))
    assert optimizer_ms(replay) == pytest.approx([5, 5])
    assert list(replay.graph.partitions) == [met]


def test_where_stages_exchange_the_norm_their_steps_stay_as_they_are(
    timeline: Callable[..., Timeline],
) -> None:
    """The exchange is recorded: stage 1 waits in it for 20 ms, and not in what stands before it."""
    spans = pipeline_of_two((25, 50))
    group = {"group": "mp@0"}
    spans += [collective(0, 46, 47, 0, **group), collective(1, 26, 47, 20, **group)]
    replay = replay_of_timeline(timeline(Layout(pp=2), spans, {"mp@0": (0, 1)}))
    graph = replay.graph
    steps = set(graph.of_type("optimizer").tolist())
    assert len(steps) == 4
    assert all(len(one.nodes) == 1 for one in graph.groups if steps & set(one.nodes))
    assert replay.traced_s.tolist() == pytest.approx([0.05])
    halved = np.where((graph.stage == 0)[:, None, None], replay.weights / 2, replay.weights)
    assert sweep(graph, lambda node: halved[node][:, None, :]).item() < 0.031


def reducing_pipeline(ends: tuple[float, float]) -> list[Span]:
    """Two stages of two replicas, of which the second is through 20 ms before the first.

    stage 0 (ranks 0 and 1):  forward 0-10   backward 10-30  reduce 30-40       optimizer 45-50
    stage 1 (ranks 2 and 3):  forward 0-5    backward 5-10   reduce 10 to `ends`, optimizer 45-50
    """
    spans = []
    for rank in range(4):
        turn, begin, end = ((10, 30, 40), (5, 10, ends[rank - 2]))[rank // 2]
        group = f"dp@{rank // 2}"
        spans += [
            span(rank, "iteration", "iteration", 0, 50),
            *passes(rank, (0, turn), (turn, begin)),
            collective(rank, begin, end, 0, group=group, match=rank // 2),
            span(rank, "optimizer", "optimizer", 45, 50),
        ]
    return spans


OF_STAGES = {"dp@0": (0, 1), "dp@1": (2, 3)}
TWO_STAGES = Layout(pp=2, dp=2)


def reductions_ms(replay: Replay) -> list[float]:
    """Return what the reductions of stage 0 and stage 1 take, the mean of all lanes."""
    nodes = replay.graph.of_type("dp-all_reduce")
    return [1e3 * float(replay.weights[node].mean()) for node in nodes]


def test_the_last_stage_waits_in_its_reduction_for_the_first(
    timeline: Callable[..., Timeline],
) -> None:
    """Both reduce the word embedding's gradients together: 20 of 30 ms are waiting."""
    spans = reducing_pipeline((40, 40.1))
    replay = replay_of_timeline(timeline(TWO_STAGES, spans, OF_STAGES))
    assert reductions_ms(replay) == pytest.approx([10, 10], abs=0.2)
    assert replay.traced_s.tolist() == pytest.approx([0.05])
    quick = np.array([node.optype.endswith("compute") for node in replay.graph.nodes])
    quick &= replay.graph.stage == 0
    halved = np.where(quick[:, None, None], replay.weights / 2, replay.weights)
    assert sweep(replay.graph, lambda node: halved[node][:, None, :]).item() == pytest.approx(0.035)


@pytest.mark.parametrize("ends", [(36, 36), (44, 44)], ids=["before", "after"])
def test_reductions_that_do_not_end_together_are_not_tied(
    timeline: Callable[..., Timeline], ends: tuple[float, float]
) -> None:
    spans = reducing_pipeline(ends)
    replay = replay_of_timeline(timeline(TWO_STAGES, spans, OF_STAGES))
    assert reductions_ms(replay) == pytest.approx([10, ends[0] - 10])


def test_mates_that_wait_inside_passes_are_mended_with_the_slow_rank(
    timeline: Callable[..., Timeline],
) -> None:
    """Ranks 0 and 1 share a CP group, whose messages nobody recorded: rank 1 waits for rank 0."""
    layout, groups = Layout(cp=2, dp=2), {"dp_cp@0": (0, 1, 2, 3)}
    spans = []
    for rank, done in enumerate((30, 25, 20, 20)):
        spans += [
            span(rank, "iteration", "iteration", 0, 40),
            *passes(rank, (0, done / 2), (done / 2, done)),
            collective(rank, done, 35, 30 - done, group="dp_cp@0"),
            span(rank, "optimizer", "optimizer", 35, 40),
        ]
    replay = replay_of_timeline(timeline(layout, spans, groups))
    assert saved_by_fixing(replay, [0]).fixed_step_s == pytest.approx(0.03)
    assert saved_by_fixing(replay, [1]).fixed_step_s == pytest.approx(0.04)
    assert saved_by_fixing(replay, [2]).fixed_step_s == pytest.approx(0.04)


@pytest.mark.parametrize(("mate", "fixed_s"), [(30.4, 0.030), (34, 0.044)])
def test_a_mate_that_is_as_long_waits_and_one_that_is_longer_is_slow_itself(
    timeline: Callable[..., Timeline], mate: float, fixed_s: float
) -> None:
    """Ranks 0 and 1 share a CP group, whose messages nobody recorded; ranks 2 and 3 another."""
    layout, groups = Layout(cp=2, dp=2), {"dp_cp@0": (0, 1, 2, 3)}
    spans = []
    for rank, done in enumerate((30, mate, 20, 20)):
        spans += [
            span(rank, "iteration", "iteration", 0, mate + 10),
            *passes(rank, (0, done / 2), (done / 2, done)),
            collective(rank, done, mate + 5, mate - done, group="dp_cp@0"),
            span(rank, "optimizer", "optimizer", mate + 5, mate + 10),
        ]
    replay = replay_of_timeline(timeline(layout, spans, groups))
    assert saved_by_fixing(replay, [0]).fixed_step_s == pytest.approx(fixed_s)


def test_steps_before_an_exchange_of_stages_do_not_meet() -> None:
    def node(match: int, *, is_step: bool = False) -> DraftNode:
        optype = "optimizer" if is_step else "mp-all_reduce"
        return DraftNode(
            node=Node(stage=0, optype=optype, is_local=is_step), dependencies=(),
            weight_ns=np.ones((1, 1)), match=match,
        )  # fmt: skip

    own = StageDraft(stage=0, nodes=[node(-1, is_step=True), node(5), node(6), node(-1)])
    other = StageDraft(stage=1, nodes=[node(5), node(-1, is_step=True)])
    assert _after_all_exchange(own, [own, other]) == own.nodes[2:]
    assert _after_all_exchange(other, [own, other]) == other.nodes[1:]
    assert _after_all_exchange(own, [own]) == own.nodes


def test_reductions_that_queue_are_launched_where_the_slow_rank_launches_them(
    timeline: Callable[..., Timeline],
) -> None:
    """Two reductions, launched at half of the backward pass and at its end; rank 1 is slow.

    rank 0:  forward 0-10  backward 10-30   reduce 20-42 and, behind it, 42-62
    rank 1:  forward 0-20  backward 20-60   reduce 40-42 and 60-62
    """
    beside = {"track": int(Track.OVERLAPPED)}
    spans = []
    for rank, (turn, done, first, second) in enumerate(((10, 30, 20, 42), (20, 60, 40, 60))):
        spans += [
            span(rank, "iteration", "iteration", 0, 65),
            *passes(rank, (0, turn), (turn, done)),
            collective(rank, first, 42, 40 - first, **beside),
            collective(rank, second, 62, 60 - second, match=1, **beside),
            span(rank, "optimizer", "optimizer", 62, 65),
        ]
    replay = replay_of_timeline(timeline(Layout(dp=2), spans, {"dp@0": (0, 1)}))
    assert replay.traced_s.tolist() == pytest.approx([0.065])
    assert saved_by_fixing(replay, [1]).fixed_step_s == pytest.approx(0.035)


def test_who_begins_an_iteration_late_does_so_in_the_replay(
    timeline: Callable[..., Timeline],
) -> None:
    """Rank 1 does 6 ms of what nobody traces between two iterations: its step is 30 ms, not 24."""
    spans = []
    for rank, late in ((0, 0.0), (1, 6.0)):
        spans += [
            span(rank, "iteration", "iteration", late, 30),
            *passes(rank, (late, 10 + late), (10 + late, 20 + late)),
            collective(rank, 20 + late, 28, 6 - late),
            span(rank, "optimizer", "optimizer", 28, 30),
        ]
    replay = replay_of_timeline(timeline(Layout(dp=2), spans, {"dp@0": (0, 1)}))
    assert replay.measured.tolist() == pytest.approx([0.030])
    assert replay.traced_s.tolist() == pytest.approx([0.030])
    mended = saved_by_fixing(replay, [1], scatters=True)
    assert mended.fixed_step_s == pytest.approx(0.024)


def test_who_ended_the_iteration_before_late_does_not_begin_late(
    timeline: Callable[..., Timeline],
) -> None:
    """Rank 1 ends each iteration 4 ms after rank 0, and begins the next one at once."""
    spans = []
    for number, start in ((3, 0.0), (4, 26.0)):
        for rank, late in ((0, 0.0), (1, 4.0)):
            begin, end = start + late * (number > 3), start + 26 + late
            of_iteration = {"iteration": number}
            spans += [
                span(rank, "iteration", "iteration", begin, end, **of_iteration),
                *(one | of_iteration for one in passes(rank, (begin, end - 8), (end - 8, end))),
            ]
    replay = replay_of_timeline(timeline(Layout(dp=2), spans, {"dp@0": (0, 1)}))
    assert replay.traced_s[1] == pytest.approx(0.026)


def test_each_layers_parameters_hold_up_the_passes(timeline: Callable[..., Timeline]) -> None:
    """FSDP gathers in both passes, 2 ms each; rank 1's host is 8 ms late for either gather.

    rank 0:  forward 0-20 (gather 0-10, waiting 8)   backward 20-40 (gather 20-30, waiting 8)
    rank 1:  forward 0-20 (gather 8-10)              backward 20-40 (gather 28-30)
    """
    gather = {"op": "all_gather", "track": int(Track.OVERLAPPED)}
    spans = []
    for rank, late in ((0, 0.0), (1, 8.0)):
        spans += [
            span(rank, "iteration", "iteration", 0, 43),
            *passes(rank, (0, 20), (20, 40)),
            collective(rank, late, 10, 8 - late, **gather),
            collective(rank, 20 + late, 30, 8 - late, match=1, **gather),
            span(rank, "optimizer", "optimizer", 40, 43),
        ]
    replay = replay_of_timeline(timeline(Layout(dp=2), spans, {"dp@0": (0, 1)}))
    assert replay.traced_s.tolist() == pytest.approx([0.043])
    assert saved_by_fixing(replay, [1], scatters=True).fixed_step_s == pytest.approx(0.027)


def test_a_slow_host_launches_the_collectives_of_its_own_groups_late(
    timeline: Callable[..., Timeline],
) -> None:
    """Two TP groups, each a host; reductions take 10 ms on the slow host, and 2 on the other."""
    spans = []
    for rank in range(4):
        lasts = 10.0 if rank < 2 else 2.0
        of_group = {"group": f"tp@{rank // 2}", "match": 1 + rank // 2}
        spans += [
            span(rank, "iteration", "iteration", 0, 45),
            *passes(rank, (0, 10), (10 + lasts, 30 + lasts)),
            collective(rank, 10, 10 + lasts, 0, **of_group),
            collective(
                rank, 30 + lasts, 42, 10 - lasts, group=f"dp@{rank % 2}", match=3 + rank % 2
            ),
            span(rank, "optimizer", "optimizer", 42, 45),
        ]
    groups = {"tp@0": (0, 1), "tp@1": (2, 3), "dp@0": (0, 2), "dp@1": (1, 3)}
    replay = replay_of_timeline(timeline(Layout(tp=2, dp=2), spans, groups))
    assert replay.traced_s.tolist() == pytest.approx([0.045])
    assert saved_by_fixing(replay, [0, 1], scatters=True).fixed_step_s == pytest.approx(0.037)
    assert saved_by_fixing(replay, [0, 1]).fixed_step_s == pytest.approx(0.045)
    assert saved_by_fixing(replay, [0], scatters=True).fixed_step_s == pytest.approx(0.045)
