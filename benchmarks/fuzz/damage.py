"""What happens to files: on disks, in transfers, and in other people's scripts.

Every action takes the bytes and a source of chance and gives other bytes. Actions on values work
on any JSON text; on binary files they find few places and leave the rest to those on bytes.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from random import Random
from typing import TypeAlias

Action: TypeAlias = Callable[[bytes, Random], bytes]

_VALUE = re.compile(rb'"([A-Za-z_ ]+)" ?: ?(-?[0-9][0-9.eE+-]*|"[^"\n]*"|true|false|null|[\[{])')
_NUMBER = re.compile(rb"(?<=[:,\[ ])-?[0-9][0-9.eE+-]*")
_TOKENS = (b"}", b"{", b"[", b"]", b'"', b",", b":", b"\n", b"\\", b"NaN", b"null", b"1e999")
_NUMBERS = (
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"1e308", b"5e-324", b"-0", b"-1",
    b"0", b"1", b"1.5", b"2147483647", b"2147483648", b"-2147483649", b"4294967296",
    b"9007199254740993", b"9223372036854775807", b"9223372036854775808", b"-9223372036854775809",
    b"18446744073709551616", b"1" + b"0" * 400, b"00", b"1.", b".5", b"0x10", b"1_000",
)  # fmt: skip
_VALUES = (
    b"null", b"true", b"false", b'""', b'"text"', b'"5"', b"[]", b"[1]", b"[[0,1]]", b"{}",
    b'{"a":1}', b'"\\u0000"', b'"\\ud800"', b'"\xc3\xa4"', b'"' + b"x" * 5000 + b'"',
)  # fmt: skip
_BAD_TEXT = (b"\0", b"\0" * 40, b"\xff", b"\xc3", b"\xc0\x80", b"\xed\xa0\x80", b"\x1e", b"\x7f")
_DEPTHS = (2, 50, 1000, 20_000)


def flip_bits(data: bytes, random: Random) -> bytes:
    """One to eight bits anywhere."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8)) if changed else 0):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def cut_end(data: bytes, random: Random) -> bytes:
    """A truncated file."""
    return data[: random.randrange(len(data) + 1)]


def cut_out(data: bytes, random: Random) -> bytes:
    """A hole of up to 200 bytes."""
    at = random.randrange(len(data) + 1)
    return data[:at] + data[at + random.randrange(200) :]


def double(data: bytes, random: Random) -> bytes:
    """A piece written twice."""
    at = random.randrange(len(data) + 1)
    end = at + random.choice((1, 20, 200, 2000, len(data)))
    return data[:end] + data[at:end] + data[end:]


def put_in(data: bytes, random: Random) -> bytes:
    """A token, bytes that are no text, or random bytes."""
    at = random.randrange(len(data) + 1)
    piece = random.choice((*_TOKENS, *_BAD_TEXT, random.randbytes(random.randrange(1, 9))))
    return data[:at] + piece + data[at:]


def overwrite(data: bytes, random: Random) -> bytes:
    """A block of zeros or of noise, as disks leave them."""
    at, length = random.randrange(len(data) + 1), random.choice((1, 16, 512))
    block = bytes(length) if random.random() < 0.5 else random.randbytes(length)
    return data[:at] + block + data[at + length :]


def move_lines(data: bytes, random: Random) -> bytes:
    """Lines swapped, doubled or lost."""
    lines = data.split(b"\n")
    one, other = random.randrange(len(lines)), random.randrange(len(lines))
    action = random.choice(("swap", "double", "lose", "shuffle"))
    if action == "swap":
        lines[one], lines[other] = lines[other], lines[one]
    elif action == "double":
        lines.insert(other, lines[one])
    elif action == "lose":
        del lines[min(one, other) : max(one, other)]
    else:
        part = lines[min(one, other) : max(one, other)]
        random.shuffle(part)
        lines[min(one, other) : max(one, other)] = part
    return b"\n".join(lines)


def change_line_ends(data: bytes, random: Random) -> bytes:
    """Line ends of other systems on some or all lines, blank lines, a byte order mark."""
    share = random.choice((0.1, 0.5, 1.0))
    ending = random.choice((b"\r\n", b"\r", b"\n\n", b"\n \t\n", b" \n", b"", b"\x0b"))
    lines = data.split(b"\n")
    ends = [ending if random.random() < share else b"\n" for _ in lines]
    joined = b"".join(line + end for line, end in zip(lines, ends, strict=True))
    return b"\xef\xbb\xbf" + joined if random.random() < 0.2 else joined


def change_number(data: bytes, random: Random) -> bytes:
    """A number replaced by one that is too large, negative, or none."""
    return _replaced(data, random, _NUMBER, 0, random.choice(_NUMBERS))


def change_value(data: bytes, random: Random) -> bytes:
    """A field's value of another type."""
    return _replaced(data, random, _VALUE, 2, random.choice((*_VALUES, *_NUMBERS)))


def change_key(data: bytes, random: Random) -> bytes:
    """A field renamed, or one field twice."""
    keys = (b"", b"x", b"name", b"args", b"ts", b"dur", b"pid", b"rank", b"run_id", b"iteration")
    return _replaced(data, random, _VALUE, 1, random.choice(keys))


def nest_deeply(data: bytes, random: Random) -> bytes:
    """A value within many brackets."""
    depth = random.choice(_DEPTHS)
    opening, closing = random.choice(((b"[", b"]"), (b'{"a":', b"}")))
    closing = closing if random.random() < 0.7 else b""
    return _replaced(data, random, _VALUE, 2, opening * depth + b"1" + closing * depth)


def _replaced(
    data: bytes, random: Random, pattern: re.Pattern[bytes], group: int, by: bytes
) -> bytes:
    """`by` in the place of a match that is chosen from a random place on."""
    found = pattern.search(data, random.randrange(len(data) + 1)) or pattern.search(data)
    if found is None:
        return data
    return data[: found.start(group)] + by + data[found.end(group) :]


ACTIONS: tuple[Action, ...] = (
    flip_bits,
    cut_end,
    cut_out,
    double,
    put_in,
    overwrite,
    move_lines,
    change_line_ends,
    change_number,
    change_value,
    change_value,
    change_key,
    nest_deeply,
)


def damaged(data: bytes, gzipped: bool, random: Random) -> bytes:
    """One to three kinds of damage; to a gzipped file either within or to what it holds."""
    inside = gzipped and random.random() < 0.5
    if inside:
        data = gzip.decompress(data)
    for _ in range(random.choice((1, 1, 2, 3))):
        data = random.choice(ACTIONS)(data, random)
    return gzip.compress(data, 1, mtime=0) if inside else data
