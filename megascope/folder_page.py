"""The page over a folder of recordings, while the folder grows and later.

The recordings of all ranks are joined to one model: shares joined, stages one after the other.
Files may still grow: `Recordings.refresh` reads what was added. Only headers are kept; arrays are
read from the files when somebody looks at them. A full disk or an edited file can leave a header
that is valid JSON and still wrong: `check_frame` refuses what no recorder has written.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megascan.errors import ConfigError, InputError, OutputError
from megascan.topology import Layout
from megascope.frames import Array, Frame, decode, encode, whole_frames
from megascope.reductions import Part, join_table
from megascope.request import (
    BY_EXPERT,
    CHANGEABLE,
    FILE_NAME,
    PLACES,
    REDUCTIONS,
    Kind,
    is_whole,
    read_request,
    write_request,
)
from megascope.server import Answer, to_parquet

MOST_POINTS = 1 << 22
"""Most numbers of one answer."""
MOST_RANKS = 1 << 20
_SHARES = ("whole", "features", "gated", "tokens")


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Where a frame lies in a file, and its header."""

    path: Path
    start: int
    end: int
    header: Mapping[str, Any]

    def read(self) -> Frame:
        """Read the frame with its arrays; InputError when the file has changed meanwhile."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                return decode(file.read(self.end - self.start))
        except OSError as error:
            raise InputError(f"{self.path} cannot be read any more ({error})") from error


@dataclass
class _File:
    """How far a file was read; `inode` tells when another file has taken its name."""

    inode: int
    size: int = 0
    frames: list[Kept] = field(default_factory=list)


class Recordings:
    """All `scope-data-*` files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, _File] = {}
        self.problems: list[str] = []
        self.layout = Layout()
        self.model: Mapping[str, Any] = {}
        self.may_change = False
        """Whether the newest run heeds requests that change what is computed."""
        self._frames: dict[int, dict[int, Kept]] = {}
        """Data frames by iteration and rank."""

    @property
    def iterations(self) -> list[int]:
        """Return the iterations for which at least one rank has a frame, sorted."""
        return sorted(self._frames)

    def refresh(self) -> bool:
        """Read what was added to the folder; return whether anything changed."""
        paths = sorted(self._folder.glob("scope-data-*.bin"))
        changed = [self._read_on(path) for path in paths]
        for path in set(self._files) - set(paths):
            del self._files[path]
            changed.append(True)
        if any(changed):
            self._arrange()
        return any(changed)

    def _read_on(self, path: Path) -> bool:
        """Read the frames added to a file, up to damage; return whether there were any."""
        before = self._files.get(path)
        num_before = 0 if before is None else len(before.frames)
        try:
            found = path.stat()
            known = before
            if known is None or known.inode != found.st_ino or known.size > found.st_size:
                known = self._files[path] = _File(inode=found.st_ino)
            if found.st_size == known.size:
                return False
            with path.open("rb") as file:
                file.seek(known.size)
                content = file.read()
            return self._add_frames(path, known, content)
        except (OSError, InputError) as error:
            sentence = f"{path.name}: {error}"
            if sentence not in self.problems:
                self.problems.append(sentence)
            now = self._files.get(path)
            return now is not None and (now is not before or len(now.frames) > num_before)

    def _add_frames(self, path: Path, known: _File, content: bytes) -> bool:
        offset, before = known.size, len(known.frames)
        for start, end in whole_frames(content):
            frame = decode(content[start:end])
            check_frame(frame)
            known.frames.append(
                Kept(path=path, start=offset + start, end=offset + end, header=frame.header)
            )
            known.size = offset + end
        return len(known.frames) > before

    def _arrange(self) -> None:
        """Sort all frames by iteration and rank; a resumed run drops frames from its start on."""
        self._frames = {}
        by_rank: dict[int, list[Kept]] = defaultdict(list)
        for path in sorted(self._files, key=lambda one: not one.name.endswith(".old.bin")):
            frames = self._files[path].frames
            rank = next((one.header["rank"] for one in frames if one.header["kind"] == "run"), None)
            if isinstance(rank, int):
                by_rank[rank] += frames
        for rank, frames in by_rank.items():
            for kept in frames:
                if kept.header["kind"] == "run":
                    self.layout = Layout(**kept.header["layout"])
                    self.model = kept.header["model"]
                    self.may_change = kept.header.get("may_change") is True
                    if not kept.header["is_continued"]:
                        self._forget_from(rank, kept.header["first_iteration"])
                elif kept.header["kind"] == "data":
                    self._frames.setdefault(kept.header["iteration"], {})[rank] = kept

    def _forget_from(self, rank: int, iteration: int) -> None:
        for later in [one for one in self._frames if one >= iteration]:
            self._frames[later].pop(rank, None)
            if not self._frames[later]:
                del self._frames[later]

    def describe(self) -> dict[str, object]:
        """Return, for the page, what there is to look at."""
        keys = sorted({
            (item["place"], item["reduction"], item["gradient"])
            for by_rank in list(self._frames.values())[-50:]
            for kept in by_rank.values()
            for item in kept.header["items"]
        })  # fmt: skip
        return {
            "layout": asdict(self.layout),
            "model": dict(self.model),
            "may_change": self.may_change,
            "iterations": self.iterations[-20_000:],
            "keys": [list(key) for key in keys],
            "broken": self.first_broken(),
            "problems": self.problems[:8],
        }

    def first_broken(self) -> dict[str, object] | None:
        """Return where the first number that is not finite was seen: by microbatch, then by layer.

        Where several ranks saw one at the same place, the first rank is named.
        """
        for iteration in self.iterations:
            found = [
                (kept.header["broken"], rank)
                for rank, kept in sorted(self._frames[iteration].items())
                if "broken" in kept.header
            ]
            if found:
                broken, rank = min(found, key=_when_broken)
                return {**broken, "iteration": iteration, "rank": rank,
                        "label": self.layout.label(rank)}  # fmt: skip
        return None

    def table(
        self, iteration: int, place: str, reduction: str, *, gradient: bool = False, dp: int = 0
    ) -> tuple[list[int], Array]:
        """Return layers and `(layer, microbatch, token, row, number)` of one data-parallel replica.

        Raises ConfigError when the reduction of this place was not captured in the iteration.
        """
        is_by_expert = place in BY_EXPERT
        parts = []
        for rank, kept in sorted(self._frames.get(iteration, {}).items()):
            at = self.layout.coordinates(rank)
            if is_by_expert and rank in self._first_experts:
                parts.append(Part(tp=at.ep, pp=at.pp, frame=kept.read()))
            elif not is_by_expert and at.dp == dp and at.cp == 0:
                parts.append(Part(tp=at.tp, pp=at.pp, frame=kept.read()))
        num_shares = self.layout.ep if is_by_expert else self.layout.tp
        return join_table(parts, place, reduction, num_shares=num_shares, gradient=gradient)

    @property
    def _first_experts(self) -> set[int]:
        """Return, for each stage and each share of the experts, the first rank that holds it."""
        found: dict[tuple[int, int], int] = {}
        for rank in range(self.layout.world_size):
            at = self.layout.coordinates(rank)
            found.setdefault((at.pp, at.ep), rank)
        return set(found.values())

    def series(
        self, place: str, reduction: str, *, gradient: bool = False, most: int = 400
    ) -> tuple[list[int], list[int], Array]:
        """Return iterations, layers and `(iteration, layer)`: medians over microbatches and tokens.

        At most `most` iterations are chosen, evenly and including the last.
        """
        chosen = self.iterations
        if len(chosen) > most:
            step = math.ceil(len(chosen) / most)
            chosen = chosen[(len(chosen) - 1) % step :: step]
        found: list[tuple[int, list[int], Array]] = []
        for iteration in chosen:
            try:
                layers, table = self.table(iteration, place, reduction, gradient=gradient)
            except ConfigError:
                continue
            flat = table.reshape(len(layers), -1)
            found.append((iteration, layers, _typical(flat)))
        if not found:
            raise ConfigError(f"{reduction} of {place[:40]} was never captured")
        layers = sorted({layer for _, own, _ in found for layer in own})
        made = np.full((len(found), len(layers)), np.nan)
        for number, (_, own, values) in enumerate(found):
            made[number, [layers.index(layer) for layer in own]] = values
        return [one for one, _, _ in found], layers, made

    def weights(self, iteration: int | None = None) -> tuple[int, list[str], Array]:
        """Return iteration, names and `(parameter, 3)`: norms of parameter, gradient and update.

        Without `iteration` take the newest that has norms. Norms of TP shares are joined by the
        root of their mean square.
        """
        for one in reversed(self.iterations if iteration is None else [iteration]):
            shares: dict[str, list[Array]] = defaultdict(list)
            for rank, kept in sorted(self._frames.get(one, {}).items()):
                if self.layout.coordinates(rank).dp or "weights" not in kept.header:
                    continue
                table = kept.read().arrays["weights"]
                for name, row in zip(kept.header["weights"], table, strict=True):
                    shares[str(name)].append(row)
            if shares:
                rows = [np.sqrt(np.mean(np.square(own), axis=0)) for own in shares.values()]
                return one, list(shares), np.stack(rows)
        raise ConfigError("norms of parameters were not captured")


