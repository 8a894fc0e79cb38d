"""Nothing ends before it can have begun: a fit that says so is wrong, or its error bar tells."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregate import build_timeline
from aggregate.clocks import align_clocks
from aggregate.match import match_spans
from megascan.timeline import numbers
from megascan.topology import Layout

MS, US = 1_000_000, 1_000
NODES = Layout(tp=2, dp=2)
NODE_GROUPS = {"tp@0": (0, 1), "tp@2": (2, 3), "dp@0": (0, 2), "dp@1": (1, 3)}


def error_between(fit, one, other):
    """Error bars, ns, of comparing times between ranks."""
    return fit.accuracy.between(fit.domain[one], fit.domain[other])


def aligned(trace):
    return align_clocks(trace.spans, match_spans(trace.spans, trace.headers), trace.headers)


def errors(build, fit, offset_ns, window_ns):
    """(rank, time) what the corrected clocks are off by, against rank 0."""
    true = build.epoch_ns + np.linspace(0, window_ns, 5).astype(np.int64)
    ranks = np.arange(len(offset_ns))
    local = true[None, :] - np.asarray(offset_ns, dtype=np.int64)[:, None]
    common = np.stack([fit.lines.common(np.full(len(true), rank), local[rank]) for rank in ranks])
    return common - common[0]


def violation_ns(trace, fit):
    """The largest gap, ns, by which somebody leaves before another has entered."""
    match = match_spans(trace.spans, trace.headers).match
    position = np.searchsorted(fit.ranks, numbers(trace.spans, "rank"))
    start = numbers(trace.spans, "start_ns")
    end = fit.lines.common(position, start + numbers(trace.spans, "duration_ns"))
    start = fit.lines.common(position, start)
    worst = 0
    for number in range(match.max() + 1):
        rows = match == number
        worst = max(worst, int(start[rows].max() - end[rows].min()))
    return worst


def two_nodes(build, *, offset_ns, late_ns, num_iterations=12):
    """Exact collectives inside two nodes; of those between them rank 2's may end late.

    Per iteration each pair of ranks across the nodes has a long one and a short one. Rank 2
    leaves its long one `late_ns` late and therefore enters its short one late.
    """
    random = np.random.default_rng(1)
    rows = []

    def add(rank, group, start, end, number, size):
        start, end = (round(at + random.normal(0, 500) - offset_ns[rank]) for at in (start, end))
        rows.append(build.collective(rank, group, start, end, sequence=number, size_bytes=size))

    for n in range(num_iterations):
        at = 900 * MS * n
        for k in range(40):
            for rank in range(4):
                begin = at + 10 * MS * k
                add(rank, f"tp@{rank // 2 * 2}", begin, begin + 200 * US, 40 * n + k, 10**6)
        long, short = at + 450 * MS, at + 480 * MS
        for rank, group in ((0, "dp@0"), (2, "dp@0"), (1, "dp@1"), (3, "dp@1")):
            late = late_ns if group == "dp@0" else 0
            add(rank, group, long, short + late * (rank == 2), 2 * n, 10**9)
            add(rank, group, short + 10 * US + late * (rank == 2),
                short + 40 * US + late, 2 * n + 1, 8)  # fmt: skip
    return build.trace(rows, NODE_GROUPS, NODES)


@pytest.mark.parametrize("offset_ns", [(0, 0, 0, 0), (0, 40 * MS, -95 * MS, 7 * MS)])
def test_a_link_that_ends_half_of_a_class_late_does_not_part_the_nodes(build, offset_ns):
    trace = two_nodes(build, offset_ns=offset_ns, late_ns=148 * MS)
    fit = aligned(trace)
    error = np.abs(errors(build, fit, offset_ns, 10**10)).max(axis=1)
    stated = error_between(fit, np.zeros(4, dtype=np.int64), np.arange(4))
    assert (error[1:] < 50 * US).all()
    assert (error[1:] <= stated[1:]).all()
    assert violation_ns(trace, fit) <= max(stated.max(), 2)


def test_the_same_job_without_a_slow_link_is_exact(build):
    trace = two_nodes(build, offset_ns=(0, 3 * MS, -2 * MS, MS), late_ns=0)
    fit = aligned(trace)
    assert np.abs(errors(build, fit, (0, 3 * MS, -2 * MS, MS), 10**10)).max() < 2 * US
    assert not any("moved" in note or "cannot be right" in note for note in fit.notes)


def always_late(build, late_ns, num_prompt):
    """Rank 1 leaves 90 collectives late, and some short ones in time."""
    rows = []
    for n in range(90):
        at = 5 * MS * n
        rows += [
            build.collective(0, "dp@0", at, at + 2 * MS, sequence=n),
            build.collective(1, "dp@0", at, at + 2 * MS + late_ns + n % 7 * 100, sequence=n),
        ]
    for n in range(num_prompt):
        at = 5 * MS * (3 * n + 1) - MS
        rows += [
            build.collective(rank, "dp@0", at, at + 20 * US, sequence=90 + n) for rank in (0, 1)
        ]
    return build.trace(rows, {"dp@0": (0, 1)})


def test_ends_that_lie_the_same_way_every_time_are_found_out_by_few_short_ones(build):
    trace = always_late(build, 600 * US, num_prompt=10)
    fit = aligned(trace)
    remains = violation_ns(trace, fit)
    error = np.abs(errors(build, fit, (0, 0), 450 * MS)).max()
    stated = error_between(fit, np.array([0]), np.array([1]))[0]
    assert stated >= remains
    assert stated >= 0.9 * error
    clock = build_timeline(trace).clocks[1]
    assert clock.error_ns == pytest.approx(stated)


def test_one_or_two_impossible_matches_are_told_and_not_believed(build):
    trace = always_late(build, 0, num_prompt=0)
    start = numbers(trace.spans, "start_ns").copy()
    start[np.flatnonzero(numbers(trace.spans, "rank") == 1)[40:42]] += 30 * MS
    place = trace.spans.schema.get_field_index("start_ns")
    spans = trace.spans.set_column(place, trace.spans.schema.field(place), [start])
    fit = aligned(build.trace(spans, {"dp@0": (0, 1)}))
    assert np.abs(errors(build, fit, (0, 0), 450 * MS)).max() < US
    assert error_between(fit, np.array([0]), np.array([1]))[0] < 5 * US
    assert any("2 matches cannot be right" in note for note in fit.notes)


def test_an_end_that_is_a_bound_ties_no_clock_but_still_bounds_it(build):
    """Messages back and forth whose receives only say `before`: 4 ms of slack, yet an order."""
    rows = []
    for n in range(30):
        at = 10 * MS * n
        bound = {"sequence": n, "end_is_bound": 1}
        rows += [build.collective(rank, "pp@0", at, at + MS, sequence=n) for rank in (0, 1)]
        rows += [
            build.send(0, 1, at + 2 * MS, at + 2 * MS + 100, **bound),
            build.receive(1, 0, at + 2 * MS, at + 6 * MS, **bound),
            build.send(1, 0, at + 2 * MS, at + 2 * MS + 100, direction="backward", **bound),
            build.receive(0, 1, at + 2 * MS, at + 3 * MS, direction="backward", **bound),
        ]
    fit = aligned(build.trace(rows, {"pp@0": (0, 1)}, Layout(pp=2)))
    assert fit.num_anchors.tolist() == [30, 30]
    assert "messages" not in fit.method
    assert abs(fit.lines.offset_ns[1]) < 100


def test_bounds_alone_link_clocks_within_what_they_allow(build):
    rows = []
    for n in range(30):
        at = 10 * MS * n
        bound = {"sequence": n, "end_is_bound": 1, "iteration": n + 1}
        rows += [
            build.send(0, 1, at, at + 100, **bound),
            build.receive(1, 0, at, at + 400 * US, **bound),
            build.send(1, 0, at + MS, at + MS + 100, direction="backward", **bound),
            build.receive(0, 1, at + MS, at + MS + 200 * US, direction="backward", **bound),
        ]
    fit = aligned(build.trace(rows))
    stated = error_between(fit, np.array([0]), np.array([1]))[0]
    assert abs(fit.lines.offset_ns[1]) <= stated
    assert 200 * US <= stated <= 700 * US


GROUPS = st.lists(
    st.lists(st.integers(0, 6), min_size=2, max_size=5, unique=True).map(sorted).map(tuple),
    min_size=1,
    max_size=6,
    unique=True,
)


def components_of(groups, num_ranks):
    """By hand: repeated union of sets."""
    sets = [{rank} for rank in range(num_ranks)]
    for group in groups:
        touched = [one for one in sets if one & set(group)]
        sets = [one for one in sets if one not in touched] + [set().union(*touched)]
    return sets


def random_job(build, groups, random, offset_ns, *, paused=-1, num_bad=0):
    """60 collectives a group, ends within 5 µs; a rank stands still for a while, some are wrong."""
    rows, names = [], {f"g{number}@{group[0]}": group for number, group in enumerate(groups)}
    for place, (name, group) in enumerate(names.items()):
        bad = random.choice(60, num_bad, replace=False) if num_bad else ()
        for n in range(60):
            end = 7 * MS * n + 100 * US * place + MS
            entered = end - random.uniform(20 * US, 900 * US, len(group))
            wrong = group[random.integers(len(group))] if n in bad else -1
            for rank, start in zip(group, entered, strict=True):
                late = abs(random.normal(0, 5 * US))
                if rank == paused and 20 <= n < 30:
                    late += 250 * MS
                moved = random.choice([-7 * MS, 7 * MS]) if rank == wrong else 0
                rows.append(
                    build.collective(
                        rank,
                        name,
                        round(start + moved - offset_ns[rank]),
                        round(end + late + moved - offset_ns[rank]),
                        sequence=n,
                    )
                )
    return build.trace(rows, names, Layout(dp=7))


@given(
    groups=GROUPS, seed=st.integers(0, 10**6), paused=st.integers(-1, 6), num_bad=st.integers(0, 2)
)
@settings(max_examples=15, deadline=None)
def test_any_union_of_groups_is_aligned_within_its_error_bars(build, groups, seed, paused, num_bad):
    random = np.random.default_rng(seed)
    offset_ns = random.uniform(-100 * MS, 100 * MS, 7)
    trace = random_job(build, groups, random, offset_ns, paused=paused, num_bad=num_bad)
    fit = aligned(trace)
    at = build.epoch_ns + np.linspace(0, 420 * MS, 4).astype(np.int64)
    local = at[None, :] - np.rint(offset_ns).astype(np.int64)[:, None]
    common = np.stack([fit.lines.common(np.full(4, rank), local[rank]) for rank in range(7)])
    for ranks in components_of(groups, 7):
        members = np.array(sorted(ranks))
        assert len(set(fit.component[members])) == 1
        others = np.setdiff1d(np.arange(7), members)
        one, other = np.meshgrid(members, others)
        assert np.isinf(error_between(fit, one.ravel(), other.ravel())).all()
        distance = np.abs(common[members] - common[members[0]]).max(axis=1)
        stated = error_between(fit, np.full(len(members), members[0]), members)
        assert (distance <= np.maximum(stated, 8 * US)).all()
        assert (stated < 40 * US).all()


@given(groups=GROUPS, seed=st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_what_clocks_show_does_not_matter(build, groups, seed):
    """The same job under other offsets gives the same common times."""
    common = []
    for scale in (0.0, 1.0):
        random = np.random.default_rng(seed)
        offset_ns = np.rint(scale * random.uniform(-100 * MS, 100 * MS, 7))
        trace = random_job(build, groups, random, offset_ns)
        fit = aligned(trace)
        rank = numbers(trace.spans, "rank")
        start = fit.lines.common(rank, numbers(trace.spans, "start_ns"))
        reference = np.array([np.flatnonzero(fit.component == c)[0] for c in fit.component])
        common.append(start + np.rint(-offset_ns[reference][rank]).astype(np.int64) * -1)
    assert np.abs(common[0] - common[1]).max() < 1 * US
