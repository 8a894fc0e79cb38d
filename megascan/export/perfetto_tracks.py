"""The tree of tracks in the protobuf: run, then DP and PP groups, ranks, kinds.

    run r-2024…                        root: its row shows the job's iterations
      DP0                              a group's row shows its iterations
        DP0 PP1
          DP0 PP1 TP0 · rank 02 · host     a rank's row shows its iterations and their wait share
            iteration, compute, collective, …, curves

Viewers sort what is not ordered explicitly by name, so every level says its order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackDescriptor

from megascan.export.drawing import Drawing
from megascan.export.naming import (
    CURVE_NUMBER,
    MARK_NUMBER,
    MARK_TRACK,
    group_titles,
    rank_order,
    rank_title,
    track_number,
    track_title,
)
from megascan.export.perfetto_packets import SEQUENCE

ROOT = 1
"""Uuid of the root track; the others follow in the order of the tree."""


@dataclass(frozen=True)
class TrackNode:
    """One track: its place in the tree and, for a curve, its unit."""

    uuid: int
    parent: int
    name: str
    order: int
    unit: str | None = None


@dataclass(frozen=True, kw_only=True)
class TrackTree:
    """All tracks, and where to find those that something is drawn on.

    `levels` gives the uuid of each rank's group, from the root inwards; `kinds` is keyed by rank
    and track number, `curves` by rank and the curve's name, `marks` by rank.
    """

    nodes: tuple[TrackNode, ...]
    levels: tuple[dict[int, int], ...]
    ranks: dict[int, int]
    kinds: dict[tuple[int, int], int]
    curves: dict[tuple[int, str], int]
    marks: dict[int, int]


def build_tree(drawing: Drawing) -> TrackTree:
    """Tracks of a drawing."""
    builder = _Builder(drawing)
    for rank in sorted(drawing.ranks, key=lambda rank: rank_order(drawing.timeline.layout, rank)):
        builder.add_rank(rank)
    return builder.tree()


class _Builder:
    def __init__(self, drawing: Drawing) -> None:
        self._drawing = drawing
        self._layout = drawing.timeline.layout
        self._nodes = [TrackNode(ROOT, 0, f"run {drawing.timeline.run_id}", 0)]
        self._group_of: dict[str, int] = {}
        depth = max((len(group_titles(self._layout, rank)) for rank in drawing.ranks), default=0)
        self._levels: list[dict[int, int]] = [{} for _ in range(1 + depth)]
        self._ranks: dict[int, int] = {}
        self._kinds: dict[tuple[int, int], int] = {}
        self._curves: dict[tuple[int, str], int] = {}
        self._marks: dict[int, int] = {}
        self._tracks_of: dict[int, list[tuple[int, str]]] = {rank: [] for rank in drawing.ranks}
        for track in drawing.tracks:
            title = track_title(track.kind, track.lane)
            self._tracks_of.setdefault(track.rank, []).append((track.number, title))
        self._marked = {mark.rank for mark in drawing.marks}

    def add_rank(self, rank: int) -> None:
        parent = self._levels[0][rank] = ROOT
        titles = group_titles(self._layout, rank)
        for title, level in zip(titles, self._levels[1:], strict=True):
            parent = level[rank] = self._group(title, parent)
        header = self._drawing.timeline.headers.get(rank)
        uuid = self._add(parent, rank_title(self._layout, rank, header))
        self._ranks[rank] = uuid
        self._add_tracks(rank, uuid)

    def _add_tracks(self, rank: int, parent: int) -> None:
        if rank in self._marked:
            number = track_number(MARK_NUMBER, 0)
            self._marks[rank] = self._add(parent, MARK_TRACK, order=number)
        for number, title in sorted(self._tracks_of[rank]):
            self._kinds[rank, number] = self._add(parent, title, order=number)
        behind = track_number(CURVE_NUMBER, 0)
        for place, curve in enumerate(self._drawing.counters):
            uuid = self._add(parent, curve.name, order=behind + place, unit=curve.unit)
            self._curves[rank, curve.name] = uuid

    def _group(self, title: str, parent: int) -> int:
        if title not in self._group_of:
            self._group_of[title] = self._add(parent, title)
        return self._group_of[title]

    def _add(
        self, parent: int, name: str, *, order: int | None = None, unit: str | None = None
    ) -> int:
        uuid = len(self._nodes) + 1
        self._nodes.append(TrackNode(uuid, parent, name, uuid if order is None else order, unit))
        return uuid

    def tree(self) -> TrackTree:
        return TrackTree(
            nodes=tuple(self._nodes),
            levels=tuple(self._levels),
            ranks=self._ranks,
            kinds=self._kinds,
            curves=self._curves,
            marks=self._marks,
        )


def descriptor_packets(tree: TrackTree) -> Iterator[TracePacket]:
    """Track descriptors, parents before children."""
    for node in tree.nodes:
        packet = TracePacket(trusted_packet_sequence_id=SEQUENCE)
        track = packet.track_descriptor
        track.uuid, track.name = node.uuid, node.name
        if node.parent:
            track.parent_uuid = node.parent
        track.child_ordering = TrackDescriptor.EXPLICIT
        track.sibling_order_rank = node.order
        track.sibling_merge_behavior = TrackDescriptor.SIBLING_MERGE_BEHAVIOR_NONE
        if node.unit is not None:
            track.counter.unit_name = node.unit
        yield packet
