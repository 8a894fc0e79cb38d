"""Times of one operation of a stage, on every rank that does it, iteration by iteration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detect.observations import PHASE_NAMES, Floats, Ints, Observations
from detect.observe.span_index import SpanIndex
from detect.stats import robust
from megascan.schema import Kind
from megascan.timeline import Timeline, codes, equals, numbers

LAYER = "transformer_layer"


@dataclass(frozen=True, order=True)
class Role:
    """What ranks of a stage do alike; `stage` and `chunk` are -1 when all of them are meant."""

    stage: int
    chunk: int
    name: str

    @property
    def words(self) -> str:
        """ "attention of stage PP1, chunk 0"."""
        text = self.name
        if self.stage >= 0:
            text += f" of stage PP{self.stage}"
        return f"{text}, chunk {self.chunk}" if self.chunk >= 0 else text


@dataclass(frozen=True)
class RoleTimes:
    """Mean self time of one operation, (rank, iteration) ns, NaN where it did not run.

    `ranks` (rank,) are global; `count` is how often a rank does it in an iteration.
    """

    ranks: Ints
    time_ns: Floats
    count: float

    @property
    def share_ns(self) -> float:
        """What the role takes of an iteration, on its median rank."""
        return float(robust.median(self.time_ns)) * self.count


def roles_of_timeline(timeline: Timeline, seen: Observations) -> dict[Role, RoleTimes]:
    """Every kind of computation in the iterations that were judged."""
    index = SpanIndex(timeline)
    rows = equals(index.table, "kind", Kind.COMPUTE, Kind.OPTIMIZER) & index.counts
    slot_of = np.searchsorted(seen.iterations, index.iterations)
    slot_of = np.minimum(slot_of, len(seen.iterations) - 1)
    judged = seen.iterations[slot_of] == index.iterations
    rows &= judged[np.minimum(index.slot, len(judged) - 1)]
    slot = slot_of[index.slot[rows]]
    stages = np.array([timeline.headers[int(rank)].coordinates.pp for rank in index.ranks])
    name, names = codes(index.table, "name")
    chunk = (
        numbers(index.table, "chunk")[rows] if timeline.layout.vpp > 1 else np.full(slot.shape, -1)
    )
    row = index.row[rows]
    keys = np.stack([stages[row], np.maximum(chunk, -1), name[rows]])
    unique, which = np.unique(keys, axis=1, return_inverse=True)
    order = np.argsort(which.reshape(-1), kind="stable")
    edges = np.searchsorted(which.reshape(-1)[order], np.arange(unique.shape[1] + 1))
    time_ns = index.self_time(rows)
    return {
        Role(int(stage), int(part), names[int(code)]): _times(
            index.ranks,
            (row[order[low:high]], slot[order[low:high]]),
            time_ns[order[low:high]],
            len(seen.iterations),
        )
        for (stage, part, code), low, high in zip(unique.T, edges, edges[1:], strict=False)
    }


def _times(
    ranks: Ints, place: tuple[Ints, Ints], time_ns: Floats, num_iterations: int
) -> RoleTimes:
    own, row = np.unique(place[0], return_inverse=True)
    flat = row.reshape(-1) * num_iterations + place[1]
    size = len(own) * num_iterations
    total = np.bincount(flat, weights=time_ns, minlength=size)
    count = np.bincount(flat, minlength=size)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(total > 0, total / count, np.nan)
    shape = (len(own), num_iterations)
    return RoleTimes(ranks[own], mean.reshape(shape), float(np.median(count[count > 0])))


def roles_of_observations(seen: Observations) -> dict[Role, RoleTimes]:
    """Passes and optimizer, where only observations are at hand."""
    roles = {}
    members = seen.members
    for stage in np.unique(members.stage).tolist():
        rows = members.rows_of_stage(stage)
        for phase, name in enumerate(PHASE_NAMES):
            use = seen.work.phase == phase
            time_ns = np.exp(robust.mean(seen.work.log_ns[rows][:, :, use], axis=2))
            roles[Role(stage, -1, name)] = RoleTimes(members.ranks[rows], time_ns, float(use.sum()))
        optimizer = seen.optimizer_ns[rows]
        if np.isfinite(optimizer).any():
            roles[Role(stage, -1, "optimizer")] = RoleTimes(members.ranks[rows], optimizer, 1.0)
    return roles


def layers_of_all_stages(roles: dict[Role, RoleTimes]) -> dict[Role, RoleTimes]:
    """Transformer layers and their modules with all stages put together: they are alike."""
    pooled: dict[str, list[RoleTimes]] = {}
    for role, times in roles.items():
        if role.name.removesuffix("-backward") in (LAYER, "attention", "mlp"):
            pooled.setdefault(role.name, []).append(times)
    return {
        Role(-1, -1, name): RoleTimes(
            np.concatenate([times.ranks for times in parts]),
            np.concatenate([times.time_ns for times in parts]),
            float(np.median([times.count for times in parts])),
        )
        for name, parts in pooled.items()
    }
