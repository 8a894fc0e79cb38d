"""Landing on a rank and iteration."""

from __future__ import annotations

import gzip
import json
import re
from urllib.parse import parse_qs

import pytest

from megascan.errors import InputError, UsageError
from megascan.viewer import Spot, address, read_record, view_of

NAMES = ["t.json", "t.json.gz", "t.pftrace", "t.pftrace.gz"]


@pytest.mark.parametrize("name", NAMES)
def test_spot_is_found_in_every_format(timeline_file, name):
    view = view_of(timeline_file(name), Spot(rank=1, iteration=6))
    assert (view.start_ns, view.end_ns) == (300_000, 2_700_000)  # a tenth more on each side
    assert view.group_titles == ("DP1", "DP1 PP0")


def test_pattern_matches_the_rank_and_no_other(timeline_file):
    view = view_of(timeline_file("t.json"), Spot(rank=1, iteration=6))
    assert re.search(view.rank_pattern, "DP1 PP0 TP0 · rank 01 · a")
    assert not re.search(view.rank_pattern, "DP1 PP5 TP0 · rank 11 · a")
    assert not re.search(view.rank_pattern, "DP0 PP5 TP0 · rank 10 · a")


def test_address_carries_the_view(timeline_file):
    view = view_of(timeline_file("t.json"), Spot(rank=1, iteration=6))
    url = address("https://ui.example", "http://127.0.0.1:9001/trace/a b.json", view)
    base, _, query = url.partition("/#!/?")
    assert base == "https://ui.example"
    fields = {name: values[0] for name, values in parse_qs(query).items()}
    assert fields["url"] == "http://127.0.0.1:9001/trace/a b.json"
    assert (fields["visStart"], fields["visEnd"]) == ("300000", "2700000")
    expand, pin = json.loads(fields["startupCommands"])
    assert re.search(expand["args"][0], "DP1 PP0")
    assert not re.search(expand["args"][0], "DP0")
    assert pin["args"] == [view.rank_pattern]


def test_address_without_a_spot():
    assert address("https://ui.example", "http://x/t", None).count("&") == 0


@pytest.mark.parametrize(
    ("spot", "message"),
    [
        (Spot(rank=12, iteration=5), "holds no rank 12; it has 12 ranks, 0 to 11"),
        (Spot(rank=0, iteration=7), "holds no iteration 7; it has 5, 6"),
    ],
)
def test_what_the_file_does_not_hold(timeline_file, spot, message):
    with pytest.raises(UsageError, match=message):
        view_of(timeline_file("t.pftrace"), spot)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[", b"[]", b"[\n{}\n]", b"[\n[1]\n]", b'[\n{"name":"megascan_timeline"}\n]', b"{}",
        b"\x0a", b"\x0a\xff\xff\xff\xff\xff\xff", b"\x0a\x03abc", b"\x1f\x8b", b"\x1f\x8bxyz",
        gzip.compress(b"nothing", mtime=0), gzip.compress(b"[\n{}\n]", mtime=0)[:-9], bytes(100),
    ],
)  # fmt: skip
def test_foreign_files_are_told(tmp_path, content):
    path = tmp_path / "foreign"
    path.write_bytes(content)
    with pytest.raises(InputError, match="foreign"):
        read_record(path)


@pytest.mark.parametrize("name", ["t.json", "t.pftrace"])
def test_a_file_cut_anywhere_is_read_or_told(timeline_file, tmp_path, name):
    whole = timeline_file(name).read_bytes()
    cut = tmp_path / "cut"
    for size in range(0, min(len(whole), 12_000), 97):
        cut.write_bytes(whole[:size])
        try:
            record = read_record(cut)
        except InputError:
            continue
        assert record["run_id"] == "r1"
