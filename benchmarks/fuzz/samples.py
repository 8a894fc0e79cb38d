"""Healthy files of every format that is read, small enough to be damaged many thousand times."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson

from aggregate import build_timeline
from benchmarks.aggregate_scale.original_files import write_original_files
from benchmarks.aggregate_scale.rank_files import ScaleJob, simulated
from benchmarks.alignment import on_own_clocks
from megascan.export import write_timeline
from megascan.header import Json
from megascan.reader import read_trace
from megascan.simulate import write_rank_files
from megascan.topology import Layout

_EPOCH_NS = 1_700_000_000_000_000_000


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A file to damage and its undamaged neighbours, by name."""

    name: str
    file_name: str
    content: bytes
    neighbours: dict[str, bytes]

    @property
    def is_trace(self) -> bool:
        """Whether it is a rank's file (of a folder) and not a merged timeline."""
        return bool(self.neighbours)

    def write(self, folder: Path, content: bytes) -> None:
        """The neighbours, and `content` in the place of the file."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {**self.neighbours, self.file_name: content}.items():
            (folder / name).write_bytes(text)

    def packed(self) -> Sample:
        """The same, compressed."""
        return Sample(
            name=f"{self.name}, gzip",
            file_name=f"{self.file_name}.gz",
            content=gzip.compress(self.content, mtime=0),
            neighbours=self.neighbours,
        )


def make_samples(folder: Path) -> list[Sample]:
    """All samples, plain and gzipped; `folder` is filled with the files they are made of."""
    plain = list(_plain(folder))
    return [*plain, *(sample.packed() for sample in plain)]


def _plain(folder: Path) -> Iterator[Sample]:
    for name, layout in (("dp2", Layout(dp=2)), ("pp2", Layout(pp=2))):
        place = folder / name
        trace = simulated(_job(layout), iterations=2)
        write_rank_files(on_own_clocks(trace), place)  # so that there is something to align
        yield _of_folder(f"rank files {name}", place)
        timeline = build_timeline(read_trace(place))
        for suffix in (".json", ".pftrace"):
            output = folder / f"{name}{suffix}"
            write_timeline(timeline, output)
            yield Sample(
                name=f"timeline {name}{suffix}",
                file_name=output.name,
                content=output.read_bytes(),
                neighbours={},
            )
    write_original_files(_job(Layout(tp=2)), folder / "original")
    yield _of_folder("original", folder / "original")
    write_profiles(folder / "profiles")
    yield _of_folder("profiler", folder / "profiles")


def _job(layout: Layout) -> ScaleJob:
    return ScaleJob(layout=layout, num_spans=20, num_microbatches=1, num_layers=layout.pp)


def _of_folder(name: str, folder: Path) -> Sample:
    first, *others = sorted(path for path in folder.iterdir() if path.name != "ground-truth.json")
    return Sample(
        name=name,
        file_name=first.name,
        content=first.read_bytes(),
        neighbours={path.name: path.read_bytes() for path in others},
    )


def write_profiles(folder: Path) -> None:
    """Two ranks' files, two steps each."""
    folder.mkdir(parents=True)
    for rank in (0, 1):
        document = profile_document(rank, world_size=2)
        document["traceEvents"] = [
            event for step in (0, 1) for event in profile_events(rank, step, num_kernels=1)
        ]
        text = orjson.dumps(document, option=orjson.OPT_INDENT_2)
        (folder / f"rank{rank}.json").write_bytes(text)


def profile_document(rank: int, world_size: int) -> dict[str, Json]:
    """A rank's file as PyTorch's profiler writes it on a GPU, without events."""
    members: list[Json] = list(range(world_size))
    group: dict[str, Json] = {"pg_name": "3", "pg_desc": "DATA_PARALLEL_GROUP", "ranks": members}
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100"}],
        "distributedInfo": {
            "backend": "nccl",
            "rank": rank,
            "world_size": world_size,
            "pg_config": [group],
        },
        "host_name": "node7",
        "baseTimeNanoseconds": _EPOCH_NS,
        "traceEvents": [],
        "traceName": "x.json",
    }


def profile_events(rank: int, step: int, num_kernels: int) -> Iterator[dict[str, Json]]:
    """A step of a millisecond: kernels with their launches, an all-reduce, a message."""
    start = 1000.0 * step + 100
    yield _event("user_annotation", f"ProfilerStep#{step}", start, 900, {})
    for number in range(num_kernels):
        launch: dict[str, Json] = {"correlation": 1000 * step + number + 1, "stream": 7}
        at = start + 10 + number
        yield _event("cuda_runtime", "cudaLaunchKernel", at, 0.5, launch)
        yield _event("kernel", "void gemm<float>(Params)", at + 1, 0.75, launch)
    group: dict[str, Json] = {"Process Group Name": "3", "Process Group Ranks": "[0, 1]"}
    reduced: dict[str, Json] = {"Collective name": "allreduce", "In msg nelems": 1024}
    reduced |= {"dtype": "Float", "Seq": 7 + step, "stream": 20, **group}
    yield _event("kernel", "ncclDevKernel_AllReduce", start + 100 + rank, 50, reduced)
    sent: dict[str, Json] = {"Collective name": "recv" if rank else "send", **group}
    sent |= {"Src Rank" if rank else "Dst Rank": 1 - rank, "In msg nelems": 8, "stream": 20}
    yield _event("kernel", "ncclDevKernel_SendRecv", start + 200, 40, sent)


def _event(
    category: str, name: str, ts: float, dur: float, args: dict[str, Json]
) -> dict[str, Json]:
    place: dict[str, Json] = {"pid": 0, "tid": args.get("stream", 1)}
    return {"ph": "X", "cat": category, "name": name, **place, "ts": ts, "dur": dur, "args": args}
