"""One case in full: the job, its cluster's troubles, and what may truly be said of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.grounds.cluster.engine import Engine
from benchmarks.grounds.cluster.files import RankFiles
from benchmarks.grounds.cluster.hardware import Cluster, Floats, Trouble
from benchmarks.grounds.cluster.jobs import Job
from benchmarks.grounds.cluster.network import partition
from benchmarks.grounds.ground import Case, Planted, Variation

GROUND = "cluster"

_MEANING = {  # kind of trouble: (cause, owner)
    "gpu_clock": ("compute", "node"),
    "gpu_memory": ("compute", "node"),
    "throttling": ("compute", "node"),
    "ecc": ("compute", "node"),
    "nvlink": ("link", "node"),
    "nic": ("link", "node"),
    "rail": ("link", "node"),
    "host_cpu": ("host", "node"),
    "host_memory": ("host", "node"),
    "loader": ("loader", "node"),
    "gc": ("gc", "node"),
    "gc_everywhere": ("gc", "job"),
    "heavy_stage": ("stage_imbalance", "job"),
    "heavy_last_stage": ("stage_imbalance", "job"),
    "long_sequences": ("sequence_imbalance", "job"),
    "hot_expert": ("sequence_imbalance", "job"),
    "moving_hot_expert": ("sequence_imbalance", "job"),
    "file_server": ("loader", "job"),
}
_LINKS = ("nvlink", "nic", "rail")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Join a case's name and family with its job and troubles."""

    name: str
    family: str
    seed: int
    job: Job
    troubles: tuple[Trouble, ...] = ()

    def case(self) -> Case:
        """Return what the contract of grounds calls a case."""
        return Case(
            ground=GROUND, name=self.name, family=self.family, num_ranks=self.job.num_ranks,
            seed=self.seed, planted=tuple(self._planted(each) for each in self.troubles),
        )  # fmt: skip

    def write(self, directory: Path) -> tuple[Planted, ...]:
        """Write the rank files; return what was planted with what each cause costs."""
        directory.mkdir(parents=True, exist_ok=True)
        cluster = self._cluster(self.troubles)
        files = RankFiles(directory, self.job, cluster, f"{GROUND}-{self.seed:06d}")
        with_all_ns = Engine(self.job, cluster, files).run()
        files.close()
        planted = []
        for trouble in self.troubles:
            rest = tuple(each for each in self.troubles if each is not trouble)
            without_ns = Engine(self._job_without(trouble), self._cluster(rest), None).run()
            planted.append(
                self._planted(trouble).priced(self.job.iterations, with_all_ns, without_ns)
            )
        return tuple(planted)

    def varied(self, variation: Variation) -> "Scenario":
        """Return the scenario without its troubles, but with a variation."""
        job = self.job
        if variation.chip_spread_ratio is not None:
            machines = replace(job.machines, chip_spread=variation.chip_spread_ratio)
            job = replace(job, machines=machines)
        slow = Trouble(kind="gpu_clock", ranks=(variation.slow_rank,), factor=variation.factor)
        return replace(self, job=job, troubles=(slow,) if variation.slow_rank >= 0 else ())

    def pass_times_ns(self, directory: Path | None = None) -> Floats:
        """Return the time of each rank's modules, (rank, iteration); write files if asked to."""
        cluster = self._cluster(self.troubles)
        files = None
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            files = RankFiles(directory, self.job, cluster, f"{GROUND}-{self.seed:06d}")
        engine = Engine(self.job, cluster, files)
        engine.run()
        if files is not None:
            files.close()
        return engine.pass_times_ns

    def _cluster(self, troubles: tuple[Trouble, ...]) -> Cluster:
        return Cluster(
            num_ranks=self.job.num_ranks, machines=self.job.machines, seed=self.seed,
            nominal_iteration_ns=self.job.nominal_iteration_ns, troubles=troubles,
        )  # fmt: skip

    def _job_without(self, trouble: Trouble) -> Job:
        """Return the job as it would be without a trouble that is a part of the job itself."""
        if trouble.kind == "heavy_stage":
            return replace(self.job, heavy_stage=(-1, 1.0))
        if trouble.kind == "heavy_last_stage":
            return replace(self.job, output_layer_ratio=0.1)
        return self.job

    def _planted(self, trouble: Trouble) -> Planted:
        cause, owner = _MEANING[trouble.kind]
        ranks = self._nameable(trouble)
        width = self.job.machines.gpus_per_host
        hosts = {rank // width for rank in trouble.ranks}
        whole_host = trouble.kind in ("nic", "host_cpu", "host_memory") and len(hosts) == 1
        return Planted(
            kind=trouble.kind, cause=cause, owner=owner, ranks=ranks,
            host=f"node{hosts.pop():03d}" if whole_host else "", factor=trouble.factor,
            first_iteration=trouble.first_iteration, share_of_time=trouble.share_of_time,
        )  # fmt: skip

    def _nameable(self, trouble: Trouble) -> tuple[int, ...]:
        """Return the ranks that may be named: those hit, and for links all that nothing tells
        apart from them.

        A link is seen by the collectives and messages that cross it. Whoever takes part in every
        one of those is as good a suspect as the culprit: of a TP group that alone uses a slow port,
        all members.
        """
        if trouble.kind not in _LINKS:
            return trouble.ranks
        unit = self._unit_of(trouble.kind)
        hit = {unit[rank] for rank in trouble.ranks}
        suspects: set[int] = set()
        for culprit in hit:
            crossed = [used for used in self._communications(trouble.kind, unit) if culprit in used]
            suspects |= set.intersection(*crossed) if crossed else {culprit}
        return tuple(rank for rank in range(self.job.num_ranks) if unit[rank] in suspects)

    def _unit_of(self, kind: str) -> list[int]:
        """Return the thing that each rank's link of this kind belongs to: itself, its host, its
        rail.
        """
        machines, ranks = self.job.machines, range(self.job.num_ranks)
        if kind == "nvlink":
            return list(ranks)
        if kind == "nic":
            return [rank // machines.gpus_per_host for rank in ranks]
        return [rank % machines.gpus_per_host for rank in ranks]

    def _communications(self, kind: str, unit: Sequence[int]) -> list[set[int]]:
        """Return the units that each group or pair of ranks uses, those that such a link
        carries.
        """
        job, width = self.job, self.job.machines.gpus_per_host
        axes = ["dp"] * (job.dp > 1) + ["tp"] * (job.tp > 1) + ["ep"] * (job.ep > 1)
        groups = [
            tuple(int(rank) for rank in members)
            for stage in range(job.pp)
            for axis in axes
            for members in partition(job, stage, axis)
        ]
        size = job.num_stage_ranks
        ring = job.pp if job.vpp > 1 else job.pp - 1
        groups += [
            (stage * size + rank, (stage + 1) % job.pp * size + rank)
            for stage in range(ring if job.pp > 1 else 0)
            for rank in range(size)
        ]
        across = [len({rank // width for rank in members}) > 1 for members in groups]
        return [
            {unit[rank] for rank in members}
            for members, crosses in zip(groups, across, strict=True)
            if crosses == (kind != "nvlink")
        ]
