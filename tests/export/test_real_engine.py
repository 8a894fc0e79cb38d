"""Files in Perfetto's own engine: nothing lost, nothing misplaced, the same in every format."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.compute as pc
import pytest

from megascan.export import Mark, write_timeline
from megascan.schema import TIMELINE_COLUMNS
from megascan.timeline import Timeline
from megascan.viewer import PRESETS, run_query

if TYPE_CHECKING:
    from conftest import Ask

pytestmark = pytest.mark.browser

SUFFIXES = (".json", ".json.gz", ".pftrace", ".pftrace.gz")


@pytest.fixture(scope="module", params=SUFFIXES)
def path(request, tmp_path_factory, make_timeline) -> Path:
    path = tmp_path_factory.mktemp("engine") / f"timeline{request.param}"
    mark = Mark(
        rank=7,
        start_ns=make_timeline().origin_ns + 1_000,
        end_ns=make_timeline().origin_ns + 2_000_000,
        label="langsam ×1.5",
        args={"slowdown": 1.5, "cause": "compute", "ranks": [7]},
    )
    write_timeline(make_timeline(), path, marks=[mark])
    return path


@pytest.fixture
def rows(path: Path, ask: Ask) -> Callable[[str], list[tuple]]:
    """What the engine says of that file."""
    return partial(ask, path)


def expected(timeline: Timeline) -> list[dict]:
    """Spans as the view should show them."""
    table = timeline.spans
    table = table.set_column(
        table.column_names.index("start_ns"),
        "start_ns",
        pc.subtract(table.column("start_ns"), timeline.origin_ns),
    )
    records = table.to_pylist()
    return [
        {name: None if value in (-1, "") else value for name, value in record.items()}
        for record in records
    ]


def test_every_span_arrives_with_every_argument_and_its_type(rows, make_timeline):
    names = [column.name for column in TIMELINE_COLUMNS]
    selected = ", ".join(
        {"start_ns": "ts", "duration_ns": "dur"}.get(name, f'"{name}"') for name in names
    )
    found = rows(f"select {selected} from megascan_span")
    wanted = [tuple(record[name] for name in names) for record in expected(make_timeline())]
    key = str
    assert sorted(found, key=key) == sorted(wanted, key=key)


def test_import_has_no_errors(rows):
    sql = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
    assert rows(sql) == []


def test_slices_nest_as_the_spans_do(rows):
    sql = "select name, min(depth), max(depth) from megascan_span group by name order by name"
    depths = {name: (low, high) for name, low, high in rows(sql)}
    assert depths["forward"] == (0, 0)
    assert depths["attention"] == (1, 1)
    assert depths["mlp"] == (1, 1)
    assert depths["all_reduce"] == (0, 0)


def test_arrows_tie_the_last_arriver_to_the_others_and_sends_to_receives(rows, make_timeline):
    """Whatever the file says, this engine points an arrow at the slice that started later."""
    sql = """select o.op, o.rank, i.op as op_in, i.rank as rank_in, o.match, i.match as match_in
      from flow f
      join megascan_span o on f.slice_out = o.id join megascan_span i on f.slice_in = i.id"""
    found = rows(sql)
    assert all(match_out == match_in for *_, match_out, match_in in found)
    layout = make_timeline().layout
    collectives = [(one, other) for op, one, _, other, *_ in found if op == "all_reduce"]
    links = [(one, other) for op, one, op_in, other, *_ in found if {op, op_in} == {"send", "recv"}]
    assert len(found) == len(collectives) + len(links)
    last = [rank for rank in range(12) if layout.coordinates(rank).dp == 1]
    assert sorted(map(sorted, collectives)) == sorted(2 * [[rank - 2, rank] for rank in last])
    assert sorted(map(sorted, links)) == sorted(2 * [[rank, rank + 4] for rank in range(8)])


def test_ranks_and_tracks_stand_in_order(rows, path):
    if ".json" in path.name:
        titles = [
            title
            for (title,) in rows(
                "select name from process where pid >= 0 and name is not null order by name"
            )
        ]
        tracks = rows(
            "select t.name from thread t join process p using (upid) "
            "where p.pid = 7 and t.name is not null order by t.tid",
        )
    else:
        sql = (
            "select name from track where name like '%rank%' order by extract_arg("
            "source_arg_set_id, 'sibling_order_rank'), id"
        )
        titles = [title for (title,) in rows(sql)]
        tracks = rows(
            "select c.name from track c join track p on c.parent_id = p.id "
            "where p.name like '%rank 07%' and c.type not like '%counter%' "
            "order by extract_arg(c.source_arg_set_id, 'sibling_order_rank')",
        )
    assert [title.split(" · ")[0] for title in titles] == [
        f"DP{dp} PP{pp} TP{tp}" for dp in (0, 1) for pp in (0, 1, 2) for tp in (0, 1)
    ]
    assert titles[3].endswith("rank 05 · knoten-ä")
    assert [name for (name,) in tracks] == ["finding", "iteration", "compute", "collective", "p2p"]


def test_marks_stand_on_a_track_of_their_own(rows):
    sql = (
        "select ts, dur, name, extract_arg(arg_set_id, 'args.slowdown'), "
        "extract_arg(arg_set_id, 'debug.slowdown') from slice where category = 'finding'"
    )
    ((ts, dur, name, chrome, protobuf),) = rows(sql)
    assert (ts, dur, name) == (1_000, 1_999_000, "langsam ×1.5")
    assert (chrome or protobuf) == 1.5


def test_curves_hold_wait_share_and_bandwidth(rows):
    sql = """select t.name, count(*), min(c.value), max(c.value) from counter c
      join track t on c.track_id = t.id group by 1 order by 1"""
    curves = {
        name.rsplit(" ", 1)[0] if name.endswith(("GB/s", "%")) else name: figures
        for name, *figures in rows(sql)
    }
    assert curves["collective bandwidth"] == pytest.approx([24, 11.650844, 11.650844], rel=1e-5)
    # p2p waits of 30 µs in an iteration of 900 µs, 10 µs more for DP0's all-reduce
    assert curves["wait share"] == pytest.approx([24, 0.0, 100 * 40 / 900], abs=1e-4)


def test_summary_rows_name_the_rank_that_the_others_wait_for(rows, path):
    if ".json" in path.name:
        return
    sql = """select t.name, extract_arg(s.arg_set_id, 'debug.num_ranks') as num_ranks,
      extract_arg(s.arg_set_id, 'debug.least_waiting_rank') as least_waiting from slice s
      join track t on s.track_id = t.id where s.category = 'summary' and s.name = 'iteration 2'"""
    summary = {track: figures for track, *figures in rows(sql)}
    assert summary["run r1"] == [12, 2]
    assert summary["DP1"] == [6, 2]
    assert summary["DP1 PP2"] == [2, 10]
    assert len(summary) == 1 + 2 + 6 + 12


@pytest.mark.parametrize("suffix", [".json.gz", ".pftrace"])
def test_ready_queries_agree_with_the_spans(suffix, tmp_path, make_timeline, trace_processor, ask):
    path = tmp_path / f"timeline{suffix}"
    write_timeline(make_timeline(), path)
    bandwidth = run_query(path, PRESETS["bandwidth"], trace_processor=trace_processor)
    by_group = {row[2]: row for row in bandwidth.rows if row[1] == "all_reduce"}
    assert by_group["dp@4"] == ("collective", "all_reduce", "dp@4", 4, 4.194, 0.36, 11.651)
    assert "(48 rows)" not in str(bandwidth)
    assert ask(path, PRESETS["waits"])[0] == (2, 4, 0.0, 0.22, 0.0)
    assert ask(path, PRESETS["slowest"])[0][0] == "forward"


def test_crossing_and_touching_spans_survive(tmp_path, make_timeline, make_span, ask):
    """Overlaps without nesting, touching spans, spans of no length, arrows against the clock."""
    talk = {"op": "all_reduce", "group": "dp@0", "size_bytes": 8}
    spans = [
        make_span(0, "compute", "outer", 0, 100),
        make_span(0, "compute", "crossing", 50, 50.001),
        make_span(0, "compute", "touching", 100.001, 10),
        make_span(0, "compute", "instant", 100.001, 0),
        make_span(0, "compute", "instant", 110.001, 0),
        make_span(0, "collective", "first", 0, 50, match=1, **talk),
        make_span(0, "collective", "inside", 10, 20, match=2, **talk),
        make_span(1, "collective", "first", 200, 50, match=1, **talk),
        make_span(1, "collective", "inside", 10, 30, match=2, **talk),
    ]
    timeline = make_timeline(spans)
    for suffix in (".json", ".pftrace"):
        path = tmp_path / f"odd{suffix}"
        write_timeline(timeline, path)
        sql = "select rank, name, ts, dur, depth from megascan_span order by rank, ts, dur, name"
        found = ask(path, sql)
        assert [row[:4] for row in found] == [
            (0, "first", 0, 50_000),
            (0, "outer", 0, 100_000),
            (0, "inside", 10_000, 20_000),
            (0, "crossing", 50_000, 50_001),
            (0, "instant", 100_001, 0),
            (0, "touching", 100_001, 10_000),
            (0, "instant", 110_001, 0),
            (1, "inside", 10_000, 30_000),
            (1, "first", 200_000, 50_000),
        ]
        assert all(depth == 0 for _, name, *_, depth in found if name != "instant")
        arrows = """select o.rank, o.name, i.rank as rank_in, i.name as name_in
          from flow f join megascan_span o
          on f.slice_out = o.id join megascan_span i on f.slice_in = i.id order by 2"""
        found = ask(path, arrows)
        assert found[0] == (0, "first", 1, "first")  # turned round: rank 0 ended before 1 began
        assert {found[1][0], found[1][2]} == {0, 1}
        assert (found[1][1], found[1][3]) == ("inside", "inside")
