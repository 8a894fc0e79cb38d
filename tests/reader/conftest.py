from __future__ import annotations

import ctypes
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pytest

from megascan.export import write_timeline
from megascan.header import ClockOrigin, Device, RankHeader, TraceSettings, WindowRecord
from megascan.rankfile import (
    RankFile,
    SpanRecord,
    encode_header,
    encode_spans,
    encode_window,
    rank_file_path,
)
from megascan.reader import lines, read_trace, templates
from megascan.schema import DERIVED_COLUMNS, Granularity, Kind, Track
from megascan.timeline import ClockFit, Timeline, Trace
from megascan.topology import Layout

ROOT = Path(__file__).parents[2]
ORIGIN_NS = 1_700_000_000_123_456_789


@dataclass
class Folder:
    """A trace folder written the way a job writes it."""

    path: Path
    layout: Layout = field(default_factory=lambda: Layout(tp=2, dp=2))

    def header(self, rank: int, run_id: str = "run-a", origin_ns: int = ORIGIN_NS) -> RankHeader:
        return RankHeader(
            run_id=run_id,
            rank=rank,
            world_size=self.layout.world_size,
            layout=self.layout,
            coordinates=self.layout.coordinates(rank),
            groups={f"tp@{rank - rank % 2}": (rank - rank % 2, rank - rank % 2 + 1)},
            host="node7",
            process_id=4711,
            device=Device(kind="cpu", name="a CPU"),
            backend="gloo",
            clock=ClockOrigin(domain="node7", source="monotonic", origin_unix_ns=origin_ns),
            trace=TraceSettings(granularity=Granularity.FULL, interval=5, window=2),
        )

    def file_of(self, rank: int) -> Path:
        return rank_file_path(self.path, self.header(rank))

    def write_rank(
        self,
        rank: int,
        *,
        windows: int = 2,
        run_id: str = "run-a",
        origin_ns: int = ORIGIN_NS,
        unfinished: Sequence[SpanRecord] = (),
        close: bool = True,
        saves: Sequence[int] = (),
    ) -> Path:
        """One rank's run appended to its file: per window a forward and an all-reduce in it, and
        the `saves` of checkpoints behind these iterations, in or since the window before.
        """
        self.path.mkdir(exist_ok=True)
        header = self.header(rank, run_id, origin_ns)
        path = rank_file_path(self.path, header)
        file = RankFile(path)
        file.append(encode_header(header))
        for window in range(windows):
            first = 1 + 5 * window
            since = range(first - 3, first + 2)
            spans = [self.save_behind(each) for each in saves if each in since]
            spans += self.spans_of(first, rank)
            record = WindowRecord(
                run_id=run_id,
                window=window,
                first_iteration=first,
                last_iteration=first + 1,
                num_spans=len(spans),
            )
            file.append([*encode_spans(rank, spans), encode_window(rank, record)])
        file.append(list(encode_spans(rank, unfinished)))
        if close:
            file.close()
        else:
            file._file.close()  # as a kill leaves it: no closing bracket
        return path

    @staticmethod
    def save_behind(iteration: int) -> SpanRecord:
        """A save of a checkpoint, as it is recorded when no window is open either."""
        arguments: dict[str, int | str] = {"iteration": iteration}
        start_ns = iteration * 1_000_000 + 500_000
        return Kind.CHECKPOINT, "save-checkpoint", Track.HOST, start_ns, 300_000, arguments

    @staticmethod
    def spans_of(iteration: int, rank: int = 0) -> Iterator[SpanRecord]:
        """An all-reduce inside a forward pass, in the order in which they end."""
        start_ns = iteration * 1_000_000 + rank
        yield (
            Kind.COLLECTIVE,
            "all_reduce",
            Track.COMMUNICATION,
            start_ns + 100,
            1_001,
            {
                "iteration": iteration,
                "microbatch": 0,
                "op": "all_reduce",
                "group": f"tp@{rank - rank % 2}",
                "sequence": 0,
                "size_bytes": 4096,
            },
        )
        yield (
            Kind.COMPUTE,
            "forward",
            Track.COMPUTE,
            start_ns,
            2_003,
            {
                "iteration": iteration,
                "microbatch": 0,
                "chunk": 0,
                "phase": "forward",
                "cpu_ns": 1_999,
            },
        )

    def write(self, **arguments: object) -> Path:
        for rank in range(self.layout.world_size):
            self.write_rank(rank, **arguments)  # type: ignore[arg-type]
        return self.path


