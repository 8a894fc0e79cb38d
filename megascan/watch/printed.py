"""What a watch prints: a line a verdict and a line an event, for people or for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from megascan.header import Json
from megascan.watch.accounts import Account
from megascan.watch.ring import Judgement


def verdict_record(judgement: Judgement, holding: Sequence[Account]) -> dict[str, Json]:
    """Return a verdict as an event of machine-readable output."""
    report, slowness = judgement.report, judgement.slowness
    slowest = max(slowness, key=lambda rank: slowness[rank]) if slowness else None
    return {
        "event": "verdict",
        "verdict": report.verdict.value,
        "iterations": list(report.iterations),
        "num_iterations": report.num_iterations,
        "iteration_s": round(report.iteration_ns / 1e9, 6),
        "findings": [finding.to_json() for finding in report.findings],
        "holding": [account.id for account in holding],
        "minimum_detectable_by_class": {
            name: round(value, 4) for name, value in report.minimum_detectable.items()
        },
        "slowest_rank": slowest,
        "slowest_ratio": None if slowest is None else round(slowness[slowest], 4),
        "missing_ranks": list(judgement.window.missing),
        "cpu_s": round(judgement.cpu_s, 3),
    }


def text_of(record: Mapping[str, Any]) -> str:
    """Return an event in one line for people."""
    return _verdict(record) if record["event"] == "verdict" else str(record["text"])


def _verdict(record: Mapping[str, Any]) -> str:
    first, last = record["iterations"]
    parts = [
        f"{record['verdict'].upper():9s}",
        f"iterations {first}-{last}",
        f"{1e3 * record['iteration_s']:.4g} ms each",
    ]
    if record["slowest_rank"] is not None:
        parts.append(f"slowest rank {record['slowest_rank']} {record['slowest_ratio']:.3f}x")
    if record["missing_ranks"]:
        number = len(record["missing_ranks"])
        parts.append(f"{number} rank{'s' * (number != 1)} missing")
    if record["holding"]:
        parts.append("holding " + ", ".join(record["holding"]))
    return "  ".join(parts)


def line(unix_s: float, text: str) -> str:
    """Return a log line."""
    return f"{datetime.fromtimestamp(unix_s, UTC).strftime('%Y-%m-%d %H:%M:%S')}  {text}"


def json_line(unix_s: float, record: Mapping[str, Any]) -> str:
    """Return an event as a line of JSON."""
    return orjson.dumps({"time": round(unix_s, 3), **record}).decode()
