"""Slow passes are the device's where the optimizer, or mates on the same data, show it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner
from detect.detector import judge
from detect.observe.extract import observe
from detect.observe.operations import Tokenwise
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


def test_a_mate_slow_in_one_pass_only_waits_for_the_slower_one(job, slow, together):
    """Rank 2 waits inside its backward passes; its optimizer is a little slower by itself."""

    def waits(slot):
        by_name = {"backward": 1.15, "optimizer": 1.03}
        return by_name.get(slot.name, 1.0) if slot.rank == 2 else 1.0

    found = owners(job(layout=Layout(tp=2, dp=4), work=together(slow(3, 1.2), waits)).report())
    assert found == {(3,): (Cause.COMPUTE, Owner.NODE)}


@pytest.mark.parametrize(
    ("factor", "named"), [(1.2, {(3,)}), (1.1, {(2,), (3,)})], ids=["as slow", "less slow"]
)
def test_a_mate_as_slow_with_a_quicker_optimizer_waits(job, slow, together, factor, named):
    """Of TP mates whose passes are slow alike one waits for the other, in what is not recorded."""

    def waits(slot):
        of_mate = 1.04 if slot.name == "optimizer" else factor
        return of_mate if slot.rank == 2 else 1.0

    found = owners(job(layout=Layout(tp=2, dp=4), work=together(slow(3, 1.2), waits)).report())
    assert {ranks for ranks, (_, owner) in found.items() if owner == Owner.NODE} == named


@pytest.mark.parametrize(("quicker", "named"), [(0.985, set()), (1.0, {(3,)})])
def test_another_slow_ranks_optimizer_shows_how_far_they_may_be_off(job, quicker, named):
    """Both ranks of a TP group have longer data; no fault makes rank 2's optimizer quicker."""

    def longer(slot):
        if slot.name == "optimizer":
            return {2: quicker, 3: 1.015}.get(slot.rank, 1.0)
        return 1.17 if slot.rank in (2, 3) else 1.0

    report = job(layout=Layout(tp=2, dp=2), work=longer, noise=0.002).report()
    assert {one.ranks for one in report.findings if one.owner == Owner.NODE} == named


@pytest.mark.parametrize(
    ("is_recorded", "elsewhere", "forward", "named"),
    [
        (True, 1.0, 1.2, {(0,), (1,)}),
        (True, 1.15, 1.2, set()),
        (False, 1.0, 1.2, set()),
        (True, 1.0, 1.13, {(1,)}),
        (True, 1.0, 1.25, {(0,)}),
    ],
    ids=[
        "both slow",
        "longer data",
        "waiting unseen",
        "one waits in its backward passes",
        "one is slower forward than backward",
    ],
)
def test_other_stages_tell_a_slow_group_from_longer_data(
    job, exchanging, is_recorded, elsewhere, forward, named
):
    """Ranks 0 and 1, mates, are slow in both passes and no optimizer is: 4 and 5 share the data."""

    def longer(slot):
        if slot.name == "optimizer" or slot.rank not in (0, 1, 8, 9):
            return 1.0
        if slot.rank > 1:
            return elsewhere
        return forward if (slot.name, slot.rank) == ("forward", 0) else 1.2

    groups = [((rank, rank + 1), 10**8, 12.0) for rank in range(0, 16, 2)]
    seen = exchanging(job(layout=Layout(tp=2, dp=4, pp=2), work=longer).timeline(), groups)
    kinds = ("tp all_reduce of 1e8 bytes" if is_recorded else "dp all_reduce of 1e8 bytes",)
    seen = replace(seen, transfers=replace(seen.transfers, kinds=kinds))
    found = owners(judge(seen, DetectorSettings()))
    assert {ranks for ranks, (_, owner) in found.items() if owner == Owner.NODE} == named


