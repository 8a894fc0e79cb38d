"""How ranks and tracks are called and ordered, so that any viewer shows them DP, PP, TP."""

from __future__ import annotations

from collections.abc import Iterable

from megascan.header import RankHeader
from megascan.schema import Kind
from megascan.topology import Layout

AXES = ("dp", "pp", "cp", "ep", "tp")
"""Axes in the order in which ranks stand: what differs least is outermost."""

KIND_NUMBERS: dict[str, int] = {str(kind): number for number, kind in enumerate(Kind, start=1)}
"""Position of a kind's track within its rank, from 1: 0 is for findings."""
CURVE_NUMBER = len(KIND_NUMBERS) + 2
"""Position of the first curve, behind all kinds."""

MARK_TRACK = "finding"
MARK_NUMBER = 0

_LANES_IN_ORDER = 10


def axis_labels(layout: Layout, rank: int, axes: Iterable[str]) -> list[str]:
    """`DP03` in a layout of 16, for each axis: padded, so that names sort like numbers."""
    place = layout.coordinates(rank)
    return [
        f"{axis.upper()}{getattr(place, axis):0{_digits(getattr(layout, axis))}d}" for axis in axes
    ]


def shown_axes(layout: Layout) -> list[str]:
    """Axes that tell ranks apart; DP, PP and TP are always named."""
    return [axis for axis in AXES if axis in ("dp", "pp", "tp") or getattr(layout, axis) > 1]


def group_titles(layout: Layout, rank: int) -> list[str]:
    """Groups that a rank stands in, outermost first: `DP0`, `DP0 PP1`.

    Axes of size 1 make no group, nor do the axes within a stage's replica.
    """
    axes = [axis for axis in ("dp", "pp", "cp") if getattr(layout, axis) > 1]
    labels = axis_labels(layout, rank, axes)
    return [" ".join(labels[: count + 1]) for count in range(len(labels))]


def rank_title(layout: Layout, rank: int, header: RankHeader | None) -> str:
    """`DP0 PP1 TP0 · rank 02 · host`; alphabetical order is the order of the axes."""
    axes = " ".join(axis_labels(layout, rank, shown_axes(layout)))
    title = f"{axes} · rank {rank:0{_digits(layout.world_size)}d}"
    return f"{title} · {header.host}" if header else title


def rank_order(layout: Layout, rank: int) -> tuple[int, ...]:
    """Sorts ranks as their titles do."""
    place = layout.coordinates(rank)
    return (*(getattr(place, axis) for axis in AXES), rank)


def kind_number(kind: str) -> int:
    """Position of a kind's track; kinds that are not known share the one behind them all."""
    return KIND_NUMBERS.get(kind, len(KIND_NUMBERS) + 1)


def track_number(kind_number: int, lane: int) -> int:
    """Number of a track within its rank: 20 for compute, 21 for its second lane, …

    Viewers show tracks in the order of their numbers. The eleventh lane and further ones stand
    behind everything, where there is room for any number of them.
    """
    if lane < _LANES_IN_ORDER:
        return kind_number * _LANES_IN_ORDER + lane
    return 1000 * (lane + 1 - _LANES_IN_ORDER) + kind_number


def track_title(kind: str, lane: int) -> str:
    """`collective`, and `collective (lane 2)` for what overlaps it without nesting."""
    return kind if lane == 0 else f"{kind} (lane {lane + 1})"


def _digits(count: int) -> int:
    return len(str(count - 1))
