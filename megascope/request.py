"""What is to be captured and changed, as checked data, and the file that requests it of a training.

The file lies next to the recordings; a viewer writes it and every rank reads it. It is JSON of a
fixed shape. Every part is checked, sizes are bounded, nothing is evaluated; a wrong file is
reported once and changes nothing. `first` lies in the future, so that all ranks begin at the same
iteration.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

from megascan.errors import ConfigError

FILE_NAME = "scope-request.json"
LARGEST_FILE = 1 << 16
PLACES = (
    "embedding", "qkv", "query", "key", "value", "context", "attention_out", "fc1", "neurons",
    "fc2", "router", "experts", "residual", "logits", "loss", "attention", "expert_load",
)  # fmt: skip
"""Names of the places of `megascope.capture`, of attention's entropy (``attention``) and of the
tokens of each expert (``expert_load``); repeated here so that a viewer needs no torch."""
BY_HEAD, BY_EXPERT = "attention", frozenset({"experts", "expert_load"})
"""Places with a number a head or an expert, whatever reduction is asked for: ``attention`` has
`entropy` in nats, ``experts`` `rms`, ``expert_load`` `mean` (tokens)."""
REDUCTIONS = (
    "rms", "max", "mean", "zeros", "finite", "entropy", "histogram", "top", "pixels",
)  # fmt: skip
_FAR = 2**31
_MOST_LAYERS = 4096


MOST_INTERVENTIONS = 64
_MOST_ITEMS = 4096
_MOST_FLIPS = 4096
_LARGEST_AMOUNT = 1e6
_LARGEST_SEED = 2**31
_WITH_WEIGHTS = ("qkv", "attention_out", "fc1", "fc2")
"""Places whose module has a weight in which bits may be flipped."""
CHANGEABLE = tuple(
    name for name in PLACES
    if name not in ("router", "experts", "loss", "attention", "expert_load")
)  # fmt: skip


class Kind(StrEnum):
    """What an intervention does to values."""

    NOISE = "noise"
    """Add normal noise of deviation `amount`."""
    SCALE_NOISE = "scale_noise"
    """Multiply by 1 + `amount` times uniform noise in [-1, 1)."""
    SCALE = "scale"
    OFFSET = "offset"
    ZERO = "zero"
    REPLACE = "replace"
    """Take the values that an earlier run had at the same place (patching)."""
    FLIP = "flip"
    """Flip `amount` bits of the place's weight."""


@dataclass(frozen=True, kw_only=True)
class Intervention:
    """One change; raises ConfigError when its parts do not fit together."""

    place: str
    kind: str
    layers: tuple[int, ...] = ()
    """Layers, counted from 1; empty means all."""
    units: tuple[int, ...] = ()
    """Heads at query, key, value and context, else features, over all ranks; empty means all."""
    tokens: tuple[int, ...] = ()
    """Positions of tokens; empty means all."""
    amount: float = 0.0
    seed: int = 0
    first: int = 0
    """First iteration (training) or first token (generation) at which the change holds."""
    last: int = 2**31
    bit: int = -1
    """Bit that a flip changes, counted from the lowest; -1 draws one for each flip."""

    def __post_init__(self) -> None:
        if self.place not in CHANGEABLE:
            raise ConfigError(
                f"place is {self.place[:40]!r}, expected one of {', '.join(CHANGEABLE)}"
            )
        if self.kind not in list(Kind):
            raise ConfigError(f"kind is {self.kind[:40]!r}, expected one of {', '.join(Kind)}")
        if not math.isfinite(self.amount) or abs(self.amount) > _LARGEST_AMOUNT:
            raise ConfigError(f"amount is {self.amount}, expected at most {_LARGEST_AMOUNT:g}")
        if not 0 <= self.seed < _LARGEST_SEED:
            raise ConfigError(f"seed is {self.seed}, expected 0 to {_LARGEST_SEED - 1}")
        if self.kind == Kind.FLIP:
            self._check_flip()

    def _check_flip(self) -> None:
        if self.place not in _WITH_WEIGHTS:
            raise ConfigError(f"flip needs a place that has weights: {', '.join(_WITH_WEIGHTS)}")
        if not 1 <= self.amount <= _MOST_FLIPS or self.amount != int(self.amount):
            raise ConfigError(f"amount is {self.amount:g}, expected 1 to {_MOST_FLIPS} bits")
        if not -1 <= self.bit < 64:
            raise ConfigError(f"bit is {self.bit}, expected 0 to 63, or -1")

    def holds_at(self, moment: int) -> bool:
        """Return whether the change holds in an iteration, or at a token."""
        return self.first <= moment <= self.last


def read_interventions(records: object) -> tuple[Intervention, ...]:
    """Read interventions that a client has sent; ConfigError names the first wrong thing."""
    if not isinstance(records, list) or len(records) > MOST_INTERVENTIONS:
        raise ConfigError(f"interventions must be a list of at most {MOST_INTERVENTIONS}")
    return tuple(_read(record) for record in records)


def _read(record: object) -> Intervention:
    if not isinstance(record, dict):
        raise ConfigError("an intervention must be an object")
    values: dict[str, Any] = {}
    known = {field.name: str(field.type) for field in fields(Intervention)}
    for name, value in record.items():
        if name not in known:
            raise ConfigError(f"{str(name)[:40]!r} is no part of an intervention")
        values[name] = _typed(name, value, known[name])
    for name in ("place", "kind"):
        if name not in values:
            raise ConfigError(f"an intervention needs {name}")
    return Intervention(**values)


