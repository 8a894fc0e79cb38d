"""Write a run as MegaScan's rank files, as docs/format.md describes them."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

from benchmarks.grounds.formats.clocks import ORIGIN_NS, Clock, clocks_of
from benchmarks.grounds.formats.job import Job
from benchmarks.grounds.formats.program import Code, SpanPlan
from benchmarks.grounds.formats.world import Run, draws_of
from benchmarks.grounds.kinds import EXPERTS, kinds_of

COMPUTE, COMMUNICATION, HOST, OVERLAPPED = 1, 2, 3, 4
TRACKS = {"compute": 1, "communication": 2, "host": 3, "overlapped": 4}
DATA_PARALLEL = ("dp", "dp_cp", "expt_dp")
INVISIBLE_OP = ("tp", "all_reduce")  # by kernels that no tracer recognises


@dataclass(frozen=True, kw_only=True)
class RankFileStyle:
    """How one job was traced."""

    full: bool = True
    counters: bool = False
    packed: bool = False  # lengths of sequences are not known to the tracer


@dataclass(frozen=True, slots=True)
class _Row:
    """What is the same for a span in every iteration; times come from two operations."""

    kind: str
    name: str
    track: int
    begin: int
    end: int
    arguments: dict[str, int | str]


def write_rank_files(run: Run, style: RankFileStyle, directory: Path) -> None:
    """Write one file a rank into a folder."""
    directory.mkdir(parents=True, exist_ok=True)
    world = run.world
    clocks = clocks_of(world.cluster, world.seed, float(run.end_ns.max()))
    rows = _rows(run, style)
    for rank in range(world.job.shape.world):
        lines = [_header(run, style, rank), *_names(run, rank)]
        for number, places in enumerate(_windows(world.job.iterations)):
            spans = [
                line
                for place in places
                for line in _spans(run, style, rank, place, rows[rank], clock=clocks[rank])
            ]
            lines += spans
            lines.append(_window(run, style, rank, number, places, num_spans=len(spans)))
        path = directory / _file_name(world.job, rank)
        path.write_bytes(b"[\n" + b",\n".join(lines) + b"\n]\n")


def _file_name(job: Job, rank: int) -> str:
    place = job.shape.place(rank)
    name = f"benchmark-data-{place['dp']}-pipeline-{place['pp']}-tensor-{place['tp']}"
    name += f"-context-{place['cp']}" if job.shape.cp > 1 else ""
    name += f"-expert-{place['ep']}" if job.shape.ep > 1 else ""
    return name + ".json"


def _windows(iterations: tuple[int, ...]) -> list[list[int]]:
    """Return the places of iterations that follow each other, window by window."""
    windows: list[list[int]] = []
    for place, number in enumerate(iterations):
        if not place or number != iterations[place - 1] + 1:
            windows.append([])
        windows[-1].append(place)
    return windows


def _metadata(name: str, rank: int, arguments: object, tid: int = 0) -> bytes:
    return orjson.dumps({"name": name, "ph": "M", "pid": rank, "tid": tid, "args": arguments})


def _header(run: Run, style: RankFileStyle, rank: int) -> bytes:
    job, cluster, shape = run.world.job, run.world.cluster, run.world.job.shape
    windows = _windows(job.iterations)
    window = len(windows[0])
    interval = job.iterations[window] - job.iterations[0] if len(windows) > 1 else window
    local = rank % cluster.gpus_a_node
    arguments = {
        "run_id": f"{run.world.seed:012x}",
        "rank": rank,
        "world_size": shape.world,
        "layout": {
            "tp": shape.tp, "cp": shape.cp, "ep": shape.ep, "dp": shape.dp, "pp": shape.pp,
            "vpp": shape.vpp, "etp": 1, "order": "tp-cp-ep-dp-pp",
        },
        "coordinates": shape.place(rank),
        "groups": {
            name: list(members) if len(members) <= 16 else f"{members[0]}-{members[-1]}"
            for name, members in shape.groups.items()
            if rank in members and (len(members) <= 16 or _is_even(members))
        },
        "host": cluster.host(rank),
        "process_id": 41_000 + 17 * local,
        "device": {
            "kind": "cuda", "name": cluster.chip.name, "index": local,
            "uuid": f"GPU-{run.world.seed % 65536:08x}-{rank:04x}",
        },
        "backend": "nccl",
        "clock": {
            "domain": f"{cluster.host(rank)}:7c1e:{cluster.chip.name}:{41_000 + 17 * local}",
            "source": "cuda-event",
            "origin_unix_ns": ORIGIN_NS,
        },
        "trace": {
            "granularity": "full" if style.full else "base", "interval": interval,
            "window": window, "compress": False, "max_bytes": 0, "budget_ratio": 0.0,
            "layer_stride": 1,
        },
        "versions": {"torch": "2.7.1", "megatron.core": "0.16.1"},
        "num_windows_dropped": 0,
        "last_iteration_dropped": 0,
        "schema": 1,
    }  # fmt: skip
    return _metadata("megascan", rank, arguments)


def _is_even(members: tuple[int, ...]) -> bool:
    return members == tuple(range(members[0], members[-1] + 1))


def _names(run: Run, rank: int) -> list[bytes]:
    label = f"rank {rank} {run.world.cluster.host(rank)}"
    return [
        _metadata("process_name", rank, {"name": label}),
        *(_metadata("thread_name", rank, {"name": name}, tid) for name, tid in TRACKS.items()),
    ]


def _window(
    run: Run, style: RankFileStyle, rank: int, number: int, places: list[int], *, num_spans: int
) -> bytes:
    job = run.world.job
    first, last = job.iterations[places[0]], job.iterations[places[-1]]
    rng = np.random.default_rng((run.world.seed, 11, rank, number))
    arguments = {
        "run_id": f"{run.world.seed:012x}", "window": number, "first_iteration": first,
        "last_iteration": last, "num_spans": num_spans, "num_dropped": 0,
        "granularity": "full" if style.full else "base",
        "counters": _counters(run, rank, last, rng) if style.counters else {},
        "tie_width_ns": int(rng.uniform(8_000, 30_000)), "drift_ppm": 0.0,
        "tokens": _tokens(run, style, rank, first, last),
        "kinds": _kinds(job, job.shape.place(rank)["pp"]),
    }  # fmt: skip
    return _metadata("megascan_window", rank, arguments)


def _counters(run: Run, rank: int, iteration: int, rng: np.random.Generator) -> dict[str, float]:
    """Return what the device's sensors say at the end of a window."""
    most = run.world.cluster.chip.clock_mhz
    clock, reasons = most * rng.uniform(0.97, 1.0), 4.0
    for one in run.world.troubles:
        if one.kind in ("gpu_clock", "host_power") and rank in one.touched and one.holds(iteration):
            clock, reasons = most / one.factor, 8.0
    return {
        "sm_clock_mhz": float(round(clock / 15) * 15),
        "sm_clock_max_mhz": float(run.world.cluster.chip.clock_mhz),
        "clock_event_reasons": reasons,
        "power_w": round(620 * (clock / most) ** 2 * rng.uniform(0.95, 1.05), 1),
        "temperature_c": float(round(rng.uniform(52, 68))),
    }