def test_who_waits_for_a_hidden_exchange_of_tokens_is_not_named(job):
    """All ranks of an EP group wait for rank 1 inside their passes; rank 2's optimizer is a bit
    slower than others', but nothing like rank 1's.
    """

    def work(slot):
        if slot.name == "optimizer":
            return {1: 1.1, 2: 1.03}.get(slot.rank, 1.0)
        return 1.15 if slot.rank < 4 else 1.0

    found = owners(job(layout=Layout(dp=8, ep=4), work=work).report())
    assert {ranks for ranks, (_, owner) in found.items() if owner == Owner.NODE} == {(1,)}


@pytest.mark.parametrize(
    ("slow", "axis", "owner"),
    [
        ({2}, "tp", Owner.NODE),
        (set(), "tp", Owner.UNDECIDED),
        ({2, 3}, "tp", Owner.UNDECIDED),
        ({2}, "dp", Owner.UNDECIDED),
    ],
    ids=["the device", "its experts", "longer data", "mates wait in it unseen"],
)
def test_attention_tells_a_slow_device_from_a_busy_expert(job, exchanging, slow, axis, owner):
    """The optimizer tells nothing; ranks 2 and 3 of a TP group work on the same data."""
    made = job(layout=Layout(tp=2, dp=4, ep=2), work=passes_of({2}, 1.3))
    groups = [((rank, rank + 1), 10**8, 12.0) for rank in range(0, 8, 2)]
    seen = exchanging(made.timeline(), groups)
    kinds = (f"{axis} all_reduce of 1e8 bytes",)
    seen = replace(seen, transfers=replace(seen.transfers, kinds=kinds))
    attention = np.full(seen.busy_ns.shape, 1e7)
    attention[list(slow)] *= 1.25
    found = owners(judge(replace(seen, attention_ns=attention), DetectorSettings()))
    assert found == {(2,): (Cause.COMPUTE, owner)}


def tokenwise(seen, *, dense, lookups, lookup_us=200.0):
    """Rank 3's products of matrices and lookups over those of the others."""
    dense_ns = np.full(seen.busy_ns.shape, 2e7)
    lookups_ns = np.full((*seen.busy_ns.shape, 2), np.nan)
    lookups_ns[:, :, 0] = 1e3 * lookup_us
    dense_ns[3] *= dense
    lookups_ns[3] *= lookups
    return replace(seen, tokenwise=Tokenwise(dense_ns=dense_ns, lookups_ns=lookups_ns))


@pytest.mark.parametrize(
    ("dense", "lookups", "lookup_us", "owner"),
    [
        (1.29, 1.08, 200.0, Owner.NODE),
        (1.29, 1.29, 200.0, Owner.UNDECIDED),
        (1.01, 1.0, 200.0, Owner.UNDECIDED),
        (1.29, 1.08, 20.0, Owner.UNDECIDED),
    ],
    ids=["a low clock", "more tokens", "longer documents", "lookups as short as launches"],
)
@pytest.mark.parametrize("ep", [1, 2])
def test_lookups_tell_a_slow_device_from_longer_data(job, ep, dense, lookups, lookup_us, owner):
    seen = observe(job(layout=Layout(dp=8, ep=ep), work=passes_of({3}, 1.3)).timeline())
    told = tokenwise(seen, dense=dense, lookups=lookups, lookup_us=lookup_us)
    found = owners(judge(told, DetectorSettings()))
    assert found == {(3,): (Cause.COMPUTE, owner)}


def test_lookups_tell_nothing_where_a_whole_replica_is_slow(job):
    """A mate that waits in its passes shows the same, and which of the two waits nobody knows."""
    seen = observe(job(layout=Layout(tp=2, dp=4), work=passes_of({2, 3}, 1.3)).timeline())
    told = tokenwise(seen, dense=1.29, lookups=1.0)
    found = owners(judge(told, DetectorSettings()))
    assert {owner for _, owner in found.values()} == {Owner.UNDECIDED}


