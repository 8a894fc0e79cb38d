"""Clocks that are fitted to some of the ends of a trace that has many."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from aggregate import anchors
from aggregate.anchors import drawn_members
from aggregate.clocks import MORE_JUMPS, align_clocks, without_steps
from aggregate.match import match_spans
from aggregate.merge import Correction
from benchmarks.alignment_jobs import EPOCH_NS, PERIOD_NS, Skew, planted_job
from megascan.timeline import numbers, shifted
from megascan.topology import Layout

LAYOUT = Layout(tp=2, dp=4)
NUM_EVENTS = 6_000
FEW = 12_000


@pytest.fixture(scope="module")
def job():
    skew = Skew.drawn(LAYOUT.world_size, seed=3)
    trace = planted_job(LAYOUT, NUM_EVENTS, skew, seed=3)
    return trace, match_spans(trace.spans, trace.headers), skew


@pytest.fixture
def few_are_enough(monkeypatch):
    monkeypatch.setattr(anchors, "ENOUGH_ENDS", FEW)
    monkeypatch.setattr(anchors, "_ENDS_A_CLOCK", 1)


def true_times(skew, at_ns):
    """(rank, time) what the clocks show at true times."""
    rank = np.repeat(np.arange(len(skew.drift)), len(at_ns))
    return rank, skew.local(rank, np.tile(at_ns, len(skew.drift)))


def worst_error_us(fit, skew):
    at_ns = EPOCH_NS + np.linspace(0, NUM_EVENTS * PERIOD_NS, 9).astype(np.int64)
    rank, local = true_times(skew, at_ns)
    common = fit.lines.common(rank, local).reshape(-1, len(at_ns))
    return float(np.abs(common - common[0]).max()) / 1e3


def test_few_ends_are_all_taken(job):
    trace, matches, _ = job
    rows = matches.members
    domain = np.arange(8)[numbers(trace.spans, "rank")[rows]]
    assert drawn_members(trace.spans, matches.match, rows, domain) is rows


def test_clocks_from_a_quarter_of_the_ends_are_as_good(job, few_are_enough, monkeypatch):
    trace, matches, skew = job
    fit = align_clocks(trace.spans, matches, trace.headers)
    monkeypatch.setattr(anchors, "ENOUGH_ENDS", 10**9)
    of_all = align_clocks(trace.spans, matches, trace.headers)
    num_ends = len(matches.members)
    taken = int(fit.method.split(" with ")[1].split(" anchors")[0])
    assert FEW * 0.9 < taken <= FEW
    assert f"(drawn evenly, {num_ends - taken} left out)" in fit.method
    assert "left out" not in of_all.method
    assert worst_error_us(of_all, skew) < 3
    assert worst_error_us(fit, skew) < 6
    assert fit.residual_p99_ns == pytest.approx(of_all.residual_p99_ns, rel=0.2)
    assert fit.accuracy.of_domains() == pytest.approx(of_all.accuracy.of_domains(), rel=0.2)


def moved_from(trace, rank, moment_ns, by_ns):
    """The trace with the clock of one rank set by `by_ns` at a true moment."""
    spans = trace.spans
    start_ns = numbers(spans, "start_ns")
    later = (numbers(spans, "rank") == rank) & (start_ns > moment_ns)
    return replace(trace, spans=shifted(spans, np.where(later, by_ns, 0)))


@pytest.mark.parametrize(("by_ns", "ambiguous"), [(4_000_000, 0), (-4_000_000, 1)])
def test_a_jump_between_two_drawn_ends_is_found_to_the_end(job, few_are_enough, by_ns, ambiguous):
    """A clock that is set back shows some times twice: that of a span that begins then."""
    trace, matches, skew = job
    moment = EPOCH_NS + 2_017 * PERIOD_NS + PERIOD_NS // 5
    (local,) = skew.local(np.array([5]), np.array([moment]))
    moved = moved_from(trace, 5, local, by_ns)
    clocks = align_clocks(moved.spans, matches, trace.headers)
    assert "left out" in clocks.method
    steps, mended = without_steps(moved.spans, matches, trace.headers, clocks)
    (step,) = steps
    assert step.domain == 5
    assert abs(step.jump_ns - by_ns) < 50_000
    spans = Correction(mended.ranks, mended.domain, mended.lines, steps, None).applied(moved.spans)
    plain = align_clocks(trace.spans, matches, trace.headers)
    expected = Correction(plain.ranks, plain.domain, plain.lines, (), None).applied(trace.spans)
    off_ns = np.abs(numbers(spans, "start_ns") - numbers(expected, "start_ns"))
    assert np.count_nonzero(off_ns > 100_000) == ambiguous  # the others are on the right side


def test_jumps_are_not_looked_for_without_end(job, few_are_enough, monkeypatch):
    trace, matches, skew = job
    moved = trace
    for rank, period in ((5, 600), (5, 2_000), (5, 3_000)):
        (local,) = skew.local(np.array([rank]), np.array([EPOCH_NS + period * PERIOD_NS]))
        moved = moved_from(moved, rank, local, 4_000_000)
    clocks = align_clocks(moved.spans, matches, trace.headers)
    enough, mended = without_steps(moved.spans, matches, trace.headers, clocks)
    monkeypatch.setattr("aggregate.clocks._MOST_FITS", len(enough) - 1)
    fewer, told = without_steps(moved.spans, matches, trace.headers, clocks)
    assert fewer == enough[:-1]
    assert MORE_JUMPS not in mended.notes and MORE_JUMPS in told.notes


def with_sizes(trace, chosen, size_bytes):
    spans = trace.spans
    sizes = np.where(chosen, size_bytes, 1 << 10)
    place = spans.schema.get_field_index("size_bytes")
    return spans.set_column(place, spans.schema.field(place), pa.array(sizes))


def drawn_events(spans, matches, domain):
    rank = numbers(spans, "rank")[matches.members]
    rows = drawn_members(spans, matches.match, matches.members, domain[rank])
    return np.unique(matches.match[rows]), rows


def test_the_order_in_which_texts_were_met_does_not_matter(job, few_are_enough):
    trace, matches, _ = job
    spans = trace.spans
    column = spans.column("group").combine_chunks()
    back = pa.array(column.dictionary.to_pylist()[::-1])
    codes = len(back) - 1 - column.indices.to_numpy()
    other = pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), back)
    place = spans.schema.get_field_index("group")
    turned = spans.set_column(place, spans.schema.field(place), other)
    assert turned.column("group").to_pylist()[:99] == spans.column("group").to_pylist()[:99]
    one, other = (drawn_events(table, matches, np.arange(8))[1] for table in (spans, turned))
    assert one.tolist() == other.tolist()


def test_rare_collectives_are_all_kept_and_all_of_their_members(job, few_are_enough):
    trace, matches, _ = job
    sequence = numbers(trace.spans, "sequence")
    rare = sequence % 600 == 0
    spans = with_sizes(trace, rare, 1 << 30)
    _, rows = drawn_events(spans, matches, np.arange(8))
    assert len(rows) <= FEW
    assert np.isin(np.flatnonzero(rare), rows).all()
    members = np.bincount(matches.match)
    assert (np.bincount(matches.match[rows])[np.unique(matches.match[rows])]
            == members[np.unique(matches.match[rows])]).all()  # fmt: skip


def test_what_is_drawn_is_spread_over_the_time_and_follows_no_pattern(job, few_are_enough):
    trace, matches, _ = job
    _, rows = drawn_events(trace.spans, matches, np.arange(8))
    rank, sequence = (numbers(trace.spans, name)[rows] for name in ("rank", "sequence"))
    drawn = np.sort(sequence[rank == 0])
    stride = NUM_EVENTS / len(drawn)
    assert np.diff(np.r_[0, drawn, NUM_EVENTS]).max() < 5 * stride
    eighth = np.bincount(drawn // 2 % 8, minlength=8) / len(drawn)
    assert eighth.min() > 0.08  # each place of a period of eight is among them


def test_collectives_within_one_clock_are_few(job, few_are_enough):
    trace, matches, _ = job
    host = np.arange(8) // 2  # tensor-parallel pairs share a clock
    _, rows = drawn_events(trace.spans, matches, host)
    groups = np.array(trace.spans.column("group").to_pylist())[rows]
    within = np.char.startswith(groups, "tp@")
    assert 0 < np.count_nonzero(within) <= FEW / 4
    assert FEW / 2 < np.count_nonzero(~within) <= FEW
    one = np.zeros(8, dtype=np.int64)
    assert FEW / 2 < len(drawn_events(trace.spans, matches, one)[1]) <= FEW


def test_a_clock_that_wanders_is_in_the_error_bars_as_with_all_ends(
    job, few_are_enough, monkeypatch
):
    trace, matches, _ = job
    start_ns = numbers(trace.spans, "start_ns")
    age = (start_ns - EPOCH_NS) / (NUM_EVENTS * PERIOD_NS)
    wander_ns = np.where(numbers(trace.spans, "rank") == 5, 2e5 * np.sin(3 * age), 0.0)
    spans = shifted(trace.spans, np.rint(wander_ns).astype(np.int64))
    fit = align_clocks(spans, matches, trace.headers)
    monkeypatch.setattr(anchors, "ENOUGH_ENDS", 10**9)
    of_all = align_clocks(spans, matches, trace.headers)
    assert fit.steps == of_all.steps == ()
    assert of_all.accuracy.of_domains()[5] > 25e3
    assert fit.accuracy.of_domains()[5] == pytest.approx(of_all.accuracy.of_domains()[5], rel=0.1)
    assert fit.residual_p99_ns[5] == pytest.approx(of_all.residual_p99_ns[5], rel=0.1)
