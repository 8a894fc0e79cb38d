"""Rank files: what MegaScan's tracer would have written, each on its own rank's clock."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TextIO

import numpy as np

from benchmarks.grounds.cluster.hardware import Cluster, Floats
from benchmarks.grounds.cluster.jobs import Job

_BEGIN_UNIX_NS = 1_790_000_000_000_000_000
COMPUTE, COMMUNICATION, HOST, OVERLAPPED = 1, 2, 3, 4


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Hold one span on every rank of a stage, or on some; times are true ns, one per rank of the
    stage.
    """

    kind: str
    name: str
    track: int
    start: Floats
    end: Floats
    arguments: str = ""  # JSON members, the same on all ranks
    launch: Floats | None = None
    axis: str = ""
    peer_offset: int = 0  # peer's rank less own; 0: none
    only: tuple[int, ...] | None = None  # ranks of the stage that record it


class RankFiles:
    """Write the files of a job a window at a time."""

    def __init__(self, directory: Path, job: Job, cluster: Cluster, run_id: str) -> None:
        self._job = job
        self._run_id = run_id
        self._offset_ns, self._drift_ppm = cluster.clocks()
        self._started_ns = np.random.default_rng([cluster.seed, 91]).uniform(0, 4e9, job.num_ranks)
        self._groups = [
            {axis: f"{axis}@{min(members)}" for axis, members in job.groups(rank).items()}
            for rank in range(job.num_ranks)
        ]
        self._files: list[TextIO] = []
        for rank in range(job.num_ranks):
            file = (directory / _file_name(job, rank)).open("w")
            file.write("[\n" + json.dumps(_metadata("megascan", rank, self._header(rank, cluster))))
            self._files.append(file)
        self._num_windows = 0

    def _header(self, rank: int, cluster: Cluster) -> dict[str, object]:
        job = self._job
        host = f"node{int(cluster.host_of[rank]):03d}"
        groups = {
            f"{axis}@{min(members)}": list(members) if len(members) <= 16 else _packed(members)
            for axis, members in job.groups(rank).items()
        }
        card = f"GPU-{cluster.seed:08x}-{rank:04x}"
        expert_tp = job.tp if job.ep > 1 else 1
        return {
            "run_id": self._run_id, "rank": rank, "world_size": job.num_ranks,
            "layout": {"tp": job.tp, "cp": 1, "ep": job.ep, "dp": job.dp, "pp": job.pp,
                       "vpp": job.vpp, "etp": expert_tp, "order": "tp-cp-ep-dp-pp"},
            "coordinates": _coordinates(job, rank), "groups": groups, "host": host,
            "process_id": 4000 + rank,
            "device": {"kind": "cuda", "name": "NVIDIA H100 80GB HBM3",
                       "index": rank % cluster.machines.gpus_per_host, "uuid": card},
            "backend": "nccl",
            "clock": {"domain": f"{host}:{card}:{4000 + rank}", "source": "cuda-event",
                      "origin_unix_ns": _BEGIN_UNIX_NS + int(self._started_ns[rank])},
            "trace": {"granularity": job.granularity, "interval": job.interval,
                      "window": job.window, "compress": False, "max_bytes": 0, "budget_ratio": 0.0},
            "versions": {"python": "3.12.3", "torch": "2.7.0", "megatron-core": "0.16.1"},
            "num_windows_dropped": 0, "last_iteration_dropped": 0, "schema": 1,
        }  # fmt: skip

    def window(self, iterations: Sequence[int], stages: Sequence[Sequence[Spans]]) -> None:
        """Append a window: the spans of each stage, then the mark that makes them count."""
        for stage, spans in enumerate(stages):
            self._stage(stage, spans, iterations)
        self._num_windows += 1

    def _stage(self, stage: int, spans: Sequence[Spans], iterations: Sequence[int]) -> None:
        size = self._job.num_stage_ranks
        own = slice(stage * size, (stage + 1) * size)
        rate = 1.0 + self._drift_ppm[own] * 1e-6
        shift = (
            self._offset_ns[own] - self._started_ns[own] + 5e9
        )  # the job began when all had started
        starts = np.stack([each.start for each in spans])
        durations_us = ((np.stack([each.end for each in spans]) - starts) * rate / 1000).T.tolist()
        begins_us = ((starts * rate + shift) / 1000).T.tolist()
        kinds = self._job.kinds(stage)
        for local in range(size):
            rank = stage * size + local
            lines = [
                _line(each, rank, local, (begin, duration), self._groups[rank])
                for each, begin, duration in zip(
                    spans, begins_us[local], durations_us[local], strict=True
                )
                if each.only is None or local in each.only
            ]
            mark: dict[str, object] = {
                "run_id": self._run_id, "window": self._num_windows,
                "first_iteration": iterations[0], "last_iteration": iterations[-1],
                "num_spans": len(lines), "num_dropped": 0,
                "granularity": self._job.granularity, "interval": self._job.interval,
            }  # fmt: skip
            if kinds:
                mark["kinds"] = kinds
            lines.append(json.dumps(_metadata("megascan_window", rank, mark)))
            self._files[rank].write(",\n" + ",\n".join(lines))

    def close(self) -> None:
        """Close all files as the tracer does at the end of a run."""
        for file in self._files:
            file.write("\n]\n")
            file.close()


def _line(
    spans: Spans, rank: int, local: int, times_us: tuple[float, float], groups: dict[str, str]
) -> str:
    arguments = [spans.arguments] if spans.arguments else []
    if spans.axis:
        arguments.append(f'"group":"{groups[spans.axis]}"')
    if spans.peer_offset:
        arguments.append(f'"peer":{rank + spans.peer_offset}')
    if spans.launch is not None:
        arguments.append(f'"launch_ns":{int(spans.launch[local] - spans.start[local])}')
    return (
        f'{{"name":"{spans.name}","cat":"{spans.kind}","ph":"X",'
        f'"ts":{times_us[0]:.3f},"dur":{times_us[1]:.3f},'
        f'"pid":{rank},"tid":{spans.track},"args":{{{",".join(arguments)}}}}}'
    )


def _metadata(name: str, rank: int, arguments: dict[str, object]) -> dict[str, object]:
    return {"name": name, "ph": "M", "pid": rank, "tid": 0, "args": arguments}


def _coordinates(job: Job, rank: int) -> dict[str, int]:
    replica = rank // job.tp % job.dp
    return {
        "tp": rank % job.tp, "cp": 0, "ep": replica % job.ep, "dp": replica,
        "pp": rank // job.num_stage_ranks,
    }  # fmt: skip


def _file_name(job: Job, rank: int) -> str:
    place = _coordinates(job, rank)
    name = f"benchmark-data-{place['dp']}-pipeline-{place['pp']}-tensor-{place['tp']}"
    return name + (f"-expert-{place['ep']}.json" if job.ep > 1 else ".json")


def _packed(members: tuple[int, ...]) -> str:
    """Write evenly spaced ranks in short: `first-last/step`, or `first-last` where the step is
    1.
    """
    step = members[1] - members[0]
    if any(later - earlier != step for earlier, later in pairwise(members)):
        return ",".join(str(member) for member in members)
    return f"{members[0]}-{members[-1]}" + (f"/{step}" if step > 1 else "")
