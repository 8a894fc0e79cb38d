"""Whatever happens to a file: a Trace with fewer windows, or an InputError; nothing else."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascan.errors import InputError
from megascan.reader import read_timeline, read_trace, sniff
from megascan.timeline import Timeline, Trace

if TYPE_CHECKING:
    from conftest import Folder, Original, Profiles

FUZZ = settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def result_of(read: Callable[[Path], Trace | Timeline], path: Path) -> Trace | Timeline | None:
    try:
        return read(path)
    except InputError as error:
        assert str(path.name) in str(error) or str(path.parent) in str(error)
        assert "\n" not in str(error)
        return None


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_cut_at_every_byte(folder: Folder, pack: Callable[[bytes], bytes]) -> None:
    """Every finished window is there, no unfinished one is.

    Of the bytes before the first window's mark, in a plain file, one in seven: it has none there.
    """
    path = folder.write_rank(0)
    text = path.read_bytes()
    marks = [line.rstrip(b",") for line in text.split(b"\n") if b"megascan_window" in line]
    whole = pack(text)
    early = text.index(marks[0]) if pack is bytes else 0
    seen = 0
    for cut in (*range(0, early, 7), *range(early, len(whole))):
        path.write_bytes(whole[:cut])
        trace = result_of(read_trace, path)
        num_windows = len(trace.windows[0]) if trace else 0
        assert num_windows >= seen
        seen = num_windows
        if trace is not None:
            assert trace.spans.num_rows == 2 * num_windows
            assert num_windows == 2 or trace.completeness.num_spans < 4
        if pack is bytes:
            assert num_windows == sum(mark in text[:cut] for mark in marks)
    assert seen == 2


Edit = tuple[str, float, float, bytes]
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "double", "insert"]),
        st.floats(0, 1, exclude_max=True),
        st.floats(0, 1, exclude_max=True),
        st.binary(min_size=1, max_size=8)
        | st.sampled_from([b"}", b"{", b"[", b"]", b'"', b",", b"\n", b"NaN", b"null", b"1e999"]),
    ),
    min_size=1,
    max_size=3,
)


def edited(text: bytes, edits: list[Edit]) -> bytes:
    """Bits flipped, pieces cut out, doubled or put in; places are shares of the length."""
    for action, place, extent, piece in edits:
        at = int(place * len(text))
        end = at + int(extent * min(len(text) - at, 200))
        if action == "flip" and text:
            flipped = text[at] ^ (1 << piece[0] % 8)
            text = text[:at] + bytes([flipped]) + text[at + 1 :]
        elif action == "cut":
            text = text[:at] + text[end:]
        elif action == "double":
            text = text[:end] + text[at:end] + text[end:]
        else:
            text = text[:at] + piece + text[at:]
    return text


@FUZZ
@given(edits=EDITS)
def test_damaged_rank_file(folder: Folder, edits: list[Edit]) -> None:
    path = folder.file_of(0)
    path.unlink(missing_ok=True)
    text = folder.write_rank(0).read_bytes()
    path.write_bytes(edited(text, edits))
    trace = result_of(read_trace, path)
    if trace is not None:
        assert trace.spans.num_rows == sum(window.num_spans for window in trace.windows[0])
        trace.spans.validate(full=True)


@FUZZ
@given(edits=EDITS)
def test_damaged_original_file(original: Original, edits: list[Edit]) -> None:
    path = original.write_rank(0, 0, 0)
    path.write_bytes(edited(path.read_bytes(), edits))
    trace = result_of(read_trace, path)
    if trace is not None:
        trace.spans.validate(full=True)


@FUZZ
@given(edits=EDITS)
def test_damaged_profile(profiles: Profiles, edits: list[Edit]) -> None:
    path = profiles.write_rank(0)
    path.write_bytes(edited(path.read_bytes(), edits))
    trace = result_of(read_trace, path)
    if trace is not None:
        trace.spans.validate(full=True)


@FUZZ
@given(edits=EDITS)
def test_damaged_timeline(merged: Path, edits: list[Edit]) -> None:
    path = merged.with_name("damaged.json")
    path.write_bytes(edited(merged.read_bytes(), edits))
    timeline = result_of(read_timeline, path)
    if timeline is not None:
        timeline.spans.validate(full=True)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "ph", "ts", "dur", "pid", "tid", "cat", "args", "rel_ts"]),
            inner,
            max_size=6,
        )
    ),
    max_leaves=12,
)


@FUZZ
@given(first=st.sampled_from(["megascan", "megascan_timeline", "rel_ts", "kernel"]), events=JSON)
def test_any_json_under_a_known_sign(tmp_path: Path, first: str, events: object) -> None:
    path = tmp_path / "rank0.json"
    sign = {"name": first, "cat": first, first: 1, "ph": "M", "args": events}
    path.write_text(json.dumps([sign, events, {"ph": "X", "name": "a", "args": events}]))
    for read in (read_trace, read_timeline):
        result_of(read, path)


@FUZZ
@given(content=st.binary(max_size=300))
def test_any_bytes(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "benchmark-data-0-pipeline-0-tensor-0.json"
    path.write_bytes(content)
    for read in (read_trace, read_timeline):
        result_of(read, path)
    result_of(sniff, path)  # type: ignore[arg-type]
