"""The fields of a request's body, each read once, with its type and its range."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import orjson

from training.generation.web.responses import RequestError

Kind = TypeVar("Kind")

_NAMES = {str: "a string", bool: "true or false", dict: "an object", list: "an array"}


class Fields:
    """A JSON object that is read field by field; what was not asked for is refused by `finish`.

    A field that is null counts as left out, as OpenAI's clients mean it.
    """

    def __init__(self, values: Mapping[str, object], place: str = "") -> None:
        self._values = values
        self._place = place
        self._asked: set[str] = set()

    @classmethod
    def from_body(cls, body: bytes) -> Fields:
        """Read a body; RequestError when it is no JSON object."""
        try:
            values = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise RequestError(f"the body is not JSON ({error}); send a JSON object") from error
        if not isinstance(values, dict):
            raise RequestError(f"the body is {_kind_of(values)}; send a JSON object")
        return cls(values)

    def raw(self, name: str) -> object:
        """Return the value of a field as it stands there; None when it is left out."""
        self._asked.add(name)
        return self._values.get(name)

    def integer(self, name: str, default: int, *, low: int, high: int) -> int:
        """Read a whole number from `low` to `high`."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(name, f"is {_shown(value)}, but must be a whole number")
        if not low <= value <= high:
            raise self.wrong(name, f"is {value}, but must be from {low} to {high}")
        return value

    def optional_integer(self, name: str, *, low: int, high: int) -> int | None:
        """Read a whole number, or None when it is left out."""
        return None if self.raw(name) is None else self.integer(name, low, low=low, high=high)

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        """Read a number from `low` to `high`."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, f"is {_shown(value)}, but must be a number")
        if not low <= value <= high:
            raise self.wrong(name, f"is {value}, but must be from {low} to {high}")
        return float(value)

    def switch(self, name: str, default: bool = False) -> bool:
        """Read true or false."""
        return self._typed(name, bool, default)

    def text(self, name: str, default: str) -> str:
        """Read a string."""
        return self._typed(name, str, default)

    def strings(self, name: str, *, most: int) -> tuple[str, ...]:
        """Read one string or an array of up to `most`, none of them empty."""
        value = self.raw(name)
        if value is None:
            return ()
        given = [value] if isinstance(value, str) else value
        if not isinstance(given, list) or not all(isinstance(one, str) and one for one in given):
            raise self.wrong(name, "must be a string or an array of strings, none of them empty")
        if len(given) > most:
            raise self.wrong(name, f"has {len(given)} strings, but at most {most} are taken")
        return tuple(given)

    def inner(self, name: str) -> Fields:
        """Read the fields of an object; none when it is left out."""
        value: dict[str, object] = self._typed(name, dict, {})
        return Fields(value, place=f"{self._place}{name}.")

    def without_effect(self, name: str, *values: object) -> None:
        """Take a field only with a value that asks for nothing; others would be ignored."""
        value = self.raw(name)
        if value is not None and value not in values:
            raise self.wrong(name, "is not supported by this server; leave it out")

    def finish(self) -> None:
        """Refuse what nobody has asked for: it would be ignored silently."""
        unknown = sorted(set(self._values) - self._asked)
        if unknown:
            raise self.wrong(unknown[0][:64], "is not known to this server; leave it out")

    def wrong(self, name: str, reason: str) -> RequestError:
        """Make the error about a field."""
        named = self._place + name
        return RequestError(f"{named} {reason}", param=named)

    def _typed(self, name: str, kind: type[Kind], default: Kind) -> Kind:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise self.wrong(name, f"is {_shown(value)}, but must be {_NAMES[kind]}")
        return value


def _kind_of(value: object) -> str:
    if value is None:
        return "null"
    return next((name for kind, name in _NAMES.items() if isinstance(value, kind)), "a number")


def _shown(value: object) -> str:
    """Return a value for a message: itself when it is short, else what it is."""
    if isinstance(value, int | float):
        return orjson.dumps(value).decode() if isinstance(value, bool) else str(value)
    return repr(value) if isinstance(value, str) and len(value) <= 40 else _kind_of(value)
