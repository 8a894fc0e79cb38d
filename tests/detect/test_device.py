"""Slow passes are the device's where the optimizer, or mates on the same data, show it."""

from __future__ import annotations

import pytest

from detect import Cause, Owner
from megascan.topology import Layout


def passes_of(ranks, factor):
    """Longer passes, the optimizer as quick as ever."""
    return lambda slot: factor if slot.rank in ranks and slot.name != "optimizer" else 1.0


def owners(report):
    return {one.ranks: (one.cause, one.owner) for one in report.findings}


@pytest.mark.parametrize(
    ("layout", "longer"), [(Layout(dp=8), {3}), (Layout(tp=2, dp=4), {2, 3})], ids=["dp", "tp"]
)
def test_longer_passes_of_a_whole_replica_are_undecided(job, layout, longer):
    report = job(layout=layout, work=passes_of(longer, 1.3)).report()
    assert set(owners(report)) == {(rank,) for rank in longer}
    assert {owner for _, owner in owners(report).values()} == {Owner.UNDECIDED}
    assert "its optimizer step, which no data can lengthen" in " ".join(report.findings[0].evidence)


def test_slow_optimizer_shows_the_device(job, slow):
    report = job(layout=Layout(dp=8), work=slow(3, 1.3)).report()
    assert owners(report) == {(3,): (Cause.COMPUTE, Owner.NODE)}


def test_one_of_several_ranks_on_the_same_data_is_the_device(job):
    report = job(layout=Layout(tp=2, dp=4), work=passes_of({3}, 1.3)).report()
    assert owners(report) == {(3,): (Cause.COMPUTE, Owner.NODE)}


def test_two_slow_mates_are_both_named(job, slow, together):
    """The slower one stands out, but the other waits for nobody: its optimizer is slower, too."""
    report = job(layout=Layout(tp=2, dp=4), work=together(slow(2, 1.1), slow(3, 1.2))).report()
    assert set(owners(report)) == {(2,), (3,)}
    assert {owner for _, owner in owners(report).values()} == {Owner.NODE}
