"""Simulates, aligns, judges and scores cases, on all cores."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import pyarrow as pa

from aggregate import build_timeline
from benchmarks.detection.baselines import RULES, spans_of
from benchmarks.detection.cases import Case
from benchmarks.detection.scoring import Score, score
from detect import detect
from megascan.schema import Granularity
from megascan.simulate import simulate_trace
from megascan.timeline import Trace, equals, numbers


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


def run_case(case: Case, with_baselines: bool) -> Outcome:
    """Everything about one case. The detector gets the timeline and nothing else."""
    trace = simulate_trace(case.job, case.faults, case.seed)
    begin = time.perf_counter()
    timeline = build_timeline(trace)
    aligned = time.perf_counter()
    error, report = "", None
    try:
        report = detect(timeline)
    except Exception as problem:  # a crash of the detector is a result of the benchmark
        error = f"{type(problem).__name__}: {problem}"
    judged = time.perf_counter()
    cost_ratio = true_cost_ratio(case, trace) if case.faults else 1.0
    named = {}
    if with_baselines:
        spans = spans_of(timeline)
        named = {name: rule(spans, timeline) for name, rule in RULES.items()}
    truth = {rank for fault in case.faults for rank in (fault.rank, fault.peer) if rank is not None}
    return Outcome(
        case=case,
        score=None if report is None else score(case, report, cost_ratio),
        error=error,
        baselines={name: (len(ranks & truth), len(ranks - truth)) for name, ranks in named.items()},
        num_spans=trace.spans.num_rows,
        timeline_s=aligned - begin,
        detect_s=judged - aligned,
    )


def true_cost_ratio(case: Case, trace: Trace) -> float:
    """Step time with the faults over step time without them, all random draws being equal."""
    healthy = simulate_trace(replace(case.job, granularity=Granularity.BASE), (), case.seed)
    return _step_time_ns(trace) / _step_time_ns(healthy)


def _step_time_ns(trace: Trace) -> float:
    steps = trace.spans.filter(pa.array(equals(trace.spans, "name", "iteration")))
    return float(numbers(steps, "duration_ns").mean())


def run_all(
    cases: Sequence[Case], *, with_baselines: bool, num_workers: int | None = None
) -> Iterator[Outcome]:
    """Outcomes as they are done, in the order of the cases; a progress line on a terminal."""
    workers = num_workers or os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(workers) as pool:
        results = pool.map(run_case, cases, [with_baselines] * len(cases), chunksize=4)
        for number, outcome in enumerate(results, start=1):
            if sys.stderr.isatty():
                print(f"\r{number} of {len(cases)} cases", end="", file=sys.stderr)
            yield outcome
    if sys.stderr.isatty():
        print(file=sys.stderr)
