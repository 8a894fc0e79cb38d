"""CudaTimer against a made-up GPU whose clock, queue and events are known exactly."""

from __future__ import annotations

import itertools
import struct
import threading
from types import SimpleNamespace

import pytest
import torch

from megascan.instrument.collectives import PendingWork
from megascan.instrument.collectives import _all_reduce as reduce_bucket
from megascan.instrument.megatron import BackwardSpans, Modules
from megascan.instrument.place import Position
from megascan.schema import Kind, Track
from megascan.tracer import cuda
from megascan.tracer.cuda import CudaTimer, CurrentStream, can_wait_aside
from megascan.tracer.timer import HostClock, Span, WindowTimes


class Gpu:
    """Executes what is launched one after the other; its clock may run fast.

    Host time moves only by `host`; device time of an event is when the queue before it is done.
    """

    name = "GPU-1"

    def __init__(self, *, rate=1.0, blocking=False):
        self.host_ns = 1_000_000_000
        self.busy_until_ns = 0
        self.rate = rate
        self.can_wait_aside = not blocking
        self.num_made = 0
        self.num_counts = 0
        self.num_waits = 0
        self.query_ns = 1_000
        self.aside_ns = 2_000  # the way to an idle stream
        self.current = "training's"

    def stream(self):
        return self.current

    def now_ns(self):
        return self.host_ns

    def host(self, duration_ns):
        self.host_ns += duration_ns

    def launch(self, duration_ns):
        """A kernel: starts when the queue is empty, and not before the host launched it."""
        self.busy_until_ns = max(self.busy_until_ns, self.host_ns) + duration_ns

    def new_event(self):
        self.num_made += 1
        return FakeEvent(self)

    def record(self, event):
        event.true_ns = max(self.busy_until_ns, self.host_ns)
        event.recorded = True

    def record_aside(self, event):
        event.true_ns = self.host_ns + self.aside_ns
        event.recorded = True

    def record_after(self, event, work, lane):
        work.wait()
        event.true_ns = work.end_ns
        event.recorded = True

    def begin_counting(self):
        self.num_counts += 1

    def counters(self):
        return {"sm_clock_mhz": 1980.0}


class FakeEvent:
    def __init__(self, gpu):
        self.gpu = gpu
        self.recorded = False

    def synchronize(self):
        assert self.recorded
        self.gpu.num_waits += 1
        if self.true_ns > self.gpu.host_ns:
            self.gpu.host_ns = self.true_ns + 2_000

    def query(self):
        assert self.recorded
        self.gpu.host_ns += self.gpu.query_ns
        return self.true_ns <= self.gpu.host_ns

    def elapsed_time(self, end):
        milliseconds = (end.true_ns - self.true_ns) * self.gpu.rate / 1e6
        return struct.unpack("f", struct.pack("f", milliseconds))[0]  # float32, as CUDA's


@pytest.fixture
def gpu(monkeypatch):
    def make(**options):
        device = Gpu(**options)
        monkeypatch.setattr(cuda, "now_ns", device.now_ns)
        return device

    return make


def make_timer(gpu, *, record_launches=True):
    clock = HostClock(domain="host:boot", offset_ns=0, origin_ns=1_000_000_000)
    return CudaTimer(clock, gpu, record_launches=record_launches)


def compute(timer, begin, end, name="forward"):
    return Span(Kind.COMPUTE, name, Track.COMPUTE, begin, end, {})


def test_spans_have_device_times_on_the_host_s_clock(gpu):
    device = gpu()
    timer = make_timer(device)
    opened = timer.tie()
    truth, spans = [], []
    for _ in range(50):
        begin = timer.mark()
        start_ns = max(device.busy_until_ns, device.host_ns)
        device.host(20_000)
        device.launch(1_000_000)
        spans.append(compute(timer, begin, timer.mark()))
        truth.append((start_ns - 1_000_000_000, device.busy_until_ns - start_ns))
    device.host(200_000_000)
    records = timer.resolve(spans, WindowTimes(opened, timer.tie()))
    for record, (start_ns, duration_ns) in zip(records, truth, strict=True):
        assert record[3] == pytest.approx(start_ns, abs=5_000)
        assert record[4] == pytest.approx(duration_ns, abs=100)


