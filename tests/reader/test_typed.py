"""Records that came from files hold what their classes declare."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest

from megascan.errors import InputError
from megascan.header import RankHeader, Trainer, WindowRecord

if TYPE_CHECKING:
    from conftest import Folder


def with_field(record: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    record = copy.deepcopy(record)  # of what is there; `value` may nest too deep for it
    *outer, last = path.split(".")
    inner = record
    for name in outer:
        inner = inner[name]
    inner[last] = value
    return record


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("rank", "1", "rank is '1', expected int"),
        ("rank", True, "rank is True, expected int"),
        ("run_id", ["a"], r"run_id is \['a'\], expected str"),
        ("host", None, "host is None, expected str"),
        ("device.index", 1.5, "device.index is 1.5, expected int"),
        ("clock.origin_unix_ns", 1 << 70, "origin_unix_ns is 118059"),
        ("trace.budget_ratio", float("inf"), "trace.budget_ratio is inf, expected float"),
        ("trace.compress", 1, "trace.compress is 1, expected bool"),
        ("trace.compress", 0, "trace.compress is 0, expected bool"),  # equal to what is right
        ("layout.vpp", True, "vpp is True, expected int"),
        ("versions", {"torch": 2}, r"versions\['torch'\] is 2, expected str"),
        ("layout", [1], r"layout is \[1\], expected sizes by axis"),
        ("layout.dp", 1 << 40, "layout's dp is 1099511627776, expected a size"),
        ("layout.order", 3, "damaged header"),
        ("groups", {"tp@0": "0-1-2"}, "expected a text like 0-7,16-23"),
    ],
)
def test_header(folder: Folder, path: str, value: object, said: str) -> None:
    record = folder.header(0).to_json()
    assert RankHeader.from_json(record, "here") == folder.header(0)
    with pytest.raises(InputError, match=said) as caught:
        RankHeader.from_json(with_field(record, path, value), "here")
    assert str(caught.value).startswith("here: ")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("window", "0", "window is '0', expected int"),
        ("counters", {"power": "high"}, r"counters\['power'\] is 'high', expected float"),
        ("timings", [[1, 2]], r"timings holds 2 values, expected 3"),
        ("timings", [[1, 2, 3.5]], "timings is 3.5, expected int"),
        ("tokens", [4096], "expected the fewest and the most"),
        ("tokens", [4096, 2048], "expected the fewest and the most"),
        ("tokens", [0, 4096], "expected the fewest and the most"),
        ("tokens", [4096.5, 5000], "tokens is 4096.5, expected int"),
        ("kinds", {"5f1c09ab": [1.5]}, r"kinds\['5f1c09ab'\] is 1.5, expected int"),
    ],
)
def test_window(name: str, value: object, said: str) -> None:
    record = WindowRecord(
        run_id="r", window=0, first_iteration=1, last_iteration=2, num_spans=3,
        counters={"power": 1}, timings=((1, 0, 5),), tokens=(2048, 4096),
    )  # fmt: skip
    assert WindowRecord.from_json(record.to_json(), "here") == record
    with pytest.raises(InputError, match=said):
        WindowRecord.from_json({**record.to_json(), name: value}, "here")


def test_a_name_of_several_lines_stays_in_one(folder: Folder) -> None:
    record = folder.header(0).to_json()
    with pytest.raises(InputError) as caught:
        RankHeader.from_json(record | {"versions": {"a\nb": 1}}, "here")
    assert "\n" not in str(caught.value)


def test_what_nests_too_deep_is_damage(folder: Folder) -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    for path in ("rank", "trace.granularity", "groups", "layout", "clock"):
        with pytest.raises(InputError, match="damaged header"):
            RankHeader.from_json(with_field(folder.header(0).to_json(), path, deep), "here")


def test_a_name_of_any_length_leaves_the_sentence_readable() -> None:
    error = InputError(f"run {'x' * 5000} is not there; choose another with --run")
    assert len(str(error)) < 1000
    assert str(error).endswith("choose another with --run")


@pytest.mark.parametrize(
    ("written", "read"),
    [("megatron", Trainer.MEGATRON), ("torch", Trainer.TORCH), ("a later one", Trainer.UNKNOWN)],
)
def test_who_trains_is_told_where_it_is_known(folder: Folder, written: str, read: Trainer) -> None:
    record = folder.header(0).to_json()
    assert "trainer" not in record  # older readers know no such field
    told = RankHeader.from_json({**record, "trainer": written, "of_a_later_one": 1}, "here")
    assert told.trainer is read
    assert ("trainer" in told.to_json()) == bool(read)
    assert RankHeader.from_json(told.to_json(), "here") == told
