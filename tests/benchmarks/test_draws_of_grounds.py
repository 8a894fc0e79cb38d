"""What is asked of the grounds' catalogues: the same cases each time, and of a draw other seeds."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.grounds.__main__ import GROUNDS, OTHERS, _parser, chosen_cases, ground_named
from benchmarks.grounds.aims import (
    aims_of,
    table_of_aims,
    table_of_confidence,
    table_of_costs,
    table_of_doubts,
)
from benchmarks.grounds.ground import Planted
from benchmarks.grounds.outcome import Named, Outcome, table_by_cause
from megascan.errors import UsageError


def chosen(*words):
    return chosen_cases(_parser().parse_args(words))


@pytest.mark.parametrize(
    ("name", "num_cases", "sizes"),
    [
        ("cluster", range(250, 401), {2, 4, 8, 16, 32, 64, 128}),
        ("profiles", range(140, 221), {2, 4, 8, 16, 32}),
        ("fleet", range(150, 221), {2, 4, 8, 16, 32, 64}),
        ("yard", range(220, 281), {4, 8, 16, 32, 64}),
        ("harbour", range(220, 281), {4, 8, 16, 32, 64}),
        ("archive", range(220, 281), {4, 8, 16, 32, 64}),
    ],
)
def test_cases_are_the_same_each_time_and_bear_their_seed(name, num_cases, sizes):
    listed = list(ground_named(name).cases())
    assert listed == list(ground_named(name).cases())
    assert len(listed) in num_cases
    assert len({case.name for case in listed}) == len({case.seed for case in listed}) == len(listed)
    assert all(case.name.endswith(f"-s{case.seed}") for case in listed)
    assert 0.25 < sum(case.unseen for case in listed) / len(listed) < 0.42
    assert {case.num_ranks for case in listed} == sizes


@pytest.mark.parametrize(
    ("name", "of_the_job"),
    [
        ("cluster", ()),
        ("profiles", ()),
        ("fleet", ()),
        ("yard", ("gc",)),
        ("archive", ("gc",)),
        ("harbour", ()),
    ],
)
def test_only_faults_lie_at_a_node(name, of_the_job):
    for case in ground_named(name).cases():
        innocent = case.family.startswith(("healthy", "look_alike")) or case.family in of_the_job
        assert bool(case.at_fault) != innocent, case.name
        assert case.at_fault <= set(range(case.num_ranks))
        assert all(planted.ranks for planted in case.planted)


@pytest.mark.parametrize("name", OTHERS)
def test_some_grounds_are_judged_when_they_are_asked_for_only(name):
    assert name not in GROUNDS
    assert {case.ground for case in chosen("--ground", name)} == {name}


@pytest.mark.parametrize("name", ["fleet", "yard", "rack", "archive", "harbour"])
def test_another_draw_has_the_same_families_and_other_cases(name):
    first, second = (list(ground_named(name).cases(draw)) for draw in (0, 3))
    assert [case.family for case in first] == [case.family for case in second]
    assert not {case.name for case in first} & {case.name for case in second}
    assert not {case.seed for case in first} & {case.seed for case in second}


@pytest.mark.parametrize("name", GROUNDS)
def test_a_draw_shares_families_but_no_case_with_any_other(name):
    reported, first, second = (list(ground_named(name).cases(draw)) for draw in range(3))
    assert not any(case.unseen for case in (*first, *second))
    names = [{case.name for case in each} for each in (reported, first, second)]
    assert len(set.union(*names)) == sum(map(len, names))
    assert len({case.seed for case in (*reported, *first, *second)}) == sum(map(len, names))
    families = [Counter(case.family for case in each) for each in (reported, first, second)]
    assert families[0] == families[1] == families[2]


def test_a_drawn_case_is_written_as_it_was_listed(tmp_path):
    for name in GROUNDS:
        drawn = next(c for c in ground_named(name).cases(4) if c.num_ranks == 2 and c.at_fault)
        planted = ground_named(name).write(drawn, tmp_path / name)
        assert [one.ranks for one in planted] == [one.ranks for one in drawn.planted]
        assert [one.kind for one in planted] == [one.kind for one in drawn.planted]


def test_draws_of_a_part_take_other_places_of_the_catalogue_and_nothing_unseen():
    first, second = chosen("--draw", "1", "--every", "4"), chosen("--draw", "2", "--every", "4")
    everything = chosen("--draw", "1")
    assert first == everything[1::4] and len(second) == len(everything[2::4])
    assert len(everything) == sum(len(list(ground_named(name).cases())) for name in GROUNDS)
    assert {case.draw for case in first} == {1}


def test_seeds_that_are_none_are_refused():
    with pytest.raises(UsageError, match="--draw -1 --every 1"):
        chosen("--draw", "-1")


def test_cases_of_one_cause_are_those_that_plant_it():
    links = chosen("--draw", "1", "--cause", "link")
    assert all("link" in {one.cause for one in case.planted} for case in links)
    assert {"nic", "rail", "nvlink", "two faults"} <= {case.family for case in links}


def test_faults_are_counted_by_their_cause():
    def outcome(verdict, *findings):
        fault = Planted(kind="nic", cause="link", owner="node", ranks=(6,), cost_ratio=1.1)
        return Outcome(
            ground="cluster", name=verdict, family="nic", num_ranks=8, verdict=verdict,
            planted=(fault,), findings=findings,
        )  # fmt: skip

    def named(owner):
        return Named(
            ranks=(6,), cause="link", owner=owner, slowdown=2.0, interval=(1.9, 2.1),
            first_iteration=1, cost_ratio=1.1,
        )  # fmt: skip

    outcomes = [
        outcome("degraded", named("node")), outcome("undecided", named("undecided")),
        outcome("healthy"), outcome("undecided"),
    ]  # fmt: skip
    rows = table_by_cause(outcomes).splitlines()[2:]
    assert rows == ["| link | 4 | 1 | 1 | 1 | 0 | 1 |", "| all | 4 | 1 | 1 | 1 | 0 | 1 |"]


def test_aims_are_counted_by_what_was_planted_and_said():
    def fault(cause="compute", **given):
        values = {"kind": "gpu_clock", "owner": "node", "ranks": (3,), "factor": 1.3}
        return Planted(cause=cause, **(values | {"cost_ratio": 1.2} | given))

    def said(ranks=(3,), owner="node", cause="compute", first=1):
        return Named(
            ranks=ranks, cause=cause, owner=owner, slowdown=1.3, interval=(1.2, 1.4),
            first_iteration=first, cost_ratio=1.2,
            confidence="high" if cause == "compute" else "moderate",
        )  # fmt: skip

    def job(planted, *findings):
        return Outcome(
            ground="cluster", name="n", family="f", num_ranks=8, verdict="", planted=planted,
            findings=findings, iterations=(1, 2, 3, 4, 5, 6, 11, 12, 13, 14),
        )  # fmt: skip

    outcomes = [
        job((fault(first_iteration=8),), said(first=12)),  # one traced iteration late
        job((fault(first_iteration=8),), said(first=13)),  # two
        job((fault(first_iteration=4),), said(ranks=(3, 4))),  # a victim with it
        job((fault(share_of_time=0.2),)),
        job((fault(cause="link", kind="nic"),), said(cause="link")),
        job((fault(cause="link", kind="nic"),), said(owner="job", cause="link")),
        job((), said(owner="job", cause="sequence_imbalance")),
        job((), said()),
    ]
    reached = {one.what: (one.reached.hits, one.reached.total) for one in aims_of(outcomes)}
    assert reached == {
        "slow devices, 5 % and more: recall": (2, 3),
        "slow devices: precision": (2, 4),
        "all nodes named: precision": (3, 5),
        "nodes named with high confidence: precision": (2, 4),
        "throttling in bursts: recall": (0, 1),
        "hosts, loaders, their memory: recall": (0, 0),
        "NICs of a host: recall": (1, 2),
        "jobs without a fault of hardware with a name": (1, 2),
        "owners given: right": (4, 7),
        "onset within one iteration": (1, 2),
    }
    rows = table_of_aims(outcomes).splitlines()[2:]
    assert rows[0].startswith("| slow devices, 5 % and more: recall | at least 0.97 | 0.667 (2/3,")
    assert rows[0].endswith("| no |") and rows[5].endswith("| - | - |")
    rows = table_of_confidence(outcomes).splitlines()
    names = [row.split(" (")[0].removesuffix(" |") for row in rows]
    assert names[2:4] == ["| high | 4 | 0.500", "| good | 0 | - | 0.000"]
    assert names[4:6] == ["| moderate | 1 | 1.000", "| low | 0 | - | 0.000"]
    assert names[-4:-2] == ["| compute | 5% and more | 4 | 0.500", "| compute | 5% or less | 0 | -"]
    assert names[-2:] == ["| link | 5% and more | 1 | 1.000", "| link | 5% or less | 0 | -"]


def test_a_job_is_blamed_rightly_beside_a_fault_if_it_is_so_without_it():
    """A heavy last stage stays heavy without the slow device; what only the fault looks like does
    not.
    """

    def said(cause, ranks, owner="job"):
        return Named(
            ranks=ranks, cause=cause, owner=owner, slowdown=1.3, interval=(1.2, 1.4),
            first_iteration=1, cost_ratio=1.2,
        )  # fmt: skip

    def job(planted, *findings):
        return Outcome(
            ground="cluster", name="n", family="f", num_ranks=8, verdict="", planted=planted,
            findings=findings, iterations=(1, 2, 3),
        )  # fmt: skip

    fault = Planted(kind="gpu_clock", cause="compute", owner="node", ranks=(3,), cost_ratio=1.2)
    stage, sequences = said("stage_imbalance", (4, 5, 6, 7)), said("sequence_imbalance", ())
    device = said("compute", (3,), owner="node")
    beside = job((fault,), device, stage, sequences)
    assert beside.doubtful_for_job
    assert not job((), stage).doubtful_for_job and not job((fault,), device).doubtful_for_job
    judged = beside.beside_sound(job((), said("stage_imbalance", (6, 7)), said("loader", ())))
    assert [one.is_in_sound_job for one in judged.findings] == [False, True, False]
    owners = next(one for one in aims_of([judged]) if one.what == "owners given: right")
    assert (owners.reached.hits, owners.reached.total) == (2, 3)
    assert Outcome.from_json(judged.to_json()) == judged


def test_doubts_are_counted_with_what_they_hide():
    def job(ranks, doubt, *, owner="undecided", cost=1.2):
        fault = Planted(
            kind="k", cause="compute", owner="node", ranks=(3,), factor=1.3, cost_ratio=cost
        )
        said = Named(
            ranks=ranks, cause="compute", owner=owner, slowdown=1.3, interval=(1.2, 1.4),
            first_iteration=1, cost_ratio=1.2, doubt=doubt,
        )  # fmt: skip
        return Outcome(
            ground="cluster", name="n", family="f", num_ranks=8, verdict="", planted=(fault,),
            findings=(said,),
        )  # fmt: skip

    peers = "it has {} peers only"
    outcomes = [
        job((3,), peers.format(2)), job((3, 4), peers.format(3)), job((5,), peers.format(4)),
        job((3,), "rank 4 is slow", cost=1.0), job((3,), "", owner="node"),
    ]  # fmt: skip
    assert table_of_doubts(outcomes).splitlines()[2:] == [
        "| compute: it has N peers only | 3 | 1 | 2 |",
        "| compute: rank N is slow | 1 | 1 | 0 |",
    ]


def test_costs_are_compared_where_one_fault_lasts_and_is_found_as_what_it_is():
    def job(said, true=1.2, cause="compute", share=1.0, found="compute"):
        fault = Planted(
            kind="k", cause=cause, owner="node", ranks=(3,), factor=1.3, share_of_time=share,
            cost_ratio=1.2, held_cost_ratio=true,
        )  # fmt: skip
        finding = Named(
            ranks=(3,), cause=found, owner="node", slowdown=1.3, interval=(1.2, 1.4),
            first_iteration=1, cost_ratio=said,
        )  # fmt: skip
        return Outcome(
            ground="cluster", name="n", family="f", num_ranks=8, verdict="", planted=(fault,),
            findings=(finding,), iterations=(3, 4, 5, 6),
        )  # fmt: skip

    outcomes = [
        job(1.21), job(1.24), job(1.0), job(1.2, share=0.2), job(1.2, found="host"),
        job(1.5, true=1.49, cause="loader", found="loader"),
    ]  # fmt: skip
    rows = table_of_costs(outcomes).splitlines()[2:]
    assert [row.split(" (")[0] for row in rows] == [
        "| compute | 3 | 0.333", "| loader | 1 | 1.000",
    ]  # fmt: skip
    assert rows[0].endswith("| 4.0 |") and "| 0.667 (2/3," in rows[0]
