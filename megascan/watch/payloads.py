"""What is told, and in whose shape: our own JSON, Slack's, PagerDuty's.

Every event is a JSON object: `event` (raised, changed, cleared, hang, moves-again), a `number` that
rises and tells repeats apart, `time` in unix seconds, `job`, and the `finding` or `hang`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeAlias, cast

from megascan.errors import ConfigError
from megascan.header import Json
from megascan.watch.accounts import Account, Event
from megascan.watch.hang import Hang

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


SHAPES: Mapping[str, Payload] = {"json": as_json, "slack": as_slack, "pagerduty": as_pagerduty}


def shape_for(host: str) -> str:
    """Guess the shape that a webhook's host understands."""
    if host.endswith("slack.com"):
        return "slack"
    return "pagerduty" if host.endswith("pagerduty.com") else "json"
