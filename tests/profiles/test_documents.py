"""Profiles as torch 1.8 to 2.13 write them and as scripts rewrite them: the same spans."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from megascan.errors import InputError
from megascan.reader import Format, read_trace, sniff

if TYPE_CHECKING:
    from benchmarks.profile_jobs import Job

Document = dict[str, Any]
OLD_WORDS = {
    "cpu_op": "Operator", "user_annotation": "Operator", "kernel": "Kernel",
    "cuda_runtime": "Runtime", "gpu_memcpy": "Memcpy",
}  # fmt: skip


@pytest.fixture
def document(job: Callable[..., Job]) -> Document:
    """Return rank 1's profile of a small job."""
    ranks = job("ddp", num_ranks=2, num_iterations=2, num_layers=2).run()
    return json.loads(json.dumps(ranks[1].document()))


def first(document: Document, *names: str) -> Document:
    """Return a document with these keys first."""
    return {name: document[name] for name in names} | document


def events_first(document: Document) -> Document:
    return first(document, "traceEvents")


def events_within(document: Document) -> Document:
    return first(document, "traceName", "distributedInfo", "traceEvents")


def _as_record(event: Document) -> str:
    outer = {name: value for name, value in event.items() if name not in ("ph", "args")}
    inner = json.dumps(event.get("args", {}))[1:-1]
    return (
        f'  {{\n    "ph": "X", {json.dumps(outer)[1:-1]},\n'
        f'    "args": {{\n      {inner}\n    }}\n  }}'
    )


def as_torch(document: Document) -> str:
    """Lay a document out as the profiler does: two spaces before events, arguments deeper."""
    head = {name: value for name, value in document.items() if name != "traceEvents"}
    lines = ",\n".join(_as_record(one) for one in document["traceEvents"] if one["ph"] == "X")
    before = "".join(f'  "{name}": {json.dumps(head[name], indent=2)},\n' for name in [*head][:2])
    after = "".join(f',\n  "{name}": {json.dumps(head[name], indent=2)}' for name in [*head][2:])
    return "{\n" + before + '  "traceEvents": [\n' + lines + "\n  ]" + after + "\n}\n"


LAYOUTS: dict[str, Callable[[Document], str]] = {
    "compact": lambda d: json.dumps(d, separators=(",", ":")),
    "events first": lambda d: json.dumps(events_first(d)),
    "events within": lambda d: json.dumps(events_within(d)),
    "indented": lambda d: json.dumps(d, indent=2),
    "indented, events first": lambda d: json.dumps(events_first(d), indent=2),
    "indented, events within": lambda d: json.dumps(events_within(d), indent=1),
    "sorted": lambda d: json.dumps(d, indent=4, sort_keys=True),
    "torch": as_torch,
    "torch, events first": lambda d: as_torch(events_first(d)),
    "torch, more behind": lambda d: as_torch(d | {"INFO": [{"a": [{"b": 1}]}, {"c": {"d": 2}}]}),
}


def spans(path: Path) -> pa.Table:
    return read_trace(path).spans


@pytest.fixture
def expected(document: Document, tmp_path: Path) -> pa.Table:
    path = tmp_path / "plain.json"
    path.write_text(json.dumps(document, indent=2))
    table = spans(path)
    assert table.num_rows > 40
    return table


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_stand_anywhere(document, expected, tmp_path, layout):
    path = tmp_path / "profile.json"
    path.write_text(LAYOUTS[layout](document))
    assert sniff(path) is Format.KINETO
    trace = read_trace(path)
    assert trace.spans.equals(expected)
    header = trace.headers[1]
    assert (header.world_size, header.host, header.device.name) == (2, "n0", "NVIDIA H200")


def test_gzipped(document, expected, tmp_path):
    path = tmp_path / "profile.json.gz"
    path.write_bytes(gzip.compress(as_torch(events_first(document)).encode()))
    assert spans(path).equals(expected)


def test_words_of_torch_1_8(document, expected, tmp_path):
    for event in document["traceEvents"]:
        event["cat"] = OLD_WORDS.get(event["cat"], event["cat"])
        event["pid"], event["tid"] = "python 4242", f"stream {event['tid']}"
    path = tmp_path / "rank1.json"
    del document["distributedInfo"], document["deviceProperties"]
    path.write_text(json.dumps(events_first(document)))
    assert sniff(path) is Format.KINETO
    table = spans(path)
    for name in ("kind", "name", "start_ns", "duration_ns", "op", "size_bytes"):
        assert table.column(name).to_pylist() == expected.column(name).to_pylist()


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")], ids=["compact", "spaced"])
def test_times_as_text(document, expected, tmp_path, separators):
    """As programs write them that keep decimals exact."""
    for event in document["traceEvents"]:
        event |= {name: str(event[name]) for name in ("ts", "dur") if name in event}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document, separators=separators))
    assert spans(path).equals(expected)


def test_times_relative_to_a_base_that_stands_behind(document, expected, tmp_path):
    path = tmp_path / "profile.json"
    base = document.pop("baseTimeNanoseconds")
    path.write_text(json.dumps(document | {"baseTimeNanoseconds": base + 5}, indent=2))
    shifts = {
        late - early
        for late, early in zip(
            spans(path).column("start_ns").to_pylist(),
            expected.column("start_ns").to_pylist(),
            strict=True,
        )
    }
    assert shifts == {5}


def test_a_rank_in_the_name_of_the_file(document, tmp_path):
    del document["distributedInfo"]
    for rank in (0, 1):
        (tmp_path / f"worker{rank}.1697596714999.pt.trace.json").write_text(json.dumps(document))
    assert read_trace(tmp_path).completeness.ranks == (0, 1)


@pytest.mark.parametrize("layout", ["indented", "torch", "torch, events first"])
def test_a_file_that_is_cut_off_inside_its_events(document, tmp_path, layout):
    text = LAYOUTS[layout](document)
    path = tmp_path / "rank1.json"
    path.write_text(text[: text.rindex('"ProfilerStep') - 10])
    trace = read_trace(path)
    assert "rank 1: rank1.json is cut off" in trace.completeness.notes
    assert trace.spans.num_rows > 20


def test_a_file_that_is_cut_off_behind_its_events_keeps_them(document, expected, tmp_path):
    text = as_torch(document)
    path = tmp_path / "rank1.json"
    path.write_text(text[: text.index('"traceName"') + 14])
    assert spans(path).num_rows == expected.num_rows


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "is cut off"),
        (lambda text: text.replace('"dur": ', '"dur": -', 3), "events have a negative duration"),
        (lambda text: text.replace('"rank": 1', '"rank": "one"'), "its header says rank 'one'"),
        (lambda text: text.replace('"traceEvents": [', '"traceEvents": 7, "x": ['), "array"),
        (lambda text: text.replace('"ts": ', '"ts": 1e300, "t": '), "no usable ts and dur"),
    ],
    ids=["cut", "negative", "rank", "events", "times"],
)
def test_damage_is_one_sentence(document, tmp_path, damage, message):
    path = tmp_path / "profile.json"
    path.write_text(damage(json.dumps(document)))
    with pytest.raises(InputError) as raised:
        read_trace(path)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)
