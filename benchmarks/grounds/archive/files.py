"""Write a run as the original MegaScan did: one array of begin and end records a rank.

Times count from the rank's own begin of the iteration, in ns of its own GPU's timer. Timers of GPUs
and clocks of hosts run a little fast or slow, differently in every machine, and a little
differently from hour to hour. A JULY or HEAD file has each traced step twice, as the tracer's call
at the step's end stood in two places; only the wall time differs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.grounds.archive.job import Job, Tracer
from benchmarks.grounds.archive.noise import Array, generator
from benchmarks.grounds.archive.schedule import Run
from benchmarks.grounds.archive.stage import Mark

TICK_NS = 32  # the resolution of a GPU's timer
TIMER_PPM, HOST_PPM, DRIFT_PPM = 12.0, 25.0, 2.0
CLOSING_US = 120.0  # from a step's last event until the host has looked at its clock
BETWEEN_US = 2500.0  # from there to the next step, in files that have every step
NUMBERED = frozenset(
    {"transformer_layer", "_forward_attention", "_forward_mlp", "mlp"}
)  # names that end with the layer's number, in JUNE


def file_name(job: Job, rank: int) -> str:
    """Return the name of a rank's file."""
    shape = job.shape
    tp, dp, pp = rank % shape.tp, rank // shape.tp % shape.dp, rank // shape.tp // shape.dp
    return f"benchmark-data-{dp}-pipeline-{pp}-tensor-{tp}.json"


def _lines(fields: dict[str, object]) -> str:
    """Return one record as it stands in an array that was dumped with an indent of 2."""
    text = json.dumps([fields], indent=2)[2:-2]
    return text.replace("%", "%%").replace('"TIME"', "%d").replace('"BANDWIDTH"', "%s")


def _others(job: Job, mark: Mark, stage: int, dp: int, tp: int) -> list[int] | None:
    """Return the group as the tracer said it: whom a rank communicates with, but itself."""
    shape = job.shape
    if mark.name == "_reduce":  # reduced over tensor ranks, said to be over replicas as well
        ranks = set(shape.stage_ranks(stage)) - {shape.rank(stage, dp, tp)}
        return sorted(ranks) if mark.has_group else None
    return None if mark.peer_stage is None else [shape.rank(mark.peer_stage, dp, tp)]


def _record(job: Job, mark: Mark, stage: int, dp: int, tp: int) -> str:
    """Return the text of one record, with a place for its time and its bandwidth."""
    shape, fields = job.shape, dict[str, object]()
    rank = shape.rank(stage, dp, tp)
    is_end = mark.phase == "E"
    if is_end and mark.microbatch is not None:
        fields["micro_batch_index"] = mark.microbatch
    if is_end and mark.expect:
        fields["expect"] = mark.expect
    if is_end and mark.has_data:
        fields["data"] = mark.data
    if is_end and (mark.has_group or mark.expect):
        fields["group"] = _others(job, mark, stage, dp, tp)
    name = mark.name
    if job.habits.tracer is Tracer.JUNE and name in NUMBERED:
        name = f"{name}_{mark.layer}"
    fields |= {"name": name, "ph": mark.phase, "rel_ts": "TIME", "dp_rk": dp, "pp_rk": stage}
    fields |= {"tp_rk": tp, "dev": rank % shape.gpus_per_host, "g_rk": rank}
    if is_end and mark.has_data:
        fields["bandwidth"] = None if mark.data is None else "BANDWIDTH"
    return _lines(fields)


def _opening_of(marks: Sequence[Mark]) -> list[int]:
    """Return, for each mark, the index of the begin that it closes; its own for a begin."""
    opened: list[int] = []
    found = []
    for index, mark in enumerate(marks):
        if mark.phase == "B":
            opened.append(index)
        found.append(index if mark.phase == "B" else opened.pop())
    return found


@dataclass(frozen=True, eq=False)
class Clocks:
    """State how clocks run, and what hosts measure of steps in ns, (rank, iteration)."""

    timer_rate: Array  # (rank,): 1.00001 is a GPU's timer that gains 10 µs a second
    pause_ns: Array  # before each step
    wall_ns: Array


