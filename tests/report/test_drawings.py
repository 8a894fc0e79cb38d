"""What the page's script is given: ranks, matrices, links, charts, the strip of one iteration."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from detect import Cause, Finding
from detect.detector import Examination, examine
from detect.page.figures import (
    Series,
    chart_of,
    medians_between,
    point_edges,
    rank_columns,
    series_of,
    shares_of_compute,
    shares_of_table,
    slow_links,
    time_matrices,
)
from detect.page.strip import critical_strip
from megascan.timeline import Timeline
from megascan.topology import Layout


def unpacked(text: str) -> np.ndarray[Any, np.dtype[np.uint16]]:
    return np.frombuffer(base64.b64decode(text), dtype="<u2")


def columns_of(examined: Examination) -> Any:
    findings = examined.report.findings
    return rank_columns(examined, shares_of_compute(examined.seen), findings)


def test_every_rank_is_a_row_with_its_place(large: Callable[..., Examination]) -> None:
    columns = columns_of(large(Layout(tp=2, pp=2, dp=4), {9: 1.25}))
    assert columns["names"] == [str(rank) for rank in range(16)]
    assert columns["line_names"] == ["PP0 TP0", "PP0 TP1", "PP1 TP0", "PP1 TP1"]
    places = set(zip(columns["line"], columns["column"], strict=True))
    assert len(places) == 16
    assert columns["hosts"] == ["n0000", "n0001"] and columns["host"] == [0] * 8 + [1] * 8
    assert columns["causes"] == {"9": "compute (node)"}
    assert columns["slowdown"][9] == pytest.approx(1.25, abs=0.03)


def test_a_rank_without_peers_has_no_figure(simulated: Callable[..., Timeline]) -> None:
    columns = columns_of(examine(simulated(Layout(), iterations=6)))
    assert columns["slowdown"] == [None]


def test_compute_over_time_survives_packing(large: Callable[..., Examination]) -> None:
    examined = large(Layout(dp=8), {3: 1.3})
    packed: Any = time_matrices(examined)
    compute = unpacked(packed["compute"]).reshape(8, -1) * packed["largest_ms"] / 65535
    assert np.allclose(compute, examined.seen.busy_ns / 1e6, rtol=1e-4)
    relative = unpacked(packed["relative"]).reshape(8, -1) / packed["ratio_step"]
    assert np.allclose(relative, np.exp(examined.slowness), rtol=1e-3)
    assert np.median(relative[3]) == pytest.approx(1.3, abs=0.03)


def test_what_is_not_known_is_packed_as_zero(large: Callable[..., Examination]) -> None:
    examined = large(Layout(dp=8), {})
    busy = examined.seen.busy_ns.copy()
    busy[2, 4] = np.nan
    packed: Any = time_matrices(replace(examined, seen=replace(examined.seen, busy_ns=busy)))
    compute = unpacked(packed["compute"]).reshape(8, -1)
    assert compute[2, 4] == 0 and np.count_nonzero(compute == 0) == 1


def test_long_windows_become_medians_of_neighbours() -> None:
    edges = point_edges(1000, 10)
    values = np.arange(1000.0)[None].copy()
    values[0, 5] = 1e9
    thin = medians_between(values, edges)
    assert thin.shape == (1, 10)
    assert thin[0].tolist() == pytest.approx([49.5 + 100 * n for n in range(10)], abs=1)


def test_short_windows_stay_as_they_are() -> None:
    values = np.ones((2, 5))
    assert medians_between(values, point_edges(5, 10)) is values


def test_shares_of_an_unsplit_group_are_the_mean_of_its_ranks(
    large: Callable[..., Examination], share_columns: Callable[[int], pa.Table]
) -> None:
    examined = large(Layout(dp=4), {})
    columns: Any = rank_columns(examined, shares_of_table(share_columns(4)), ())
    names = [name for name, _ in columns["share_names"]]
    shares = unpacked(columns["shares"]).reshape(4, -1)
    assert names == ["compute", "transfer", "wait"]
    assert shares.tolist() == [[600, 100, 300]] * 3 + [[800, 100, 100]]


def test_a_slow_link_is_drawn_between_its_ranks(simulated: Callable[..., Timeline]) -> None:
    examined = examine(simulated(Layout(tp=2, pp=2, dp=2), "rank=2,peer=6,kind=link,factor=20"))
    findings = [one for one in examined.report.findings if one.cause == Cause.LINK]
    links: Any = slow_links(examined.seen.transfers, findings)
    assert links[0]["named"] and set(links[0]["ranks"]) >= set(findings[0].ranks)
    assert links[0]["ratio"] > 5
    assert slow_links(None, findings) == []


def test_healthy_links_are_not_drawn(simulated: Callable[..., Timeline]) -> None:
    examined = examine(simulated(Layout(tp=2, pp=2, dp=2)))
    assert slow_links(examined.seen.transfers, ()) == []


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


def test_a_chart_keeps_gaps_and_digits() -> None:
    line = np.array([1.0, 2.0, np.nan, 3.14159265])
    drawn: Any = chart_of(
        Series(
            quantity="time", unit="ms", iterations=np.array([5, 6, 7, 40]),
            lines=(("rank 1", line),), peers_name="2 peers",
            peers=line * 0.5, peers_low=line * 0.4, peers_high=line * 0.6,
        )
    )  # fmt: skip
    assert drawn["lines"] == [{"name": "rank 1", "values": [1.0, 2.0, None, 3.142]}]
    assert drawn["iterations"] == [[5, 5], [6, 6], [7, 7], [40, 40]]
    assert drawn["peers"]["low"] == [0.4, 0.8, None, 1.257]


def strip_of(timeline: Timeline, finding: Finding | None) -> Any:
    return critical_strip(timeline, examine(timeline).seen, finding)


def test_the_strip_shows_the_culprit_and_those_who_wait_for_it(faulty: Timeline) -> None:
    examined = examine(faulty)
    finding = next(one for one in examined.report.findings if one.cause == Cause.COMPUTE)
    strip = strip_of(faulty, finding)
    roles = {lane["rank"]: lane["role"] for lane in strip["lanes"]}
    assert roles.pop(5) == "named" and set(roles.values()) == {"waits"}
    assert strip["lanes"][0]["rank"] == 5 and strip["at"] == f"5:{strip['iteration']}"
    waits = {
        lane["rank"]: sum(piece[3] for piece in lane["pieces"] if piece[0] == "wait")
        for lane in strip["lanes"]
    }
    assert min(waits, key=lambda rank: waits[rank]) == 5
    assert all(lane in range(1, 6) for _, lane, _ in strip["arrivals"]) and strip["arrivals"]
    lengths = dict(zip(examined.seen.iterations, examined.seen.iteration_ns, strict=True))
    assert lengths[strip["iteration"]] == max(lengths.values())


def test_waiting_and_transfer_part_where_the_last_member_arrives(faulty: Timeline) -> None:
    strip = strip_of(faulty, None)
    for lane in strip["lanes"]:
        for share, name, start, length, _ in lane["pieces"]:
            assert length >= 0 and start + length <= strip["length_us"] + 0.2
            assert share in ("compute", "wait", "transfer", "unsplit", "host") and name


def test_without_a_finding_the_strip_shows_who_waits_least_and_most(faulty: Timeline) -> None:
    strip = strip_of(faulty, None)
    assert strip["who"] == "" and strip["arrivals"] == []
    assert {lane["role"] for lane in strip["lanes"]} == {"waits"}
    assert strip["lanes"][0]["rank"] == 5


def test_an_iteration_outside_the_window_has_no_strip(faulty: Timeline) -> None:
    finding = replace(examine(faulty).report.findings[0], episodes=((900, 901),))
    assert strip_of(faulty, finding) is None


def test_both_halves_of_a_backward_that_a_plan_splits_are_drawn(faulty: Timeline) -> None:
    spans = faulty.spans.to_pandas()
    is_half = (spans["name"] == "backward") & (spans["microbatch"] == 0)
    names = pa.array(spans["name"].astype(str).mask(is_half, "backward-weights"))
    place = faulty.spans.schema.get_field_index("name")
    table = faulty.spans.set_column(place, "name", names.dictionary_encode())
    strip = strip_of(replace(faulty, spans=table), None)
    drawn = {piece[1] for lane in strip["lanes"] for piece in lane["pieces"]}
    assert {"backward, microbatch 1", "backward-weights, microbatch 0"} <= drawn
