"""All cases of the ground: layouts, how each job is dressed, and one maker for each family.

A case's numbers are drawn from its seed, which stands at the end of its name: adding cases to one
family leaves all others as they are. Another draw has other seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle, islice
from pathlib import Path

import numpy as np

from benchmarks.grounds.ground import Case, Planted, Variation
from benchmarks.grounds.profiles.engine import Engine, Floats, Trouble, is_crossed
from benchmarks.grounds.profiles.files import ERAS, Dress, ProfileFiles
from benchmarks.grounds.profiles.job import Job

GROUND = "profiles"
_SEEDS = 100_000  # of a draw
_PIPE = 4  # microbatches

LAYOUTS: dict[str, Job] = {
    "ddp2": Job(dp=2, gpus_per_host=2),
    "ddp4": Job(dp=4, gpus_per_host=4),
    "ddp8": Job(dp=8),
    "ddp8x2": Job(dp=8, gpus_per_host=4),
    "ddp16x2": Job(dp=16, layers=3),
    "ddp32x4": Job(dp=32, layers=3),
    "conv2": Job(dp=2, gpus_per_host=2, model="conv"),
    "conv8x2": Job(dp=8, gpus_per_host=4, model="conv"),
    "fsdp4": Job(dp=4, style="fsdp", gpus_per_host=4),
    "fsdp8": Job(dp=8, style="fsdp"),
    "fsdp16x2": Job(dp=16, style="fsdp", layers=3),
    "tp2": Job(tp=2, style="megatron", gpus_per_host=2),
    "tp4": Job(tp=4, style="megatron", gpus_per_host=4, hidden=4096),
    "tp2dp2": Job(tp=2, dp=2, style="megatron", gpus_per_host=4),
    "tp2dp4": Job(tp=2, dp=4, style="megatron"),
    "tp4dp4x2": Job(tp=4, dp=4, style="megatron", hidden=4096, layers=3),
    "pp2": Job(pp=2, style="megatron", num_microbatches=_PIPE, layers=2, gpus_per_host=2),
    "pp4": Job(pp=4, style="megatron", num_microbatches=6, layers=2, gpus_per_host=4),
    "pp2dp2": Job(
        pp=2, dp=2, style="megatron", num_microbatches=_PIPE, layers=2, gpus_per_host=4
    ),
    "pp2dp4": Job(pp=2, dp=4, style="megatron", num_microbatches=_PIPE, layers=2),
    "tp2pp2dp2": Job(
        tp=2, pp=2, dp=2, style="megatron", num_microbatches=_PIPE, layers=2, hidden=3072
    ),
    "pp4x4": Job(  # a host is a stage
        tp=2, pp=4, style="megatron", num_microbatches=6, layers=1, hidden=4096, gpus_per_host=2,
        length=4096,
    ),
    "pp4dp2x4": Job(
        pp=4, dp=2, style="megatron", num_microbatches=6, layers=1, hidden=4096, gpus_per_host=2
    ),
    "moe4": Job(dp=4, model="moe", gpus_per_host=4),
    "moe8": Job(dp=8, model="moe"),
    "moe16x2": Job(dp=16, model="moe", layers=3),
}  # fmt: skip
_SMALL = ("ddp2", "conv2", "tp2", "pp2", "ddp4", "tp2dp2", "pp2dp2", "fsdp4")
_MIDDLE = ("ddp8", "fsdp8", "tp2dp4", "pp4", "moe4", "tp2pp2dp2", "ddp8x2", "conv8x2", "moe8")
_LARGE = ("ddp16x2", "tp4dp4x2", "fsdp16x2", "pp2dp4", "ddp32x4", "moe16x2", "pp4dp2x4")
_ALL = (*_SMALL, *_MIDDLE, *_LARGE)
_REPLICAS = ("ddp4", "fsdp8", "tp2dp4", "ddp2", "pp2dp2", "ddp8x2")
_PIPELINES = ("pp2", "pp4", "pp2dp2", "tp2pp2dp2", "pp4x4", "pp2dp4")
_PAIRS = ("tp2dp4", "tp2dp2", "tp2pp2dp2", "pp4", "pp2dp2")
_HOSTS = ("pp4x4", "pp4dp2x4")  # hosts that not all traffic goes over
_SEVERAL_HOSTS = ("ddp8x2", "ddp16x2", "fsdp16x2", "conv8x2", "pp4x4", "pp4dp2x4")
_EXPERTS = ("moe4", "moe8", "moe16x2")

_MEANING = {  # kind of trouble: cause; all lie at a node
    "gpu_clock": "compute", "throttling": "compute", "gpu_memory": "compute",
    "neighbour": "compute", "host_cpu": "host", "loader": "loader", "nvlink": "link", "nic": "link",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Join a case's name and family with its job, its files' dress and its troubles."""

    name: str
    family: str
    seed: int
    job: Job
    dress: Dress
    troubles: tuple[Trouble, ...] = ()

    def case(self) -> Case:
        """Return what the contract of grounds calls a case."""
        planted = (*(self._planted(each) for each in self.troubles), *self._in_the_job())
        return Case(
            ground=GROUND, name=self.name, family=self.family, num_ranks=self.job.num_ranks,
            seed=self.seed, planted=planted,
        )  # fmt: skip

    def write(self, directory: Path) -> tuple[Planted, ...]:
        """Write the profiles; return what was planted with what each cause costs."""
        engine = Engine(self.job, self.seed, self.troubles)
        with_all_us = engine.run()
        self._write_files(engine, directory)
        planted = []
        for each in self.troubles:
            rest = tuple(other for other in self.troubles if other is not each)
            without_us = Engine(self.job, self.seed, rest).run()
            planted.append(self._priced(self._planted(each), with_all_us / without_us))
        for cause in self._in_the_job():
            without_us = Engine(_even(self.job), self.seed, self.troubles).run()
            planted.append(self._priced(cause, with_all_us / without_us))
        return tuple(planted)

    def _priced(self, cause: Planted, cost_ratio: float) -> Planted:
        """Return a cause with its costs; iterations that it does not hold in are of one length."""
        last = cause.last_iteration or self.job.iterations
        held_share = (last - cause.first_iteration + 1) / self.job.iterations
        held = 1.0 + (cost_ratio - 1.0) / held_share
        return replace(cause, cost_ratio=cost_ratio, held_cost_ratio=held)

    def kernel_times_us(self, directory: Path | None = None) -> Floats:
        """Return the time of each rank's own kernels, (rank, iteration); write files if asked."""
        engine = Engine(self.job, self.seed, self.troubles)
        engine.run()
        if directory is not None:
            self._write_files(engine, directory)
        return engine.kernel_times_us

    def varied(self, variation: Variation) -> Scenario:
        """Return the scenario without its troubles, but with a variation."""
        job, spread = self.job, variation.chip_spread_ratio
        if spread is not None:
            job = replace(job, chip_spread=spread)
        slow = Trouble(kind="gpu_clock", ranks=(variation.slow_rank,), factor=variation.factor)
        return replace(self, job=job, troubles=(slow,) if variation.slow_rank >= 0 else ())

    def _write_files(self, engine: Engine, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        files = ProfileFiles(directory, self.job, self.seed, self.dress)
        for rank, recorded in enumerate(engine.recorded):
            files.write(rank, recorded)

    def _planted(self, trouble: Trouble) -> Planted:
        ranks, job = self._nameable(trouble), self.job
        hosts = {job.host(rank) for rank in trouble.ranks}
        whole = trouble.kind in ("nic", "host_cpu") and len(hosts) == 1
        return Planted(
            kind=trouble.kind, cause=_MEANING[trouble.kind], owner="node", ranks=ranks,
            host=f"node{hosts.pop():02d}" if whole else "", factor=trouble.factor,
            first_iteration=min(trouble.iterations, default=1),
            last_iteration=max(trouble.iterations, default=0),
            share_of_time=trouble.share_of_time,
        )  # fmt: skip

    def _nameable(self, trouble: Trouble) -> tuple[int, ...]:
        """Return the ranks hit; of a link, all that take part in whatever goes over it: nothing in
        the profiles tells them apart.
        """
        job = self.job
        if trouble.kind not in ("nvlink", "nic"):
            return trouble.ranks
        groups = {
            job.members(rank, axis) for rank in range(job.num_ranks) for axis in job.axes(rank)
        }
        slowed = [set(each) for each in groups if is_crossed(job, trouble, each)]
        if trouble.kind == "nvlink":
            return tuple(sorted(set.intersection(*slowed)))
        hosts = set.intersection(*({job.host(rank) for rank in each} for each in slowed))
        return tuple(rank for rank in range(job.num_ranks) if job.host(rank) in hosts)

    def _in_the_job(self) -> tuple[Planted, ...]:
        """Return what is uneven by the job's own doing: nobody's hardware."""
        job, found = self.job, []
        everyone = range(job.num_ranks)

        def add(kind: str, cause: str, ranks: Iterable[int], factor: float) -> None:
            found.append(
                Planted(kind=kind, cause=cause, owner="job", ranks=tuple(ranks), factor=factor)
            )

        if job.long_replica[0] >= 0:
            mates = (rank for rank in everyone if job.replica(rank) == job.long_replica[0])
            add("long_sequences", "sequence_imbalance", mates, job.long_replica[1])
        if job.token_noise >= 0.05:
            add("uneven_sequences", "sequence_imbalance", everyone, 1 + job.token_noise)
        if job.hot_expert[0] >= 0:
            add("hot_expert", "sequence_imbalance", (job.hot_expert[0],), job.hot_expert[1])
        stage, more = job.heavy_stage
        if stage >= 0:
            mates = (rank for rank in everyone if job.stage(rank) == stage)
            add("heavy_stage", "stage_imbalance", mates, 1 + more / job.layers)
        return tuple(found)


def _even(job: Job) -> Job:
    """Return the job without what makes it uneven by itself."""
    return replace(
        job, long_replica=(-1, 1.0), token_noise=0.0, hot_expert=(-1, 1.0),
        heavy_stage=(-1, 0),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Draft:
    """Hold what a family's maker starts from: a dressed job and the case's own random numbers."""

    job: Job
    draws: np.random.Generator
    number: int

    def rank(self) -> int:
        """Draw a rank."""
        return int(self.draws.integers(self.job.num_ranks))

    def host(self) -> tuple[int, ...]:
        """Draw a host; return its ranks."""
        host = int(self.draws.integers(self.job.host(self.job.num_ranks - 1) + 1))
        return tuple(r for r in range(self.job.num_ranks) if self.job.host(r) == host)

    def pick(self, *choices: float) -> float:
        """Return the choice that this case's number comes to: all are used, with every layout."""
        return choices[(self.number + self.number // len(choices)) % len(choices)]


Maker = Callable[[_Draft], tuple[Job, tuple[Trouble, ...]]]


def cases(draw: int = 0) -> Iterable[Case]:
    """Yield all cases of a draw, the same ones in every process, without simulating any."""
    for scenario in _scenarios(draw).values():
        yield replace(scenario.case(), draw=draw)


def write(case: Case, directory: Path) -> tuple[Planted, ...]:
    """Write the profiles of `case` into `directory`; return what was planted, with its cost."""
    return _scenarios(case.draw)[case.name].write(directory)


def slowness(case: Case) -> Floats:
    """Return how many times longer each rank's kernels take than on equal chips, without a
    trouble, (rank, iteration).
    """
    scenario = _scenarios(case.draw)[case.name]
    equal = scenario.varied(Variation(chip_spread_ratio=0.0))
    return scenario.kernel_times_us() / equal.kernel_times_us()


def write_varied(case: Case, variation: Variation, directory: Path | None) -> Floats:
    """Simulate the sound job of a case, varied; return its kernels' times, (rank, iteration)."""
    return _scenarios(case.draw)[case.name].varied(variation).kernel_times_us(directory)


@cache
def _scenarios(draw: int) -> dict[str, Scenario]:
    listed = [
        scenario
        for place, (family, layouts, count, maker) in enumerate(_families())
        for scenario in _family(_SEEDS * draw + 1000 * (place + 1), family, layouts, count, maker)
    ]
    return {scenario.name: scenario for scenario in listed}


def _family(
    first_seed: int, family: str, layouts: tuple[str, ...], count: int, maker: Maker
) -> Iterator[Scenario]:
    label = family.removeprefix("look_alike: ").replace(",", "").replace(" ", "-").replace("_", "-")
    for number, layout in enumerate(islice(cycle(layouts), count)):
        seed = first_seed + number
        draws = np.random.default_rng([seed, 7])
        job, dress = _dressed(LAYOUTS[layout], draws)
        job, troubles = maker(_Draft(job=job, draws=draws, number=number))
        yield Scenario(
            name=f"{label}-{layout}-s{seed}", family=family, seed=seed, job=job, dress=dress,
            troubles=troubles,
        )  # fmt: skip


def _dressed(job: Job, draws: np.random.Generator) -> tuple[Job, Dress]:
    """Return the layout as one of the many jobs that it may be, and how its files look."""
    era = str(draws.choice(["1.8", "1.12", "2.0", "2.2", "2.4", "2.7", "2.4", "2.7"]))
    chip = {"1.8": "V100", "1.12": "V100", "2.0": "A100", "2.2": "A100"}.get(era, "H100")
    longest = 8 if job.num_ranks <= 4 else 6 if job.num_ranks <= 8 else 4
    longest = min(longest, 4 if job.pp > 1 else 3 if job.num_ranks > 16 else 8)
    windows = [window for window in (2, 3, 4, 6, 8) if window <= longest]
    small = chip == "V100"
    job = replace(
        job, era=era, chip=chip,
        iterations=int(draws.choice(windows)),
        first_step=int(draws.choice([3, 5, 12, 101])),
        tokens=int(draws.choice([2048, 4096] if small else [4096, 8192])),
        length=int(draws.choice([1024, 2048, 4096])),
        launch_ratio=float(draws.uniform(0.2, 0.6)),
        sync_each_step=bool(draws.random() < 0.7),
        contention=float(draws.choice([0.0, 0.03, 0.08])),
        chip_spread=float(draws.choice([0.003, 0.01, 0.02, 0.03])),
        kernel_noise=float(draws.choice([0.005, 0.01, 0.02])),
        wander=float(draws.choice([0.001, 0.003])),
        host_noise=float(draws.choice([0.1, 0.2, 0.4])),
    )  # fmt: skip
    if job.model == "conv":
        job = replace(job, hidden=256, tokens=65_536 if small else 131_072, layers=8, num_buckets=4)
    told = bool(ERAS[era].informed)
    name = str(draws.choice(["tensorboard", "rank", "worker", "dated"][0 if told else 1 :]))
    places = ["head", "tail"] if name == "tensorboard" else ["head", "tail", "nowhere"]
    dress = Dress(
        name=name, informed=str(draws.choice(places)), zipped=bool(draws.random() < 0.15),
        rewritten=bool(draws.random() < 0.1),
    )  # fmt: skip
    return job, dress


def _families() -> list[tuple[str, tuple[str, ...], int, Maker]]:
    """Return (family, layouts, number of cases, maker): faults first, then what looks like them."""
    return [
        ("gpu_clock", _ALL, 30, _gpu_clock),
        ("gpu_clock, no steps marked", ("ddp4", "fsdp8", "tp2dp2", "pp2dp2"), 6, _unmarked),
        ("throttling", _ALL[1::2], 12, _throttling),
        ("gpu_memory", _ALL[::3], 8, _gpu_memory),
        ("neighbour", _ALL[2::3], 8, _neighbour),
        ("host_cpu", (*_SEVERAL_HOSTS, "ddp4", "fsdp4"), 10, _host_cpu),
        ("loader", (*_SMALL, *_MIDDLE[:4]), 10, _loader),
        ("nvlink", _PAIRS, 7, _nvlink),
        ("nic", _HOSTS, 6, _nic),
        ("healthy", (*_ALL, "pp4x4"), 24, _healthy),
        ("healthy, no steps marked", ("ddp4", "tp2dp2", "pp2", "moe4"), 4, _healthy_unmarked),
        ("look_alike: host-bound", (*_SMALL[:6], "ddp8"), 6, _host_bound),
        ("look_alike: uneven sequences", _REPLICAS, 6, _uneven),
        ("look_alike: long replica", _REPLICAS, 6, _long_replica),
        ("look_alike: heavy stage", _PIPELINES, 6, _heavy_stage),
        ("look_alike: hot expert", _EXPERTS, 5, _hot_expert),
        ("look_alike: rank 0 logs", ("ddp4", "tp2dp4", "fsdp8", "pp4", "ddp8x2"), 5, _logs),
        ("look_alike: checkpoint", ("ddp4", "fsdp4", "ddp8"), 4, _checkpoint),
        ("look_alike: warm-up", ("ddp8", "pp2dp2", "tp2", "fsdp8"), 4, _warm_up),
        ("look_alike: late first step", ("ddp4", "tp2dp4", "fsdp8", "moe4"), 5, _late_start),
    ]


def _gpu_clock(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    factor = draft.pick(1.1, 1.3, 1.05, 2.0, 1.2, 1.5)
    return draft.job, (Trouble(kind="gpu_clock", ranks=(draft.rank(),), factor=factor),)


def _unmarked(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    factor = draft.pick(1.2, 1.5, 1.1)
    job = replace(draft.job, annotated=False, iterations=max(draft.job.iterations, 3))
    return job, (Trouble(kind="gpu_clock", ranks=(draft.rank(),), factor=factor),)


def _throttling(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    """Plant a lower clock in some of the profiled iterations, in a row."""
    job = replace(draft.job, iterations=max(draft.job.iterations, 4))
    length = int(draft.draws.integers(1, job.iterations // 2 + 1))
    first = int(draft.draws.integers(1, job.iterations - length + 2))
    trouble = Trouble(
        kind="throttling", ranks=(draft.rank(),), factor=draft.pick(1.3, 1.6, 1.2),
        iterations=tuple(range(first, first + length)), share_of_time=length / job.iterations,
    )  # fmt: skip
    return job, (trouble,)


def _gpu_memory(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    factor = draft.pick(1.4, 1.8, 2.5)
    return draft.job, (Trouble(kind="gpu_memory", ranks=(draft.rank(),), factor=factor),)


def _neighbour(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    """Plant somebody else's work on a GPU: time slices, in bursts or always."""
    trouble = Trouble(
        kind="neighbour", ranks=(draft.rank(),), factor=draft.pick(2.0, 1.5),
        share_of_time=draft.pick(0.3, 0.6),
    )  # fmt: skip
    return draft.job, (trouble,)


def _host_cpu(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    """Plant a slow host; where there is only one, cores that one process has to share."""
    several = draft.job.host(draft.job.num_ranks - 1)
    ranks = draft.host() if several else (draft.rank(),)
    job = replace(draft.job, launch_ratio=float(draft.draws.uniform(0.5, 0.8)))
    return job, (Trouble(kind="host_cpu", ranks=ranks, factor=draft.pick(2.5, 1.7, 4.0)),)


def _loader(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    factor = 1 + draft.pick(0.3, 0.12, 0.8)
    return draft.job, (Trouble(kind="loader", ranks=(draft.rank(),), factor=factor),)


def _nvlink(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    """Plant a slow pair: two mates of a tensor-parallel group, or of neighbouring stages."""
    job, rank = draft.job, draft.rank()
    axis = "tp" if job.tp > 1 else "next" if job.stage(rank) < job.pp - 1 else "prev"
    members = job.members(rank, axis)
    trouble = Trouble(kind="nvlink", ranks=members[:2], factor=draft.pick(4.0, 8.0))
    return replace(job, hidden=max(job.hidden, 3072)), (trouble,)


def _nic(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    trouble = Trouble(kind="nic", ranks=draft.host(), factor=draft.pick(2.0, 4.0))
    return draft.job, (trouble,)


def _healthy(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    return draft.job, ()


def _healthy_unmarked(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    return replace(draft.job, annotated=False, iterations=max(draft.job.iterations, 3)), ()


def _host_bound(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    ratio = float(draft.draws.uniform(1.2, 2.2))
    return replace(draft.job, launch_ratio=ratio, host_noise=0.3), ()


def _uneven(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    return replace(draft.job, token_noise=draft.pick(0.1, 0.25)), ()


def _long_replica(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    replica = int(draft.draws.integers(draft.job.dp))
    return replace(draft.job, long_replica=(replica, draft.pick(1.06, 1.12, 1.3))), ()


def _heavy_stage(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    stage = int(draft.draws.integers(draft.job.pp))
    return replace(draft.job, heavy_stage=(stage, 1)), ()


def _hot_expert(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    return replace(draft.job, hot_expert=(draft.rank(), draft.pick(1.2, 1.5, 2.0))), ()


def _logs(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    return replace(draft.job, log_us=draft.pick(800.0, 3000.0), sync_each_step=True), ()


def _checkpoint(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    job = replace(draft.job, iterations=max(draft.job.iterations, 3))
    after = int(draft.draws.integers(1, job.iterations))
    return replace(job, checkpoint=(after, draft.pick(30_000.0, 100_000.0))), ()


def _warm_up(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    job = replace(draft.job, iterations=max(draft.job.iterations, 4))
    return replace(job, warm_up=(int(draft.pick(1, 2)), draft.pick(1.5, 2.5))), ()


def _late_start(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    job = replace(draft.job, iterations=max(draft.job.iterations, 3))
    return replace(job, late_start=(draft.rank(), draft.pick(0.5, 2.0))), ()
