"""Which iterations end up in which window, and what a window holds."""

from __future__ import annotations

import gc
import json
import os
import threading
import time

import pytest

from megascan.config import TraceConfig
from megascan.header import Activity, WindowRecord
from megascan.instrument import start
from megascan.instrument.megatron import GarbageCollections
from megascan.schema import Kind, Track
from megascan.tracer import TraceWriter
from megascan.tracer.sockets import Carried
from megascan.tracer.threads import ThreadTimes
from megascan.tracer.tracer import MAX_TIMED_BETWEEN


def train(tracer, iterations):
    for iteration in iterations:
        with tracer.iteration(iteration):
            with tracer.span("forward", Kind.COMPUTE, microbatch=0, chunk=0):
                pass
            with tracer.span("batch-generator", Kind.DATA):
                pass


def test_windows_are_the_first_iterations_of_each_interval(make_tracer, read_rank_file):
    tracer, path = make_tracer(interval=5, window=2)
    train(tracer, range(1, 13))
    tracer.close()
    windows = read_rank_file(path).windows
    assert [(w["first_iteration"], w["last_iteration"]) for w in windows] == [
        (1, 2),
        (6, 7),
        (11, 12),
    ]
    assert [w["window"] for w in windows] == [0, 1, 2]
    assert {w["num_spans"] for w in windows} == {6}


def test_every_iteration_can_be_traced(make_tracer, read_rank_file):
    tracer, path = make_tracer(interval=3, window=3)
    train(tracer, range(1, 7))
    tracer.close()
    spans = read_rank_file(path).named("iteration")
    assert [span["args"]["iteration"] for span in spans] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("noted", "written"),
    [([], []), ([4096, 4096], [4096, 4096]), ([4096, 512], [512, 4096]), ([4096, 0], [])],
)
def test_a_window_says_how_many_tokens_passes_got(make_tracer, read_rank_file, noted, written):
    tracer, path = make_tracer(interval=1, window=1)
    with tracer.iteration(1):
        for count in noted:
            tracer.note_tokens(count)
    with tracer.iteration(2):
        tracer.note_tokens(64)
    tracer.close()
    assert [window["tokens"] for window in read_rank_file(path).windows] == [written, [64, 64]]


def test_a_window_says_what_threads_did(make_tracer, read_rank_file):
    tracer, path = make_tracer(interval=3, window=2)
    times = iter([ThreadTimes(40, 900), None, ThreadTimes(7, 0, 512)])
    tracer.threads.end = lambda: next(times)
    train(tracer, [1, 2, 3, 4])
    with pytest.raises(ZeroDivisionError), tracer.iteration(5):
        raise ZeroDivisionError
    tracer.close()
    windows = read_rank_file(path).windows
    assert [window.get("core_waits") for window in windows] == [[[1, 40]], [[4, 7]]]
    assert [window.get("other_threads") for window in windows] == [[[1, 900]], [[4, 0]]]
    assert [window.get("page_reads") for window in windows] == [None, [[4, 512]]]


def test_a_window_says_what_memory_and_disks_were_waited_for(make_tracer, read_rank_file):
    tracer, path = make_tracer(interval=1, window=1)
    readings = iter([{}, {"memory_waited_percent": 12.5}])
    tracer._writer._pressure.read = lambda step: next(readings)
    train(tracer, [1, 2])
    tracer.close()
    windows = read_rank_file(path).windows
    assert [window.get("pressure") for window in windows] == [None, {"memory_waited_percent": 12.5}]
    read = [WindowRecord.from_json(window, "a file") for window in windows]
    assert [dict(window.pressure) for window in read] == [{}, {"memory_waited_percent": 12.5}]


def test_waits_that_cannot_be_read_cost_no_window(make_tracer, read_rank_file, caplog):
    tracer, path = make_tracer(interval=1, window=1)

    def fail(step):
        raise RuntimeError("no such file")

    tracer._writer._pressure.read = fail
    train(tracer, [1, 2])
    tracer.close()
    assert len(read_rank_file(path).windows) == 2
    assert [one.message for one in caplog.records if "memory and disks" in one.message] == [
        "memory and disks cannot be read, tracing goes on: RuntimeError('no such file')"
    ]