def _clocks(job: Job, run: Run) -> Clocks:
    """Return the clocks of all machines and what they say."""
    shape, habits, num = job.shape, job.habits, job.num_iterations
    rng = generator(job.seed, "hosts' clocks")
    rate = rng.normal(0, HOST_PPM, (shape.num_hosts, 1))
    rate = rate + rng.normal(0, DRIFT_PPM, (shape.num_hosts, num)).cumsum(axis=1)
    rate = 1 + 1e-6 * rate[np.arange(shape.num_ranks) // shape.gpus_per_host]
    step = (run.end_us - run.begin_us).reshape(shape.num_ranks, num)
    longest = run.iteration_us
    pause = rng.gamma(6, BETWEEN_US / 6, (1, num)) + longest - step
    if habits.tracer is not Tracer.JUNE:
        skipped = (habits.interval - 1) * longest * rng.normal(1, 0.01, num)
        pause = pause + skipped
    if habits.checkpoint_every:
        number = np.arange(1, num + 1)
        saved = (number > 1) & (number % habits.checkpoint_every == 1)
        pause = pause + np.where(saved, 15 * longest.mean(), 0)
    pause[:, 0] = 0
    closing = rng.gamma(4, CLOSING_US / 4, step.shape)
    timers = generator(job.seed, "timers").normal(0, TIMER_PPM, shape.num_ranks)
    return Clocks(1 + 1e-6 * timers, 1e3 * rate * pause, 1e3 * rate * (step + closing))


def _rank_text(job: Job, run: Run, rank: int, clocks: Clocks) -> str:
    """Return the whole file of a rank."""
    shape = job.shape
    stage, dp, tp = rank // shape.tp // shape.dp, rank // shape.tp % shape.dp, rank % shape.tp
    marks = run.marks[stage]
    begin = run.begin_us[stage, dp, tp]
    rate, pause, wall = clocks.timer_rate[rank], clocks.pause_ns[rank], clocks.wall_ns[rank]
    times = np.stack([mark.time_us[dp, tp] for mark in marks]) - begin
    ticks = np.rint(times * 1e3 * rate / TICK_NS).astype(np.int64) * TICK_NS
    length = np.rint((run.end_us[stage, dp, tp] - begin) * 1e3 * rate / TICK_NS) * TICK_NS
    opening = _opening_of(marks)
    template = ",\n".join(_record(job, mark, stage, dp, tp) for mark in marks)
    has_rate = [mark.phase == "E" and mark.data is not None for mark in marks]
    place = {"dp_rk": dp, "pp_rk": stage, "tp_rk": tp, "dev": rank % shape.gpus_per_host}
    steps = []
    for at in range(job.num_iterations):
        values: list[object] = []
        column = ticks[:, at].tolist()
        for index, mark in enumerate(marks):
            values.append(column[index])
            if has_rate[index]:
                seconds = max(column[index] - column[opening[index]], TICK_NS) / 1e9
                values.append(repr((mark.data or 0) / 2**27 / seconds))
        first = _lines({"name": "iteration", "ph": "B", "pad_before": int(pause[at])})
        body = template % tuple(values)
        copies = [int(wall[at])]
        if job.habits.tracer is not Tracer.JUNE:
            copies.append(int(900_000 + wall[at] % 700_000))  # since the first one was written
        for duration in copies:
            end: dict[str, object] = {"name": "iteration", "ph": "E", "rel_ts": int(length[at])}
            end |= {**place, "g_rk": rank, "duration_wall": duration}
            end |= {"duration_cuda": int(length[at])}
            steps.append(",\n".join((first, body, _lines(end))))
    return "[\n" + ",\n".join(steps) + "\n]"


def write_files(job: Job, run: Run, directory: Path) -> None:
    """Write the files of all ranks that are not lost."""
    directory.mkdir(parents=True, exist_ok=True)
    clocks = _clocks(job, run)
    for rank in range(job.shape.num_ranks):
        if rank not in job.habits.lost_ranks:
            text = _rank_text(job, run, rank, clocks)
            (directory / file_name(job, rank)).write_text(text)
