"""Serve metrics to Prometheus.

Metrics are declared once: name, kind, meaning, labels; docs/watch.md lists them.

Names follow Prometheus's conventions: base units (seconds, ratios) and `_total` for counters. The
number of series is bounded: as many findings as the detector finds, one series a cause, and all
ranks or, of more than `MOST_RANKS`, the slowest.

    GET /metrics    the newest values, text format
    GET /healthz    200 while the watch looks at its files, 503 after a minute without a look
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, ClassVar

from detect.report import Verdict
from detect.thresholds.adjustable import DetectorSettings
from megascan.errors import ConfigError, MissingError
from megascan.watch.accounts import Account
from megascan.watch.hang import Hang
from megascan.watch.ring import Judgement

if TYPE_CHECKING:
    from prometheus_client.core import Metric


MOST_RANKS = 64
MOST_FINDINGS = DetectorSettings().max_findings
_FINDING_LABELS = ("id", "cause", "owner", "rank", "host", "device")


@dataclass(frozen=True)
class Declared:
    """A metric: its name without the prefix, kind, meaning and labels."""

    name: str
    kind: str
    meaning: str
    labels: tuple[str, ...] = ()


METRICS = (
    Declared("verdict", "gauge", "1 for the newest verdict, 0 for the others", ("verdict",)),
    Declared("iteration", "gauge", "last traced iteration that was judged"),
    Declared("iteration_seconds", "gauge", "median duration of the judged iterations"),
    Declared("window_age_seconds", "gauge", "time since any rank last wrote to its file"),
    Declared("hang", "gauge", "1 while the job stands still"),
    Declared("absent_ranks", "gauge", "ranks that have stopped writing"),
    Declared("ranks", "gauge", "world size of the job"),
    Declared(
        "minimum_detectable_slowdown_ratio", "gauge",
        "smallest lasting slowdown that would be found", ("cause",),
    ),
    Declared(
        "rank_slowness_ratio", "gauge",
        "computing time of a rank over that of its peers, newest iterations; all ranks up to 64, "
        "of more the 64 slowest", ("rank",),
    ),
    Declared("finding_slowdown_ratio", "gauge", "slowdown of a holding finding", _FINDING_LABELS),
    Declared(
        "finding_cost_ratio", "gauge",
        "iteration time over that without the finding", _FINDING_LABELS,
    ),
    Declared(
        "finding_wasted_gpu_seconds", "gauge",
        "device time that a holding finding has cost so far",
        _FINDING_LABELS,
    ),
    Declared("windows_total", "counter", "windows of the job that were read"),
    Declared("verdicts_total", "counter", "verdicts reached"),
    Declared("verdict_cpu_seconds_total", "counter", "processor time of this watch"),
    Declared("events_total", "counter", "findings raised, changed and cleared, hangs", ("event",)),
    Declared("problems_total", "counter", "warnings: damaged files, a full disk, failed alerts"),
    Declared("undelivered_alerts", "gauge", "events that a webhook or command was not told yet"),
)  # fmt: skip
PREFIX = "megascan_"


@dataclass(eq=False)  # registries keep collectors by identity
class Gauges:
    """The newest values; the watch writes them, the endpoint's thread reads them."""

    judgement: Judgement | None = None
    holding: Sequence[Account] = ()
    hang: Hang | None = None
    num_absent: int = 0
    world_size: int = 0
    changed_unix_s: float = 0.0
    num_windows: int = 0
    num_verdicts: int = 0
    num_problems: int = 0
    num_undelivered: int = 0
    events: dict[str, int] = field(default_factory=dict)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, as prometheus_client's collectors do."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        values = self._values()
        for declared in METRICS:
            family = CounterMetricFamily if declared.kind == "counter" else GaugeMetricFamily
            metric = family(PREFIX + declared.name, declared.meaning, labels=declared.labels)
            for labels, value in values[declared.name]:
                metric.add_metric(labels, value)
            yield metric

    def _values(self) -> Mapping[str, Iterable[tuple[Sequence[str], float]]]:
        report = self.judgement.report if self.judgement else None
        age = max(0.0, time.time() - self.changed_unix_s)
        return {
            "verdict": [([one], float(one == report.verdict)) for one in Verdict]
            if report else [],
            "iteration": _single(report.iterations[1] if report else None),
            "iteration_seconds": _single(report.iteration_ns / 1e9 if report else None),
            "window_age_seconds": _single(age if self.changed_unix_s else None),
            "hang": _single(float(self.hang is not None)),
            "absent_ranks": _single(self.num_absent),
            "ranks": _single(self.world_size),
            "minimum_detectable_slowdown_ratio": [
                ([cause], value) for cause, value in report.minimum_detectable.items()
            ] if report else [],
            "rank_slowness_ratio": self._slowest(),
            "finding_slowdown_ratio": self._findings("slowdown"),
            "finding_cost_ratio": self._findings("cost_ratio"),
            "finding_wasted_gpu_seconds": [
                (labels, 3600.0 * hours) for labels, hours in self._findings("cost_gpu_hours")
            ],
            "windows_total": _single(self.num_windows),
            "verdicts_total": _single(self.num_verdicts),
            "verdict_cpu_seconds_total": _single(time.process_time()),
            "events_total": [([name], float(count)) for name, count in self.events.items()],
            "problems_total": _single(self.num_problems),
            "undelivered_alerts": _single(self.num_undelivered),
        }  # fmt: skip

    def _slowest(self) -> list[tuple[list[str], float]]:
        slowness = self.judgement.slowness if self.judgement else {}
        ranks = sorted(slowness, key=lambda rank: -slowness[rank])[:MOST_RANKS]
        return [([str(rank)], slowness[rank]) for rank in sorted(ranks)]

    def _findings(self, name: str) -> list[tuple[list[str], float]]:
        return [(_labels(one), float(getattr(one, name))) for one in self.holding[:MOST_FINDINGS]]


