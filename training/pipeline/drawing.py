"""A predicted step as lines of text or as a timeline for Perfetto; advice as text or JSON.

rank 0  F0   F1   ·····     B0        B1
rank 1       F0   B0        F1   B1
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from megascan.errors import InputError
from megascan.header import ClockOrigin, Device, Json, RankHeader, foreign_header
from megascan.schema import NOT_APPLICABLE, TIMELINE_COLUMNS, Kind, Phase, Track
from megascan.timeline import TIMELINE_SCHEMA, Completeness, Timeline
from megascan.topology import Layout
from megascan.vocabulary import BACKWARD, BACKWARD_WEIGHTS, FORWARD
from training.pipeline.costs import even_costs
from training.pipeline.generators import depth_first
from training.pipeline.measured import MeasuredJob, Predictor
from training.pipeline.plan import ActionKind, PipelineShape, Placement, Plan
from training.pipeline.remedies import Advice, Effort, Remedy, RemedyKind
from training.pipeline.simulator import Prediction, Timed, forward_order, numerics_note, predict

_SPANS = {
    ActionKind.FORWARD: (FORWARD, Phase.FORWARD),
    ActionKind.RECOMPUTE: (FORWARD, Phase.RECOMPUTE),
    ActionKind.BACKWARD: (BACKWARD, Phase.BACKWARD),
    ActionKind.INPUT_GRADIENT: (BACKWARD, Phase.BACKWARD),
    ActionKind.WEIGHT_GRADIENT: (BACKWARD_WEIGHTS, Phase.BACKWARD),
}
"""Span name and phase that the tracer gives to each kind of work."""
_NS_PER_S = 1e9


def describe(plan: Plan) -> str:
    """Describe a plan for even costs as text: picture, time, memory, and order of sums."""
    shape = plan.shape
    table = even_costs(shape).table(shape)
    prediction = predict(plan, table)
    lines = [
        draw_text(prediction, shape),
        f"{shape.num_ranks} pipeline ranks, {shape.num_chunks} chunk(s) each, "
        f"{shape.num_microbatches} microbatches; {prediction.bubble_ratio:.1%} of the time waiting "
        "with even stages",
        f"held at most, microbatches by rank: {' '.join(f'{p:.2f}' for p in prediction.peak)}",
        numerics_note(plan)
        or "sums have Megatron-Core's order: losses and gradients are the same bit by bit",
    ]
    if shape.placement is Placement.LOOP:
        usual = depth_first(shape)
        ratio = prediction.step_s / predict(usual, table).step_s
        lines.insert(2, f"{ratio:.3f} of the time of Megatron-Core's order")
        ranks = range(shape.num_ranks)
        if any(forward_order(plan, rank) != forward_order(usual, rank) for rank in ranks):
            lines.append(
                "forwards have another order than Megatron-Core's, so dropout draws other masks"
            )
    return "\n".join(lines)


def draw_text(prediction: Prediction, shape: PipelineShape, *, width: int = 100) -> str:
    """Draw one line a rank, `width` characters wide, with dots where the rank waits.

    An action is drawn as its letter and microbatch, in lower case on chunks of odd number.
    """
    lines = []
    for rank, row in enumerate(prediction.timeline):
        cells = ["·"] * width
        for timed in row:
            first = round(timed.begin_s / prediction.step_s * width)
            last = max(first + 1, round(timed.end_s / prediction.step_s * width))
            cells[first:last] = _label(timed, shape).ljust(last - first, "-")[: last - first]
        lines.append(f"rank {rank:<3} {''.join(cells[:width])}")
    return "\n".join(lines)


def _label(timed: Timed, shape: PipelineShape) -> str:
    kind, stage, microbatch = timed.action
    letter = kind.value if shape.chunk_of(stage) % 2 == 0 else kind.value.lower()
    return f"{letter}{microbatch}"


def draw_timeline(prediction: Prediction, shape: PipelineShape, *, name: str) -> Timeline:
    """Return a timeline of the step's work, for `megascan.export`."""
    layout = Layout(pp=shape.num_ranks, vpp=shape.num_chunks)
    spans = _spans(prediction, shape)
    return Timeline(
        run_id=name,
        layout=layout,
        headers=_headers(layout, name),
        spans=spans,
        windows={},
        clocks={},
        clock_method="predicted; all ranks on one clock",
        origin_ns=0,
        completeness=Completeness(
            world_size=layout.world_size,
            ranks=tuple(range(layout.world_size)),
            num_spans=spans.num_rows,
        ),
    )


