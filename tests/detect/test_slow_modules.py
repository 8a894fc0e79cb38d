"""A device that is slow for parts of passes is found by modules in a row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner
from detect.causes.slow_modules import bursts_of_modules
from detect.detector import judge
from detect.observe.extract import observe
from detect.observe.modules import SlowRuns, slow_runs_of
from megascan.topology import Layout

RATE, FLOOR = 0.01, 0.03
MS = 1_000_000


def modules(slow, *, microbatches=8, layers=4):
    """Forward passes of layers of two modules; `slow` says how much longer one of them takes."""
    random, spans, now = np.random.default_rng(3), [], 0
    for microbatch in range(microbatches):
        for layer in range(layers):
            for name, usual in (("attention", 2.0), ("mlp", 3.0)):
                factor = slow(microbatch, layer, name) * random.normal(1.0, 0.004)
                length = int(usual * MS * factor)
                spans.append({
                    "rank": 0, "kind": "compute", "name": name, "track": 1, "start_ns": now,
                    "duration_ns": length, "self_ns": length, "microbatch": microbatch,
                    "phase": "forward", "layer": layer + 1, "chunk": 0,
                })  # fmt: skip
                now += length
    return spans


def runs_of(index_of, slow):
    return slow_runs_of(index_of(modules(slow)))


def test_a_run_begins_in_the_middle_of_a_pass(index_of):
    runs = runs_of(index_of, lambda at, layer, _: 1.3 if at == 3 and layer >= 2 else 1.0)
    assert runs.num_modules.tolist() == [4] and runs.cuts.tolist() == [True]
    assert runs.size_log[0] == pytest.approx(np.log(1.3), abs=0.02)
    assert runs.lost_ns[0] == pytest.approx(0.3 * 10 * MS, rel=0.1)


def test_a_longer_microbatch_whose_rest_hardly_counts_as_slow_is_not_cut(index_of):
    """1.09 times as long, by a little less in its last modules: 1.045 is no slow module."""
    runs = runs_of(index_of, lambda at, layer, _: (1.045 if layer > 2 else 1.09) ** (at == 3))
    assert runs.num_modules.tolist() == [6] and runs.cuts.tolist() == [False]


def test_a_longer_microbatch_is_slow_from_end_to_end(index_of):
    runs = runs_of(index_of, lambda at, _, __: 1.3 if at == 3 else 1.0)
    assert runs.num_modules.tolist() == [8] and runs.cuts.tolist() == [False]


@pytest.mark.parametrize("slow", [
    lambda at, layer, name: 5.0 if (at, layer, name) == (3, 2, "mlp") else 1.0,
    lambda at, layer, name: 1.3 if at == 3 and name == "mlp" else 1.0,
    lambda at, layer, name: 1.0 + 0.3 * ((7 * at + 5 * layer) % 8) / 8,
    lambda at, layer, name: 1.0 + 0.5 * (layer + 1) if at == 3 else 1.0,
])  # fmt: skip
def test_a_pause_one_kind_of_module_uneven_times_and_several_factors_are_no_runs(index_of, slow):
    assert not len(runs_of(index_of, slow).row)


def made_of(runs):
    """Runs of (rank, iteration, microbatches)."""
    rank, iteration, number = (np.array(column) for column in zip(*runs, strict=True))
    return SlowRuns(
        row=rank,
        iteration=iteration,
        num_modules=8 * number,
        num_passes=number,
        size_log=np.full(len(runs), 0.26),
        lost_ns=20.0 * MS * number,
        cuts=np.ones(len(runs), dtype=bool),
        starved_share=np.zeros(len(runs)),
    )


def found_in(job, runs, **changes):
    seen = observe(job(layout=Layout(dp=8), iterations=10, noise=0.005).timeline())
    seen = replace(seen, slow_runs=replace(made_of(runs), **changes))
    return bursts_of_modules(seen, np.zeros(8, dtype=bool), RATE, FLOOR)


def test_runs_of_one_rank_in_two_iterations_are_a_burst(job):
    (burst,) = found_in(job, [(5, 4, 2), (5, 9, 1)])
    assert burst.row == 5 and burst.cuts_passes and burst.is_one_speed
    assert np.flatnonzero(burst.hits).tolist() == [1, 6]


@pytest.mark.parametrize(
    ("num_modules", "cuts", "is_found"), [(24, True, True), (6, True, False), (24, False, False)]
)
def test_one_iteration_may_be_chance_unless_a_long_run_cuts_a_pass(
    job, num_modules, cuts, is_found
):
    changes = {"num_modules": np.array([num_modules]), "cuts": np.array([cuts])}
    assert [one.row for one in found_in(job, [(5, 4, 4)], **changes)] == [5] * is_found


def test_runs_that_others_have_as_well_if_fewer_are_no_speed_of_one_device(job):
    """As those of documents that are long by turns, by one factor."""
    by_turns = [(5, 3, 4), (5, 4, 4), (5, 9, 4), (6, 7, 1)]
    (burst,) = found_in(job, by_turns, cuts=np.zeros(4, dtype=bool))
    assert burst.row == 5 and burst.other_hits == 1 and not burst.is_one_speed


@pytest.mark.parametrize(("modules_of_other", "is_found"), [(8, False), (6, True)])
def test_one_iteration_is_an_accident_where_another_rank_has_a_long_run_as_well(
    job, modules_of_other, is_found
):
    """As where now the one and now the other is slow for an iteration."""
    changes = {"num_modules": np.array([24, modules_of_other]), "cuts": np.array([True, False])}
    found = found_in(job, [(5, 4, 4), (2, 7, 1)], **changes)
    assert [one.row for one in found] == [5] * is_found


@pytest.mark.parametrize(("others", "is_found"), [((2, 6, 7), False), ((2, 6), True)])
def test_runs_that_more_than_a_third_of_the_others_have_are_usual_here(job, others, is_found):
    runs = [(5, 4, 4), (5, 7, 4), (5, 9, 4), (5, 11, 4), *((one, 6, 1) for one in others)]
    assert [one.row for one in found_in(job, runs)] == [5] * is_found


def test_somebody_else_has_to_show_no_runs(job):
    seen = observe(job(layout=Layout(dp=2), iterations=10, noise=0.005).timeline())
    seen = replace(seen, slow_runs=made_of([(1, 4, 2), (1, 9, 1)]))
    assert len(bursts_of_modules(seen, np.zeros(2, dtype=bool), RATE, FLOOR)) == 1
    assert bursts_of_modules(seen, np.array([True, False]), RATE, FLOOR) == []


def test_what_others_have_is_no_fault(job):
    assert found_in(job, [(rank, 3 + rank, 1) for rank in range(8)] + [(5, 4, 2)]) == []
    assert found_in(job, [(rank, 4, 2) for rank in range(8)]) == []


def test_modules_that_began_when_launched_are_the_hosts(job):
    assert found_in(job, [(5, 4, 2), (5, 9, 1)], starved_share=np.ones(2)) == []


def test_a_mate_that_waits_inside_its_modules_has_no_runs_of_its_own(job, exchanging):
    made = job(layout=Layout(tp=2, dp=4), iterations=10, noise=0.005)
    groups = [((rank, rank + 1), 10**8, 2.0) for rank in range(0, 8, 2)]
    runs = replace(
        made_of([(5, 4, 2), (4, 4, 2), (5, 9, 1), (4, 9, 1)]),
        size_log=np.array([0.7, 0.4, 0.7, 0.4]),
    )
    seen = exchanging(made.timeline(), groups)
    seen = replace(
        seen,
        transfers=replace(seen.transfers, kinds=("tp all_reduce of 100000000 bytes by 2",)),
        slow_runs=runs,
        entangled_phases=(1,),
        splits_tensor_groups=True,
    )
    assert seen.hidden_axes == ()
    found = bursts_of_modules(seen, np.zeros(8, dtype=bool), RATE, FLOOR)
    assert [one.row for one in found] == [5]


@pytest.mark.parametrize(("late", "owner"), [(0.0, Owner.NODE), (0.2, Owner.UNDECIDED)])
def test_launches_that_come_no_later_in_bursts_are_no_reason(job, late, owner):
    """Half of what is launched comes just in time on every rank, as where it begins a pass."""

    def work(slot):
        slow = slot.rank == 5 and slot.iteration in (5, 9) and slot.name != "optimizer"
        return 1.24 if slow else 1.0

    made = job(layout=Layout(dp=8), iterations=10, noise=0.005, work=work)
    seen = observe(made.timeline())
    starved = np.full(seen.busy_ns.shape, 0.5)
    starved[5, np.isin(seen.iterations, (5, 9))] += late
    report = judge(replace(seen, starved_share=starved), DetectorSettings())
    assert {one.ranks: one.owner for one in report.findings}.get((5,)) in (owner, None)
    if owner is Owner.NODE:
        assert [(one.ranks, one.cause) for one in report.findings] == [((5,), Cause.COMPUTE)]


@pytest.mark.parametrize(
    ("spread", "cuts", "owner"),
    [(0.005, False, Owner.NODE), (0.08, False, Owner.UNDECIDED), (0.08, True, Owner.NODE)],
    ids=["even data", "uneven data", "uneven data, from the middle of a pass"],
)
def test_whole_passes_that_are_slow_may_be_longer_documents_where_these_vary(
    job, spread, cuts, owner
):
    length = np.random.default_rng(5).lognormal(0.0, spread, (40, 8, 8))

    def work(slot):
        if slot.name == "optimizer":
            return 1.0
        slow = 1.24 if slot.rank == 5 and slot.iteration in (5, 9) else 1.0
        return slow * length[slot.iteration, slot.microbatch, slot.rank]

    made = job(layout=Layout(dp=8), iterations=10, work=work)
    runs = replace(made_of([(5, 5, 4), (5, 9, 4)]), cuts=np.full(2, cuts))
    seen = replace(observe(made.timeline()), slow_runs=runs)
    found = judge(seen, DetectorSettings()).findings
    assert {one.ranks: one.owner for one in found if one.ranks}.get((5,)) is owner
