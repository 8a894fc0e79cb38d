"""A host whose MLPs are slower than its attention has slow devices: no data, and no layers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner
from detect.detector import judge
from detect.observe.extract import observe
from detect.observe.warmup import steady
from megascan.topology import Layout


def modules(seen, own, mlp, attention):
    """Spans of MLPs and of attention of all ranks, those of some of them longer."""
    rng = np.random.default_rng(0)
    time_ns = np.full((*seen.busy_ns.shape, 3), np.nan)
    for kind, usual, factor in ((0, 1e6, mlp), (1, 1.5e6, attention)):
        time_ns[:, :, kind] = usual * np.exp(0.003 * rng.standard_normal(seen.busy_ns.shape))
        time_ns[own, :, kind] *= factor
    return replace(seen, modules_ns=time_ns)


def named(job, layout, own, mlp, attention, ranks_of_host=8):
    """Who is named where the passes of some ranks are longer, as their modules are."""
    passes = (mlp + attention) / 2

    def work(slot):
        return passes if slot.rank in own and slot.name != "optimizer" else 1.0

    seen = observe(job(layout=layout, work=work, hosts=ranks_of_host).timeline())
    seen = steady(modules(seen, list(own), mlp, attention), DetectorSettings())
    findings = judge(seen, DetectorSettings()).findings
    return {one.ranks: one.cause for one in findings if one.owner == Owner.NODE}


@pytest.mark.parametrize(
    ("mlp", "attention", "is_named"),
    [(1.2, 1.13, True), (1.2, 1.2, False), (1.2, 1.3, False), (1.2, 1.0, False)],
    ids=["a low clock", "heavier layers", "longer data", "wider MLPs"],
)
@pytest.mark.parametrize(
    ("layout", "own"),
    [(Layout(dp=4, pp=2), (4, 5, 6, 7)), (Layout(pp=4), (2,))],
    ids=["a host", "one rank"],
)
def test_mlps_beside_attention_tell_slow_devices_from_heavier_stages(
    job, layout, own, mlp, attention, is_named
):
    found = named(job, layout, own, mlp, attention, ranks_of_host=4)
    assert found == ({own: Cause.COMPUTE} if is_named else {})


@pytest.mark.parametrize(("mlp", "is_named"), [(1.3, True), (1.15, False)])
def test_one_device_of_two_stages_may_be_an_ordinary_slower_chip(job, mlp, is_named):
    found = named(job, Layout(pp=2), (1,), mlp, mlp**0.7)
    assert found == ({(1,): Cause.COMPUTE} if is_named else {})
