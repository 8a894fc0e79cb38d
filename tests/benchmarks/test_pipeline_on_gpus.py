"""The page of pipeline schedules on GPUs: what is run, predicted, and said of losses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.axes import SIZES, schedule_families
from benchmarks.pipeline_runs import REFERENCE, without_data
from benchmarks.pipeline_runs_gpu import TWO_CHUNKS, Row, cases, page, table_of
from benchmarks.pipeline_runs_gpu_ranks import Found
from training.arguments import parse_settings, resolve_sizes
from training.pipeline.schedule import schedule_name

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
EVEN = "planned, 2 chunks, for even stages"


def found(kinds: dict[str, float], *, rank: int, num_chunks: int, loss: float) -> Found:
    stages = range(rank, 2 * num_chunks, 2)
    return Found(
        steps_s=[9.0, 9.0, 1.0, 1.0],
        iterations_s=[9.0, 9.0, 1.1],
        losses=[loss.hex()],
        passes_s={f"{k}{stage}": s / num_chunks for k, s in kinds.items() for stage in stages},
        last_s=0.0,
        message_s=0.0,
        peak_gib=1.0,
    )


def rows(loss: float) -> list[Row]:
    """F of 1 s on each rank, and 2 s for the backward; `loss` is the planned schedule's."""
    made = []
    for case in cases(2, 4, 4, only="even"):
        row = Row(case=case, found=(), folder=Path("nowhere"))
        own = {"F": 1.0, "I": 1.05, "W": 0.95} if case.name == EVEN else {"F": 1.0, "B": 2.0}
        of_rank = [
            found(own, rank=r, num_chunks=row.num_chunks(), loss=loss if case.name == EVEN else 2.0)
            for r in range(2)
        ]
        made.append(replace(row, found=of_rank))
    return made


def cells(table: str, name: str) -> list[str]:
    line = next(line for line in table.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_predictions_are_those_of_the_run_s_own_passes() -> None:
    """1F1B of 4 microbatches takes 15 forwards, interleaved 13.5, planned 12.5."""
    table = table_of(rows(loss=2.0))
    assert cells(table, REFERENCE)[4] == "15000.0"
    assert cells(table, TWO_CHUNKS)[4] == "13500.0"
    planned = cells(table, EVEN)
    assert float(planned[4]) < 12_600
    assert planned[5:7] == ["0.835", "0.928"]
    assert planned[1:4] == ["1000.0", "1.000", "1.000"]


def test_a_loss_that_differs_in_its_last_digit_is_said_to() -> None:
    assert cells(table_of(rows(loss=2.0)), EVEN)[-1].startswith("same")
    assert cells(table_of(rows(loss=2.0 + 2**-51)), EVEN)[-1].startswith("DIFFER")


@pytest.mark.parametrize(
    ("run", "num_lines"),
    [
        ("pipeline_runs_h200/32_connections", 15),
        ("pipeline_runs_h200/1_connection", 5),
        ("pipeline_runs_h100/16_microbatches", 9),
    ],
)
def test_the_result_page_holds_what_kept_measurements_give(run: str, num_lines: int) -> None:
    made = page(RESULTS / run)
    written = (RESULTS / f"{Path(run).parent}.md").read_text(encoding="utf-8")
    rows = [line for line in made.splitlines() if line.startswith("| ")]
    assert len(rows) == num_lines
    for row in rows:
        assert row in written
    assert ("Cut off after 4 of 7 cases" in made) is run.endswith("1_connection")


def test_plans_from_the_run_s_own_trace_name_it_without_its_folder() -> None:
    planned = next(case for case in cases(2, 4, 4, only="traced stages") if "traced" in case.name)
    assert "timeline.json.gz" in planned.flags
    assert "/there/timeline.json.gz" in planned.flags_in(Path("/there"))


def test_every_schedule_is_compared_with_megatron_core_s() -> None:
    for family in schedule_families():
        names = []
        for flags in family.axes.values():
            words = [*SIZES["cpu"], "--global-batch-size", "4", "--lr", "1", "--train-iters", "1"]
            settings = parse_settings(without_data([*words, *family.sizes, *flags]))
            names.append(schedule_name(settings, resolve_sizes(settings, family.num_ranks)))
        assert names[0] is None and None not in names[1:], family.name