@dataclass
class Original:
    """A folder written as the original MegaScan writes it: indented begin and end records."""

    path: Path
    dp: int = 2
    pp: int = 2
    tp: int = 2
    num_steps: int = 2
    num_microbatches: int = 2
    has_loss: bool = False

    def write_rank(self, dp: int, pp: int, tp: int) -> Path:
        self.path.mkdir(exist_ok=True)
        path = self.path / f"benchmark-data-{dp}-pipeline-{pp}-tensor-{tp}.json"
        path.write_text(json.dumps(self.records(dp, pp, tp), indent=2))
        return path

    def write(self) -> Path:
        for dp in range(self.dp):
            for pp in range(self.pp):
                for tp in range(self.tp):
                    self.write_rank(dp, pp, tp)
        return self.path

    def records(self, dp: int, pp: int, tp: int) -> list[dict[str, object]]:
        rank = tp + self.tp * (dp + self.dp * pp)
        stride = self.tp * self.dp
        before = rank - stride if pp else None
        after = rank + stride if pp < self.pp - 1 else None
        writer = _Scopes({"dp_rk": dp, "pp_rk": pp, "tp_rk": tp, "dev": rank, "g_rk": rank})
        mates = [r for r in range(pp * stride, (pp + 1) * stride) if r != rank]
        for step in range(self.num_steps):
            writer.begin_step(rank + 20 * step, pause_ns=5_000_000 if step else 0)
            for number in range(self.num_microbatches):
                writer.message("recv-extra", before, {"micro_batch_index": number})
                writer.begin("forward")
                writer.begin("decoder")
                writer.scope("attention", 50_000)
                writer.scope("_reduce", 20_000, {"expect": "_reduce", "group": mates})
                writer.end("decoder")
                if self.has_loss and after is None:
                    writer.scope("loss", 10_000)
                writer.end("forward", {"micro_batch_index": number})
                writer.message("exchange-next", after, {"expect": "exchange-prev"})
                writer.scope("backward", 200_000, {"micro_batch_index": number})
                writer.message("send-extra", before, {"micro_batch_index": number})
            writer.scope("allreduce", 90_000)
            writer.scope("optimizer", 40_000)
            writer.end_step()
        return writer.records


@dataclass
class _Scopes:
    common: dict[str, object]
    records: list[dict[str, object]] = field(default_factory=list)
    now_ns: int = 0

    def begin_step(self, jitter_ns: int, pause_ns: int) -> None:
        self.records.append({"name": "iteration", "ph": "B", "pad_before": pause_ns})
        self.now_ns = jitter_ns

    def end_step(self) -> None:
        times = {"duration_wall": self.now_ns + 700, "duration_cuda": self.now_ns}
        self.end("iteration", times)

    def begin(self, name: str) -> None:
        self.records.append({"name": name, "ph": "B", "rel_ts": self.now_ns, **self.common})

    def end(self, name: str, attributes: Mapping[str, object] | None = None) -> None:
        record = {"name": name, "rel_ts": self.now_ns, **self.common, "ph": "E"}
        self.records.append({**(attributes or {}), **record})

    def scope(
        self, name: str, length_ns: int, attributes: Mapping[str, object] | None = None
    ) -> None:
        self.begin(name)
        self.now_ns += length_ns
        self.end(name, attributes)

    def message(self, name: str, peer: int | None, attributes: Mapping[str, object]) -> None:
        sent = {"data": 8192 if peer is not None else None}
        group = {"group": [peer] if peer is not None else None, "bandwidth": 1.5}
        self.scope(name, 3_000 if peer is not None else 40, {**attributes, **sent, **group})


