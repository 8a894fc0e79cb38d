"""What is told, and in whose shape: our own JSON, Slack's, PagerDuty's, OpenTelemetry's.

Every event is a JSON object: `event` (raised, changed, cleared, hang, moves-again), a `number` that
rises and tells repeats apart, `time` in unix seconds, `job`, and the `finding` or `hang`. Verdicts
(`verdict_event`) are printed and not delivered.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import orjson

from megascan.errors import ConfigError
from megascan.header import Json
from megascan.watch.accounts import Account, Event
from megascan.watch.hang import Hang

if TYPE_CHECKING:
    from megascan.watch.ring import Judgement

Payload: TypeAlias = Callable[[Mapping[str, Any]], dict[str, Json]]
PAGERDUTY_KEY = "PAGERDUTY_ROUTING_KEY"
HANG, MOVES_AGAIN = "hang", "moves-again"
ENDINGS = ("cleared", MOVES_AGAIN)


def finding_event(event: Event, *, job: str, unix_s: float) -> dict[str, Json]:
    """Return the record of a change in a finding's life."""
    return {
        "event": event.change.value,
        "id": event.account.id,
        "time": round(unix_s, 3),
        "job": job,
        "text": sentence(event.change.value, event.account),
        "finding": event.account.to_json(),
    }


def hang_event(name: str, hang: Hang, *, job: str, run_id: str, unix_s: float) -> dict[str, Json]:
    """Return the record of a hang, or of its end."""
    text = f"HANG: {hang.headline}" if name == HANG else "the job moves again: a window came"
    return {
        "event": name,
        "id": f"hang-{run_id}-{hang.last_iteration}",
        "time": round(unix_s, 3),
        "job": job,
        "text": text,
        "hang": hang.to_json(),
    }


def verdict_event(judgement: Judgement, holding: Sequence[Account]) -> dict[str, Json]:
    """Return the record of a verdict, for machine-readable output."""
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


def sentence(change: str, account: Account) -> str:
    """Return an event of a finding in one line."""
    since = datetime.fromtimestamp(account.since_unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    cost = f"cost so far {account.cost_gpu_hours:.3g} GPU-hours"
    if change == "cleared":
        return (
            f"CLEARED {account.id}: {account.cause} of rank "
            f"{', '.join(map(str, account.ranks))} is gone after iteration "
            f"{account.last_iteration}; since {since}, {cost}"
        )
    return (
        f"{change.upper()} {account.id} (owner {account.owner}): {account.headline}; since "
        f"iteration {account.since_iteration} ({since}), {cost}"
    )


def as_json(event: Mapping[str, Any]) -> dict[str, Json]:
    """Return the event as it is."""
    return dict(event)


def as_slack(event: Mapping[str, Any]) -> dict[str, Json]:
    """Return a Slack message (incoming webhooks: `text`); its special characters are escaped."""
    text = str(event["text"])
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(character, entity)
    return {"text": f"*megascan* {event['job']}: {text}"}


def as_pagerduty(event: Mapping[str, Any]) -> dict[str, Json]:
    """Return a PagerDuty event (Events API v2), triggered and resolved under the finding's id.

    Raises ConfigError unless the environment has the integration's routing key.
    """
    key = os.environ.get(PAGERDUTY_KEY)
    if not key:
        raise ConfigError(
            f"{PAGERDUTY_KEY} is not set, expected the routing key of a PagerDuty integration"
        )
    if event["event"] in ENDINGS:
        return {"routing_key": key, "event_action": "resolve", "dedup_key": event["id"]}
    finding = cast("Mapping[str, Any]", event.get("finding", {}))
    is_urgent = event["event"] == HANG or finding.get("owner") == "node"
    return {
        "routing_key": key,
        "event_action": "trigger",
        "dedup_key": event["id"],
        "payload": {
            "summary": str(event["text"])[:1024],
            "source": ", ".join(sorted(set(finding.get("hosts", ())))) or str(event["job"]),
            "severity": "error" if is_urgent else "warning",
            "timestamp": datetime.fromtimestamp(float(event["time"]), UTC).isoformat(),
            "component": str(finding.get("cause", HANG)),
            "group": str(event["job"]),
            "custom_details": dict(event),
        },
    }


def as_otlp(event: Mapping[str, Any]) -> dict[str, Json]:
    """Return an OpenTelemetry log record, as a collector takes it over HTTP (OTLP, JSON).

    The shape is small and fixed, so no library is needed. What is nested stands in the attributes
    as JSON text.
    """
    severity, number = ("INFO", 9) if event["event"] in ENDINGS else ("ERROR", 17)
    if event.get("finding", {}).get("owner", "node") != "node":
        severity, number = "WARN", 13
    details = {**event.get("finding", {}), **event.get("hang", {})}
    attributes = {
        "megascan.id": event["id"],
        "megascan.number": event.get("number"),
        **{f"megascan.{name}": value for name, value in details.items() if name != "finding"},
    }
    record: dict[str, Json] = {
        "timeUnixNano": str(int(float(event["time"]) * 1e9)),
        "eventName": f"megascan.{event['event']}",
        "severityNumber": number,
        "severityText": severity,
        "body": {"stringValue": str(event["text"])},
        "attributes": _attributes(attributes),
    }
    resource = _attributes({"service.name": "megascan-watch", "megascan.job": event["job"]})
    logs: Json = [{"scope": {"name": "megascan.watch"}, "logRecords": [record]}]
    return {"resourceLogs": [{"resource": {"attributes": resource}, "scopeLogs": logs}]}


def _attributes(values: Mapping[str, Any]) -> list[Json]:
    """Return attributes as OTLP's JSON has them; 64-bit integers are text there."""
    found: list[Json] = []
    for name, value in values.items():
        if isinstance(value, bool):
            typed: dict[str, Json] = {"boolValue": value}
        elif isinstance(value, int):
            typed = {"intValue": str(value)}
        elif isinstance(value, float):
            typed = {"doubleValue": value}
        else:
            text = value if isinstance(value, str) else orjson.dumps(value).decode()
            typed = {"stringValue": text}
        if value is not None:
            found.append({"key": name, "value": cast("Json", typed)})
    return found


SHAPES: Mapping[str, Payload] = {
    "json": as_json,
    "slack": as_slack,
    "pagerduty": as_pagerduty,
    "otlp": as_otlp,
}


def shape_for(host: str, path: str) -> str:
    """Guess the shape that a webhook understands by its host, and a collector by its path."""
    if path.endswith("/v1/logs"):
        return "otlp"
    if host.endswith("slack.com"):
        return "slack"
    return "pagerduty" if host.endswith("pagerduty.com") else "json"
