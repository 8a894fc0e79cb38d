"""Rank files: valid after every append, continued after any cut, never overwritten."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from megascan.rankfile import RankFile, encode_spans, set_earlier_run_aside
from megascan.topology import Layout

HEADER = b'{"name":"megascan","ph":"M","args":{"run_id":"first"}}'
SPANS = [b'{"name":"a","args":{"n":%d}}' % number for number in range(3)]


def parse(path):
    text = path.read_text()
    return json.loads(text if text.endswith("]\n") else text + "]")


def test_valid_after_every_append_and_after_close(tmp_path):
    path = tmp_path / "rank.json"
    file = RankFile(path)
    file.append([HEADER])
    assert len(parse(path)) == 1
    file.append(SPANS)
    assert len(parse(path)) == 4
    file.close()
    assert len(json.loads(path.read_text())) == 4


def test_a_closed_file_is_continued(tmp_path):
    path = tmp_path / "rank.json"
    for _ in range(3):
        file = RankFile(path)
        file.append([HEADER])
        file.close()
    assert [event["name"] for event in json.loads(path.read_text())] == ["megascan"] * 3


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(min_value=0, max_value=200))
def test_a_file_cut_anywhere_is_continued(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "rank.json"
    file = RankFile(path)
    file.append([HEADER])
    file.append(SPANS)
    file.close()
    whole = path.read_bytes()
    path.write_bytes(whole[: min(cut, len(whole))])
    file = RankFile(path)
    file.append([b'{"name":"last"}'])
    file.close()
    events = json.loads(path.read_text())
    assert events[-1] == {"name": "last"}
    assert events[:-1] == json.loads(whole)[: len(events) - 1]


def test_nothing_written_nothing_closed(tmp_path):
    path = tmp_path / "rank.json"
    RankFile(path).close()
    assert path.read_bytes() == b""


def test_times_keep_their_nanoseconds():
    record = ("compute", "forward", 1, 123_456_789_012_345, 1_001, {"iteration": 1})
    (line,) = encode_spans(3, [record])
    event = json.loads(line)
    assert round(event["ts"] * 1000) == 123_456_789_012_345
    assert event["dur"] == 1.001
    assert (event["pid"], event["tid"], event["cat"]) == (3, 1, "compute")


def test_spans_are_taken_apart_where_they_end_whatever_their_texts_say():
    names = ['},{"name":"x"}', "a\nb,\n{", "layer", "},\n{'name':"]
    arguments = [{"op": '"},{"name":"'}, {}, {"name": "n", "bytes": 3}, {"op": "},{"}]
    records = [
        ("compute", name, 1, 5, 7, each) for name, each in zip(names, arguments, strict=True)
    ]
    events = [json.loads(line) for line in encode_spans(0, records)]
    assert [(event["name"], event["args"]) for event in events] == list(
        zip(names, arguments, strict=True)
    )
    assert encode_spans(0, []) == []


def test_earlier_runs_are_set_aside_and_never_overwritten(tmp_path):
    path = tmp_path / "benchmark-data-0-pipeline-0-tensor-0.json"
    for content in (HEADER, HEADER + b" "):
        path.write_bytes(b"[\n" + content)
        set_earlier_run_aside(path)
    assert not path.exists()
    assert sorted(file.name for file in (tmp_path / "first").iterdir()) == [
        "benchmark-data-0-pipeline-0-tensor-0.2.json",
        "benchmark-data-0-pipeline-0-tensor-0.json",
    ]


def test_a_fresh_run_sets_aside_also_what_no_rank_of_it_owns(make_tracer, tmp_path, make_header):
    folder = tmp_path / "trace"
    folder.mkdir()
    stranger = folder / "benchmark-data-7-pipeline-0-tensor-0.json"
    stranger.write_bytes(b"[\n" + HEADER)
    tracer, path = make_tracer(folder=folder)
    tracer.close()
    assert not stranger.exists() and (folder / "first" / stranger.name).exists()
    assert path.exists() and Layout(dp=2).world_size == 2


def test_a_fresh_run_leaves_its_neighbours_alone(make_tracer, tmp_path):
    folder = tmp_path / "trace"
    folder.mkdir()
    neighbour = folder / "benchmark-data-1-pipeline-0-tensor-0.json"
    neighbour.write_bytes(b"[\n" + HEADER)
    tracer, _ = make_tracer(folder=folder)
    tracer.close()
    assert neighbour.exists()
