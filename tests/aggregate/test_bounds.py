"""Asynchronous work whose end is only a bound proves nothing about clocks and transfers."""

from aggregate import build_timeline
from megascan.schema import OWN_END
from megascan.timeline import numbers


def late_bound(build, **columns):
    """Two hosts agree by three collectives; a fourth seems to end 5 ms later on rank 1."""
    rows = []
    for number in range(3):
        begin = 10_000_000 * number
        rows += [
            build.collective(rank, "tp@0", begin, begin + 1_000_000, sequence=number)
            for rank in (0, 1)
        ]
    rows.append(build.collective(0, "tp@0", 40_000_000, 41_000_000, sequence=3, **columns))
    rows.append(build.collective(1, "tp@0", 40_000_000, 46_000_000, sequence=3, **columns))
    trace = build.trace(rows, {"tp@0": (0, 1)}, domains=["a", "b"])
    return build_timeline(trace)


def test_bounds_are_no_anchors(build):
    assert late_bound(build, end_is_bound=1).clocks[1].num_anchors == 3
    assert late_bound(build).clocks[1].num_anchors == 4


def test_ends_that_own_work_follows_tie_clocks_only_where_nothing_else_of_the_axis_does(build):
    assert late_bound(build, end_is_bound=OWN_END).clocks[1].num_anchors == 3
    ends = {"end_is_bound": OWN_END}
    rows = [build.collective(rank, "dp@0", 0, 1_000_000, sequence=0, **ends) for rank in (0, 1)]
    timeline = build_timeline(build.trace(rows, {"dp@0": (0, 1)}, domains=["a", "b"]))
    assert timeline.clocks[1].num_anchors == 1
    assert (numbers(timeline.spans, "wait_ns") >= 0).all(), "who came late is known all the same"


def test_bounds_are_matched_and_not_split(build):
    spans = late_bound(build, end_is_bound=1).spans
    bound = numbers(spans, "end_is_bound") == 1
    assert (numbers(spans, "match")[bound] >= 0).all()
    assert (numbers(spans, "wait_ns")[bound] == -1).all()
    assert (numbers(spans, "transfer_ns")[bound] == -1).all()
    assert (numbers(spans, "transfer_ns")[~bound] > 0).all()
