"""Write a simulated job as the original MegaScan's rank files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.grounds.original.costs import generator, job_steps, paused_before
from benchmarks.grounds.original.job import Floats, Job, Kind
from benchmarks.grounds.original.schedule import Mark, Run

TICK_NS = 500.0  # resolution of the device's events
BITS_PER_GIBIBIT = 2**30
BETWEEN_STEPS_US = 900.0  # logging, on the host
LOGGING_NS = (
    170_000  # between the two ends of a step, of which the second repeats the first's records
)
PAUSE_US = 2_500_000.0  # evaluation or saving, of the whole job
HOST_DRIFT_PPM = 20.0

TIME, BANDWIDTH = "%d", "%r"
OWN = {"previous": "@previous@", "next": "@next@", "others of tp and dp": "@others@"}


def write_files(job: Job, run: Run, directory: Path) -> None:
    """Write one file a rank; all ranks of a stage share the text that times are filled into."""
    grid = job.shape.grid()
    directory.mkdir(parents=True, exist_ok=True)
    walls = _walls_ns(job, run)
    rates = 1 + generator(job.seed, "clocks").normal(size=grid.shape) * HOST_DRIFT_PPM * 1e-6
    for stage, marks in enumerate(run.marks):
        text = _stage_text(marks)
        columns = _columns(marks, run.begin_us[stage], rates[stage])
        lengths = _ticks(run.end_us[stage] - run.begin_us[stage], rates[stage])
        for dp, tp in np.ndindex(*grid.shape[1:]):
            name = f"benchmark-data-{dp}-pipeline-{stage}-tensor-{tp}.json"
            template = _rank_text(job, text, stage, dp, tp)
            values = columns[:, dp, tp].T.tolist()
            steps = [template % tuple(row) for row in values]
            ends = lengths[dp, tp].astype(np.int64).tolist()
            own = _own_fields(job, stage, dp, tp)
            records = list(_file_records(job, steps, ends, walls, own))
            (directory / name).write_text("[\n" + ",\n".join(records) + "\n]")


def _ticks(time_us: Floats, rate: Floats) -> Floats:
    """Return times in ns by each rank's own clock, to its resolution."""
    return np.round(time_us * rate[..., None] * 1000 / TICK_NS) * TICK_NS


def _columns(marks: list[Mark], begin_us: Floats, rate: Floats) -> Floats:
    """Return what a step's text is filled with, shape (value, dp, tp, step)."""
    columns: list[Floats] = []
    begins: list[Floats] = []
    for mark in marks:
        time_ns = _ticks(mark.time_us - begin_us, rate)
        columns.append(time_ns)
        if mark.phase == "B":
            begins.append(time_ns)
            continue
        elapsed_ns = np.maximum(time_ns - begins.pop(), TICK_NS)
        size = mark.attributes.get("data")
        if isinstance(size, int):
            columns.append(size * 8 / BITS_PER_GIBIBIT / (elapsed_ns * 1e-9))
    return np.stack(columns)


def _record(fields: dict[str, str]) -> str:
    """Return one record as `json.dump(indent=2)` writes it, from values that are JSON already."""
    lines = ",\n".join(f'    "{key}": {value}' for key, value in fields.items())
    return "  {\n" + lines + "\n  }"


def _stage_text(marks: list[Mark]) -> str:
    """Return one step's records of any rank of a stage, with places for what differs."""
    records = []
    for mark in marks:
        fields = {}
        for key, value in mark.attributes.items():
            fields[key] = OWN[str(value)] if key == "group" and value else json.dumps(value)
        fields |= {"name": json.dumps(mark.name), "ph": json.dumps(mark.phase), "rel_ts": TIME}
        fields["@own@"] = ""
        if "data" in mark.attributes:
            fields["bandwidth"] = "null" if mark.attributes["data"] is None else BANDWIDTH
        records.append(_record(fields).replace('    "@own@": ', "@own@"))
    return ",\n".join(records)


def _own_fields(job: Job, stage: int, dp: int, tp: int) -> str:
    """Return the fields that say whose record it is."""
    rank = int(job.shape.grid()[stage, dp, tp])
    device = rank % job.shape.gpus_per_host
    fields = {"dp_rk": dp, "pp_rk": stage, "tp_rk": tp, "dev": device, "g_rk": rank}
    return ",\n".join(f'    "{key}": {value}' for key, value in fields.items())


def _rank_text(job: Job, text: str, stage: int, dp: int, tp: int) -> str:
    """Return a stage's text with the fields and groups of one rank."""
    grid = job.shape.grid()
    rank = int(grid[stage, dp, tp])
    groups = {
        "@others@": [int(other) for other in grid[stage].ravel() if other != rank],
        "@previous@": [int(grid[stage - 1, dp, tp])],
        "@next@": [int(grid[(stage + 1) % job.shape.pp, dp, tp])],
    }
    for place, ranks in groups.items():
        listed = ",\n".join(f"      {other}" for other in ranks)
        text = text.replace(place, f"[\n{listed}\n    ]")
    return text.replace("@own@", _own_fields(job, stage, dp, tp))


def _walls_ns(job: Job, run: Run) -> list[tuple[int, int]]:
    """Return `pad_before` and `duration_wall` of each step, by the host's clock."""
    step_us = run.steps_us
    pauses = np.zeros(job.num_steps)
    for effect in job.effects:
        if effect.kind is Kind.PAUSE:
            pauses += PAUSE_US * paused_before(job, effect)
    untraced = np.diff(job_steps(job), prepend=0.0) - 1
    gaps_us = np.maximum(untraced, 0) * (run.step_us + BETWEEN_STEPS_US) + BETWEEN_STEPS_US + pauses
    gaps_us[0] = 0.0
    return [
        (int(gap * 1000), int((step + BETWEEN_STEPS_US / 3) * 1000))
        for gap, step in zip(gaps_us, step_us, strict=True)
    ]


def _file_records(
    job: Job, steps: list[str], ends_ns: list[int], walls_ns: list[tuple[int, int]], own: str
) -> Iterator[str]:
    """Yield the records of one file, each step as often as its tracer writes it."""
    for text, end_ns, (pad_ns, wall_ns) in zip(steps, ends_ns, walls_ns, strict=True):
        for copy in range(job.tracing.num_copies):
            yield _record({"name": '"iteration"', "ph": '"B"', "pad_before": str(pad_ns)})
            yield text
            wall = wall_ns + copy * LOGGING_NS if copy % 2 == 0 else (copy + 1) * LOGGING_NS
            end = {"name": '"iteration"', "ph": '"E"', "rel_ts": str(end_ns), "@own@": ""}
            end |= {"duration_wall": str(wall), "duration_cuda": str(end_ns)}
            yield _record(end).replace('    "@own@": ', own)
