"""How long what ranks tell each other is under way, alone and beside others.

Inside a host everything goes through a switch at the speed of the slowest NVLink taking part. A
collective over hosts is a ring: each pair of neighbours carries the same bytes, so the slowest of
its network cards (shared among the host's members) sets its pace. Transfers that use a card at the
same time share it evenly; whenever one begins or ends, all paces are set anew.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from benchmarks.grounds.foundry.hardware import INSIDE_LATENCY_S, Machines
from benchmarks.grounds.foundry.programs import Talk

Port = tuple[int, int, bool]
"""Host, number of its network card, and whether bytes leave."""


def bytes_of_link(talk: Talk) -> float:
    """Return the bytes that each member sends on."""
    size, count = talk.num_bytes, len(talk.members)
    match talk.op:
        case "all_reduce":
            return 2.0 * size * (count - 1) / count
        case "reduce_scatter" | "all_to_all":
            return size * (count - 1) / count
        case "all_gather":
            return float(size * (count - 1))
    return float(size)


@dataclass
class Route:
    """What a talk needs: bytes through the ports, as shares of its `num_bytes`."""

    num_bytes: float
    is_inside: bool
    ports: dict[Port, float] = field(default_factory=dict)


def route_of(talk: Talk, machines: Machines) -> Route:
    """Return the way of a talk.

    Ring of ranks 0 to 3 on two hosts of two ranks, a card each: a ring for each card, so half of
    the bytes leave through each of the four.
    """
    members: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for rank in talk.members:
        members[machines.host_of(rank)].append(machines.nic_of(rank))
    route = Route(bytes_of_link(talk), len(members) == 1)
    if talk.op == "message" and not route.is_inside:
        sender, receiver = (machines.nic_of(rank) for rank in talk.members)
        route.ports = {(*sender, True): 1.0, (*receiver, False): 1.0}
        return route
    for host, cards in members.items() if not route.is_inside else ():
        count = len(talk.members)
        abroad = (count - len(cards)) / (count - 1)
        for (_, number), users in Counter(cards).items():
            share = users * abroad if talk.op == "all_to_all" else users / len(cards)
            route.ports[host, number, True] = route.ports[host, number, False] = share
    return route


@dataclass
class Flow:
    """A transfer under way."""

    left_bytes: float
    limit: float  # bytes per second of the links inside hosts
    ports: dict[Port, float]
    pace: float = 0.0


class Network:
    """The cards of all hosts, and what goes through them."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.flows: dict[int, Flow] = {}
        self.slow: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
        self.version = 0
        self._settled_s = 0.0

    def inside_s(self, route: Route, load: float, slow: float) -> float:
        """Return how long a talk within a host takes."""
        return INSIDE_LATENCY_S + route.num_bytes * load * slow / self.machines.gpu.nvlink_bytes

    def begin(self, key: int, route: Route, load: float, slow: float, now_s: float) -> None:
        """Let a transfer begin."""
        self._settle(now_s)
        limit = self.machines.gpu.nvlink_bytes / slow
        self.flows[key] = Flow(route.num_bytes * load, limit, route.ports)
        self._set_paces()

    def change(self, card: tuple[int, int], why: str, slow: float, now_s: float) -> None:
        """Make a card so many times slower for a reason, 1: no longer."""
        self._settle(now_s)
        self.slow[card][why] = slow
        self._set_paces()

    def next_end_s(self) -> float:
        """Return when the first transfer will be through; infinity without any."""
        return self._settled_s + min(
            (flow.left_bytes / flow.pace for flow in self.flows.values()), default=float("inf")
        )

    def take_finished(self, now_s: float) -> list[int]:
        """Return those that are through, and forget them."""
        self._settle(now_s)
        done = [key for key, flow in self.flows.items() if flow.left_bytes <= 1e-9 * flow.pace + 1]
        for key in done:
            del self.flows[key]
        self._set_paces()
        return done

    def _settle(self, now_s: float) -> None:
        for flow in self.flows.values():
            flow.left_bytes -= flow.pace * (now_s - self._settled_s)
        self._settled_s = now_s

    def _set_paces(self) -> None:
        self.version += 1
        users = Counter(port for flow in self.flows.values() for port in flow.ports)
        for flow in self.flows.values():
            flow.pace = min(
                flow.limit,
                *(self._speed(port) / users[port] / share for port, share in flow.ports.items()),
            )

    def _speed(self, port: Port) -> float:
        return self.machines.gpu.nic_bytes / math.prod(self.slow.get(port[:2], {}).values())
