"""Pages of simulated jobs, and observations of any size made without a simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from html.parser import HTMLParser

import numpy as np
import pyarrow as pa
import pytest

from aggregate import build_timeline, summarise
from detect import Cause, DetectorSettings
from detect.detector import Examination, examine, examine_observations
from detect.observe.members import Members, place_of
from detect.observe.observations import Observations
from detect.observe.operations import Work
from detect.page import PageInputs, facts_of_timeline, render_page
from detect.whatif import replay_of_timeline, savings_of
from detect.whatif.slowness import analyze
from megascan.simulate import JobModel, compute_bound, parse_fault, simulate_trace
from megascan.timeline import Timeline
from megascan.topology import Layout

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Document(HTMLParser):
    """A page taken apart; `problems` are tags that do not fit together."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.problems: list[str] = []
        self.feed(page)
        self.close()
        self.problems += [f"{tag} is never closed" for tag in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> closes something else")

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        """All that is read, on one line."""
        return " ".join(" ".join(self.words).split())

    def attributes(self, tag: str, name: str) -> list[str]:
        """That attribute of every such tag."""
        return [attrs[name] or "" for found, attrs in self.tags if found == tag and name in attrs]

    def count(self, tag: str) -> int:
        return sum(found == tag for found, _ in self.tags)


@pytest.fixture(autouse=True)
def _quick(without_power: None) -> None:
    """No test of pages needs what would have been found."""


@pytest.fixture(scope="session")
def document() -> type[Document]:
    return Document


def _timeline(layout: Layout, faults: Sequence[str], iterations: int, seed: int) -> Timeline:
    job = JobModel(
        layout=layout,
        costs=compute_bound(layout),
        iterations=iterations,
        num_layers=2 * layout.pp,
        num_microbatches=4,
    )
    return build_timeline(simulate_trace(job, [parse_fault(fault) for fault in faults], seed=seed))


@pytest.fixture(scope="session")
def simulated() -> Callable[..., Timeline]:
    """`simulated(layout, "rank=…,kind=…,factor=…")`: a timeline."""

    def make(layout: Layout, *faults: str, iterations: int = 12, seed: int = 1) -> Timeline:
        return _timeline(layout, faults, iterations, seed)

    return make


def _inputs(timeline: Timeline) -> PageInputs:
    examined = examine(timeline)
    replay = replay_of_timeline(timeline)
    return PageInputs(
        source="a trace",
        examined=examined,
        facts=facts_of_timeline(timeline),
        shares=summarise(timeline).ranks,
        whatif=analyze(replay),
        savings=savings_of(replay, examined.report.findings),
        timeline=timeline,
    )


@pytest.fixture(scope="session")
def inputs() -> Callable[[Timeline], PageInputs]:
    return _inputs


@pytest.fixture(scope="session")
def faulty(simulated: Callable[..., Timeline]) -> Timeline:
    """Rank 5 of TP2 PP2 DP2 computes 1.3 times slower."""
    return simulated(Layout(tp=2, pp=2, dp=2), "rank=5,kind=compute,factor=1.3")


@pytest.fixture(scope="session")
def faulty_page(faulty: Timeline) -> str:
    return render_page(_inputs(faulty))


@pytest.fixture(scope="session")
def renamed() -> Callable[..., Timeline]:
    """The same timeline with other host and device names."""

    def rename(timeline: Timeline, host: str, device: str) -> Timeline:
        headers = {
            rank: replace(header, host=host, device=replace(header.device, name=device))
            for rank, header in timeline.headers.items()
        }
        return replace(timeline, headers=headers)

    return rename


@pytest.fixture(scope="session")
def large() -> Callable[..., Examination]:
    """An examination of a large job: healthy noise, and slow ranks by factor."""

    def make(layout: Layout, slow: dict[int, float], iterations: int = 8) -> Examination:
        random = np.random.default_rng(7)
        number = layout.world_size
        places = [layout.coordinates(rank) for rank in range(number)]
        usual = np.log(np.repeat([10e6, 20e6], 4))
        log_ns = usual + 0.02 * random.standard_normal((number, iterations, 8))
        for rank, factor in slow.items():
            log_ns[rank] += np.log(factor)
        busy = np.exp(log_ns).sum(axis=2)
        nothing = np.zeros((number, iterations))
        required = [one.name for one in fields(Observations) if one.default is one.default_factory]
        given: dict[str, object] = {
            "members": Members(
                layout=layout,
                ranks=np.arange(number),
                place=place_of(places),
                labels=tuple(layout.label(rank) for rank in range(number)),
                hosts=tuple(f"n{rank // 8:04d}" for rank in range(number)),
                devices=("H100",) * number,
                device_index=tuple(rank % 8 for rank in range(number)),
                workers=tuple((rank,) for rank in range(number)),
                device_kind="cuda",
            ),
            "iterations": np.arange(3, 3 + iterations),
            "iteration_ns": busy.max(axis=0),
            "work": Work(
                log_ns=log_ns,
                phase=np.repeat([0, 1], 4),
                microbatch=np.tile(np.arange(4), 2),
            ),
            "busy_ns": busy,
            "optimizer_ns": np.full((number, iterations), 1e6),
            "lost_ns": {Cause.GC: nothing, Cause.HOST: nothing},
        }
        seen = Observations(**(dict.fromkeys(required, nothing) | given))
        return examine_observations(seen, DetectorSettings())

    return make


@pytest.fixture(scope="session")
def share_columns() -> Callable[[int], pa.Table]:
    """Shares of so many ranks; rank 3 waits least."""

    def make(number: int) -> pa.Table:
        wait = np.full(number, 0.3)
        wait[3] = 0.1
        columns = {"compute_ratio": 0.9 - wait, "transfer_ratio": np.full(number, 0.1)}
        return pa.table({"rank": np.arange(number), **columns, "wait_ratio": wait})

    return make