@pytest.mark.parametrize(
    ("lookups", "of_mate", "named"),
    [
        (1.08, 1.0, {(3,): (Cause.COMPUTE, Owner.NODE)}),
        (1.08, 1.08, None),
        (3.5, 1.0, None),
    ],
    ids=["one is slow", "both got more tokens", "one waits in its loss"],
)
def test_lookups_tell_who_is_waited_for_in_a_tp_group(job, lookups, of_mate, named):
    """Ranks 2 and 3 wait for each other in their layers, but not in the embedding."""
    seen = observe(job(layout=Layout(tp=2, dp=4), work=passes_of({2, 3}, 1.25)).timeline())
    told = tokenwise(seen, dense=1.25, lookups=lookups)
    told.tokenwise.lookups_ns[2] *= of_mate
    report = judge(told, DetectorSettings())
    if named is None:
        assert {one.owner for one in report.findings} == {Owner.UNDECIDED}
    else:
        assert owners(report) == named
        assert any("of its TP group" in one for one in report.findings[0].evidence)


def test_what_takes_time_by_tokens_is_observed(job, slow):
    """Of two ranks the second one's device is 1.5 times slower, in lookups as in products."""
    fed = job(layout=Layout(dp=2), iterations=3, work=slow(1, 1.5), launch_lead_ns=lambda _: 10**9)
    parts = observe(fed.timeline()).tokenwise
    assert parts.dense_ns[1] / parts.dense_ns[0] == pytest.approx(1.5 * np.ones(3), rel=0.02)


def test_attention_of_forward_passes_is_observed(job, slow):
    fed = job(layout=Layout(dp=2), iterations=3, work=slow(1, 1.5), launch_lead_ns=lambda _: 10**9)
    attention = observe(fed.timeline()).attention_ns
    assert attention == pytest.approx(np.array([[40e6], [60e6]]) * np.ones(3), rel=0.05)


@pytest.mark.parametrize(("factor", "named"), [(1.2, (3,)), (1.0, (2, 3))])
def test_the_optimizer_tells_which_rank_of_an_unsplit_group_is_slow(job, factor, named):
    def work(slot):
        if slot.name == "optimizer":
            return factor if slot.rank == 3 else 1.0
        return 1.5 if slot.rank in (2, 3) else 1.0

    seen = observe(job(layout=Layout(tp=2, dp=4), work=work).timeline())
    (finding,) = judge(replace(seen, splits_tensor_groups=False), DetectorSettings()).findings
    assert finding.ranks == named
    assert finding.owner == (Owner.NODE if len(named) == 1 else Owner.UNDECIDED)
    if finding.owner == Owner.NODE:
        assert finding.headline.startswith("rank 3 (DP1 TP1")
        assert finding.coordinates == {"dp": 1, "tp": 1}
        assert "rank 3 alone has a slower optimizer step" in " ".join(finding.evidence)


@pytest.mark.parametrize(
    ("slower", "layout", "named"),
    [
        ({2: 1.2, 3: 1.2}, Layout(tp=2, dp=4), True),
        ({2: 1.2, 3: 1.06}, Layout(tp=2, dp=4), False),
        ({4: 1.2, 5: 1.2}, Layout(tp=4, dp=4), True),
        ({4: 1.2, 6: 1.2}, Layout(tp=4, dp=4), False),
        ({4: 1.2, 5: 1.2, 6: 1.2}, Layout(tp=4, dp=4), False),
    ],
    ids=["all alike", "one stands out", "half of the group", "of two hosts", "and one beside"],
)
def test_the_optimizer_tells_which_host_of_an_unsplit_group_is_slow(job, slower, layout, named):
    """Hosts have two ranks each; all ranks of the second group wait for each other in passes."""

    def work(slot):
        if slot.name == "optimizer":
            return slower.get(slot.rank, 1.0)
        return 1.5 if layout.tp <= slot.rank < 2 * layout.tp else 1.0

    seen = observe(job(layout=layout, work=work, hosts=2).timeline())
    report = judge(replace(seen, splits_tensor_groups=False), DetectorSettings())
    of_hosts = [one for one in report.findings if one.owner is Owner.NODE and len(one.ranks) > 1]
    assert [one.ranks for one in of_hosts] == ([tuple(slower)] if named else [])
    assert all("all of one host" in " ".join(one.evidence) for one in of_hosts)


