"""Write a simulated run as the rank files of docs/format.md, each rank by its own clock.

Hosts are off by up to tens of milliseconds and drift by some ppm; a device's clock is tied to its
host's within microseconds and drifts a little of its own. Chips read their SM clock as NVML would
tell it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
import orjson
from numpy.typing import NDArray

from benchmarks.grounds.kernels.cluster import Conditions, Numbers
from benchmarks.grounds.kernels.engine import STAMP_NS, Operation
from benchmarks.grounds.kernels.job import Job
from benchmarks.grounds.kinds import EXPERTS, kinds_of
from megascan.header import ClockOrigin, Device, RankHeader, TraceSettings, WindowRecord
from megascan.rankfile import encode_header, encode_window, rank_file_path
from megascan.schema import Granularity
from megascan.topology import Layout

RUN_BEGIN_UNIX_NS = 1_790_000_000_000_000_000
SM_CLOCK_MHZ = 1980.0


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Relate a rank's time to true time: what it reads at the run's begin, its rate, its wander.

    Time services slew a host's clock back and forth by some microseconds within minutes.
    """

    origin_unix_ns: int
    drift_ppm: float
    tie_width_ns: int
    wander_ns: float
    wander_period_ns: float

    def reads(self, true_ns: Numbers) -> NDArray[np.int64]:
        """Return what the rank writes down for true times since the run's begin."""
        wander = self.wander_ns * np.sin(2 * np.pi * true_ns / self.wander_period_ns)
        return np.rint(true_ns * (1 + self.drift_ppm * 1e-6) + wander).astype(np.int64)


def clocks(job: Job, seed: int) -> list[Clock]:
    """Draw the clock of each rank."""
    draw = np.random.default_rng([seed, 4])
    num_hosts = job.hosts[-1] + 1
    offsets = draw.normal(0, 1.2e7, num_hosts)
    drifts = draw.normal(0, 4.0, num_hosts)
    wanders = draw.normal(0, 5e3, num_hosts)
    periods = draw.uniform(4e10, 4e11, num_hosts)
    found = []
    for host in job.hosts:
        tie_ns = draw.normal(0, 6e3)
        found.append(
            Clock(
                origin_unix_ns=RUN_BEGIN_UNIX_NS + int(offsets[host] + tie_ns),
                drift_ppm=float(drifts[host] + draw.normal(0, 0.05)),
                wander_ns=float(wanders[host]),
                wander_period_ns=float(periods[host]),
                tie_width_ns=int(draw.uniform(8e3, 3e4)),
            )
        )
    return found


def groups(layout: Layout) -> dict[int, dict[str, tuple[int, ...]]]:
    """Return the process groups of each rank, by axis."""
    world = tuple(range(layout.world_size))
    found: dict[int, dict[str, tuple[int, ...]]] = {}
    places = {rank: layout.coordinates(rank) for rank in world}
    for rank in world:
        replicas = layout.group(rank, "dp")
        pipeline = layout.group(rank, "pp")
        experts = layout.group(rank, "ep")
        model = tuple(r for r in world if places[r].dp == places[rank].dp)
        found[rank] = {
            "tp": layout.group(rank, "tp"),
            "pp": pipeline,
            "dp": replicas,
            "dp_cp": replicas,
            "ep": experts,
            "expt_dp": tuple(r for r in replicas if places[r].ep == places[rank].ep),
            "tp_ep": tuple(sorted({peer for each in experts for peer in layout.group(each, "tp")})),
            "mp": model,
            "embd": tuple(dict.fromkeys((pipeline[0], pipeline[-1]))),
            "intra_dist_opt": world,
            "world": world,
        }
    return found


