"""Measure every device of a node alike and name a device that is weaker, or computes other bits.

The tracer finds a slow device while a job runs; the sweep finds it before a job starts, or confirms
it on a drained node. All devices are measured in each of several rounds, so that events on the node
affect all devices. A device's value is the median of its rounds, and

    slowdown = median of the other devices' values / its own value          (values are rates)

A device is weak if its slowdown exceeds 1 + max(floor, _SIGMAS x noise), and at least _SHARE of its
rounds lie below the other devices' median of the same round. `noise` is the standard error of a
device's median: 1.2533 x spread / √rounds, where the spread of a device's rounds about its median
is 1.4826 x MAD, and the median over devices is taken. Uneven load on a node makes noise, and so
accuses no device.

Example: rates 100, 101, 99, 80 with a noise of 1 %: the fourth is 1.25 x slower, limit 1.05.
Limits: a node that is slow as a whole looks even; compare its figures with those of another node.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from health.check import Check, Status
from megascan.errors import MissingError
from megascan.header import Json

DEFAULT_FLOOR_RATIO = 0.05
DEFAULT_ROUNDS = 12
_SIGMAS = 5.0
_SHARE = 0.8
_MAD_TO_SIGMA = 1.4826
_MEDIAN_TO_MEAN_ERROR = 1.2533

Rounds = Sequence[Sequence[float]]
"""(round, device): a rate, more is better."""


class Probe(Protocol):
    """Measures the devices of a node; values are rates, more is better."""

    devices: Sequence[str]

    def matrix_product(self) -> Sequence[float]:
        """Return TFLOP/s of every device in one round."""

    def memory_copy(self) -> Sequence[float]:
        """Return GB/s of every device in one round."""

    def pair_bandwidth(self, source: int, target: int) -> float:
        """Return GB/s from one device to another."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One kind of measurement of one device."""

    device: str
    kind: str
    unit: str
    value: float
    slowdown: float
    limit: float
    share_below: float

    @property
    def weak(self) -> bool:
        """Return whether the device is slower than its limit allows, and in most rounds."""
        return self.slowdown > self.limit and self.share_below >= _SHARE


def judge(
    rounds: Rounds, devices: Sequence[str], kind: str, unit: str, floor_ratio: float
) -> list[Figure]:
    """Compare the devices in one kind of measurement, by the rule in the module's docstring."""
    values = [median(row[i] for row in rounds) for i in range(len(devices))]
    limit = 1 + max(floor_ratio, _SIGMAS * _noise_ratio(rounds, values))
    figures = []
    for i, device in enumerate(devices):
        others = [value for j, value in enumerate(values) if j != i]
        below = (
            [row[i] < median(row[j] for j in range(len(devices)) if j != i) for row in rounds]
            if others
            else []
        )
        figures.append(
            Figure(
                device=device, kind=kind, unit=unit, value=values[i], limit=limit,
                slowdown=median(others) / values[i] if others else 1.0,
                share_below=sum(below) / len(below) if below else 0.0,
            )
        )  # fmt: skip
    return figures


def _noise_ratio(rounds: Rounds, values: Sequence[float]) -> float:
    """Return the standard error of a typical device's median, as a share of the median."""
    spreads = [
        _MAD_TO_SIGMA * median(abs(row[i] - value) for row in rounds) / value
        for i, value in enumerate(values)
    ]
    return _MEDIAN_TO_MEAN_ERROR * median(spreads) / math.sqrt(len(rounds))


def sweep(probe: Probe, num_rounds: int, floor_ratio: float) -> list[Figure]:
    """Measure and judge every device: matrix product, memory copy, bandwidth to other devices."""
    devices = probe.devices
    kinds: list[tuple[str, str, Callable[[], Sequence[float]]]] = [
        ("matrix product", "TFLOP/s", probe.matrix_product),
        ("memory copy", "GB/s", probe.memory_copy),
    ]
    if len(devices) > 1:
        kinds.append(("pair bandwidth", "GB/s", lambda: _pair_round(probe)))
    for _, _, measure in kinds:
        measure()  # the first round is for caches, clocks and kernels
    rounds: dict[str, list[Sequence[float]]] = {kind: [] for kind, _, _ in kinds}
    for _ in range(num_rounds):
        for kind, _, measure in kinds:
            rounds[kind].append(measure())
    return [
        figure
        for kind, unit, _ in kinds
        for figure in judge(rounds[kind], devices, kind, unit, floor_ratio)
    ]


def _pair_round(probe: Probe) -> list[float]:
    """Return each device's bandwidth with other devices, both directions: the median of its pairs.

    A device whose own link is bad is slow in all pairs; a bad peer makes only one pair slow.
    """
    count = len(probe.devices)
    of_device: list[list[float]] = [[] for _ in range(count)]
    for source, target in itertools.permutations(range(count), 2):
        rate = probe.pair_bandwidth(source, target)
        of_device[source].append(rate)
        of_device[target].append(rate)
    return [median(rates) for rates in of_device]


def check_sweep(figures: Sequence[Figure]) -> list[Check]:
    """Return a check for every device: its figures, and which of them are weak."""
    return list(_checks(figures))


def _checks(figures: Sequence[Figure]) -> Iterator[Check]:
    for device in dict.fromkeys(figure.device for figure in figures):
        own = [figure for figure in figures if figure.device == device]
        text = ", ".join(f"{figure.kind} {figure.value:.4g} {figure.unit}" for figure in own)
        weak = [figure for figure in own if figure.weak]
        if weak:
            slow = " and ".join(f"{figure.kind} {figure.slowdown:.2f}x" for figure in weak)
            text += f"; WEAK: {slow} slower than the others' median (limit {weak[0].limit:.2f}x)"
        values: dict[str, Json] = {
            figure.kind.replace(" ", "_"): {
                "value": figure.value,
                "unit": figure.unit,
                "slowdown": figure.slowdown,
                "limit": figure.limit,
                "weak": figure.weak,
            }
            for figure in own
        }
        status = Status.PROBLEM if weak else Status.OK
        yield Check(name=device, status=status, text=text, values=values)


_NAME = "same bits"


def check_bits(*, use_cpu: bool, num_rounds: int) -> Check:
    """Let every GPU, or core, compute the same transformer layers and compare checksums."""
    if importlib.util.find_spec("torch") is None:
        return Check(name=_NAME, status=Status.WARNING, text="not compared: torch is missing")
    from detect.causes.corruption import findings_of
    from megascope.probe import CPU_SIZE, GPU_SIZE, Stack, find_devices, sweep

    try:
        devices = find_devices(use_cpu=use_cpu)
    except MissingError as error:
        return Check(name=_NAME, status=Status.OK, text=f"not compared: {error}")
    size = CPU_SIZE if devices[0].kind == "cpu" else GPU_SIZE
    findings, notes = findings_of(sweep([Stack(size, one) for one in devices], num_rounds))
    if findings:
        wrong = sorted({rank for finding in findings for rank in finding.ranks})
        names = [devices[rank].name for rank in wrong]
        return Check(
            name=_NAME,
            status=Status.PROBLEM,
            text=f"{', '.join(names)} computes wrongly: {findings[0].evidence[0]}",
            values={"wrong": [*names]},
        )
    text = f"{len(devices)} devices agree bit for bit in {num_rounds} rounds"
    status = Status.WARNING if notes else Status.OK
    return Check(name=_NAME, status=status, text="; ".join([text, *notes]))
