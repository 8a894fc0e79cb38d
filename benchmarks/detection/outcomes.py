"""What became of a case, and the file in which a long run keeps its outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from benchmarks.detection.jobs import Case
from benchmarks.detection.scoring import Score


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One case, judged. `error` holds what the detector raised, "" normally."""

    case: Case
    score: Score | None
    error: str
    baselines: dict[str, tuple[int, int]]
    """Rule → (faulty ranks it names, healthy ranks it names)."""
    num_spans: int
    timeline_s: float
    detect_s: float
    cost_ratio: float = 1.0
    """True step time over that of the same job without its faults."""


def append_outcome(path: Path, outcome: Outcome) -> None:
    """One line of JSON; the case is known by its seed and its name."""
    record = asdict(outcome) | {"case": [outcome.case.seed, _name(outcome.case)]}
    with path.open("ab") as file:
        file.write(orjson.dumps(record) + b"\n")


def read_outcomes(path: Path, cases: Sequence[Case]) -> dict[int, Outcome]:
    """By seed, those of these cases that are in the file; an unfinished last line is left out."""
    by_seed = {case.seed: case for case in cases}
    found: dict[int, Outcome] = {}
    lines = path.read_bytes().splitlines() if path.exists() else []
    for line in lines:
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        seed, name = record.pop("case")
        case = by_seed.get(seed)
        if case is None or _name(case) != name:
            continue
        if record["score"] is not None:
            causes = tuple(tuple(pair) for pair in record["score"]["causes"])
            record["score"] = Score(**record["score"] | {"causes": causes})
        baselines = {rule: tuple(counts) for rule, counts in record.pop("baselines").items()}
        found[seed] = Outcome(case=case, baselines=baselines, **record)
    return found


def _name(case: Case) -> str:
    return f"{case.group} {case.layout_name} {case.cost_name} {case.severity} {case.duration}"