def _tokens(run: Run, style: RankFileStyle, rank: int, first: int, last: int) -> list[int]:
    job = run.world.job
    ends = job.shape.place(rank)["pp"] in (0, job.shape.pp - 1)
    if style.packed or not ends:
        return []
    draws, replica = draws_of(run.world), job.shape.place(rank)["dp"]
    numbers = [number for number in job.iterations if first <= number <= last]
    lengths = np.array([draws.lengths(each, run.world.troubles)[replica] for each in numbers])
    tokens = job.tokens * lengths
    return [int(tokens.min()), int(tokens.max())]


def _kinds(job: Job, stage: int) -> dict[str, tuple[int, ...]]:
    """Return which layers of a stage are alike: all, however many a stage has; experts are not."""
    words = EXPERTS if job.num_experts else f"TransformerLayer {job.hidden} tp {job.shape.tp}"
    return kinds_of(
        (layer, words) for chunk in range(job.shape.vpp) for layer in job.layers_of(stage, chunk)
    )


def _rows(run: Run, style: RankFileStyle) -> list[list[_Row]]:
    """Return what each rank records in every iteration."""
    rows: list[list[_Row]] = [[] for _ in range(run.world.job.shape.world)]
    for one in run.program.spans:
        if one.name != "decoder" and (style.full or not one.full_only):
            rows[one.rank].append(_plain(one))
    _add_collectives(run, style, rows)
    _add_messages(run, rows)
    return rows


