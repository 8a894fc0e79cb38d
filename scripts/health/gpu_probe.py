"""Measure all GPUs at once, as in training, so that the effects of heat and power show."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from health.devices import Gpu
from megascan.errors import MissingError

_SIZE = 8192
_NUM_PRODUCTS = 60  # about 0.1 s on an H100
_COPY_BYTES = 1 << 30
_NUM_COPIES = 40
_PAIR_BYTES = 256 << 20
_NUM_PAIR_COPIES = 4
_NEEDED_BYTES = 2 * _COPY_BYTES + 3 * 2 * _SIZE**2 + 2 * _PAIR_BYTES


class GpuProbe:
    """Measures every GPU that torch sees. Raises MissingError if a GPU is in use."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        uuids = {gpu.uuid: gpu.index for gpu in gpus}
        count = torch.cuda.device_count()
        self.devices: Sequence[str] = [_name(index, uuids) for index in range(count)]
        for index, device in enumerate(self.devices):
            _check_free(index, device)
        self._factors = [_on(index, torch.bfloat16, (_SIZE, _SIZE)) for index in range(count)]
        self._sources = [_on(index, torch.uint8, (_COPY_BYTES,)) for index in range(count)]
        self._targets = [torch.empty_like(source) for source in self._sources]
        self._threads = ThreadPoolExecutor(max_workers=count)

    def matrix_product(self) -> list[float]:
        """Return TFLOP/s in bfloat16, all GPUs at the same time."""
        flops = 2 * _SIZE**3 * _NUM_PRODUCTS
        times_s = self._at_once(self._multiply)
        return [flops / time_s / 1e12 for time_s in times_s]

    def memory_copy(self) -> list[float]:
        """Return GB/s, bytes read and written, all GPUs at the same time."""
        num_bytes = 2 * _COPY_BYTES * _NUM_COPIES
        return [num_bytes / time_s / 1e9 for time_s in self._at_once(self._copy)]

    def pair_bandwidth(self, source: int, target: int) -> float:
        """Return GB/s from one GPU's memory to another's, alone on the node."""
        data = self._sources[source][:_PAIR_BYTES]
        place = self._targets[target][:_PAIR_BYTES]
        place.copy_(data)
        _wait(source, target)
        started_s = time.perf_counter()
        for _ in range(_NUM_PAIR_COPIES):
            place.copy_(data, non_blocking=True)
        _wait(source, target)
        return _PAIR_BYTES * _NUM_PAIR_COPIES / (time.perf_counter() - started_s) / 1e9

    def _at_once(self, work: Callable[[int], None]) -> list[float]:
        """Return the seconds that `work` takes on each GPU, by its clock; all start at once."""
        return list(self._threads.map(lambda index: _timed(index, work), range(len(self.devices))))

    def _multiply(self, index: int) -> None:
        factor = self._factors[index]
        for _ in range(_NUM_PRODUCTS):
            torch.mm(factor, factor)

    def _copy(self, index: int) -> None:
        for _ in range(_NUM_COPIES):
            self._targets[index].copy_(self._sources[index])


def _timed(index: int, work: Callable[[int], None]) -> float:
    with torch.cuda.device(index):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        work(index)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def _wait(*indices: int) -> None:
    for index in indices:
        torch.cuda.synchronize(index)


def _on(index: int, kind: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape, dtype=kind, device=f"cuda:{index}")


def _name(index: int, driver_index: dict[str, int]) -> str:
    """Name the GPU by the driver's number, which CUDA_VISIBLE_DEVICES does not change, and UUID."""
    uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    return f"GPU {driver_index.get(uuid, index)} ({uuid})"


def _check_free(index: int, device: str) -> None:
    free_bytes, _ = torch.cuda.mem_get_info(index)
    if free_bytes < 1.2 * _NEEDED_BYTES:
        raise MissingError(
            f"{device} has {free_bytes / 1e9:.1f} GB free, the sweep needs "
            f"{1.2 * _NEEDED_BYTES / 1e9:.1f}; run it on a node without a job"
        )
