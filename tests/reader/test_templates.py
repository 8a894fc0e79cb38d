"""Lines by template: the same columns as the general parser, or the general parser itself."""

from __future__ import annotations

import json
import math
import random
import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascan.arrays import Integers
from megascan.reader.lines import GeneralParser
from megascan.reader.templates import Templates

pytestmark = pytest.mark.usefixtures("each_way")

SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("ts", pa.float64()),
        ("pid", pa.int32()),
        ("args", pa.struct([("layer", pa.int8()), ("launch_ns", pa.int64()), ("op", pa.string())])),
    ]
)
FIELDS = ("name", "ts", "pid", "args.layer", "args.launch_ns", "args.op")


def bounds_of(lines: list[bytes]) -> Integers:
    bounds = np.cumsum([0, *(len(line) + 1 for line in lines)])
    bounds[-1] -= 1
    return bounds


def is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def rows(table: pa.Table | None) -> list[dict[str, object]] | None:
    """Rows with None for what is absent: NOT_APPLICABLE, NaN or null."""
    if table is None:
        return None
    return [
        {key: None if value == -1 or is_nan(value) else value for key, value in row.items()}
        for row in table.select(FIELDS).to_pylist()
    ]


def by_template(
    *lines: bytes, needless: re.Pattern[bytes] | None = None
) -> list[dict[str, object]] | None:
    """Rows that templates alone make of lines; None where they leave it to the general parser."""
    templates = Templates(SCHEMA, needless)
    templates._general = Refusing(SCHEMA)
    return rows(templates.table(bytearray(b"\n".join(lines)), bounds_of([*lines])))


class Refusing(GeneralParser):
    def table(self, text: bytes | bytearray, bounds: Integers) -> pa.Table | None:
        return None


def generally(*lines: bytes) -> list[dict[str, object]] | None:
    table = GeneralParser(SCHEMA).table(b"\n".join(lines), bounds_of([*lines]))
    if table is None:
        return None
    found = rows(table.flatten())
    assert found is not None
    return [
        {
            key: "" if value is None and key in ("name", "args.op") else value
            for key, value in row.items()
        }
        for row in found
    ]


def test_numbers_and_texts_of_one_shape() -> None:
    found = by_template(
        b'{"name":"mlp","ts":12.5,"pid":3,"args":{"layer":7,"op":"tp@12"}}',
        b'{"name":"mlp","ts":99.125,"pid":3,"args":{"layer":8,"op":"tp@7"}}',
        b'{"name":"mlp","ts":0.001,"pid":3,"args":{"layer":9,"op":"tp@007"}}',
    )
    assert found is not None
    assert [row["ts"] for row in found] == [12.5, 99.125, 0.001]
    assert [row["args.layer"] for row in found] == [7, 8, 9]
    assert [row["args.op"] for row in found] == ["tp@12", "tp@7", "tp@007"]
    assert {row["args.launch_ns"] for row in found} == {None}


def test_what_is_absent_null_negative_or_unknown() -> None:
    found = by_template(
        b'{"name":"a","ts":-1.5,"args":{"launch_ns":-123456789012,"more":[1,{"x":2}]}}',
        b'{"name":null,"pid":1,"args":{"layer":null}}',
        b'{"ts":5}',
    )
    assert found is not None
    assert found[0] | {"name": "a", "ts": -1.5, "args.launch_ns": -123456789012} == found[0]
    assert found[1] == dict.fromkeys(FIELDS) | {"name": "", "pid": 1, "args.op": ""}
    assert found[2]["ts"] == 5.0


@pytest.mark.parametrize(
    "line",
    [
        b'{"name":"a\\u0031","ts":1.0}',
        b'{"name":"a","ts":01.0}',
        b'{"name":"a","ts":1e3}',
        b'{"name":"a","ts":NaN}',
        b'{"name":"a","ts":"1"}',
        b'{"name":"a","pid":1.5}',
        b'{"name":"a","pid":9876543210}',
        b'{"name":"a","args":{"layer":300}}',
        b'{"name":"a","args":{"launch_ns":12345678901234567890}}',
        b'{"name":"a","ts":1.1234567890123456}',
        b'{"name":"a","ts":12345678901234567.5}',
        b'{"name":7}',
        b'{"name":"a","args":5}',
        b'{"name":"a","pid":true}',
        b"[1]",
        b"1",
        b'{"name":"a"',
    ],
)
def test_left_to_the_general_parser(line: bytes) -> None:
    plain = b'{"name":"b","ts":1.5,"pid":1}'
    assert by_template(plain) is not None
    assert by_template(plain, line) is None


