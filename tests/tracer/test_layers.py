"""Modules of some layers in turns: which, alike on all ranks, and what the records say of it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megascan.config import TraceConfig, add_trace_arguments
from megascan.errors import ConfigError, InputError
from megascan.header import RankHeader, WindowRecord
from megascan.schema import Granularity, Kind
from megascan.tracer.budget import Level
from megascan.tracer.tracer import LayerTurns

WINDOW = {"run_id": "r", "window": 0, "first_iteration": 1, "last_iteration": 2, "num_spans": 0}


def config(stride: int, interval: int = 5, window: int = 5) -> TraceConfig:
    return TraceConfig(enabled=True, interval=interval, window=window, layer_stride=stride)


def test_layers_take_turns() -> None:
    turns = [config(4).sampled_layers(i, {0: range(1, 9)}) for i in range(1, 6)]
    assert turns == [{1, 5}, {2, 6}, {3, 7}, {4, 8}, {1, 5}]


@pytest.mark.parametrize(("interval", "window"), [(5, 5), (5, 2), (8, 1), (7, 3)])
@pytest.mark.parametrize("num_layers", [1, 2, 3, 5, 12, 24, 61])
@pytest.mark.parametrize("stride", [1, 2, 8, 64])
def test_every_layer_has_its_turn(interval: int, window: int, num_layers: int, stride: int) -> None:
    """However windows lie: as often as any other, give or take one."""
    settings, layers = config(stride, interval, window), range(10, 10 + num_layers)
    traced = [i for i in range(1, 2000) if settings.traces(i)][: 3 * num_layers]
    chosen = [settings.sampled_layers(i, {0: layers}) for i in traced]
    times = [sum(layer in one for one in chosen) for layer in layers]
    assert min(times) >= 1 and max(times) - min(times) <= 1
    assert min(map(len, chosen)) >= min(2, num_layers)
    assert max(map(len, chosen)) <= max(-(-num_layers // stride), 3)


def test_each_chunk_has_its_own() -> None:
    chosen = config(8).sampled_layers(3, {0: [1, 2, 3, 4], 1: [9, 10, 11, 12]})
    assert len(chosen & {1, 2, 3, 4}) == len(chosen & {9, 10, 11, 12}) == 2


def test_layers_that_all_have_their_turn_at_once_take_none() -> None:
    assert config(4).layers_in_turn(2, {0: range(1, 4), 1: range(4, 7)}) is None
    assert config(1).layers_in_turn(2, {0: range(1, 9)}) is None
    assert config(4).layers_in_turn(2, {}) is None
    assert config(4).layers_in_turn(2, {0: range(1, 9)}) == {2, 6}


def test_the_first_iteration_learns_the_layers() -> None:
    turns = LayerTurns()
    turns.begin_iteration(config(8), 1)
    assert turns.chosen is None and turns.largest_stride() == 1
    assert all(turns.takes(layer, layer % 2) for layer in range(16))
    turns.begin_iteration(config(8), 2)
    assert turns.chosen is not None and len(turns.chosen) == 4  # two of either chunk
    assert [layer for layer in range(16) if turns.takes(layer)] == list(turns.chosen)
    assert turns.takes(None), "an embedding is in no layer"
    assert turns.largest_stride() == 4


def test_a_model_of_few_layers_has_no_turns() -> None:
    turns = LayerTurns()
    for iteration in range(1, 5):
        turns.begin_iteration(config(4), iteration)
        assert turns.chosen is None
        assert all(turns.takes(layer, chunk) for chunk in (0, 1) for layer in (chunk, chunk + 2))


def test_a_stride_of_one_takes_all() -> None:
    turns = LayerTurns()
    for iteration in range(1, 5):
        turns.begin_iteration(config(1), iteration)
        assert turns.chosen is None and all(turns.takes(layer) for layer in range(8))


def test_windows_name_the_layers_of_their_iterations(
    make_tracer: Callable, read_rank_file: Callable
) -> None:
    tracer, path = make_tracer(interval=4, window=2, layer_stride=8)
    for iteration in range(1, 9):
        with tracer.iteration(iteration):
            for layer in range(1, 9) if tracer.active else ():
                if tracer.layers.takes(layer):
                    tracer.add(Kind.COMPUTE, "mlp", tracer.mark(), tracer.mark(), {"layer": layer})
    tracer.close()
    recorded = read_rank_file(path)
    named = [dict(window["layers"]) for window in recorded.windows]
    assert [list(one) for one in named] == [[2], [5, 6]], "the first iteration has all"
    for iteration in (2, 5, 6):
        seen = [
            span["args"]["layer"]
            for span in recorded.named("mlp")
            if span["args"]["iteration"] == iteration
        ]
        assert seen == next(one[iteration] for one in named if iteration in one)


def test_the_flag() -> None:
    parser = argparse.ArgumentParser()
    add_trace_arguments(parser)
    assert TraceConfig.from_arguments(parser.parse_args([])).layer_stride == 4
    words = ["--trace-layer-stride", "3"]
    assert TraceConfig.from_arguments(parser.parse_args(words)).layer_stride == 3
    with pytest.raises(ConfigError, match="--trace-layer-stride is 0, expected 1"):
        TraceConfig(layer_stride=0)


def test_records_come_back_as_they_were_written() -> None:
    record = WindowRecord(
        **WINDOW, layers=((1, (1, 9)), (2, (2, 10))), kinds={"5f1c09ab": (1, 2), "": (9,)}
    )
    again = json.loads(json.dumps(record.to_json()))
    assert WindowRecord.from_json(again, "file") == record


@pytest.mark.parametrize(
    "layers", [5, [5], [[1]], [[1, 2]], [[1, ["2"]]], [["1", [2]]], [[1, [2], 3]], {"1": 2}, None]
)
def test_damaged_records_are_said_so(layers: object) -> None:
    with pytest.raises(InputError, match="file: damaged window mark"):
        WindowRecord.from_json({**WINDOW, "layers": layers}, "file")


@pytest.mark.parametrize("kinds", [5, [5], {"a": 1}, {"a": ["1"]}, {"a": [[1]]}, None])
def test_damaged_kinds_are_said_so(kinds: object) -> None:
    with pytest.raises(InputError, match="file: damaged window mark"):
        WindowRecord.from_json({**WINDOW, "kinds": kinds}, "file")


def test_what_a_later_megascan_adds_is_passed_over() -> None:
    record = WindowRecord.from_json({**WINDOW, "heat": [1, 2]}, "file")
    assert record == WindowRecord(**WINDOW)


def test_old_files_stay_readable(make_header: Callable[..., RankHeader]) -> None:
    assert WindowRecord.from_json(WINDOW, "file").layers == ()
    old = json.loads(json.dumps(make_header().to_json()))
    del old["trace"]["layer_stride"]
    assert RankHeader.from_json(old, "file").trace.layer_stride == 1


def test_old_rank_files_of_the_examples_tell_all_layers() -> None:
    from megascan.reader import read_timeline
    from megascan.timeline import is_sampled

    example = Path(__file__).parents[2] / "examples" / "h200-pp2-dp2-healthy.json.gz"
    assert not is_sampled(read_timeline(example))


def test_a_budget_may_leave_one_layer_of_a_chunk(make_tracer: Callable) -> None:
    tracer, _ = make_tracer(interval=4, window=1)
    chosen = {}
    for iteration in range(1, 18):
        if stride := {2: 4, 7: 8}.get(iteration):
            level = Level(
                granularity=Granularity.FULL,
                interval=4,
                layer_stride=stride,
                from_iteration=iteration,
            )
            tracer.lower(level)
        with tracer.iteration(iteration):
            if tracer.active:
                for layer in range(1, 9):
                    tracer.layers.takes(layer)
                chosen[iteration] = tracer.layers.chosen
    assert chosen == {1: None, 5: (2, 6), 9: (3,), 13: (4,), 17: (5,)}


def test_a_stride_of_the_user_s_own_leaves_two() -> None:
    turns = LayerTurns()
    turns.begin_iteration(config(64), 1)
    assert all(turns.takes(layer) for layer in range(8))
    turns.begin_iteration(config(64), 2)
    assert turns.chosen is not None and len(turns.chosen) == 2
    assert (turns.largest_stride(), turns.last_stride()) == (4, 8)
