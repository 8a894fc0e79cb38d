"""Webhooks in four shapes, commands, and what happens when they fail."""

from __future__ import annotations

import json
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest

from megascan.errors import ConfigError
from megascan.watch.accounts import Account, AccountChange, Event, LifePhase
from megascan.watch.delivery import (
    MOST_PENDING,
    Command,
    Outbox,
    Webhook,
    as_pagerduty,
    as_slack,
    finding_event,
)

ACCOUNT = Account(
    id="compute-rank5-abc", run_id="run", cause="compute", owner="node", ranks=(5,),
    hosts=("n02",), devices=("GPU-5",), since_iteration=15, since_unix_s=1.7e9,
    phase=LifePhase.HOLDING, slowdown=1.3, cost_ratio=1.1, q_value=1e-9,
    headline="rank 5 <host n02> computes 1.30x slower & alone", cost_gpu_hours=0.5,
)  # fmt: skip
RAISED = {
    "number": 1,
    **finding_event(Event(AccountChange.RAISED, ACCOUNT), job="job", unix_s=1.7e9 + 60),
}
CLEARED = {
    "number": 2,
    **finding_event(Event(AccountChange.CLEARED, ACCOUNT), job="job", unix_s=1.7e9 + 90),
}


class Server:
    """Answers POSTs with the statuses given, then 200, and keeps what came."""

    def __init__(self, *statuses: int) -> None:
        self.bodies: list[object] = []
        rest = list(statuses)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:  # noqa: N805
                length = int(handler.headers["Content-Length"])
                self.bodies.append(json.loads(handler.rfile.read(length)))
                handler.send_response(rest.pop(0) if rest else 200)
                handler.end_headers()

            def log_message(handler, *_: object) -> None:  # noqa: N805
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/hook"
        serve = partial(self.http.serve_forever, poll_interval=0.02)
        threading.Thread(target=serve, daemon=True).start()


@pytest.fixture
def server():
    servers = []

    def start(*statuses: int) -> Server:
        servers.append(Server(*statuses))
        return servers[-1]

    yield start
    for each in servers:
        each.http.shutdown()
        each.http.server_close()


def told(channel, *events) -> list[str]:
    """Deliver events; return the warnings."""
    warnings: list[str] = []
    outbox = Outbox([channel], warnings.append, first_wait_s=0.01)
    for event in events:
        outbox.put(dict(event))
    outbox.send()
    for _ in range(500):
        if not outbox.pending():
            break
        threading.Event().wait(0.02)
    outbox.close()
    assert outbox.pending() == []
    return warnings


def test_json_is_posted_as_it_is(server):
    web = server()
    assert told(Webhook.of(web.url, None), RAISED, CLEARED) == []
    assert [body["event"] for body in web.bodies] == ["raised", "cleared"]
    assert web.bodies[0]["finding"]["hosts"] == ["n02"]


def test_what_failed_is_tried_again_in_order(server):
    web = server(500, 503)
    warnings = told(Webhook.of(web.url, None), RAISED, CLEARED)
    assert [body["number"] for body in web.bodies] == [1, 1, 1, 2]
    assert len(warnings) == 2
    assert all("127.0.0.1" in warning and "/hook" not in warning for warning in warnings)


def test_a_redirection_is_no_delivery(server):
    """urllib would follow it with GET, and the event would be gone."""
    web = server(302)
    warnings = told(Webhook.of(web.url, None), RAISED)
    assert [body["number"] for body in web.bodies] == [1, 1]
    assert len(warnings) == 1


def test_two_webhooks_of_one_host_are_two(tmp_path):
    """What one of them has not been told waits for that one, over a restart."""
    first, second = (Webhook.of(f"http://127.0.0.1:1/{name}", "slack") for name in "ab")
    before = Outbox([first, second], print)
    before.put(dict(RAISED))
    waiting = before.pending()
    assert len({one["channel"] for one in waiting}) == 2
    after = Outbox([second], print)
    after.restore(waiting)
    assert after.pending() == waiting[1:]
    commands = [Command.of("echo a"), Command.of("echo b")]
    assert commands[0].key != commands[1].key


def test_what_is_given_up_while_it_is_delivered_ends_nothing():
    """So many events come during a delivery that the one on its way goes, too."""

    class Slow:
        name = key = "slow"
        numbers: ClassVar[list[int]] = []

        def tell(self, event):
            if not self.numbers:
                for number in range(2, MOST_PENDING + 3):
                    outbox.put({"number": number})
            self.numbers.append(event["number"])

    outbox = Outbox([Slow()], lambda _: None)
    outbox.put({"number": 1})
    outbox.send()
    outbox.close()
    assert Slow.numbers == [1, *range(3, MOST_PENDING + 3)]


def test_slack_gets_escaped_text():
    text = as_slack(RAISED)["text"]
    assert text.startswith("*megascan* job: RAISED compute-rank5-abc (owner node): rank 5 &lt;host")
    assert "slower &amp; alone; since iteration 15" in text
    assert "cost so far 0.5 GPU-hours" in text