def _when_broken(found: tuple[Mapping[str, Any], int]) -> tuple[object, ...]:
    """Return a key that sorts by when a number was computed, forward passes first."""
    broken, rank = found
    is_behind_layers = broken["place"] in ("logits", "loss")
    layer = -broken["layer"] if broken["gradient"] else broken["layer"]
    return broken["gradient"], broken["microbatch"], is_behind_layers, layer, rank


def _typical(flat: Array) -> Array:
    """Return the median of each row; NaN where the row has a number that is not finite."""
    with np.errstate(invalid="ignore"):
        middle = np.median(flat, axis=1)
    broken = ~np.isfinite(flat).all(axis=1)
    return np.asarray(np.where(broken, np.nan, middle))


def check_frame(frame: Frame) -> None:
    """Raise InputError for a frame that no recorder has written."""
    header = frame.header
    match header.get("kind"):
        case "run":
            _check_run(header)
        case "data":
            _check_data(header)
            for number, item in enumerate(header["items"]):
                _check_item(item, frame.arrays.get(str(number)))
        case kind:
            raise InputError(f"a frame is of no known kind ({str(kind)[:20]!r})")
    if "weights" in header:
        _need(frame.arrays.get("weights") is not None, "weights")
        _need(frame.arrays["weights"].shape == (len(header["weights"]), 3), "weights")