def _plain(one: SpanPlan) -> _Row:
    arguments: dict[str, int | str] = {
        key: value
        for key, value in (
            ("microbatch", one.microbatch), ("chunk", one.chunk), ("layer", one.layer)
        )
        if value >= 0
    }  # fmt: skip
    if one.phase:
        arguments["phase"] = one.phase
    return _Row(
        one.kind, one.name, HOST if one.kind == "data" else COMPUTE, one.begin, one.end, arguments
    )


def _add_collectives(run: Run, style: RankFileStyle, rows: list[list[_Row]]) -> None:
    for number, one in enumerate(run.program.operations):
        if one.code is not Code.JOIN or one.name in ("send_recv", "barrier"):
            continue
        made = run.program.communications[one.communication]
        axis = made.group.partition("@")[0]
        unseen = run.world.job.hidden_tp and (axis, made.op) == INVISIBLE_OP
        if unseen or not (style.full or axis in DATA_PARALLEL):
            continue
        arguments: dict[str, int | str] = {
            "op": made.op, "group": made.group, "sequence": made.sequence,
            "size_bytes": made.size_bytes,
        }  # fmt: skip
        for key, value in (("microbatch", one.microbatch), ("chunk", one.chunk)):
            if value >= 0:
                arguments[key] = value
        if one.phase:
            arguments["phase"] = one.phase
        track = COMMUNICATION if one.synchronous else OVERLAPPED
        rows[one.rank].append(_Row("collective", made.op, track, number, number, arguments))


def _add_messages(run: Run, rows: list[list[_Row]]) -> None:
    sequences: Counter[tuple[int, int, str, str]] = Counter()
    group_of = run.world.job.shape.group_of
    for one in run.program.messages:
        join = run.program.operations[one.operation]
        key = join.rank, one.peer, one.op, one.direction
        arguments: dict[str, int | str] = {
            "op": one.op, "direction": one.direction, "peer": one.peer,
            "group": group_of("pp", join.rank), "sequence": sequences[key],
            "size_bytes": one.size_bytes, "microbatch": one.microbatch, "chunk": one.chunk,
        }  # fmt: skip
        sequences[key] += 1
        name = f"{one.op}_{one.direction}"
        track = COMMUNICATION if join.synchronous else OVERLAPPED
        rows[join.rank].append(_Row("p2p", name, track, one.operation, one.operation, arguments))


def _spans(
    run: Run, style: RankFileStyle, rank: int, place: int, rows: list[_Row], *, clock: Clock
) -> list[bytes]:
    """Return the events of one iteration of a rank, by their ends as a tracer has them."""
    iteration = run.world.job.iterations[place]
    start, end = clock.read(run.start[place]), clock.read(run.end[place])
    issued = clock.read(run.issued[place])
    timed: dict[int, list[tuple[int, bytes]]] = defaultdict(list)

    def add(
        kind: str, name: str, track: int, when: tuple[float, float],
        arguments: dict[str, int | str],
    ) -> None:  # fmt: skip
        begin_ns, end_ns = round(when[0]), round(when[1])
        event = {
            "name": name, "cat": kind, "ph": "X", "ts": begin_ns / 1000,
            "dur": max(0, end_ns - begin_ns) / 1000, "pid": rank, "tid": track,
            "args": {**arguments, "iteration": iteration},
        }  # fmt: skip
        timed[track].append((end_ns, orjson.dumps(event)))

    for row in rows:
        is_moment = row.begin != row.end
        finish = start[row.end] if is_moment else end[row.end]
        arguments = row.arguments
        if style.full and row.track != HOST:
            launched = round(issued[row.begin]) - round(start[row.begin])
            arguments = {**arguments, "launch_ns": launched}
        add(row.kind, row.name, row.track, (start[row.begin], finish), arguments)
    if style.full:
        for number, name in run.notes[place].items():
            if run.program.operations[number].rank == rank:
                add("gc", name, HOST, (start[number], end[number]), {})
        for one in run.pauses:
            if one.after == place and one.name:
                moments = clock.read(np.array([one.begin[rank], one.end[rank]]))
                add("checkpoint", one.name, HOST, (moments[0], moments[1]), {})
    found = [line for lines in timed.values() for line in lines]
    found.sort(key=lambda pair: pair[0])
    return [line for _, line in found]
