"""The GPU of this process, as torch.cuda and NVML show it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from megascan.tracer.nvml import Nvml
from megascan.tracer.timer import AsyncWork

if TYPE_CHECKING:
    from megascan.tracer.cuda import Event


class TorchDevice:
    """The current device, with streams that only the tracer uses."""

    def __init__(self) -> None:
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        self.name = f"GPU-{uuid}"
        self.can_wait_aside = can_wait_aside()
        self._aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._after: dict[str, torch.cuda.Stream] = {}
        self._nvml = Nvml(self.name)

    def new_event(self) -> Event:
        """An event that takes time."""
        event: Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call,assignment]
        return event

    def record_aside(self, event: Event) -> None:
        """Record on the stream for ties."""
        with torch.cuda.stream(self._aside):
            event.record()

    def record_after(self, event: Event, work: AsyncWork, lane: str) -> None:
        """Record when the work is done; a lane's stream holds nothing but such waits."""
        stream = self._after.get(lane)
        if stream is None:
            stream = self._after[lane] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            work.wait()
            event.record()

    def counters(self) -> dict[str, float]:
        """Clock, power and temperature."""
        return self._nvml.read()


def can_wait_aside() -> bool:
    """Not where a wait stops the host, nor where all streams share one hardware queue.

    Megatron sets CUDA_DEVICE_MAX_CONNECTIONS=1 to order its kernels; a wait on any stream then
    holds up the kernels launched after it, and the overlap that the setting is there for is gone.
    """
    blocking = os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") not in ("", "0")
    return not blocking and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"
