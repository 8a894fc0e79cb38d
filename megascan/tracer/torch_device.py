"""The GPU of this process, as torch.cuda and NVML show it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from megascan.tracer.nvml import Nvml
from megascan.tracer.timer import AsyncWork

if TYPE_CHECKING:
    from megascan.tracer.device import Event, TensorState


class TorchDevice:
    """The current device, with streams that only the tracer uses."""

    def __init__(self) -> None:
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        self.name = f"GPU-{uuid}"
        self.can_wait_aside = can_wait_aside()
        self._aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._from = torch.zeros(1, device="cuda")
        self._to = torch.zeros(1).pin_memory()
        self._after: dict[str, torch.cuda.Stream] = {}
        self._current = CurrentStream(torch.cuda.current_device())
        self._nvml = Nvml(self.name)

    def new_event(self) -> Event:
        """An event that takes time."""
        event: Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call,assignment]
        return event

    def record(self, event: Event) -> None:
        """Record on the stream that is current for this thread."""
        event.record(self._current.find())

    @staticmethod
    def state_of(tensor: object) -> TensorState | None:
        """Of a plain tensor; what others hold is in the memory of others."""
        if type(tensor) is not torch.Tensor or _WEAK_REFERENCE is None or tensor.is_inference():
            return None
        return _TensorState(tensor, _WEAK_REFERENCE(tensor))

    def record_aside(self, event: Event) -> None:
        """Record on the stream for ties, behind a copy of one number to the host.

        Copies to the host have a queue of their own on the device. Without one the event would
        queue up behind all kernels launched so far where all streams share one queue, as Megatron
        has it (CUDA_DEVICE_MAX_CONNECTIONS=1): 40 ms instead of 40 µs with 40 ms of kernels ahead.
        """
        with torch.cuda.stream(self._aside):
            self._to.copy_(self._from, non_blocking=True)
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


class _WeakReference(Protocol):
    def expired(self) -> bool: ...


_WEAK_REFERENCE: Callable[[torch.Tensor], _WeakReference] | None = getattr(
    torch._C, "_WeakTensorRef", None
)
"""Torch's own kind: Python's goes with the Python object, of which a tensor may have several."""


class _TensorState:
    """Where a tensor lies, and torch's count of changes to it.

    The weak reference tells whether it still lies there: later tensors get the memory of earlier
    ones, but not while those live.
    """

    __slots__ = ("_pointer", "_reference", "_version")

    def __init__(self, tensor: torch.Tensor, reference: _WeakReference) -> None:
        self._pointer, self._version = tensor.data_ptr(), tensor._version
        self._reference = reference

    def is_that_of(self, tensor: object) -> bool:
        """Whether it is the same memory, or a part of it from its begin on, and unchanged."""
        return (
            type(tensor) is torch.Tensor
            and tensor.data_ptr() == self._pointer
            and tensor._version == self._version
            and not self._reference.expired()
        )


class CurrentStream:
    """The current stream of a thread, without building a new Python object for it every time.

    torch makes one of each `current_stream()`, which takes longer than recording an event. By its
    raw handle, which is to be had cheaply, the one made first is found again. Where torch does not
    tell the handle, it is asked for the stream.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._handle_of: Callable[[int], int] | None = getattr(
            torch._C, "_cuda_getCurrentRawStream", None
        )
        self._known: dict[int, torch.cuda.Stream] = {}

    def find(self) -> torch.cuda.Stream:
        """The stream on which the calling thread launches now."""
        if self._handle_of is None:
            return torch.cuda.current_stream(self._device)
        handle = self._handle_of(self._device)
        stream = self._known.get(handle)
        if stream is None:
            stream = self._known[handle] = torch.cuda.current_stream(self._device)
        return stream


def can_wait_aside() -> bool:
    """Not where a wait stops the host, nor where all streams share one hardware queue.

    Megatron sets CUDA_DEVICE_MAX_CONNECTIONS=1 to order its kernels; a wait on any stream then
    holds up the kernels launched after it, and the overlap that the setting is there for is gone.
    """
    blocking = os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") not in ("", "0")
    return not blocking and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"
