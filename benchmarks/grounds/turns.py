"""Leave out of rank files what `--trace-layer-stride N` would not have recorded.

The generators record the modules of all layers. What layers in turns cost a verdict is seen on the
same jobs, event by event, with most of those modules left out: the first traced iteration keeps all
of them, as the tracer learns a rank's layers there, later ones those in turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from megascan.config import LEAST_LAYERS, TraceConfig


def leave_modules_out(folder: Path, stride: int, *, least: int = LEAST_LAYERS) -> None:
    """Rewrite all rank files of a folder; files of other formats stay as they are."""
    for path in folder.rglob("*.json"):
        lines = path.read_bytes().splitlines()
        if len(lines) > 2 and b'"megascan"' in lines[1]:
            events = list(_events_of(lines[1:]))
            texts = map(orjson.dumps, _with_turns(events, stride, least))
            path.write_bytes(b"[\n" + b",\n".join(texts) + b"\n")


def _events_of(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the events up to the end of the file, or to where a killed rank's file was cut."""
    for line in lines:
        text = line.strip(b", ")
        if text and text != b"]":
            try:
                yield orjson.loads(text)
            except orjson.JSONDecodeError:
                return


def _with_turns(events: list[dict[str, Any]], stride: int, least: int) -> list[dict[str, Any]]:
    settings = next(one["args"]["trace"] for one in events if one["name"] == "megascan")
    settings["layer_stride"] = stride
    modules = [one for one in events if _is_of_layer(one)]
    if not modules:
        return events
    first = min(one["args"]["iteration"] for one in modules)
    chunks: defaultdict[int, set[int]] = defaultdict(set)
    for one in modules:
        chunks[one["args"].get("chunk", 0)].add(one["args"]["layer"])
    config = TraceConfig(
        interval=settings["interval"], window=settings["window"], layer_stride=stride
    )
    chosen = {
        iteration: layers
        for iteration in {one["args"]["iteration"] for one in modules} - {first}
        if (layers := config.layers_in_turn(iteration, chunks, least)) is not None
    }
    kept: list[dict[str, Any]] = []
    num_spans = 0
    for event in events:
        if event["name"] == "megascan_window":
            kept.append({**event, "args": _window_of(event["args"], num_spans, chosen)})
            num_spans = 0
        elif not _is_of_layer(event) or _has_turn(event["args"], chosen):
            kept.append(event)
            num_spans += event["ph"] == "X"
    return kept


def _is_of_layer(event: dict[str, Any]) -> bool:
    return event.get("cat") == "compute" and event.get("args", {}).get("layer") is not None


def _has_turn(arguments: dict[str, Any], chosen: dict[int, frozenset[int]]) -> bool:
    iteration = arguments["iteration"]
    return iteration not in chosen or arguments["layer"] in chosen[iteration]


def _window_of(
    record: dict[str, Any], num_spans: int, chosen: dict[int, frozenset[int]]
) -> dict[str, Any]:
    span = range(record["first_iteration"], record["last_iteration"] + 1)
    layers = [[number, sorted(chosen[number])] for number in span if number in chosen]
    return {**record, "num_spans": num_spans, "layers": layers}
