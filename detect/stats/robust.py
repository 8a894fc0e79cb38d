"""Medians and scales that a few bad samples cannot move; all take NaN for "not recorded"."""

from __future__ import annotations

import numpy as np

from detect.thresholds.statistics import ROBUST
from detect.thresholds.verdicts import COSTS
from megascan.arrays import Flags, Floats


def median(values: Floats, axis: int | None = None) -> Floats:
    """Return the median of the values that are not NaN; NaN where there are none.

    numpy's `nanmedian` gives the same numbers, but takes ten times as long for short rows.
    """
    given = np.asarray(values, dtype=np.float64)
    if axis is None:
        given, axis = given.ravel(), 0
    ordered = np.sort(given, axis=axis)  # NaN last
    if not ordered.size:
        return np.full(np.delete(ordered.shape, axis), np.nan)
    num = ordered.shape[axis]
    if not np.isnan(ordered.take(-1, axis)).any():  # all are there: one place for all
        low, high = (ordered.take(place, axis) for place in ((num - 1) // 2, num // 2))
        return np.asarray(np.where(low == high, low, (low + high) / 2), dtype=np.float64)
    count = np.sum(~np.isnan(ordered), axis=axis, keepdims=True)
    low, high = (
        np.take_along_axis(ordered, np.maximum(place, 0), axis=axis)
        for place in ((count - 1) // 2, np.minimum(count // 2, num - 1))
    )
    middle = np.where(low == high, low, (low + high) / 2)
    return np.asarray(np.where(count > 0, middle, np.nan).squeeze(axis), dtype=np.float64)


def mean(values: Floats, axis: int | None = None) -> Floats:
    """Return the mean of the values that are not NaN; NaN where there are none.

    numpy's `nanmean` gives the same numbers, but warns where all values are NaN.
    """
    given = np.array(values, dtype=np.float64)
    missing = np.isnan(given)
    given[missing] = 0.0
    with np.errstate(invalid="ignore"):
        return np.asarray(given.sum(axis=axis) / (~missing).sum(axis=axis))


def usual(values: Floats) -> float:
    """Return what most of some values reach: their lower quartile, for as many as half of few may
    be far above what is usual. Raises IndexError for none.
    """
    return float(np.sort(values)[(len(values) - 1) // 4])


def standard_error(series: Floats) -> float:
    """Return the standard error of the mean of (iteration,); infinite of a single value."""
    if len(series) < 2:
        return np.inf
    return float(series.std(ddof=1) / np.sqrt(len(series)))


def log_of(values: Floats) -> Floats:
    """Return the logarithms; NaN where a value is not above 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(values > 0, np.log(values), np.nan)


def centre(values: Floats) -> Floats:
    """Return the mean of the middle third and a little more along the last axis, NaN left out.

    Of n samples n // 3 are left out at either end. So a third of the samples may be anything, while
    less is wasted than by a median. NaN where there are no samples.
    """
    ordered = np.sort(values, axis=-1)  # NaN last
    count = np.isfinite(ordered).sum(axis=-1, keepdims=True)
    place = np.arange(values.shape[-1])
    cut = count // ROBUST.trimmed_parts
    kept = (place >= cut) & (place < count - cut)
    return mean(np.where(kept, ordered, np.nan), axis=-1)


def beyond_most(values: Floats) -> Floats:
    """Return by how much values, (row, …), exceed what half of the rows do not exceed; 0 where they
    do not. Of two rows that is all that one has more than the other.
    """
    usual = np.quantile(values, 0.5, axis=0, method="lower")
    return np.asarray(np.maximum(values - usual, 0.0))


def spread(values: Floats, axis: int | None = None) -> Floats:
    """Return the standard deviation estimated by the median absolute deviation."""
    centre = median(values, axis=axis)
    if axis is not None:
        centre = np.expand_dims(centre, axis)
    return ROBUST.mad_to_sigma * median(np.abs(values - centre), axis=axis)


def ordinary(durations: Floats, counted: Flags) -> Flags:
    """Return the counted iterations without exceptional ones, those that save a checkpoint, say.

    Both arguments are (iteration,). An iteration that takes several times the median of the counted
    ones is exceptional. Example: 52, 51 and 2,900 ms are two ordinary iterations and an exceptional
    one.
    """
    if not counted.any():
        return counted
    return counted & (durations <= COSTS.exceptional_ratio * np.median(durations[counted]))


def leave_one_out_median(values: Floats) -> Floats:
    """Return for each entry the median of the other entries of its column; NaN where there is none.

    `values` is (member, sample). A suspect is thereby never part of its own expectation, which
    with two to four members matters more than any threshold. One sort serves all members: taking
    the element at sorted place p away shifts the ranks above p by one.

    Example: column (1, 2, 9) gives (5.5, 5, 1.5).
    """
    order = np.argsort(values, axis=0)
    ordered = np.take_along_axis(values, order, axis=0)
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.arange(len(values))[:, None], axis=0)
    present = np.isfinite(values)
    if present.all() and len(values) > 1:  # one place for all
        low, high = (
            np.where(place <= index, ordered[index + 1], ordered[index])
            for index in ((len(values) - 2) // 2, (len(values) - 1) // 2)
        )
        return np.asarray((low + high) / 2, dtype=np.float64)
    others = present.sum(axis=0)[None, :] - present
    own = np.where(present, place, len(values))
    low, high = (
        np.take_along_axis(ordered, np.clip(index + (index >= own), 0, len(ordered) - 1), axis=0)
        for index in ((others - 1) // 2, others // 2)
    )
    return np.asarray(np.where(others > 0, (low + high) / 2, np.nan), dtype=np.float64)


def expected_from_others(values: Floats, excluded: Flags) -> Floats:
    """Return the median of the other members that are not `excluded`, in the shape of `values`.

    `values` is (member, …). Excluded members (known faults) are expected to be like all the others.
    """
    flat = values.reshape(len(values), -1)
    if not excluded.any():
        return leave_one_out_median(flat).reshape(values.shape)
    expected = np.full_like(flat, np.nan)
    if (~excluded).any():
        expected[~excluded] = leave_one_out_median(flat[~excluded])
        expected[excluded] = median(flat[~excluded], axis=0)
    return expected.reshape(values.shape)


def three_point_median(series: Floats) -> Floats:
    """Return the running median of three along the last axis: single odd iterations vanish."""
    if series.shape[-1] < 3:
        return series
    padded = np.concatenate([series[..., :1], series, series[..., -1:]], axis=-1)
    inner = np.stack([padded[..., :-2], padded[..., 1:-1], padded[..., 2:]])
    return median(inner, axis=0)
