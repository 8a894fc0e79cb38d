"""CudaTimer on a real GPU; elsewhere `test_cuda_timer.py` has to do."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
import time

import pytest
import torch

from megascan.schema import Kind, Track
from megascan.tracer.cuda import CudaTimer
from megascan.tracer.timer import HostClock, Span, WindowTimes, now_ns

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SLEEP_CYCLES = 20_000_000  # some 10 ms
NUM_SPANS = 20


@pytest.fixture
def timer():
    from megascan.tracer.cuda import TorchDevice

    torch.cuda.init()
    clock = HostClock(domain="host:boot", offset_ns=0, origin_ns=now_ns())
    made = CudaTimer(clock, TorchDevice(), record_launches=True)
    for _ in range(50):  # an idle GPU takes some tenths of a second to reach its clock
        torch.cuda._sleep(SLEEP_CYCLES)
    torch.cuda.synchronize()
    return made


def sleep(num_spans, tracer):
    """Kernels of equal length, each in a span; they are launched much faster than they run."""
    for _ in range(num_spans):
        with tracer.span("forward", Kind.COMPUTE):
            torch.cuda._sleep(SLEEP_CYCLES)


def test_ties_are_narrow(timer):
    assert timer.tie().width_ns < 500_000


def test_a_window_of_sleeping_kernels(timer, make_tracer, read_rank_file):
    tracer, path = make_tracer(timer=timer)
    with tracer.iteration(1):
        sleep(NUM_SPANS, tracer)
        launched_ns = now_ns()
    torch.cuda.synchronize()
    tracer.close()
    spans = read_rank_file(path).named("forward")
    assert len(spans) == NUM_SPANS
    durations = sorted(span["dur"] for span in spans)
    assert durations[-1] < 1.2 * durations[0]
    for earlier, later in itertools.pairwise(spans):
        assert -1 < later["ts"] - earlier["ts"] - earlier["dur"] < 1_000  # µs
    # the host ran ahead: its last launch lies before the device's last begin
    assert spans[-1]["args"]["launch_ns"] < -10 * durations[0] * 1000
    assert spans[-1]["ts"] * 1000 + timer._clock.origin_ns > launched_ns


def test_marks_are_taken_on_the_stream_that_is_current(timer):
    """Also where streams change; the first one stays busy for all of it."""
    other = torch.cuda.Stream()
    opened = timer.tie()
    torch.cuda._sleep(20 * SLEEP_CYCLES)
    with torch.cuda.stream(other):
        begin = timer.mark()
        torch.cuda._sleep(SLEEP_CYCLES)
        free = Span(Kind.COMPUTE, "forward", Track.COMPUTE, begin, timer.mark(), {})
    begin = timer.mark()
    behind = Span(Kind.COMPUTE, "forward", Track.COMPUTE, begin, timer.mark(), {})
    torch.cuda.synchronize()
    first, last = timer.resolve([free, behind], WindowTimes(opened, timer.tie()))
    assert first[3] + first[4] < last[3]


def test_a_collective_on_another_stream_runs_next_to_training(timer, make_tracer, read_rank_file):
    tracer, path = make_tracer(timer=timer)
    aside = torch.cuda.Stream()
    with tracer.iteration(1):
        for stream in (torch.cuda.current_stream(), aside):
            with torch.cuda.stream(stream):
                begin = tracer.mark()
                torch.cuda._sleep(SLEEP_CYCLES)
                arguments = {"op": "all_gather", "group": "dp@0", "size_bytes": 8}
                tracer.add_collective("all_gather", begin, tracer.mark(), arguments, "dp@0")
    tracer.close()
    spans = read_rank_file(path).named("all_gather")
    assert {Track(span["tid"]) for span in spans} == {Track.COMMUNICATION, Track.OVERLAPPED}


def test_nothing_waits_for_the_device_inside_a_traced_iteration(timer, make_tracer):
    tracer, _ = make_tracer(timer=timer, interval=5, window=3)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        begin = time.monotonic()
        for iteration in (1, 2):  # the window stays open, so that no tie stands between
            with tracer.iteration(iteration):
                sleep(NUM_SPANS, tracer)
        launching_s = time.monotonic() - begin
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    torch.cuda.synchronize()
    running_s = time.monotonic() - begin
    assert tracer.waiting and launching_s < running_s / 3


def test_ties_of_a_window_agree_and_the_record_says_how_well(timer, make_tracer, read_rank_file):
    tracer, path = make_tracer(timer=timer, interval=3, window=2)
    for iteration in range(1, 6):
        with tracer.iteration(iteration):
            sleep(NUM_SPANS, tracer)
        torch.cuda.synchronize()
    tracer.close()
    for window in read_rank_file(path).windows:
        assert 0 < window["tie_width_ns"] < 500_000
        assert abs(window["drift_ppm"]) < 200  # crystals differ by some ppm


def test_untraced_iterations_are_timed_on_the_device(timer, make_tracer, read_rank_file):
    tracer, path = make_tracer(timer=timer, interval=3, window=1)
    for iteration in range(1, 5):
        with tracer.iteration(iteration):
            for _ in range(5):
                torch.cuda._sleep(SLEEP_CYCLES)
        torch.cuda.synchronize()
    tracer.close()
    _, second = read_rank_file(path).windows
    durations = {iteration: duration_ns for iteration, _, duration_ns in second["timings"]}
    assert set(durations) == {1, 2, 3}
    assert durations[2] == pytest.approx(durations[3], rel=0.2)
    assert durations[2] > 10_000_000


def test_a_tie_is_reached_while_the_device_is_busy(timer):
    """On its stream nothing else runs: a long kernel elsewhere does not hold it up."""
    for _ in range(20):
        torch.cuda._sleep(SLEEP_CYCLES)
    begin = time.monotonic()
    tie = timer.tie()
    waited_s = time.monotonic() - begin
    torch.cuda.synchronize()
    assert waited_s < 0.1 and tie.width_ns < 5_000_000
    assert timer.check(WindowTimes(tie, timer.tie())).tie_width_ns > 0


_TIES = """
import time, torch
from megascan.tracer.timer import HostClock, now_ns
from megascan.tracer.cuda import CudaTimer
from megascan.tracer.cuda import TorchDevice

