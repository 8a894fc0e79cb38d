"""How fast a process's TCP connections are while they carry something, by Linux's own account.

A collective over a ring takes as long on each rank, whichever host's port is slow. But of every
connection Linux counts the bytes that have arrived, the time for which some were on their way, and
how much of that the other end had no room (`TCP_INFO`, tcp(7)): bytes over the time that is left is
what the way between the two carries, whoever waits for whom. gloo and NCCL without RDMA talk over
such sockets; RDMA shows nothing here.

Read by the writer's thread after a window, at most twice a second. Sockets are looked at by a
second number for each, which is closed at once.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple

from megascan.tracer.timer import Spacing, Step, no_step

_FILES = "/proc/self/fd"
_INFO_BYTES = 192
_LOST_AT, _ACKED_AT, _BUSY_AT = 100, 120, 168
"""Offsets in `struct tcp_info` (linux/tcp.h), bytes: segments sent again (u32); bytes that were
acknowledged (u64); µs for which something was on its way, and of these, for which the other end had
no room (u64 each, since Linux 4.9; counted in ticks of some ms)."""
_LEAST_NS_BETWEEN_READINGS = 500_000_000
_LEAST_BYTES = 1 << 20
"""Of a connection, below which its speed is that of its latency."""
_MOST = 32
"""Connections of a record: those with most bytes."""


@dataclass(frozen=True)
class Carried:
    """What connections between two addresses have carried from the first to the second."""

    own: str
    other: str
    num_bytes: int
    busy_us: int
    """For which some were on their way, and the other end had room; of all connections together."""
    num_resent: int
    """Segments."""
    of_us: int
    """For how long this was counted."""

    def as_tuple(self) -> tuple[str, str, int, int, int, int]:
        """Return it as a window's record has it."""
        own, other = self.own, self.other
        return own, other, self.num_bytes, self.busy_us, self.num_resent, self.of_us


class _Counts(NamedTuple):
    num_bytes: int
    busy_us: int
    num_resent: int

    def since(self, earlier: _Counts) -> _Counts:
        """Return what came since earlier counts."""
        return _Counts(
            self.num_bytes - earlier.num_bytes,
            self.busy_us - earlier.busy_us,
            self.num_resent - earlier.num_resent,
        )


class Sockets:
    """Reads what the connections of this process have carried since the last reading."""

    def __init__(self) -> None:
        self._counts: dict[str, _Counts] = {}
        """At the last reading, by the kernel's name of a socket."""
        self._spacing = Spacing(_LEAST_NS_BETWEEN_READINGS)

    def begin(self) -> None:
        """Note what connections have carried so far."""
        self._spacing.begin()
        with suppress(OSError):
            self._counts = {name: counts for name, _, counts in _connections(no_step)}

    def read(self, step: Step = no_step) -> tuple[Carried, ...]:
        """Return the connections to other hosts that have carried most since the last reading, or
        `begin`; nothing within half a second of it, and where the kernel does not tell.

        Calls `step` after each socket.
        """
        of_ns = self._spacing.passed_ns()
        if of_ns is None:
            return ()
        before, self._counts = self._counts, {}
        carried: dict[tuple[str, str], list[_Counts]] = defaultdict(list)
        with suppress(OSError):
            for name, addresses, counts in _connections(step):
                self._counts[name] = counts
                earlier = before.get(name, _Counts(0, 0, 0))
                since = counts.since(earlier)
                if since.num_bytes >= _LEAST_BYTES:
                    carried[addresses].append(since)
        sums = [_sum(ends, each, of_ns // 1000) for ends, each in carried.items()]
        return tuple(sorted(sums, key=lambda one: -one.num_bytes)[:_MOST])


def _sum(ends: tuple[str, str], each: list[_Counts], of_us: int) -> Carried:
    return Carried(
        own=ends[0],
        other=ends[1],
        num_bytes=sum([one.num_bytes for one in each]),
        busy_us=sum([one.busy_us for one in each]),
        num_resent=sum([one.num_resent for one in each]),
        of_us=of_us,
    )


def _connections(step: Step) -> Iterator[tuple[str, tuple[str, str], _Counts]]:
    """Yield the name, the addresses and the counts of each connection with another host."""
    for file in os.listdir(_FILES):  # noqa: PTH208  # some hundreds, each window: no paths needed
        with suppress(OSError, ValueError, struct.error):
            name = os.readlink(f"{_FILES}/{file}")  # noqa: PTH115  # nor here
            if not name.startswith("socket:"):
                continue
            with _opened_again(int(file)) as one:
                ends = _ends(one)
                if ends is not None:
                    yield name, ends, _counts(one)
            step()


def _opened_again(file: int) -> socket.socket:
    number = os.dup(file)
    try:
        return socket.socket(fileno=number)
    except OSError:
        os.close(number)
        raise


def _ends(one: socket.socket) -> tuple[str, str] | None:
    """Return both ends' addresses; None where that is no TCP connection between two hosts."""
    if one.type != socket.SOCK_STREAM or one.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    own, other = _plain(one.getsockname()[0]), _plain(one.getpeername()[0])
    return (own, other) if _are_two_hosts(own, other) else None


def _plain(address: str) -> str:
    """Return an address as others write it: IPv4 also where a socket of IPv6 carries it."""
    parsed = ip_address(address.partition("%")[0])
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return str(parsed)


def _are_two_hosts(own: str, other: str) -> bool:
    return own != other and not ip_address(other).is_loopback


def _counts(one: socket.socket) -> _Counts:
    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    (num_resent,) = struct.unpack_from("=I", info, _LOST_AT)
    (num_bytes,) = struct.unpack_from("=Q", info, _ACKED_AT)
    busy_us, no_room_us = struct.unpack_from("=QQ", info, _BUSY_AT)
    return _Counts(num_bytes, busy_us - no_room_us, num_resent)
