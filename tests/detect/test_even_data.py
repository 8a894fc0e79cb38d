"""Passes that all got as many tokens: then longer data are not why one of them takes longer."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from detect import Cause, DetectorSettings, Owner
from detect.causes.device import Suspicion, shares_its_memory
from detect.detector import judge
from detect.observe.extract import observe
from detect.observe.operations import BACKWARD, Boundness
from megascan.instrument.megatron import num_tokens
from megascan.topology import Layout

EVEN = {"tokens": lambda rank: (4096, 4096)}


def in_passes_only(slot):
    """A clock that is lower: the optimizer, bound by memory, hardly notices."""
    return 1.15 if slot.rank == 3 and slot.name != "optimizer" else 1.0


def owners(report):
    return [(one.ranks, one.cause, one.owner) for one in report.findings]


def test_a_slow_rank_on_even_data_is_its_device(job):
    even = job(layout=Layout(dp=8), work=in_passes_only, **EVEN)
    (finding,) = even.report().findings
    assert (finding.ranks, finding.cause, finding.owner) == ((3,), Cause.COMPUTE, Owner.NODE)
    assert any("as many tokens as those of its peers" in one for one in finding.evidence)
    assert owners(even.but(tokens=None).report()) == [((3,), Cause.COMPUTE, Owner.UNDECIDED)]


@pytest.mark.parametrize(
    "tokens",
    [
        lambda rank: (4096, 6144) if rank == 3 else (4096, 4096),  # its documents vary
        lambda rank: (512, 4096),
        lambda rank: () if rank == 5 else (4096, 4096),  # one did not say, or packs its sequences
    ],
)
def test_data_that_differ_or_are_not_known_stay_a_reason(job, tokens):
    report = job(layout=Layout(dp=8), work=in_passes_only, tokens=tokens).report()
    assert owners(report) == [((3,), Cause.COMPUTE, Owner.UNDECIDED)]


def longer_at(row_rank, num_tokens=5120):
    return lambda rank: (num_tokens, num_tokens) if rank == row_rank else (4096, 4096)


@pytest.mark.parametrize("factor", [1.1, 1.25, 1.5])
def test_longer_data_that_were_counted_are_the_job_s_doing(job, factor):
    """1.25 times the tokens: in proportion, or up to their square where attention is all."""

    def longer(slot):
        return factor if slot.rank == 3 and slot.name != "optimizer" else 1.0

    run = job(layout=Layout(dp=8), work=longer, tokens=longer_at(3))
    report = run.report()
    assert owners(report) == [((3,), Cause.SEQUENCE_IMBALANCE, Owner.JOB)]
    (finding,) = report.findings
    assert any("5,120 tokens, those of its peers 4,096" in one for one in finding.evidence)
    assert any("balance the documents" in one for one in finding.next_steps)
    assert report.verdict == "job"
    assert owners(run.but(layout=Layout(dp=8, ep=8)).report()) != owners(report)


@pytest.mark.parametrize(
    "work",
    [
        lambda slot: 1.8 if slot.rank == 3 and slot.name != "optimizer" else 1.0,
        lambda slot: 1.4 if slot.rank == 3 else 1.0,  # its optimizer step, too
    ],
)
def test_longer_data_excuse_no_more_than_they_explain(job, work):
    report = job(layout=Layout(dp=8), work=work, tokens=longer_at(3)).report()
    assert owners(report) == [((3,), Cause.COMPUTE, Owner.UNDECIDED)]
    assert any("may be part of the reason" in one for one in report.findings[0].evidence)


def test_data_that_were_always_longer_are_not_why_a_rank_became_slow(job):
    def later(slot):
        grows = slot.rank == 3 and slot.iteration >= 12
        return 1.3 if grows and slot.name != "optimizer" else 1.0

    report = job(layout=Layout(dp=8), work=later, tokens=longer_at(3)).report()
    ((ranks, cause, _),) = owners(report)
    assert (ranks, cause) == ((3,), Cause.COMPUTE)
    assert report.findings[0].first_iteration == 12


def test_longer_data_of_another_rank_excuse_nobody(job):
    def of_two(slot):
        factors = {3: 1.25, 6: 1.15} if slot.name != "optimizer" else {}
        return factors.get(slot.rank, 1.0)

    report = job(layout=Layout(dp=8), work=of_two, tokens=longer_at(3)).report()
    assert set(owners(report)) == {
        ((3,), Cause.SEQUENCE_IMBALANCE, Owner.JOB),
        ((6,), Cause.COMPUTE, Owner.NODE),
    }


def test_experts_may_get_more_of_as_many_tokens(job):
    report = job(layout=Layout(dp=8, ep=8), work=in_passes_only, **EVEN).report()
    assert all(owner != Owner.NODE for _, _, owner in owners(report))


def test_a_replica_that_is_slow_on_all_stages_is_hardly_two_devices(job):
    def of_replica(slot):
        return 1.15 if slot.replica == 1 and slot.name != "optimizer" else 1.0

    report = job(layout=Layout(dp=4, pp=2), work=of_replica, **EVEN).report()
    assert all(owner != Owner.NODE for _, _, owner in owners(report))


def test_a_host_of_whole_replicas_on_even_data_is_slow_itself(job):
    def of_host(slot):
        return 1.15 if slot.rank in range(4, 8) and slot.name != "optimizer" else 1.0

    hot = job(layout=Layout(dp=16), hosts=4, work=of_host)
    assert all(owner == Owner.UNDECIDED for _, _, owner in owners(hot.report()))
    expected = ((4, 5, 6, 7), Cause.COMPUTE, Owner.NODE)
    assert owners(hot.but(**EVEN).report()) == [expected]


@pytest.mark.parametrize(("device", "owner"), [("cuda", Owner.NODE), ("cpu", Owner.UNDECIDED)])
def test_the_slower_of_two_on_even_data(job, device, owner):
    """Devices of one model are not so much quicker than sound ones; processes on cores may be."""

    def of_one(slot):
        return 1.3 if slot.rank == 1 and slot.name != "optimizer" else 1.0

    report = job(layout=Layout(dp=2), work=of_one, device=device, **EVEN).report()
    assert owners(report) == [((1,), Cause.COMPUTE, owner)]


def test_two_that_differ_by_little_stay_undecided(job):
    def of_one(slot):
        return 1.04 if slot.rank == 1 and slot.name != "optimizer" else 1.0

    report = job(layout=Layout(dp=2), work=of_one, noise=0.002, **EVEN).report()
    assert all(owner != Owner.NODE for _, _, owner in owners(report))


def test_lengths_that_do_not_vary_are_no_reason_for_what_varies(job):
    lengths = np.exp(0.2 * np.random.default_rng(3).standard_normal((4, 64, 64)))

    def uneven(slot):
        microbatch = lengths[slot.replica, slot.iteration, slot.microbatch]
        return 1.0 if slot.name == "optimizer" else float(microbatch)

    (data,) = job(layout=Layout(dp=4), work=uneven).report().findings
    (other,) = job(layout=Layout(dp=4), work=uneven, **EVEN).report().findings
    assert (data.cause, data.owner) == (Cause.SEQUENCE_IMBALANCE, Owner.JOB)
    assert (other.cause, other.owner) == (Cause.UNKNOWN, Owner.UNDECIDED)


def test_tokens_of_a_pass():
    def model(pre_process, hidden):
        return SimpleNamespace(
            pre_process=pre_process, decoder=SimpleNamespace(input_tensor=hidden)
        )

    tokens, hidden = torch.zeros(2, 32), torch.zeros(32, 2, 64)
    assert num_tokens(model(True, None), tokens) == 64
    assert num_tokens(model(False, hidden), None) == 64
    assert num_tokens(model(False, None), tokens) == 0
    assert num_tokens(object(), None) == 0


@pytest.mark.parametrize(
    ("layout", "slow", "owner"),
    [(Layout(dp=8), {3}, Owner.NODE), (Layout(tp=2, dp=4), {2, 3}, Owner.UNDECIDED)],
    ids=["one", "a TP group"],
)
def test_devices_of_a_tp_group_do_not_slow_down_together(job, layout, slow, owner):
    """Only products of matrices are slow, as with a lower clock; a group shares its data."""

    def of_some(slot):
        return 1.3 if slot.rank in slow and slot.name != "optimizer" else 1.0

    made = job(layout=layout, work=of_some)
    seen, sound = observe(made.timeline()), observe(made.but(work=None).timeline())
    kinds = Boundness(memory=sound.work, matrix=seen.work, memory_ns=np.zeros_like(seen.busy_ns))
    report = judge(replace(seen, boundness=kinds), DetectorSettings())
    assert sorted(owners(report)) == [((rank,), Cause.COMPUTE, owner) for rank in sorted(slow)]


@pytest.mark.parametrize(
    ("factor", "in_memory", "owner"),
    [(1.11, 1.0, Owner.NODE), (1.11, 1.11, Owner.UNDECIDED), (1.07, 1.0, Owner.UNDECIDED)],
    ids=["a lower clock", "more data", "as two sound chips may differ"],
)
def test_products_tell_one_of_two_from_longer_data(job, factor, in_memory, owner):
    def by(slower):
        return lambda slot: slower if slot.rank == 1 and slot.name != "optimizer" else 1.0

    made = job(layout=Layout(dp=2), work=by(factor))
    seen, memory = (observe(one.timeline()) for one in (made, made.but(work=by(in_memory))))
    kinds = Boundness(memory=memory.work, matrix=seen.work, memory_ns=np.zeros_like(seen.busy_ns))
    report = judge(replace(seen, boundness=kinds), DetectorSettings())
    assert owners(report) == [((1,), Cause.COMPUTE, owner)]


@pytest.mark.parametrize(
    ("layout", "slow", "hits", "owner"),
    [
        (Layout(dp=8), {3}, "some", Owner.NODE),
        (Layout(dp=8), {3}, "all", Owner.UNDECIDED),
        (Layout(dp=8), {3}, "the same", Owner.UNDECIDED),
        (Layout(dp=8), {3}, "passes not told", Owner.UNDECIDED),
        (Layout(dp=8, ep=2), {3}, "some", Owner.UNDECIDED),
        (Layout(tp=2, dp=4), {2, 3}, "some", Owner.UNDECIDED),
    ],
    ids=["shared", "longer data", "a busy expert", "passes not told", "experts", "a TP group"],
)
def test_a_device_that_is_shared_slows_some_layers_and_not_others(job, layout, slow, hits, owner):
    """Kernels that only move memory: 1.5 times as long in six parts of ten, other ones in each
    iteration or the same ones in all; or 1.2 in all parts.
    """

    def of_some(slot):
        return 1.2 if slot.rank in slow and slot.name != "optimizer" else 1.0

    made = job(layout=layout, work=of_some)
    seen, sound = observe(made.timeline()), observe(made.but(work=None).timeline())
    log_ns = sound.work.log_ns.copy()
    taken = np.random.default_rng(7).random(log_ns[0].shape) < 0.6
    same = np.broadcast_to(taken[0], taken.shape)
    longer = {"some": taken, "the same": same, "passes not told": taken}.get(hits)
    for rank in slow:
        log_ns[rank] += np.log(1.2) if longer is None else np.log(np.where(longer, 1.5, 1.0))
    if hits == "passes not told":
        log_ns[:, :, sound.work.phase == BACKWARD] = np.nan
    memory = replace(sound.work, log_ns=log_ns)
    kinds = Boundness(memory=memory, matrix=seen.work, memory_ns=np.zeros_like(seen.busy_ns))
    report = judge(replace(seen, boundness=kinds), DetectorSettings())
    assert sorted(owners(report)) == [((rank,), Cause.COMPUTE, owner) for rank in sorted(slow)]


@pytest.mark.parametrize(
    ("num_longer", "owner"), [(0, Owner.NODE), (3, Owner.UNDECIDED)], ids=["clock", "documents"]
)
def test_longer_documents_lengthen_some_of_what_moves_memory(job, num_longer, owner):
    """Where passes are not told, most of what moves memory may lie outside them."""

    def of_one(slot):
        return 1.5 if slot.rank == 3 and slot.name != "optimizer" else 1.0

    made = job(layout=Layout(dp=8), work=of_one)
    seen, sound = observe(made.timeline()), observe(made.but(work=None).timeline())
    log_ns = sound.work.log_ns.copy()
    log_ns[3, :, :num_longer] += np.log(1.5)
    memory = replace(sound.work, log_ns=log_ns)
    kinds = Boundness(memory=memory, matrix=seen.work, memory_ns=np.zeros_like(seen.busy_ns))
    report = judge(replace(seen, boundness=kinds), DetectorSettings())
    assert owners(report) == [((3,), Cause.COMPUTE, owner)]


@pytest.mark.parametrize(
    ("ratio", "owner"), [(1.6, Owner.UNDECIDED), (1.02, Owner.NODE)], ids=["routed", "a clock"]
)
def test_all_to_alls_that_carry_more_tell_of_tokens_for_experts(job, ratio, owner):
    """A trainer whose process groups do not say that experts are exchanged."""

    def of_one(slot):
        return 1.25 if slot.rank == 1 and slot.name != "optimizer" else 1.0

    def with_step(slot):
        return 1.02 if slot.rank == 1 and slot.name == "optimizer" else of_one(slot)

    seen = observe(job(layout=Layout(dp=4), work=with_step).timeline())
    carried = 1e8 * np.random.default_rng(5).normal(1.0, 0.01, seen.busy_ns.shape)
    carried[1] *= ratio
    report = judge(replace(seen, exchanged_bytes=carried), DetectorSettings())
    assert owners(report) == [((1,), Cause.COMPUTE, owner)]


def test_where_no_sound_rank_is_left_a_shared_device_shows_nothing(job):
    seen = observe(job(layout=Layout(dp=2)).timeline())
    kinds = Boundness(memory=seen.work, matrix=seen.work, memory_ns=np.zeros_like(seen.busy_ns))
    all_slow, always = np.ones(2, dtype=bool), np.ones(len(seen.iterations), dtype=bool)
    seen = replace(seen, boundness=kinds)
    suspicion = Suspicion(seen=seen, excluded=all_slow, row=1, active=always, effect=0.1)
    assert shares_its_memory(suspicion) == ""
