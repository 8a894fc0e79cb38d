"""Lay out the ideal run as a timeline for a viewer: the job as if all ranks were alike.

Steps lie end to end with a tenth of a step between them. Communication is drawn as its transfer
only, the last part before its end, because in an ideal run nobody waits for a slower peer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from detect.whatif.graph import (
    BACKWARD,
    DATA,
    FORWARD,
    GC,
    HOST,
    NS_PER_S,
    OPTIMIZER,
    Graph,
    Node,
    Replay,
    sweep,
)
from megascan import vocabulary
from megascan.arrays import Floats, Integers
from megascan.header import ClockOrigin, Device, RankHeader, foreign_header
from megascan.schema import NOT_APPLICABLE, Kind, Track
from megascan.timeline import TIMELINE_SCHEMA, Completeness, Timeline, span_table
from megascan.topology import Layout
from megascan.vocabulary import RECV, SEND

_STEP_SPACING = 1.1
_KINDS = {
    FORWARD: (Kind.COMPUTE, vocabulary.FORWARD, Track.COMPUTE),
    BACKWARD: (Kind.COMPUTE, vocabulary.BACKWARD, Track.COMPUTE),
    OPTIMIZER: (Kind.OPTIMIZER, vocabulary.OPTIMIZER, Track.COMPUTE),
    DATA: (Kind.DATA, vocabulary.BATCH_GENERATOR, Track.HOST),
    GC: (Kind.GC, "gc", Track.HOST),
    HOST: (Kind.HOST, "host", Track.HOST),
}


@dataclass(frozen=True)
class Drawn:
    """How a node is drawn."""

    kind: Kind
    name: str
    track: Track
    op: str = ""
    direction: str = ""
    phase: str = ""


def ideal_timeline(replay: Replay, source: Timeline | None = None) -> Timeline:
    """Return the timeline of the ideal run, with the iterations of the replay.

    `source` is the timeline that was replayed, for its headers; an op table has none, and gets
    plain ones.
    """
    if source is None:  # an op table holds one rank of each TP group: they are numbered from 0
        layout = Layout(dp=replay.num_lanes, pp=replay.graph.num_stages)
        ranks = np.arange(replay.ranks.size).reshape(replay.ranks.shape)
        run_id, origin_ns = "ideal", 0
        clock = ClockOrigin(domain="ideal", source="replay", origin_unix_ns=0)
        device = Device(kind="cuda", name="")
        headers: Mapping[int, RankHeader] = {
            rank: foreign_header(run_id, rank, layout, device, clock)
            for rank in ranks.ravel().tolist()
        }
    else:
        layout, ranks = source.layout, replay.ranks
        run_id, headers, origin_ns = f"{source.run_id} ideal", source.headers, source.origin_ns
    spans = _spans(replay, ranks, origin_ns)
    return Timeline(
        run_id=run_id,
        layout=layout,
        headers=headers,
        spans=spans,
        windows={},
        clocks={},
        clock_method="replayed; all ranks on one clock",
        origin_ns=origin_ns,
        completeness=Completeness(
            world_size=layout.world_size,
            ranks=tuple(sorted(ranks.ravel().tolist())),
            num_spans=spans.num_rows,
        ),
    )


def _times(replay: Replay) -> tuple[Floats, Floats]:
    """Return start and end of every node in the ideal run, seconds; all lanes are alike."""
    times = np.zeros((2, len(replay.graph.nodes)))

    def note(node: int, start: Floats, end: Floats) -> None:
        times[:, node] = start.item(), end.item()

    sweep(replay.graph, replay.ideal_row, observe=note)
    return times[0], times[1]


def drawn(node: Node) -> Drawn:
    """Return how a node's span is drawn, and what it is called: `forward`, `send_backward`."""
    if node.optype in _KINDS:
        kind, name, track = _KINDS[node.optype]
        return Drawn(kind, name, track, phase=name if kind == Kind.COMPUTE else "")
    if node.is_local:
        return Drawn(Kind.OPTIMIZER, node.optype, Track.COMPUTE)
    first, _, second = node.optype.partition("-")
    if second in (SEND, RECV):
        name = f"{second}_{first}"
        return Drawn(Kind.P2P, name, Track.COMMUNICATION, op=second, direction=first)
    return Drawn(Kind.COLLECTIVE, node.optype, Track.COMMUNICATION, op=node.optype)


def _spans(replay: Replay, ranks: Integers, origin_ns: int) -> pa.Table:
    """Return all spans, ordered by (rank, start), one row for each (step, node, lane)."""
    graph, times = replay.graph, _times(replay)
    shown = np.flatnonzero(times[1] > times[0])
    nodes = [graph.nodes[n] for n in shown]
    looks = [drawn(node) for node in nodes]
    shape = (len(replay.steps), len(shown), replay.num_lanes)

    def filled(values: Integers) -> Integers:
        return np.broadcast_to(values, shape).ravel()

    def spread(values: npt.ArrayLike) -> Integers:
        """Repeat each node's value for all its rows."""
        return filled(np.asarray(values)[None, :, None])

    offset = np.arange(len(replay.steps))[:, None] * _STEP_SPACING * replay.ideal_s
    begin, end = (np.rint((t[shown] + offset) * NS_PER_S).astype(np.int64) for t in times)
    duration = filled((end - begin)[:, :, None])
    local = spread([node.is_local for node in nodes])
    numbers = {
        "rank": filled(ranks[[node.stage for node in nodes]]),
        "track": spread([int(look.track) for look in looks]),
        "start_ns": filled(begin[:, :, None] + origin_ns),
        "duration_ns": duration,
        "iteration": filled(replay.steps[:, None, None]),
        "microbatch": spread([node.microbatch for node in nodes]),
        "chunk": spread([node.chunk for node in nodes]),
        "size_bytes": spread([node.size_bytes for node in nodes]),
        "match": _matches(graph, shown, shape),
        "wait_ns": np.where(local, NOT_APPLICABLE, 0),
        "transfer_ns": np.where(local, NOT_APPLICABLE, duration),
        "self_ns": np.where(local, duration, NOT_APPLICABLE),
    }
    order = np.lexsort((-duration, numbers["start_ns"], numbers["rank"]))
    texts = {}
    for name in ("kind", "name", "op", "direction", "phase"):
        values, code = np.unique([str(getattr(look, name)) for look in looks], return_inverse=True)
        texts[name] = spread(code)[order], values.tolist()
    ordered = {name: column[order] for name, column in numbers.items()}
    return span_table(len(order), ordered, texts, TIMELINE_SCHEMA)


def _matches(graph: Graph, shown: Integers, shape: tuple[int, int, int]) -> Integers:
    """Return ids shared by a send and its receive; collectives need none, they end together."""
    pair_of = np.full(len(graph.nodes), NOT_APPLICABLE)
    for number, group in enumerate(graph.groups):
        if len(group.nodes) == 2 and graph.nodes[group.nodes[0]].is_message:
            pair_of[list(group.nodes)] = number
    pair = pair_of[shown]
    cell = np.arange(shape[0])[:, None, None] * shape[2] + np.arange(shape[2])
    ids = cell * len(graph.groups) + pair[None, :, None]
    return np.where(pair[None, :, None] < 0, NOT_APPLICABLE, ids).ravel()
