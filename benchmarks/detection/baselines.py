"""Decision rules of other tools, written anew and given the same spans.

Each sees each rank's own computation in the forward passes, waits taken out (backward spans hold
waits for overlapped collectives, which would mislead them); the tools themselves do not all have
that. So where they differ from us here is the rule, not the data. Thresholds are the tools'
defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd

from megascan.arrays import Floats
from megascan.timeline import Timeline

Rule = Callable[[pd.DataFrame, Timeline], set[int]]


def spans_of(timeline: Timeline) -> pd.DataFrame:
    """The columns that the rules use."""
    columns = [
        "rank", "kind", "name", "start_ns", "duration_ns", "iteration", "microbatch", "chunk",
        "group", "match", "self_ns",
    ]  # fmt: skip
    frame: pd.DataFrame = timeline.spans.select(columns).to_pandas()
    return frame


def _medians(spans: pd.DataFrame) -> pd.Series:
    """Median over iterations of each rank's computation in an iteration."""
    passes = spans[spans["name"] == "forward"]
    totals = passes.groupby(["rank", "iteration"])["self_ns"].sum()
    return totals.groupby("rank").median()


def relative_score(spans: pd.DataFrame, timeline: Timeline) -> set[int]:
    """NVIDIA resiliency extension: fastest rank's median over own median, flagged below 0.75."""
    medians = _medians(spans)
    return set(medians.index[medians.min() / medians < 0.75])


def sniff_test(spans: pd.DataFrame, timeline: Timeline) -> set[int]:
    """Slower than the median by more than max(MAD, 10 %)."""
    medians = _medians(spans)
    middle = medians.median()
    margin = max((medians - middle).abs().median(), 0.1 * middle)
    return set(medians.index[medians - middle > margin])


def twice_the_median(spans: pd.DataFrame, timeline: Timeline) -> set[int]:
    """DLRover's node check: more than twice the median."""
    medians = _medians(spans)
    return set(medians.index[medians > 2.0 * medians.median()])


def last_to_arrive(spans: pd.DataFrame, timeline: Timeline) -> set[int]:
    """Holistic trace analysis: the two ranks that arrive last at long collectives, always."""
    collectives = spans[(spans["kind"] == "collective") & (spans["match"] >= 0)]
    long = collectives[collectives["duration_ns"] > collectives["duration_ns"].quantile(0.9)]
    members = collectives[collectives["match"].isin(long["match"])]
    lateness = members["start_ns"] - members.groupby("match")["start_ns"].transform("min")
    return set(lateness.groupby(members["rank"]).mean().nlargest(2).index)


def verified_change_point(spans: pd.DataFrame, timeline: Timeline) -> set[int]:
    """After Greyhound: a change point in a rank's own series, kept if means differ by 10 %."""
    passes = spans[spans["name"] == "forward"]
    table = passes.pivot_table(
        index="rank", columns="iteration", values="self_ns", aggfunc="sum", observed=True
    )
    series = table.to_numpy(dtype=np.float64)[:, 2:]
    ranks = table.index.to_numpy()
    return {int(rank) for rank, row in zip(ranks, series, strict=True) if _shifts_up(row)}


def _shifts_up(series: Floats, least: int = 3) -> bool:
    """Best split of a series by the sum of squares; does the mean rise by 10 % there?"""
    splits = range(least, len(series) - least + 1)
    if not splits:
        return False
    cost = [series[:cut].var() * cut + series[cut:].var() * (len(series) - cut) for cut in splits]
    cut = splits[int(np.argmin(cost))]
    return bool(series[cut:].mean() > 1.1 * series[:cut].mean())


def original(spans: pd.DataFrame, timeline: Timeline) -> set[int]:
    """The original MegaScan: DP peers' backward 1.1 times over the mean of the others more than
    five times, then TP collectives shorter than 0.9 of the others' in 40 % of cases.

    Needs DP and TP of 2 and more; says nothing otherwise.
    """
    layout = timeline.layout
    if layout.tp < 2 or layout.dp < 2:
        return set()
    suspects = _original_suspects(spans, timeline)
    reduces = spans[spans["group"].astype(str).str.startswith("tp@") & (spans["match"] >= 0)]
    total = reduces.groupby("match")["duration_ns"].transform("sum")
    others = (total - reduces["duration_ns"]) / (layout.tp - 1)
    short = reduces["duration_ns"] < 0.9 * others
    share = short.groupby(reduces["rank"]).mean()
    return {rank for rank in suspects if share.get(rank, 0.0) > 0.4}


def _original_suspects(spans: pd.DataFrame, timeline: Timeline) -> set[int]:
    passes = spans[(spans["name"] == "backward") & (spans["iteration"] > 1)].copy()
    places = {rank: timeline.layout.coordinates(int(rank)) for rank in passes["rank"].unique()}
    passes["role"] = passes["rank"].map(lambda rank: (places[rank].pp, places[rank].tp))
    keys = ["role", "iteration", "microbatch", "chunk"]
    total = passes.groupby(keys)["duration_ns"].transform("sum")
    others = (total - passes["duration_ns"]) / (timeline.layout.dp - 1)
    hits = (passes["duration_ns"] > 1.1 * others).groupby(passes["rank"]).sum()
    return set(hits.index[hits > 5])


RULES: Mapping[str, Rule] = {
    "original MegaScan": original,
    "relative score 0.75": relative_score,
    "sniff test": sniff_test,
    "twice the median": twice_the_median,
    "last to arrive, top 2": last_to_arrive,
    "verified change point": verified_change_point,
}
