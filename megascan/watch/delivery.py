"""Deliver events to webhooks and commands, in the format of each receiver and at least once.

Every event is a JSON object: `event` (raised, changed, cleared, hang, moves-again), a `number` that
rises and by which repeats are known, `time` in unix seconds, `job`, and the `finding` or `hang`.
Receivers get an event in their own format: our JSON, Slack's, PagerDuty's, OpenTelemetry's.
Verdicts (`verdict_event`) are printed and not delivered.

A thread delivers to webhooks and commands, so that the watch is never held up. A failed delivery is
tried again after growing pauses. Events that are not delivered yet are in the state file, so that a
restarted watch delivers them. A webhook's URL is a secret: it may be read from a file (`@FILE`),
and messages show only its host.
"""

from __future__ import annotations

import hashlib
import html
import http.client
import os
import shlex
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast
from urllib.parse import urlsplit

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


def line_of(record: Mapping[str, Any]) -> str:
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
    text = html.escape(str(event["text"]), quote=False)
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

    The format is small and fixed, so no library is needed. Nested values become attributes with
    JSON text.
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
    """Return attributes in OTLP's JSON, in which 64-bit integers are text."""
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
    """Guess the format that a receiver understands: a collector by its path, others by the host."""
    if path.endswith("/v1/logs"):
        return "otlp"
    if host.endswith("slack.com"):
        return "slack"
    return "pagerduty" if host.endswith("pagerduty.com") else "json"


_TIMEOUT_S = 10.0
_COMMAND_TIMEOUT_S = 120.0
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 300.0
MOST_PENDING = 500
"""Events that wait for a channel at most; the oldest are dropped, with a warning."""


class Receiver(Protocol):
    """A place where operators receive events."""

    @property
    def name(self) -> str:
        """Return the name of the receiver in messages, without secrets."""

    @property
    def key(self) -> str:
        """Return an identifier of the receiver that stays across restarts, without secrets."""

    def tell(self, event: Mapping[str, Any]) -> None:
        """Deliver an event. Raises OSError if that failed and may succeed later."""


