from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from detect import DetectorSettings
from megascan.simulate import (
    Fault,
    JobModel,
    Noise,
    compute_bound,
    parse_fault,
    simulate_trace,
    write_rank_files,
)
from megascan.topology import Layout
from megascan.watch.delivery import Outbox, Receiver
from megascan.watch.history import History
from megascan.watch.watcher import StateFile, Watcher, WatchSettings

MARK = b'"name":"megascan_window"'
WINDOW = 2
"""Iterations of a window; every iteration is traced."""


@dataclass
class Feed:
    """Writes a simulated job's rank files anew, a window a step, as a running job would."""

    source: Path
    target: Path
    compress: bool = False
    written: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.target.mkdir(exist_ok=True)
        self.appends = {
            path.name: list(_appends(path.read_bytes()))
            for path in sorted(self.source.glob("benchmark-data-*.json"), key=_rank)
        }

    @property
    def names(self) -> list[str]:
        return list(self.appends)

    @property
    def num_windows(self) -> int:
        return min(len(each) for each in self.appends.values())

    def path(self, rank: int) -> Path:
        return self.target / (self.names[rank] + ".gz" * self.compress)

    def step(self, count: int = 1, *, ranks: Iterable[int] | None = None) -> None:
        """Append the next windows of some ranks (default: all)."""
        for rank in range(len(self.names)) if ranks is None else ranks:
            name = self.names[rank]
            done = self.written.get(name, 0)
            with self.path(rank).open("ab") as file:
                for text in self.appends[name][done : done + count]:
                    file.write(gzip.compress(text, 1, mtime=0) if self.compress else text)
            self.written[name] = done + count

    def close(self) -> None:
        for rank in range(len(self.names)):
            with self.path(rank).open("ab") as file:
                file.write(gzip.compress(b"\n]\n", mtime=0) if self.compress else b"\n]\n")


def _rank(path: Path) -> int:
    with path.open("rb") as file:
        file.readline()
        return int(json.loads(file.readline().rstrip(b",\n"))["args"]["rank"])


def _appends(text: bytes) -> Iterable[bytes]:
    """Cut a rank file behind each window mark."""
    begin = 0
    while (at := text.find(MARK, begin)) >= 0:
        end = text.find(b"\n", at)
        end = end - 1 if text[end - 1 : end] == b"," else end
        yield text[begin:end]
        begin = end


def simulated(
    folder: Path, *faults: str, iterations: int = 40, seed: int = 1, noise: float | None = None
) -> Path:
    """Rank files of eight ranks, PP2 × DP4, every iteration traced, two a window."""
    layout = Layout(pp=2, dp=4)
    job = JobModel(
        layout=layout,
        costs=compute_bound(layout),
        iterations=iterations,
        num_layers=4,
        num_microbatches=4,
        interval=WINDOW,
        window=WINDOW,
        noise=Noise() if noise is None else Noise(compute_ratio=noise),
        ranks_per_host=2,
    )
    planted: list[Fault] = [parse_fault(text) for text in faults]
    write_rank_files(simulate_trace(job, planted, seed=seed), folder)
    return folder


@pytest.fixture(scope="session")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated(tmp_path_factory.mktemp("healthy"))


COMES_AND_GOES = "rank=5,kind=compute,factor=1.3,from=15,to=24"


@pytest.fixture(scope="session")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank 5 is slow in iterations 15 to 24 of 40."""
    return simulated(tmp_path_factory.mktemp("faulty"), COMES_AND_GOES)


class Recorded:
    """A channel that remembers; `fails` makes it refuse."""

    name = key = "recorded"

    def __init__(self) -> None:
        self.events: list[Mapping[str, Any]] = []
        self.fails = False

    def tell(self, event: Mapping[str, Any]) -> None:
        if self.fails:
            raise OSError("refused")
        self.events.append(event)


@dataclass
class Watched:
    """A watcher, and what it said."""

    watcher: Watcher
    said: list[Mapping[str, Any]]
    warnings: list[str]

    @property
    def events(self) -> list[Mapping[str, Any]]:
        """Everything but verdicts, of nodes' findings and of the job's standing still."""
        return [
            event
            for event in self.said
            if event["event"] != "verdict"
            and event.get("finding", {}).get("owner") in (None, "node")
        ]

    @property
    def names(self) -> list[str]:
        return [event["event"] for event in self.events]

    @property
    def verdicts(self) -> list[Mapping[str, Any]]:
        return [event for event in self.said if event["event"] == "verdict"]

    def wait(self, seconds: float) -> None:
        """Let time pass for the watcher."""
        begun = self.watcher.monotonic_s()
        self.watcher.monotonic_s = lambda: begun + seconds


@pytest.fixture
def watched() -> Callable[..., Watched]:
    """`watched(folder, …, state=FILE, channels=[…], history=…)`: a watcher that keeps quiet."""

    def start(
        *folders: Path,
        state: Path | None = None,
        channels: Sequence[Receiver] = (),
        history: History | None = None,
        **settings: Any,
    ) -> Watched:
        said: list[Mapping[str, Any]] = []
        warnings: list[str] = []
        settings.setdefault("cpu_share", 1.0)  # every window is judged
        settings.setdefault("hang_after_s", 3600.0)  # a busy machine may be slow
        watcher = Watcher(
            settings=WatchSettings(folders=folders, detector=DetectorSettings(), **settings),
            state_file=StateFile(state),
            outbox=Outbox(channels, warnings.append, first_wait_s=0.01),
            say=said.append,
            warn=warnings.append,
            history=history,
        )
        return Watched(watcher, said, warnings)

    return start


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture
def grow(tmp_path: Path) -> Callable[..., Feed]:
    """`grow(source)`: that job's files, to be written window by window into a new folder."""

    def start(source: Path, name: str = "trace", **options: Any) -> Feed:
        return Feed(source, tmp_path / name, **options)

    return start


@pytest.fixture(autouse=True)
def _quick(without_power: None) -> None:
    """Every verdict here is one without its power."""