def _spans(prediction: Prediction, shape: PipelineShape) -> pa.Table:
    timed = [(rank, entry) for rank, row in enumerate(prediction.timeline) for entry in row]
    begin_ns = np.rint([entry.begin_s * _NS_PER_S for _, entry in timed]).astype(np.int64)
    end_ns = np.rint([entry.end_s * _NS_PER_S for _, entry in timed]).astype(np.int64)
    actions = [entry.action for _, entry in timed]
    columns: Mapping[str, object] = {
        "rank": [rank for rank, _ in timed],
        "kind": [Kind.COMPUTE.value] * len(timed),
        "name": [_SPANS[action.kind][0] for action in actions],
        "track": [int(Track.COMPUTE)] * len(timed),
        "start_ns": begin_ns,
        "duration_ns": end_ns - begin_ns,
        "iteration": [1] * len(timed),
        "microbatch": [action.microbatch for action in actions],
        "chunk": [shape.chunk_of(action.stage) for action in actions],
        "phase": [_SPANS[action.kind][1].value for action in actions],
        "self_ns": end_ns - begin_ns,
    }
    arrays = []
    for column in TIMELINE_COLUMNS:
        absent = "" if column.type == "text" else NOT_APPLICABLE
        values = pa.array(columns.get(column.name, [absent] * len(timed)))
        arrays.append(values.dictionary_encode() if column.type == "text" else values)
    return pa.table(arrays, names=TIMELINE_SCHEMA.names).cast(TIMELINE_SCHEMA)


def _headers(layout: Layout, name: str) -> dict[int, RankHeader]:
    clock = ClockOrigin(domain="predicted", source="simulator", origin_unix_ns=0)
    device = Device(kind="cpu", name="")
    return {
        rank: foreign_header(name, rank, layout, device, clock) for rank in range(layout.world_size)
    }


_MS = 1e3
_MOST_ROWS = 14
_DOUBTFUL_RATIO = 0.05
"""Where the model misses the traced pipeline time by more than this share, the text says so."""


def render_text(advice: Advice, model: Predictor) -> str:
    """Return what was measured, a table of what would help, and what to do."""
    return "\n".join([*_measured(model), "", *_table(advice), *advice.notes, "", *_verdict(advice)])


def _measured(model: Predictor) -> Iterator[str]:
    job = model.job
    shape = job.shape
    counts = ",".join(map(str, dict.fromkeys(job.microbatches)))
    yield (
        f"pipeline of {shape.num_ranks} ranks, {shape.num_chunks} chunk(s) each, {counts} "
        f"microbatches, {job.num_replicas} replica(s); iteration {job.step_s * _MS:.1f} ms, of "
        f"which pipeline {job.pipeline_s * _MS:.1f} ms"
    )
    error = model.traced.pipeline_s / job.pipeline_s - 1
    doubt = "; take what follows as a hint only" if abs(error) > _DOUBTFUL_RATIO else ""
    yield (
        f"model of the traced pipeline: {model.traced.pipeline_s * _MS:.1f} ms "
        f"({error:+.1%} of the measured one){doubt}"
    )
    if model.slow_ranks:
        yield f"slow ranks: {', '.join(map(str, model.slow_ranks))}"


