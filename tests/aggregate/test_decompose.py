from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregate import build_timeline
from aggregate.merge import self_times
from megascan.schema import Track
from megascan.timeline import numbers
from megascan.topology import Layout

PAIR = {"tp@0": (0, 1)}
ONE_HOST = ["host", "host"]


def columns(timeline, *names):
    table = timeline.spans
    return [tuple(row) for row in zip(*(numbers(table, name) for name in names), strict=True)]


def waits(build, rows, groups=None, domains=ONE_HOST, **options):
    trace = build.trace(rows, groups, domains=domains, **options)
    return columns(build_timeline(trace), "wait_ns", "transfer_ns")


@pytest.mark.parametrize(
    ("case", "own", "other", "expected"),
    [
        ("both at once: all transfer", (0, 100), (0, 100), (0, 100)),
        ("the first waits for the last", (0, 100), (70, 100), (70, 30)),
        ("the last waits for nobody", (70, 100), (0, 100), (0, 30)),
        ("left before the last had come: a wrong match", (0, 100), (150, 200), (-1, -1)),
        ("an empty span", (50, 50), (20, 80), (0, 0)),
    ],
)
def test_wait_ends_when_the_last_member_starts(build, case, own, other, expected):
    rows = [build.collective(0, "tp@0", *own), build.collective(1, "tp@0", *other)]
    assert waits(build, rows, PAIR)[0] == expected, case


@pytest.mark.parametrize(
    ("case", "sent", "received", "expected"),
    [
        ("posted early: the receive waits", (60, 100), (0, 100), [(0, 40), (60, 40)]),
        ("posted late: the send waits", (0, 100), (60, 100), [(60, 40), (0, 40)]),
        (
            "buffered: the send was over before the receive was posted",
            (0, 10),
            (60, 100),
            [(0, 10), (0, 40)],
        ),
        (
            "buffered behind another message: the send waits for room, and leaves its transfer",
            (0, 50),
            (60, 70),
            [(40, 10), (0, 10)],
        ),
        (
            "received before it was sent: a wrong match",
            (60, 100),
            (0, 50),
            [(0, 40), (-1, -1)],
        ),
    ],
)
def test_a_message_waits_for_its_other_side(build, case, sent, received, expected):
    found = waits(build, [build.send(0, 1, *sent), build.receive(1, 0, *received)])
    assert found == expected, case


def test_nobody_waits_for_who_came_after_he_had_left(build):
    """The root of a broadcast leaves at once, a member when the data is there."""
    group = {"dp@0": (0, 1, 2)}
    times = {0: (0, 10), 1: (4, 30), 2: (25, 45)}
    rows = [build.collective(rank, "dp@0", *times[rank], op="broadcast") for rank in times]
    assert waits(build, rows, group, ["host"] * 3, layout=Layout(dp=3)) == [
        (4, 6),
        (21, 5),
        (0, 20),
    ]
    times = {0: (20, 30), 1: (0, 24), 2: (50, 60)}
    rows = [build.collective(rank, "dp@0", *times[rank], op="broadcast") for rank in times]
    assert waits(build, rows, group, ["host"] * 3, layout=Layout(dp=3)) == [
        (0, 10),
        (20, 4),
        (0, 10),
    ]


@pytest.mark.parametrize(
    ("gap_ns", "expected"), [(1_000, (10**5, 0)), (400_000, (-1, -1))], ids=["within", "beyond"]
)
def test_an_end_before_the_last_start_is_a_wait_only_within_the_error_bar(build, gap_ns, expected):
    """One collective of sixty in which rank 0 seems to leave before rank 1 has come."""
    random = np.random.default_rng(0)
    rows = [
        build.collective(
            rank, "tp@0", 10**6 * n, 10**6 * n + 10**5 + int(random.normal(0, 2000)), sequence=n
        )
        for n in range(60)
        for rank in (0, 1)
    ]
    came = 70 * 10**6 + 10**5 + gap_ns
    rows += [
        build.collective(0, "tp@0", 70 * 10**6, 70 * 10**6 + 10**5, sequence=60),
        build.collective(1, "tp@0", came, came + 10**4, sequence=60),
    ]
    timeline = build_timeline(build.trace(rows, PAIR))
    assert timeline.clocks[1].error_ns < 100_000
    wait, transfer = columns(timeline, "wait_ns", "transfer_ns")[60]
    assert (wait, transfer) == pytest.approx(expected, abs=1000 if expected[0] > 0 else 0)


def test_what_has_no_match_is_not_split(build):
    rows = [build.collective(0, "tp@0", 0, 100), build.span(1, "compute", "forward", 0, 10)]
    assert waits(build, rows, PAIR) == [(-1, -1), (-1, -1)]


