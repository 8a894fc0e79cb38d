"""Products of matrices beside lookups tell a slow device among data that vary."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner
from detect.detector import judge
from detect.observe.extract import observe
from detect.observe.operations import Tokenwise
from megascan.topology import Layout

SLOW = 2


def packed(job, *, varies=0.25, clock=1.0, tokens=1.0, lookups_follow=True):
    """Six replicas whose tokens differ anew in each iteration; one has a lower clock, or more."""
    rng = np.random.default_rng(7)
    length = np.exp(varies * rng.standard_normal((6, 24)))
    length[SLOW] *= tokens

    def work(slot):
        factor = length[slot.rank, slot.iteration]
        is_slow = slot.rank == SLOW and slot.name != "optimizer"
        return 1.0 if slot.name == "optimizer" else factor * (clock if is_slow else 1.0)

    seen = observe(job(layout=Layout(dp=6), work=work, hosts=6).timeline())
    shape = seen.busy_ns.shape
    length = length[:, seen.iterations]
    noise = np.exp(0.004 * rng.standard_normal((2, *shape)))
    dense_ns, loss_ns = 2e8 * length * noise[0], 5e3 * noise[1]
    dense_ns[SLOW] *= clock
    if lookups_follow:
        loss_ns = loss_ns * length
    lookups_ns = np.stack([np.full(shape, np.nan), loss_ns], axis=2)
    return replace(seen, tokenwise=Tokenwise(dense_ns=dense_ns, lookups_ns=lookups_ns))


def named(seen):
    findings = judge(seen, DetectorSettings()).findings
    return {one.ranks: one.cause for one in findings if one.owner == Owner.NODE}


@pytest.mark.parametrize(
    ("changes", "is_named"),
    [
        ({"clock": 1.25}, True),
        ({"clock": 1.05}, False),
        ({"tokens": 1.25}, False),
        ({"clock": 1.25, "lookups_follow": False}, False),
    ],
    ids=["a low clock", "an ordinary chip", "more tokens", "lookups as short as launches"],
)
def test_products_for_as_many_tokens_tell_a_device_from_its_data(job, changes, is_named):
    found = named(packed(job, **changes))
    assert found == ({(SLOW,): Cause.COMPUTE} if is_named else {})