def test_launches_run_ahead_of_a_busy_device(gpu):
    device = gpu()
    timer = make_timer(device)
    opened = timer.tie()
    device.launch(50_000_000)
    launched_ns = device.host_ns
    begin = timer.mark()
    device.launch(1_000_000)
    span = compute(timer, begin, timer.mark())
    device.host(100_000_000)
    (record,) = timer.resolve([span], WindowTimes(opened, timer.tie()))
    assert record[5]["launch_ns"] == pytest.approx(
        launched_ns - (record[3] + 1_000_000_000), abs=10
    )
    assert record[5]["launch_ns"] < -49_000_000


def test_launches_are_left_out_of_base(gpu):
    device = gpu()
    timer = make_timer(device, record_launches=False)
    opened = timer.tie()
    span = compute(timer, timer.mark(), timer.mark())
    (record,) = timer.resolve([span], WindowTimes(opened, timer.tie()))
    assert record[5] == {}


def test_drift_of_a_long_window_is_taken_out_and_precision_kept(gpu):
    device = gpu(rate=1 + 40e-6)
    timer = make_timer(device)
    opened = timer.tie()
    spans, truth = [], []
    for _ in range(300):  # half a minute
        device.host(100_000_000)
        truth.append(device.host_ns - 1_000_000_000)
        spans.append(compute(timer, timer.mark(), timer.mark()))
    records = timer.resolve(spans, WindowTimes(opened, timer.tie()))
    worst_ns = max(abs(record[3] - true) for record, true in zip(records, truth, strict=True))
    assert worst_ns < 20_000  # uncorrected it would be 1,200,000


def test_a_short_window_does_not_invent_a_drift(gpu):
    device = gpu()
    timer = make_timer(device)
    opened = timer.tie()
    begin = timer.mark()
    device.launch(1_000_000)
    span = compute(timer, begin, timer.mark())
    device.host(3_000_000)
    (record,) = timer.resolve([span], WindowTimes(opened, timer.tie()))
    assert record[4] == pytest.approx(1_000_000, abs=50)


def test_nothing_waits_for_the_device_inside_a_window(gpu):
    device = gpu()
    timer = make_timer(device)
    before = device.num_waits
    for _ in range(100):
        timer.mark()
        timer.mark_host()
    assert device.num_waits == before


def test_a_device_that_hangs_does_not_hang_the_tracer(gpu):
    device = gpu()
    timer = make_timer(device)
    device.aside_ns, device.query_ns = 1 << 62, 1_000_000_000
    with pytest.raises(TimeoutError, match="does not answer"):
        timer.tie()


def test_training_waits_for_one_attempt_to_tie_where_it_is_as_good_as_any_before(gpu):
    device = gpu()
    timer, launches = make_timer(device), []
    aside = device.record_aside
    device.record_aside = lambda event: (launches.append(event), aside(event))
    widths = [timer.tie().width_ns for _ in range(3)]
    assert len(launches) == cuda._TIE_ATTEMPTS + 1 + 1
    assert len(set(widths)) == 1
    device.aside_ns *= 10  # the device is busy: another attempt may meet a better moment
    timer.tie()
    assert len(launches) == 2 * cuda._TIE_ATTEMPTS + 2


def test_a_window_opens_with_the_tie_that_just_closed_the_one_before(gpu, make_tracer):
    device = gpu()
    tracer, _ = make_tracer(timer=make_timer(device), interval=1, window=1)
    launches, aside = [], device.record_aside
    device.record_aside = lambda event: (launches.append(event), aside(event))
    for iteration in range(1, 6):
        with tracer.iteration(iteration):
            device.host(5_000_000)
    device.host(60_000_000_000)  # a checkpoint
    with tracer.iteration(6):
        device.host(5_000_000)
    num_windows, num_first = 6, cuda._TIE_ATTEMPTS - 1
    assert len(launches) == num_first + num_windows + 2  # the first opens, and the sixth
    assert device.num_counts == 1  # what the device does counts from the first window on


def test_events_are_used_again(gpu):
    device = gpu()
    timer = make_timer(device)
    for _ in range(5):
        opened = timer.tie()
        shared = timer.mark(), timer.mark()
        spans = [compute(timer, *shared), compute(timer, *shared)]  # one exchange, two messages
        timer.resolve(spans, WindowTimes(opened, timer.tie()))
        free = list(timer._pool._free)
        assert len({id(event) for event in free}) == len(free)
    assert device.num_made <= 2 + 2 + cuda._TIE_ATTEMPTS


def test_host_spans_are_timed_by_the_host(gpu):
    device = gpu()
    timer = make_timer(device)
    opened = timer.tie()
    device.launch(500_000_000)
    begin = timer.mark_host()
    start_ns = device.host_ns
    device.host(7_000_000)
    span = Span(Kind.DATA, "batch-generator", Track.HOST, begin, timer.mark_host(), {})
    (record,) = timer.resolve([span], WindowTimes(opened, timer.tie()))
    assert record[3:5] == (start_ns - 1_000_000_000, 7_000_000)
    assert "launch_ns" not in record[5]