clock = HostClock(domain="host:boot", offset_ns=0, origin_ns=now_ns())
timer = CudaTimer(clock, TorchDevice(), record_launches=True)
timer.tie()
torch.cuda.synchronize()
for _ in range(20):
    torch.cuda._sleep(20_000_000)
begin = time.monotonic()
timer.tie()
waited_s = time.monotonic() - begin
torch.cuda.synchronize()
print(waited_s, time.monotonic() - begin)
"""


def test_nor_where_all_streams_share_one_queue():
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _TIES], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    waited_s, busy_s = map(float, done.stdout.split())
    assert busy_s > 0.1  # else this has shown nothing
    assert waited_s < busy_s / 10


@pytest.mark.skipif(importlib.util.find_spec("pynvml") is None, reason="needs nvidia-ml-py")
def test_counters_of_the_device(timer):
    counters = timer.counters()
    assert 0 < counters["sm_clock_mhz"] <= counters["sm_clock_max_mhz"]
    assert {"clock_event_reasons", "power_w", "temperature_c"} <= set(counters)


def test_moments_are_the_same_only_while_nothing_is_done_to_a_tensor(timer):
    tensor = torch.ones(1 << 20, device="cuda")
    first = timer.mark_at(tensor)
    assert timer.mark_at(tensor) is first
    tensor.add_(1)
    second = timer.mark_at(tensor)
    assert second is not first
    pointer = tensor.data_ptr()
    del tensor
    again = torch.empty(1 << 20, device="cuda")
    assert again.data_ptr() == pointer  # the memory of the first one
    assert timer.mark_at(again) is not second
    assert timer.mark_at(None) is not timer.mark_at(None)


def test_layers_in_a_row_share_the_mark_between_them(timer, make_tracer):
    """In forward order by the tensor that is handed on, in backward by its gradient."""
    from megascan.instrument.megatron import BackwardSpans, Modules
    from megascan.instrument.place import Position

    tracer, _ = make_tracer(timer=timer, interval=5, window=3)
    position = Position()
    backward_spans = BackwardSpans(tracer, position)
    modules = Modules(tracer, position, backward_spans)

    class Layer(torch.nn.Linear):
        pass

    Layer.forward = modules.forward_of("layer", torch.nn.Linear.forward)
    layers = [Layer(64, 64, device="cuda") for _ in range(4)]
    x = torch.ones(8, 64, device="cuda", requires_grad=True) * 1
    with tracer.iteration(1):
        for layer in layers:
            x = layer(x)
        x.sum().backward()
        backward_spans.end_all()
        spans = list(tracer._spans)
    forward = [span for span in spans if span.name == "layer"]
    backward = [span for span in spans if span.name == "layer-backward"]
    assert len(forward) == len(backward) == 4
    for row in (forward, backward):
        for earlier, later in itertools.pairwise(row):
            assert earlier.end is later.begin and earlier.begin is not earlier.end
