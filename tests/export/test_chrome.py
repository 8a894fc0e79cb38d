"""Chrome JSON, event by event."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from megascan.errors import UsageError
from megascan.export import Mark, Selection, write_timeline
from megascan.reader import read_timeline
from megascan.schema import Kind
from megascan.timeline import Timeline
from megascan.topology import Layout


@pytest.fixture
def written(tmp_path):
    """Events of a timeline once written, and their number as reported."""

    def write(timeline: Timeline, **options) -> list[dict]:
        path = tmp_path / "timeline.json"
        count = write_timeline(timeline, path, force=True, **options)
        events = json.loads(path.read_text("utf-8"), parse_constant=pytest.fail)
        assert count == len(events)
        return events

    return write


def phase(events: list[dict], letter: str) -> list[dict]:
    return [event for event in events if event["ph"] == letter]


def test_one_event_a_line(tmp_path, make_timeline):
    path = tmp_path / "timeline.json"
    count = write_timeline(make_timeline(), path)
    first, *lines, last, end = path.read_text("utf-8").split("\n")
    assert (first, end) == ("[", "]") or (first, last, end) == ("[", "]", "")
    assert len([line for line in lines if json.loads(line.rstrip(","))]) == count
    assert "ä" in lines[0]  # not \u00e4: surrogate pairs break a viewer


def test_record_stands_first_and_holds_the_timeline(written, make_timeline):
    timeline = make_timeline()
    record = written(timeline)[0]
    assert (record["name"], record["ph"]) == ("megascan_timeline", "M")
    args = record["args"]
    assert args["schema"] == 1
    assert args["layout"] == timeline.layout.to_json()
    assert [item["rank"] for item in args["headers"]] == list(range(12))
    assert args["clocks"][3]["offset_ns"] == 12.5
    assert args["completeness"]["notes"] == ["eine Notiz"]
    assert args["windows"]["11"][0]["last_iteration"] == 2
    assert args["iterations"] == [[1, 0, 900_000], [2, 1_000_000, 1_900_000]]
    assert args["selection"] is None


def test_ranks_are_named_and_ordered_dp_pp_tp(written, make_timeline):
    events = phase(written(make_timeline()), "M")
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert names[2] == "DP1 PP0 TP0 · rank 02 · knoten-ä"
    assert sorted(names, key=lambda rank: names[rank]) == sorted(
        names, key=lambda rank: order[rank]
    )


def test_names_are_padded_to_the_size_of_the_axis(written, make_timeline, make_span):
    layout = Layout(dp=128)
    timeline = make_timeline([make_span(9, "compute", "forward", 0, 1)], layout)
    events = phase(written(timeline), "M")
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names[9] == "DP009 PP0 TP0 · rank 009 · knoten-ä"
    assert names == sorted(names)


def test_thread_ids_are_no_process_ids(written, make_timeline, make_span):
    """A thread whose id is its process's is drawn before its siblings."""
    layout = Layout(dp=64)
    spans = [make_span(rank, kind, "x", 0, 1) for rank in range(64) for kind in Kind]
    events = phase(written(make_timeline(spans, layout)), "X")
    assert {event["tid"] for event in events}.isdisjoint(range(64))
    tids = {event["cat"]: event["tid"] for event in events}
    assert list(tids) == sorted(tids, key=lambda kind: tids[kind]) == [str(kind) for kind in Kind]


def test_arguments_have_their_types_and_only_apply_where_they_do(written, make_timeline):
    spans = phase(written(make_timeline()), "X")
    (event,) = [
        e for e in spans if e["name"] == "all_reduce" and e["pid"] == 0 and e["ts"] == 400.0
    ]
    assert event["args"] == {
        "track": 2, "iteration": 1, "op": "all_reduce", "group": "dp@0", "sequence": 0,
        "size_bytes": 1 << 20, "match": 100, "wait_ns": 10_000, "transfer_ns": 90_000,
        "launch_ns": -500,
    }  # fmt: skip
    assert (event["cat"], event["dur"]) == ("collective", 100.0)
    iteration = next(e for e in spans if e["cat"] == "iteration")
    assert iteration["args"] == {"track": 3, "iteration": 1}


def test_times_keep_nanoseconds(written, make_timeline, make_span):
    eleven_days_us = 11 * 86_400 * 1e6
    spans = [
        make_span(0, "compute", "early", 0, 0.001),
        make_span(0, "compute", "late", eleven_days_us + 0.123, 1000.457),
    ]
    events = {event["name"]: event for event in phase(written(make_timeline(spans)), "X")}
    assert events["early"]["dur"] == 0.001
    assert round(events["late"]["ts"] * 1000) == 11 * 86_400 * 10**9 + 123
    assert round(events["late"]["dur"] * 1000) == 1_000_457


