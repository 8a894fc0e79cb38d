"""Tell whether a trace can show who is at fault when a network is slow, whoever reads it.

A slow NIC slows every transfer that enters or leaves its host. If all large transfers between hosts
do, or none of an equal kind does not, nothing is left to compare them with; if the same transfers
also pass another host, another rail or another GPU, either may be at fault. Which transfers there
are is a matter of the layout: a job whose replicas all take part in one ring through every host
shows that this ring is slow, and nobody which of its hosts.

Read from the trace and the truth alone; nothing that is measured takes part.

Example: PP1 x DP4 on four hosts of one GPU, one ring: `EVERYTHING`. PP2 x DP2, rings of ranks
{0, 1} and {2, 3}, messages 0-2 and 1-3; of rank 0's NIC ring and message are slow, the others are
not, and no other rank is in both: `TOLD`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.grounds.ground import Planted
from detect.observe.members import hosts_of
from megascan.header import RankHeader
from megascan.schema import Kind
from megascan.timeline import Timeline, codes, equals, numbers
from megascan.vocabulary import axis_of_group

TOLD = "told"
EVERYTHING = "all equal transfers between hosts pass it"
SHARED = "another host, rail or GPU is in the same transfers"
LEAST_BYTES = 65_536
"""Below, a transfer is latency and tells nothing of a network."""

_Members = frozenset[int]


def told_by_layout(timeline: Timeline, planted: Sequence[Planted]) -> tuple[str, ...]:
    """Return for each planted fault whether the recorded transfers can tell it from all others:
    `TOLD`, `EVERYTHING` or `SHARED`; "" for what is no fault of a network between hosts.
    """
    faults = [one.cause == "link" and one.kind != "nvlink" for one in planted]
    if not any(faults):
        return ("",) * len(planted)
    hosts = hosts_of(timeline.headers)
    kinds, suspects = _between_hosts(timeline, hosts), _suspects(timeline.headers, hosts)
    return tuple(
        _told(set(one.ranks), kinds, suspects) if is_network else ""
        for one, is_network in zip(planted, faults, strict=True)
    )


def _told(ranks: set[int], kinds: list[set[_Members]], suspects: list[_Members]) -> str:
    slow = {unit for kind in kinds for unit in kind if unit & ranks}
    if not any(kind & slow and kind - slow for kind in kinds):
        return EVERYTHING
    everything = set().union(*kinds)
    for suspect in suspects:
        if not suspect <= ranks and {unit for unit in everything if unit & suspect} == slow:
            return SHARED
    return TOLD


def _between_hosts(timeline: Timeline, hosts: Mapping[int, str]) -> list[set[_Members]]:
    """Return the groups and pairs of ranks on several `hosts` that exchange much, by what they do:
    axis, operation, number of members, and the stage where sizes are not recorded.
    """
    spans, headers = timeline.spans, timeline.headers
    is_p2p, size = equals(spans, "kind", Kind.P2P), numbers(spans, "size_bytes")
    use = is_p2p | equals(spans, "kind", Kind.COLLECTIVE)
    use &= (numbers(spans, "match") >= 0) & ((size < 0) | (size >= LEAST_BYTES))
    (op, ops), (group, groups) = (codes(spans, name) for name in ("op", "group"))
    rank, peer = numbers(spans, "rank"), np.where(is_p2p, numbers(spans, "peer"), -1)
    operations = np.stack([rank, peer, op, group, size < 0], axis=1)[use]
    found: dict[tuple[str, str, int, int], set[_Members]] = defaultdict(set)
    for own, other, op_code, group_code, is_unsized in np.unique(operations, axis=0).tolist():
        name = groups[group_code]
        unit = frozenset((own, other) if other >= 0 else headers[own].groups.get(name, ()))
        if len({hosts[one] for one in unit if one in hosts}) > 1:
            what = ("p2p", "") if other >= 0 else (axis_of_group(name), ops[op_code])
            stage = headers[own].coordinates.pp if is_unsized else -1
            found[*what, len(unit), stage].add(unit)
    return list(found.values())


def _suspects(headers: Mapping[int, RankHeader], hosts: Mapping[int, str]) -> list[_Members]:
    """Return the ranks of each host, of each rail (a device number of all hosts), and each rank."""
    ranks: dict[tuple[str, str | int], set[int]] = defaultdict(set)
    for rank, header in headers.items():
        for one in (("host", hosts[rank]), ("rail", header.device.index), ("rank", rank)):
            ranks[one].add(rank)
    return [frozenset(one) for one in ranks.values()]
