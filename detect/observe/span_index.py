"""The span table as arrays, with each span's place in the detector's matrices."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from detect.observations import BACKWARD, FORWARD, Bools, Floats, Ints
from megascan.timeline import Timeline, equals, numbers

WORK_NAMES = {"forward": FORWARD, "backward": BACKWARD}


class SpanIndex:
    """Columns of the span table as arrays, with each span's row (rank) and slot (iteration)."""

    def __init__(self, timeline: Timeline) -> None:
        table = timeline.spans
        self.table = table
        self.ranks: Ints = np.array(sorted(timeline.headers), dtype=np.int64)
        iteration = numbers(table, "iteration")
        self.iterations: Ints = np.unique(iteration[iteration > 0])
        self.rank = numbers(table, "rank")
        self.row = np.searchsorted(self.ranks, self.rank)
        self.slot = np.searchsorted(self.iterations, iteration)
        self.counts = iteration > 0
        self.start = numbers(table, "start_ns")
        self.duration = numbers(table, "duration_ns")
        self.is_cpu = all(header.device.kind == "cpu" for header in timeline.headers.values())
        self.uses_cpu_time = self._has_cpu_time()

    @property
    def shape(self) -> tuple[int, int]:
        """(ranks, iterations)."""
        return len(self.ranks), len(self.iterations)

    def named(self, names: Iterable[str]) -> Bools:
        """Spans of these names that belong to an iteration."""
        return equals(self.table, "name", *names) & self.counts

    def _has_cpu_time(self) -> bool:
        if not self.is_cpu:
            return False
        cpu = numbers(self.table, "self_cpu_ns")[self.named(WORK_NAMES)]
        return len(cpu) > 0 and bool((cpu > 0).mean() > 0.9)

    def self_time(self, rows: Bools) -> Floats:
        """Self time of the spans, CPU time where the ranks share cores and it was measured."""
        column = "self_cpu_ns" if self.uses_cpu_time else "self_ns"
        return np.maximum(numbers(self.table, column)[rows], 0).astype(np.float64)

    def summed(self, rows: Bools, time_ns: Floats) -> Floats:
        """Sum by (rank, iteration); NaN where a rank has no such span in any iteration."""
        flat = self.row[rows] * self.shape[1] + self.slot[rows]
        total = np.bincount(flat, weights=time_ns, minlength=self.shape[0] * self.shape[1])
        table = np.asarray(total.reshape(self.shape), dtype=np.float64)
        table[~(table > 0).any(axis=1)] = np.nan
        return table