def overlapped(timer, device, end_ns, lane="dp@0"):
    begin = timer.mark()
    span = Span(Kind.COLLECTIVE, "all_reduce", Track.OVERLAPPED, begin, None, {}, lane)
    work = SimpleNamespace(wait=lambda: None, end_ns=end_ns)
    assert timer.watch(work, span, "nccl")
    return span


def test_asynchronous_work_ends_on_its_own_stream_and_queues_in_its_lane(gpu):
    device = gpu()
    timer = make_timer(device)
    opened = timer.tie()
    launch_ns = device.host_ns
    first = overlapped(timer, device, launch_ns + 5_000_000)
    second = overlapped(timer, device, launch_ns + 8_000_000)  # launched now, runs after the first
    other = overlapped(timer, device, launch_ns + 8_000_000, lane="pp@0")
    device.host(20_000_000)
    records = timer.resolve([first, second, other], WindowTimes(opened, timer.tie()))
    assert [round(record[4], -4) for record in records] == [5_000_000, 3_000_000, 8_000_000]
    assert records[1][5]["launch_ns"] == pytest.approx(-5_000_000, abs=5_000)
    assert records[2][5]["launch_ns"] == pytest.approx(0, abs=5_000)


def test_a_collective_on_a_stream_of_its_own_runs_next_to_what_is_computed(
    gpu, make_tracer, read_rank_file
):
    device = gpu()
    tracer, path = make_tracer(timer=make_timer(device))
    with tracer.iteration(1):
        for device.current in ("training's", "the gathers'", "training's"):
            begin = tracer.mark()
            device.launch(2_000_000)
            arguments = {"op": "all_gather", "group": "dp@0", "size_bytes": 8}
            tracer.add_collective("all_gather", begin, tracer.mark(), arguments, "dp@0")
    tracer.close()
    tracks = [Track(span["tid"]) for span in read_rank_file(path).named("all_gather")]
    assert tracks == [Track.COMMUNICATION, Track.OVERLAPPED, Track.COMMUNICATION]


def test_ddp_s_reductions_end_where_their_future_has_waited(
    gpu, make_tracer, read_rank_file, monkeypatch
):
    """Where no stream of ours may wait for them: only the reducer does, and that in C++."""
    device = gpu(blocking=True)
    tracer, path = make_tracer(timer=make_timer(device))
    done = torch.futures.Future()
    done.set_result([torch.ones(4)])
    work = SimpleNamespace(wait=lambda: None, get_future=lambda: done)

    def all_reduce(buffer, op, group, async_op):
        assert op == torch.distributed.ReduceOp.SUM
        arguments = {"op": "all_reduce", "group": "dp@0", "size_bytes": buffer.nbytes}
        span, watched = tracer.add_pending(
            work, Kind.COLLECTIVE, "all_reduce", tracer.mark(),
            arguments=arguments, lane="dp@0", backend="nccl",
        )  # fmt: skip
        device.launch(3_000_000)
        return PendingWork(work, tracer, span, watched, buffer)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "gloo")
    model = SimpleNamespace(process_group=None, gradient_as_bucket_view=False)
    with tracer.iteration(1):
        reduced = reduce_bucket(model, SimpleNamespace(buffer=lambda: torch.ones(4)))
        device.launch(50_000_000)  # the optimizer
    tracer.close()
    assert torch.equal(reduced.value(), torch.ones(4))
    (span,) = read_rank_file(path).named("all_reduce")
    assert round(span["dur"]) == 3000
    assert "end_is_bound" not in span["args"]


@pytest.mark.parametrize(("backend", "blocking"), [("gloo", False), ("nccl", True)])
def test_work_that_would_stop_the_host_is_not_waited_for(gpu, backend, blocking):
    timer = make_timer(gpu(blocking=blocking))
    span = Span(Kind.COLLECTIVE, "all_reduce", Track.OVERLAPPED, timer.mark(), None, {}, "dp@0")

    def wait():
        raise AssertionError("waited")

    assert not timer.watch(SimpleNamespace(wait=wait), span, backend)
    assert span.end is None


