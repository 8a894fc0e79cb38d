"""Readings of a GPU by NVML: clocks, power, temperature, and why the clock is what it is."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from types import ModuleType


class Nvml:
    """One device, found by its UUID; without the pynvml package or a driver it reads nothing."""

    def __init__(self, uuid: str) -> None:
        self._readings: dict[str, Callable[[], float]] = {}
        with contextlib.suppress(Exception):  # absent package, driver or permission
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._readings = _readings_of(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))

    def read(self) -> dict[str, float]:
        """What this device tells; a reading that it does not support is left out."""
        values: dict[str, float] = {}
        for name, reading in self._readings.items():
            with contextlib.suppress(Exception):  # NVMLError_NotSupported, a lost device
                values[name] = float(reading())
        return values


def _readings_of(nvml: ModuleType, handle: object) -> dict[str, Callable[[], float]]:
    clock, temperature = nvml.NVML_CLOCK_SM, nvml.NVML_TEMPERATURE_GPU
    reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or (
        nvml.nvmlDeviceGetCurrentClocksThrottleReasons  # its name before driver 535
    )
    return {
        "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, clock),
        "sm_clock_max_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, clock),
        "clock_event_reasons": lambda: reasons(handle),
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, temperature),
    }
