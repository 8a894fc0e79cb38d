"""Write what a simulation recorded as rank files, by clocks that are as good as real ones.

Clocks of hosts differ by an offset and run at slightly different rates; a device's clock is tied to
its host's at both ends of each window, with an error each time. Between windows untraced iterations
pass: times of later windows are moved by as many usual iterations.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.grounds.kinds import EXPERTS, kinds_of
from benchmarks.grounds.quarry.conditions import Conditions, Drawer
from benchmarks.grounds.quarry.devices import HOST, Run, Span
from benchmarks.grounds.quarry.groups import Groups
from megascan.header import ClockOrigin, Device, RankHeader, TraceSettings, WindowRecord
from megascan.rankfile import (
    SpanRecord,
    encode_header,
    encode_spans,
    encode_window,
    rank_file_path,
)
from megascan.schema import Granularity

ORIGIN_NS = 1_790_000_000_000_000_000
BASE_NAMES = {
    "iteration", "forward", "backward", "loss", "batch-generator", "grad-sync", "optimizer",
}  # fmt: skip
BASE_AXES = ("dp@", "dp_cp@", "expt_dp@")
MAX_CLOCK_MHZ = 1980.0


def host_name(seed: int, host: int) -> str:
    """Return the name of a host of a job."""
    return f"gpu-{seed % 89 + 10}-{(seed // 89 + 7 * host) % 900 + 100}"


class Clocks:
    """What each rank's clocks show, given the simulation's time."""

    def __init__(self, drawer: Drawer, run: Run) -> None:
        job, machines = drawer.job, drawer.job.machines
        rng = drawer.rng("clocks")
        hosts = np.array([machines.host_of(rank) for rank in range(job.num_ranks)])
        windows = -(-len(job.iterations) // job.window)
        self.offset_s = rng.normal(0, machines.offset_s, hosts.max() + 1)[hosts]
        self.drift = rng.normal(0, machines.drift_ppm * 1e-6, hosts.max() + 1)[hosts]
        self.ties_s = rng.normal(0, machines.tie_s / 3, (job.num_ranks, windows + 1))
        untraced = job.interval - job.window
        self.gap_s = untraced * float(np.median(run.iteration_s))
        self.window = job.window
        last = np.minimum(np.arange(1, windows + 1) * job.window, len(job.iterations)) - 1
        self.edges_s = np.pad(run.ends_s[:, last], ((0, 0), (1, 0))).tolist()

    def host_ns(self, rank: int, turn: int, at: float) -> int:
        """Return what the host's clock shows at a moment of the simulation, ns after the origin."""
        wall = at + turn // self.window * self.gap_s
        return round(float(10 + wall * (1 + self.drift[rank]) + self.offset_s[rank]) * 1e9)

    def device_ns(self, rank: int, turn: int, at: float) -> int:
        """Return what the device's clock shows, tied to the host's."""
        window = turn // self.window
        begin, end = self.edges_s[rank][window : window + 2]
        share = (at - begin) / (end - begin)
        first, second = self.ties_s[rank, window : window + 2]
        return self.host_ns(rank, turn, at + float(first + (second - first) * share))


