"""NVML through a stand-in of its package: what is read, in which units, and what may be absent."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from megascan.tracer import timer
from megascan.tracer.nvml import Nvml

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
    package.nvmlDeviceGetCurrPcieLinkWidth = lambda handle: 8
    package.nvmlDeviceGetMaxPcieLinkWidth = lambda handle: 16
    package.nvmlDeviceGetCurrPcieLinkGeneration = lambda handle: 4
    package.nvmlDeviceGetMaxPcieLinkGeneration = lambda handle: 5
    package.NVMLError, package.NVML_NVLINK_MAX_LINKS = NotSupportedError, 18
    package.nvmlDeviceGetNvLinkState = link_state
    package.nvmlDeviceGetComputeRunningProcesses = lambda handle: [process(os.getpid())]
    return package


def process(pid, share=None):
    return SimpleNamespace(pid=pid, smUtil=share)


def link_state(handle, link):
    """Twelve links, of which one is down."""
    if link >= 12:
        raise NotSupportedError
    return int(link != 3)


READINGS = {
    "sm_clock_mhz": 1755.0,
    "sm_clock_max_mhz": 1980.0,
    "clock_event_reasons": 8.0,
    "power_w": 612.345,
    "temperature_c": 71.0,
    "pcie_lanes": 8.0,
    "pcie_lanes_max": 16.0,
    "pcie_generation": 4.0,
    "pcie_generation_max": 5.0,
    "nvlinks_up": 11.0,
    "others_sm_percent": 0.0,
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


def test_a_device_without_nvlinks_has_no_number_of_them(monkeypatch):
    package = make_package()

    def refuse(handle, link):
        raise NotSupportedError

    package.nvmlDeviceGetNvLinkState = refuse
    monkeypatch.setitem(sys.modules, "pynvml", package)
    assert set(READINGS) - set(Nvml(UUID).read()) == {"nvlinks_up"}


@pytest.mark.parametrize(
    ("shares", "others"),
    [
        ({"own": [70, 72], "hog": [27, 29]}, 28.0),
        ({"own": [10], "hog": [60], "another": [30]}, 90.0),
        ({"hog": [60]}, 60.0),  # this one did nothing meanwhile
        ({"foreign": [27], "unknown": [73]}, 27.0),  # numbers of another namespace
    ],
)
def test_what_other_processes_take_of_the_device(monkeypatch, shares, others):
    package, pids = make_package(), {"own": os.getpid(), "hog": 4, "another": 5}
    samples = [
        process(pids.get(name, hash(name)), share)
        for name, values in shares.items()
        for share in values
    ]
    running = [process(os.getpid())] if "hog" in shares else []
    package.nvmlDeviceGetComputeRunningProcesses = lambda handle: [*running, *samples]
    package.nvmlDeviceGetProcessUtilization = lambda handle, since_us: samples
    monkeypatch.setitem(sys.modules, "pynvml", package)
    assert Nvml(UUID).read()["others_sm_percent"] == others


def test_others_that_do_nothing_are_not_read(monkeypatch):
    package = make_package()

    def find_nothing(handle, since_us):
        raise NotSupportedError  # NVMLError_NotFound

    package.nvmlDeviceGetComputeRunningProcesses = lambda handle: [process(1), process(2)]
    package.nvmlDeviceGetProcessUtilization = find_nothing
    monkeypatch.setitem(sys.modules, "pynvml", package)
    assert "others_sm_percent" not in Nvml(UUID).read()


class Gpm:
    """Counts of a Hopper: of each sample the per cent since the last one."""

    def __init__(self, package):
        self.now, self.lacks_memory = 0.0, False
        package.NVML_GPM_METRIC_ANY_TENSOR_UTIL, package.NVML_GPM_METRIC_DRAM_BW_UTIL = 5, 10
        package.NVML_GPM_METRICS_GET_VERSION = 1
        package.nvmlGpmQueryDeviceSupport = lambda handle: SimpleNamespace(isSupportedDevice=1)
        package.nvmlGpmSampleAlloc = lambda: SimpleNamespace(time=None)
        package.nvmlGpmSampleGet = self.sample
        package.c_nvmlGpmMetricsGet_t = lambda: SimpleNamespace(
            metrics=[SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(9)]
        )
        package.nvmlGpmMetricsGet = self.get

    def sample(self, handle, sample):
        sample.time = self.now

    def get(self, asked):
        assert asked.numMetrics == 2
        passed = asked.sample2.time - asked.sample1.time
        for metric in asked.metrics[:2]:
            metric.value = metric.metricId * passed
            metric.nvmlReturn = 3 * (metric.metricId == 10 and self.lacks_memory)


@pytest.mark.parametrize("begins", [False, True])
def test_what_a_hopper_does_counts_from_the_last_reading_on(monkeypatch, begins):
    package = make_package()
    gpm = Gpm(package)
    monkeypatch.setitem(sys.modules, "pynvml", package)
    now_ms = [0]
    monkeypatch.setattr(timer, "now_ns", lambda: now_ms[0] * 1_000_000)
    device, found = Nvml(UUID), []
    gpm.now = 3.0
    if begins:
        device.begin()
    for now_ms[0], gpm.now in ((1000, 4.0), (1400, 5.0), (2000, 7.0)):
        read = device.read()
        found.append((read.get("tensor_percent"), read.get("dram_percent")))
    first = (5.0, 10.0) if begins else (None, None)
    assert found == [first, (None, None), (15.0, 30.0)]


def test_a_count_that_the_device_lacks_is_left_out(monkeypatch):
    package = make_package()
    gpm = Gpm(package)
    gpm.lacks_memory = True
    monkeypatch.setitem(sys.modules, "pynvml", package)
    device = Nvml(UUID)
    device.begin()
    assert device.read() == READINGS | {"tensor_percent": 0.0}


def test_an_older_device_and_a_part_of_one_count_nothing(monkeypatch):
    package = make_package()
    gpm = Gpm(package)
    package.NVML_ERROR_NOT_SUPPORTED = 3
    monkeypatch.setitem(sys.modules, "pynvml", package)

    def refuse(handle, sample):
        raise NotSupportedError

    package.nvmlGpmSampleGet = refuse
    part = Nvml(UUID)
    part.begin()
    assert part.read() == READINGS
    package.nvmlGpmSampleGet = gpm.sample
    package.nvmlGpmQueryDeviceSupport = lambda handle: SimpleNamespace(isSupportedDevice=0)
    older = Nvml(UUID)
    older.begin()
    assert older.read() == READINGS


def test_short_windows_share_a_reading(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", make_package())
    now_ms = [0]
    monkeypatch.setattr(timer, "now_ns", lambda: now_ms[0] * 1_000_000)
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
