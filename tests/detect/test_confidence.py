"""How sure a finding says it is: by chance, and by how often names like it were right."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from detect.causes.finding import undecided
from detect.report import Cause, Confidence, Finding, Owner
from detect.thresholds.verdicts import TRUST

WORDS = {f"{word}_{what}" for word in ("high", "good", "moderate") for what in ("q", "share")}


def named(cause=Cause.COMPUTE, q_value=1e-15, cost=1.1, owner=Owner.NODE, ranks=(5,), **more):
    return Finding(
        **{"num_peers": 7} | more, ranks=ranks, cause=cause, owner=owner,
        slowdown=1.3, slowdown_interval=(1.2, 1.4),
        first_iteration=3, last_iteration=20, share_of_iterations=1.0, q_value=q_value,
        step_time_cost_ratio=cost, statement="rank 5 is slow",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("q_value", "word"),
    [(0.0, "high"), (9e-5, "high"), (2e-4, "good"), (0.01, "moderate"), (0.2, "low")],
)
def test_chance_alone_decides_where_a_slow_device_costs_the_step(q_value, word):
    assert named(q_value=q_value).confidence == word


@pytest.mark.parametrize(
    ("cause", "cost", "word"),
    [
        (Cause.COMPUTE, 1.05, "high"),
        (Cause.COMPUTE, 1.04, "good"),
        (Cause.LOADER, 1.2, "good"),
        (Cause.HOST, 1.2, "high"),
        (Cause.HOST, 1.01, "moderate"),
        (Cause.LINK, 3.0, "high"),
        (Cause.CORRUPTION, 1.0, "high"),
        (Cause.GC, 1.2, "high"),  # nobody has counted those
    ],
)
def test_a_name_is_no_surer_than_such_names_were_right(cause, cost, word):
    assert named(cause, cost=cost).confidence == word


@pytest.mark.parametrize(("num_peers", "is_read", "word"), [
    (3, False, "high"), (2, False, "good"), (1, False, "good"), (1, True, "high"),
])  # fmt: skip
def test_few_peers_take_a_step_unless_its_clock_was_read(num_peers, is_read, word):
    few = named(num_peers=num_peers, is_read=is_read)
    assert few.confidence == word
    assert replace(few, owner=Owner.UNDECIDED).confidence == "high"  # as sure as chance leaves it
    assert replace(few, cause=Cause.LINK).confidence == "high"


def test_a_device_that_is_slow_now_and_then_may_get_longer_documents_at_times():
    at_times = named(slow_passes_ratio=1.3)
    assert at_times.named_as == "compute_at_times"
    assert [at_times.confidence, named().confidence] == ["good", "high"]
    assert replace(at_times, num_peers=1).confidence == "moderate"
    assert replace(at_times, cause=Cause.LINK).confidence == "high"


def test_a_host_that_is_blamed_for_several_ranks_is_less_sure_than_for_one():
    assert named(Cause.HOST, ranks=(4, 5)).confidence is Confidence.GOOD


def test_which_end_of_a_connection_is_at_fault_is_never_sure():
    assert named(Cause.LINK, ranks=(3, 11), is_pair=True).confidence is Confidence.LOW
    inside = named(Cause.LINK, ranks=(0, 1, 2, 3), is_inside=True)
    assert inside.confidence is Confidence.LOW


def test_doubts_add_up():
    several = named(Cause.HOST, ranks=(4, 5))
    words = [replace(several, q_value=q).confidence for q in (1e-9, 5e-4, 0.01, 0.2)]
    assert words == ["good", "moderate", "low", "low"]


def test_what_names_nobody_is_as_sure_as_chance_leaves_it():
    link = named(Cause.LINK, is_pair=True)
    assert undecided(link, "why").confidence is Confidence.HIGH
    assert named(Cause.STAGE_IMBALANCE, owner=Owner.JOB).confidence is Confidence.HIGH


def test_headline_and_json_say_the_confidence_that_the_finding_has_in_the_end():
    finding = named()
    assert finding.headline == "rank 5 is slow; confidence high (q below 1e-12)"
    cheap = replace(finding, step_time_cost_ratio=1.001, q_value=1e-5)
    assert cheap.headline == "rank 5 is slow; confidence good (q 1e-05)"
    assert cheap.to_json()["confidence"] == "good"
    assert cheap.to_json()["headline"] == cheap.headline


def test_bits_that_differ_leave_nothing_to_chance():
    assert named(Cause.CORRUPTION, q_value=0.0).headline == "rank 5 is slow"


def test_every_share_that_was_counted_is_one_that_a_finding_asks_for():
    counted = {one.name for one in fields(TRUST)} - {"costly_ratio", "min_peers", *WORDS}
    asked = [
        ("compute", named()), ("host", named(Cause.HOST, ranks=(4, 5))),
        ("host_of_one", named(Cause.HOST)), ("loader", named(Cause.LOADER)),
        ("link", named(Cause.LINK)), ("link_of_pair", named(Cause.LINK, is_pair=True)),
        ("link_inside", named(Cause.LINK, is_inside=True)),
        ("compute_at_times", named(slow_passes_ratio=1.3)),
    ]  # fmt: skip
    names = {f"{name}{costly}" for name, _ in asked for costly in ("", "_costly")}
    assert names == counted
    for name, finding in asked:
        assert finding.named_as == name
        cheap = replace(finding, step_time_cost_ratio=1.0)
        assert finding._share_right() == getattr(TRUST, f"{name}_costly")
        assert cheap._share_right() == getattr(TRUST, name)
