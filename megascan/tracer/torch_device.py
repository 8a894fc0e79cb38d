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
        self.waits_on_host = os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") not in ("", "0")
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