def _labels(account: Account) -> list[str]:
    """Return values of `_FINDING_LABELS`; the first rank stands for all ranks of the finding."""
    rank, host, device = (
        str(next(iter(each), "")) for each in (account.ranks, account.hosts, account.devices)
    )
    return [account.id, account.cause, account.owner, rank, host, device]


def _single(value: float | None) -> list[tuple[list[str], float]]:
    return [] if value is None else [([], float(value))]


def exposition(gauges: Gauges) -> bytes:
    """Return all metrics in Prometheus's text format. Raises MissingError without its library."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ModuleNotFoundError as error:
        raise MissingError(
            "--prometheus needs prometheus_client, which is not installed; install MegaScan with "
            "its extra `watch` (pip install 'megascan[watch]')"
        ) from error
    registry = CollectorRegistry()
    registry.register(gauges)
    return bytes(generate_latest(registry))


MOST_SILENT_S = 60.0
"""A watch that has not looked for this long is stuck; a verdict takes seconds."""
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class Pulse:
    """When the watch last looked at its files."""

    beaten: float = field(default_factory=time.monotonic)

    def beat(self) -> None:
        """Note that the watch looks now."""
        self.beaten = time.monotonic()

    @property
    def is_alive(self) -> bool:
        """Return whether the watch has looked lately."""
        return time.monotonic() - self.beaten < MOST_SILENT_S


class Endpoint:
    """An HTTP server on a thread. Raises ConfigError if the port cannot be used."""

    def __init__(self, host: str, port: int, gauges: Gauges, pulse: Pulse) -> None:
        exposition(gauges)  # raises now if the library is missing

        class Handler(_Handler):
            pages: ClassVar[dict[str, Callable[[], tuple[HTTPStatus, bytes]]]] = {
                "/metrics": lambda: (HTTPStatus.OK, exposition(gauges)),
                "/healthz": lambda: _health(pulse),
            }

        try:
            self._server = _Server((host, port), Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"--prometheus: cannot listen on {host}:{port} ({reason}); choose another port"
            ) from error
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that went away before they were answered: they ask again."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _health(pulse: Pulse) -> tuple[HTTPStatus, bytes]:
    if pulse.is_alive:
        return HTTPStatus.OK, b"ok\n"
    return HTTPStatus.SERVICE_UNAVAILABLE, b"the watch has not looked at its files for a minute\n"


class _Handler(BaseHTTPRequestHandler):
    pages: ClassVar[dict[str, Callable[[], tuple[HTTPStatus, bytes]]]] = {}
    timeout = 10  # so that no silent client keeps a thread

    def do_GET(self) -> None:
        """Answer one request."""
        page = self.pages.get(self.path.partition("?")[0])
        status, body = page() if page else (HTTPStatus.NOT_FOUND, b"/metrics or /healthz\n")
        self.send_response(status)
        self.send_header("Content-Type", _TEXT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *_: object) -> None:
        """Log nothing: Prometheus asks every few seconds."""
