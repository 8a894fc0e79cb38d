"""Time all operations of an iteration: host threads, compute streams and communications.

A kernel begins when it has been launched and the one before it is done. A communication begins on
each member when it has launched it and its own stream is free, and ends when the last member has
begun and the data is through; members that came early spin until then.

Example, ns: rank 0 launches an all-reduce at 100, rank 1 at 400, the data takes 50. Both end at
450; rank 0's kernel lasts 350 and rank 1's 50.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.formats.program import Code, Program, joins_before

LATENCY_NS = 2_500.0  # from the launch to the kernel's start
GAP_NS = 900.0  # between two kernels of a stream

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Say how long things take in one iteration: (operation,), or (communication,)."""

    host_ns: Floats
    device_ns: Floats
    transfer_ns: Floats
    exit_ns: Floats  # how much later than the others a member sees the end


class Engine:
    """Times one program for one iteration after the other."""

    def __init__(self, program: Program, num_ranks: int) -> None:
        self._order = program.ordered()
        self._num_operations = len(program.operations)
        before = joins_before(program)
        self._members = [
            [
                (join, rank, before.get(join, -1), program.operations[join].synchronous)
                for rank, join in sorted(one.joins.items())
            ]
            for one in program.communications
        ]
        self._roots = [one.joins.get(one.root, -1) for one in program.communications]
        self.host = [0.0] * num_ranks
        self.stream = [0.0] * num_ranks

    def pause(self, rank: int, duration_ns: float) -> None:
        """Let time pass on a rank's host thread between two iterations."""
        self.host[rank] = max(self.host[rank], self.stream[rank]) + duration_ns

    def iteration(self, costs: Costs) -> tuple[list[float], list[float], list[float]]:
        """Return when each operation was issued, began and ended."""
        issued = [0.0] * self._num_operations
        start, end = issued.copy(), issued.copy()
        host_cost, device_cost = costs.host_ns.tolist(), costs.device_ns.tolist()
        host, stream = self.host, self.stream
        transfers, late = costs.transfer_ns.tolist(), costs.exit_ns.tolist()
        for code, number, rank, other in self._order:
            if code == Code.DONE:
                self._finish(other, transfers[other], late, start, end)
                continue
            began = host[rank]
            now = began + host_cost[number]
            if code == Code.KERNEL:
                begin = max(now + LATENCY_NS, stream[rank])
                start[number] = begin
                end[number] = done = begin + device_cost[number]
                stream[rank] = done + GAP_NS
            elif code == Code.MARK:
                start[number] = end[number] = max(now, stream[rank])
            elif code == Code.JOIN:
                start[number] = max(now + LATENCY_NS, stream[rank])
            elif code == Code.WAIT:
                stream[rank] = max(stream[rank], end[other])
                now = began
            else:
                if code == Code.SYNC:
                    now = max(now, stream[rank])
                start[number], end[number] = began, now
            host[rank] = issued[number] = now
        return issued, start, end

    def _finish(
        self, number: int, transfer: float, late: list[float], start: list[float], end: list[float]
    ) -> None:
        members = self._members[number]
        last = 0.0
        for join, _, before, _ in members:
            if before >= 0 and end[before] > start[join]:
                start[join] = end[before]
            last = max(last, start[join])
        root = self._roots[number]
        for join, rank, _, synchronous in members:
            begun = last if root < 0 else max(start[join], start[root])
            end[join] = done = begun + transfer + late[join]
            if synchronous:
                self.stream[rank] = max(self.stream[rank], done + GAP_NS)