def test_a_window_says_what_connections_carried(make_tracer, read_rank_file):
    tracer, path = make_tracer(interval=1, window=1)
    carried = iter([(), (Carried("10.0.0.1", "10.0.0.2", 1 << 20, 4000, 3, 700_000),)])
    tracer._writer._sockets.read = lambda step: next(carried)
    train(tracer, [1, 2])
    tracer.close()
    windows = read_rank_file(path).windows
    told = [["10.0.0.1", "10.0.0.2", 1 << 20, 4000, 3, 700_000]]
    assert [window.get("connections") for window in windows] == [None, told]


def test_what_cannot_be_read_costs_no_window(make_tracer, read_rank_file, caplog):
    tracer, path = make_tracer(interval=1, window=1)

    def fail(*_: object) -> None:
        raise SystemError("bad argument to internal function")

    tracer._writer._timer.counters = fail
    tracer._writer._sockets.read = fail
    train(tracer, [1, 2, 3])
    tracer.close()
    windows = read_rank_file(path).windows
    assert [(w["first_iteration"], w["counters"], w.get("connections")) for w in windows] == [
        (1, {}, None),
        (2, {}, None),
        (3, {}, None),
    ]
    said = [record.message for record in caplog.records if "cannot be read" in record.message]
    assert len(said) == 2
    assert "connections cannot be read, tracing goes on: SystemError" in said[1]


def test_training_that_ends_inside_a_window_leaves_a_shorter_one(make_tracer, read_rank_file):
    tracer, path = make_tracer(interval=5, window=4)
    train(tracer, range(1, 8))
    tracer.close()
    windows = read_rank_file(path).windows
    assert [(w["first_iteration"], w["last_iteration"]) for w in windows] == [(1, 4), (6, 7)]


def test_a_closed_file_is_json(make_tracer):
    tracer, path = make_tracer()
    train(tracer, [1, 2])
    tracer.close()
    assert json.loads(path.read_text())[0]["name"] == "megascan"


def test_untraced_iterations_record_nothing(make_tracer, read_rank_file):
    tracer, path = make_tracer(interval=5, window=1)
    with tracer.iteration(2):
        assert not tracer.active
        with tracer.span("forward", Kind.COMPUTE):
            pass
    tracer.close()
    assert read_rank_file(path).spans == []
    assert read_rank_file(path).windows == []


def test_spans_carry_time_track_iteration_and_arguments(make_tracer, read_rank_file):
    tracer, path = make_tracer()
    train(tracer, [1])
    tracer.close()
    file = read_rank_file(path)
    (forward,), (data,), (whole,) = map(file.named, ("forward", "batch-generator", "iteration"))
    assert forward["tid"] == Track.COMPUTE and data["tid"] == Track.HOST
    assert forward["args"] == {
        "microbatch": 0,
        "chunk": 0,
        "iteration": 1,
        "cpu_ns": forward["args"]["cpu_ns"],
    }
    assert whole["ts"] <= forward["ts"]
    assert forward["ts"] + forward["dur"] <= whole["ts"] + whole["dur"]


def test_an_iteration_that_raises_is_forgotten(make_tracer, read_rank_file):
    tracer, path = make_tracer(interval=5, window=4)
    train(tracer, [1, 2])
    with pytest.raises(KeyError), tracer.iteration(3), tracer.span("forward", Kind.COMPUTE):
        raise KeyError("from training")
    tracer.close()
    file = read_rank_file(path)
    assert [(w["first_iteration"], w["last_iteration"]) for w in file.windows] == [(1, 2)]
    assert {span["args"]["iteration"] for span in file.spans} == {1, 2}


def test_a_window_interrupted_by_an_exception_does_not_run_into_the_next(
    make_tracer, read_rank_file
):
    tracer, path = make_tracer(interval=5, window=2)
    train(tracer, [1])
    with pytest.raises(KeyError), tracer.iteration(2):
        raise KeyError("from training")
    train(tracer, [3, 4, 5, 6, 7])
    tracer.close()
    windows = read_rank_file(path).windows
    assert [(w["first_iteration"], w["last_iteration"]) for w in windows] == [(1, 1), (6, 7)]


