"""Whether all devices of this node compute the same bits."""

from __future__ import annotations

import importlib.util

from health.check import Check, Status
from megascan.errors import MissingError

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
