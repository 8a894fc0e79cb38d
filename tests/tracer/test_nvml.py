"""NVML through a stand-in of its package: what is read, in which units, and what may be absent."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from megascan.tracer import cuda
from megascan.tracer.cuda import Nvml

UUID = "GPU-3f9a"


class NotSupportedError(Exception):
    pass


def make_package(reasons="nvmlDeviceGetCurrentClocksEventReasons"):
    package = ModuleType("pynvml")
    package.NVML_CLOCK_SM, package.NVML_TEMPERATURE_GPU = 1, 0
    package.nvmlInit = lambda: None
    package.nvmlDeviceGetHandleByUUID = {UUID: "handle"}.__getitem__
    package.nvmlDeviceGetClockInfo = lambda handle, clock: {("handle", 1): 1755}[handle, clock]
    package.nvmlDeviceGetMaxClockInfo = lambda handle, clock: {("handle", 1): 1980}[handle, clock]
    setattr(package, reasons, lambda handle: 0x8)
    package.nvmlDeviceGetPowerUsage = lambda handle: 612_345  # mW
    package.nvmlDeviceGetTemperature = lambda handle, sensor: 71
    return package


READINGS = {
    "sm_clock_mhz": 1755.0,
    "sm_clock_max_mhz": 1980.0,
    "clock_event_reasons": 8.0,
    "power_w": 612.345,
    "temperature_c": 71.0,
}


@pytest.mark.parametrize(
    "reasons",
    ["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"],
)
def test_clock_reasons_power_and_temperature(monkeypatch, reasons):
    monkeypatch.setitem(sys.modules, "pynvml", make_package(reasons))
    assert Nvml(UUID).read() == READINGS


def test_a_reading_that_the_device_lacks_is_left_out(monkeypatch):
    package = make_package()

    def refuse(handle):
        raise NotSupportedError

    package.nvmlDeviceGetPowerUsage = refuse
    monkeypatch.setitem(sys.modules, "pynvml", package)
    assert set(READINGS) - set(Nvml(UUID).read()) == {"power_w"}


def test_short_windows_share_a_reading(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", make_package())
    now_ms = [0]
    monkeypatch.setattr(cuda, "now_ns", lambda: now_ms[0] * 1_000_000)
    device, found = Nvml(UUID), []
    for now_ms[0] in (0, 100, 499, 500, 900, 1001):
        found.append(bool(device.read()))
    assert found == [True, False, False, True, False, True]


def test_another_device_is_not_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", make_package())
    assert Nvml("GPU-other").read() == {}


def test_no_package_no_readings(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Nvml(UUID).read() == {}
