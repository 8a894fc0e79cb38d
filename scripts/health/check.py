"""The result of one check, and results of all checks as text or JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from megascan.header import Json


class Status(StrEnum):
    """Status of a check; a problem fails a probe, a warning does not."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, kw_only=True)
class Check:
    """Result of one check: `text` is a sentence with numbers, `values` has them for programs."""

    name: str
    status: Status
    text: str
    values: Mapping[str, Json] = field(default_factory=dict)


def worst(checks: Sequence[Check]) -> Status:
    """Return the worst status of all checks."""
    order = list(Status)
    return max((check.status for check in checks), key=order.index, default=Status.OK)


def as_text(checks: Sequence[Check]) -> str:
    """Return one line for each check, and a last line that sums up."""
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
    """Return the checks as JSON for programs."""
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
