"""A rank file of many gzip members reads as the plain file, block by block and not by member."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from megascan.errors import InputError
from megascan.reader.lines import BLOCK_BYTES, read_blocks
from megascan.reader.rank_files import read_rank_file
from megascan.reader.segments import Segment

if TYPE_CHECKING:
    from conftest import Folder

NUM_WINDOWS = 40


@pytest.fixture
def plain(folder: Folder) -> Path:
    return folder.write_rank(0, windows=NUM_WINDOWS)


def packed(plain: Path, texts: Sequence[bytes]) -> Path:
    """The texts beside the plain file, a member each."""
    path = plain.with_name(plain.name + ".gz")
    path.write_bytes(b"".join(members(texts)))
    return path


def members(texts: Sequence[bytes]) -> list[bytes]:
    return [gzip.compress(text, mtime=0) for text in texts]


def appends(text: bytes) -> list[bytes]:
    """A text in the pieces in which a tracer writes it: header, windows, closing bracket."""
    lines = text.split(b"\n")
    cuts = [place for place, line in enumerate(lines) if b"megascan_window" in line]
    bounds = [0, 2, *(place + 1 for place in cuts), len(lines)]
    parts = [b"\n".join(lines[low:high]) for low, high in pairwise(bounds)]
    return [*(part + b"\n" for part in parts[:-1]), parts[-1]]


def every(num_bytes: int, text: bytes) -> list[bytes]:
    return [text[at : at + num_bytes] for at in range(0, len(text), num_bytes)]


def told(segments: Sequence[Segment]) -> list[tuple[object, ...]]:
    return [
        (one.header, one.windows, one.spans.to_pylist(), one.num_unfinished_spans, one.notes)
        for one in segments
    ]


def refusal(path: Path) -> str:
    """The words with which a file is refused, without the file's suffix."""
    with pytest.raises(InputError) as raised:
        read_rank_file(path)
    return str(raised.value).replace(".json.gz", ".json")


def damaged(member: bytes) -> bytes:
    """A member with another checksum."""
    changed = bytearray(member)
    changed[-6] ^= 1
    return bytes(changed)


@pytest.mark.parametrize("block_bytes", [97, 3000, BLOCK_BYTES])
@pytest.mark.parametrize("num_bytes", [13, 250, 5000, 1 << 30])
def test_members_of_any_size_read_as_the_plain_file(
    folder: Folder, num_bytes: int, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members end inside lines, numbers and objects; one holds all, many times a block."""
    plain = folder.write_rank(0, windows=8)
    expected = told(read_rank_file(plain))
    monkeypatch.setattr("megascan.reader.lines.BLOCK_BYTES", block_bytes)
    monkeypatch.setattr("megascan.reader.lines._STEP_BYTES", 61)
    path = packed(plain, every(num_bytes, plain.read_bytes()))
    assert told(read_rank_file(path)) == expected
    assert told(read_rank_file(path, num_threads=2)) == expected


def test_many_members_are_one_block(plain: Path) -> None:
    text = plain.read_bytes()
    for texts in (appends(text), every(5, text), [b"", *appends(text), b"", b""]):
        blocks = [bytes(block.text) for block in read_blocks(packed(plain, texts)) if block.text]
        assert blocks == [text.removesuffix(b"\n")]


@pytest.mark.parametrize("num_bytes", [7, 300, 1 << 30])
def test_blocks_are_no_larger_than_those_of_the_plain_file(
    plain: Path, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = plain.read_bytes()
    monkeypatch.setattr("megascan.reader.lines.BLOCK_BYTES", 4096)
    path = packed(plain, every(num_bytes, text))
    found = [(block.first_line, block.text) for block in read_blocks(path)]
    assert found == [(block.first_line, block.text) for block in read_blocks(plain)]
    assert max(len(block) for _, block in found) < 4096 + max(map(len, text.split(b"\n")))


def with_damaged_line(plain: Path, place: int) -> list[bytes]:
    """The appends of a plain file, in which a line of one of them is now no JSON."""
    texts = appends(plain.read_bytes())
    texts[place] = texts[place].replace(b'"ph":"X"', b'"ph":X"', 1)
    plain.write_bytes(b"".join(texts))
    return texts


@pytest.mark.parametrize("place", [1, 17, NUM_WINDOWS])
def test_a_damaged_line_is_named_as_in_the_plain_file(plain: Path, place: int) -> None:
    texts = with_damaged_line(plain, place)
    assert "is not a JSON event" in refusal(plain)
    assert refusal(packed(plain, texts)) == refusal(plain)


@pytest.mark.parametrize("place", [0, 1, 20, NUM_WINDOWS, NUM_WINDOWS + 1])
def test_a_damaged_member_is_refused_wherever_it_stands(plain: Path, place: int) -> None:
    parts = members(appends(plain.read_bytes()))
    parts[place] = damaged(parts[place])
    path = plain.with_name(plain.name + ".gz")
    path.write_bytes(b"".join(parts))
    assert "compressed data is damaged" in refusal(path)


def test_what_stands_before_a_damaged_member_comes_before_the_error(plain: Path) -> None:
    texts = appends(plain.read_bytes())
    parts = members(texts)
    path = plain.with_name(plain.name + ".gz")
    path.write_bytes(b"".join([*parts[:20], damaged(parts[20]), *parts[21:]]))
    source = read_blocks(path)
    assert bytes(next(source).text) == b"".join(texts[:20]).removesuffix(b"\n")
    with pytest.raises(InputError, match="compressed data is damaged"):
        next(source)


def test_of_two_damages_the_first_is_named(plain: Path) -> None:
    texts = with_damaged_line(plain, 10)
    parts = members(texts)
    path = plain.with_name(plain.name + ".gz")
    path.write_bytes(b"".join([*parts[:20], damaged(parts[20])]))
    assert refusal(path) == refusal(plain)
    path.write_bytes(b"".join([*parts[:5], damaged(parts[5]), *parts[6:]]))
    assert "compressed data is damaged" in refusal(path)


def test_a_file_cut_off_keeps_the_windows_whose_members_are_whole(plain: Path) -> None:
    parts = members(appends(plain.read_bytes()))
    path = plain.with_name(plain.name + ".gz")
    expected = told(read_rank_file(plain))[0]
    for place in (3, 20, NUM_WINDOWS):
        path.write_bytes(b"".join(parts[: place + 1])[:-9])  # inside the last one's checksum
        (segment,) = read_rank_file(path)
        assert segment.windows == expected[1][:place]
        assert segment.spans.to_pylist() == expected[2][: 2 * place]
        assert segment.notes == (f"rank 0: {path.name} is cut off inside its compressed data",)
        path.write_bytes(b"".join(parts[: place + 1])[: -len(parts[place]) + 12])
        (segment,) = read_rank_file(path)
        assert segment.windows == expected[1][: place - 1]
        assert segment.notes[-1] == f"rank 0: {path.name} is cut off inside its compressed data"