def test_garbage_collections_are_host_spans(make_tracer, read_rank_file):
    tracer, path = make_tracer()
    collections = GarbageCollections(tracer)
    tracer.listen(collections)
    with tracer.iteration(1):
        gc.collect()
    gc.collect()
    tracer.close()
    spans = read_rank_file(path).named("gc-generation-2")
    assert len(spans) == 1 and spans[0]["tid"] == Track.HOST and spans[0]["cat"] == "gc"
    assert collections._on_collection not in gc.callbacks


def test_a_forked_child_neither_traces_nor_writes(make_tracer, read_rank_file):
    tracer, path = make_tracer()
    with tracer.iteration(1):
        child = os.fork()
        if child == 0:
            silent = not tracer.active
            tracer.close()
            os._exit(0 if silent else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert tracer.active
    tracer.close()
    assert [w["num_spans"] for w in read_rank_file(path).windows] == [1]


def test_a_disabled_tracer_has_the_same_interface_and_leaves_no_trace(tmp_path):
    folder = tmp_path / "trace"
    with start(TraceConfig(enabled=False, directory=folder)) as tracer:
        train(tracer, range(1, 4))
        assert not tracer.active
    assert not folder.exists()


def test_starting_without_torch_distributed_warns_and_goes_on(tmp_path, warnings_of_megascan):
    tracer = start(TraceConfig(enabled=True, directory=tmp_path / "trace"))
    train(tracer, range(1, 4))
    tracer.close()
    (warning,) = warnings_of_megascan()
    assert "torch.distributed is not initialised" in warning


def test_a_window_s_record_tells_how_long_iterations_took(make_tracer, read_rank_file):
    tracer, path = make_tracer(interval=4, window=2)
    train(tracer, range(1, 10))
    tracer.close()
    first, second, third = read_rank_file(path).windows
    assert [iteration for iteration, _, _ in first["timings"]] == [1]
    assert [iteration for iteration, _, _ in second["timings"]] == [2, 3, 4, 5]
    assert [iteration for iteration, _, _ in third["timings"]] == [6, 7, 8, 9]
    activities = [activity for _, activity, _ in second["timings"]]
    assert activities[0] == activities[3] == Activity.TRACED
    assert set(activities[1:3]) <= {Activity.NONE, Activity.WRITING}
    assert all(duration > 0 for w in (first, second, third) for _, _, duration in w["timings"])


def test_of_many_untraced_iterations_some_are_timed(make_tracer, read_rank_file):
    tracer, path = make_tracer(interval=200, window=1)
    train(tracer, range(1, 202))
    tracer.close()
    _, second = read_rank_file(path).windows
    timed = [iteration for iteration, _, _ in second["timings"]]
    assert timed == list(range(1, 2 + MAX_TIMED_BETWEEN))


def test_untraced_iterations_beside_a_busy_writer_are_told_apart(
    make_tracer, read_rank_file, monkeypatch
):
    busy, done = threading.Event(), threading.Event()
    write = TraceWriter._write

    def slow(self, window):
        busy.set()
        assert done.wait(10)
        write(self, window)

    monkeypatch.setattr(TraceWriter, "_write", slow)
    tracer, path = make_tracer(interval=4, window=1)
    train(tracer, [1])
    assert busy.wait(10)
    train(tracer, [2])
    monkeypatch.setattr(TraceWriter, "_write", write)
    done.set()
    while tracer.num_writer_steps < 2:
        time.sleep(0.001)
    train(tracer, [3, 4, 5])
    tracer.close()
    _, second = read_rank_file(path).windows
    assert [activity for _, activity, _ in second["timings"]] == [
        Activity.TRACED,
        Activity.WRITING,
        Activity.NONE,
        Activity.NONE,
    ]


def test_an_iteration_that_raises_is_not_timed(make_tracer, read_rank_file):
    tracer, path = make_tracer(interval=3, window=1)
    train(tracer, [1])
    with pytest.raises(KeyError), tracer.iteration(2):
        raise KeyError("from training")
    train(tracer, [3, 4])
    tracer.close()
    _, second = read_rank_file(path).windows
    assert [iteration for iteration, _, _ in second["timings"]] == [1, 3]
