"""Hosts whose ranks compute slowly: hot, or explained by data, experts, mates, stages, launches."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner
from detect.causes.host_data import may_be_its_experts, share_their_data
from detect.detector import judge
from detect.observe.extract import observe
from detect.stats import robust
from detect.stats.host_tests import (
    Channel,
    Channels,
    HostTest,
    Place,
    Sides,
    _holds_in_each_of_few,
    channel_tests,
)
from megascan.topology import Layout


def test_hot_host_is_one_finding(job):
    hot = job(
        layout=Layout(dp=16), hosts=4, work=lambda slot: 1.1 if slot.rank in range(8, 12) else 1.0
    )
    (finding,) = hot.report().findings
    assert (finding.cause, finding.owner) == (Cause.COMPUTE, Owner.NODE)
    assert finding.ranks == (8, 9, 10, 11)
    assert 1.08 < finding.slowdown < 1.12


@pytest.mark.parametrize(
    ("factor", "optimizer", "loading_ms", "owner"),
    [
        (1.06, 1.0, 1.0, Owner.UNDECIDED),
        (1.06, 1.03, 1.0, Owner.NODE),
        (1.06, 1.0, 5.0, Owner.NODE),
        (1.12, 1.0, 1.0, Owner.NODE),
    ],
    ids=[
        "as chips differ",
        "its optimizers are slow, too",
        "its loaders are slow, too",
        "more than chips differ",
    ],
)
def test_a_host_that_is_a_little_slow_is_named_if_something_confirms_it(
    job, factor, optimizer, loading_ms, owner
):
    def work(slot):
        is_hot = slot.rank in range(8, 12)
        return (optimizer if slot.name == "optimizer" else factor) if is_hot else 1.0

    def loading(slot):
        return loading_ms if slot.rank in range(8, 12) else 1.0

    hot = job(
        layout=Layout(tp=2, dp=8), hosts=4, work=work, loading_ms=loading,
        tokens=lambda rank: (4096, 4096),
    )  # fmt: skip
    found = [one.owner for one in hot.report().findings if one.ranks == (8, 9, 10, 11)]
    assert found == [owner]


@pytest.mark.parametrize(
    ("levels", "is_host"),
    [((0.12, 0.05, 0.03, -0.04), False), ((0.12, 0.10, 0.09, 0.08), True)],
    ids=["one of them", "all of them"],
)
def test_one_slow_rank_beside_chips_that_differ_is_no_slow_host(job, levels, is_host):
    usual = np.random.default_rng(5).normal(0.0, 0.02, 32)
    slower = dict(zip(range(8, 12), levels, strict=True))

    def work(slot):
        factor = float(np.exp(slower.get(slot.rank, usual[slot.rank])))
        return 1.0 if slot.name == "optimizer" else factor

    report = job(layout=Layout(dp=16, pp=2), hosts=4, work=work).report()
    assert any(len(one.ranks) > 1 and 8 in one.ranks for one in report.findings) == is_host


@pytest.mark.parametrize(
    ("waits", "tokens", "names"),
    [
        (True, None, [(8,), (10,)]),
        (True, lambda rank: (4096, 4096), [(8,), (10,)]),
        (False, None, [(8, 9, 10, 11)]),
    ],
    ids=["mates wait backward", "and data are even", "all slow in both"],
)
def test_ranks_that_wait_for_mates_in_one_kind_of_pass_make_no_slow_host(job, waits, tokens, names):
    """Collectives inside backward passes were not recorded: a slow rank of each TP group, and a
    mate that is as quick as ever forward.
    """
    slow = {8: 1.45, 10: 1.25}

    def work(slot):
        if slot.rank not in range(8, 12):
            return 1.0
        own = slow.get(slot.rank, 1.0)
        group = max(own, slow.get(slot.rank - 1, 1.0))
        if slot.name == "optimizer":
            return own if waits else group
        return own if waits and slot.phase == "forward" else group

    report = job(layout=Layout(tp=2, dp=8), hosts=4, work=work, tokens=tokens).report()
    assert sorted(one.ranks for one in report.findings if one.owner is Owner.NODE) == names


@pytest.mark.parametrize(
    ("ep", "slow", "factor", "may_be"),
    [(4, 4, 1.0, True), (4, 4, 1.3, False), (4, 1, 1.5, True), (1, 4, 1.0, False)],
)
def test_a_host_whose_experts_are_busy_need_not_be_hot(job, ep, slow, factor, may_be):
    """Passes of ranks 4 to 7 take 1.3 times as long. Attention, which no router lengthens, tells:
    that of all of them, not of one.
    """
    seen = observe(job(layout=Layout(dp=16, ep=ep), hosts=4).timeline())
    attention_ns = np.full_like(seen.busy_ns, 1e8)
    attention_ns[4 : 4 + slow] *= factor
    own = np.isin(np.arange(16), range(4, 8))
    sides = SimpleNamespace(seen=replace(seen, attention_ns=attention_ns), own=own)
    compute = HostTest(effect=float(np.log(1.3)), error=0.01, p_value=1e-9)
    assert may_be_its_experts(sides, compute) == may_be


@pytest.mark.parametrize(
    ("beside_ms", "optimizer", "owner"),
    [(60.0, 1.0, Owner.UNDECIDED), (20.0, 1.0, Owner.NODE), (60.0, 1.1, Owner.NODE)],
    ids=["longer than it is slow", "shorter", "its optimizer is slow, too"],
)
def test_hosts_that_wait_beside_their_passes_need_not_be_hot(job, beside_ms, optimizer, owner):
    """Of 255 ms of an iteration 22 are what passes of 1.1 times make of it; all ranks got as many
    tokens. Collectives wait beside the passes, on other hosts for 10 ms.
    """

    def work(slot):
        is_hot = slot.rank in range(8, 12)
        return (optimizer if slot.name == "optimizer" else 1.1) if is_hot else 1.0

    even = job(layout=Layout(dp=16), hosts=4, work=work, tokens=lambda rank: (4096, 4096))
    seen = observe(even.timeline())
    beside_ns = np.full(seen.busy_ns.shape, 10e6)
    beside_ns[8:12] = beside_ms * 1e6
    report = judge(replace(seen, beside_ns=beside_ns), DetectorSettings())
    found = [one.owner for one in report.findings if one.ranks == (8, 9, 10, 11)]
    assert found == [owner]


def test_host_whose_replica_has_longer_data_is_not_named(job):
    def longer(slot):
        return 1.12 if slot.replica == 2 and slot.name != "optimizer" else 1.0

    report = job(layout=Layout(tp=4, dp=4), hosts=4, work=longer).report()
    assert [one for one in report.findings if one.owner == Owner.NODE] == []


@pytest.mark.parametrize(("slow_hosts", "is_data"), [((2,), False), ((2, 6), True)])
def test_slowness_that_replicas_show_on_other_hosts_is_their_datas(job, slow_hosts, is_data):
    """Hosts 2 and 6 hold the stages of the same four replicas, neither of them all."""

    def longer(slot):
        return 1.06 if slot.rank // 4 in slow_hosts and slot.name != "optimizer" else 1.0

    seen = observe(job(layout=Layout(pp=2, dp=16), hosts=4, work=longer).timeline())
    host = seen.members.ranks // 4
    own, everybody = host == 2, np.ones(len(host), dtype=bool)
    channels = Channels(seen, everybody)
    sides = Sides(seen=seen, host=host, own=own, control=~own, channels=channels)
    assert share_their_data(sides, dict(channel_tests(sides))["compute"]) == is_data


def test_host_that_is_a_stage_and_changes_inside_the_trace_is_named(job):
    """The stage has gaps of 5 % anyhow, as a stage may; from iteration 12 on the host adds 10 %."""

    def gaps(slot):
        return (14.0 if slot.iteration < 12 else 40.0) if slot.rank in range(4, 8) else 8.0

    report = job(layout=Layout(pp=4, dp=4), hosts=4, gap_ms=gaps).report()
    (finding,) = [one for one in report.findings if one.cause == Cause.HOST]
    assert (finding.ranks, finding.owner) == ((4, 5, 6, 7), Owner.NODE)
    assert finding.first_iteration == 12 and finding.onset_in_trace


@pytest.mark.parametrize(("since", "begins"), [(12, 12), (3, 3)])
def test_a_host_that_is_slow_for_a_part_of_the_window_costs_what_it_costs_then(job, since, begins):
    """Its ranks lose 40 ms a microbatch from some iteration on; over the window that is less."""

    def gaps(slot):
        return 40.0 if slot.rank in range(4, 8) and slot.iteration >= since else 4.0

    made = job(layout=Layout(dp=16), hosts=4, gap_ms=gaps)
    (finding,) = made.report().findings
    assert (finding.ranks, finding.cause, finding.owner) == ((4, 5, 6, 7), Cause.HOST, Owner.NODE)
    assert finding.first_iteration == begins
    (whole,) = (
        job(
            layout=Layout(dp=16),
            hosts=4,
            gap_ms=lambda slot: 40.0 if slot.rank in range(4, 8) else 4.0,
        )
        .report()
        .findings
    )
    assert finding.slowdown == pytest.approx(whole.slowdown, rel=0.03)
    assert finding.step_time_cost_ratio == pytest.approx(whole.step_time_cost_ratio, rel=0.03)


def test_host_of_one_tp_group_that_changes_is_not_named(job):
    """All of a TP group wait for one of it where nobody records that."""

    def gaps(slot):
        return 35.0 if slot.rank in range(4, 8) and slot.iteration >= 12 else 4.0

    report = job(layout=Layout(pp=4, tp=4), hosts=4, gap_ms=gaps).report()
    assert not [one for one in report.findings if "changed inside" in " ".join(one.evidence)]


def test_passes_of_a_host_that_is_a_stage_rise_inside_the_trace(job):
    """Without layers stages cannot be compared, but what they take does not change by itself."""

    def slower(slot):
        heavy = 1.2 if slot.stage == 1 else 1.0
        return heavy * (1.15 if slot.stage == 1 and slot.iteration >= 12 else 1.0)

    def longer_sequences(slot):
        grown = 1.5 if slot.iteration >= 12 else 1.0
        return slower(slot) * (grown if slot.name != "optimizer" else 1.0)

    stages = job(layout=Layout(pp=4, dp=4), hosts=4)
    (finding,) = [one for one in stages.but(work=slower).report().findings
                  if one.cause == Cause.COMPUTE]  # fmt: skip
    assert (finding.ranks, finding.owner) == ((4, 5, 6, 7), Owner.NODE)
    assert finding.first_iteration == 12
    report = stages.but(work=longer_sequences).report()
    assert not [one for one in report.findings if one.owner == Owner.NODE]


@pytest.mark.parametrize("by_operation", [False, True])
def test_leaving_a_host_out_is_comparing_as_if_it_had_never_been_there(by_operation):
    """Four places of six rows, two hosts with half of a place each, one with a whole place."""
    generator = np.random.default_rng(0)
    value = generator.normal(size=(24, 9, 4) if by_operation else (24, 9))
    value[generator.random(value.shape) < 0.1] = np.nan
    everybody, place = np.ones(24, dtype=bool), np.arange(24) // 6
    places = [Place(np.flatnonzero(place == one), (place == one, everybody)) for one in range(4)]
    control = np.arange(24) != 20
    channel = Channel(value, places, control, robust.centre)
    for rows in (range(3), range(3, 6), range(12, 18), (2, 8, 20)):
        own = np.isin(np.arange(24), rows)
        alone = Channel(value, places, control & ~own, robust.centre).without(everybody & False)
        left_out = channel.without(own)
        np.testing.assert_array_equal(left_out.value, alone.value)
        np.testing.assert_array_equal(left_out.level, alone.level)


@pytest.mark.parametrize(
    ("starved", "optimizer", "owners"),
    [(0.2, 1.0, [Owner.NODE]), (0.9, 1.0, []), (0.9, 1.1, [Owner.NODE])],
    ids=["fed", "host-bound", "host-bound, and a slow optimizer"],
)
def test_passes_of_devices_that_wait_for_their_hosts_show_no_hot_host(
    job, starved, optimizer, owners
):
    def work(slot):
        if slot.rank not in range(8, 12):
            return 1.0
        return optimizer if slot.name == "optimizer" else 1.1

    run = job(layout=Layout(dp=16), hosts=4, work=work, tokens=lambda rank: (512, 512))
    seen = observe(run.timeline())
    report = judge(
        replace(seen, starved_share=np.full_like(seen.busy_ns, starved)), DetectorSettings()
    )
    named = [one for one in report.findings if one.owner is Owner.NODE and len(one.ranks) == 4]
    assert [one.owner for one in named] == owners


@pytest.mark.parametrize(
    ("own", "elsewhere", "pace", "named"),
    [
        (0.75, 0.69, 1.14, False),  # launches take longer as well
        (0.81, 0.55, 1.0, False),  # its devices wait for more of them
        (0.75, 0.75, 1.0, True),
        (0.3, 0.3, 1.14, True),  # its devices are fed
    ],
)
def test_a_host_whose_launches_are_as_late_as_its_passes_is_not_hot(
    job, own, elsewhere, pace, named
):
    """Passes and optimizer take 1.09 times as long on ranks 8 to 11."""
    slow = np.isin(np.arange(16), range(8, 12))[:, None]
    run = job(layout=Layout(dp=16), hosts=4, work=lambda one: 1.09 if slow[one.rank, 0] else 1.0)
    seen = observe(run.timeline())
    noise = np.random.default_rng(4).normal(0.0, 0.02, seen.busy_ns.shape)
    told = replace(
        seen,
        starved_share=np.where(slow, own, elsewhere) + 0.0 * noise,
        launch_pace=noise + np.where(slow, np.log(pace), 0.0),
    )
    found = judge(told, DetectorSettings()).findings
    assert any(one.owner is Owner.NODE and len(one.ranks) == 4 for one in found) == named


@pytest.mark.parametrize(
    ("by_iteration", "holds"),
    [((0.41, 0.38), True), ((0.04, 0.78), False), ((0.0, 0.0, 0.9, 0.9, 0.9), True)],
    ids=["both of two", "one of two", "the median of more tells"],
)
def test_of_two_iterations_a_slow_host_is_slow_in_both(by_iteration, holds):
    """What lengthens one of them on all ranks of a host is a pause, a document, or warming up."""
    own = np.arange(6) < 2
    value = np.where(own[:, None], by_iteration, 0.01)
    sides = SimpleNamespace(own=own, control=~own)
    assert _holds_in_each_of_few(sides, value, effect=0.4) is holds


@pytest.mark.parametrize(("gap_ms", "named"), [(18.0, [(4, 5, 6, 7)]), (6.0, [])])
def test_gaps_that_all_hosts_have_do_not_weigh_beside_slow_optimizer_steps(job, gap_ms, named):
    """Optimizer steps of ranks 4 to 7 take 2 ms longer; other ranks have gaps of 6 ms."""
    made = job(
        layout=Layout(dp=16),
        hosts=4,
        work=lambda slot: 1.4 if slot.name == "optimizer" and 4 <= slot.rank < 8 else 1.0,
        gap_ms=lambda slot: gap_ms if 4 <= slot.rank < 8 else 6.0,
    )
    assert [one.ranks for one in made.report().findings if one.owner is Owner.NODE] == named


def test_ranks_that_hold_shards_of_one_model_wait_for_one_of_them(job, exchanging):
    timeline = job(layout=Layout(dp=8), hosts=4).timeline()
    units = [((0, 1, 2, 3), 10**8, 9.0), ((4, 5, 6, 7), 10**8, 9.0)]
    seen = exchanging(timeline, units)
    host = np.arange(8) // 4
    for hides in (False, True):
        sides = Sides(
            seen=replace(seen, hides_waiting=hides), host=host, own=host == 0, control=host == 1,
            channels=Channels(seen, np.ones(8, dtype=bool)),
        )  # fmt: skip
        assert sides.is_one_group() == hides


@pytest.mark.parametrize(("elsewhere", "owner"), [(0.0, Owner.NODE), (0.08, None)])
def test_steps_of_a_host_stand_out_from_what_those_of_other_hosts_differ_by(job, elsewhere, owner):
    """All four ranks of a TP group wait for one of them, and their steps take 1.12 times as long as
    those of others; hosts whose passes are quick differ by as much, or not at all.
    """
    of_hosts = np.random.default_rng(3).normal(0.0, elsewhere, 8)

    def work(slot):
        if slot.name == "optimizer":
            return 1.12 if 4 <= slot.rank < 8 else float(np.exp(of_hosts[slot.rank // 4]))
        return 1.13 if 4 <= slot.rank < 8 else 1.0

    report = job(layout=Layout(tp=4, dp=8), hosts=4, work=work).report()
    found = [one.owner for one in report.findings if one.ranks == (4, 5, 6, 7)]
    assert (Owner.NODE in found) is (owner is Owner.NODE)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_host_that_is_one_tp_group_is_slow_itself_where_nobody_waits_unseen(
    job, exchanging, is_recorded
):
    """Each pass got as many tokens; steps tell nothing. Where what the ranks of a group send each
    other was not recorded, all may wait for one.
    """
    made = job(
        layout=Layout(tp=4, dp=8),
        hosts=4,
        tokens=lambda rank: (2048, 2048),
        work=lambda slot: 1.1 if 4 <= slot.rank < 8 and slot.name != "optimizer" else 1.0,
    )
    groups = [(tuple(range(rank, rank + 4)), 10**8, 12.0) for rank in range(0, 32, 4)]
    seen = exchanging(made.timeline(), groups)
    kinds = (f"{'tp' if is_recorded else 'dp'} all_reduce of 1e8 bytes",)
    seen = replace(seen, transfers=replace(seen.transfers, kinds=kinds))
    report = judge(seen, DetectorSettings())
    nodes = {rank for one in report.findings if one.owner is Owner.NODE for rank in one.ranks}
    assert nodes == ({4, 5, 6, 7} if is_recorded else set())