def test_digits_in_other_places_are_another_shape() -> None:
    """Both lines are `{"name":"ab"}` without digits."""
    found = rows(
        Templates(SCHEMA).table(
            bytearray(b'{"name":"a1b"}\n{"name":"ab1"}\n{"name":"ab"}'),
            bounds_of([b'{"name":"a1b"}', b'{"name":"ab1"}', b'{"name":"ab"}']),
        )
    )
    assert found is not None
    assert [row["name"] for row in found] == ["a1b", "ab1", "ab"]


def test_shapes_are_learned_once_and_used_in_later_blocks() -> None:
    templates = Templates(SCHEMA)
    for number in (7, 12345678, 123456789012345678):
        line = b'{"name":"a","args":{"launch_ns":%d}}' % number
        table = templates.table(bytearray(line), bounds_of([line]))
        assert table is not None
        assert table.column("args.launch_ns").to_pylist() == [number]
    assert len(templates._shapes) == 1


def test_blank_lines_around_the_events_are_passed_over() -> None:
    line = b'{"name":"a","ts":2.5}'
    text = bytearray(b" \n" + line + b" \n " + b"\n")
    table = Templates(SCHEMA).table(text, np.array([2, 2 + len(line) + 2]))
    assert rows(table) == [dict.fromkeys(FIELDS) | {"name": "a", "ts": 2.5, "args.op": ""}]


NUMBERS = st.integers(-(10**19), 10**19) | st.floats(allow_nan=False, allow_infinity=False)
EVENTS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["mlp", "p2p", "tp@0", "layer12b3", "7", "", "é9"])
        | st.text(max_size=4),
        "ts": NUMBERS | st.none(),
        "pid": st.integers(-5, 2**31 + 5) | st.none(),
        "other": st.none() | st.integers(0, 9) | st.text("0a", max_size=3),
        "args": st.fixed_dictionaries(
            {},
            optional={
                "layer": st.integers(-130, 130) | st.floats(0, 9),
                "launch_ns": st.integers(-(2**63), 2**63 - 1),
                "op": st.text("tp@01", max_size=5),
            },
        ),
    },
)


@settings(max_examples=400, deadline=None)
@given(st.lists(EVENTS, min_size=1, max_size=6))
def test_any_events_read_as_the_general_parser_reads_them(events: list[object]) -> None:
    lines = [json.dumps(event, separators=(",", ":")).encode() for event in events]
    found = by_template(*lines)
    if found is not None:
        assert found == generally(*lines)


def test_many_lines_read_as_the_general_parser_reads_them() -> None:
    draw = random.Random(5)
    lines = [
        (
            f'{{"name":"{draw.choice(["mlp", "p2p", "all_reduce"])}",'
            f'"ts":{draw.randrange(10**9) / 1000},"pid":{draw.randrange(20_000)},'
            f'"args":{{"layer":{draw.randrange(100)},"launch_ns":{-draw.randrange(10**12)},'
            f'"op":"tp@{draw.randrange(300)}"}}}}'
        ).encode()
        for _ in range(3_000)
    ]
    assert by_template(*lines) == generally(*lines)


NEEDLESS = re.compile(rb',"host":(?:0|[1-9][0-9]*)\}\Z')
ENDING = b',"host":12}'


def test_what_most_lines_end_with_is_left_out() -> None:
    lines = [
        b'{"name":"first","pid":3}',
        b'{"name":"a","ts":1.5,"pid":7' + ENDING,
        b'{"name":"a","ts":2.25,"pid":8' + ENDING,
        b'{"name":"a","ts":3.0,"pid":9,"host":13}',
        b'{"name":"a","ts":4.0,"pid":9,"args":{"layer":2}' + ENDING,
        b'{"name":"a","ts":5.0,"pid":6}',
    ]
    assert by_template(*lines, needless=NEEDLESS) == generally(*lines)
    assert by_template(*lines[3:], needless=NEEDLESS) == generally(*lines[3:])
    assert by_template(*lines[5:], needless=NEEDLESS) == generally(*lines[5:])


@pytest.mark.parametrize(
    "damaged",
    [
        b'{"name":"a","ts":2.25,',
        b'{"name":"a","ts":2.25',
        b'{"name":"a","ts":02.25' + ENDING,
        b'{"name":"a","ts":2.25\2',
        b'{"name":"a' + ENDING,
        b"{" + ENDING,
        ENDING,
    ],
)
def test_a_damaged_line_is_no_shorter_line(damaged: bytes) -> None:
    whole = b'{"name":"a","ts":1.5' + ENDING
    assert by_template(whole, damaged, whole, needless=NEEDLESS) is None
    assert by_template(damaged, whole, needless=NEEDLESS) is None
