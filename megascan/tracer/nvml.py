"""What NVML says of a rank's device: clock, power, heat, links, what it does, and for whom else.

Read by the writer's thread after a window, at most twice a second; what counts from the last
reading on begins with the first window. A reading that the device, the driver or a container does
not give is left out.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from statistics import fmean
from types import ModuleType

from megascan.tracer.timer import Spacing

_LEAST_NS_BETWEEN_READINGS = 500_000_000
"""A reading keeps the driver busy for a millisecond, and training's launches need the driver, too.
"""


class Nvml:
    """NVML's readings of a device, by its UUID; none without the pynvml package or a driver."""

    def __init__(self, uuid: str) -> None:
        self._readings: dict[str, Callable[[], float]] = {}
        self._activity: _Activity | None = None
        self._spacing = Spacing(_LEAST_NS_BETWEEN_READINGS)
        with contextlib.suppress(Exception):  # absent package, driver or permission
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            self._readings = _readings_of(nvml, handle)
            self._activity = _Activity(nvml, handle)  # raises for devices before Hopper

    def begin(self) -> None:
        """Count what the device does from now on."""
        if self._activity is not None:
            with contextlib.suppress(Exception):
                self._activity.begin()

    def read(self) -> dict[str, float]:
        """Read the device; return nothing if it was read within the last half second.

        Readings that the device does not support are left out.
        """
        if self._spacing.passed_ns() is None:
            return {}
        values: dict[str, float] = {}
        for name, reading in self._readings.items():
            with contextlib.suppress(Exception):  # NVMLError_NotSupported, a lost device
                values[name] = float(reading())
        if self._activity is not None:
            with contextlib.suppress(Exception):
                values |= self._activity.read()
        return values


def _readings_of(nvml: ModuleType, handle: object) -> dict[str, Callable[[], float]]:
    clock, temperature = nvml.NVML_CLOCK_SM, nvml.NVML_TEMPERATURE_GPU
    reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or (
        nvml.nvmlDeviceGetCurrentClocksThrottleReasons  # its name before driver 535
    )
    return {
        "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, clock),
        "sm_clock_max_mhz": cache(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, clock)),
        "clock_event_reasons": lambda: reasons(handle),
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, temperature),
        "pcie_lanes": lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
        "pcie_lanes_max": cache(lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
        "pcie_generation": lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
        "pcie_generation_max": cache(lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
        "nvlinks_up": lambda: _num_nvlinks_up(nvml, handle),
        "others_sm_percent": _OtherProcesses(nvml, handle).read,
    }


def _num_nvlinks_up(nvml: ModuleType, handle: object) -> int:
    """Return how many NVLinks are active. Raises NVMLError where the device has none."""
    num_up: int = nvml.nvmlDeviceGetNvLinkState(handle, 0)
    with contextlib.suppress(nvml.NVMLError):  # a device has fewer links than there may be
        for link in range(1, nvml.NVML_NVLINK_MAX_LINKS):
            num_up += nvml.nvmlDeviceGetNvLinkState(handle, link)
    return num_up


class _Activity:
    """For which share of the time a device multiplied matrices, and which share of what its memory
    can carry it carried, in per cent since the last reading: how much it has done, however fast.

    Raises NVMLError where the device does not count that: before Hopper, and for parts of a device.
    """

    def __init__(self, nvml: ModuleType, handle: object) -> None:
        if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        self._nvml, self._handle = nvml, handle
        self._last, self._next = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        self._names = {
            nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: "tensor_percent",
            nvml.NVML_GPM_METRIC_DRAM_BW_UTIL: "dram_percent",
        }
        self._asked = nvml.c_nvmlGpmMetricsGet_t()
        self._asked.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._asked.numMetrics = len(self._names)
        for place, number in enumerate(self._names):
            self._asked.metrics[place].metricId = number
        self._has_begun = False

    def begin(self) -> None:
        self._nvml.nvmlGpmSampleGet(self._handle, self._last)
        self._has_begun = True

    def read(self) -> dict[str, float]:
        self._nvml.nvmlGpmSampleGet(self._handle, self._next)
        self._asked.sample1, self._asked.sample2 = self._last, self._next
        self._last, self._next = self._next, self._last
        if not self._has_begun:
            self._has_begun = True
            return {}
        self._nvml.nvmlGpmMetricsGet(self._asked)
        told = self._asked.metrics[: self._asked.numMetrics]
        return {self._names[one.metricId]: one.value for one in told if not one.nvmlReturn}


class _OtherProcesses:
    """Which share of the time kernels of other processes ran on this process's device, in per cent
    since the last reading.

    In a container NVML may give numbers of processes that are not the container's: then the busiest
    one is taken for this process.
    """

    def __init__(self, nvml: ModuleType, handle: object) -> None:
        self._nvml, self._handle = nvml, handle
        self._since_us = time.time_ns() // 1000

    def read(self) -> float:
        since_us, self._since_us = self._since_us, time.time_ns() // 1000
        nvml, handle = self._nvml, self._handle
        running = {one.pid for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        if len(running) < 2:
            return 0.0
        samples = defaultdict(list)
        for one in nvml.nvmlDeviceGetProcessUtilization(handle, since_us):
            samples[one.pid].append(one.smUtil)
        shares = {process: fmean(values) for process, values in samples.items()}
        own = os.getpid() if os.getpid() in running else max(shares, key=shares.__getitem__)
        return sum(share for process, share in shares.items() if process != own)
