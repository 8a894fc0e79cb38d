"""Advice as text and as JSON, and what became of a prediction."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from megascan.errors import InputError
from megascan.header import Json
from training.pipeline.job_model import Predictor
from training.pipeline.measured import MeasuredJob
from training.pipeline.remedies import Advice, Effort, Remedy, RemedyKind

_MS = 1e3
_MOST_ROWS = 14
_DOUBTFUL_RATIO = 0.05
"""Where the model misses the traced pipeline by more, the text says so."""


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
    """Return flags as they are typed in a shell: layouts hold pipe signs."""
    return (f"'{flag}'" if "|" in flag else flag for flag in flags)


def flags_text(remedy: Remedy, plan_path: Path | None) -> str:
    """Return the trainer's flags of a remedy, on one line, with the plan's own path."""
    flags = tuple(str(plan_path) if flag == "plan.csv" else flag for flag in remedy.flags)
    return " ".join(_quoted(flags))


def to_json(advice: Advice, model: Predictor) -> dict[str, Json]:
    """Return everything as JSON; times in seconds."""
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
    """Return one line: what `--write` predicted, and what this trace measures.

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