@dataclass(frozen=True)
class Webhook:
    """POSTs events to a URL."""

    url: str
    shape: str

    @classmethod
    def of(cls, text: str, shape: str | None) -> Webhook:
        """Make a webhook from a URL or @FILE. Raises ConfigError unless it is an http(s) URL."""
        url = text
        if text.startswith("@"):
            try:
                url = Path(text[1:]).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"--webhook {text}: cannot read that file ({error})") from error
        host, path = _host_and_path(url)
        chosen = cls(url, shape or shape_for(host, path))
        SHAPES[chosen.shape]({"event": "cleared", "id": "", "text": "", "job": "", "time": 0})
        return chosen

    @property
    def name(self) -> str:
        """Return the format of the webhook's messages and its host."""
        return f"{self.shape} webhook at {urlsplit(self.url).hostname}"

    @property
    def key(self) -> str:
        """Return a part of a hash of format and URL: one host may have several webhooks."""
        return _key(self.shape, self.url)

    def tell(self, event: Mapping[str, Any]) -> None:
        """POST the event. Any answer but 2xx is an error, also a redirection: it loses the body."""
        request = urllib.request.Request(
            self.url,
            data=orjson.dumps(SHAPES[self.shape](event)),
            headers={"Content-Type": "application/json", "User-Agent": "megascan-watch"},
        )
        with urllib.request.build_opener(_Stay).open(request, timeout=_TIMEOUT_S):
            pass


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Follow no redirection: urllib would only send a GET, and take the event for delivered."""


def _host_and_path(url: str) -> tuple[str, str]:
    """Return host and path of a webhook's URL. Raises ConfigError, which shows only the host.

    A URL to which no request can be made is refused at the start, not at the first event.
    """
    try:
        parts = urlsplit(url)
        scheme, host = parts.scheme, parts.hostname or ""
        is_sound = bool(host.encode("idna")) and parts.port != 0 and url.isascii()
    except ValueError:  # unclosed brackets, a port that is no number, too long a label
        scheme, host, is_sound = "", "", False
    if not is_sound or scheme not in ("http", "https") or any(one.isspace() for one in url):
        raise ConfigError(
            f"--webhook names {scheme or 'no'} scheme and {host or 'no'} host, "
            "expected http(s)://host/…, or @FILE that holds it"
        )
    return host, parts.path


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Command:
    """Runs a program with the event as JSON on its standard input; no shell is involved."""

    words: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Command:
        """Make a command from a command line. Raises ConfigError for unclosed quotes and a missing
        program.
        """
        try:
            words = tuple(shlex.split(text))
        except ValueError as error:
            raise ConfigError(f"--exec {text!r}: {error}") from error
        if not words:
            raise ConfigError("--exec is empty, expected a command")
        if shutil.which(words[0]) is None:
            raise ConfigError(
                f"--exec names {words[0]}, which is no program that can be run; check its path and "
                "that it is executable"
            )
        return cls(words)

    @property
    def name(self) -> str:
        """Return the program."""
        return f"command {self.words[0]}"

    @property
    def key(self) -> str:
        """Return a part of a hash of the words: several commands may run the same program."""
        return _key(*self.words)

    def tell(self, event: Mapping[str, Any]) -> None:
        """Run the command; an exit code other than 0 is an error."""
        try:
            done = subprocess.run(
                self.words,
                input=orjson.dumps(event),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=_COMMAND_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise OSError(f"took longer than {_COMMAND_TIMEOUT_S:.0f} s and was stopped") from error
        if done.returncode:
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise OSError(f"ended with {done.returncode}{': ' * bool(last)}{''.join(last)[:200]}")


@dataclass
class Outbox:
    """Events that wait for delivery; each channel gets its events in the order of `put`."""

    channels: Sequence[Receiver]
    warn: Callable[[str], None]
    first_wait_s: float = _FIRST_WAIT_S
    num_delivered: int = 0
    _pending: list[tuple[dict[str, Json], Receiver]] = field(default_factory=list)
    _wake: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None
    _is_closing: bool = False

    def restore(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Take over what an earlier watch had not delivered, for channels that still exist."""
        by_key = {channel.key: channel for channel in self.channels}
        for record in records:
            channel = by_key.get(str(record.get("channel")))
            if channel is not None:
                self._pending.append((dict(record["event"]), channel))

    def put(self, event: dict[str, Json]) -> None:
        """Queue an event for every channel."""
        with self._wake:
            self._pending += [(event, channel) for channel in self.channels]
            while len(self._pending) > MOST_PENDING:
                dropped, channel = self._pending.pop(0)
                self.warn(f"{channel.name} missed event {dropped['number']}: too many wait")

    def take_delivered(self) -> int:
        """Return how many deliveries went well since the last call."""
        with self._wake:
            num_delivered, self.num_delivered = self.num_delivered, 0
        return num_delivered

    def pending(self) -> list[dict[str, Json]]:
        """Return the events that are not delivered yet, for the state file."""
        with self._wake:
            return [{"channel": channel.key, "event": event} for event, channel in self._pending]

    def send(self) -> None:
        """Begin or go on to deliver. Call it after the state with the events was saved."""
        if not self.channels:
            return
        with self._wake:
            if self._thread is None:
                self._thread = threading.Thread(target=self._deliver, name="outbox", daemon=True)
                self._thread.start()
            self._wake.notify()

    def close(self, timeout_s: float = 15.0) -> None:
        """Give pending events `timeout_s` to be delivered, and end."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _deliver(self) -> None:
        wait_s = self.first_wait_s
        while True:
            with self._wake:
                while not self._pending and not self._is_closing:
                    self._wake.wait()
                batch = list(self._pending)
                if not batch:
                    return
            failed: set[str] = set()
            for item in batch:
                if item[1].key not in failed and not self._told(*item):
                    failed.add(item[1].key)  # its later events keep their order
            if not failed:
                wait_s = self.first_wait_s
                continue
            if self._is_closing:
                return
            self._pause(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _pause(self, wait_s: float) -> None:
        """Wait for `wait_s`, or until the watch ends."""
        until = time.monotonic() + wait_s
        with self._wake:
            while not self._is_closing and (left := until - time.monotonic()) > 0:
                self._wake.wait(left)

    def _told(self, event: dict[str, Json], channel: Receiver) -> bool:
        try:
            channel.tell(event)
        except (OSError, http.client.HTTPException, ConfigError) as error:
            reason = getattr(error, "reason", None) or error
            self.warn(f"{channel.name} could not be told ({reason}); tried again")
            return False
        with self._wake:
            if (event, channel) in self._pending:  # else it was dropped (MOST_PENDING)
                self._pending.remove((event, channel))
            self.num_delivered += 1
        return True
