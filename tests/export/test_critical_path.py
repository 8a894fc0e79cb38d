"""The chain of an iteration as a track of its own: slices end to end, arrows from its spans."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from megascan.export import Hop, Selection, write_timeline
from megascan.export.arrows import in_order
from megascan.reader import read_timeline
from megascan.timeline import Timeline, numbers

if TYPE_CHECKING:
    from conftest import Ask


def chain_through(timeline: Timeline) -> list[Hop]:
    """A made-up chain: the first spans of two ranks, in an iteration's slice."""
    rank, start, length = (
        numbers(timeline.spans, name) for name in ("rank", "start_ns", "duration_ns")
    )
    hops, until = [], timeline.origin_ns
    for row in np.flatnonzero(length > 2_000)[[0, 1, -1]].tolist():
        begin = max(until, int(start[row]))
        until = max(begin + 1_000, int(start[row] + length[row]))
        hops.append(
            Hop(
                rank=int(rank[row]), iteration=1, start_ns=begin, end_ns=until,
                label=f"rank {rank[row]}: work", row=row, args={"rank": int(rank[row])},
            )
        )  # fmt: skip
    whole = Hop(
        rank=-1, iteration=1, start_ns=hops[0].start_ns, end_ns=until, label="iteration 1",
        args={"compute": 1.0},
    )  # fmt: skip
    return [whole, *hops]


@pytest.mark.browser
@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
def test_in_perfettos_engine(
    suffix: str, tmp_path: Path, make_timeline: Callable[..., Timeline], ask: Ask
) -> None:
    timeline = make_timeline()
    chain, path = chain_through(timeline), tmp_path / f"t{suffix}"
    write_timeline(timeline, path, chain=chain)
    sql = "select name, ts, dur, depth from slice where category = 'critical path'"
    slices = ask(path, sql)
    arrows = ask(
        path,
        "select a.name, b.name from flow f join slice a on f.slice_out = a.id "
        "join slice b on f.slice_in = b.id "
        "where b.category = 'critical path' and a.category != 'critical path'",
    )
    errors = ask(path, "select name from stats where severity = 'error' and value > 0")
    assert errors == []
    assert sorted(slices) == sorted(
        (
            hop.label,
            hop.start_ns - timeline.origin_ns,
            hop.end_ns - hop.start_ns,
            int(hop.rank >= 0),
        )
        for hop in chain
    )
    assert len(arrows) == 3


@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".pftrace"])
def test_it_is_read_back_as_if_it_were_not_there(
    suffix: str, tmp_path: Path, make_timeline: Callable[..., Timeline]
) -> None:
    timeline = make_timeline()
    write_timeline(timeline, tmp_path / f"plain{suffix}")
    write_timeline(timeline, tmp_path / f"t{suffix}", chain=chain_through(timeline))
    plain, drawn = (read_timeline(tmp_path / f"{name}{suffix}") for name in ("plain", "t"))
    assert drawn.spans.to_pylist() == plain.spans.to_pylist()  # their dictionaries may differ
    assert set(drawn.headers) == set(plain.headers)


def test_a_selection_shows_its_part(tmp_path: Path, make_timeline: Callable[..., Timeline]) -> None:
    timeline = make_timeline()
    chain = chain_through(timeline)
    kept = chain[1].rank
    write_timeline(
        timeline, tmp_path / "t.json", chain=chain, selection=Selection(ranks=frozenset([kept]))
    )
    events = [
        event
        for event in json.loads((tmp_path / "t.json").read_text())
        if event.get("cat") == "critical path"
    ]
    ranks = {event["args"].get("rank", kept) for event in events if event["ph"] == "X"}
    assert ranks == {kept}
    begun = {event["id"] for event in events if event["ph"] == "s"}
    ended = {event["id"] for event in events if event["ph"] == "f"}
    assert begun == ended and begun
    write_timeline(
        timeline, tmp_path / "u.json", chain=chain, selection=Selection(iterations=frozenset([2]))
    )
    assert "critical path" not in (tmp_path / "u.json").read_text()


def test_iterations_that_overlap_are_cut_where_the_next_one_begins() -> None:
    whole = Hop(rank=-1, iteration=1, start_ns=0, end_ns=100, label="iteration 1")
    first = Hop(rank=0, iteration=1, start_ns=0, end_ns=100, label="a")
    later = [
        replace(whole, iteration=2, start_ns=80, end_ns=200),
        replace(first, iteration=2, start_ns=80, end_ns=90),
        replace(first, iteration=2, start_ns=90, end_ns=150),
        replace(first, iteration=2, start_ns=150, end_ns=200),
    ]
    drawn = [(hop.start_ns, hop.end_ns) for hop in in_order([whole, first, *later])]
    assert drawn == [(0, 100), (0, 100), (100, 200), (100, 150), (150, 200)]