def test_pagerduty_triggers_and_resolves_under_one_key(monkeypatch):
    monkeypatch.setenv("PAGERDUTY_ROUTING_KEY", "k" * 32)
    trigger, resolve = as_pagerduty(RAISED), as_pagerduty(CLEARED)
    assert (trigger["event_action"], resolve["event_action"]) == ("trigger", "resolve")
    assert trigger["dedup_key"] == resolve["dedup_key"] == "compute-rank5-abc"
    assert trigger["routing_key"] == "k" * 32
    payload = trigger["payload"]
    assert (payload["severity"], payload["source"], payload["component"]) == (
        "error", "n02", "compute",
    )  # fmt: skip
    assert payload["timestamp"] == "2023-11-14T22:14:20+00:00"


def test_pagerduty_without_its_key_is_refused_at_the_start(monkeypatch):
    monkeypatch.delenv("PAGERDUTY_ROUTING_KEY", raising=False)
    with pytest.raises(ConfigError, match="PAGERDUTY_ROUTING_KEY is not set"):
        Webhook.of("https://events.pagerduty.com/v2/enqueue", None)


def test_a_collector_gets_opentelemetry_log_records(server):
    """Keys and types as opentelemetry-proto's JSON has them: times and 64-bit integers are text."""
    web = server()
    url = web.url.replace("/hook", "/v1/logs")
    assert told(Webhook.of(url, None), RAISED, CLEARED) == []
    logs, ending = (body["resourceLogs"][0] for body in web.bodies)
    service = {"key": "service.name", "value": {"stringValue": "megascan-watch"}}
    assert service in logs["resource"]["attributes"]
    (record,) = logs["scopeLogs"][0]["logRecords"]
    assert record["eventName"] == "megascan.raised"
    assert (record["severityNumber"], record["severityText"]) == (17, "ERROR")
    assert record["timeUnixNano"] == "1700000060000000000"
    assert record["body"] == {"stringValue": RAISED["text"]}
    attributes = {one["key"]: one["value"] for one in record["attributes"]}
    assert attributes["megascan.ranks"] == {"stringValue": "[5]"}
    assert attributes["megascan.cost_gpu_hours"] == {"doubleValue": 0.5}
    assert attributes["megascan.number"] == {"intValue": "1"}
    assert ending["scopeLogs"][0]["logRecords"][0]["severityText"] == "INFO"


@pytest.mark.parametrize(
    ("url", "shape"),
    [
        ("https://hooks.slack.com/services/x", "slack"),
        ("https://example.org/", "json"),
        ("http://collector:4318/v1/logs", "otlp"),
    ],
)
def test_the_shape_follows_the_host(url, shape):
    assert Webhook.of(url, None).shape == shape
    assert Webhook.of(url, "slack").shape == "slack"


def test_a_url_may_stand_in_a_file_and_is_never_shown(tmp_path):
    secret = tmp_path / "url"
    secret.write_text("https://hooks.slack.com/services/SECRET\n")
    webhook = Webhook.of(f"@{secret}", None)
    assert webhook.url.endswith("SECRET")
    assert "SECRET" not in webhook.name
    for wrong in (
        "ftp://x/SECRET", "@/nowhere", "SECRET", "http://a b/SECRET", "http://[::1/SECRET",
        "http://x:99999/SECRET", "http://x:no/SECRET", "http://x..org/SECRET",
        "http://x/SECRET\u00e4",
    ):  # fmt: skip
        with pytest.raises(ConfigError) as error:
            Webhook.of(wrong, None)
        assert "--webhook" in str(error.value)
        assert "SECRET" not in str(error.value) or wrong == "@SECRET"


def test_a_command_gets_the_event_and_is_tried_again_when_it_fails(tmp_path):
    script, out = tmp_path / "script.sh", tmp_path / "out"
    script.write_text(
        f"#!/bin/sh\ncat >> {out}; echo >> {out}\n"
        f'[ "$(wc -l < {out})" -ge 2 ] || {{ echo not yet >&2; exit 7; }}\n'
    )
    script.chmod(0o755)
    warnings = told(Command.of(f"{script} 'an argument'"), RAISED)
    assert [json.loads(line)["number"] for line in out.read_text().splitlines()] == [1, 1]
    assert warnings == [
        "command " + str(script) + " could not be told (ended with 7: not yet); tried again"
    ]


def test_a_program_that_has_gone_is_said_and_the_watch_goes_on():
    warnings: list[str] = []
    outbox = Outbox([Command(("/no/such/program",))], warnings.append, first_wait_s=0.01)
    outbox.put(dict(RAISED))
    outbox.send()
    outbox.close()
    assert len(outbox.pending()) == 1
    assert "No such file" in warnings[0]


@pytest.mark.parametrize("text", ["", "  ", "'unclosed", "/no/such/program", "/dev/null"])
def test_a_command_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="--exec"):
        Command.of(text)


def test_too_many_pending_events_drop_the_oldest_and_say_so():
    warnings: list[str] = []
    outbox = Outbox([Command.of("true")], warnings.append)
    for number in range(505):
        outbox.put({"number": number})
    assert [one["event"]["number"] for one in outbox.pending()][:1] == [5]
    assert len(warnings) == 5