def test_an_optimizer_tells_nothing_of_a_group_that_is_slow_in_forward_passes_alone(job):
    """Ranks 2 and 3 wait in forward passes for what comes late, and rank 3 in its step as well."""

    def work(slot):
        if slot.name == "optimizer":
            return 1.2 if slot.rank == 3 else 1.0
        return 1.5 if slot.rank in (2, 3) and slot.name == "forward" else 1.0

    seen = observe(job(layout=Layout(tp=2, dp=4), work=work).timeline())
    report = judge(replace(seen, splits_tensor_groups=False), DetectorSettings())
    assert Owner.NODE not in {one.owner for one in report.findings}


def test_one_slow_optimizer_does_not_outweigh_a_replica_that_is_slow_on_all_stages(job):
    """Its data explain the passes of all four; a step that is slow by chance, one optimizer."""

    def work(slot):
        if slot.name == "optimizer":
            return 1.1 if slot.rank in steps else 1.0
        return 1.2 if slot.replica == 0 else 1.0

    made = job(layout=Layout(tp=2, dp=3, pp=2), work=work)
    steps = {7}
    assert {owner for _, owner in owners(made.report()).values()} <= {Owner.UNDECIDED, Owner.JOB}
    steps = {0, 1, 6, 7}
    assert Owner.NODE in {owner for _, owner in owners(made.report()).values()}


@pytest.mark.parametrize(
    ("num_replicas", "step", "is_named"), [(2, 1.006, False), (2, 1.045, True), (3, 1.045, True)]
)
def test_of_mates_that_are_slow_alike_the_one_with_a_longer_step(job, num_replicas, step, is_named):
    """Four TP mates take 1.3 times as long, each, and one step is longer than those of the others,
    which show by how much sound ones differ.
    """

    def work(slot):
        if slot.name == "optimizer":
            return step if slot.rank == 1 else 1.0
        return 1.3 if slot.replica == 0 else 1.0

    found = owners(job(layout=Layout(tp=4, dp=num_replicas), work=work).report())
    assert is_named or {0, 1, 2, 3} <= {rank for ranks in found for rank in ranks}
    nodes = [ranks for ranks, (_, owner) in found.items() if owner is Owner.NODE]
    assert nodes == ([(1,)] if is_named else [])
    assert set(found) == {(1,)} or not (is_named and num_replicas == 2), "mates wait for it"


@pytest.mark.parametrize(("backward", "named"), [(1.6, {(7,)}), (1.2, {(6,), (7,)})])
def test_a_mate_that_is_as_slow_in_one_kind_of_passes_may_wait_there(job, backward, named):
    """Rank 7 takes 1.6 times as long in all passes, its mate 1.2 times forward, and backward as
    long as 7: reductions of backward passes were recorded in no span of their own.
    """

    def work(slot):
        if slot.name == "optimizer":
            return 1.1 if slot.rank in (6, 7) else 1.0
        of_mate = backward if slot.name == "backward" else 1.2
        return {7: 1.6, 6: of_mate}.get(slot.rank, 1.0)

    found = owners(job(layout=Layout(tp=2, dp=4), work=work).report())
    assert {ranks for ranks, (_, owner) in found.items() if owner is Owner.NODE} == named


@pytest.mark.parametrize(("ranks_a_host", "is_named"), [(12, True), (2, True), (1, False)])
def test_a_replica_on_many_hosts_is_not_slow_on_all_of_its_devices(job, ranks_a_host, is_named):
    """Ranks 0, 1, 6 and 7, whose optimizers are slow as well: they may wait in them."""

    def work(slot):
        return (1.1 if slot.name == "optimizer" else 1.2) if slot.replica == 0 else 1.0

    made = job(layout=Layout(tp=2, dp=3, pp=2), hosts=ranks_a_host, work=work)
    found = owners(made.report())
    assert {0, 1, 6, 7} <= {rank for ranks in found for rank in ranks}
    assert (Owner.NODE in {owner for _, owner in found.values()}) is is_named


