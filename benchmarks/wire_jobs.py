"""The jobs of `benchmarks.wires`, and the cases that a seed draws of each."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from benchmarks.trainer_faults import HEALTHY
from benchmarks.wire_troubles import FAULTS, NOBODYS, NOTHING, TROUBLES

ENGINE = "engine"
"""Begins the names of jobs that the repository's own engine trains."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training on hosts whose NICs have a rate."""

    loop: str
    num_hosts: int
    ranks_per_host: int
    rate_mbit: float
    sizes: dict[str, int] = field(hash=False, default_factory=dict)
    """Of the model and the training, by the names of `trainer_loops.Run`."""
    words: tuple[str, ...] = ()
    """Flags of the engine."""
    num_faults: int = 3
    """Tried beside being healthy and one thing that is nobody's fault."""

    @property
    def name(self) -> str:
        """Shown in the table."""
        return f"{self.loop} of {self.num_hosts} x {self.ranks_per_host}"

    @property
    def is_engine(self) -> bool:
        """Tell whether each case has to start processes of its own."""
        return self.loop.startswith(ENGINE)


def _loop(
    name: str,
    hosts: tuple[int, int],
    rate_mbit: float,
    model: tuple[int, int],
    data: tuple[int, int],
) -> Job:
    """Return a loop on (hosts, ranks of each), with (width, layers) and (tokens, microbatches)."""
    return Job(
        loop=name,
        num_hosts=hosts[0],
        ranks_per_host=hosts[1],
        rate_mbit=rate_mbit,
        sizes={
            **{"hidden": model[0], "heads": 4, "layers": model[1]},
            **{"sequence": data[0], "microbatches": data[1]},
        },
    )


def _engine(
    name: str, hosts: tuple[int, int], rate_mbit: float, sequence: int, words: tuple[str, ...] = ()
) -> Job:
    """Return a training of the engine, of twelve samples an iteration."""
    return Job(
        loop=f"{ENGINE} {name}",
        num_hosts=hosts[0],
        ranks_per_host=hosts[1],
        rate_mbit=rate_mbit,
        words=("--seq-length", str(sequence), *words),
        num_faults=2,
    )


JOBS = (
    _loop("ddp in buckets", (4, 1), 400, (192, 2), (64, 2)),
    _loop("tensor", (3, 2), 250, (192, 2), (64, 1)),
    _engine("DP", (4, 1), 300, 64),
    _loop("pipeline", (4, 1), 100, (128, 1), (256, 4)),
    _loop("fsdp", (3, 2), 500, (160, 2), (64, 1)),
    _loop("hsdp", (4, 2), 200, (160, 2), (64, 1)),
    _engine("PP2 DP2", (2, 2), 80, 256, ("--pipeline-model-parallel-size", "2")),
    _loop("local sgd", (4, 1), 150, (192, 2), (64, 2)),
    _loop("interleaved", (2, 2), 100, (128, 4), (256, 2)),
    _loop("ddp", (4, 2), 300, (160, 2), (64, 1)),
    _engine("TP2 DP3", (3, 2), 300, 64, ("--tensor-model-parallel-size", "2")),
    _loop("megatron PP", (4, 1), 200, (192, 4), (128, 1)),
)
"""Rates at which a healthy job spends about half of its time on communication, and models that are
small enough for two cores to be no bottleneck."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job with something wrong with one of its hosts."""

    job: str
    num_hosts: int
    ranks_per_host: int
    rate_mbit: float
    trouble: str
    host: int
    peer: int
    """The other end of a connection."""
    ratio: float
    """Of the full rate, what is left."""
    seed: int
    mean_ms: float = math.nan
    """Of all iterations but the first ones, once it is known."""
    job_cores_ratio: float = math.nan
    """How much of the machine's cores its ranks used, once that is known."""
    other_cores_ratio: float = math.nan
    """The same of everybody else."""

    @property
    def name(self) -> str:
        """Shown in the table."""
        where = f" of host {self.host}" if self.at_fault else ""
        if TROUBLES[self.trouble].is_between_two:
            where = f" of hosts {self.host} and {self.peer}"
        left = f" x{self.ratio:.2f}" if self.ratio < 1 else ""
        return f"{self.job}, {self.trouble}{where}{left}, seed {self.seed}"

    @property
    def file_name(self) -> str:
        """The same for files."""
        return self.name.replace(",", "").replace(" ", "-")

    @property
    def at_fault(self) -> set[int]:
        """Return the ranks that may be named: those of the host, or of a connection's ends."""
        trouble = TROUBLES[self.trouble]
        if not trouble.causes:
            return set()
        hosts = (self.host, self.peer) if trouble.is_between_two else (self.host,)
        each = self.ranks_per_host
        return {rank for host in hosts for rank in range(host * each, (host + 1) * each)}


def cases_of(job: Job, seed: int) -> list[Case]:
    """Draw a job's cases: healthy, the next faults of the list at the next job and at the next
    seed, each at a host of its own as long as there are some, and one that is nobody's fault.
    """
    draw = random.Random(f"{job.name} {seed}")
    place = JOBS.index(job) + seed * len(JOBS)
    faults = [FAULTS[(3 * place + number) % len(FAULTS)] for number in range(job.num_faults)]
    hosts = draw.sample(range(job.num_hosts), job.num_hosts)
    cases = []
    for number, trouble in enumerate((NOTHING, *faults, NOBODYS[place % len(NOBODYS)])):
        host = hosts[number % len(hosts)]
        slows_nothing = trouble == NOTHING or trouble.of_ranks != HEALTHY.name
        case = Case(
            job=job.name,
            num_hosts=job.num_hosts,
            ranks_per_host=job.ranks_per_host,
            rate_mbit=job.rate_mbit,
            trouble=trouble.name,
            host=host,
            peer=(host + draw.randrange(1, job.num_hosts)) % job.num_hosts,
            ratio=1.0 if slows_nothing else draw.choice(trouble.ratios),
            seed=seed,
        )
        if not (job.is_engine and trouble.of_ranks != HEALTHY.name):  # its data are all alike
            cases.append(case)
    return cases
