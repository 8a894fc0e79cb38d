"""Write a run as the original MegaScan's files: begin and end records, no absolute time.

`head` is what its last version records (scopes of the model and the reductions of tensor
parallelism); the versions before it also had the events of the schedule. Attributes stand on the
end record. Places where a pipeline ends record an exchange of nothing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray

from benchmarks.grounds.formats.program import Code, Message, SpanPlan
from benchmarks.grounds.formats.world import Run

Attributes = dict[str, object]
BANDWIDTH_UNIT = float(1 << 27)


@dataclass(frozen=True, kw_only=True)
class OriginalStyle:
    """Which version recorded, and how much."""

    head: bool = False
    full: bool = True


@dataclass(slots=True)
class _Scope:
    """A scope between two operations; `at_end` says whether they are taken at their end."""

    name: str
    begin: int
    end: int
    attributes: Attributes = field(default_factory=dict)
    is_transfer: bool = False
    depth: int = 0


def write_original(run: Run, style: OriginalStyle, directory: Path) -> None:
    """Write one file a rank into a folder."""
    directory.mkdir(parents=True, exist_ok=True)
    for rank in range(run.world.job.shape.world):
        place = run.world.job.shape.place(rank)
        name = f"benchmark-data-{place['dp']}-pipeline-{place['pp']}-tensor-{place['tp']}.json"
        records = _records(run, style, rank)
        (directory / name).write_bytes(orjson.dumps(records, option=orjson.OPT_INDENT_2))


def _records(run: Run, style: OriginalStyle, rank: int) -> list[Attributes]:
    place = run.world.job.shape.place(rank)
    common: Attributes = {
        "dp_rk": place["dp"],
        "pp_rk": place["pp"],
        "tp_rk": place["tp"],
        "dev": rank % run.world.cluster.gpus_a_node,
        "g_rk": rank,
    }
    steps = _moments(_scopes(run, style, rank))
    records: list[Attributes] = []
    for number in range(len(run.start)):
        origin = run.begin_ns[number, rank]
        pad = origin - run.end_ns[number - 1, rank] if number else 0
        records.append({"name": "iteration", "ph": "B", "pad_before": round(float(pad))})
        start, end = run.start[number] - origin, run.end[number] - origin
        for is_begin, scope in steps:
            records.append(_record(scope, is_begin, start, end, common))
        length = round(float(run.end_ns[number, rank] - origin))
        noise = int(np.random.default_rng((run.world.seed, 12, rank, number)).integers(30_000))
        records.append(
            {"name": "iteration", "ph": "E", "rel_ts": length, **common,
             "duration_wall": length + noise, "duration_cuda": length}
        )  # fmt: skip
    return records


def _record(
    scope: _Scope, is_begin: bool, start: NDArray[np.float64], end: NDArray[np.float64],
    common: Attributes,
) -> Attributes:  # fmt: skip
    begun = float(start[scope.begin])
    if is_begin:
        return {"name": scope.name, "ph": "B", "rel_ts": round(begun), **common}
    done = float(end[scope.end] if scope.is_transfer else start[scope.end])
    attributes = dict(scope.attributes)
    size = attributes.get("data")
    if isinstance(size, int):
        attributes["bandwidth"] = size / BANDWIDTH_UNIT / (max(done - begun, 1.0) / 1e9)
    return {**attributes, "name": scope.name, "ph": "E", "rel_ts": round(done), **common}


def _moments(scopes: list[_Scope]) -> list[tuple[bool, _Scope]]:
    """Return begins and ends in the order in which a thread goes through them.

    At one operation inner scopes end first, then those of no length come and go, then outer ones
    begin first.
    """
    found: list[tuple[tuple[int, int, int, int], bool, _Scope]] = []
    for number, one in enumerate(scopes):
        if one.begin == one.end:
            found.append(((one.begin, 1, number, 0), True, one))
            found.append(((one.begin, 1, number, 1), False, one))
            continue
        found.append(((one.begin, 2, -one.end, one.depth), True, one))
        found.append(((one.end, 0, -one.begin, -one.depth), False, one))
    found.sort(key=lambda each: each[0])
    return [(is_begin, one) for _, is_begin, one in found]


def _scopes(run: Run, style: OriginalStyle, rank: int) -> list[_Scope]:
    job = run.world.job
    spans = [one for one in run.program.spans if one.rank == rank]
    scopes = _of_model(spans) if style.full else []
    scopes += [_Scope("optimizer", one.begin, one.end) for one in spans if one.name == "optimizer"]
    scopes += _reductions(run, rank)
    if style.head:
        return scopes
    scopes += [_Scope("loss", one.begin, one.end, depth=1) for one in spans if one.name == "loss"]
    if job.shape.pp > 1 and job.shape.vpp == 1:
        scopes += [
            _Scope("allreduce", one.begin, one.end) for one in spans if one.name == "grad-sync"
        ]
        scopes += _passes(run, spans, rank) + _exchanges(run, spans, rank)
    return scopes


def _of_model(spans: list[SpanPlan]) -> list[_Scope]:
    """Return the scopes of the model's forward, those of layers that are run again as well."""
    scopes = []
    for one in spans:
        name = one.name.removesuffix("-recompute")
        if name == "decoder":
            scopes.append(_Scope("decoder", one.begin, one.end, depth=1))
        elif name == "transformer_layer":
            scopes.append(_Scope("transformer_layer", one.begin, one.end, depth=2))
        elif name == "attention":
            scopes.append(_Scope("_forward_attention", one.begin, one.end, depth=3))
            scopes.append(_Scope("attention", one.begin, one.end, depth=4))
        elif name in ("mlp", "moe"):
            scopes.append(_Scope("_forward_mlp", one.begin, one.end, depth=3))
            scopes.append(_Scope("mlp", one.begin, one.end, depth=4))
            if name == "mlp":
                scopes.append(_Scope("MLP.forward", one.begin, one.end, depth=5))
    return scopes