@dataclass
class Profiles:
    """A folder of PyTorch profiler files as a two-GPU job writes them, four-space arguments."""

    path: Path
    world_size: int = 2

    def write_rank(self, rank: int) -> Path:
        self.path.mkdir(exist_ok=True)
        path = self.path / f"worker_{rank}.pt.trace.json"
        text = json.dumps(self.document(rank), indent=2).replace("\n    ", "\n  ")
        path.write_text(text)
        return path

    def write(self) -> Path:
        for rank in range(self.world_size):
            self.write_rank(rank)
        return self.path

    def document(self, rank: int) -> dict[str, object]:
        ranks = list(range(self.world_size))
        group = {"pg_name": "3", "pg_desc": "TENSOR_MODEL_PARALLEL_GROUP", "ranks": ranks}
        return {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H100"}, {"id": 1, "name": "other"}],
            "distributedInfo": {
                "backend": "nccl",
                "rank": rank,
                "world_size": self.world_size,
                "pg_config": [group],
            },
            "host_name": "node7",
            "baseTimeNanoseconds": ORIGIN_NS,
            "traceEvents": [*self.events(rank)],
            "traceName": "x.json",
        }

    def events(self, rank: int) -> Iterator[dict[str, object]]:
        yield {"ph": "X", "cat": "Trace", "name": "PyTorch", "pid": "Spans", "tid": "P", "ts": 1.0}
        for step in range(2):
            start = 1000.0 * step + 100
            yield self.event("user_annotation", f"ProfilerStep#{step + 4}", start, 900)
            correlation = 10 * step + 1
            yield self.event(
                "cuda_runtime", "cudaLaunchKernel", start + 10, 5, correlation=correlation
            )
            yield self.event(
                "kernel",
                "void gemm<float, 128>(Params)",
                start + 895.125,
                20.25,
                correlation=correlation,
                stream=7,
            )
            yield self.event(
                "kernel",
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                start + 100 + rank,
                50,
                stream=20,
                **{
                    "Collective name": "allreduce",
                    "In msg nelems": 1024,
                    "Out msg nelems": 1024,
                    "Group size": 2,
                    "dtype": "BFloat16",
                    "Process Group Name": "3",
                    "Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP",
                    "Process Group Ranks": [0, 1] if step else "[0, 1]",
                    "Seq": 70 + step,
                },
            )
            yield self.event(
                "kernel",
                "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
                start + 200,
                40,
                stream=20,
                **{
                    "Collective name": "recv" if rank else "send",
                    "In msg nelems": 256,
                    "dtype": "Float",
                    "Process Group Name": "3",
                    "Process Group Ranks": "[0, 1]",
                    "Src Rank" if rank else "Dst Rank": 0 if rank else 1,
                },
            )

    @staticmethod
    def event(
        category: str, name: str, ts: float, dur: float, **arguments: object
    ) -> dict[str, object]:
        place = {"pid": 0, "tid": arguments.get("stream", 4711)}
        times = {"ts": ts, "dur": dur, "args": arguments}
        return {"ph": "X", "cat": category, "name": name, **place, **times}


@pytest.fixture
def original(tmp_path: Path) -> Original:
    return Original(tmp_path / "original")


@pytest.fixture
def profiles(tmp_path: Path) -> Profiles:
    return Profiles(tmp_path / "profiles")


@pytest.fixture
def merged(folder: Folder, tmp_path: Path) -> Path:
    """A timeline written by the exporter, its clocks and matches filled in by hand."""
    path = tmp_path / "timeline.json"
    write_timeline(timeline_of(read_trace(folder.write())), path)
    return path


def timeline_of(trace: Trace) -> Timeline:
    spans = trace.spans
    for number, column in enumerate(DERIVED_COLUMNS):
        values = pa.array([row * 10 + number - 1 for row in range(spans.num_rows)], pa.int64())
        spans = spans.append_column(column.name, values)
    clocks = {
        rank: ClockFit(
            rank=rank,
            domain="node7",
            offset_ns=1.5 * rank,
            drift_ppm=-0.25,
            residual_median_ns=100.0,
            residual_p99_ns=900.5,
            num_anchors=8,
        )
        for rank in trace.headers
    }
    return Timeline(
        run_id=trace.run_id,
        layout=trace.layout,
        headers=trace.headers,
        spans=spans,
        windows=trace.windows,
        clocks=clocks,
        clock_method="by hand",
        origin_ns=ORIGIN_NS + 1_000_000,
        completeness=trace.completeness,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "out")


def build_hook() -> ModuleType:
    """The file by which an install compiles a part of the reader."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The compiled part of the reader, built from its source as it is."""
    folder = tmp_path_factory.mktemp("compiled")
    reason = build_hook().build(folder)
    if reason:
        pytest.skip(f"no C compiler: {reason}")
    found = lines.loaded(folder / lines.LIBRARY.name, lines.SOURCE)
    assert found is not None
    return found


def use(way: ctypes.CDLL | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process read lines by a library, or by numpy for None."""
    for module in (lines, templates):
        monkeypatch.setattr(module, "compiled", lambda: way)


@pytest.fixture(params=["numpy", "compiled"])
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test twice: lines are read by numpy, and by the compiled part."""
    way = request.getfixturevalue("library") if request.param == "compiled" else None
    use(way, monkeypatch)
