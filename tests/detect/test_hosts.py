"""A host whose ranks are slow together is one finding; what data or stages explain is none."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner
from detect.causes.finding import OTHERS_WAIT
from detect.causes.host_data import may_be_its_experts, share_their_data
from detect.causes.hosts import _doubt_of_level, _is_noisier_of_two
from detect.causes.paused_hosts import ALONE, _doubts, _paused_host, _pausing_host
from detect.causes.together import gathered
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
    _is_one_pause_each,
    channel_tests,
)
from megascan.topology import Layout


def lost_by(ranks, time_ms):
    return lambda slot: time_ms if slot.rank in ranks else 0.0


def test_host_that_holds_up_its_ranks_is_one_finding(job):
    report = job(layout=Layout(dp=16), hosts=4, gap_ms=lost_by(range(4, 8), 15.0)).report()
    (finding,) = report.findings
    assert (finding.cause, finding.owner, finding.ranks) == (Cause.HOST, Owner.NODE, (4, 5, 6, 7))
    assert "host n01" in finding.headline and finding.host == "n01"


@pytest.mark.parametrize(("hosts", "owner"), [(4, Owner.UNDECIDED), (2, Owner.NODE)])
def test_of_two_hosts_the_one_that_loses_a_little_more_is_undecided(job, hosts, owner):
    """9 ms of 255 an iteration: 4 % of it. `hosts` is the number of ranks on each."""
    report = job(
        layout=Layout(dp=8), hosts=hosts, gap_ms=lost_by(range(hosts), 10.0), iterations=10
    ).report()
    finding = next(one for one in report.findings if len(one.ranks) == hosts)
    assert (finding.cause, finding.owner) == (Cause.HOST, owner)
    assert any("the noisier one" in one for one in finding.evidence) == (owner != Owner.NODE)


@pytest.mark.parametrize(("others_ms", "is_noisier"), [(2.0, False), (40.0, True)])
def test_of_two_hosts_one_that_loads_twice_as_long_is_no_noisier_one(others_ms, is_noisier):
    own, test = np.arange(8) < 4, HostTest(effect=0.035, error=0.003, p_value=1e-6)
    loading_ns = np.where(own, 55e6, others_ms * 1e6)[:, None] * np.ones(6)
    seen = SimpleNamespace(lost=lambda cause: loading_ns, held_pace=None)
    sides = SimpleNamespace(seen=seen, own=own, control=~own, host=own.astype(int))
    reason = SimpleNamespace(cause=Cause.LOADER, test=test, tests={"loader": test})
    assert _is_noisier_of_two(sides, reason) is is_noisier


@pytest.mark.parametrize(
    ("share", "pace", "owner"),
    [(0.8, 1.1, Owner.UNDECIDED), (0.3, 1.1, Owner.NODE), (0.8, 1.5, Owner.NODE)],
    ids=["hardly slower", "mostly ahead", "slower"],
)
def test_of_two_hosts_that_launch_most_of_the_time_one_always_loses_more(job, share, pace, owner):
    """17 ms of 260 an iteration; launching takes them a `share` of it."""
    made = job(layout=Layout(dp=8), hosts=4, gap_ms=lost_by(range(4), 17.0), iterations=10)
    seen = observe(made.timeline())
    launching = np.full_like(seen.busy_ns, share * float(np.median(seen.iteration_ns)))
    paces = np.zeros_like(launching)
    paces[:4] = np.log(pace)
    told = replace(seen, launching_ns=launching, held_pace=paces)
    report = judge(told, DetectorSettings())
    assert [one.owner for one in report.findings if len(one.ranks) == 4] == [owner]


def test_host_that_is_a_stage_is_found_from_five_per_cent_on(job):
    stages = Layout(pp=4, dp=4)
    slow = job(layout=stages, hosts=4, gap_ms=lost_by(range(4, 8), 25.0)).report()
    assert [(one.cause, one.ranks) for one in slow.findings] == [(Cause.HOST, (4, 5, 6, 7))]
    slight = job(layout=stages, hosts=4, gap_ms=lost_by(range(4, 8), 5.0)).report()
    assert slight.findings == ()


@pytest.mark.parametrize(
    ("late", "named"),
    [((5,), (5,)), ((5, 6), (5, 6)), ((4, 5, 6), (4, 5, 6, 7)), ((5, 9), None)],
)
def test_ranks_that_lose_time_one_by_one_are_one_finding_on_their_host(job, late, named):
    """Most of its ranks: the whole host. `named` is None where each is on another host."""
    report = job(layout=Layout(dp=16), hosts=4, gap_ms=lost_by(late, 15.0)).report()
    if named is None:
        assert sorted(one.ranks for one in report.findings) == [(rank,) for rank in late]
        return
    (finding,) = report.findings
    assert (finding.cause, finding.owner, finding.ranks) == (Cause.HOST, Owner.NODE, named)
    assert finding.host == "n01" and finding.step_time_cost_ratio > 1.04
    assert finding.to_json()["num_peers"] == (15 if len(late) == 1 else 16 - len(named))
    if len(late) > 1:
        assert f"host n01 makes {len(late)} of its 4 ranks" in finding.headline
        assert finding.evidence[0].startswith("one by one: rank ")


def test_of_one_host_ranks_are_named_and_not_the_host(job):
    report = job(layout=Layout(dp=8), hosts=8, gap_ms=lost_by((1, 2, 3, 4), 30.0)).report()
    assert all("makes" not in one.headline for one in report.findings)
    assert {rank for one in report.findings for rank in one.ranks} <= {1, 2, 3, 4}


def test_two_findings_on_all_ranks_of_a_host_are_one(job):
    """The same ranks lose time throughout and pause now and then: the second is evidence."""
    lost = job(layout=Layout(dp=16), hosts=4, gap_ms=lost_by(range(4, 8), 15.0))
    (whole,) = lost.report().findings
    again = replace(whole, step_time_cost_ratio=1.01, statement="pauses")
    seen = observe(lost.timeline())
    (one,) = gathered(seen, [again, whole])
    assert one.headline == whole.headline and one.step_time_cost_ratio > 1.01
    assert "no fault apart" in one.evidence[-1]
    undecided = replace(again, owner=Owner.UNDECIDED)
    assert len(gathered(seen, [undecided, whole])) == 2


def test_pauses_that_meet_ranks_of_one_host_unequally_are_the_hosts(job):
    """Four iterations: one rank loses a tenth of what another does, all more than anybody else."""
    pauses_ms = {4: (0, 0, 16, 0), 5: (40, 0, 78, 12), 6: (0, 15, 200, 20), 7: (160, 30, 165, 0)}

    def pauses(slot):
        return float(pauses_ms.get(slot.rank, (0, 0, 0, 0))[slot.iteration - 3])

    stages = job(layout=Layout(tp=4, dp=2), hosts=4, iterations=4, gap_ms=pauses)
    (finding,) = stages.report().findings
    assert (finding.cause, finding.owner, finding.ranks) == (Cause.HOST, Owner.NODE, (4, 5, 6, 7))
    spared = stages.but(gap_ms=lambda slot: 0.0 if slot.rank == 4 else pauses(slot))
    assert not any(len(one.ranks) == 4 for one in spared.report().findings)


def test_a_rank_that_pauses_for_reasons_of_its_own_is_not_its_host():
    """Rank 3 has a collector's pauses; ranks 0 and 2 have paused once each, by chance."""
    hosts, names = np.repeat([0, 1], 4), ["n0", "n1"]
    over = np.zeros((8, 20))
    over[3, :12], over[0, 15], over[2, 17] = 0.3, 0.06, 0.06
    assert _pausing_host(over, names, hosts, rate=0.01) is None
    over[0, :6], over[2, 4:9] = 0.3, 0.3  # now this one, now that one
    paused = _pausing_host(over, names, hosts, rate=0.01)
    assert paused is not None and paused.name == "n0" and paused.burst.is_sure


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
    ("waits", "names"),
    [(True, [(8,), (10,)]), (False, [(8, 9, 10, 11)])],
    ids=["mates wait backward", "all slow in both"],
)
def test_ranks_that_wait_for_mates_in_one_kind_of_pass_make_no_slow_host(job, waits, names):
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

    report = job(layout=Layout(tp=2, dp=8), hosts=4, work=work).report()
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


