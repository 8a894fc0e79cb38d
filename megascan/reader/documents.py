"""Indented JSON arrays, as other tools write them, turned into one event a line, block by block.

Both the original MegaScan and the PyTorch profiler indent the records of their array by two:

    [                             {"schemaVersion": 1, …,
      {                             "traceEvents": [
        "name": …                   {
      },                              "ph": "X", …
      {                             },

A line end cannot stand inside a JSON string, so a bracket on a line of its own separates
records and every other line end is blank. What is not laid out so is read as a whole document.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson

from megascan.errors import InputError
from megascan.reader.bytestream import Block, read_all, read_blocks

_FIRST_RECORD = re.compile(
    rb"(?:\A\s*|\"traceEvents\"\s*:\s*)(?P<array>\[)\s*\n(?P<indent>[ \t]*)\{[ \t]*\n"
)
_MARK = b"\x1e"
"""A control character: cannot stand in valid JSON except as an escape."""
_MARKED_LINES = bytes.maketrans(b"\n" + _MARK, b" \n")


@dataclass(frozen=True)
class Document:
    """What stands before the array of events, and the events as lines, block by block."""

    preamble: bytes
    blocks: Iterator[Block]


def open_document(path: Path) -> Document:
    """Events of a JSON file of another tool.

    A block's `first_line` counts records from 1; `torn` marks a file whose array does not close.
    Raises InputError for files that cannot be read, or that are
    neither laid out as above nor a whole JSON document.
    """
    source = read_blocks(path)
    first = next(source)
    layout = _FIRST_RECORD.search(first.text)
    if layout is None:
        return _whole_document(path)
    start = layout.end("indent")
    head = bytes(first.text[: layout.start("array")])
    separator = b"\n" + layout["indent"] + b"}"
    return Document(head, _separated(bytes(first.text[start:]), source, separator))


def _separated(text: bytes, source: Iterator[Block], closing: bytes) -> Iterator[Block]:
    """Cut the stream behind records' closing brackets; blank line ends within records."""
    opening = closing[:-1] + b"{"
    record = 1
    for block in source:
        cut = text.rfind(closing + b"," + opening)
        if cut >= 0:
            end = cut + len(closing)
            lines = _one_a_line(text[:end], closing, opening)
            yield Block(lines, record)
            record += lines.count(b"\n") + 1
            text = text[end + len(opening) :]
        text = b"\n".join((text, block.text))
    last = text.rfind(closing)
    end = last + len(closing) if last >= 0 else 0
    torn = not text[end:].lstrip().startswith(b"]")
    yield Block(_one_a_line(text[:end], closing, opening), record, torn)


def _one_a_line(text: bytes, closing: bytes, opening: bytes) -> bytearray:
    marked = text.replace(closing + b"," + opening, b"}" + _MARK + b"{")
    return bytearray(marked).translate(_MARKED_LINES)


def _whole_document(path: Path) -> Document:
    """A file in another layout (compact, other indentation): parsed as one and laid out anew."""
    text, torn = read_all(path)
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        cut = "is cut off" if torn or "end of data" in str(error) else "is not valid JSON"
        raise InputError(
            f"{path} {cut} ({error}) and its events do not stand on lines of their own, so nothing "
            "of it can be read; restore the file"
        ) from error
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise InputError(f"{path} holds JSON without an array of events; restore the file")
    rest = dict(document) if isinstance(document, dict) else {}
    rest["traceEvents"] = []
    try:
        lines = bytearray(b"\n".join(map(orjson.dumps, events)))
        preamble = orjson.dumps(rest).removesuffix(b"[]}")
    except orjson.JSONEncodeError as error:  # for what nests too deep
        raise InputError(f"{path} holds a damaged event ({error}); restore the file") from error
    return Document(preamble, iter([Block(lines, 1)]))
