"""Heat map, series, charts and shares, as numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from detect import Cause, Finding
from detect.examination import Examination, examine
from detect.page.charts import chart_of
from detect.page.heat import heat_map, shade
from detect.page.series import Series, series_of
from detect.page.shares import share_table, shares_of_table
from megascan.timeline import Timeline
from megascan.topology import Layout


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.5, "0"), (0.969, "2"), (1.0, "3"), (1.029, "3"), (1.03, "4"), (1.3, "7"), (9.0, "8")],
)
def test_shades_part_at_what_a_verdict_looks_at(value: float, expected: str) -> None:
    assert shade(value) == expected


def test_a_rank_without_peers_has_no_shade() -> None:
    assert shade(float("nan")) == "none"


def test_every_rank_has_its_cell(large: Callable[..., Examination]) -> None:
    heat = heat_map(large(Layout(tp=2, pp=2, dp=4), {9: 1.25}))
    assert len({(cell.x, cell.y) for cell in heat.cells}) == 16
    assert [text for _, text in heat.lines] == ["PP0 TP0", "PP0 TP1", "PP1 TP0", "PP1 TP1"]
    (suspect,) = [cell for cell in heat.cells if cell.is_suspect]
    assert suspect.title.startswith("rank 9 (DP0 PP1 TP1), n0001: 1.2")
    assert suspect.shade == "7"
    assert heat.standouts[0].name == "rank 9"


def test_many_replicas_go_on_in_the_next_line(large: Callable[..., Examination]) -> None:
    heat = heat_map(large(Layout(dp=130), {}))
    assert [text for _, text in heat.lines] == ["PP0 +0", "PP0 +64", "PP0 +128"]
    assert len({(cell.x, cell.y) for cell in heat.cells}) == 130
    assert heat.width < 1000


def test_a_slow_rank_is_drawn_above_its_peers(faulty: Timeline) -> None:
    examined = examine(faulty)
    (finding,) = [one for one in examined.report.findings if one.cause == Cause.COMPUTE]
    series = series_of(finding, examined)
    assert series is not None
    ((name, values),) = series.lines
    assert name == "rank 5"
    assert series.peers_name == "3 peers"
    assert np.median(values) == pytest.approx(finding.slowdown, rel=0.02)
    assert np.allclose(series.peers, 1.0, atol=0.02)
    assert (series.peers_low <= series.peers).all() and (series.peers <= series.peers_high).all()


@pytest.mark.parametrize(
    ("fault", "cause", "unit"),
    [
        ("rank=2,kind=loader,factor=60", Cause.LOADER, "ms"),
        ("rank=2,kind=gc,factor=2", Cause.GC, "ms"),
        ("rank=2,kind=host,factor=30", Cause.HOST, "x"),  # its device is starved
        ("rank=2,peer=6,kind=link,factor=20", Cause.LINK, "ms"),
    ],
)
def test_other_causes_have_their_own_quantity(
    fault: str, cause: Cause, unit: str, simulated: Callable[..., Timeline]
) -> None:
    examined = examine(simulated(Layout(tp=2, pp=2, dp=2), fault))
    finding = next(one for one in examined.report.findings if 2 in one.ranks)
    series = series_of(replace(finding, cause=cause), examined)
    assert series is not None
    assert series.unit == unit
    level = max(float(np.nanmedian(values)) for _, values in series.lines)
    assert level > 1.5 * float(np.nanmedian(series.peers))


def test_a_heavy_stage_is_drawn_against_the_other_stages(faulty: Timeline) -> None:
    examined = examine(faulty)
    stage = replace(examined.report.findings[0], cause=Cause.STAGE_IMBALANCE, ranks=(4, 5, 6, 7))
    series = series_of(stage, examined)
    assert series is not None
    assert [name for name, _ in series.lines] == ["stage PP1"]
    assert series.peers_name == "1 other stage"


def test_uneven_sequences_are_drawn_by_replica(faulty: Timeline) -> None:
    examined = examine(faulty)
    skew = replace(examined.report.findings[0], cause=Cause.SEQUENCE_IMBALANCE, ranks=())
    series = series_of(skew, examined)
    assert series is not None
    assert (series.lines[0][1] >= series.peers).all()


def test_ranks_that_were_not_recorded_have_no_series(faulty: Timeline) -> None:
    examined = examine(faulty)
    finding: Finding = replace(examined.report.findings[0], ranks=(99,))
    assert series_of(finding, examined) is None


def series(values: list[float], iterations: list[int] | None = None, unit: str = "ms") -> Series:
    line = np.array(values)
    return Series(
        quantity="time",
        unit=unit,
        iterations=np.array(iterations or range(1, len(values) + 1)),
        lines=(("rank 1", line),),
        peers_name="2 peers",
        peers=line * 0.5,
        peers_low=line * 0.4,
        peers_high=line * 0.6,
    )


def test_ticks_are_round_and_hold_the_values() -> None:
    chart = chart_of(series([3.0, 4.0, 9.7]))
    assert [tick.text for tick in chart.y_ticks] == ["0", "5", "10"]
    heights = [tick.at for tick in chart.y_ticks]
    assert heights == sorted(heights, reverse=True)
    assert chart.top <= min(heights) and max(heights) <= chart.bottom


def test_a_gap_parts_the_line_and_a_lone_point_is_a_dot() -> None:
    chart = chart_of(series([1.0, 2.0, np.nan, 3.0, np.nan, 2.0, 2.5]))
    assert chart.lines[0].path.count("M") == 3
    assert len(chart.lines[0].dots) == 1
    assert chart.band.count("Z") == 3


def test_skipped_iterations_are_marked_once() -> None:
    chart = chart_of(series([1.0] * 6, [5, 6, 7, 40, 41, 42]))
    assert len(chart.breaks) == 1


def test_thousands_of_iterations_are_thinned() -> None:
    chart = chart_of(series(list(np.linspace(1, 2, 5000))))
    assert chart.lines[0].path.count("L") < 400
    assert "5,000 iterations" in chart.note


def test_nothing_recorded_draws_nothing() -> None:
    chart = chart_of(series([np.nan, np.nan]))
    assert chart.lines[0].path == "" and chart.band == ""


def test_shares_show_who_matters(share_columns: Callable[[int], pa.Table]) -> None:
    table = share_table(shares_of_table(share_columns(100)), {3: "DP3"}, {77})
    names = [bar.name for bar in table.bars]
    assert names[0] == "all ranks"
    assert {"rank 3", "rank 77"} <= set(names)
    assert len(names) == 25
    assert table.left_out.startswith("76 of 100 ranks are left out")
    assert all(sum(part.percent for part in bar.parts) == pytest.approx(100) for bar in table.bars)


def test_few_ranks_are_all_shown(share_columns: Callable[[int], pa.Table]) -> None:
    table = share_table(shares_of_table(share_columns(5)), {}, set())
    assert [bar.name for bar in table.bars[1:]] == [f"rank {rank}" for rank in range(5)]
    assert table.left_out == ""
