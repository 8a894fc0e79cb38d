"""Timelines that the original's aggregator has merged: the same spans, to the microsecond."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest

from megascan.errors import InputError
from megascan.reader import Format, read_trace, sniff
from megascan.topology import Layout

if TYPE_CHECKING:
    from conftest import Original


def steps_of(original: Original) -> tuple[list[list[dict[str, Any]]], np.ndarray]:
    """All ranks' records by step, and each step's longest pause and length, (2, step)."""
    steps: list[list[dict[str, Any]]] = [[] for _ in range(original.num_steps)]
    times = np.zeros((2, original.num_steps), dtype=np.int64)
    for place in itertools.product(*map(range, (original.dp, original.pp, original.tp))):
        step = -1
        for record in original.records(*place):
            if record["name"] != "iteration":
                steps[step].append(record)
            elif record["ph"] == "B":
                step += 1
                times[0, step] = max(times[0, step], record["pad_before"])  # type: ignore[call-overload]
            else:
                times[1, step] = max(times[1, step], record["duration_wall"])  # type: ignore[call-overload]
    return steps, times


def merged(original: Original, *, indent: int | None = 2) -> Path:
    """Merge as the original's `scripts/aggregate.py` does, attributes of the ends on the scopes."""
    events: list[dict[str, Any]] = []
    now = 0
    steps, times = steps_of(original)
    for step, records in enumerate(steps):
        now += int(times[0, step])
        open_scopes: dict[int, list[dict[str, Any]]] = {}
        for record in sorted(records, key=lambda record: record["rel_ts"]):
            args = {k: v for k, v in record.items() if k not in ("name", "ph", "rel_ts")}
            rank, at = record["g_rk"], (record["rel_ts"] + now) // 1000
            if record["ph"] == "B":
                event = {"name": record["name"], "cname": "grey", "ph": "X", "ts": at, "pid": rank,
                         "tid": 0, "args": {"iteration": step, **args}}  # fmt: skip
                events.append(event)
                open_scopes.setdefault(rank, []).append(event)
            else:
                event = open_scopes[rank].pop()
                event["dur"] = at - event["ts"]
                event["args"] |= args
        now += int(times[1, step])
    for number, event in enumerate(events):
        event["args"]["id"] = number
    for rank in {event["pid"] for event in events}:
        name = {"name": f"rank {rank}"}
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": name})
    path = original.path.with_name("benchmark.json")
    path.write_text(json.dumps(events, indent=indent))
    return path


def scopes(path: Path) -> pd.DataFrame:
    """Everything but the steps themselves, whose own begins and ends are lost in the merging."""
    table: pd.DataFrame = read_trace(path).spans.to_pandas()
    return table[table["kind"] != "iteration"].reset_index(drop=True)


@pytest.mark.parametrize("indent", [2, None])
def test_the_same_spans_as_from_the_rank_files(original: Original, indent: int | None) -> None:
    own, ours = scopes(original.write()), scopes(merged(original, indent=indent))
    keys = ["rank", "iteration", "name", "direction", "start_ns"]
    told = ["kind", "name", "phase", "op", "group", "peer", "direction", "size_bytes", "microbatch",
            "iteration", "sequence"]  # fmt: skip
    own, ours = (one.sort_values(keys, kind="stable").reset_index(drop=True) for one in (own, ours))
    assert ours[told].astype(str).values.tolist() == own[told].astype(str).values.tolist()
    assert (ours["duration_ns"] - own["duration_ns"]).abs().max() < 1000
    starts = [one["start_ns"] - one["start_ns"].min() for one in (own, ours)]
    assert (starts[0] - starts[1]).abs().max() <= 1000


def test_what_it_is_and_what_it_lost_is_said(original: Original) -> None:
    path = merged(original)
    trace = read_trace(path)
    assert sniff(path) is Format.ORIGINAL_TIMELINE
    assert trace.layout == Layout(tp=2, dp=2, pp=2)
    assert trace.completeness.missing_ranks == ()
    assert any("merged by the original's aggregator" in note for note in trace.completeness.notes)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda text: text[: len(text) // 2], "is cut off"),
        (lambda text: text.replace('"dur":', '"duration":'), "does not say its dur"),
        (lambda text: text.replace('"g_rk":', '"rank":'), "does not say its g_rk"),
        (lambda text: text.replace('"ts": ', '"ts": "x" , "t": '), "restore the file"),
    ],
    ids=["cut", "no duration", "no rank", "text for a time"],
)
def test_damage_is_one_sentence(original: Original, damage: Any, says: str) -> None:
    path = merged(original)
    path.write_text(damage(path.read_text()))
    with pytest.raises(InputError, match=says):
        read_trace(path)
