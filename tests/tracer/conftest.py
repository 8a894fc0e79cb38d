from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megascan.config import TraceConfig
from megascan.header import ClockOrigin, Device, RankHeader, TraceSettings, WindowRecord
from megascan.schema import Granularity
from megascan.topology import Layout
from megascan.tracer import CpuTimer, RecordingTracer, Timer, TraceWriter
from megascan.tracer.timer import HostClock, now_ns

Event = dict[str, object]


class RecordedFile:
    """A rank file read line by line, as far as its lines are whole."""

    def __init__(self, path: Path) -> None:
        self.events: list[dict] = []
        data = path.read_bytes()
        text = gzip.decompress(data) if path.suffix == ".gz" else data
        for line in text.split(b"\n"):
            try:
                event = json.loads(line.strip().rstrip(b","))
            except json.JSONDecodeError:
                continue
            if isinstance(event, dict):
                self.events.append(event)

    @property
    def headers(self) -> list[dict]:
        return [event["args"] for event in self.events if event["name"] == "megascan"]

    @property
    def windows(self) -> list[dict]:
        return [event["args"] for event in self.events if event["name"] == "megascan_window"]

    @property
    def spans(self) -> list[dict]:
        return [event for event in self.events if event["ph"] == "X"]

    def named(self, name: str) -> list[dict]:
        return [span for span in self.spans if span["name"] == name]


@pytest.fixture
def read_rank_file() -> Callable[[Path], RecordedFile]:
    return RecordedFile


@pytest.fixture
def clock() -> HostClock:
    return HostClock(domain="host:boot", offset_ns=1_000, origin_ns=now_ns())


@pytest.fixture
def make_header() -> Callable[..., RankHeader]:
    def make(run_id: str = "20261121-084512-3f9a", rank: int = 0, **changes: object) -> RankHeader:
        layout = Layout(dp=2)
        fields: dict[str, object] = {
            "run_id": run_id,
            "rank": rank,
            "world_size": 2,
            "layout": layout,
            "coordinates": layout.coordinates(rank),
            "groups": {"dp@0": (0, 1)},
            "host": "host",
            "process_id": 1,
            "device": Device(kind="cpu", name="x86_64"),
            "backend": "gloo",
            "clock": ClockOrigin(domain="host:boot", source="monotonic", origin_unix_ns=0),
            "trace": TraceSettings(granularity=Granularity.FULL, interval=5, window=2),
        }
        return RankHeader(**{**fields, **changes})

    return make


@pytest.fixture
def make_tracer(
    tmp_path: Path, clock: HostClock, make_header: Callable[..., RankHeader]
) -> Iterator[Callable[..., tuple[RecordingTracer, Path]]]:
    """Makes a tracer with a real writer; also returns the path of its rank file."""
    made: list[RecordingTracer] = []

    def make(
        interval: int = 5,
        window: int = 2,
        *,
        folder: Path | None = None,
        timer: Timer | None = None,
        resumed: bool = False,
        compress: bool = False,
        max_bytes: int = 0,
        layer_stride: int = 1,
        on_written: Callable[[WindowRecord], None] | None = None,
        **header: object,
    ) -> tuple[RecordingTracer, Path]:
        config = TraceConfig(
            enabled=True,
            directory=folder or tmp_path / "trace",
            interval=interval,
            window=window,
            layer_stride=layer_stride,
        )
        tracer = RecordingTracer(config)
        timer = timer or CpuTimer(clock)
        own = make_header(**header)
        own = replace(own, trace=replace(own.trace, compress=compress, max_bytes=max_bytes))
        writer = TraceWriter(
            config.directory,
            own,
            timer,
            resumed=resumed,
            on_failure=tracer.fail,
            on_written=on_written,
        )
        tracer.record_with(timer, writer)
        made.append(tracer)
        return tracer, writer.path

    yield make
    for tracer in made:
        tracer.close()


@pytest.fixture
def warnings_of_megascan(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, logger="megascan")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "megascan"]
