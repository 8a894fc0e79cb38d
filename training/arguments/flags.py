"""Settings as dataclasses, command-line flags from their fields.

A group of flags is a frozen, keyword-only dataclass whose fields are made by `flag`. The option
string is the field's name with dashes, unless `option` says otherwise; the type comes from the
annotation; a boolean becomes a switch that turns its default around.

    @dataclass(frozen=True, kw_only=True)
    class Example:
        num_layers: int | None = flag(None, "transformer layers")
        add_bias: bool = flag(True, "leave the bias away", option="--disable-bias")
"""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import TypeVar

Value = TypeVar("Value")
Group = TypeVar("Group")

_METADATA_KEY = "flag"


@dataclass(frozen=True, kw_only=True)
class _Flag:
    text: str
    option: str
    choices: tuple[str | int, ...]


def flag(
    default: Value, text: str, *, option: str = "", choices: Sequence[str | int] = ()
) -> Value:
    """Declare one field of a settings dataclass together with its command-line flag."""
    declared = _Flag(text=text, option=option, choices=tuple(choices))
    made: Value = field(default=default, metadata={_METADATA_KEY: declared})
    return made


def add_group(parser: argparse.ArgumentParser, title: str, group: type) -> None:
    """Add a flag for every field of the dataclass `group` to the parser."""
    section = parser.add_argument_group(title)
    hints = typing.get_type_hints(group)
    for entry in fields(group):
        _add_flag(section, entry, hints[entry.name])


def read_group(group: type[Group], values: Mapping[str, object]) -> Group:
    """Build the dataclass `group` from parsed values (``vars(namespace)``)."""
    names = [entry.name for entry in fields(group)]  # type: ignore[arg-type]
    return group(**{name: values[name] for name in names})


def option_of(group: type, name: str) -> str:
    """Return the option string of a field, for messages: ``num_layers`` -> ``--num-layers``."""
    entry = next(entry for entry in fields(group) if entry.name == name)
    return _option(entry)


def _option(entry: Field[object]) -> str:
    declared: _Flag = entry.metadata[_METADATA_KEY]
    return declared.option or "--" + entry.name.replace("_", "-")


def _add_flag(section: argparse._ArgumentGroup, entry: Field[object], hint: object) -> None:
    declared: _Flag = entry.metadata[_METADATA_KEY]
    assert entry.default is not MISSING  # `flag` always gives one
    if hint is bool:
        section.add_argument(
            _option(entry),
            dest=entry.name,
            action="store_false" if entry.default else "store_true",
            help=declared.text,
        )
        return
    kind, repeated = _value_type(hint)
    section.add_argument(
        _option(entry),
        dest=entry.name,
        type=kind,
        nargs="+" if repeated else None,
        default=entry.default,
        choices=declared.choices or None,
        help=f"{declared.text} (default: {entry.default})",
    )


def _value_type(hint: object) -> tuple[type, bool]:
    """Return the type of a value, and whether there may be several (a tuple)."""
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
    repeated = typing.get_origin(hint) is tuple
    if repeated:
        hint = typing.get_args(hint)[0]
    assert isinstance(hint, type)
    return hint, repeated
