"""The compiled part of the reader: the same columns to the bit as by numpy, or none."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megascan.arrays import Integers
from megascan.reader import lines, read_trace, templates
from megascan.reader.lines import GeneralParser
from megascan.reader.templates import Scanner, Templates

from .conftest import ROOT, build_hook, use

SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("ts", pa.float64()),
        ("pid", pa.int32()),
        ("args", pa.struct([("layer", pa.int8()), ("launch_ns", pa.int64()), ("op", pa.string())])),
    ]
)
SPAN = b'{"name":"mlp","ts":12.5,"pid":3,"args":{"layer":7,"launch_ns":-250,"op":"tp@16"}}'


class Unfit(GeneralParser):
    """Stands for the general parser: reads nothing, so that what is left to it is seen."""

    def table(self, text: bytes | bytearray, bounds: Integers) -> pa.Table | None:
        return None


class Reader:
    """Reads blocks by templates alone; None for blocks that they leave to the general parser."""

    def __init__(self, way: ctypes.CDLL | None, schema: pa.Schema = SCHEMA) -> None:
        self._way, self._templates = way, Templates(schema)
        self._templates._general = Unfit(schema)

    def __call__(self, block: Sequence[bytes]) -> pa.Table | None:
        bounds = np.cumsum([0, *(len(line) + 1 for line in block)])
        bounds[-1] -= 1
        with pytest.MonkeyPatch.context() as patch:
            use(self._way, patch)
            return self._templates.table(bytearray(b"\n".join(block)), bounds)


def content(table: pa.Table | None) -> object:
    """All bytes that matter of a table: types, numbers, codes and dictionaries in their order."""
    if table is None:
        return None
    found = []
    for column in table.combine_chunks().columns:
        (chunk,) = column.chunks
        if pa.types.is_dictionary(chunk.type):
            found.append((chunk.indices.to_numpy().tobytes(), chunk.dictionary.to_pylist()))
        else:
            found.append(chunk.to_numpy().tobytes())
    return table.schema, found


def assert_alike(library: ctypes.CDLL, *blocks: Sequence[bytes]) -> list[pa.Table | None]:
    """Read blocks one after the other by both ways, compare, and return the tables."""
    compiled, by_numpy = Reader(library), Reader(None)
    tables = [compiled(block) for block in blocks]
    for block, table in zip(blocks, tables, strict=True):
        assert content(table) == content(by_numpy(block)), block
    return tables


def test_a_span_is_read(library: ctypes.CDLL) -> None:
    (table,) = assert_alike(library, [SPAN])
    assert table is not None
    assert table.to_pylist() == [
        {
            **{"name": "mlp", "ts": 12.5, "pid": 3},
            **{"args.layer": 7, "args.launch_ns": -250, "args.op": "tp@16"},
        }
    ]


@pytest.mark.parametrize(
    ("line", "fits"),
    [
        (b'{"name":"a","ts":0.0}', True),
        (b'{"name":"a","ts":-0.5}', True),
        (b'{"name":"a","ts":-0.0}', True),
        (b'{"name":"a","ts":5}', True),
        (b'{"name":"a","ts":-5}', True),
        (b'{"name":"a","ts":0.100}', True),
        (b'{"name":"a","ts":9007199252.740991}', True),
        (b'{"name":"a","ts":9007199253.740991}', False),
        (b'{"name":"a","ts":9007199254740.993}', False),  # more than a double holds exactly
        (b'{"name":"a","ts":1.000000000000001}', True),
        (b'{"name":"a","ts":1.0000000000000001}', False),
        (b'{"name":"a","ts":1e3}', False),
        (b'{"name":"a","ts":1.5E-3}', False),
        (b'{"name":"a","ts":01.5}', False),
        (b'{"name":"a","pid":007}', False),
        (b'{"name":"a","other":007}', False),
        (b'{"name":"a","pid":2147483647}', True),
        (b'{"name":"a","pid":2147483648}', False),
        (b'{"name":"a","pid":-2147483648}', True),
        (b'{"name":"a","pid":-2147483649}', False),
        (b'{"name":"a","pid":1.0}', False),
        (b'{"name":"a","args":{"layer":127}}', True),
        (b'{"name":"a","args":{"layer":128}}', False),
        (b'{"name":"a","args":{"layer":-128}}', True),
        (b'{"name":"a","args":{"launch_ns":999999999999999999}}', True),
        (b'{"name":"a","args":{"launch_ns":-999999999999999999}}', True),
        (b'{"name":"a","args":{"launch_ns":1000000000000000000}}', False),
        (b'{"name":"a","other":123456789012345678901234567890}', True),
        (b'{"name":"a","pid":null,"args":null}', True),
        (b'{"name":7}', False),
        (b'{"name":"007","args":{"op":"1a02b3"}}', True),
        (b'{"name":"a1234567890123456789"}', False),  # a text of 19 digits
        ('{"name":"ä7ö","args":{"op":"→12"}}'.encode(), True),
        (b'{"name":"a\\n7"}', False),
        (b'{"name":"a\\u0037"}', False),
        (b'{"name":"a","name":"b5"}', True),
        (b'{"name":"a"', False),
        (b'{"name":"a","pid":}', False),
        (b'{"name":"a","pid":5 , "ts" : 7.25 }', True),
        (b"{}", True),
        (b"null", False),
        (b"[7]", False),
        (b'{"a":7}', False),  # digits where the word of eight bytes would begin before the block
    ],
)
def test_lines_of_any_shape_are_read_alike(library: ctypes.CDLL, line: bytes, fits: bool) -> None:
    alone, among_others, twice = assert_alike(
        library, [line], [SPAN, line, SPAN], [SPAN, SPAN.replace(b"7", b"8"), line, line]
    )
    assert (alone is not None) == fits
    assert twice is None or among_others is not None


def test_texts_are_numbered_in_the_order_of_numpy(library: ctypes.CDLL) -> None:
    ops = [b"tp@3", b"dp", b"tp@12", b"tp@3", b"pp@3", b"", b"tp@03", b"dp"]
    block = [b'{"name":"a","args":{"op":"%s"}}' % op for op in ops]
    (table,) = assert_alike(library, block)
    assert table is not None
    assert table.column("args.op").to_pylist() == [op.decode() for op in ops]


def test_lines_of_a_kind_are_learned_once(library: ctypes.CDLL) -> None:
    reader = Reader(library)
    for number in (7, 12345678):
        reader([SPAN.replace(b"250", b"%d" % number), SPAN])
    (scanner,) = reader._templates._scanners
    assert len(scanner._shapes) == 2  # the block's last line ends otherwise


def unlike(first: int, last: int) -> list[bytes]:
    """Lines of so many kinds."""
    letters = [f"{number:x}".translate(str.maketrans("0123456789", "ghijklmnop")) for number in
               range(first, last)]  # fmt: skip
    return [b'{"name":"%s"}' % each.encode() for each in letters]


def test_a_block_has_no_more_kinds_than_numpy_takes(library: ctypes.CDLL) -> None:
    most = templates._MOST_SHAPES
    fits, too_many, again = assert_alike(
        library, unlike(0, most), unlike(0, most + 1), unlike(most, 2 * most)
    )
    assert fits is not None and too_many is None and again is not None


def test_a_scanner_without_room_is_replaced(library: ctypes.CDLL) -> None:
    reader, most = Reader(library), templates._MOST_SHAPES
    assert reader(unlike(0, most)) is not None
    assert len(reader._templates._scanners) == 1
    assert reader(unlike(most, most + 9)) is not None
    assert reader._templates._scanners == []
    assert reader(unlike(0, 9)) is not None


letters = st.text(st.sampled_from("aB @_-ä→"), max_size=3)
whole = st.integers(-(2**63), 2**63 - 1) | st.integers(-300, 300)
texts = st.lists(letters | st.integers(0, 10**20).map(str) | st.just("0")).map("".join)
number_texts = st.one_of(
    whole.map(str),
    st.tuples(st.integers(-(10**13), 10**13), st.text("0123456789", min_size=1, max_size=17)).map(
        lambda parts: f"{parts[0]}.{parts[1]}"
    ),
    st.sampled_from(["null", "1e5", "-0", "00", "0.0", "-0.000", "1.", ".5", "-", "--1"]),
)
fields = st.fixed_dictionaries(
    {"name": texts.map(lambda text: f'"{text}"')},
    optional={
        "ts": number_texts,
        "pid": number_texts,
        "layer": number_texts,
        "launch_ns": number_texts,
        "op": texts.map(lambda text: f'"{text}"'),
        "other": number_texts | texts.map(lambda text: f'"{text}"'),
    },
)


def line_of(values: dict[str, str]) -> bytes:
    top = [f'"{key}":{value}' for key, value in values.items() if key in ("name", "ts", "pid")]
    args = [f'"{key}":{value}' for key, value in values.items() if key not in ("name", "ts", "pid")]
    return ("{" + ",".join([*top, '"args":{' + ",".join(args) + "}"]) + "}").encode()


@given(st.lists(st.lists(fields.map(line_of), min_size=1, max_size=6), min_size=1, max_size=3))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_lines_are_read_alike(library: ctypes.CDLL, blocks: list[list[bytes]]) -> None:
    assert_alike(library, *blocks)


def damaged(line: bytes, chance: random.Random) -> bytes:
    """A line with bytes changed, put in or lost."""
    changed = bytearray(line)
    for _ in range(chance.randrange(4)):
        at = chance.randrange(len(changed) + 1)
        kind = chance.randrange(4)
        if kind == 0:
            changed[at : at + 1] = bytes([chance.randrange(1, 256)])
        elif kind == 1:
            changed[at:at] = bytes(chance.choices(b'0123456789.-e"{},:\1\2\\ ', k=12))
        elif kind == 2:
            changed[at:at] = b"%d" % 10 ** chance.randrange(25)
        else:
            del changed[at : at + chance.randrange(1, 9)]
    return bytes(changed.replace(b"\n", b"").replace(b"\0", b""))


def test_damaged_lines_are_read_alike(library: ctypes.CDLL) -> None:
    chance, num_fit = random.Random(5), 0
    compiled, by_numpy = Reader(library), Reader(None)
    for _ in range(600):
        block = [SPAN.replace(b"16", b"%d" % chance.randrange(99)) for _ in range(6)]
        block[chance.randrange(6)] = damaged(SPAN, chance) or b"{}"
        table = compiled(block)
        num_fit += table is not None
        assert content(table) == content(by_numpy(block)), block
    assert 100 < num_fit < 500  # both happen


def assert_split_alike(library: ctypes.CDLL, text: bytes) -> range:
    """Blank what stands between events by both ways, compare, and return the lines that remain."""
    found = []
    for way in (library, None):
        with pytest.MonkeyPatch.context() as patch:
            use(way, patch)
            blanked = bytearray(text)
            rows, bounds = lines._blank_separators(blanked)
            found.append((bytes(blanked), rows, bounds.tolist()))
    assert found[0] == found[1], text
    return found[0][1]


@pytest.mark.parametrize("opening", [b"", b"[\n", b" [ \n", b"[,\n", b"\n"])
@pytest.mark.parametrize("closing", [b"", b"\n]", b"\n]\n", b"\n]\n\n", b",\n]", b",", b"\n"])
def test_lines_are_split_alike(library: ctypes.CDLL, opening: bytes, closing: bytes) -> None:
    for between in (b",\n", b"\n", b" ,\n", b"  \n", b",\r\n", b",\n\n"):
        for line in (SPAN, b"{}", b"x", b"{", b'{"name":"a"},{"name":"b"}'):
            text = opening + between.join([line, SPAN, line]) + closing
            rows = assert_split_alike(library, text)
            is_clean = opening in (b"", b"[\n") and closing in (b"", b"\n]", b",\n]", b",")
            if line == SPAN and is_clean and between in (b",\n", b"\n"):
                assert len(rows) == 3


def test_texts_of_very_short_lines_are_split_alike(library: ctypes.CDLL) -> None:
    assert len(assert_split_alike(library, b"{}\n" * 999 + b"{}")) == 1000


def test_a_job_is_read_alike(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = "simulate --tp 2 --pp 2 --dp 2 --iterations 12 -o job"
    subprocess.run([sys.executable, "-m", "megascan", *words.split()], cwd=tmp_path, check=True)
    calls, columns = [], Scanner.columns

    def counted(self: Scanner, *arguments: object) -> list[pa.Array]:
        calls.append(1)
        return columns(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Scanner, "columns", counted)
    found = []
    for way in (library, None):
        use(way, monkeypatch)
        found.append(content(read_trace(tmp_path / "job").spans.unify_dictionaries()))
    assert calls and found[0] == found[1]


def test_threads_may_share_templates(library: ctypes.CDLL) -> None:
    reader = Reader(library)
    blocks = [unlike(first, first + 40) * 20 for first in range(0, 320, 40)]
    expected = [content(Reader(None)(block)) for block in blocks]
    bounds = [np.cumsum([0, *(len(line) + 1 for line in block)]) for block in blocks]
    found: dict[int, object] = {}

    def read(number: int) -> None:
        for _ in range(5):
            text = bytearray(b"\n".join(blocks[number]) + b"\n")
            found[number] = content(reader._templates.table(text, bounds[number]))

    with pytest.MonkeyPatch.context() as patch:
        use(library, patch)
        threads = [threading.Thread(target=read, args=(number,)) for number in range(len(blocks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [found[number] for number in range(len(blocks))] == expected


def test_a_library_that_is_not_there_is_none(tmp_path: Path) -> None:
    assert lines.loaded(tmp_path / "none.so", lines.SOURCE) is None
    (tmp_path / "text.so").write_text("no library")
    assert lines.loaded(tmp_path / "text.so", lines.SOURCE) is None


def test_a_library_of_another_source_is_none(library: ctypes.CDLL, tmp_path: Path) -> None:
    other = tmp_path / "lines.c"
    other.write_bytes(lines.SOURCE.read_bytes() + b"\n")
    assert lines.loaded(Path(library._name), lines.SOURCE) is not None
    assert lines.loaded(Path(library._name), other) is None
    assert lines.loaded(Path(library._name), tmp_path / "gone.c") is None


def test_the_switch_and_nothing_else_turns_it_off(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "LIBRARY", Path(library._name))
    for value, is_used in (("0", False), ("1", True), ("", True)):
        monkeypatch.setenv(lines.SWITCH, value)
        assert (lines.compiled.__wrapped__() is not None) == is_used
    monkeypatch.delenv(lines.SWITCH)
    assert lines.compiled.__wrapped__() is not None


def test_building_says_why_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -x")
    assert "no-such-compiler" in build_hook().build(tmp_path)
    monkeypatch.setenv("CC", f"{sys.executable} -c 'import sys; sys.exit(\"broken\")'")
    assert build_hook().build(tmp_path).endswith("broken")
    assert list(tmp_path.iterdir()) == []


HOSTILE = """
    import random
    import numpy as np
    from pathlib import Path
    from megascan.reader import lines, templates
    from tests.reader.test_compiled import SCHEMA, SPAN, damaged

    library = lines.loaded(Path({path!r}), lines.SOURCE)
    assert library is not None
    lines.compiled = templates.compiled = lambda: library
    chance, reader = random.Random(7), templates.Templates(SCHEMA)
    for number in range(400):
        size = chance.randrange(1, 60)
        block = [damaged(SPAN, chance) if number % 2 else chance.randbytes(size) for _ in range(9)]
        text = bytearray(b"\\n".join(block))
        lines._blank_separators(text)
        bounds = np.cumsum([0, *(len(line) + 1 for line in block)])
        bounds[-1] -= 1
        if number % 3 == 0:  # bounds that are wrong
            bounds = np.sort(np.array(chance.choices(range(-9, len(text) + 9), k=10)))
        try:
            reader._scanned(library, text, bounds, text, bounds)
        except (templates.UnfitError, ValueError):
            pass
    print("read")
"""


def test_hostile_bytes_are_read_within_their_bounds(tmp_path: Path) -> None:
    hook = build_hook()
    sanitized = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")
    if hook.build(tmp_path, (*hook.FLAGS, *sanitized)):
        pytest.skip("no C compiler with sanitizers")
    found = [
        subprocess.run(
            [os.environ.get("CC", "cc"), f"-print-file-name=lib{name}.so"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for name in ("asan", "ubsan")
    ]
    if not all(map(os.path.isabs, found)):
        pytest.skip("the sanitizers' libraries cannot be loaded before Python")
    code = textwrap.dedent(HOSTILE).format(path=str(tmp_path / hook.LIBRARY))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONMALLOC": "malloc",
            "LD_PRELOAD": " ".join(found),
            "ASAN_OPTIONS": "detect_leaks=0",
        },
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "read\n"), done.stderr[-4000:]
