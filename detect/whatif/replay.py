"""What every figure is computed from: a graph, its traced weights and its ideal weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from detect.whatif.graph import Bools, Floats, Graph, Ints
from detect.whatif.sweep import sweep


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A traced job in the form that scenarios are replayed on. Times in seconds.

    `weights` (node, lane, step) is the time an operation takes without waiting for others, `ideal`
    (node,) what it would take were all alike. `ranks` (stage, lane) are global ranks, `steps` the
    iteration numbers, `measured` (step,) the step times in the trace. One recorded rank stands for
    `gpus_per_worker` GPUs.
    """

    graph: Graph
    weights: Floats
    ideal: Floats
    ranks: Ints
    steps: Ints
    measured: Floats
    gpus_per_worker: int = 1
    layout_text: str = ""
    labels: Mapping[int, str] = field(default_factory=dict)
    """Speaking name of each rank."""
    columns: Ints = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    """DP rank of each lane, (lane,): its column in a heat map."""
    row_labels: tuple[str, ...] = ()
    """Name of each lane's place on the other axes (TP1), "" where there is none."""
    shared_work: tuple[tuple[int, ...], ...] = ()
    """Ranks whose compute cannot be told apart in this trace (a TP group without its collectives
    traced); replacing one of them replaces all."""
    notes: tuple[str, ...] = ()

    @property
    def num_lanes(self) -> int:
        """Ranks of one stage."""
        return int(self.ranks.shape[1])

    @property
    def num_gpus(self) -> int:
        """GPUs of the job."""
        return self.ranks.size * self.gpus_per_worker

    def row(self, node: int) -> Floats:
        """Traced weights of a node as (lane, 1 scenario, step)."""
        row: Floats = self.weights[node][:, None, :]
        return row

    @cached_property
    def traced_s(self) -> Floats:
        """Replayed step times with the traced weights, (step,)."""
        times: Floats = sweep(self.graph, self.row)[0]
        return times

    @cached_property
    def ideal_s(self) -> float:
        """Replayed step time with the ideal weights; the same for every step."""
        return float(sweep(self.graph, lambda node: self.ideal[node : node + 1, None, None])[0, 0])

    @cached_property
    def error_ratio(self) -> Floats:
        """Replayed over measured step time less one, (step,): how well the model holds."""
        return np.asarray(self.traced_s / self.measured - 1.0)

    def place_of(self, rank: int) -> tuple[int, int] | None:
        """(stage, lane) of a global rank, None when it was not recorded."""
        found = np.argwhere(self.ranks == rank)
        return (int(found[0, 0]), int(found[0, 1])) if len(found) else None

    def with_shared_work(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """These ranks and those whose compute cannot be told from theirs, in order."""
        chosen = set(ranks)
        for members in self.shared_work:
            if chosen & set(members):
                chosen |= set(members)
        return tuple(sorted(chosen))

    def mask(self, ranks: tuple[int, ...]) -> Bools:
        """(stage, lane) places of these ranks."""
        return np.isin(self.ranks, ranks)
