"""Which host, or which of its ranks, is slow, told by rings beside messages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner
from detect.detector import judge
from detect.observe.extract import observe
from detect.observe.observations import Transfers, steady
from megascan.topology import Layout

MESSAGE, RING = "p2p message of 50 MB", "dp all_reduce of unknown size"


def crossing(job, layout, hosts, units):
    """Observe a job with these transfers only: (members, kind, bytes, ms) each."""
    seen = steady(observe(job(layout=layout, hosts=hosts).timeline()), DetectorSettings())
    shape = (len(seen.members), len(seen.iterations))
    # what is of unknown size is of its stage's kind
    names = [
        f"{kind}/{min(ranks) * layout.pp // layout.world_size if size < 0 else ''}"
        for ranks, kind, size, _ in units
    ]
    kinds = sorted(set(names))
    ms = np.array([one[3] for one in units])
    time_ns = np.outer(ms * 1e6, np.ones(shape[1]))
    wobble = np.exp(0.01 * np.random.default_rng(0).standard_normal(time_ns.shape))
    transfers = Transfers(
        members=tuple(one[0] for one in units),
        kinds=tuple(name.split("/")[0] for name in kinds),
        kind=np.array([kinds.index(name) for name in names]),
        size_bytes=np.array([one[2] for one in units]),
        transfer_ns=time_ns * wobble,
        sum_ns=8 * time_ns,
        late_ns=np.zeros(shape),
        quick_ns=np.zeros(shape),
    )
    return replace(seen, transfers=transfers, costs=None)


def found(seen):
    return [
        (one.ranks, one.owner)
        for one in judge(seen, DetectorSettings()).findings
        if one.cause is Cause.LINK
    ]


def two_stages(rings):
    """Stage 0 on hosts 0 and 1 of four ranks, stage 1 on 2 and 3: 1 and 3 exchange slowly."""
    units = [((rank, rank + 8), MESSAGE, 50_000_000, 2.0 if rank > 3 else 1.0) for rank in range(8)]
    for stage, ms in enumerate(rings):
        first = 8 * stage
        units += [((first + one, first + one + 4), RING, -1, ms) for one in range(4)]
    return units


@pytest.mark.parametrize(
    ("rings", "ranks"),
    [
        ((10.0, 5.0), (4, 5, 6, 7)),
        ((5.0, 10.0), (12, 13, 14, 15)),
        ((6.0, 5.0), (4, 5, 6, 7, 12, 13, 14, 15)),  # another number of parameters
        ((20.0, 5.0), (4, 5, 6, 7, 12, 13, 14, 15)),
    ],
)
def test_rings_of_their_stages_tell_which_of_two_hosts_is_slow(job, rings, ranks):
    seen = crossing(job, Layout(dp=8, pp=2), 4, two_stages(rings))
    owner = Owner.NODE if len(ranks) == 4 else Owner.UNDECIDED
    assert found(seen) == [(ranks, owner)]


@pytest.mark.parametrize(
    ("others", "ranks"), [(1.0, (0, 1)), (3.4, (0, 1, 2, 3)), (1.8, (0, 1, 2, 3))]
)
def test_ranks_whose_messages_are_fine_are_not_slow_with_their_host(job, others, ranks):
    """Rings of a stage's hosts 0 and 1 are slow beside the other stage's; the messages of ranks 0
    and 1 are, and those of 2 and 3 take `others` times as long as usual.
    """
    units = [
        (
            (rank, rank + 8),
            MESSAGE,
            50_000_000,
            {0: 3.4, 1: 3.4, 2: others, 3: others}.get(rank, 1.0),
        )
        for rank in range(8)
    ]
    for first, ms in ((0, 68.0), (1, 68.0), (8, 20.0), (9, 20.0)):
        ring = (first, first + 2, first + 4, first + 6)
        units.append((ring, "dp all_reduce of 1 GB", 10**9, ms))
    assert [one for one, _ in found(crossing(job, Layout(dp=8, pp=2), 4, units))] == [ranks]


def test_who_is_only_the_other_end_of_a_slow_host_is_no_second_fault(job):
    """Host 1's network is slow; rank 8 of host 2 has a message with it, and a ring that is fine."""

    def slow(one, other, iteration):
        return 2.0 if 1 in {one // 4, other // 4} else 1.0

    report = job(layout=Layout(pp=4, dp=4), hosts=4, message_bytes=1 << 20, transfer=slow).report()
    assert [one.ranks for one in report.findings if one.cause is Cause.LINK] == [(4, 5, 6, 7)]
