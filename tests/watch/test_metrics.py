"""What Prometheus is told; rules and dashboard against it, and against a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from megascan.errors import ConfigError
from megascan.watch.metrics import (
    METRICS,
    MOST_RANKS,
    MOST_SILENT_S,
    PREFIX,
    Endpoint,
    Gauges,
    Pulse,
    exposition,
)
from tests.launcher import free_port

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "scripts" / "monitoring"


@pytest.fixture
def gauges(faulty, grow, watched) -> Gauges:
    feed = grow(faulty)
    watch = watched(feed.target)
    feed.step(10)
    watch.watcher.look()
    return watch.watcher.gauges


def samples(gauges: Gauges) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(exposition(gauges).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_the_newest_values_are_exposed_and_the_slow_rank_stands_out(gauges):
    found = samples(gauges)
    assert {labels["verdict"]: value for labels, value in found["megascan_verdict"]} == {
        "healthy": 0, "job": 0, "undecided": 0, "degraded": 1,
    }  # fmt: skip
    assert found["megascan_iteration"] == [({}, 20)]
    slowness = {labels["rank"]: value for labels, value in found["megascan_rank_slowness_ratio"]}
    assert len(slowness) == 8
    node = [
        (labels, value)
        for labels, value in found["megascan_finding_slowdown_ratio"]
        if labels["owner"] == "node"
    ]
    ((labels, value),) = node
    assert value == pytest.approx(1.3, abs=0.03)
    assert (labels["rank"], labels["host"], labels["device"], labels["cause"]) == (
        "5", "n02", "SIM-000005", "compute",
    )  # fmt: skip
    assert found["megascan_windows_total"] == [({}, 10)]
    assert ({"event": "raised"}, 2) in found["megascan_events_total"]


def test_all_that_is_declared_is_exposed_and_nothing_else(gauges):
    families = text_string_to_metric_families(exposition(gauges).decode())
    ours = {family.name for family in families if family.name.startswith(PREFIX)}
    assert ours == {PREFIX + metric.name.removesuffix("_total") for metric in METRICS}


def test_of_thousands_of_ranks_only_the_slowest_are_series(gauges):
    slowness = {rank: 1 + rank / 1e4 for rank in range(5000)}
    gauges.judgement = replace(gauges.judgement, slowness=slowness)
    found = samples(gauges)["megascan_rank_slowness_ratio"]
    assert [int(labels["rank"]) for labels, _ in found] == list(range(5000 - MOST_RANKS, 5000))


def test_the_endpoint_serves_metrics_and_health():
    pulse, gauges = Pulse(), Gauges()
    endpoint = Endpoint("127.0.0.1", 0, gauges, pulse)
    base = f"http://127.0.0.1:{endpoint.port}"
    try:
        with urllib.request.urlopen(f"{base}/metrics") as answer:
            assert b"megascan_hang 0.0" in answer.read()
        with urllib.request.urlopen(f"{base}/healthz") as answer:
            assert answer.read() == b"ok\n"
        pulse.beaten -= MOST_SILENT_S + 1
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{base}/healthz")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{base}/else")
        with pytest.raises(ConfigError, match=r"cannot listen on .* choose another port"):
            Endpoint("127.0.0.1", endpoint.port, gauges, pulse)
    finally:
        endpoint.close()


def test_a_scraper_that_goes_away_is_no_news(capsys):
    endpoint = Endpoint("127.0.0.1", 0, Gauges(), Pulse())
    try:
        try:
            raise BrokenPipeError
        except OSError:
            endpoint._server.handle_error(None, ("127.0.0.1", 1))
        assert capsys.readouterr().err == ""
    finally:
        endpoint.close()


def queries() -> list[str]:
    """Every PromQL expression of rules and dashboard."""
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    board = json.loads((MONITORING / "dashboard.json").read_text())
    found = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    found += [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return found + [one["expr"] for one in board["annotations"]["list"]]


def test_rules_and_dashboard_ask_for_metrics_and_labels_that_exist():
    declared = {PREFIX + metric.name: set(metric.labels) for metric in METRICS}
    for query in queries():
        names = re.findall(r"megascan_\w+", query)
        assert names or query.startswith("up{"), query
        assert set(names) <= declared.keys(), query
        for name, matchers in re.findall(r"(megascan_\w+)\{([^}]*)\}", query):
            used = set(re.findall(r"(\w+)=", matchers))
            assert used <= declared[name] | {"job", "instance"}, query


def test_the_page_lists_every_metric():
    page = (ROOT / "docs" / "watch.md").read_text(encoding="utf-8")
    missing = [metric.name for metric in METRICS if f"`{PREFIX}{metric.name}" not in page]
    assert missing == []


needs_prometheus = pytest.mark.skipif(
    not shutil.which("promtool"), reason="needs Prometheus (apt-get install prometheus)"
)


@needs_prometheus
def test_promtool_accepts_the_rules_and_their_tests_pass():
    for words in (("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml"),
                  ("check", "config", "prometheus.yml")):  # fmt: skip
        done = subprocess.run(
            ["promtool", *words], cwd=MONITORING, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_promtool_finds_no_fault_with_what_is_exposed(gauges):
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=exposition(gauges), capture_output=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


@needs_prometheus
def test_a_real_prometheus_scrapes_it_fires_the_rule_and_answers_the_dashboard(gauges, tmp_path):
    endpoint, port = Endpoint("127.0.0.1", 0, gauges, Pulse()), free_port()
    config = (MONITORING / "prometheus.yml").read_text()
    config = config.replace("127.0.0.1:9464", f"127.0.0.1:{endpoint.port}").replace("10s", "1s")
    (tmp_path / "prometheus.yml").write_text(config)
    shutil.copy(MONITORING / "alerts.yml", tmp_path)
    server = subprocess.Popen(
        ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data",
         f"--web.listen-address=127.0.0.1:{port}"],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        alerts = _until(port, "alerts", lambda data: data["alerts"])["alerts"]
        ((name, rank),) = {(one["labels"]["alertname"], one["labels"]["rank"]) for one in alerts
                           if one["state"] == "firing"}  # fmt: skip
        assert (name, rank) == ("MegascanSlowNode", "5")
        for query in queries():
            asked = query.replace("$job", ".*").replace("$instance", ".*")
            data = _asked(port, f"query?query={urllib.parse.quote(asked)}")
            if "rate(" not in asked and "finding" in asked and "100 *" not in asked:
                assert data["result"], query
    finally:
        server.terminate()
        server.wait()
        endpoint.close()


def _asked(port: int, what: str):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{what}", timeout=10) as answer:
        record = json.loads(answer.read())
    assert record["status"] == "success"
    return record["data"]


def _until(port: int, what: str, has):
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            data = _asked(port, what)
            if has(data):
                return data
        except OSError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"no {what} within two minutes")