@pytest.mark.parametrize(("optimizer", "owner"), [(1.3, Owner.NODE), (24.0, Owner.UNDECIDED)])
def test_an_optimizer_that_is_slower_by_far_more_waits_inside(job, optimizer, owner):
    """What holds it up is no slow device, which would compute as slowly in its passes."""

    def work(slot):
        by_name = optimizer if slot.name == "optimizer" else 1.3
        return by_name if slot.rank == 3 else 1.0

    report = job(layout=Layout(dp=8), work=work).report()
    assert [(one.ranks, one.owner) for one in report.findings if one.cause == Cause.COMPUTE] == [
        ((3,), owner)
    ]


@pytest.mark.parametrize(
    ("of_mate", "named"), [(1.04, set()), (1.005, {(6,)})], ids=["alike", "one alone"]
)
def test_of_a_group_that_is_slow_alike_one_rank_at_most_is_the_reason(job, of_mate, named):
    """All ranks of a TP group wait for each other, unseen; the optimizers of two are slower."""

    def waits(slot):
        if slot.name == "optimizer":
            return {6: 1.045, 5: of_mate}.get(slot.rank, 1.0)
        return 1.3 if slot.rank in range(4, 8) else 1.0

    found = owners(job(layout=Layout(tp=4, dp=4), work=waits).report())
    assert {ranks for ranks, (_, owner) in found.items() if owner == Owner.NODE} == named


@pytest.mark.parametrize(
    ("lookups", "optimizer", "owner"),
    [(1.3, 1.06, Owner.UNDECIDED), (1.3, 1.3, Owner.NODE), (1.1, 1.06, Owner.NODE)],
    ids=["more tokens", "slow in everything", "a low clock"],
)
def test_where_lookups_follow_an_optimizer_has_to_be_slower_by_as_much(
    job, lookups, optimizer, owner
):
    """A replica with 1.3 times the tokens, whose optimizer is slower by chance."""

    def work(slot):
        if slot.rank != 3:
            return 1.0
        return optimizer if slot.name == "optimizer" else 1.3

    seen = observe(job(layout=Layout(dp=8), work=work).timeline())
    found = owners(judge(tokenwise(seen, dense=1.3, lookups=lookups), DetectorSettings()))
    assert found == {(3,): (Cause.COMPUTE, owner)}


def test_a_slow_stage_beside_one_whose_step_is_quick_shares_its_data(job):
    """Two stages of one of four replicas take 1.04 and 1.06 times as long; chips do the rest."""

    def work(slot):
        if slot.name == "optimizer":
            return 1.018 if slot.rank == 7 else 1.0
        return {3: sibling, 7: 1.06}.get(slot.rank, 1.0)

    made = job(layout=Layout(dp=4, pp=2), work=work, noise=0.002)
    sibling = 1.04
    assert Owner.NODE not in {owner for _, owner in owners(made.report()).values()}
    sibling = 1.0
    assert owners(made.report())[(7,)] == (Cause.COMPUTE, Owner.NODE)


def test_two_slow_ranks_of_an_unsplit_group_are_told_apart(job):
    """Slow memory lengthens the step of rank 9 by far; rank 10 stands out from those that are left.
    Of a group of two nobody would be.
    """

    def work(slot):
        if slot.name == "optimizer":
            return {9: 2.6, 10: 1.08}.get(slot.rank, 1.0)
        return 1.5 if 8 <= slot.rank < 16 else 1.0

    seen = observe(job(layout=Layout(tp=8, dp=4), work=work, hosts=8).timeline())
    report = judge(replace(seen, splits_tensor_groups=False), DetectorSettings())
    (words,) = [" ".join(one.evidence) for one in report.findings if one.ranks == (9, 10)]
    assert "ranks 9 and 10 have slower optimizer steps (2.6" in words
    assert {rank for one in report.findings for rank in one.ranks} == {9, 10}


def test_who_may_wait_for_a_slow_mate_in_its_step_is_not_named_beside_it(job):
    """Of TP 2 and CP 2 the TP mate's step is longer, too: no other rank stands so to rank 5."""

    def work(slot):
        if slot.name == "optimizer":
            return {5: 2.6, 4: 1.2}.get(slot.rank, 1.0)
        return 1.5 if 4 <= slot.rank < 8 else 1.0

    seen = observe(job(layout=Layout(tp=2, cp=2, dp=4), work=work).timeline())
    report = judge(replace(seen, splits_tensor_groups=False), DetectorSettings())
    nodes = {rank for one in report.findings if one.owner is Owner.NODE for rank in one.ranks}
    assert nodes == {5}