def two_clocks(build, lateness):
    """Two clocks whose ends scatter by about 1 µs, and one collective with a late member."""
    random = np.random.default_rng(0)
    rows = [
        build.collective(rank, "tp@0", 10**6 * n, 10**6 * n + 10**5 + int(random.normal(0, 1000)),
                         sequence=n)
        for n in range(60) for rank in (0, 1)
    ]  # fmt: skip
    late = {"sequence": 60}
    rows += [
        build.collective(0, "tp@0", 70 * 10**6, 70 * 10**6 + 10**5, **late),
        build.collective(1, "tp@0", 70 * 10**6 + lateness, 70 * 10**6 + 10**5, **late),
    ]
    timeline = build_timeline(build.trace(rows, PAIR))
    return columns(timeline, "wait_ns", "transfer_ns")[60], timeline


def test_below_the_clocks_error_bar_no_wait_is_claimed(build):
    (wait, transfer), timeline = two_clocks(build, 1500)
    assert timeline.clocks[1].residual_p99_ns > 1500
    assert (wait, transfer) == (0, pytest.approx(10**5, abs=20))


def test_above_the_error_bar_the_wait_is_claimed_whole(build):
    (wait, transfer), timeline = two_clocks(build, 50_000)
    assert timeline.clocks[1].residual_p99_ns < 10_000
    assert wait == pytest.approx(50_000, abs=1000)
    assert wait + transfer == pytest.approx(10**5, abs=20)


def test_between_clocks_that_nothing_links_nothing_is_claimed(build):
    rows = [build.collective(rank, "tp@0", 0, 100, op="broadcast") for rank in (0, 1)]
    assert waits(build, rows, PAIR, domains=None) == [(-1, -1), (-1, -1)]


def selfs(build, rows, **options):
    timeline = build_timeline(build.trace(rows, PAIR, domains=ONE_HOST, **options))
    return columns(timeline, "self_ns", "self_cpu_ns")


def test_self_time_is_what_synchronous_communication_leaves(build):
    rows = [
        build.span(0, "compute", "forward", 0, 100, cpu_ns=80),
        build.collective(0, "tp@0", 10, 30, cpu_ns=5),
        build.collective(0, "tp@0", 40, 50, sequence=1, cpu_ns=5),
        build.collective(0, "tp@0", 60, 90, sequence=2, track=int(Track.OVERLAPPED)),
        build.span(1, "optimizer", "optimizer", 0, 100),
    ]
    assert selfs(build, rows) == [(70, 70), (-1, -1), (-1, -1), (-1, -1), (100, -1)]


def test_a_bracket_and_what_it_holds_count_once(build):
    rows = [
        build.span(0, "compute", "finish", 0, 100, cpu_ns=90),
        build.collective(0, "", 10, 60, op="", cpu_ns=30),
        build.collective(0, "tp@0", 20, 30, cpu_ns=10),
        build.collective(0, "tp@0", 40, 60, sequence=1, cpu_ns=20),
    ]
    assert selfs(build, rows)[0] == (50, 60)


def test_a_batched_exchange_counts_once(build):
    rows = [
        build.span(0, "iteration", "iteration", 0, 100, cpu_ns=60),
        build.send(0, 1, 20, 80, cpu_ns=10),
        build.receive(0, 1, 20, 80, direction="backward", cpu_ns=10),
    ]
    assert selfs(build, rows)[0] == (40, 50)


spans_of_a_rank = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 50), st.integers(0, 30), st.booleans()),
    min_size=1,
    max_size=15,
)


@given(spans_of_a_rank)
@settings(max_examples=200, deadline=None)
def test_self_time_equals_counting_nanoseconds(drawn):
    rows = sorted((rank, start, -length, inside) for rank, start, length, inside in drawn)
    rank, start, negative, inside = (np.array(column) for column in zip(*rows, strict=True))
    duration = -negative
    every, untimed = np.arange(len(rows)), np.full(len(rows), -1)
    own, _ = self_times(rank, start, duration, untimed, inside=inside, work=every)
    for row, value in enumerate(own):
        taken = {
            at
            for other in np.flatnonzero(inside & (rank == rank[row]))
            for at in range(start[other], start[other] + duration[other])
        }
        assert value == len(set(range(start[row], start[row] + duration[row])) - taken)


def test_every_split_of_a_simulated_job_adds_up(build):
    offset = np.array([0, 3e7, -2e7, 9e7])
    skew = {"offset_ns": offset, "drift": offset * 4e-13, "jitter_ns": 2e4}
    trace, _ = build.skewed_job(Layout(dp=4), 60, slow_rank=2, **skew)
    timeline = build_timeline(trace)
    wait, transfer = numbers(timeline.spans, "wait_ns"), numbers(timeline.spans, "transfer_ns")
    assert (wait >= 0).all()
    assert (transfer >= 0).all()
    assert (wait + transfer == numbers(timeline.spans, "duration_ns")).all()
    rank = numbers(timeline.spans, "rank")
    assert wait[rank == 2].max() < 1e5
    assert wait[rank != 2].min() > 2e6
