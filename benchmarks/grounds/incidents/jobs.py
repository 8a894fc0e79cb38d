"""Say what a job is: trainer, parallel sizes, model, how it is traced, how much it varies."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.grounds.incidents.hardware import Cluster
from benchmarks.grounds.incidents.model import Costs, Model, total
from benchmarks.grounds.incidents.schedule import BACKWARD, FORWARD, Pass, passes_of
from megascan.topology import Layout

MEGATRON, FSDP, HSDP, DDP = "megatron", "fsdp", "hsdp", "ddp"

RECOMPUTE = "recompute"
PYTHON = {FORWARD: 9.0, BACKWARD: 4.0, RECOMPUTE: 9.0}
"""The host's time for a kernel, in launches: Python's modules take most of it; autograd's engine
launches backward passes from C++."""
KERNELS_OF_A_LAYER = 11


@dataclass(frozen=True, kw_only=True)
class Noise:
    """State how much a sound job varies.

    Kernels vary log-normally by `sigma`, a few (`tail_share`) take up to some times as long; a
    chip's products take `chip_spread` longer or shorter (one standard deviation). `link_sigma` and
    `stalls` (share of collectives, and seconds) are those of communication, `congestion` is how
    much the network between hosts slows everybody down from iteration to iteration. `interference`
    is how much longer kernels take beside a collective, whose kernels hold multiprocessors.
    """

    sigma: float = 0.006
    tail_share: float = 0.001
    tail: float = 0.5
    chip_spread: float = 0.006
    link_sigma: float = 0.04
    stalls: tuple[float, float] = (0.0, 0.0)
    congestion: float = 0.0
    host_sigma: float = 0.12
    interference: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Tracing:
    """State how a job is traced, and what is wrong with its files.

    `missing` ranks have no file; of `torn` ranks the file ends in the midst of a line. `wander_us`
    is how far hosts' clocks are apart, `walk_us` how far they walk from one traced iteration to the
    next, `step_us` how far some are set in between. `stride`: modules
    of every so many layers are recorded.
    """

    iterations: tuple[int, ...]
    interval: int
    window: int
    stride: int = 1
    profile: bool = False
    missing: tuple[int, ...] = ()
    torn: tuple[int, ...] = ()
    wander_us: float = 200.0
    walk_us: float = 3.0
    drift_ppm: float = 8.0
    step_us: float = 0.0
    has_counters: bool = False
    has_tokens: bool = True
    compress: bool = False


@dataclass(frozen=True, kw_only=True)
class Job:
    """State one job. `stages` are the global numbers of layers by stage and chunk.

    `microbatches` are those of each traced iteration (a ramp of the batch size changes them).
    `lengths` is how much sequences vary from microbatch to microbatch (only attention's products
    where they are packed into as many tokens, else everything), `routing` how much experts' loads
    do. `host_ahead` multiplies what launching costs; `evaluates` is what rank 0 does
    alone before some iterations, in iterations' times; `collects_together` is Megatron's planned
    collection of garbage every so many iterations; `compiles_s` is what compiling costs at first.
    """

    trainer: str
    layout: Layout
    cluster: Cluster
    model: Model
    tracing: Tracing
    noise: Noise
    stages: tuple[tuple[tuple[int, ...], ...], ...]
    microbatches: tuple[int, ...]
    sequence_parallel: bool = True
    async_tp: bool = False
    recompute: bool = False
    shards_optimizer: bool = True
    overlaps_gradients: bool = True
    overlaps_parameters: bool = True
    syncs_messages: bool = True
    syncs_steps: bool = True
    copies_block: bool = False
    accumulates_alone: bool = True
    packs: bool = False  # documents of different lengths in sequences of one length
    lengths: float = 0.0
    routing: float = 0.0
    host_ahead: float = 1.0
    loader_share: float = 0.3
    loader_depth: int = 2
    evaluates: float = 0.0
    collects_together: int = 0
    compiles_s: float = 0.0
    saves_after: int = -1  # place of the traced iteration after which a checkpoint is written
    shrinks_at: int = 0  # everybody gets slower from this iteration on, by `shrinks_by`
    shrinks_by: float = 1.0
    mixed: tuple[int, ...] = ()  # ranks on chips of another type
    mixed_name: str = ""
    resumed: bool = False  # its rank files hold an earlier run, on other hosts
    run_id: str = ""
    epoch_ns: int = 0
    seed: int = 0

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return self.layout.world_size

    @property
    def lanes(self) -> int:
        """Return the ranks of a stage."""
        return self.num_ranks // self.layout.pp

    @property
    def costs(self) -> Costs:
        """Return the prices of the model's parts on this job's chip."""
        return Costs(
            model=self.model,
            chip=self.cluster.chip,
            tp=self.layout.tp,
            cp=self.layout.cp,
            sequence_parallel=self.sequence_parallel and self.layout.tp > 1,
        )

    @property
    def num_passes(self) -> int:
        """Return the most passes of an iteration on a stage, with one for the optimizer."""
        return 2 * max(self.microbatches) * self.layout.vpp + 1

    @property
    def pass_s(self) -> float:
        """Return about how long kernels of a chunk's forward pass run."""
        costs = self.costs
        mlp = costs.experts(self.layout.ep) if self.model.experts else costs.mlp()
        return len(self.stages[0][0]) * sum(total((*costs.attention(), *mlp)))

    @property
    def launch_s(self) -> float:
        """Return about how long a host takes to launch a chunk's forward pass."""
        kernels = KERNELS_OF_A_LAYER * len(self.stages[0][0])
        return PYTHON[FORWARD] * kernels * self.cluster.chip.launch_us * 1e-6 * self.host_ahead

    def chip_name(self, rank: int) -> str:
        """Return the model of a rank's chip, as its driver calls it."""
        return self.mixed_name if rank in self.mixed else self.cluster.chip.name

    def ranks_of(self, stage: int) -> range:
        """Return the ranks of a stage: pipelines are the slowest axis in Megatron's order."""
        return range(stage * self.lanes, (stage + 1) * self.lanes)

    def stage_of(self, rank: int) -> int:
        """Return a rank's stage."""
        return rank // self.lanes

    def passes(self, stage: int, num_microbatches: int) -> list[Pass]:
        """Return the order of passes on a stage."""
        return passes_of(stage, self.layout.pp, num_microbatches, self.layout.vpp)
