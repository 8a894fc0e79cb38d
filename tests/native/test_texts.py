"""Texts and messages by compiled code: the same bytes as without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aggregate import merge
from megascan import native
from megascan.export.chrome import Printed, coded_numbers, fragments, joined
from megascan.export.protobuf import Fixed64, Messages, interleaved, length_of, varints
from megascan.export.writing import write_timeline
from megascan.simulate import JobModel, compute_bound, simulate_trace
from megascan.topology import Layout

LARGEST = 2**63 - 1
NANOSECONDS = st.one_of(
    st.integers(-(2**52) - 3, 2**52 + 3),
    st.integers(-(10**6), 10**6),
    st.integers(0, 2**49).map(lambda value: value * 8),
)


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.integers(-LARGEST - 1, LARGEST), min_size=3, max_size=20),
    times=st.lists(NANOSECONDS, min_size=3, max_size=20),
)
@example(
    values=[0, -1, LARGEST, -LARGEST - 1, 9, 10, 99, 100, 101], times=[0, 1, 10, 100, 1000, -5]
)
@example(values=[1, 2, 3], times=[2**52 - 1, 1 - 2**52, 4503599627370490])
@example(values=[1, 2, 3], times=[2**52, 2**60 + 1, 7])
def test_rows_of_text(
    both: Callable[..., tuple[object, object]], values: list[int], times: list[int]
) -> None:
    num = min(len(values), len(times))
    whole, time_ns = np.array(values[:num]), np.array(times[:num])
    words = ["", "a", "four", "seventeen letters", "x" * 40]
    (texts,) = fragments([coded_numbers(np.arange(num) % 5, words.__getitem__)])
    rows = [np.arange(0, num, 2), np.arange(num - 1, -1, -3)]
    pieces = ['{"a":', Printed(whole), texts, "", Printed(time_ns, in_microseconds=True), "}\n"]

    def made() -> bytes:
        return bytes(joined([(each, pieces) for each in rows]))

    compiled, otherwise = both(made)
    assert compiled == otherwise


def test_fragments_that_are_none_are_refused(
    library: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "library", lambda: library)
    texts = (np.frombuffer(b"ab", np.uint8), np.array([0, 1, 2], np.int32))
    rows = np.arange(1)
    for code, found in ((1, b"b"), (2, None), (-1, None)):
        part = native.Part(values=np.array([code]), fragments=texts)
        made = native.join([(rows, [part])])
        assert (None if made is None else bytes(made)) == found


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(
        st.one_of(st.integers(-LARGEST - 1, LARGEST), st.integers(0, 2**36)),
        min_size=4,
        max_size=24,
    )
)
def test_messages(both: Callable[..., tuple[object, object]], values: list[int]) -> None:
    numbers, rows = np.array(values), np.arange(len(values))

    def made() -> tuple[bytes, bytes]:
        pieces = []
        for nth in range(3):
            own = rows[nth::3]
            fixed = Fixed64(numbers[own] / 3)
            parts = [b"<", varints(numbers, own), varints(rows, own), b"=", fixed, b">" * nth]
            pieces.append((own, Messages(len(own), parts)))
        single = Messages(len(rows), [varints(numbers), b";"])
        assert len(single.tobytes()) == len(rows) * length_of(single.parts)
        return bytes(interleaved(pieces)), bytes(single.tobytes())

    compiled, otherwise = both(made)
    assert compiled == otherwise


@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
def test_a_timeline(
    both: Callable[..., tuple[object, object]], tmp_path: Path, suffix: str
) -> None:
    layout = Layout(tp=2, pp=2, dp=2)
    model = JobModel(layout=layout, costs=compute_bound(layout), iterations=2, num_layers=4)
    timeline = merge.build_timeline(simulate_trace(model, seed=1))
    path = tmp_path / f"timeline{suffix}"

    def written() -> bytes:
        write_timeline(timeline, path, force=True)
        return path.read_bytes()

    compiled, otherwise = both(written)
    assert compiled == otherwise