def _typed(name: str, value: object, kind: str) -> object:
    """Return a value from JSON as the type of its field; ConfigError where it does not fit."""
    if kind == "str" and isinstance(value, str):
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "float" and is_number:
        return float(cast(float, value))
    if kind == "int" and is_whole(value):
        return value
    if kind.startswith("tuple") and isinstance(value, list) and len(value) <= _MOST_ITEMS:
        numbers = tuple(one for one in value if is_whole(one) and one >= 0)
        if len(numbers) == len(value):
            return numbers
    raise ConfigError(f"{name} is {str(value)[:40]!r}, expected {kind}")


def is_whole(value: object) -> bool:
    """Return whether a value from JSON is a whole number, of magnitude 2^31 at most."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= 2**31


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to capture and change; the default captures the health of a training."""

    identifier: str = "health"
    first: int = 0
    last: int = _FAR
    every: int = 1
    places: tuple[str, ...] = ("residual", "attention_out", "fc2", "neurons", "loss")
    layers: tuple[int, ...] = ()
    reductions: tuple[str, ...] = ("rms", "max")
    per_token: bool = False
    """Whether to keep a number for each token, not for each microbatch."""
    gradients: bool = False
    weights: bool = True
    """Whether to capture norms of parameters, gradients and updates."""
    num_microbatches: int = 64
    """How many microbatches of an iteration to capture, from its first on."""
    interventions: tuple[Intervention, ...] = ()

    def is_due(self, iteration: int) -> bool:
        """Return whether an iteration is captured."""
        return self.first <= iteration <= self.last and iteration % self.every == 0

    def to_json(self) -> str:
        """Return the request as the text of its file."""
        return json.dumps({"schema": 1, **asdict(self)})


def read_request(text: str | bytes) -> Request:
    """Read a request; ConfigError names the first thing that is wrong with it."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the request is no JSON ({str(error)[:80]})") from error
    if not isinstance(record, dict):
        raise ConfigError("the request must be an object")
    if record.get("schema") != 1:
        raise ConfigError(f"the request has schema {str(record.get('schema'))[:20]}, expected 1")
    values: dict[str, Any] = {}
    for name, value in record.items():
        if name == "schema":
            continue
        if name not in _READERS:
            raise ConfigError(f"{name[:40]!r} is no part of a request")
        values[name] = _READERS[name](name, value)
    return Request(**values)


def write_request(folder: Path, request: Request) -> None:
    """Write a request file next to the recordings, whole or not at all."""
    file = folder / FILE_NAME
    new = file.with_suffix(".new")
    new.write_text(request.to_json(), encoding="utf-8")
    new.replace(file)


def read_whole(name: str, value: object, low: int, high: int) -> int:
    """Return a value from JSON that must be a whole number from `low` to `high`; ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} is {str(value)[:40]!r}, expected {low} to {high}")
    return value


def _whole(low: int, high: int) -> Callable[[str, object], int]:
    return lambda name, value: read_whole(name, value, low, high)


def _words(known: tuple[str, ...]) -> Callable[[str, object], tuple[str, ...]]:
    def read(name: str, value: object) -> tuple[str, ...]:
        if not isinstance(value, list) or len(value) > len(known):
            raise ConfigError(f"{name} must be a list of at most {len(known)}")
        for one in value:
            if one not in known:
                raise ConfigError(f"{name} has {str(one)[:40]!r}, expected some of {known}")
        return tuple(dict.fromkeys(value))

    return read


def _layers(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MOST_LAYERS:
        raise ConfigError(f"{name} must be a list of at most {_MOST_LAYERS} numbers")
    return tuple(read_whole(name, one, 1, _MOST_LAYERS) for one in value)


def _switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {str(value)[:40]!r}, expected true or false")
    return value


def _name(name: str, value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 64 or not value.isprintable():
        raise ConfigError(f"{name} must be a word of at most 64 letters")
    return value


def _changes(name: str, value: object) -> tuple[Intervention, ...]:
    del name
    changes = read_interventions(value)
    if any(one.kind == Kind.REPLACE for one in changes):
        raise ConfigError(
            "replace needs values of another run, which a training does not keep: patch in a model "
            "that speaks (training.serve --scope)"
        )
    return changes


_READERS: Mapping[str, Callable[[str, object], object]] = {
    "identifier": _name,
    "first": _whole(0, _FAR),
    "last": _whole(0, _FAR),
    "every": _whole(1, 1_000_000),
    "places": _words(PLACES),
    "layers": _layers,
    "reductions": _words(REDUCTIONS),
    "per_token": _switch,
    "gradients": _switch,
    "weights": _switch,
    "num_microbatches": _whole(1, 4096),
    "interventions": _changes,
}


class RequestFile:
    """Watches the request file of a folder; each look costs one call of the operating system."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._seen: tuple[int, int, int] | None = None

    def changed(self) -> Request | None:
        """Return a request that was written since the last call, else None.

        Raises ConfigError, once, for a wrong file.
        """
        try:
            found = self._path.stat()
        except OSError:
            return None
        mark = (found.st_ino, found.st_mtime_ns, found.st_size)
        if mark == self._seen:
            return None
        self._seen = mark
        if found.st_size > LARGEST_FILE:
            raise ConfigError(f"{self._path} is larger than {LARGEST_FILE} bytes")
        try:
            content = self._path.read_bytes()
        except OSError:
            self._seen = None
            return None
        return read_request(content)
