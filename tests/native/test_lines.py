"""Lines by compiled code: the same columns, kinds, damages and errors as without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megascan import native
from megascan.errors import InputError
from megascan.reader.lines import Block, _blank_separators, open_document, parse_block
from megascan.reader.original import RECORD_SCHEMA, read_records
from megascan.reader.rank_files import read_rank_file
from megascan.reader.segments import event_schema
from megascan.reader.templates import Templates, split_digits
from megascan.schema import SPAN_COLUMNS
from megascan.simulate import JobModel, compute_bound, simulate_trace, write_rank_files
from megascan.timeline import first_rows
from megascan.topology import Layout

SCHEMA = event_schema(SPAN_COLUMNS)


def exact(table: pa.Table | None) -> object:
    """A table to the bit, the order of its dictionaries and the bits of its NaN included."""
    if table is None:
        return None
    found: list[object] = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        for chunk in column.chunks:
            if pa.types.is_dictionary(chunk.type):
                found.append((name, chunk.indices.to_pylist(), chunk.dictionary.to_pylist()))
            else:
                found.append((name, str(chunk.type), chunk.to_numpy().tobytes()))
    return found


def parsed(text: bytes, schema: pa.Schema = SCHEMA) -> object:
    events = parse_block(Block(bytearray(text), 1), Templates(schema))
    if events is None:
        return None
    rows = range(events.table.num_rows)
    return exact(events.table), list(events.numbers), events.damages, events.rows_text(rows)


NUMBERS = st.one_of(
    st.integers(-3, 300).map(str),
    st.integers(-(2**70), 2**70).map(str),
    st.tuples(st.integers(-(10**9), 10**17), st.text("0123456789", min_size=1, max_size=19)).map(
        lambda pair: f"{pair[0]}.{pair[1]}"
    ),
    st.sampled_from(
        ["007", "-0", "-0.0", "1e3", "1.5E-7", "0.10", ".5", "5.", "--1", "NaN", "null"]
    ),
)
TEXTS = st.one_of(
    st.sampled_from(['"mlp"', '"p2p"', '"tp@0"', '"tp@007"', '"dp@12"', '""', '"a1b22c"', "null"]),
    st.text(max_size=6).map(json.dumps),
    st.text(max_size=6).map(lambda text: json.dumps(text, ensure_ascii=False)),
)
PLACES = ("ts", "dur", "pid", "tid", "name", "cat", "ph")
ARGUMENTS = ("iteration", "layer", "sequence", "launch_ns", "group", "op", "strange")


@st.composite
def events(draw: st.DrawFn) -> str:
    def some(names: tuple[str, ...]) -> str:
        chosen = draw(st.lists(st.sampled_from(names), max_size=4))
        return ",".join(f'"{name}":{draw(st.one_of(NUMBERS, TEXTS))}' for name in chosen)

    return f'{{{some(PLACES)},"args":{{{some(ARGUMENTS)}}}}}'


LINES = st.one_of(
    events(),
    events().map(lambda line: line.replace("{,", "{")),
    events().map(lambda line: line[: len(line) // 2]),
    st.sampled_from(["[", "]", "", "{", "}", "{}", "1", "null", "[1]", '{"ts":1}{"ts":2}', "\r"]),
)
GOOD = '{"name":"mlp","cat":"compute","ph":"X","ts":1.5,"dur":2.25,"args":{"group":"tp@3"}}'


@settings(max_examples=150, deadline=None)
@given(lines=st.lists(LINES, min_size=1, max_size=8), ending=st.sampled_from([",\n", "\n", " ,\n"]))
@example(lines=["[", GOOD, GOOD.replace("2.25", "0.000"), "]"], ending=",\n")
@example(lines=[GOOD, GOOD.replace("3", "123456789012345678901")], ending=",\n")
@example(lines=[GOOD, GOOD.replace("1.5", "1.1234567890123456")], ending=",\n")
@example(lines=[GOOD, GOOD.replace("1.5", "9007199254740993.5")], ending=",\n")
def test_odd_lines(
    both: Callable[..., tuple[object, object]], lines: list[str], ending: str
) -> None:
    text = ending.join(lines).encode("utf-8", "surrogatepass")
    compiled, otherwise = both(lambda: parsed(text))
    assert compiled == otherwise


@settings(max_examples=150, deadline=None)
@given(text=st.text("[]{},\n a", min_size=1).map(str.encode))
@example(text=b"[\n{},\n{}\n]\n")
@example(text=b"[\n{},\n{}\n]")
@example(text=b"\n")
@example(text=b"]")
def test_separators(library: object, text: bytes) -> None:
    one, other = bytearray(text), bytearray(text)
    rows, bounds = _blank_separators(one)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: library)
        found = native.blank_separators(other)
    assert found is not None
    assert (found[0], found[1].tolist()) == (rows, bounds.tolist())
    assert one == other


@settings(max_examples=200, deadline=None)
@given(
    lines=st.lists(
        st.text("0123456789ab. ", max_size=30).map(lambda text: f"{{       {text}}}\n".encode()),
        min_size=1,
        max_size=12,
    )
)
@example(lines=[b"{       " + b"7" * 18 + b"}\n", b"{1}\n", b"{01.00}\n"])
def test_digits_and_kinds(library: object, lines: list[bytes]) -> None:
    text, bounds = b"".join(lines), np.cumsum([0, *map(len, lines)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: library)
        found = native.scan(text, bounds)
    digits, bare = split_digits(text, bounds)
    encoded = bare.dictionary_encode()
    assert found is not None
    assert found.kinds == encoded.dictionary.to_pylist()
    assert found.code.tolist() == encoded.indices.to_pylist()
    kinds = first_rows(encoded.indices.to_numpy().astype(np.int64), len(found.kinds))
    assert found.kind_line.tolist() == kinds.tolist()
    assert found.first.tolist() == digits.first.tolist()
    assert found.length.tolist() == digits.length.tolist()
    has_value = np.append(digits.length <= 18, True)
    assert found.value[has_value].tolist() == digits.value[has_value].tolist()
    assert found.zero_run.tolist() == digits.leading_zero.tolist()
    owner = np.searchsorted(digits.first, digits.leading_zero, side="right") - 1
    assert found.zero_line.tolist() == owner.tolist()


def test_bounds_that_are_none_are_refused(library: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: library)
    for bounds in ([0, 9], [-1, 3], [2, 1], [0, 0, 3]):
        assert native.scan(b"{1}", np.array(bounds)) is None


def test_lines_of_too_many_kinds_are_left_to_the_other_way(
    library: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "library", lambda: library)
    lines = [
        b"{" + bytes([97 + nth // 676, 97 + nth // 26 % 26, 97 + nth % 26]) + b"}"
        for nth in range(4097)
    ]
    bounds = np.cumsum([0, *map(len, lines)])
    assert native.scan(b"".join(lines), bounds) is None
    found = native.scan(b"".join(lines[:-1]), bounds[:-1])
    assert found is not None and len(found.kinds) == 4096


@pytest.fixture(scope="module")
def rank_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layout = Layout(tp=2, pp=1, dp=1)
    model = JobModel(layout=layout, costs=compute_bound(layout), iterations=2, num_layers=2)
    folder = tmp_path_factory.mktemp("trace")
    return write_rank_files(simulate_trace(model, seed=3), folder)[0]


def outcome(path: Path) -> object:
    try:
        segments = read_rank_file(path, Templates(SCHEMA))
    except InputError as error:
        return str(error)
    return [
        (one.header, one.windows, exact(one.spans), one.notes, one.num_unfinished_spans)
        for one in segments
    ]


def test_cut_and_damaged_rank_files(
    both: Callable[..., tuple[object, object]], rank_file: Path, tmp_path: Path
) -> None:
    text, random = rank_file.read_bytes(), np.random.default_rng(5)
    path = tmp_path / rank_file.name
    kinds = set()
    for nth in range(40):
        damaged = bytearray(text[: random.integers(1, len(text) + 1)] if nth % 2 else text)
        for place in random.integers(0, len(damaged), random.integers(0, 3)):
            damaged[place] = random.integers(0, 256)
        path.write_bytes(damaged)
        compiled, otherwise = both(lambda: outcome(path))
        assert compiled == otherwise
        kinds.add(type(compiled))
    assert kinds == {str, list}, "some are refused and some are read"


RECORD = """
  {
    "name": "mlp",
    "ph": "B",
    "rel_ts": %d,
    "g_rk": 1,
    "dp_rk": 0,
    "pp_rk": 0,
    "tp_rk": 1,
    "dev": 1
  }"""


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 40, 97])
def test_records_of_the_original(
    both: Callable[..., tuple[object, object]], tmp_path: Path, cut: int
) -> None:
    records = [RECORD % (place**7) for place in range(60)]
    text = f"[{','.join(records)}\n]"
    path = tmp_path / "rank.json"
    path.write_text(text[: len(text) - cut])

    def read() -> object:
        found = read_records(path, Templates(RECORD_SCHEMA))
        assert found is not None
        blocks = open_document(path).blocks
        tables = [parse_block(block, Templates(RECORD_SCHEMA)) for block in blocks]
        return found.notes, [None if one is None else exact(one.table) for one in tables]

    compiled, otherwise = both(read)
    assert compiled == otherwise
