"""One thing that was looked at, and how it stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from megascan.header import Json


class Status(StrEnum):
    """A warning does not fail a probe, a problem does."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, kw_only=True)
class Check:
    """`text` is a sentence with the numbers; `values` are the same for programs."""

    name: str
    status: Status
    text: str
    values: Mapping[str, Json] = field(default_factory=dict)


def worst(checks: Sequence[Check]) -> Status:
    """Return the status of all together."""
    order = list(Status)
    return max((check.status for check in checks), key=order.index, default=Status.OK)


def as_text(checks: Sequence[Check]) -> str:
    """Return a line a check, and a last one that sums up."""
    width = max(len(check.name) for check in checks)
    lines = [f"{check.status:<8} {check.name:<{width}}  {check.text}" for check in checks]
    counts = {status: sum(check.status is status for check in checks) for status in Status}
    summary = {
        Status.OK: f"healthy: {len(checks)} checks",
        Status.WARNING: f"usable: {counts[Status.WARNING]} of {len(checks)} checks warn",
        Status.PROBLEM: f"unhealthy: {counts[Status.PROBLEM]} of {len(checks)} checks failed",
    }
    return "\n".join([*lines, summary[worst(checks)]])


def as_json(checks: Sequence[Check], host: str) -> dict[str, Json]:
    """Return the same for programs."""
    return {
        "schema": 1,
        "host": host,
        "status": worst(checks),
        "checks": [
            {
                "name": check.name,
                "status": check.status,
                "text": check.text,
                "values": dict(check.values),
            }
            for check in checks
        ],
    }
