"""What is drawn, before it is encoded: selected spans with their tracks, arrows, curves, marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megascan.errors import UsageError
from megascan.export.counters import Counter, make_counters
from megascan.export.flows import BoundArrows, bind, find_arrows
from megascan.export.selection import Mark, Selection
from megascan.export.tracks import TrackKey, lay_tracks
from megascan.timeline import Timeline

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A timeline ready for any encoder.

    `spans` are the selected rows; `track` is the number of each row's track within its rank.
    Arrows and tracks speak of these rows. `marks` and `counters` are those of selected ranks.
    """

    timeline: Timeline
    spans: pa.Table
    track: npt.NDArray[np.int32]
    tracks: tuple[TrackKey, ...]
    arrows: BoundArrows
    counters: tuple[Counter, ...]
    marks: tuple[Mark, ...]
    ranks: tuple[int, ...]
    selection: Selection


def make_drawing(timeline: Timeline, selection: Selection, marks: Sequence[Mark]) -> Drawing:
    """Select, put on tracks, connect.

    Arrows and curves are those of the whole timeline: a selection shows less of them, it does not
    change what they say. Raises UsageError for a selection that holds nothing.
    """
    whole = timeline.spans.unify_dictionaries()
    arrows = find_arrows(whole)
    curves = make_counters(whole)
    spans = whole
    if not selection.takes_all:
        chosen = selection.mask(whole)
        spans, arrows = whole.filter(pa.array(chosen)), arrows.within(chosen)
        if not spans.num_rows:
            raise UsageError(
                f"nothing to write: the selected {selection.words()} hold none of the "
                f"{whole.num_rows:,} spans of {len(timeline.headers)} ranks; select others"
            )
    track, tracks = lay_tracks(spans)
    shown = _shown_ranks(timeline, selection, tracks)
    return Drawing(
        timeline=timeline,
        spans=spans,
        track=track,
        tracks=tracks,
        arrows=bind(arrows, spans),
        counters=tuple(_selected(curve, selection) for curve in curves),
        marks=tuple(mark for mark in marks if mark.rank in shown),
        ranks=tuple(sorted(shown)),
        selection=selection,
    )


def _shown_ranks(
    timeline: Timeline, selection: Selection, tracks: tuple[TrackKey, ...]
) -> set[int]:
    """Ranks that are drawn, those that recorded nothing among them."""
    ranks = set(timeline.headers) if selection.ranks is None else set(selection.ranks)
    return ranks & set(timeline.headers) | {track.rank for track in tracks}


def _selected(curve: Counter, selection: Selection) -> Counter:
    chosen = np.ones(len(curve.value), dtype=np.bool_)
    if selection.ranks is not None:
        chosen &= np.isin(curve.rank, sorted(selection.ranks))
    if selection.iterations is not None:
        chosen &= np.isin(curve.iteration, sorted(selection.iterations))
    return Counter(
        curve.name,
        curve.unit,
        curve.rank[chosen],
        curve.iteration[chosen],
        curve.time_ns[chosen],
        curve.value[chosen],
    )
