"""Whether a record that came from a file holds what its class declares.

A dataclass takes anything; one that is filled from JSON is checked here, field by field, before
arithmetic meets a text. Known are numbers, texts, enums, other dataclasses, tuples and mappings.
"""

from __future__ import annotations

import math
import reprlib
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache, partial
from typing import TypeAlias, TypeVar, get_args, get_origin, get_type_hints

Record = TypeVar("Record")
Check: TypeAlias = Callable[[object, str], None]
"""Takes a value and the path that names it; raises TypeError."""

_LARGEST = 1 << 63


def shown(value: object) -> str:
    """A value from a file for a message: short, and however deep it nests."""
    return reprlib.repr(value)[:40]


def checked(record: Record) -> Record:
    """The record itself. Raises TypeError, naming the field, for a value of another type.

    Whole numbers must fit into 64 bits and others be finite; a float field takes whole numbers.
    """
    _check_fields(record, "")
    return record


def _check_fields(record: object, path: str) -> None:
    for name, check in _checks_of(type(record)):  # type: ignore[arg-type]  # types are hashable
        check(getattr(record, name), f"{path}{name}")


@lru_cache(maxsize=64)
def _checks_of(record_type: type) -> tuple[tuple[str, Check], ...]:
    hints = get_type_hints(record_type)
    return tuple((field.name, _check_of(hints[field.name])) for field in fields(record_type))


@lru_cache(maxsize=256)
def _check_of(kind: object) -> Check:
    """What a value of a declared type must pass."""
    arguments = get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        return partial(_check_record, kind)
    if get_origin(kind) is tuple and arguments[-1] is Ellipsis:
        return partial(_check_items, _check_of(arguments[0]))
    if get_origin(kind) is tuple:
        return partial(_check_places, tuple(map(_check_of, arguments)))
    if get_origin(kind) is Mapping:
        return partial(_check_mapping, _check_of(arguments[0]), _check_of(arguments[1]))
    return partial(_check_plain, kind)


def _check_record(kind: type, value: object, path: str) -> None:
    if not isinstance(value, kind):
        raise _misfit(value, kind, path)
    _check_fields(value, f"{path}.")


def _check_items(check: Check, value: object, path: str) -> None:
    if not isinstance(value, tuple):
        raise _misfit(value, tuple, path)
    for item in value:
        check(item, path)


def _check_places(checks: tuple[Check, ...], value: object, path: str) -> None:
    if not isinstance(value, tuple):
        raise _misfit(value, tuple, path)
    if len(value) != len(checks):
        raise TypeError(f"{path} holds {len(value)} values, expected {len(checks)}")
    for item, check in zip(value, checks, strict=True):
        check(item, path)


def _check_mapping(check_key: Check, check_value: Check, value: object, path: str) -> None:
    if not isinstance(value, Mapping):
        raise _misfit(value, Mapping, path)
    for key, item in value.items():
        check_key(key, f"a name in {path}")
        check_value(item, f"{path}[{shown(key)}]")


def _check_plain(kind: object, value: object, path: str) -> None:
    if not _is_plain(value, kind):
        raise _misfit(value, kind, path)


def _misfit(value: object, kind: object, path: str) -> TypeError:
    expected = getattr(kind, "__name__", str(kind))
    return TypeError(f"{path} is {shown(value)}, expected {expected}")


def _is_plain(value: object, kind: object) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and -_LARGEST <= value < _LARGEST
    if kind is float:
        return isinstance(value, int | float) and math.isfinite(value)
    if isinstance(kind, types.UnionType):
        return any(_is_plain(value, each) for each in get_args(kind))
    if kind is types.NoneType:
        return value is None
    return isinstance(kind, type) and issubclass(kind, str | Enum) and isinstance(value, kind)