@pytest.mark.parametrize(("other_ms", "owner"), [(1.0, Owner.NODE), (38.0, Owner.UNDECIDED)])
def test_a_host_that_is_a_stage_is_not_blamed_where_another_stage_loses_as_much(
    job, other_ms, owner
):
    """The first stage embeds, the last one computes the loss: both may have many gaps."""
    gaps_ms = {0: 40.0, 3: other_ms}
    made = job(
        layout=Layout(dp=4, pp=4), hosts=4, gap_ms=lambda slot: gaps_ms.get(slot.rank // 4, 1.0)
    )
    found = {one.ranks: one.owner for one in made.report().findings if one.cause == Cause.HOST}
    assert found[0, 1, 2, 3] == owner
    assert Owner.NODE not in {one for ranks, one in found.items() if ranks != (0, 1, 2, 3)}


def test_host_that_is_a_stage_may_have_gaps_of_its_own(job):
    """Gaps of 8 % where others have 3 % are a stage's; where others have none, a host's."""

    def gaps(slot):
        return 25.0 if slot.rank in range(4, 8) else 8.0

    report = job(layout=Layout(pp=4, dp=4), hosts=4, gap_ms=gaps).report()
    (finding,) = report.findings
    assert (finding.ranks, finding.owner) == ((4, 5, 6, 7), Owner.UNDECIDED)


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


def test_one_slow_rank_of_a_hosts_only_tp_group_is_no_slow_host(job):
    """Its mates wait for it, between passes and inside them, where nobody records that."""

    def slower(slot):
        if slot.name == "optimizer" or not 4 <= slot.rank < 8:
            return 1.0
        return 1.5 if slot.rank == 5 else 1.4

    gaps = lost_by(range(4, 8), 20.0)
    report = job(layout=Layout(tp=4, dp=4), hosts=4, work=slower, gap_ms=gaps).report()
    assert not [one for one in report.findings if one.owner == Owner.NODE and len(one.ranks) > 1]


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


def test_a_stage_that_waits_for_its_data_alone_is_no_slow_host(job):
    """Its devices are through with what it has to do before the next data are there."""
    waits = job(layout=Layout(pp=4, dp=4), hosts=4).but(
        loading_ms=lambda slot: 3.0 if slot.stage == 0 else 0.02
    )
    (found,) = [one for one in waits.report().findings if one.cause == Cause.LOADER]
    assert (found.ranks, found.owner) == ((0, 1, 2, 3), Owner.UNDECIDED)
    for stage, owner in ((0, Owner.UNDECIDED), (3, Owner.NODE)):  # others load while they wait

        def far(slot, stage=stage):
            return 12.0 if slot.stage == stage else 0.02

        findings = waits.but(loading_ms=far).report().findings
        assert [one.owner for one in findings if one.cause == Cause.LOADER] == [owner]


def loads(slow_ranks, slow_ms=20.0, first=0, others_in=(), else_ms=0.1):
    def effect(slot):
        is_slow = slot.rank in slow_ranks and slot.iteration >= first
        return slow_ms if is_slow or slot.iteration in others_in else else_ms

    return effect


def test_two_loaders_of_one_host_against_two_of_the_other(job):
    made = job(layout=Layout(dp=4), hosts=2, loading_ms=loads((0, 1)))
    (finding,) = made.report().findings
    assert (finding.ranks, finding.cause, finding.owner) == ((0, 1), Cause.LOADER, Owner.NODE)
    shared = made.but(loading_ms=loads((0, 1), others_in=(5, 9, 20))).report().findings
    assert [one.owner for one in shared if one.ranks == (0, 1)] == [Owner.UNDECIDED]
    apart = made.but(loading_ms=loads((0, 2))).report()
    assert not [one for one in apart.findings if len(one.ranks) > 1]


LOADING = np.random.default_rng(11).lognormal(0.0, 0.9, (64, 16))
"""Of iterations and ranks: loaders differ from batch to batch and from each other."""


@pytest.mark.parametrize(
    ("slow_ms", "layout", "named"),
    [
        (dict.fromkeys(range(4, 8), 50.0), Layout(dp=16), {(4, 5, 6, 7)}),
        (dict.fromkeys(range(4, 8), 50.0), Layout(tp=2, dp=8), {(4, 6)}),
        (dict.fromkeys(range(4, 8), 0.5), Layout(dp=16), set()),
        (dict.fromkeys((4, 6), 50.0), Layout(dp=16), {(4, 6)}),
        (dict.fromkeys(range(16), 50.0), Layout(dp=16), set()),
        (dict.fromkeys((4, 5, 6, 7, 9, 12), 50.0), Layout(dp=16), set()),
    ],
    ids=[
        "all loaders",
        "one of each TP group",
        "too little",
        "half of them",
        "all hosts",
        "others",
    ],
)
def test_a_host_all_of_whose_loaders_are_slow_is_named(job, slow_ms, layout, named):
    """The device waits for the slowest of them; what the others lose tells nothing of them. Ranks
    that load for others are named alone.
    """

    def loading(slot):
        if slot.rank % layout.tp or slot.microbatch:
            return 0.02
        return slow_ms.get(slot.rank, 0.5) * LOADING[slot.iteration, slot.rank]

    findings = job(layout=layout, hosts=4, iterations=12, loading_ms=loading).report().findings
    whole = {
        one.ranks
        for one in findings
        if one.cause == Cause.LOADER and one.owner == Owner.NODE and len(one.ranks) > 1
    }
    assert whole == named


@pytest.mark.parametrize(
    ("most_ms", "least_ms", "owner"),
    [(1.2, 0.1, Owner.NODE), (1.2, 0.7, Owner.UNDECIDED)],
    ids=["far longer", "as documents differ"],
)
def test_of_two_hosts_one_is_always_noisier_but_not_by_far(job, most_ms, least_ms, owner):
    """Loading takes the ranks of one host 10 ms of 255, those of the other 1 or 6 ms."""

    def loading(slot):
        usual_ms = most_ms if slot.rank < 4 else least_ms
        return usual_ms * (0.5 + (slot.iteration * 7 + slot.rank * 3) % 5 / 4)

    report = job(layout=Layout(dp=8), hosts=4, loading_ms=loading).report()
    found = [one.owner for one in report.findings if one.ranks == (0, 1, 2, 3)]
    assert found == [owner] or (not found and owner is Owner.UNDECIDED)


@pytest.mark.parametrize(("late_ms", "owner"), [((1.5,) * 4, Owner.NODE), ((1.5, 0, 0, 0), None)])
def test_loaders_of_a_host_that_are_named_one_by_one_are_the_hosts(job, late_ms, owner):
    """12 ms of 255 each, which two hosts may differ by: but each is late beside its peers."""

    def loading(slot):
        return 0.1 + (late_ms[slot.rank] if slot.rank < 4 else 0.0)

    report = job(layout=Layout(dp=8), hosts=4, loading_ms=loading).report()
    whole = [one for one in report.findings if one.ranks == (0, 1, 2, 3)]
    assert [(one.cause, one.owner) for one in whole] == [(Cause.LOADER, owner)] * (
        owner is not None
    )


@pytest.mark.parametrize(("others", "owner"), [((1,), Owner.NODE), ((5,), Owner.UNDECIDED)])
def test_what_is_slow_for_one_host_alone_is_no_storage_of_all(job, others, owner):
    """Rank 0's loader is late, and another's as late in every other iteration: on its own host, or
    on the other one.
    """

    def loading(slot):
        return 12.0 if slot.rank == 0 or (slot.rank in others and slot.iteration % 2) else 0.1

    report = job(layout=Layout(dp=8), hosts=4, loading_ms=loading).report()
    assert [one.owner for one in report.findings if one.ranks == (0,)] == [owner]


@pytest.mark.parametrize(
    ("factor", "owner"), [(1.0, Owner.UNDECIDED), (1.3, Owner.NODE)], ids=["loads late", "and slow"]
)
def test_storage_of_all_makes_no_passes_longer(job, factor, owner):
    """Loading takes ranks 4 to 7 half a pass longer, and those of the other hosts now and then;
    passes of these ranks are slower by 1.18 to 1.43 times, as longer documents may make them.
    """

    def loading(slot):
        is_late = slot.rank in range(4, 8) or (slot.rank + slot.iteration) % 7 == 0
        return 40.0 if is_late else 1.0

    def work(slot):
        is_slow = slot.rank in range(4, 8) and slot.name != "optimizer"
        return factor ** (1.0 + (slot.rank - 5.5) / 4.0) if is_slow else 1.0

    made = job(layout=Layout(dp=16), hosts=4, loading_ms=loading, work=work)
    found = [one for one in made.report().findings if one.ranks == (4, 5, 6, 7)]
    assert [(one.cause, one.owner) for one in found] == [(Cause.LOADER, owner)]


def test_a_first_stage_loads_for_all_others_unless_it_changes(job):
    made = job(layout=Layout(dp=2, pp=2), hosts=2, loading_ms=loads((0, 1), else_ms=0.02))
    assert Owner.NODE not in {one.owner for one in made.report().findings}
    changed = made.but(loading_ms=loads((0, 1), first=12)).report()
    finding = next(one for one in changed.findings if one.owner is Owner.NODE)
    assert (finding.ranks, finding.cause, finding.first_iteration) == ((0, 1), Cause.LOADER, 12)


def test_a_loader_far_slower_than_its_neighbours_is_no_hosts(job):
    def effect(slot):
        return 60.0 if slot.rank == 1 else 2.0 if slot.rank < 4 else 0.1

    made = job(layout=Layout(dp=4, pp=4), hosts=4, loading_ms=effect)
    assert not [one for one in made.report().findings if len(one.ranks) == 4
                and one.cause is Cause.LOADER]  # fmt: skip


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


@pytest.mark.parametrize("is_other_named", [False, True])
def test_optimizer_steps_alone_show_no_host_while_others_may_wait(is_other_named):
    """They may hold waiting for whoever is named; passes hold none."""
    own, test = np.arange(8) < 4, HostTest(effect=0.4, error=0.01, p_value=1e-9)
    named = np.zeros(8, dtype=bool)
    named[6] = is_other_named
    inquiry = SimpleNamespace(named=named, slow=np.zeros(8, dtype=bool))
    doubts = [
        _doubt_of_level(inquiry, SimpleNamespace(own=own), test, {channel: test})
        for channel in ("optimizer", "compute")
    ]
    assert doubts == [OTHERS_WAIT if is_other_named else "", ""]


@pytest.mark.parametrize(
    ("pace", "held", "longer", "named"),
    [
        (1.47, 1.47, 0.12, True),
        (1.47, 1.0, 0.12, False),
        (1.47, 1.47, 0.0, False),
        (1.1, 1.1, 0.12, False),
    ],
    ids=["slow and waited for", "not by all launches", "nobody waits", "as hosts differ"],
)
def test_a_host_that_launches_slowly_is_named_for_what_others_wait(job, pace, held, longer, named):
    """What it costs lies in no single place: in TP mates, the optimizer, loading, collections."""
    seen = observe(job(layout=Layout(tp=2, dp=8), hosts=8).timeline())
    own, noise = np.arange(16)[:, None] < 8, np.random.default_rng(5)
    spread = 0.02 * noise.standard_normal((16, len(seen.iterations)))
    waiting = np.where(own, 0.02, 0.02 + longer) * seen.iteration_ns
    slow = replace(
        seen, launch_pace=np.where(own, np.log(pace), 0.0) + spread, waiting_ns=waiting,
        held_pace=np.where(own, np.log(held), 0.0) + spread, split_wait_ns=None, costs=None,
    )  # fmt: skip
    found = judge(slow, DetectorSettings()).findings
    assert [one.ranks for one in found if one.owner is Owner.NODE] == [tuple(range(8))] * named


@pytest.mark.parametrize(("slower", "named"), [(1.0, True), (1.3, False)])
def test_ranks_that_wait_for_a_slow_one_do_not_wait_for_its_host(job, slower, named):
    """Its host launches slowly, too, which harms nobody."""

    def work(slot):
        return slower if slot.rank == 3 else 1.0

    seen = observe(job(layout=Layout(dp=16), hosts=8, work=work).timeline())
    own, noise = np.arange(16)[:, None] < 8, np.random.default_rng(5)
    spread = 0.02 * noise.standard_normal((16, len(seen.iterations)))
    waits_least = own if named else np.arange(16)[:, None] == 3
    waiting = np.where(waits_least, 0.02, 0.2) * seen.iteration_ns
    slow = replace(
        seen, launch_pace=np.where(own, np.log(1.7), 0.0) + spread, waiting_ns=waiting,
        split_wait_ns=None, costs=None,
    )  # fmt: skip
    found = judge(slow, DetectorSettings()).findings
    ranks = tuple(range(8)) if named else (3,)
    assert [one.ranks for one in found if one.owner is Owner.NODE] == [ranks]


@pytest.mark.parametrize(("pace", "is_of_stage"), [(1.0, False), (1.6, True)])
def test_a_stage_that_launches_more_has_gaps_of_its_own(job, pace, is_of_stage):
    def pauses(slot):
        return 60.0 if slot.iteration % 4 == slot.rank % 4 and slot.rank < 8 else 0.0

    seen = observe(job(layout=Layout(dp=8, pp=2), hosts=8, gap_ms=pauses).timeline())
    own = np.arange(16)[:, None] < 8
    launch_pace = np.where(own, np.log(pace), 0.0) + np.zeros(seen.busy_ns.shape)
    seen = replace(seen, launch_pace=launch_pace)
    paused = _paused_host(seen, np.zeros(16, dtype=bool), 0.01)
    assert paused is not None and (ALONE in _doubts(seen, paused)) == is_of_stage


@pytest.mark.parametrize(("pace", "owner"), [(1.0, Owner.NODE), (1.6, Owner.UNDECIDED)])
def test_steady_gaps_of_a_stage_that_launches_more_are_its_own(job, pace, owner):
    made = job(layout=Layout(dp=4, pp=4), hosts=4, gap_ms=lost_by(range(4), 60.0))
    seen, own = observe(made.timeline()), np.arange(16)[:, None] < 4
    paces = np.where(own, np.log(pace), 0.0) + np.zeros(seen.busy_ns.shape)
    (finding,) = judge(replace(seen, launch_pace=paces), DetectorSettings()).findings
    assert (finding.ranks, finding.owner) == ((0, 1, 2, 3), owner)


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


@pytest.mark.parametrize(
    ("elsewhere", "named"), [(0.025, True), (0.2, False)], ids=["short ones", "as long"]
)
def test_pauses_of_a_host_are_told_from_shorter_ones_of_other_hosts(elsewhere, named):
    """In 7 of 10 iterations two or three ranks of a host lose 10 to 30 %; each other host has 4."""
    over, host = np.zeros((16, 10)), np.arange(16) // 4
    for iteration in range(7):
        over[[12 + iteration % 4, 12 + (iteration + 1) % 4], iteration] = (0.3, 0.1)
    for rank in range(12):
        over[rank, (rank + 5) % 10] = elsewhere
    paused = _pausing_host(over, ["a", "b", "c", "d"], host, rate=0.01)
    assert (paused is not None and paused.name == "d" and paused.burst.is_sure) == named


def test_ranks_that_pause_in_passes_of_their_own_do_not_pause_in_one_go():
    """Six of eight ranks pause in four iterations of six, in one pass or each in its own."""
    over = np.zeros((16, 6))
    for iteration in range(4):
        over[(np.arange(6) + iteration) % 8, iteration] = 0.2
    together = np.repeat(over > 0, 8, axis=1)
    apart = together & (np.arange(48) % 8 == np.arange(16)[:, None] % 8)
    host = np.arange(16) // 8
    for events, is_sure in ((together, False), (apart, True)):
        paused = _pausing_host(over, ["a", "b"], host, rate=0.01, apart=events)
        assert paused is not None and paused.burst.is_sure == is_sure


@pytest.mark.parametrize(("collecting", "named"), [(0.0, True), (0.5, False)])
def test_a_host_whose_ranks_wait_for_who_collects_garbage_does_not_pause(job, collecting, named):
    def pauses(slot):
        return 60.0 if slot.iteration % 4 == slot.rank % 4 and slot.rank < 8 else 0.0

    seen = observe(job(layout=Layout(dp=16), hosts=8, gap_ms=pauses).timeline())
    collected = np.zeros(seen.busy_ns.shape)
    collected[12] = collecting * seen.iteration_ns
    seen = replace(seen, lost_ns={**seen.lost_ns, Cause.GC: collected}, costs=None)
    paused = _paused_host(seen, np.zeros(16, dtype=bool), 0.01)
    assert (paused is not None) == named


@pytest.mark.parametrize(
    ("first_ms", "last_ms", "apart", "owner"),
    [
        (24.0, 0.2, 0.2, Owner.NODE),
        (24.0, 8.0, 0.2, Owner.UNDECIDED),
        (2.5, 0.2, 0.2, Owner.UNDECIDED),
        (24.0, 0.2, 0.001, Owner.UNDECIDED),
    ],
    ids=[
        "the other end is quick",
        "both ends are slow",
        "inputs of the first stage",
        "all take as long as each other",
    ],
)
def test_a_host_loads_slowly_if_the_other_end_of_the_pipeline_does_not(
    job, first_ms, last_ms, apart, owner
):
    """Both ends load the same from the same storage; the first may have inputs of its own."""

    def loading(slot):
        wobble = LOADING[slot.iteration, slot.rank] ** apart
        return wobble * {0: first_ms, 3: last_ms}.get(slot.stage, 0.0)

    made = job(layout=Layout(pp=4, dp=4), hosts=4, loading_ms=loading)
    found = [one for one in made.report().findings if one.ranks == (0, 1, 2, 3)]
    assert {one.owner for one in found if one.cause == Cause.LOADER} <= {owner}
    assert bool(found) or owner is Owner.UNDECIDED


@pytest.mark.parametrize(
    ("late_in", "elsewhere", "ranks"),
    [
        ((range(12, 16),), (), {(12, 13, 14, 15)}),
        ((range(12, 16),), range(4), set()),
        ((range(4),), (), set()),
    ],
    ids=["labels", "both ends", "inputs"],
)
def test_loaders_of_the_last_stage_that_are_late_now_and_then(job, late_in, elsewhere, ranks):
    """By turns two of them load for 60 ms of 380; the first stage may have more to load."""

    def loading(slot):
        is_late = slot.rank in late_in[0] and (slot.rank + slot.iteration // 2) % 2 == 0
        is_late |= slot.rank in elsewhere and slot.iteration % 5 == 0
        return 60.0 if is_late and slot.microbatch == 0 else 0.1 if slot.stage in (0, 3) else 0.0

    report = job(layout=Layout(pp=4, dp=4), hosts=4, loading_ms=loading).report()
    named = {one.ranks for one in report.findings if one.owner is Owner.NODE}
    assert {one for one in named if len(one) > 1} == ranks


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_first_stage_that_loads_while_it_waits_anyway_is_no_slow_host(job, is_waited_for):
    """Ranks 0 to 3 load for 200 ms of an iteration, those of the last stage for 2 ms."""

    def loading(slot):
        return LOADING[slot.iteration, slot.rank] ** 0.2 * {0: 24.0, 3: 0.2}.get(slot.stage, 0.0)

    seen = observe(job(layout=Layout(pp=4, dp=4), hosts=4, loading_ms=loading).timeline())
    waiting = np.full_like(seen.busy_ns, 150e6)
    waiting[:4] = 1e6 if is_waited_for else 140e6
    report = judge(replace(seen, waiting_ns=waiting), DetectorSettings())
    named = [one.ranks for one in report.findings if one.owner is Owner.NODE]
    assert named == ([(0, 1, 2, 3)] if is_waited_for else [])


def test_one_pause_of_each_rank_is_no_slow_host():
    at_once, apart = np.zeros((2, 4, 10))
    at_once[:, 3] = 0.3
    apart[np.arange(4), np.arange(4)] = 0.3
    assert _is_one_pause_each(apart, 0.03) and not _is_one_pause_each(at_once, 0.03)
    apart[:, 5:] = 0.03
    assert not _is_one_pause_each(apart, 0.04)
    one_pauses_again = np.zeros((2, 6))
    one_pauses_again[0, :4], one_pauses_again[1] = (9.0, 0, 0, 0.5), (0, 0.8, 0.1, 0.7, 2.1, 1.2)
    assert not _is_one_pause_each(one_pauses_again, 1.2)


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
