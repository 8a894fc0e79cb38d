"""Simulates, aligns, judges and scores cases, on all cores, and keeps what is done."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from aggregate import build_timeline
from benchmarks.detection.baselines import RULES, spans_of
from benchmarks.detection.jobs import Case
from benchmarks.detection.outcomes import Outcome, append_outcome, read_outcomes
from benchmarks.detection.scoring import score
from detect import detect
from megascan.schema import Granularity
from megascan.simulate import simulate_trace
from megascan.timeline import Trace, equals, numbers


def run_case(case: Case, with_baselines: bool) -> Outcome:
    """Everything about one case. The detector gets the timeline and nothing else."""
    trace = simulate_trace(case.job, case.faults, case.seed)
    begin = time.process_time()
    timeline = build_timeline(trace)
    aligned = time.process_time()
    error, report = "", None
    try:
        report = detect(timeline)
    except Exception as problem:  # a crash of the detector is a result of the benchmark
        error = f"{type(problem).__name__}: {problem}"
    judged = time.process_time()
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
        cost_ratio=cost_ratio,
    )


def true_cost_ratio(case: Case, trace: Trace) -> float:
    """Step time with the faults over step time without them, all random draws being equal."""
    healthy = simulate_trace(replace(case.job, granularity=Granularity.BASE), (), case.seed)
    return _step_time_ns(trace) / _step_time_ns(healthy)


def _step_time_ns(trace: Trace) -> float:
    steps = trace.spans.filter(pa.array(equals(trace.spans, "name", "iteration")))
    return float(numbers(steps, "duration_ns").mean())


def run_all(
    cases: Sequence[Case],
    *,
    with_baselines: bool,
    num_workers: int | None = None,
    kept: Path | None = None,
) -> Iterator[Outcome]:
    """Outcomes in the order of the cases; a progress line on a terminal.

    What is done is appended to the file `kept`, and what stands there already is not done again.
    """
    workers = num_workers or os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    done = read_outcomes(kept, cases) if kept else {}
    left = [case for case in cases if case.seed not in done]
    with ProcessPoolExecutor(workers) as pool:
        results = pool.map(run_case, left, [with_baselines] * len(left), chunksize=4)
        for number, case in enumerate(cases, start=1):
            if case.seed not in done:
                done[case.seed] = next(results)
                if kept:
                    append_outcome(kept, done[case.seed])
            if sys.stderr.isatty():
                print(f"\r{number} of {len(cases)} cases", end="", file=sys.stderr)
            yield done[case.seed]
    if sys.stderr.isatty():
        print(file=sys.stderr)
