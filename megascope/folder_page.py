"""The page over a folder of recordings, live while it grows and later."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megascan.errors import ConfigError, OutputError
from megascope.frames import encode
from megascope.replay import Recordings
from megascope.request import (
    CHANGEABLE,
    FILE_NAME,
    PLACES,
    REDUCTIONS,
    Kind,
    read_request,
    write_request,
)
from megascope.server import Answer, to_parquet

_AHEAD = 2
"""Iterations that a request lies in the future, so that every rank has seen it."""
_REFRESH_S = 0.5


class FolderPage:
    """Answers the page's questions about one folder.

    `verdict` gives what the folder's probes say, in sentences.
    """

    def __init__(self, folder: Path, verdict: Callable[[], list[str]]) -> None:
        self._folder = folder
        self._verdict = verdict
        self._recordings = Recordings(folder)
        self._read_at = 0.0
        self._lock = asyncio.Lock()

    async def answer(self, name: str, body: Mapping[str, Any]) -> Answer:
        """Answer by the method of that name; files are read in a thread, one question a time."""
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
        """Write the request file; it holds from two iterations ahead of the newest one."""
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
