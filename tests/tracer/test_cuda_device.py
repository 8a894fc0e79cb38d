"""CudaTimer on a real GPU; elsewhere `test_cuda_timer.py` has to do."""

from __future__ import annotations

import itertools

import pytest
import torch

from megascan.clock import HostClock, now_ns
from megascan.schema import Kind
from megascan.tracer.cuda import CudaTimer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SLEEP_CYCLES = 20_000_000  # some 10 ms


@pytest.fixture
def timer():
    from megascan.tracer.torch_device import TorchDevice

    torch.cuda.init()
    clock = HostClock(domain="host:boot", offset_ns=0, origin_ns=now_ns())
    return CudaTimer(clock, TorchDevice(), record_launches=True)


def test_ties_are_narrow(timer):
    assert timer.tie().width_ns < 200_000


def test_a_window_of_sleeping_kernels(timer, make_tracer, read_rank_file):
    tracer, path = make_tracer(timer=timer)
    torch.cuda._sleep(SLEEP_CYCLES)
    torch.cuda.synchronize()
    with tracer.iteration(1):
        for _ in range(20):
            with tracer.span("forward", Kind.COMPUTE):
                torch.cuda._sleep(SLEEP_CYCLES)
        launched_ns = now_ns()
    torch.cuda.synchronize()
    tracer.close()
    spans = read_rank_file(path).named("forward")
    durations = sorted(span["dur"] for span in spans)
    assert durations[-1] < 1.2 * durations[0]
    for earlier, later in itertools.pairwise(spans):
        assert 0 <= later["ts"] - earlier["ts"] - earlier["dur"] < 1_000
    # the host ran ahead, and its last launch lies before the device's last begin
    assert spans[-1]["args"]["launch_ns"] < -10 * durations[0] * 1000
    assert spans[-1]["ts"] * 1000 + timer._clock.origin_ns > launched_ns