def _check_run(header: Mapping[str, Any]) -> None:
    _need_all(header, {"rank": _is_natural, "first_iteration": _is_natural, "layout": _is_object,
                       "model": _is_object, "is_continued": _is_switch})  # fmt: skip
    sizes = {name: size for name, size in header["layout"].items() if name != "order"}
    _need(all(map(_is_natural, sizes.values())), "layout")
    _need(isinstance(header["layout"].get("order", ""), str), "layout")
    try:
        layout = Layout(**header["layout"])
    except (ConfigError, TypeError) as error:
        raise InputError(f"a frame's layout is damaged ({error})") from error
    _need(layout.world_size <= MOST_RANKS and layout.ep <= MOST_RANKS, "layout")
    _need(header["rank"] < layout.world_size, "rank")


def _check_data(header: Mapping[str, Any]) -> None:
    _need_all(header, {"iteration": _is_natural, "per_token": _is_switch, "items": _is_list})
    if "broken" in header:
        _need(_is_object(header["broken"]), "broken")
        _need_all(header["broken"], {"layer": _is_natural, "microbatch": _is_natural,
                                     "place": _is_word, "gradient": _is_switch})  # fmt: skip
    if "weights" in header:
        _need(_is_list(header["weights"]) and all(map(_is_word, header["weights"])), "weights")


def _check_item(item: object, array: Any) -> None:
    if not isinstance(item, dict):
        raise InputError("a frame's items are damaged")
    _need_all(item, {"gradient": _is_switch, "layers": _is_list, "microbatches": _is_list})
    for name, known in (("place", PLACES), ("reduction", REDUCTIONS), ("share", _SHARES)):
        _need(item.get(name) in known, name)
    for name in ("layers", "microbatches"):
        _need(all(map(_is_natural, item[name])) and len(set(item[name])) == len(item[name]), name)
    shape: tuple[int, ...] = () if array is None else array.shape
    counted = (len(item["layers"]), len(item["microbatches"]))
    _need(len(shape) == 5 and shape[:2] == counted, "items")
    width = item.get("width")
    _need(isinstance(width, int) and not isinstance(width, bool) and width > 0, "width")


