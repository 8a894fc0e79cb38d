"""What is to be captured, as a file beside the recordings: written by a viewer, read by every rank.

The file is JSON of a fixed shape. Every part is checked, sizes are bounded, nothing is evaluated;
a file that is wrong is said once and changes nothing. `first` lies in the future, so that all ranks
begin at the same iteration.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascan.errors import ConfigError

if TYPE_CHECKING:
    from megascope.interventions import Intervention

FILE_NAME = "scope-request.json"
LARGEST_FILE = 1 << 16
PLACES = (
    "embedding", "qkv", "query", "key", "value", "context", "attention_out", "fc1", "neurons",
    "fc2", "router", "experts", "residual", "logits", "loss", "attention",
)  # fmt: skip
"""Those of `megascope.places`, and attention's entropy; here so that a viewer needs no torch."""
REDUCTIONS = (
    "rms", "max", "mean", "zeros", "finite", "entropy", "histogram", "top", "pixels",
)  # fmt: skip
_FAR = 2**31
_MOST_LAYERS = 4096


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to capture; the default is the health of a training."""

    identifier: str = "health"
    first: int = 0
    last: int = _FAR
    every: int = 1
    places: tuple[str, ...] = ("residual", "attention_out", "fc2", "neurons", "loss")
    layers: tuple[int, ...] = ()
    reductions: tuple[str, ...] = ("rms", "max")
    per_token: bool = False
    """One number a token, not one a microbatch."""
    gradients: bool = False
    weights: bool = True
    """Norms of parameters, gradients and updates."""
    num_microbatches: int = 64
    """The first ones of an iteration."""
    interventions: tuple[Intervention, ...] = ()

    def is_due(self, iteration: int) -> bool:
        """Return whether an iteration is captured."""
        return self.first <= iteration <= self.last and iteration % self.every == 0

    def to_json(self) -> str:
        """Return the request as its file holds it."""
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
    """Put a request beside the recordings, whole or not at all."""
    file = folder / FILE_NAME
    new = file.with_suffix(".new")
    new.write_text(request.to_json(), encoding="utf-8")
    new.replace(file)


def _whole(low: int, high: int) -> Callable[[str, object], int]:
    def read(name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"{name} is {str(value)[:40]!r}, expected {low} to {high}")
        return value

    return read


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
    return tuple(_whole(1, _MOST_LAYERS)(name, one) for one in value)


def _switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {str(value)[:40]!r}, expected true or false")
    return value


def _name(name: str, value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 64 or not value.isprintable():
        raise ConfigError(f"{name} must be a word of at most 64 letters")
    return value


def _changes(name: str, value: object) -> tuple[Intervention, ...]:
    if value == []:
        return ()
    from megascope.interventions import read_interventions

    del name
    return read_interventions(value)


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
    """Watches the request file of a folder; looking costs one call of the operating system."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._seen: tuple[int, int, int] | None = None

    def changed(self) -> Request | None:
        """Return the request when there is a new one; ConfigError when it is wrong, once."""
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
