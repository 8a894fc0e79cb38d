"""Jobs of many makes in Perfetto's own engine, against the spans that were written.

Layouts with interleaved stages, experts and context parallelism, rank files of the original
MegaScan and profiles of PyTorch; as JSON and as protobuf; whole, and with each selection.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pytest

from aggregate import align, build_shards, build_timeline
from benchmarks.aggregate_scale.original_files import write_original_files
from benchmarks.aggregate_scale.rank_files import ScaleJob, simulated
from benchmarks.fuzz.samples import write_profiles
from megascan.export import Selection, write_timeline
from megascan.parallel import Here
from megascan.reader import read_ends, read_trace
from megascan.schema import TIMELINE_COLUMNS, Kind
from megascan.timeline import Timeline
from megascan.topology import Layout
from megascan.viewer import PRESETS, run_query

if TYPE_CHECKING:
    from conftest import Ask

pytestmark = pytest.mark.browser

LAYOUTS = {
    "interleaved": Layout(pp=2, vpp=2, dp=2),
    "experts": Layout(ep=2, dp=4),
    "context": Layout(tp=2, cp=2, pp=2),
}
SOURCES = (*LAYOUTS, "original", "profiler")
SELECTIONS = {
    "whole": Selection(),
    "ranks": Selection(ranks={1, 2, 5}),
    "iterations": Selection(iterations={2}),
    "kinds": Selection(kinds={Kind.COLLECTIVE, Kind.P2P}),
    "all three": Selection(ranks={0, 1, 4}, iterations={1}, kinds={Kind.COMPUTE, Kind.P2P}),
}
CASES = [
    *((source, "whole") for source in SOURCES),
    *(("interleaved", selection) for selection in ("iterations", "kinds")),
    *(("context", selection) for selection in ("ranks", "all three")),
    ("experts", "ranks"),  # in which groups of several lack some
]
SHOWN = {"start_ns": "ts", "duration_ns": "dur"}
ALL_OF_A_SPAN = ", ".join(SHOWN.get(one.name, f'"{one.name}"') for one in TIMELINE_COLUMNS)
QUERIES = {
    "spans": f"select depth, {ALL_OF_A_SPAN} from megascan_span",
    "slices": "select ts, dur, name, category, depth from slice",
    "arrows": """select o.rank, o.name, o.ts, i.rank as to_rank, i.name as to_name, i.ts as to_ts
      from flow f join megascan_span o on f.slice_out = o.id
      join megascan_span i on f.slice_in = i.id""",
    "tracks": "select name, count(*) as number from track group by name",
    "curves": "select t.name, c.ts, c.value from counter c join track t on c.track_id = t.id",
}


def timeline_of(source: str, place: Path) -> Timeline:
    if source in LAYOUTS:
        layout = LAYOUTS[source]
        num_layers = layout.pp * layout.vpp
        job = ScaleJob(layout=layout, num_spans=0, num_microbatches=2, num_layers=num_layers)
        return build_timeline(simulated(job, iterations=2))
    folder = place / source
    if source == "profiler":
        write_profiles(folder)
    else:
        job = ScaleJob(layout=Layout(tp=2, pp=2), num_spans=400, num_microbatches=2, num_layers=4)
        write_original_files(job, folder)
    return build_timeline(read_trace(folder))


@pytest.fixture(scope="module")
def timelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Timeline]:
    place = tmp_path_factory.mktemp("sources")
    return {source: timeline_of(source, place) for source in SOURCES}


class Case:
    """A written file in the engine, and the spans that should be in it."""

    def __init__(self, timeline: Timeline, selection: Selection, path: Path, ask: Ask) -> None:
        self.timeline = timeline
        self._path, self._ask = path, ask
        self.whole = timeline.spans.to_pandas()
        self.chosen = selection.mask(timeline.spans.unify_dictionaries())
        self.spans = self.whole[self.chosen]

    def rows(self, sql: str) -> list[tuple]:
        return self._ask(self._path, sql)


@pytest.fixture(
    scope="module",
    params=[(*case, suffix) for case in CASES for suffix in (".json.gz", ".pftrace")],
    ids=" ".join,
)
def case(request, timelines, tmp_path_factory, ask) -> Case:
    source, selection, suffix = request.param
    path = tmp_path_factory.mktemp("matrix") / f"timeline{suffix}"
    write_timeline(timelines[source], path, selection=SELECTIONS[selection])
    return Case(timelines[source], SELECTIONS[selection], path, ask)


def test_every_span_is_there_with_all_it_says(case: Case) -> None:
    names = [column.name for column in TIMELINE_COLUMNS]
    found = Counter(case.rows(f"select {ALL_OF_A_SPAN} from megascan_span"))
    source = case.spans.assign(start_ns=case.spans["start_ns"] - case.timeline.origin_ns)
    columns = [source[name].astype(object).tolist() for name in names]
    wanted = Counter(
        tuple(None if value in (-1, "") else value for value in row)
        for row in zip(*columns, strict=True)
    )
    assert len(case.spans) > 10
    assert found == wanted
    assert case.rows("select count(*) from slice where dur < 0") == [(0,)]


def test_nothing_was_lost_on_import(case: Case) -> None:
    sql = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
    assert case.rows(sql) == []


def test_slices_of_a_track_nest(case: Case) -> None:
    """A slice lies within its parent, and none crosses another of its depth."""
    outside = """select count(*) from slice c join slice p on c.parent_id = p.id
      where c.ts < p.ts or c.ts + c.dur > p.ts + p.dur or c.track_id != p.track_id"""
    assert case.rows(outside) == [(0,)]
    crossing = """select count(*) from (select ts + dur as ends, lead(ts) over
      (partition by track_id, depth order by ts, ts + dur) as follows from slice)
      where follows < ends"""
    assert case.rows(crossing) == [(0,)]
    talk = "select count(*) from megascan_span where kind in ('collective', 'p2p') and depth > 0"
    assert case.rows(f"{talk} and dur > 0") == [(0,)]


def test_compute_stands_within_what_encloses_it_in_the_source(case: Case) -> None:
    """Depth is the number of compute spans of the rank around a span, where they all nest."""
    compute = case.spans[case.spans["kind"] == "compute"]
    found = case.rows(
        "select rank, ts, dur, name, depth from megascan_span where kind = 'compute'"
        " and track_id in (select min(track_id) from megascan_span where kind = 'compute'"
        " group by rank)"
    )
    if len(found) != len(compute):
        return  # several lanes: crossing kernels of several streams
    depths: Counter[tuple] = Counter()
    for rank, spans in compute.groupby("rank"):
        start = spans["start_ns"].to_numpy() - case.timeline.origin_ns
        end = start + spans["duration_ns"].to_numpy()
        for row, (at, to, name) in enumerate(zip(start, end, spans["name"], strict=True)):
            inside = (start <= at) & (end >= to)
            inside &= (start < at) | (end > to) | (np.arange(len(start)) < row)
            if to > at:
                depths[rank, at, to - at, name, int(inside.sum())] += 1
    lasting = Counter(row for row in found if row[2] > 0)
    assert lasting == depths


def test_arrows_join_the_members_of_a_match(case: Case) -> None:
    """From the last to arrive to each other member, and from a send to its receive."""
    found = case.rows(
        "select o.match, i.match, min(o.rank, i.rank), max(o.rank, i.rank) from flow f"
        " join megascan_span o on f.slice_out = o.id join megascan_span i on f.slice_in = i.id"
    )
    assert all(out == arriving for out, arriving, *_ in found)
    assert case.rows("select count(*) from flow") == [(len(found),)]
    marked = case.whole.assign(chosen=case.chosen).sort_values("start_ns", kind="stable")
    matched = marked[marked["match"] >= 0]
    by_match = matched.groupby("match")
    groups = by_match.agg(
        size=("rank", "size"), chosen=("chosen", "sum"), last_is_chosen=("chosen", "last")
    )
    is_last = matched["start_ns"] == by_match["start_ns"].transform("max")
    has_one_last = is_last.groupby(matched["match"]).sum() == 1
    is_whole = groups["chosen"] == groups["size"]
    starts_here = has_one_last & groups["last_is_chosen"] & (groups["size"] > 2)
    wanted = (groups["chosen"] - 1)[is_whole | starts_here].sum()
    assert len(found) == wanted


def test_ranks_and_kinds_stand_in_order(case: Case) -> None:
    layout = case.timeline.layout
    in_protobuf = "select count(*) from track where name like 'run %'"
    if case.rows(in_protobuf) != [(0,)]:
        titles = case.rows(
            "select name from track where name like '%· rank%' order by"
            " extract_arg(source_arg_set_id, 'sibling_order_rank'), id"
        )
    else:
        titles = case.rows("select name from process where name like '%· rank%' order by name")
    found = [int(title.split(" · rank ")[1].split(" ")[0]) for (title,) in titles]
    place = {rank: layout.coordinates(rank) for rank in found}
    axes = ("dp", "pp", "cp", "ep", "tp")
    assert found == sorted(found, key=lambda rank: [getattr(place[rank], axis) for axis in axes])
    assert set(found) >= set(case.spans["rank"])


def test_bandwidth_is_that_of_the_spans(case: Case) -> None:
    found = {row[:3]: row[3:] for row in case.rows(PRESETS["bandwidth"])}
    spans = case.spans[(case.spans["size_bytes"] > 0) & (case.spans["transfer_ns"] > 0)]
    groups = spans.groupby(["kind", "op", "group"], observed=True)
    wanted = groups.agg(num=("op", "size"), size=("size_bytes", "sum"), time=("transfer_ns", "sum"))
    assert len(found) == min(len(wanted), 50)
    for (kind, op, group), (num, size, time) in wanted.iterrows():
        row = found.get((kind, op, group or None))
        if row is not None or len(wanted) <= 50:
            assert row == pytest.approx((num, size / 1e6, time / 1e6, size / time), abs=6e-4)


def test_wait_shares_are_drawn_for_each_iteration(case: Case) -> None:
    sql = """select count(*), min(c.value), max(c.value) from counter c join track t
      on c.track_id = t.id where t.name like 'wait share%'"""
    ((count, low, high),) = case.rows(sql)
    iterations = case.whole[case.whole["kind"] == "iteration"][["rank", "iteration"]]
    shown = pd.MultiIndex.from_frame(case.spans[["rank", "iteration"]].drop_duplicates())
    wanted = int(pd.MultiIndex.from_frame(iterations).isin(shown).sum())
    assert count >= wanted
    assert 0 <= low <= high <= 100


@pytest.mark.parametrize("suffix", [".json.gz", ".pftrace"])
def test_many_shards_show_what_one_shows(suffix, once, tmp_path, ask, monkeypatch) -> None:
    """Parts of a file that were made apart: as many slices, arrows, tracks and curve values."""
    trace = once("trace of two iterations", lambda: simulated_files(tmp_path / "trace"))
    found = []
    for num_bytes, least in ((8 << 20, 1), (50_000, 4)):
        monkeypatch.setattr("megascan.reader.trace.SHARD_BYTES", num_bytes)
        monkeypatch.setattr("megascan.export.writing.BLOCK_ROWS", num_bytes // 200)
        here = Here()
        read, kept = read_ends(trace, here)
        sharded, _ = build_shards(align(read), kept, here)
        assert len(sharded.shards) == 1 if least == 1 else len(sharded.shards) >= least
        path = tmp_path / f"{least}{suffix}"
        write_timeline(sharded, path)
        case = Case(sharded.whole(), Selection(), path, ask)
        found.append({name: Counter(case.rows(sql)) for name, sql in QUERIES.items()})
    one, many = found
    for name in QUERIES:
        assert one[name], name
        assert one[name] == many[name], name


def simulated_files(folder: Path) -> Path:
    from megascan.cli.main import main

    words = "--tp 2 --pp 2 --dp 2 --layers 2 --microbatches 2 --iterations 2 --seed 3"
    assert main(["simulate", *words.split(), "-o", str(folder)]) == 0
    return folder


def test_suspects_alone(tmp_path, trace_processor, ask, without_power) -> None:
    """--focus: the slow rank and those that share a group with it, in the engine."""
    from megascan.cli.main import main

    trace = tmp_path / "trace"
    words = "--tp 2 --pp 2 --dp 4 --layers 2 --microbatches 2 --iterations 8"
    fault = ["--fault", "rank=5,kind=compute,factor=1.5"]
    assert main(["simulate", *words.split(), *fault, "-o", str(trace)]) == 0
    groups = read_trace(trace).headers[5].groups
    wanted = {rank for ranks in groups.values() if len(ranks) < 16 for rank in ranks}
    assert 5 in wanted
    assert len(wanted) < 16
    for suffix in (".json.gz", ".pftrace"):
        output = tmp_path / f"focus{suffix}"
        assert main(["aggregate", "-b", str(trace), "-d", "--focus", "-o", str(output)]) == 0
        sql = "select rank, count(*) from megascan_span group by rank"
        found = dict(run_query(output, sql, trace_processor=trace_processor).rows)
        assert set(found) == wanted
        assert ask(output, "select count(*) from slice where category = 'finding'")[0][0] >= 1
