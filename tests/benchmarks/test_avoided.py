"""Whether a layout lets anybody tell whose network is slow, and how the tables count it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pytest

from benchmarks.grounds.avoided import EVERYTHING, SHARED, TOLD, told_by_layout
from benchmarks.grounds.ground import Planted
from benchmarks.grounds.outcome import Named, Outcome, table_of_networks

NIC = Planted(kind="nic", cause="link", owner="node", ranks=(0,), factor=2.0, cost_ratio=1.3)


def job(rings, messages=(), *, per_host=1, size=1 << 24):
    """Four ranks of a job that reduces in `rings` and sends `messages`, (rank, peer) each."""
    rows = [(rank, "collective", f"dp@{number}", -1, size)
            for number, ring in enumerate(rings) for rank in ring]  # fmt: skip
    rows += [(rank, "p2p", "", peer, size) for one, other in messages
             for rank, peer in ((one, other), (other, one))]  # fmt: skip
    rank, kind, group, peer, sizes = zip(*rows, strict=True)
    spans = pa.table({
        "rank": rank,
        "kind": pa.array(kind).dictionary_encode(),
        "group": pa.array(group).dictionary_encode(),
        "op": pa.array(["all_reduce"] * len(rows)).dictionary_encode(),
        "peer": peer,
        "size_bytes": sizes,
        "match": [1] * len(rows),
    })  # fmt: skip
    groups = {f"dp@{number}": ring for number, ring in enumerate(rings)}
    headers = {
        rank: SimpleNamespace(
            host=f"n{rank // per_host}",
            device=SimpleNamespace(index=rank % per_host),
            groups={name: ring for name, ring in groups.items() if rank in ring},
            coordinates=SimpleNamespace(pp=rank // 2),
        )
        for rank in range(4)
    }
    return SimpleNamespace(headers=headers, spans=spans)


@pytest.mark.parametrize(
    ("timeline", "ranks", "told"),
    [
        (job([(0, 1, 2, 3)]), (0,), EVERYTHING),
        (job([(0, 1), (2, 3)]), (0,), SHARED),
        (job([(0, 1), (2, 3)], [(0, 2), (1, 3)]), (0,), TOLD),
        (job([(0, 1), (2, 3)], [(0, 2), (1, 3)], size=4), (0,), EVERYTHING),
        (job([(0, 1), (2, 3)], [(0, 2), (1, 3)], size=-1), (0,), TOLD),
        (job([(0, 1), (2, 3)], size=-1), (0,), EVERYTHING),
        (job([(0, 2), (1, 3)], per_host=2), (0, 1), EVERYTHING),
        (job([(0, 2), (1, 3)], per_host=2), (0, 2), TOLD),
        (job([(0, 2), (1, 3)], per_host=2), (0,), SHARED),
    ],
    ids=["one ring", "two rings", "rings and messages", "few bytes", "messages without sizes",
         "rings of unlike stages", "a host of two", "a rail", "a GPU on a rail"],
)  # fmt: skip
def test_a_network_is_told_by_what_avoids_it(timeline, ranks, told):
    fault = replace(NIC, ranks=ranks)
    other = replace(NIC, kind="gpu_clock", cause="compute")
    inside = replace(NIC, kind="nvlink")
    assert told_by_layout(timeline, (fault, other, inside)) == (told, "", "")


def test_network_faults_are_counted_by_what_the_layout_tells():
    def outcome(told, *findings, cost=1.3):
        fault = replace(NIC, cost_ratio=cost)
        return Outcome(
            ground="g", name="n", family="f", num_ranks=4, verdict="", planted=(fault,),
            findings=findings, told=(told,),
        )  # fmt: skip

    found = Named(
        ranks=(0,), cause="link", owner="node", slowdown=2.0, interval=(1.9, 2.1),
        first_iteration=1, cost_ratio=1.3,
    )  # fmt: skip
    table = table_of_networks([
        outcome(TOLD, found), outcome(TOLD), outcome(EVERYTHING), outcome(EVERYTHING, found),
        outcome(SHARED), outcome(TOLD, cost=1.0),
        Outcome(ground="g", name="old", family="f", num_ranks=4, verdict="", planted=(NIC,),
                findings=()),
    ])  # fmt: skip
    assert table.splitlines()[2:] == [
        "| nic | 5 | 2 | 1 | 2 | 1 | 1 |",
        "| all | 5 | 2 | 1 | 2 | 1 | 1 |",
    ]
