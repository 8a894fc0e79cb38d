"""Describe one training job: its parallel axes, its model, its habits, and its process groups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the parallel axes; ranks are numbered tp first, then cp, dp and pp.

    Experts are spread over neighbours of one stage: rank `local` of a stage holds part `local mod
    ep` of them (expert tensor size 1).
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def stage_size(self) -> int:
        """Return how many ranks hold one stage."""
        return self.tp * self.cp * self.dp

    def place(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank on every axis."""
        local = rank % self.stage_size
        return {
            "tp": rank % self.tp,
            "cp": rank // self.tp % self.cp,
            "ep": local % self.ep,
            "dp": rank // (self.tp * self.cp) % self.dp,
            "pp": rank // self.stage_size,
        }

    def stage(self, pp: int) -> tuple[int, ...]:
        """Return the ranks of one pipeline stage."""
        return tuple(range(pp * self.stage_size, (pp + 1) * self.stage_size))

    @cached_property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """Return all process groups of the job by id, those of one member as well."""
        found: dict[str, tuple[int, ...]] = {"world@0": tuple(range(self.world))}
        for rank in range(self.world):
            for axis in AXES:
                members = self.members(axis, rank)
                found[f"{axis}@{min(members)}"] = members
        return found

    def members(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the ranks of the group of an axis that a rank belongs to, in order."""
        return _members(self, axis, rank)

    def _find_members(self, axis: str, rank: int) -> tuple[int, ...]:
        own = self.place(rank)
        everybody = range(self.world)
        if axis == "world":
            return tuple(everybody)
        if axis == "embd":
            ends = {0, self.pp - 1}
            if own["pp"] not in ends:
                return (rank,)
            local = rank % self.stage_size
            return tuple(sorted(local + pp * self.stage_size for pp in ends))
        if axis in ("ep", "expt_dp"):
            return self._of_experts(axis, rank)
        fixed = {"tp", "cp", "dp", "pp"} - FREE[axis]
        return tuple(
            other
            for other in everybody
            if all(self.place(other)[name] == own[name] for name in fixed)
        )

    def _of_experts(self, axis: str, rank: int) -> tuple[int, ...]:
        stage, local = self.stage(rank // self.stage_size), rank % self.stage_size
        if axis == "ep":
            first = local - local % self.ep
            return stage[first : first + self.ep]
        return stage[local % self.ep :: self.ep]

    def group_of(self, axis: str, rank: int) -> str:
        """Return the id of the group of an axis that a rank belongs to: `tp@4`."""
        return f"{axis}@{min(self.members(axis, rank))}"


@lru_cache(maxsize=1 << 13)
def _members(shape: Shape, axis: str, rank: int) -> tuple[int, ...]:
    return shape._find_members(axis, rank)


AXES = ("tp", "pp", "dp", "dp_cp", "cp", "ep", "expt_dp", "mp", "embd")
FREE = {
    "tp": {"tp"},
    "pp": {"pp"},
    "dp": {"dp"},
    "dp_cp": {"dp", "cp"},
    "cp": {"cp"},
    "mp": {"tp", "pp"},
}
"""Coordinates in which the members of a group differ."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """State what is trained and how; everything that is the same in each of its iterations.

    `stage_layers` are the layers of each model chunk in the order of the model: stage 0's first
    chunk, stage 1's first chunk, …
    """

    shape: Shape
    stage_layers: tuple[int, ...]
    num_microbatches: int
    iterations: tuple[int, ...]
    hidden: int = 4096
    sequence: int = 4096
    batch: int = 1  # sequences in a microbatch
    vocabulary: int = 32_000
    num_experts: int = 0
    recompute: bool = False
    distributed_optimizer: bool = False
    overlap: bool = False  # gradients are reduced beside the last backward
    tied: bool = False
    loss_reduced: bool = False  # the logged loss is averaged over replicas at each microbatch
    barrier: bool = False  # all ranks meet before an iteration
    hidden_tp: bool = False  # TP transfers by kernels that no tracer recognises
    varied_lengths: float = 0.0  # log-sd of the tokens of a microbatch
    same_batch_everywhere: bool = False
    launch_us: float = 5.0
    module_us: float = 12.0
    loader_us: float = 250.0
    kernel_noise: float = 0.01
    chip_spread: float = 0.01
    host_noise: float = 0.15
    checkpoint_every: int = 0
    evaluate_every: int = 0
    collect_every: int = 0  # iterations between planned collections of garbage on all ranks

    @property
    def tokens(self) -> int:
        """Return the tokens of a microbatch on a rank."""
        return self.sequence * self.batch // self.shape.cp

    def layers_of(self, stage: int, chunk: int) -> range:
        """Return the numbers, from 1, of the layers that a chunk of a stage holds."""
        place = chunk * self.shape.pp + stage
        first = 1 + sum(self.stage_layers[:place])
        return range(first, first + self.stage_layers[place])

    def is_first(self, stage: int, chunk: int) -> bool:
        """Tell whether a chunk begins the model."""
        return stage == 0 and chunk == 0

    def is_last(self, stage: int, chunk: int) -> bool:
        """Tell whether a chunk ends the model."""
        return stage == self.shape.pp - 1 and chunk == self.shape.vpp - 1