@pytest.mark.parametrize(
    ("steps", "named"),
    [({4: 1.0, 5: 0.3}, False), ({4: 1.7, 5: 1.0}, True), ({4: 0.97, 5: 0.9}, True)],
    ids=["its mate waits less", "its own is longer", "both wait less, it by little"],
)
def test_a_step_is_longer_than_others_at_its_place_and_not_only_than_its_mates(job, steps, named):
    """Both passes take 1.05 times as long: a step that is longer by far more must be its own."""

    def work(slot):
        if slot.name == "optimizer":
            return steps.get(slot.rank, 1.0)
        return 1.1 if slot.rank in steps else 1.0

    seen = observe(job(layout=Layout(tp=2, dp=4), work=work).timeline())
    report = judge(replace(seen, splits_tensor_groups=False), DetectorSettings())
    of_compute = [one for one in report.findings if one.cause is Cause.COMPUTE]
    assert ((4,) in [one.ranks for one in of_compute if one.owner is Owner.NODE]) is named


@pytest.mark.parametrize(
    ("forward", "named"),
    [((1.0, 1.0, 1.2, 1.15), {(6,), (7,)}), ((1.14, 1.15, 1.2, 1.15), {(6,)})],
    ids=["two by themselves", "longer data, and one"],
)
def test_two_of_several_mates_may_be_slow_by_themselves(job, forward, named):
    """Backward passes of all four are as long: they wait for each other there, unseen."""

    def work(slot):
        if slot.name == "optimizer":
            return 1.05 if slot.rank == 6 else 1.0
        if slot.name == "backward":
            return 1.2 if 4 <= slot.rank < 8 else 1.0
        return dict(zip(range(4, 8), forward, strict=True)).get(slot.rank, 1.0)

    found = owners(job(layout=Layout(tp=4, dp=3), work=work).report())
    assert {ranks for ranks, (_, owner) in found.items() if owner is Owner.NODE} == named


@pytest.mark.parametrize("is_recorded", [True, False])
def test_mates_wait_for_nobody_where_all_they_exchange_was_recorded(job, exchanging, is_recorded):
    """All four of a TP group are slow, and their steps by a tenth of that, each by a bit more or
    less.
    """
    steps = {4: 1.05, 5: 1.03, 6: 1.04, 7: 1.03}

    def work(slot):
        if slot.name == "optimizer":
            return steps.get(slot.rank, 1.0)
        return 1.3 if slot.rank in steps else 1.0

    groups = [(tuple(range(rank, rank + 4)), 10**8, 12.0) for rank in range(0, 16, 4)]
    seen = exchanging(job(layout=Layout(tp=4, dp=4), work=work).timeline(), groups)
    axis = "tp" if is_recorded else "dp"
    kinds = (f"{axis} all_reduce of 1e8 bytes",)
    seen = replace(seen, transfers=replace(seen.transfers, kinds=kinds))
    found = owners(judge(seen, DetectorSettings()))
    nodes = {ranks for ranks, (_, owner) in found.items() if owner is Owner.NODE}
    assert nodes == ({(rank,) for rank in steps} if is_recorded else set())


@pytest.mark.parametrize(("step", "named"), [(1.06, {(1,)}), (1.02, set())])
def test_no_sound_chip_is_as_slow_in_its_step_however_busy_its_experts_are(job, step, named):
    """Ranks of an EP group take 1.35 times as long; a quarter of that need not show in the step."""

    def work(slot):
        if slot.name == "optimizer":
            return step if slot.rank == 1 else 1.0
        return 1.35 if slot.rank < 4 else 1.0

    found = owners(job(layout=Layout(dp=8, ep=4), work=work).report())
    assert {ranks for ranks, (_, owner) in found.items() if owner is Owner.NODE} == named
