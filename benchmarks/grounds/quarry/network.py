"""Say how long transfers take: bytes on the wire over the least bandwidth of their way.

Collectives are rings. Between hosts a ring uses the cards of all its members there, each rank's
share of its host's cards, and goes at the pace of the slowest of them, of the slowest NVLink at its
turns, and of a slow port between two hosts that are neighbours in it. All-to-all sends each part by
itself. Example: a reduction of 1 GB over 16 ranks, two hosts of eight with a card a rank of 25
GB/s: 2·15/16 GB pass each host's eight cards: 1.875 / 200 = 9.4 ms.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.grounds.quarry.faults import Bursts, Fault, stretched
from benchmarks.grounds.quarry.jobs import Job


class Network:
    """The time of transfers of one job, with its link faults and others' traffic."""

    def __init__(
        self, job: Job, faults: Sequence[Fault], bursts: dict[int, Bursts], congestion: Bursts
    ) -> None:
        self.machines = job.machines
        self.faults, self.bursts, self.congestion = faults, bursts, congestion
        self._steady: list[tuple[int, ...]] = [
            tuple(
                number
                for number, fault in enumerate(faults)
                if number not in bursts and fault.strength(iteration)
            )
            for iteration in job.iterations
        ]
        self._known: dict[tuple[object, ...], float] = {}

    def timed_s(
        self, members: tuple[int, ...], op: str, size: int, turn: int, start: float
    ) -> float:
        """Return how long a transfer takes that starts in the `turn`-th traced iteration."""
        steady = self._steady[turn]
        alone = self._alone_s(members, op, size, steady)
        taken = alone
        for number, bursts in self.bursts.items():
            slow = self._alone_s(members, op, size, (*steady, number))
            if slow > alone:
                share = (slow / alone - 1) / (self.faults[number].factor - 1)
                taken = stretched(start, taken, bursts, share)
        if self.congestion and self._is_far(members):
            taken = stretched(start, taken, self.congestion, 1.0)
        return taken

    def _is_far(self, members: tuple[int, ...]) -> bool:
        return len({self.machines.host_of(rank) for rank in members}) > 1

    def _alone_s(
        self, members: tuple[int, ...], op: str, size: int, active: tuple[int, ...]
    ) -> float:
        key = (members, op, size, active)
        known = self._known.get(key)
        if known is None:
            faults = [self.faults[number] for number in active]
            made = self._exchanged_s if op in {"all_to_all", "send"} else self._ring_s
            self._known[key] = known = made(members, op, size, faults)
        return known

    def _nvlink(self, rank: int, faults: Sequence[Fault]) -> float:
        rate = self.machines.nvlink_bytes
        for fault in faults:
            if fault.kind == "nvlink" and rank in fault.ranks:
                rate /= fault.factor
        return rate

    def _card(self, rank: int, faults: Sequence[Fault]) -> float:
        """Return a rank's share of the card that it sends by."""
        rate = self.machines.card_bytes_of_rank
        host, card = self.machines.host_of(rank), self.machines.card_of(rank)
        for fault in faults:
            is_card = fault.kind in {"nic", "rail", "nic_flap"} and host in fault.hosts
            if is_card and fault.card in {-1, card}:
                rate /= fault.factor
        return rate

    def _port_factor(self, one: int, other: int, faults: Sequence[Fault]) -> float:
        factor = 1.0
        for fault in faults:
            if fault.kind == "switch_port" and {one, other} == set(fault.hosts):
                factor *= fault.factor
        return factor

    def _ring_s(
        self, members: tuple[int, ...], op: str, size: int, faults: Sequence[Fault]
    ) -> float:
        machines, count = self.machines, len(members)
        wire = {
            "all_reduce": 2 * (count - 1) / count,
            "reduce_scatter": (count - 1) / count,
            "all_gather": count - 1.0,
            "broadcast": 1.0,
        }[op] * size
        by_host: dict[int, list[int]] = {}
        for rank in members:
            by_host.setdefault(machines.host_of(rank), []).append(rank)
        rates = [
            self._nvlink(rank, faults)
            for ranks in by_host.values()
            for rank in ranks
            if len(ranks) > 1
        ]
        fixed = machines.exchange_s * (1 + count / 16)
        if len(by_host) > 1:
            fixed = machines.exchange_far_s * (1 + len(by_host) / 4)
            hosts = sorted(by_host)
            for host, following in zip(hosts, hosts[1:] + hosts[:1], strict=True):
                cards = [self._card(rank, faults) for rank in by_host[host]]
                port = self._port_factor(host, following, faults)
                rates.append(min(cards) * len(cards) / port)
        return fixed + wire / min(rates)

    def _exchanged_s(
        self, members: tuple[int, ...], op: str, size: int, faults: Sequence[Fault]
    ) -> float:
        """Return the time of what each sends to each: all of it for two ends of a message."""
        machines = self.machines
        part = size if op == "send" else size / len(members)
        slowest = 0.0
        for rank in members:
            near = far = port = 0.0
            for peer in members:
                if peer == rank:
                    continue
                one, other = machines.host_of(rank), machines.host_of(peer)
                if one == other:
                    rate = min(self._nvlink(rank, faults), self._nvlink(peer, faults))
                    near += part / rate
                else:
                    rate = min(self._card(rank, faults), self._card(peer, faults))
                    far += part / rate
                    factor = self._port_factor(one, other, faults)
                    port += part * factor / rate if factor > 1 else 0.0
            slowest = max(slowest, near, far, port)
        fixed = machines.exchange_far_s if self._is_far(members) else machines.exchange_s
        return fixed + slowest
