"""NVIDIA's simple loop: an update bound by name and torch's optimizer are seen, or missed aloud."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from megascan.reader import read_trace
from tests import ranks

pytestmark = pytest.mark.distributed
LOOP = Path(__file__).with_name("simple_mcore_loop.py")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loop")
    done = ranks.run(LOOP, folder, num_ranks=2, check=True)
    assert "tracing stopped" not in done.stderr
    return folder


def test_each_update_is_recorded_once(traces: Path) -> None:
    trace = read_trace(traces / "updated")
    names = Counter(trace.spans.column("name").to_pylist())
    assert (names["optimizer"], names["grad-sync"]) == (8, 8)  # 2 ranks, 4 iterations
    assert not [note for note in trace.completeness.notes if "was seen" in note]


def test_passes_say_how_many_tokens_they_got(traces: Path) -> None:
    trace = read_trace(traces / "updated")
    (tokens,) = {window.tokens for windows in trace.windows.values() for window in windows}
    assert len(set(tokens)) == 1


def test_windows_tell_that_all_layers_are_of_one_kind(traces: Path) -> None:
    trace = read_trace(traces / "updated")
    assert trace.windows
    for windows in trace.windows.values():
        for window in windows:
            (layers,) = window.kinds.values()
            assert layers == tuple(range(1, len(layers) + 1)) and "" not in window.kinds


def test_an_update_that_is_not_seen_is_said(traces: Path) -> None:
    notes = " ".join(read_trace(traces / "not-updated").completeness.notes)
    assert "no optimizer step was seen" in notes
    assert "no grad-sync was seen" in notes