def _need_all(record: Mapping[str, Any], parts: Mapping[str, Callable[[object], bool]]) -> None:
    for name, is_right in parts.items():
        _need(is_right(record.get(name)), name)


def _need(is_right: bool, name: str) -> None:
    if not is_right:
        raise InputError(f"a frame is damaged: its {name} makes no sense")


def _is_natural(value: object) -> bool:
    return is_whole(value) and value >= 0  # type: ignore[operator]


def _is_switch(value: object) -> bool:
    return isinstance(value, bool)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _is_word(value: object) -> bool:
    return isinstance(value, str)


_AHEAD = 2
"""How many iterations ahead of the newest a request begins, so that every rank sees it in time."""
_REFRESH_S = 0.5


class FolderPage:
    """Answers the page's questions about one folder.

    `verdict` returns what the folder's probes say, in sentences.
    """

    def __init__(self, folder: Path, verdict: Callable[[], list[str]]) -> None:
        self._folder = folder
        self._verdict = verdict
        self._recordings = Recordings(folder)
        self._read_at = 0.0
        self._lock = asyncio.Lock()

    async def answer(self, name: str, body: Mapping[str, Any]) -> Answer:
        """Answer by the method named `name`, in a thread that reads files, one at a time."""
        answers: dict[str, Callable[[Mapping[str, Any]], Answer]] = {
            "state": self._state, "series": self._series, "table": self._table,
            "weights": self._weights, "request": self._request, "parquet": to_parquet,
        }  # fmt: skip
        answer = answers[name]
        async with self._lock:
            return await asyncio.to_thread(self._refreshed, answer, body)

    def _refreshed(
        self, answer: Callable[[Mapping[str, Any]], Answer], body: Mapping[str, Any]
    ) -> Answer:
        if time.monotonic() - self._read_at > _REFRESH_S:
            self._recordings.refresh()
            self._read_at = time.monotonic()
        return answer(body)

    def _state(self, body: Mapping[str, Any]) -> Answer:
        del body
        return {
            "mode": "training", "folder": self._folder.resolve().name, "places": PLACES,
            "reductions": REDUCTIONS, "verdict": self._verdict(),
            "changeable": CHANGEABLE, "kinds": [one for one in Kind if one != Kind.REPLACE],
            "has_request": (self._folder / FILE_NAME).exists(), **self._recordings.describe(),
        }  # fmt: skip

    def _series(self, body: Mapping[str, Any]) -> Answer:
        place, reduction, gradient = _key(body)
        iterations, layers, values = self._recordings.series(place, reduction, gradient=gradient)
        header = {"kind": "series", "iterations": iterations, "layers": layers}
        return encode(header, {"values": values})

    def _table(self, body: Mapping[str, Any]) -> Answer:
        place, reduction, gradient = _key(body)
        iteration, replica = body.get("iteration"), body.get("dp", 0)
        if not isinstance(iteration, int) or not isinstance(replica, int):
            raise ConfigError("iteration and dp must be whole numbers")
        layers, table = self._recordings.table(
            iteration, place, reduction, gradient=gradient, dp=replica
        )
        return encode({"kind": "table", "layers": layers}, {"values": table})

    def _weights(self, body: Mapping[str, Any]) -> Answer:
        del body
        iteration, names, table = self._recordings.weights()
        return encode({"kind": "weights", "iteration": iteration, "names": names}, {"sizes": table})

    def _request(self, body: Mapping[str, Any]) -> Answer:
        """Write the request file; the request begins two iterations after the newest one."""
        first = max(self._recordings.iterations, default=0) + _AHEAD
        request = read_request(json.dumps({"schema": 1, **body, "first": first}))
        if request.interventions and not self._recordings.may_change:
            raise ConfigError(
                "this job heeds no changes: it was started without --scope-interventions"
            )
        try:
            write_request(self._folder, request)
        except OSError as error:
            raise OutputError(f"the request cannot be written to the folder ({error})") from error
        return {"first": first}


def _key(body: Mapping[str, Any]) -> tuple[str, str, bool]:
    place, reduction = body.get("place"), body.get("reduction")
    if place not in PLACES or reduction not in REDUCTIONS:
        raise ConfigError("place and reduction must be names out of the table")
    return place, reduction, body.get("gradient") is True