class RunFiles:
    """Puts the operations of one run down, rank by rank."""

    def __init__(
        self,
        job: Job,
        now: Conditions,
        operations: list[Operation],
        begins_ns: Numbers,
        seed: int,
    ) -> None:
        self.job, self.now = job, now
        self.begins_ns = begins_ns
        self.clocks = clocks(job, seed)
        self.groups = groups(job.layout)
        self.run_id = f"20260921-{seed % 1000000:06d}-ground"
        self.draw = np.random.default_rng([seed, 5])
        self.of_stage = [
            [operation for operation in operations if operation.stage == stage]
            for stage in range(job.pp)
        ]
        self.times = [self._times(stage) for stage in range(job.pp)]

    def _times(self, stage: int) -> Numbers:
        """Return true times, (start or end or launch, operation, iteration, rank of the stage)."""
        shape = (len(self.job.iterations), *self.job.grid[1:])
        columns = [
            [np.broadcast_to(each, shape) for each in pieces]
            for pieces in zip(
                *(
                    (
                        operation.start_ns,
                        operation.end_ns,
                        operation.start_ns if operation.launch_ns is None else operation.launch_ns,
                    )
                    for operation in self.of_stage[stage]
                ),
                strict=True,
            )
        ]
        times = np.array(columns).reshape(3, len(self.of_stage[stage]), shape[0], -1)
        return np.asarray(times + self.begins_ns[:, None], dtype=np.float64)

    def write(self, directory: Path) -> None:
        """Write one file a rank."""
        directory.mkdir(parents=True, exist_ok=True)
        for rank in range(self.job.num_ranks):
            header = self._header(rank)
            lines = [*encode_header(header), *self._windows(rank)]
            rank_file_path(directory, header).write_bytes(b"[\n" + b",\n".join(lines) + b"\n]\n")

    def _header(self, rank: int) -> RankHeader:
        layout, host = self.job.layout, self.job.hosts[rank]
        own = self.groups[rank]
        uuid = f"GPU-{crc32(f'{self.run_id} {rank}'.encode()):08x}"
        return RankHeader(
            run_id=self.run_id,
            rank=rank,
            world_size=self.job.num_ranks,
            layout=layout,
            coordinates=layout.coordinates(rank),
            groups={f"{axis}@{min(members)}": members for axis, members in own.items()},
            host=f"node-{host:03d}",
            process_id=4000 + rank,
            device=Device(
                kind="cuda",
                name="NVIDIA H100 80GB HBM3",
                index=rank % self.job.gpus_per_host,
                uuid=uuid,
            ),
            backend="nccl",
            clock=ClockOrigin(
                domain=f"node-{host:03d}:{uuid}:{4000 + rank}",
                source="cuda-event",
                origin_unix_ns=self.clocks[rank].origin_unix_ns,
            ),
            trace=TraceSettings(
                granularity=Granularity.FULL, interval=self.job.interval, window=self.job.window
            ),
            versions={"torch": "2.6.0", "megatron-core": "0.16.1"},
        )

    def _windows(self, rank: int) -> Iterator[bytes]:
        """Yield the spans of each window and the mark that ends it."""
        stage, member = divmod(rank, self.job.num_ranks // self.job.pp)
        times = self.clocks[rank].reads(self.times[stage][..., member])
        start, end, launch = times[0], times[1], times[2]
        relative = np.where(launch + STAMP_NS < start, launch - start, STAMP_NS).astype(np.int64)
        templates = [self._template(rank, operation) for operation in self.of_stage[stage]]
        present = [self._presence(operation, member) for operation in self.of_stage[stage]]
        job = self.job
        for number in range(job.windows):
            chosen = range(number * job.window, (number + 1) * job.window)
            spans = []
            for place in chosen:
                iteration = job.iterations[place]
                columns = zip(
                    templates,
                    present,
                    (start[:, place] / 1000).tolist(),
                    ((end - start)[:, place] / 1000).tolist(),
                    relative[:, place].tolist(),
                    strict=True,
                )
                spans += [
                    template % (begin, length, iteration, ahead)
                    for template, there, begin, length, ahead in columns
                    if there is None or there[place]
                ]
            yield from (span.encode() for span in spans)
            yield self._mark(rank, number, len(spans))

    def _presence(self, operation: Operation, member: int) -> list[bool] | None:
        if operation.present is None:
            return None
        flags = operation.present.reshape(len(self.job.iterations), -1)[:, member]
        return [bool(each) for each in flags]

    def _template(self, rank: int, operation: Operation) -> str:
        """Return the line of a span with its times, iteration and launch left open."""
        labels = dict(operation.labels)
        if operation.axis:
            labels["group"] = f"{operation.axis}@{min(self.groups[rank][operation.axis])}"
        if "peer_stage" in labels:
            per_stage = self.job.num_ranks // self.job.pp
            labels["peer"] = int(labels.pop("peer_stage")) * per_stage + rank % per_stage
        known = orjson.dumps(labels).decode()[1:-1].replace("%", "%%")
        launch = '"launch_ns":%d' if operation.launch_ns is not None else "%.0s"
        joined = ",".join(part for part in (known, launch) if part and part != "%.0s")
        rest = "" if operation.launch_ns is not None else "%.0s"
        return (
            f'{{"name":"{operation.name}","cat":"{operation.kind.value}","ph":"X",'
            f'"ts":%.3f,"dur":%.3f,"pid":{rank},"tid":{int(operation.track)},'
            f'"args":{{"iteration":%d{"," if joined else ""}{joined}}}}}{rest}'
        )

    def _mark(self, rank: int, number: int, num_spans: int) -> bytes:
        job = self.job
        first = job.iterations[number * job.window]
        return encode_window(
            rank,
            WindowRecord(
                run_id=self.run_id,
                window=number,
                first_iteration=first,
                last_iteration=first + job.window - 1,
                num_spans=num_spans,
                granularity="full",
                interval=job.interval,
                counters=self._counters(rank, (number + 1) * job.window - 1),
                tie_width_ns=self.clocks[rank].tie_width_ns,
                kinds=self._kinds(rank * job.pp // job.num_ranks),
            ),
        )

    def _kinds(self, stage: int) -> dict[str, tuple[int, ...]]:
        """Return which layers of a stage are alike; those of a heavier stage are wider."""
        job, width = self.job, float(self.now.stage_weight[stage])
        name = "FSDPBlock" if job.fsdp else "TransformerLayer"
        dense = f"{name} {job.hidden} tp {job.tp}, {width} times as wide"
        words = EXPERTS if job.experts else dense
        chunks = [job.layers_of(stage, chunk) for chunk in range(job.vpp)]
        return kinds_of((layer, words) for layers in chunks for layer in layers)

    def _counters(self, rank: int, place: int) -> dict[str, float]:
        """Return what NVML says at a window's end: the clock that made the chip slow or fast."""
        if not self.job.counters:
            return {}
        factor = float(self.now.compute[place].reshape(-1)[rank])
        clock = min(SM_CLOCK_MHZ, 1.03 * SM_CLOCK_MHZ / factor * (1 + self.draw.normal(0, 0.004)))
        return {
            "sm_clock_mhz": 15.0 * round(clock / 15),
            "sm_clock_max_mhz": SM_CLOCK_MHZ,
            "power_w": round(float(self.draw.normal(640, 15)), 1),
            "temperature_c": round(float(self.draw.normal(62, 3))),
        }
