"""The stated power is that of the whole judgement: what is planted at it is found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detect import DetectorSettings, Owner, Verdict
from detect.causes.compute import _owner_of
from detect.causes.power import Power, _slowed, _Together, _tried, planted_power
from detect.detector import _inquiry
from detect.observe.extract import observe
from detect.observe.operations import BACKWARD, FORWARD
from detect.observe.warmup import steady
from detect.text import render_text
from detect.thresholds.devices import COMPUTE
from detect.thresholds.statistics import POWER
from megascan.topology import Layout

pytestmark = pytest.mark.power


def named(report, rank):
    return any(rank in one.ranks and one.owner == Owner.NODE for one in report.findings)


@pytest.mark.parametrize("layout", [Layout(dp=4, tp=2), Layout(dp=2, pp=2), Layout(dp=6)])
def test_a_device_that_is_slower_by_the_power_is_named(job, layout):
    sound = job(layout=layout)
    report = sound.report()
    assert report.verdict == Verdict.HEALTHY
    power = report.minimum_detectable_slowdown

    def slower(slot):
        if slot.rank != 1:
            return 1.0
        return power**0.25 if slot.name == "optimizer" else power  # a lower clock, bound by memory

    findings = sound.but(work=slower).report().findings
    assert any(1 in one.ranks for one in findings)


def test_a_pair_does_not_claim_what_stays_undecided(job):
    """Two ranks: below 4.5 % one may be slower than the other and as good as any device."""
    report = job(layout=Layout(dp=2, pp=2), noise=0.002).report()
    assert any(
        "is found, but its node is sure to be named only from" in note for note in report.notes
    )


def test_two_iterations_claim_no_small_slowdown(job):
    report = job(layout=Layout(dp=4, tp=2), iterations=2, noise=0.02).report()
    least = report.minimum_detectable_slowdown
    assert (
        least is None or least > job(layout=Layout(dp=4, tp=2)).report().minimum_detectable_slowdown
    )


def test_slow_ranks_of_the_trace_are_not_tried(job, slow):
    report = job(layout=Layout(dp=6), work=slow(2, 1.5)).report()
    assert named(report, 2)
    assert 1.0 < report.minimum_detectable_slowdown < 2.0


def test_only_who_is_not_found_is_tried_at_the_largest_factor(job):
    """Rank 0 is found from the first factor on and named from the second, rank 3 never."""
    seen = observe(job(layout=Layout(dp=4)).timeline())
    tried: list[tuple[int, float]] = []

    def judged(inquiry, row):
        shown = float(np.nanmax(inquiry.seen.work.log_ns[row] - seen.work.log_ns[row]))
        effect = shown / (1.0 - COMPUTE.hidden_share)
        tried.append((row, round(effect, 6)))
        if row == 3:
            return None
        return Owner.NODE if row or effect > 0.05 else Owner.UNDECIDED

    power = planted_power(_inquiry(seen, DetectorSettings()), 0.04, np.zeros(4, dtype=bool), judged)
    assert power.found == pytest.approx(0.04) and power.unseen == (3,)
    assert power.named == pytest.approx(0.04 * POWER.rung_ratio)
    largest = round(float(np.log(POWER.blind_ratio)), 6)
    assert [row for row, effect in tried if effect == largest] == [3]


@pytest.mark.parametrize(("noise", "verdict"), [
    (0.03, Verdict.HEALTHY),
    (0.25, Verdict.UNDECIDED),
])  # fmt: skip
def test_silence_of_a_trace_that_shows_no_third_more_is_no_health(job, noise, verdict):
    report = job(layout=Layout(dp=6), microbatches=1, iterations=10, noise=noise).report()
    assert report.verdict == verdict
    assert all(not one.ranks for one in report.findings)  # passes are uneven, nobody is slow
    least = report.minimum_detectable_slowdown
    assert least < POWER.blind_ratio
    assert (least >= POWER.healthy_ratio) == (verdict == Verdict.UNDECIDED)
    report = replace(report, findings=())
    said = f"a rank that computes less than {least:.2f}x slower would not have been found"
    assert (said in " ".join(render_text(report).split())) == (verdict == Verdict.UNDECIDED)


def test_who_asks_for_large_slowdowns_only_is_told_of_health(job):
    report = job(layout=Layout(dp=4, tp=2)).report(DetectorSettings(min_slowdown=1.5))
    assert report.minimum_detectable_slowdown >= POWER.healthy_ratio
    assert report.verdict == Verdict.HEALTHY


def test_silence_about_a_rank_that_cannot_be_judged_is_no_health(job, monkeypatch):
    monkeypatch.setattr(
        "detect.causes.compute.planted_power", lambda *given: Power(0.03, 0.03, unseen=(3,))
    )
    report = job(layout=Layout(dp=4)).report()
    assert (report.verdict, report.unseen_ranks) == (Verdict.UNDECIDED, (3,))
    first = render_text(report).splitlines()[0]
    assert first.endswith("rank 3 would not have been found at 2 times its time.")


def test_a_lone_tp_group_claims_nothing_where_it_waits_unseen(job):
    """Whoever is slow in it, its mates are as slow; with a second group one of both is found."""
    alone = job(layout=Layout(tp=4)).report()
    assert alone.verdict == Verdict.UNDECIDED
    assert "nothing below a factor of 2 can be seen here" in " ".join(render_text(alone).split())
    assert job(layout=Layout(tp=2, dp=4)).report().verdict == Verdict.HEALTHY


def shown_by(seen, row):
    """Return by how much forward and backward of each rank grow when `row` is slowed."""
    slowed = _slowed(seen, _Together.of(seen), row, 0.1)
    grown = np.nanmean(slowed.work.log_ns - seen.work.log_ns, axis=1)
    return [grown[:, seen.work.phase == phase].mean(axis=1) for phase in (FORWARD, BACKWARD)]


def test_mates_that_differ_by_nothing_in_one_phase_wait_in_it(exchanging, job):
    """Four TP groups; in the backward pass, whose all-reduces nobody saw, mates are alike."""

    def chip(slot):
        return 1.01 if slot.phase == "forward" and slot.rank % 2 else 1.0

    units = [((2 * pair, 2 * pair + 1), 4_000_000, 1.0) for pair in range(4)]
    timeline = job(layout=Layout(dp=4, tp=2), noise=0.0, work=chip).timeline()
    seen = exchanging(timeline, units)
    kinds = tuple(kind.replace("dp", "tp", 1) for kind in seen.transfers.kinds)
    seen = replace(seen, transfers=replace(seen.transfers, kinds=kinds))
    forward, backward = shown_by(seen, 0)
    planted = 0.1 * (1.0 - COMPUTE.hidden_share)
    assert forward[:3] == pytest.approx([planted, 0.0, 0.0])
    # the quicker chip of the two: its mate had kept it waiting before
    assert backward[:3] == pytest.approx([planted - np.log(1.01)] * 2 + [0.0], abs=1e-6)


@pytest.mark.parametrize(
    ("operation", "size", "waits"),
    [("all_reduce", 4_000_000, False), ("all_reduce", -1, False), ("broadcast", 4_000_000, True),
     ("all_reduce", 4_096, True)],
)  # fmt: skip
def test_batches_and_norms_are_not_the_communication_of_a_model(
    exchanging, job, operation, size, waits
):
    """What else TP mates exchange was not recorded: both are slower if one of them is."""
    units = [((2 * pair, 2 * pair + 1), size, 1.0) for pair in range(4)]
    seen = exchanging(job(layout=Layout(dp=4, tp=2)).timeline(), units)
    kinds = tuple(f"tp {operation} of {size} bytes" for _ in seen.transfers.kinds)
    seen = replace(seen, transfers=replace(seen.transfers, kinds=kinds))
    forward, _ = shown_by(seen, 0)
    assert (forward[1] > 0) == waits


def test_who_exchanges_tokens_unseen_waits_too(job):
    seen = observe(job(layout=Layout(dp=4, ep=2)).timeline())
    forward, backward = shown_by(seen, 0)
    waiting = 0.1 * (1.0 - COMPUTE.hidden_share) - POWER.hidden_lead_log
    mates = [rank in seen.members.layout.group(0, "ep") for rank in range(4)]
    assert forward == pytest.approx(np.where(mates, waiting, 0.0))
    assert backward == pytest.approx(forward)


def test_the_quickest_chips_are_tried_first(job, slow):
    """Of twenty ranks and more one may be quicker than all that are tried: 95 % is claimed."""
    seen = observe(job(layout=Layout(dp=24), work=slow(7, 0.9), noise=0.001).timeline())
    seen.work.log_ns[11] -= 0.05
    tried = _tried(_inquiry(seen, DetectorSettings()), np.zeros(24, dtype=bool))
    assert tried[0] == 11 and 7 not in tried
    assert len(tried) == POWER.max_rows


def test_power_counts_only_what_is_called_slow_computing(job, slow):
    """Who is slow in one kind of passes alone is found, of unknown cause."""

    def forward_only(slot):
        return 1.5 if slot.rank == 2 and slot.phase == "forward" else 1.0

    for work, owner in ((slow(2, 1.5), Owner.NODE), (forward_only, None)):
        seen = steady(observe(job(layout=Layout(dp=6), work=work).timeline()), DetectorSettings())
        assert _owner_of(_inquiry(seen, DetectorSettings()), 2) == owner


def test_the_report_says_from_which_slowdown_on_a_node_is_named(job):
    pair = job(layout=Layout(dp=2, pp=2), noise=0.002).report()
    assert pair.minimum_named_slowdown > pair.minimum_detectable_slowdown
    assert pair.to_json()["minimum_named_slowdown"] == round(pair.minimum_named_slowdown, 4)