def _reductions(run: Run, rank: int) -> list[_Scope]:
    """Return the reductions of tensor parallelism in forward passes, under the stage's ranks."""
    shape = run.world.job.shape
    if run.world.job.hidden_tp:
        return []
    stage = shape.stage(shape.place(rank)["pp"])
    others = [each for each in stage if each != rank]
    scopes = []
    for number, one in enumerate(run.program.operations):
        if one.rank != rank or one.code is not Code.JOIN or one.phase == "backward":
            continue
        made = run.program.communications[one.communication]
        if not made.group.startswith("tp@") or made.op != "all_reduce" or _is_of_loss(run, number):
            continue
        attributes: Attributes = {"expect": "_reduce", "group": others}
        scopes.append(_Scope("_reduce", number, number, attributes, is_transfer=True))
    return scopes


def _is_of_loss(run: Run, number: int) -> bool:
    one = run.program.operations[number]
    made = run.program.communications[one.communication]
    return made.size_bytes == 4 * run.world.job.tokens


def _warmup(run: Run, rank: int) -> int:
    shape = run.world.job.shape
    return min(shape.pp - 1 - shape.place(rank)["pp"], run.world.job.num_microbatches)


def _passes(run: Run, spans: list[SpanPlan], rank: int) -> list[_Scope]:
    warmup, total = _warmup(run, rank), run.world.job.num_microbatches
    scopes = []
    for one in spans:
        attributes: Attributes = {"micro_batch_index": one.microbatch}
        if one.name == "forward":
            name = "forward-warmup" if one.microbatch < warmup else "forward"
        elif one.name == "backward":
            name = "backward-cooldown" if one.microbatch >= total - warmup else "backward"
        else:
            continue
        scopes.append(_Scope(name, one.begin, one.end, attributes))
    return scopes


EXPECTS = {
    "recv-warmup": "send-warmup",
    "recv-extra": "send-warmup",
    "send-warmup": "recv-warmup",
    "exchange-next": "exchange-prev",
    "exchange-prev": "exchange-next",
}


def _named(notes: list[tuple[str, str, int]], warmup: int, steady: int) -> str:
    """Return the event's name of a batch of messages: [(op, direction, microbatch)]."""
    if len(notes) == 2:
        to_next = ("send", "forward") in {one[:2] for one in notes}
        return "exchange-next" if to_next else "exchange-prev"
    op, direction, microbatch = notes[0]
    if direction == "forward":
        if op == "recv":
            return "recv-warmup" if microbatch < warmup else "recv-extra"
        return "send-warmup" if microbatch < warmup else "exchange-next"
    if op == "recv":
        return "recv-cooldown" if microbatch >= steady else "exchange-next"
    if microbatch >= steady:
        return "send-cooldown"
    return "send-extra" if microbatch == steady - 1 else "exchange-prev"


def _exchange(name: str, operation: int, microbatch: int, messages: list[Message]) -> _Scope:
    attributes: Attributes = {}
    if not name.startswith("exchange"):
        attributes["micro_batch_index"] = microbatch
    if name in EXPECTS:
        attributes["expect"] = EXPECTS[name]
        attributes["group"] = [messages[0].peer] if messages else None
    attributes["data"] = sum(one.size_bytes for one in messages) or None
    return _Scope(name, operation, operation, attributes, is_transfer=True)


def _exchanges(run: Run, spans: list[SpanPlan], rank: int) -> list[_Scope]:
    """Return the exchanges of a rank, those of nothing at the ends of the pipeline included."""
    shape = run.world.job.shape
    warmup, total = _warmup(run, rank), run.world.job.num_microbatches
    steady = total - warmup
    batches: dict[int, list[Message]] = defaultdict(list)
    for one in run.program.messages:
        if run.program.operations[one.operation].rank == rank:
            batches[one.operation].append(one)
    scopes = []
    for operation, messages in batches.items():
        notes = [(one.op, one.direction, one.microbatch) for one in messages]
        name = _named(notes, warmup, steady)
        scopes.append(_exchange(name, operation, messages[0].microbatch, messages))
    stage = shape.place(rank)["pp"]
    if stage == 0:
        scopes += _nothing_before(spans, warmup, steady)
    if stage == shape.pp - 1:
        scopes += [
            _exchange("exchange-next", one.end, one.microbatch, [])
            for one in spans
            if one.name == "forward"
        ]
    return scopes


def _nothing_before(spans: list[SpanPlan], warmup: int, steady: int) -> list[_Scope]:
    """Return what the first stage records where it would talk to a stage before it."""
    scopes = []
    for one in spans:
        if one.name == "forward" and one.microbatch <= warmup:
            name = "recv-warmup" if one.microbatch < warmup else "recv-extra"
            scopes.append(_exchange(name, one.begin, one.microbatch, []))
        elif one.name == "backward":
            name = "exchange-prev" if one.microbatch < steady - 1 else "send-extra"
            name = "send-cooldown" if one.microbatch >= steady else name
            scopes.append(_exchange(name, one.end, one.microbatch, []))
    return scopes