class Writer:
    """Writes the files of one simulation, one a rank."""

    def __init__(self, drawer: Drawer, groups: Groups, conditions: Conditions, run: Run) -> None:
        self.drawer, self.job, self.groups = drawer, drawer.job, groups
        self.conditions, self.run = conditions, run
        self.clocks = Clocks(drawer, run)

    def write(self, folder: Path) -> None:
        """Write all files."""
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(self.job.num_ranks):
            header = self._header(rank)
            lines = encode_header(header)
            for window, spans in self._windows(rank):
                lines += encode_spans(rank, [self._record(rank, span) for span in spans])
                mark = replace(self._mark(rank, window), run_id=header.run_id, num_spans=len(spans))
                lines.append(encode_window(rank, mark))
            rank_file_path(folder, header).write_bytes(b"[\n" + b",\n".join(lines) + b"\n]\n")

    def _header(self, rank: int) -> RankHeader:
        job, seed = self.job, self.drawer.seed
        host = host_name(seed, job.machines.host_of(rank))
        uuid, process = f"GPU-{seed:08x}-{rank:04x}", 2000 + 7 * rank
        is_megatron = {"megatron-core": "0.16.1"} if job.style == "megatron" else {}
        index = rank % job.machines.gpus_per_host
        return RankHeader(
            run_id=f"20260914-{seed % 1_000_000:06d}-{seed % 65_521:04x}",
            rank=rank,
            world_size=job.num_ranks,
            layout=job.layout,
            coordinates=job.layout.coordinates(rank),
            groups=self.groups.by_rank[rank],
            host=host,
            process_id=process,
            device=Device(kind="cuda", name=job.machines.name, index=index, uuid=uuid),
            backend="nccl",
            clock=ClockOrigin(
                domain=f"{host}:{uuid}:{process}", source="cuda-event", origin_unix_ns=ORIGIN_NS
            ),
            trace=TraceSettings(
                granularity=Granularity(job.granularity), interval=job.interval, window=job.window
            ),
            versions={"python": "3.12.3", "torch": "2.8.0"} | is_megatron,
        )

    def _windows(self, rank: int) -> list[tuple[int, list[Span]]]:
        """Return (window, spans) of what a rank records, spans in the order of their ends."""
        by_window: dict[int, list[Span]] = {}
        for span in self.run.spans[rank]:
            if self.job.granularity == "full" or _is_base(span):
                by_window.setdefault(span[6] // self.job.window, []).append(span)
        return sorted(by_window.items())

    def _record(self, rank: int, span: Span) -> SpanRecord:
        kind, name, track, start, end, launch, turn, arguments = span
        shown = self.clocks.host_ns if track == HOST else self.clocks.device_ns
        start_ns = shown(rank, turn, start)
        found: dict[str, Any] = dict(arguments)
        if kind != "checkpoint":
            found["iteration"] = self.job.iterations[turn]
        if launch is not None and self.job.granularity == "full":
            found["launch_ns"] = self.clocks.host_ns(rank, turn, launch) - start_ns
        if not self.job.has_sizes:
            found.pop("size_bytes", None)
        return kind, name, track, start_ns, shown(rank, turn, end) - start_ns, found

    def _mark(self, rank: int, window: int) -> WindowRecord:
        job = self.job
        turns = range(len(job.iterations))[window * job.window :][: job.window]
        return WindowRecord(
            run_id="",
            window=window,
            first_iteration=job.iterations[turns[0]],
            last_iteration=job.iterations[turns[-1]],
            num_spans=0,
            granularity=job.granularity,
            interval=job.interval,
            counters=self._counters(rank, turns[-1]) if job.machines.has_counters else {},
            tie_width_ns=round(job.machines.tie_s * 1e9),
            tokens=self._tokens(rank, turns),
            kinds=self._kinds(rank),
        )

    def _counters(self, rank: int, turn: int) -> dict[str, float]:
        """Return the readings at the end of a window: a clock as fast as products are then."""
        rng, conditions = self.drawer.rng("readings", rank, turn), self.conditions
        slower = conditions.products[rank][turn]
        if conditions.burst_shares[rank] == (1.0, 0.0):  # its own clock is slow, at times
            now = self.run.ends_s[rank, turn]
            slower *= max((f for a, b, f in conditions.bursts[rank] if a <= now < b), default=1.0)
        clock = min(MAX_CLOCK_MHZ, MAX_CLOCK_MHZ * 0.93 / slower + rng.normal(0, 8))
        return {
            "sm_clock_mhz": float(round(clock / 15) * 15),
            "sm_clock_max_mhz": MAX_CLOCK_MHZ,
            "power_w": float(np.round(rng.normal(560, 40), 1)),
            "temperature_c": float(np.round(rng.normal(58, 4))),
        }

    def _tokens(self, rank: int, turns: range) -> tuple[int, ...]:
        """Return the fewest and the most tokens of a pass, if nothing else decides its length."""
        job = self.job
        if not job.has_tokens or job.has_experts or job.lengths == "packed":
            return ()
        replica = job.layout.coordinates(rank).dp
        linear = self.conditions.lengths[replica, turns.start : turns.stop, :, 0]
        tokens = linear * job.tokens / job.layout.cp
        return max(1, int(tokens.min())), max(1, int(tokens.max()))

    def _kinds(self, rank: int) -> dict[str, tuple[int, ...]]:
        job, stage = self.job, self.job.layout.coordinates(rank).pp
        letters = "".join(row[stage] for row in job.chunks)
        if not job.has_tokens or "m" in letters:
            return {}
        heavy = self.conditions.passes[rank]
        words = {"d": f"dense of {job.hidden} times {heavy:.4f}", "e": EXPERTS}
        return kinds_of(
            (job.layers_before(chunk, stage) + at, words[letter])
            for chunk, row in enumerate(job.chunks)
            for at, letter in enumerate(row[stage], start=1)
        )


def _is_base(span: Span) -> bool:
    kind, name, arguments = span[0], span[1], span[7]
    if kind == "collective":
        return str(arguments["group"]).startswith(BASE_AXES)
    return name in BASE_NAMES or kind == "p2p"