def test_arrow_ends_lie_inside_their_slices_and_never_run_backwards(written, make_timeline):
    events = written(make_timeline())
    slices: dict[tuple[int, int], list[dict]] = {}
    for event in phase(events, "X"):
        slices.setdefault((event["pid"], event["tid"]), []).append(event)
    starts = {event["id"]: event for event in phase(events, "s")}
    finishes = phase(events, "f")
    assert len(starts) == len(phase(events, "s")) == len(finishes) == 28
    for finish in finishes:
        start = starts[finish["id"]]
        assert start["ts"] <= finish["ts"]
        assert finish["bp"] == "e"
        matches = {
            each["args"]["match"]
            for end in (start, finish)
            for each in slices[end["pid"], end["tid"]]
            if each["ts"] <= end["ts"] < each["ts"] + each["dur"]
        }
        assert len(matches) == 1


def test_one_collective_has_one_start_and_many_finishes(written, make_timeline, make_span):
    talk = {"op": "all_reduce", "match": 5}
    spans = [
        make_span(rank, "collective", "all_reduce", 3.0 * rank, 50 - rank, **talk)
        for rank in range(4)
    ]
    events = written(make_timeline(spans, Layout(dp=4)))
    (start,) = phase(events, "s")
    assert (start["pid"], start["ts"]) == (3, 9.0)
    assert {(f["pid"], f["ts"], f["id"]) for f in phase(events, "f")} == {
        (rank, 9.0, start["id"]) for rank in range(3)
    }


def test_selection_keeps_arrows_with_both_ends(written, make_timeline):
    events = written(make_timeline(), selection=Selection(ranks={0, 2, 4}, iterations={2}))
    spans = phase(events, "X")
    assert {event["pid"] for event in spans} == {0, 2, 4}
    assert {event["args"]["iteration"] for event in spans} == {2}
    arrows = phase(events, "s") + phase(events, "f")
    assert {event["pid"] for event in arrows} == {0, 2, 4}
    assert len(arrows) == 4  # the all-reduce of 0 and 2, the link of 0 and 4
    record = events[0]["args"]
    assert record["selection"] == {"ranks": [0, 2, 4], "iterations": [2], "kinds": None}
    assert [item["rank"] for item in record["headers"]] == [0, 2, 4]


def test_selection_of_kinds(written, make_timeline):
    events = written(make_timeline(), selection=Selection(kinds={Kind.COMPUTE}))
    assert {event["cat"] for event in phase(events, "X")} == {"compute"}
    assert phase(events, "s") == phase(events, "f") == []


def test_empty_selection_is_refused(tmp_path, make_timeline):
    with pytest.raises(UsageError, match="selected ranks 77, 99 and kinds gc hold none"):
        write_timeline(
            make_timeline(),
            tmp_path / "t.json",
            selection=Selection(ranks={99, 77}, kinds={Kind.GC}),
        )
    assert list(tmp_path.iterdir()) == []


def test_marks_are_drawn_on_their_rank(written, make_timeline):
    timeline = make_timeline()
    marks = [
        Mark(
            rank=3,
            start_ns=timeline.origin_ns - 5,
            end_ns=timeline.origin_ns + 2_500,
            label="langsam",
            args={"slowdown": 1.5},
        ),
        Mark(rank=99, start_ns=0, end_ns=1, label="nobody"),
    ]
    events = written(timeline, marks=marks)
    (mark,) = [event for event in phase(events, "X") if event["cat"] == "finding"]
    assert (mark["pid"], mark["ts"], mark["dur"]) == (3, 0.0, 2.5)
    assert mark["args"] == {"slowdown": 1.5}


def test_same_timeline_same_bytes(tmp_path, make_timeline):
    for suffix in (".json", ".json.gz", ".pftrace", ".pftrace.gz"):
        one, other = tmp_path / f"one{suffix}", tmp_path / f"other{suffix}"
        write_timeline(make_timeline(), one)
        write_timeline(make_timeline(), other)
        assert one.read_bytes() == other.read_bytes()


def test_gzip_holds_the_same(tmp_path, make_timeline):
    plain, packed = tmp_path / "t.json", tmp_path / "t.json.gz"
    write_timeline(make_timeline(), plain)
    write_timeline(make_timeline(), packed)
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()


def test_the_reader_has_the_timeline_back(tmp_path, make_timeline):
    timeline = make_timeline()
    path: Path = tmp_path / "t.json.gz"
    write_timeline(timeline, path)
    again = read_timeline(path)
    assert again.spans.to_pylist() == timeline.spans.to_pylist()
    assert (again.headers, again.clocks, again.windows) == (
        timeline.headers,
        timeline.clocks,
        timeline.windows,
    )
    assert (again.run_id, again.layout, again.origin_ns) == (
        "r1",
        timeline.layout,
        timeline.origin_ns,
    )


def test_a_timeline_without_spans_is_written(written, make_timeline):
    events = written(make_timeline([]))
    assert {event["ph"] for event in events} == {"M"}
