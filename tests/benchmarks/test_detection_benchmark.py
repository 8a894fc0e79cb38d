"""The benchmark itself: its cases, its scores, the other tools' rules."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from aggregate import build_timeline
from benchmarks.detection.baselines import RULES, spans_of
from benchmarks.detection.cases import FULL, QUICK, cases
from benchmarks.detection.figures import Share, alarmed, precision, recall
from benchmarks.detection.jobs import Case, base_job
from benchmarks.detection.outcomes import Outcome, append_outcome, read_outcomes
from benchmarks.detection.planted import SEVERITIES
from benchmarks.detection.report import to_json, to_text
from benchmarks.detection.runner import run_case, true_cost_ratio
from benchmarks.detection.scoring import score
from benchmarks.detection.targets import targets
from benchmarks.detection.thresholds import LADDER, Judged, effect, without_power
from detect.causes import compute
from detect.report import Cause, Finding, Owner, Report
from detect.thresholds.tables import thresholds
from megascan.simulate import Fault, parse_fault, simulate_trace
from megascan.topology import Layout

LAYOUT = Layout(tp=2, dp=4)


def case(*faults: Fault, **changes: object) -> Case:
    job = base_job(LAYOUT, "compute-bound", iterations=8, num_microbatches=2)
    values = {"group": "compute", "layout_name": "x", "cost_name": "compute-bound", "seed": 1}
    return Case(**{**values, "job": job, "faults": faults, **changes})


def finding(*ranks: int, cause: Cause = Cause.COMPUTE, owner: Owner = Owner.NODE) -> Finding:
    return Finding(
        ranks=ranks,
        cause=cause,
        owner=owner,
        slowdown=1.21,
        slowdown_interval=(1.2, 1.22),
        first_iteration=6,
        last_iteration=8,
        share_of_iterations=1.0,
        q_value=1e-6,
        step_time_cost_ratio=1.1,
        statement="",
    )


def report(*findings: Finding) -> Report:
    return Report(
        world_size=8,
        iterations=(1, 8),
        num_iterations=8,
        findings=findings,
        minimum_detectable={},
        iteration_ns=1e9,
    )


SLOW_3 = parse_fault("rank=3,kind=compute,factor=1.2,from=5")


@pytest.mark.parametrize("plan", [QUICK, FULL], ids=["quick", "full"])
def test_a_third_of_the_cases_have_no_fault(plan):
    all_cases = cases(plan)
    assert sum(not each.faults for each in all_cases) >= len(all_cases) / 3
    assert [each.seed for each in all_cases] == list(range(len(all_cases)))
    for each in all_cases:
        for fault in each.faults:
            fault.check(each.job.layout)


def test_every_class_and_severity_is_there():
    planted = {(each.group, each.severity) for each in cases(FULL) if each.faults}
    for severity in SEVERITIES:
        assert ("compute", severity) in planted
    assert {"link", "host", "loader", "gc", "several", "few_peers"} <= {kind for kind, _ in planted}


def test_several_faults_leave_a_healthy_half_in_each_stage():
    for each in cases(FULL):
        if each.group == "several":
            layout = each.job.layout
            stages = [layout.coordinates(fault.rank).pp for fault in each.faults]
            most = layout.world_size // layout.pp // 2
            assert max(stages.count(stage) for stage in stages) <= most


def test_the_right_name_counts():
    found = score(case(SLOW_3, duration="transient"), report(finding(3)))
    assert (found.num_found, found.num_right_cause, found.num_false) == (1, 1, 0)
    assert found.top_is_right
    assert found.onset_error == 1
    assert found.slowdown_error == pytest.approx(1.21 / 1.2 - 1)


@pytest.mark.parametrize(
    ("findings", "found", "false"),
    [
        ((finding(2),), 0, 1),
        ((finding(2, 3),), 0, 1),
        ((finding(3, owner=Owner.UNDECIDED),), 0, 0),
        ((finding(3, owner=Owner.JOB),), 0, 0),
        ((finding(2), finding(3)), 1, 1),
        ((), 0, 0),
    ],
)
def test_other_names_do_not(findings, found, false):
    result = score(case(SLOW_3), report(*findings))
    assert (result.num_found, result.num_false) == (found, false)
    assert result.top_is_right == (found == 1 and false == 0)


def test_the_cost_is_compared_with_the_same_job_without_its_fault():
    lasting = case(parse_fault("rank=3,kind=compute,factor=1.5"), duration="permanent")
    trace = simulate_trace(lasting.job, lasting.faults, lasting.seed)
    truth = true_cost_ratio(lasting, trace)
    assert 1.2 < truth < 1.5  # all wait for the slow rank, but communication stays
    found = score(lasting, report(finding(3)), truth)
    assert found.cost_error == pytest.approx(1.1 / truth - 1.0)
    assert true_cost_ratio(lasting, simulate_trace(lasting.job, (), lasting.seed)) == 1.0


def test_a_pair_must_be_named_as_a_pair():
    link = parse_fault("rank=1,kind=link,factor=2,peer=5")
    assert score(case(link), report(finding(5, 1, cause=Cause.LINK))).num_right_cause == 1
    assert score(case(link), report(finding(1, cause=Cause.LINK))).num_false == 1


def test_the_jobs_own_cause_is_looked_for():
    uneven = case(group="heavy_stage", job_cause="stage_imbalance")
    stage = finding(4, 5, cause=Cause.STAGE_IMBALANCE, owner=Owner.JOB)
    assert score(uneven, report(stage)).job_cause_found
    assert not score(uneven, report(replace(stage, owner=Owner.NODE))).job_cause_found


def test_rates_count_crashes_as_misses():
    outcomes = [
        outcome(case(SLOW_3), report(finding(3))),
        outcome(case(SLOW_3), None),
        outcome(case(), report(finding(0))),
    ]
    assert (recall(outcomes).hits, recall(outcomes).total) == (1, 2)
    assert (precision(outcomes).hits, precision(outcomes).total) == (1, 2)
    assert (alarmed(outcomes[2:]).hits, alarmed(outcomes[2:]).total) == (1, 1)
    assert "crashes of the detector: 1" in to_text(outcomes, "")
    summary = to_json(outcomes, 1.0)
    assert summary["recall"] == {"hits": 1, "total": 2}
    assert [each["missed"] for each in summary["wrong"]] == [1, 0]


def outcome(one: Case, verdict: Report | None) -> Outcome:
    return Outcome(
        case=one,
        score=None if verdict is None else score(one, verdict),
        error="" if verdict else "ValueError: broken",
        baselines={},
        num_spans=10,
        timeline_s=0.0,
        detect_s=0.0,
    )


def test_a_long_run_goes_on_where_it_stopped(tmp_path):
    kept = tmp_path / "outcomes.jsonl"
    first, second = case(SLOW_3), case(SLOW_3, seed=2)
    done = outcome(first, report(finding(3)))
    append_outcome(kept, done)
    with kept.open("ab") as file:
        file.write(b'{"case": [2, "compu')
    assert read_outcomes(kept, [first, second]) == {1: done}
    assert read_outcomes(kept, [case(SLOW_3, group="another")]) == {}
    assert read_outcomes(tmp_path / "none", [first]) == {}


def test_targets_are_met_or_not():
    right = outcome(case(SLOW_3, severity=0.05), report(finding(3)))
    missed = outcome(case(SLOW_3, severity=0.05), report())
    alarm = outcome(case(), report(finding(0)))
    by_name = {one.name: one for one in targets([right, missed], [alarm])}
    assert by_name["compute of 5 % and more: recall"].reached == "no"
    assert by_name["compute of 5 % and more: precision"].reached == "yes"
    assert by_name["jobs without a fault in which no node is named"].figure.hits == 0
    assert by_name["compute of 3 %: recall"].reached == "-"


def test_wilson_intervals():
    low, high = Share(0, 300).interval()
    assert (low, high) == (0.0, pytest.approx(0.0126, abs=1e-3))
    assert Share(9, 10).interval() == (
        pytest.approx(0.596, abs=1e-3),
        pytest.approx(0.982, abs=1e-3),
    )
    assert math.isnan(Share(0, 0).value)
    assert Share(0, 0).text() == "-"


def test_a_case_runs_from_simulation_to_score():
    result = run_case(case(parse_fault("rank=3,kind=compute,factor=1.5")), with_baselines=True)
    assert result.error == ""
    assert result.score is not None
    assert result.score.num_found == 1
    assert set(result.baselines) == set(RULES)


@pytest.mark.parametrize(
    ("rule", "factor", "expected"),
    [
        ("original MegaScan", 1.3, {3}),
        ("relative score 0.75", 1.3, set()),
        ("relative score 0.75", 1.5, {3}),
        ("sniff test", 1.05, set()),
        ("sniff test", 1.2, {3}),
        ("twice the median", 1.5, set()),
        ("twice the median", 2.5, {3}),
    ],
)
def test_other_tools_rules_name_what_their_thresholds_say(rule, factor, expected):
    job = base_job(LAYOUT, "compute-bound", iterations=8, num_microbatches=2)
    fault = parse_fault(f"rank=3,kind=compute,factor={factor}")
    timeline = build_timeline(simulate_trace(job, [fault], seed=1))
    assert RULES[rule](spans_of(timeline), timeline) == expected


def test_a_change_point_needs_a_change():
    job = base_job(LAYOUT, "compute-bound", iterations=16, num_microbatches=2)
    rule = RULES["verified change point"]
    for onset, expected in (("9", {3}), ("1", set())):
        fault = parse_fault(f"rank=3,kind=compute,factor=1.3,from={onset}")
        timeline = build_timeline(simulate_trace(job, [fault], seed=1))
        assert rule(spans_of(timeline), timeline) == expected


def test_the_last_two_to_arrive_are_always_two():
    timeline = build_timeline(simulate_trace(base_job(LAYOUT, "compute-bound", iterations=4)))
    assert len(RULES["last to arrive, top 2"](spans_of(timeline), timeline)) == 2


def test_a_ladder_that_leads_down_is_not_climbed():
    """Moved below 1 the next slowdown that is tried is smaller, and the search never ends."""
    (row,) = (one for one in thresholds() if f"{one.subject}.{one.name}" == LADDER)
    judged = Judged(case=None, timeline=None, outcome=None, reads=frozenset({LADDER}))
    assert effect(row, 0.5, [judged]) == "out of range"
    assert effect(row, 0.5, []) == "not read"


def test_moving_a_threshold_spares_what_would_have_been_found():
    climbs = compute.planted_power
    with without_power():
        assert compute.planted_power(None, 0.04, None, None).found == 0.04
    assert compute.planted_power is climbs
