"""What plans are predicted to be worth, how long their search takes, and how true the model is.

    python -m benchmarks.planning [--repeat 5] > benchmarks/results/planning.md

All times but those of the search are predictions, relative to Megatron-Core's 1F1B with its
blocking exchanges: forwards of 1, gradients of inputs 1.05, of weights 0.95, messages of 0.02. The
last table sets the model beside traces of real jobs.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from benchmarks.jobs import ROOT
from megascan.errors import ConfigError
from megascan.reader import read_timeline
from training.pipeline.costs import (
    Costs,
    WorkTable,
    disturbed,
    even_costs,
    even_memory,
    peak_memory,
)
from training.pipeline.generators import (
    breadth_first,
    depth_first,
    one_forward_one_backward,
    zero_bubble_h1,
)
from training.pipeline.guided import patience_for, run_guided
from training.pipeline.measured import measure
from training.pipeline.plan import PipelineShape, Plan
from training.pipeline.planner import Problem, search
from training.pipeline.remedies import hill
from training.pipeline.simulator import predict, predict_megatron

SIZES = ((4, 8), (4, 16), (8, 16), (8, 32))
NUM_DRAWS = 10
Change = Callable[[PipelineShape, Costs], Costs]


def shape_of(ranks: int, microbatches: int, chunks: int = 1) -> PipelineShape:
    """A pipeline of these sizes."""
    return PipelineShape(num_ranks=ranks, num_microbatches=microbatches, num_chunks=chunks)


def planned(ranks: int, microbatches: int, chunks: int, extra: int, change: Change) -> Plan | None:
    """The plan found with the memory of 1F1B and `extra` microbatches; None where none fits."""
    of = shape_of(ranks, microbatches, chunks)
    problem = Problem(
        shape=of,
        table=change(of, even_costs(of)).table(of),
        memory=even_memory(of),
        memory_limit=min(ranks, microbatches) + extra,
    )
    try:
        return search(problem).plan
    except ConfigError:
        return None


def schedules(ranks: int, microbatches: int, change: Change) -> Iterator[tuple[str, Plan | None]]:
    """Every schedule by its name."""
    yield "interleaved, 2 chunks", depth_first(shape_of(ranks, microbatches, 2))
    yield "interleaved, 4 chunks", depth_first(shape_of(ranks, microbatches, 4))
    yield "breadth-first, 2 chunks", breadth_first(shape_of(ranks, microbatches, 2))
    yield "ZB-H1", zero_bubble_h1(shape_of(ranks, microbatches))
    for chunks, extra in ((1, 0), (1, 1), (2, 0), (2, 1), (4, 1)):
        name = f"planned, {chunks} chunk(s), memory of 1F1B{' + 1' if extra else ''}"
        yield name, planned(ranks, microbatches, chunks, extra, change)


def schedule_table(title: str, change: Change) -> Iterator[str]:
    """Relative time and peak of every schedule under the same circumstances."""
    yield f"## {title}\n"
    yield "| schedule | " + " | ".join(f"PP{p}, {m} microbatches" for p, m in SIZES) + " |"
    yield "|---|" + "---|" * len(SIZES)
    columns = [_column(ranks, microbatches, change) for ranks, microbatches in SIZES]
    for name in columns[0]:
        yield f"| {name} | " + " | ".join(column[name] for column in columns) + " |"
    yield ""


def _column(ranks: int, microbatches: int, change: Change) -> dict[str, str]:
    usual = shape_of(ranks, microbatches)
    table = change(usual, even_costs(usual)).table(usual)
    megatron = predict_megatron(usual, table)
    cells = {"1F1B of Megatron-Core": f"1.000 / {max(megatron.peak):.1f}"}
    for name, plan in schedules(ranks, microbatches, change):
        if plan is None:
            cells[name] = "none fits"
            continue
        costs = change(plan.shape, even_costs(plan.shape))
        step_s = predict(plan, costs.table(plan.shape)).step_s
        cells[name] = f"{step_s / megatron.step_s:.3f} / {max(peak_memory(plan)):.1f}"
    cells["work of the busiest rank (bound)"] = (
        f"{table.busiest_rank_s(usual) / megatron.step_s:.3f}"
    )
    return cells


def as_is(of: PipelineShape, costs: Costs) -> Costs:
    """Nothing changed."""
    return costs


def slow_rank(of: PipelineShape, costs: Costs, *, ratio: float) -> Costs:
    """The rank in the middle slower."""
    return costs.slowed(of, of.num_ranks // 2, ratio)


def search_table(repeat: int) -> Iterator[str]:
    """How long a search takes."""
    yield "## The search\n"
    load = os.getloadavg()[0]
    yield f"{os.cpu_count()} cores, {platform.machine()}, load average {load:.1f}; {repeat} each.\n"
    yield "| pipeline | policies | processor, median, s | wall, median, s |\n|---|---|---|---|"
    for ranks, microbatches, chunks in ((4, 8, 1), (4, 16, 2), (8, 32, 1), (8, 32, 2), (8, 32, 4)):
        of = shape_of(ranks, microbatches, chunks)
        busy, wall, tried = [], [], 0
        for _ in range(repeat):
            problem = Problem(
                shape=of,
                table=even_costs(of).table(of),
                memory=even_memory(of),
                memory_limit=ranks + 1,
            )
            began, began_busy = time.perf_counter(), time.process_time()
            tried = search(problem).num_tried
            busy.append(time.process_time() - began_busy)
            wall.append(time.perf_counter() - began)
        yield (
            f"| PP{ranks}, {microbatches} microbatches, {chunks} chunk(s) | {tried} "
            f"| {statistics.median(busy):.2f} | {statistics.median(wall):.2f} |"
        )
    yield ""


def order_table() -> Iterator[str]:
    """Microbatches of uneven length, in the order drawn and short, long, short."""
    yield "## Order of microbatches of uneven length\n"
    yield (
        f"Log-normal lengths (σ 0.7), work 0.8 L + 0.2 L²; mean of {NUM_DRAWS} draws over 1F1B in "
        "the order drawn; time / peak in mean microbatches.\n"
    )
    yield "| pipeline | 1F1B, as drawn | 1F1B, hill | ZB-H1, as drawn | ZB-H1, hill |"
    yield "|---|---|---|---|---|"
    for ranks, microbatches in SIZES:
        of = shape_of(ranks, microbatches)
        plans = (one_forward_one_backward(of), zero_bubble_h1(of))
        draws = [_lengths(microbatches, seed) for seed in range(NUM_DRAWS)]
        base = [_uneven(plans[0], lengths)[0] for lengths in draws]
        cells = []
        for plan in plans:
            for order in (tuple, hill):
                runs = [_uneven(plan, order(lengths)) for lengths in draws]
                ratio = statistics.fmean(t / b for (t, _), b in zip(runs, base, strict=True))
                cells.append(f"{ratio:.3f} / {statistics.fmean(peak for _, peak in runs):.1f}")
        yield f"| PP{ranks}, {microbatches} microbatches | " + " | ".join(cells) + " |"
    yield ""


def _lengths(count: int, seed: int) -> tuple[float, ...]:
    """Lengths of microbatches, 1 on average."""
    draw = random.Random(seed)
    raw = [min(4.0, max(0.1, draw.lognormvariate(0, 0.7))) for _ in range(count)]
    return tuple(length * count / sum(raw) for length in raw)


def _uneven(plan: Plan, lengths: tuple[float, ...]) -> tuple[float, float]:
    """Time and peak of a plan with microbatches of these lengths."""
    costs = replace(
        even_costs(plan.shape),
        microbatch_scales=tuple(0.8 * length + 0.2 * length**2 for length in lengths),
        microbatch_sizes=lengths,
    )
    memory = replace(even_memory(plan.shape), sizes=lengths)
    prediction = predict(plan, costs.table(plan.shape), memory)
    return prediction.step_s, max(prediction.peak)


def late(table: WorkTable, seed: int) -> WorkTable:
    """5 % of the messages late by two forwards."""
    draw = random.Random(seed)
    for by_microbatch in table.forward_message_s + table.backward_message_s:
        for microbatch in range(len(by_microbatch)):
            by_microbatch[microbatch] += 2.0 * (draw.random() < 0.05)
    return table


def spread(table: WorkTable, seed: int, *, ratio: float) -> WorkTable:
    """Every piece of work longer or shorter at random."""
    return disturbed(table, ratio, seed=seed)


def guided_table() -> Iterator[str]:
    """Guided choice over the plan alone."""
    disturbances: dict[str, Callable[[WorkTable, int], WorkTable]] = {
        "even": lambda table, seed: table,
        "work ± 10 %": partial(spread, ratio=0.1),
        "work ± 25 %": partial(spread, ratio=0.25),
        "5 % of messages late": late,
    }
    yield "## Guided choice over its plan\n"
    yield f"Mean of {NUM_DRAWS} draws; with room for one microbatch more in brackets.\n"
    yield "| plan | " + " | ".join(disturbances) + " |\n|---|" + "---|" * len(disturbances)
    for ranks, microbatches, chunks in ((4, 8, 1), (4, 8, 2), (8, 16, 1), (8, 16, 2)):
        plan = planned(ranks, microbatches, chunks, 1, as_is)
        assert plan is not None
        cells = [_guided_cell(plan, disturb) for disturb in disturbances.values()]
        yield f"| PP{ranks}, {microbatches}, {chunks} chunk(s) | " + " | ".join(cells) + " |"
    yield ""


def _guided_cell(plan: Plan, disturb: Callable[[WorkTable, int], WorkTable]) -> str:
    costs = even_costs(plan.shape)
    expected = costs.table(plan.shape)
    patience = patience_for(1.0 / plan.shape.num_chunks)
    means = []
    for slack in (0.0, 1.0):
        ratios = []
        for seed in range(NUM_DRAWS):
            table = disturb(costs.table(plan.shape), seed)
            run = run_guided(plan, table, expected=expected, patience=patience, slack=slack)
            ratios.append(run.step_s / predict(plan, table).step_s)
        means.append(statistics.fmean(ratios))
    return f"{means[0]:.3f} ({means[1]:.3f})"


def traces_table() -> Iterator[str]:
    """The model beside traces of real jobs."""
    yield "## The model beside real traces\n"
    yield "| trace | pipeline measured, ms | modelled, ms | off by |\n|---|---|---|---|"
    for path in sorted((ROOT / "examples").glob("*pp*.json.gz")):
        job = measure(read_timeline(path))
        modelled_s = max(prediction.step_s for prediction in job.predict_as_traced())
        yield (
            f"| {path.name} | {job.pipeline_s * 1e3:.1f} | {modelled_s * 1e3:.1f} "
            f"| {modelled_s / job.pipeline_s - 1:+.1%} |"
        )
    yield ""


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=5, help="(default: %(default)s)")
    arguments = parser.parse_args()
    print("# Plans: predicted times, search, model\n\n`python -m benchmarks.planning`\n")
    tables = (
        schedule_table("Even stages: time / peak in microbatches", as_is),
        schedule_table("One rank 1.4 × slow", partial(slow_rank, ratio=1.4)),
        order_table(),
        guided_table(),
        search_table(arguments.repeat),
        traces_table(),
    )
    for table in tables:
        for line in table:
            print(line, flush=True)


if __name__ == "__main__":
    main()