@pytest.mark.parametrize(
    ("variables", "can"),
    [
        ({}, True),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, True),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, False),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, False),
        ({"TORCH_NCCL_BLOCKING_WAIT": "0"}, True),
    ],
)
def test_a_wait_aside_must_hold_nobody_up(monkeypatch, variables, can):
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_NCCL_BLOCKING_WAIT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert can_wait_aside() is can


def test_a_window_through_the_tracer(gpu, make_tracer, read_rank_file):
    device = gpu()
    timer = make_timer(device)
    tracer, path = make_tracer(timer=timer)
    for iteration in (1, 2):
        with tracer.iteration(iteration), tracer.span("forward", Kind.COMPUTE):
            device.launch(3_000_000)
    tracer.close()
    file = read_rank_file(path)
    assert [round(span["dur"]) for span in file.named("forward")] == [3000, 3000]
    assert file.windows[0]["counters"] == {"sm_clock_mhz": 1980.0}


def test_a_clock_that_drifts_is_noticed(gpu):
    device = gpu(rate=1 + 40e-6)
    timer = make_timer(device)
    opened = timer.tie()
    device.host(10_000_000_000)
    check = timer.check(WindowTimes(opened, timer.tie()))
    assert check.drift_ppm == pytest.approx(40, abs=1)
    assert 0 < check.tie_width_ns < 20_000


def test_what_the_ties_cannot_tell_is_no_drift(gpu):
    device = gpu(rate=1 + 40e-6)
    timer = make_timer(device)
    opened = timer.tie()
    device.host(20_000_000)  # 40 ppm of it are 0.8 µs
    assert timer.check(WindowTimes(opened, timer.tie())).drift_ppm == 0.0


def test_durations_are_the_device_s(gpu):
    device = gpu()
    timer = make_timer(device)
    moments = []
    for _ in range(3):
        begin = timer.mark()
        device.launch(7_000_000)
        device.host(1_000)  # the host is done long before the device
        moments.append((begin, timer.mark()))
    assert timer.durations_ns(moments) == [pytest.approx(7_000_000, abs=1_100)] * 3
    assert len(timer._pool) == 6


def test_the_record_says_how_well_clocks_were_tied_and_how_long_iterations_took(
    gpu, make_tracer, read_rank_file
):
    device = gpu()
    tracer, path = make_tracer(interval=3, window=1, timer=make_timer(device))
    for iteration in range(1, 5):
        with tracer.iteration(iteration):
            device.launch(3_000_000)
            device.host(5_000_000)
    tracer.close()
    first, second = read_rank_file(path).windows
    assert first["tie_width_ns"] == second["tie_width_ns"] > 0
    assert first["timings"] == []
    durations = {iteration: duration for iteration, _, duration in second["timings"]}
    assert durations[2] == durations[3] == pytest.approx(5_000_000, abs=100)
    assert durations[1] == pytest.approx(5_000_000, abs=50_000)  # with its ties


def test_the_training_thread_waits_for_the_device_between_iterations_only(
    gpu, make_tracer, monkeypatch
):
    device = gpu()
    timer = make_timer(device)
    tracer, _ = make_tracer(interval=4, window=2, timer=timer)
    training, waited = threading.get_ident(), []

    def watched(name):
        original = getattr(FakeEvent, name)

        def wait(event):
            if threading.get_ident() == training:
                waited.append(tracer.active)
            return original(event)

        return wait

    for name in ("synchronize", "query"):
        monkeypatch.setattr(FakeEvent, name, watched(name))
    for iteration in range(1, 13):
        with tracer.iteration(iteration):
            for _ in range(20):
                with tracer.span("forward", Kind.COMPUTE):
                    device.launch(1_000_000)
    assert waited and not any(waited)  # ties at both ends of a window, and nothing else
    num_ties = 3 * 2 * cuda._TIE_ATTEMPTS
    assert len(waited) <= num_ties * 4


class RecordedOn:
    """An event that knows the streams on which it was recorded."""

    def __init__(self):
        self.streams = []

    def record(self, stream):
        self.streams.append(stream)


def test_the_current_stream_is_made_once_and_found_again_by_its_handle(monkeypatch):
    current, made = [7], []

    def current_stream(device):
        made.append(f"stream {current[0]} of device {device}")
        return made[-1]

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: current[0],
                        raising=False)  # fmt: skip
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    streams, event = CurrentStream(1), RecordedOn()
    for handle in (7, 7, 7, 8, 7):  # another stream was chosen, or another thread asks
        current[0] = handle
        streams.record(event)
    assert event.streams == [f"stream {handle} of device 1" for handle in (7, 7, 7, 8, 7)]
    assert len(made) == 2