def _table(advice: Advice) -> Iterator[str]:
    header = ("iteration", "of now", "held", "needs", "losses", "what")
    shown = advice.remedies[:_MOST_ROWS]
    rows = [header, *(_row(advice, remedy) for remedy in shown)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield "  ".join([*cells, row[-1]])
    if len(advice.remedies) > len(shown):
        yield f"… and {len(advice.remedies) - len(shown)} slower ones"
    yield (
        f"held: activations of microbatches on the fullest rank; limit {advice.memory_limit:.3g}, "
        "* above it"
    )


def _row(advice: Advice, remedy: Remedy) -> tuple[str, ...]:
    held = max(remedy.peak)
    above = "*" if held > advice.memory_limit * (1 + 1e-9) else ""
    return (
        f"{remedy.step_s * _MS:.1f} ms",
        f"{remedy.step_s / advice.now.step_s:.3f}",
        f"{held:.2f}{above}",
        remedy.effort.value,
        remedy.numerics,
        remedy.what,
    )


def _verdict(advice: Advice) -> Iterator[str]:
    best, now = advice.best, advice.now
    if best is now:
        yield "nothing within the limit is worth a restart"
        return
    saved = 1 - best.step_s / now.step_s
    yield f"take: {best.what} ({saved:.1%} off the iteration)"
    if best.flags:
        yield f"flags: {' '.join(_quoted(best.flags))}"
    if best.kind is RemedyKind.ORDER:
        yield "lengths are tokens before padding; a job that computes padding too gains nothing"
    at_once = next((r for r in advice.remedies if r.effort is Effort.BOUNDARY), None)
    if at_once is not None and at_once is not best and at_once.step_s < now.step_s:
        yield f"without a restart: {at_once.what} ({1 - at_once.step_s / now.step_s:.1%} off)"
    if advice.guided_ratio is not None and advice.guided_ratio < 1.0:
        yield (
            f"passes spread so much that guided choice is {1 - advice.guided_ratio:.1%} faster "
            "than the plan alone: try --use-dpp --dpp-choice guided, and compare: on two H200s "
            "choosing itself cost 13 %"
        )


def _quoted(flags: tuple[str, ...]) -> Iterator[str]:
    """Return flags as typed in a shell: layouts are quoted, as they hold pipe signs."""
    return (f"'{flag}'" if "|" in flag else flag for flag in flags)


def flags_text(remedy: Remedy, plan_path: Path | None) -> str:
    """Return the trainer's flags of a remedy on one line, with `plan_path` for ``plan.csv``."""
    flags = tuple(str(plan_path) if flag == "plan.csv" else flag for flag in remedy.flags)
    return " ".join(_quoted(flags))


def to_json(advice: Advice, model: Predictor) -> dict[str, Json]:
    """Return advice and measured job as JSON; times in seconds."""
    job = model.job
    return {
        "schema": 1,
        "step_s": job.step_s,
        "pipeline_s": job.pipeline_s,
        "predicted_pipeline_s": model.traced.pipeline_s,
        "slow_ranks": list(model.slow_ranks),
        "spread_ratio": job.spread_ratio,
        "guided_ratio": advice.guided_ratio,
        "memory_limit": advice.memory_limit,
        "notes": list(advice.notes),
        "best": advice.remedies.index(advice.best),
        "remedies": [_remedy_json(remedy) for remedy in advice.remedies],
    }


def _remedy_json(remedy: Remedy) -> dict[str, Json]:
    return {
        "kind": remedy.kind.value,
        "what": remedy.what,
        "needs": remedy.effort.value,
        "step_s": remedy.step_s,
        "peak_by_rank": list(remedy.peak),
        "flags": list(remedy.flags),
        "losses": remedy.numerics,
    }


def compare(path: Path, job: MeasuredJob) -> str:
    """Return one line: what `--write` predicted, and what the trace of `job` measures.

    Raises InputError for a file that --write did not make.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        remedy = record["remedies"][record["best"]]
        before_s, predicted_s, what = record["step_s"], remedy["step_s"], remedy["what"]
        return (
            f"{what}: was {before_s * _MS:.1f} ms, predicted {predicted_s * _MS:.1f} ms, measured "
            f"{job.step_s * _MS:.1f} ms ({job.step_s / predicted_s - 1:+.1%} of the prediction)"
        )
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror or error}; check its path and permissions"
        ) from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise InputError(
            f"{path} is no prediction; give the prediction.json that megascan plan --write made"
        ) from error
