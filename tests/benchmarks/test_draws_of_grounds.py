"""Another draw of the grounds is the same catalogue with other seeds, and none of it is unseen."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.grounds.__main__ import GROUNDS, _parser, chosen_cases, ground_named
from benchmarks.grounds.ground import Planted
from benchmarks.grounds.outcome import Named, Outcome, table_of
from megascan.errors import UsageError


def chosen(*words):
    return chosen_cases(_parser().parse_args(words))


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


def outcome_of(cause, host, ranks=(4, 5, 6, 7), at_fault=(6,)):
    named = Named(
        ranks=ranks, cause=cause, owner="node", slowdown=2.0, interval=(1.9, 2.1),
        first_iteration=1, cost_ratio=1.1, host=host,
    )  # fmt: skip
    fault = Planted(kind="nvlink", cause="link", owner="node", ranks=at_fault, cost_ratio=1.1)
    return Outcome(
        ground="kernels", name="one", family="nvlink", num_ranks=8, verdict="degraded",
        planted=(fault,), findings=(named,),
    )  # fmt: skip


def test_link_finding_of_the_host_at_fault_is_right_and_counted():
    right = outcome_of("link", "n0")
    assert right.finding_of(right.planted[0]) is not None and not right.wrong
    assert "In 1 jobs with a slow link its host is named" in table_of([right])
    assert "In 0 jobs" in table_of([outcome_of("link", "n0", ranks=(6,))])


@pytest.mark.parametrize(
    "wrong",
    [
        outcome_of("link", "n0, n1"),
        outcome_of("link", ""),
        outcome_of("compute", "n0"),
        outcome_of("link", "n0", at_fault=(1,)),
    ],
    ids=["two hosts", "unknown hosts", "another cause", "others of the host"],
)
def test_nothing_else_that_names_sound_ranks_is_right(wrong):
    assert wrong.wrong and wrong.finding_of(wrong.planted[0]) is None