def test_where_torch_tells_no_handle_it_is_asked_for_the_stream(monkeypatch):
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"asked for {device}")
    event = RecordedOn()
    CurrentStream(0).record(event)
    assert event.streams == ["asked for 0"]


@pytest.mark.parametrize("made", ["weight", "in inference mode", "nothing"])
def test_what_may_change_unseen_is_never_complete(gpu, made):
    with torch.inference_mode(made == "in inference mode"):
        tensor = None if made == "nothing" else torch.ones(3)
    if made == "weight":
        tensor = torch.nn.Parameter(tensor)  # a subclass: others may hold its memory
    timer = make_timer(gpu())
    assert timer.mark_at(tensor) is not timer.mark_at(tensor)


def test_a_tensor_with_the_identity_of_one_that_is_gone_is_another_one(gpu):
    timer, tensor = make_timer(gpu()), torch.ones(1)
    first = timer.mark_at(tensor)
    del tensor
    again = [torch.ones(1) for _ in range(20)]  # one of them gets its memory
    assert all(timer.mark_at(one) is not first for one in again)


def test_what_is_complete_at_the_newest_mark_needs_no_other(gpu):
    timer, tensor = make_timer(gpu()), torch.ones(1)
    first = timer.mark_at(tensor)
    assert timer.mark_at(tensor) is first
    assert timer.mark_at(torch.ones(1)) is not first  # another one that looks alike


def test_what_was_changed_since_the_newest_mark_gets_a_mark_of_its_own(gpu):
    timer, tensor = make_timer(gpu()), torch.ones(1)
    first = timer.mark_at(tensor)
    tensor.add_(1)
    assert timer.mark_at(tensor) is not first


def test_a_mark_of_anything_else_comes_between(gpu):
    timer, tensor = make_timer(gpu()), torch.ones(1)
    first = timer.mark_at(tensor)
    timer.mark()
    assert timer.mark_at(tensor) is not first
    assert timer.mark_at(None) is not timer.mark_at(None)


def test_work_whose_change_nobody_sees_still_lasts(gpu):
    """A collective fills its tensor, a module may return what it was given."""
    device = gpu()
    timer, tensor = make_timer(device), torch.ones(1)
    begin = timer.mark_at(tensor)
    device.launch(5_000)
    end = timer.mark_after(tensor)
    assert end is not begin
    assert timer.mark_at(tensor, end) is not end
    opened = timer.tie()
    device.host(10_000_000)
    (record,) = timer.resolve([compute(timer, begin, end)], WindowTimes(opened, timer.tie()))
    assert record[4] == pytest.approx(5_000, abs=100)


def test_a_shared_event_is_given_back_once(gpu):
    device = gpu()
    timer, tensor = make_timer(device), torch.ones(1)
    opened = timer.tie()
    marks = [timer.mark(), timer.mark_at(tensor), timer.mark_at(tensor), timer.mark()]
    device.host(10_000_000)
    spans = [compute(timer, begin, end) for begin, end in zip(marks[::2], marks[1::2], strict=True)]
    timer.resolve(spans, WindowTimes(opened, timer.tie()))
    assert len(timer._pool) == device.num_made - 1  # all but the tie that the next may open with


def test_a_collective_that_goes_on_by_itself_leaves_nothing_complete(gpu):
    """Torch does not count what it does to its tensor, and the wait for it takes no mark."""
    timer, tensor = make_timer(gpu()), torch.ones(1)
    opened = timer.mark_at(tensor)
    begin = timer.mark_before(tensor)
    assert begin is opened
    assert timer.mark_at(tensor) is not begin


def test_layers_in_a_row_share_the_mark_between_them(gpu, make_tracer):
    """In forward order by the tensor that is handed on, in backward by its gradient."""
    device = gpu()
    tracer, _ = make_tracer(timer=make_timer(device))
    position = Position()
    backward_spans = BackwardSpans(tracer, position)

    class Layer(torch.nn.Linear):
        pass

    modules = Modules(tracer, position, backward_spans)
    Layer.forward = modules.forward_of("layer", torch.nn.Linear.forward)
    x = torch.ones(8, 4, requires_grad=True) * 1
    with tracer.iteration(1):
        for layer in [Layer(4, 4) for _ in range(4)]:
            x = layer(x)
        x.sum().backward()
        spans = list(tracer._spans)
    for name in ("layer", "layer-backward"):
        row = [span for span in spans if span.name == name]
        assert len(row) == 4
        for earlier, later in itertools.pairwise(row):
            assert earlier.end is later.begin and earlier.begin is not earlier.end
