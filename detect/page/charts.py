"""Line charts as numbers: scales, ticks and paths that a template only has to write down."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detect.observations import Floats, Ints
from detect.page.series import Series

WIDTH, HEIGHT = 720, 230
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 40
MOST_POINTS = 400
"""More iterations are drawn as medians of neighbours: a page stays small."""
NUM_X_TICKS = 8


@dataclass(frozen=True)
class Tick:
    """Where along the axis, and what stands there."""

    at: float
    text: str


@dataclass(frozen=True)
class Line:
    """One path, and single points where neighbours are missing."""

    name: str
    path: str
    dots: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A drawn series."""

    quantity: str
    unit: str
    summary: str
    lines: tuple[Line, ...]
    peers: Line
    peers_name: str
    band: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    breaks: tuple[float, ...]
    """Where iterations were skipped."""
    note: str
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float

    def y(self, values: Floats) -> Floats:
        share = (values - self.low) / (self.high - self.low)
        return np.asarray(HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP))


def chart_of(series: Series) -> Chart:
    """Lay a series out. Iterations stand side by side; where some were not traced is marked."""
    thin, iterations = _thinned(series)
    values = [*(line for _, line in thin.lines), thin.peers, thin.peers_low, thin.peers_high]
    scale, ticks = _scale(np.concatenate(values), series.unit)
    x = _x(len(iterations))
    return Chart(
        quantity=series.quantity,
        unit=series.unit,
        summary=_summary(series),
        lines=tuple(_line(name, x, scale.y(line)) for name, line in thin.lines),
        peers=_line(series.peers_name, x, scale.y(thin.peers)),
        peers_name=series.peers_name,
        band=_band(x, scale.y(thin.peers_low), scale.y(thin.peers_high)),
        x_ticks=_x_ticks(x, iterations),
        y_ticks=tuple(
            Tick(round(float(scale.y(np.array(tick))), 1), _number(tick, ticks)) for tick in ticks
        ),
        breaks=_breaks(x, iterations),
        note=""
        if len(iterations) == len(series.iterations)
        else f"{len(series.iterations):,} iterations, drawn as medians of neighbours",
    )


def _thinned(series: Series) -> tuple[Series, Ints]:
    """At most MOST_POINTS points, each the median of neighbouring iterations."""
    number = len(series.iterations)
    if number <= MOST_POINTS:
        return series, series.iterations
    edges = np.linspace(0, number, MOST_POINTS + 1).astype(int)[:-1]

    def thin(values: Floats) -> Floats:
        parts = np.split(values, edges[1:])
        return np.array(
            [np.nanmedian(part) if np.isfinite(part).any() else np.nan for part in parts]
        )

    thinned = Series(
        quantity=series.quantity,
        unit=series.unit,
        iterations=series.iterations[edges],
        lines=tuple((name, thin(values)) for name, values in series.lines),
        peers_name=series.peers_name,
        peers=thin(series.peers),
        peers_low=thin(series.peers_low),
        peers_high=thin(series.peers_high),
    )
    return thinned, thinned.iterations


def _scale(values: Floats, unit: str) -> tuple[_Scale, list[float]]:
    """From the least to the largest value, widened to round numbers; ratios show 1."""
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    if unit == "x":
        low, high = min(low, 0.95), max(high, 1.05)
    elif low < 0.5 * high:
        low = min(0.0, low)
    if high - low < 1e-9:
        high = low + 1.0
    step = _round_step((high - low) / 4)
    first, last = np.floor(low / step + 1e-9), np.ceil(high / step - 1e-9)
    ticks = [float(number * step) for number in np.arange(first, last + 1)]
    return _Scale(ticks[0], ticks[-1]), ticks


def _round_step(rough: float) -> float:
    size = 10.0 ** np.floor(np.log10(rough))
    return float(next(size * each for each in (1, 2, 5, 10) if size * each >= rough * 0.999))


def _number(tick: float, ticks: list[float]) -> str:
    step = ticks[1] - ticks[0]
    digits = max(0, int(-np.floor(np.log10(step) + 1e-9)))
    return f"{tick:,.{digits}f}"


def _x(number: int) -> Floats:
    inner = WIDTH - RIGHT - LEFT
    return LEFT + inner * (np.arange(number) + 0.5) / max(number, 1)


def _line(name: str, x: Floats, y: Floats) -> Line:
    known = np.isfinite(y)
    path, dots = [], []
    for number in np.flatnonzero(known).tolist():
        joined = number > 0 and known[number - 1]
        path.append(f"{'L' if joined else 'M'}{x[number]:.1f} {y[number]:.1f}")
        if not joined and not (number + 1 < len(known) and known[number + 1]):
            dots.append((round(float(x[number]), 1), round(float(y[number]), 1)))
    return Line(name, "".join(path), tuple(dots))


def _band(x: Floats, low: Floats, high: Floats) -> str:
    """Closed outlines around each stretch without a gap."""
    known = np.flatnonzero(np.isfinite(low) & np.isfinite(high))
    parts = []
    for run in np.split(known, np.flatnonzero(np.diff(known) > 1) + 1):
        if not len(run):
            continue
        there = [f"{x[n]:.1f} {high[n]:.1f}" for n in run.tolist()]
        back = [f"{x[n]:.1f} {low[n]:.1f}" for n in run[::-1].tolist()]
        parts.append("M" + "L".join(there + back) + "Z")
    return "".join(parts)


def _x_ticks(x: Floats, iterations: Ints) -> tuple[Tick, ...]:
    every = max(1, -(-len(x) // NUM_X_TICKS))
    return tuple(
        Tick(round(float(x[number]), 1), str(int(iterations[number])))
        for number in range(0, len(x), every)
    )


def _breaks(x: Floats, iterations: Ints) -> tuple[float, ...]:
    """Where more iterations were skipped than is usual."""
    steps = np.diff(iterations)
    if len(steps) < 2:
        return ()
    places = np.flatnonzero(steps > np.median(steps))
    if len(places) > 40:  # every window is a break: nothing to say
        return ()
    return tuple(round(float((x[n] + x[n + 1]) / 2), 1) for n in places.tolist())


def _summary(series: Series) -> str:
    """The chart in a sentence, for who cannot see it."""
    peers = float(np.nanmedian(series.peers)) if np.isfinite(series.peers).any() else np.nan
    parts = [
        f"{name} has a median of {_value(float(np.nanmedian(values)), series.unit)}"
        for name, values in series.lines
        if np.isfinite(values).any()
    ]
    if np.isfinite(peers):
        parts.append(f"its {series.peers_name} of {_value(peers, series.unit)}")
    return f"{series.quantity.capitalize()}: {', '.join(parts)}."


def _value(value: float, unit: str) -> str:
    return f"{value:.3f} times" if unit == "x" else f"{value:.3g} {unit}"
