"""All cases of the ground: layouts, how each job is dressed, and one maker for each family.

A case's numbers are drawn from its seed, which stands at the end of its name: adding cases to one
family leaves all others as they are. Another draw has other seeds.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle, islice
from pathlib import Path

import numpy as np

from benchmarks.grounds.cluster.hardware import MS, Floats, Machines, Trouble
from benchmarks.grounds.cluster.jobs import Job
from benchmarks.grounds.cluster.scenario import Scenario
from benchmarks.grounds.ground import Case, Planted, Variation

_WIDE = Machines()  # 8 GPUs and 8 NICs a host
_NARROW = Machines(gpus_per_host=4, nics_per_host=4)
_ONE_NIC = Machines(gpus_per_host=4, nics_per_host=1, nic_bytes_per_ns=24.0)

LAYOUTS: dict[str, Job] = {
    "dp2": Job(dp=2),
    "dp8": Job(dp=8),
    "dp16": Job(dp=16),
    "tp2": Job(tp=2),
    "tp8": Job(tp=8, sequence_parallel=True),
    "pp2": Job(pp=2),
    "pp4": Job(pp=4, num_microbatches=8),
    "pp8": Job(pp=8, num_microbatches=12),
    "tp2dp2": Job(tp=2, dp=2),
    "pp2dp2": Job(pp=2, dp=2),
    "tp2dp2pp2": Job(tp=2, dp=2, pp=2),
    "dp4pp2n": Job(dp=4, pp=2, machines=_NARROW),  # a host is a stage
    "tp4dp2n": Job(tp=4, dp=2, machines=_NARROW),  # a host is a replica
    "dp8n": Job(dp=8, machines=_NARROW),
    "tp2dp4pp2": Job(tp=2, dp=4, pp=2, num_microbatches=6),  # a host is a stage
    "tp4dp2pp2n": Job(tp=4, dp=2, pp=2, machines=_NARROW, num_microbatches=6),
    "dp4pp4": Job(dp=4, pp=4, num_microbatches=8),
    "dp4pp4one": Job(dp=4, pp=4, num_microbatches=8, machines=_ONE_NIC, gradient_bytes=2e8),
    "tp8dp4": Job(tp=8, dp=4, sequence_parallel=True),  # a host is a replica
    "tp8dp2pp2": Job(tp=8, dp=2, pp=2, num_microbatches=6, sequence_parallel=True),
    "dp2pp4vpp2": Job(dp=2, pp=4, vpp=2, num_microbatches=8),
    "tp2dp2pp2vpp2": Job(tp=2, dp=2, pp=2, vpp=2, num_microbatches=4),
    "ep4dp8": Job(dp=8, ep=4),
    "ep4dp8pp2": Job(dp=8, ep=4, pp=2),
    "tp2ep2dp4": Job(tp=2, dp=4, ep=2),
    "ddp2": Job(dp=2, style="ddp"),
    "ddp4": Job(dp=4, style="ddp"),
    "ddp16": Job(dp=16, style="ddp"),
    "fsdp8": Job(dp=8, style="fsdp", gradient_bytes=8e8),
    "fsdp16": Job(dp=16, style="fsdp", gradient_bytes=6e8),
    "hybrid-pp4dp2": Job(pp=4, dp=2, pattern="MMMA", layers=4, num_microbatches=8),
    "hybrid-tp2pp2dp2": Job(tp=2, pp=2, dp=2, pattern="MA", layers=4),
    "tp4pp4n": Job(tp=4, pp=4, machines=_NARROW, num_microbatches=8),  # a host is a stage
    "tp4dp2pp4n": Job(tp=4, dp=2, pp=4, machines=_NARROW, num_microbatches=8),
    "tp8dp4pp2": Job(tp=8, dp=4, pp=2, num_microbatches=4, sequence_parallel=True),
    "tp8dp8pp2": Job(tp=8, dp=8, pp=2, num_microbatches=4, sequence_parallel=True),
}
_SMALL = ("dp2", "tp2", "pp2", "tp2dp2", "pp2dp2", "ddp2", "ddp4")
_MIDDLE = (
    "dp8", "tp8", "pp4", "tp2dp2pp2", "dp4pp2n", "tp4dp2n", "dp2pp4vpp2", "tp2dp2pp2vpp2",
    "ep4dp8", "tp2ep2dp4", "fsdp8", "hybrid-pp4dp2", "hybrid-tp2pp2dp2",
)  # fmt: skip
_LARGE = (
    "dp16", "tp2dp4pp2", "tp4dp2pp2n", "dp4pp4", "tp8dp4", "tp8dp2pp2", "ep4dp8pp2", "ddp16",
    "fsdp16", "pp8",
)  # fmt: skip
_ALL = (*_SMALL, *_MIDDLE, *_LARGE)
_SEVERAL_HOSTS = (
    "dp4pp2n", "tp4dp2n", "dp8n", "tp2dp4pp2", "tp4dp2pp2n", "dp4pp4", "dp4pp4one", "tp8dp4",
    "tp8dp2pp2", "ep4dp8pp2", "ddp16", "fsdp16",
)  # fmt: skip
_TELLING_HOSTS = (  # where traffic goes over more than one pair of hosts
    "tp4pp4n", "dp4pp4one", "tp4dp2pp2n", "tp4dp2pp4n", "tp8dp2pp2", "tp4dp2n", "fsdp16",
)  # fmt: skip
_PIPELINES = ("pp2", "pp4", "pp2dp2", "tp2dp2pp2", "dp4pp4", "dp2pp4vpp2")
_HYBRIDS = ("hybrid-pp4dp2", "hybrid-tp2pp2dp2", "pp4", "dp4pp4", "pp8")
_REPLICAS = ("dp2", "dp8", "pp2dp2", "tp2dp2pp2", "tp8dp4", "dp4pp4", "fsdp8", "ddp4")
_SWITCHED = (
    "tp2dp2", "tp2dp2pp2", "tp8", "tp8dp2pp2", "tp4dp2pp2n", "ep4dp8", "pp4", "fsdp8",
)  # fmt: skip
_EXPERTS = ("ep4dp8", "ep4dp8pp2", "tp2ep2dp4")
_UNSEEN_TP = ("tp2dp2", "tp2dp2pp2", "tp8dp2pp2", "tp4dp2n", "tp2")
_UNSEEN = ("tp2dp2pp2", "tp8dp2pp2", "ep4dp8", "ep4dp8pp2")
_SEEDS = 100_000  # of a draw
_WINDOWS = (
    (5, 2, 8),
    (5, 2, 8),
    (1, 1, 12),
    (10, 5, 15),
    (5, 2, 20),
    (4, 4, 40),
    (20, 3, 6),
    (1, 1, 60),
)


@dataclass(frozen=True, kw_only=True)
class _Draft:
    """Hold what a family's maker starts from: a dressed job and random numbers of the case's
    own.
    """

    job: Job
    draws: np.random.Generator
    number: int

    def rank(self, *, stage: int | None = None) -> int:
        """Draw a rank, of one stage where told."""
        size = self.job.num_stage_ranks
        if stage is None:
            return int(self.draws.integers(self.job.num_ranks))
        return stage * size + int(self.draws.integers(size))

    def host(self, *, first_stage: bool = False) -> tuple[int, ...]:
        """Draw a host and return its ranks; one with ranks of the first stage where told."""
        width = self.job.machines.gpus_per_host
        among = self.job.num_stage_ranks if first_stage else self.job.num_ranks
        host = int(self.draws.integers(-(-among // width)))
        return tuple(range(host * width, min((host + 1) * width, self.job.num_ranks)))

    def onset(self) -> int:
        """Draw the iteration a fault begins at: mostly the first, else in the first half of the
        trace.
        """
        if self.draws.random() < 0.6:
            return 1
        iterations = self.job.iterations
        return iterations[int(self.draws.integers(1, max(2, len(iterations) // 2 + 1)))]

    def pick(self, choices: tuple[float, ...]) -> float:
        """Return the choice that this case's number comes to: all are used, with every layout."""
        return choices[(self.number + self.number // len(choices)) % len(choices)]


Maker = Callable[[_Draft], tuple[Job, tuple[Trouble, ...]]]


def cases(draw: int = 0) -> Iterable[Case]:
    """Yield all cases of a draw, the same ones in every process, without simulating any."""
    for scenario in _scenarios(draw).values():
        yield replace(scenario.case(), draw=draw)


def write(case: Case, directory: Path) -> tuple[Planted, ...]:
    """Write the traced files of `case` into `directory`; return what was planted, with its cost."""
    return _scenarios(case.draw)[case.name].write(directory)


def slowness(case: Case) -> Floats:
    """Return how many times longer each rank's passes take than on equal chips, without a trouble,
    (rank, iteration).
    """
    scenario = _scenarios(case.draw)[case.name]
    equal = scenario.varied(Variation(chip_spread_ratio=0.0))
    return scenario.pass_times_ns() / equal.pass_times_ns()


def write_varied(case: Case, variation: Variation, directory: Path | None) -> Floats:
    """Simulate the sound job of a case, varied; return its pass times, (rank, iteration)."""
    return _scenarios(case.draw)[case.name].varied(variation).pass_times_ns(directory)


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
    for number, layout in enumerate(islice(cycle(layouts), count)):
        seed = first_seed + number
        draws = np.random.default_rng([seed, 7])
        draft = _Draft(job=_dressed(LAYOUTS[layout], draws), draws=draws, number=number)
        job, troubles = maker(draft)
        label = (
            family.removeprefix("look_alike: ").replace(",", "").replace(" ", "-").replace("_", "-")
        )
        yield Scenario(
            name=f"{label}-{layout}-s{seed}", family=family, seed=seed, job=job, troubles=troubles
        )


def _dressed(job: Job, draws: np.random.Generator) -> Job:
    """Return the layout as one of the many jobs that it may be: sizes, noise, what is traced."""
    windows = (
        _WINDOWS if job.num_ranks <= 8 else _WINDOWS[:4] if job.num_ranks <= 16 else _WINDOWS[:1]
    )
    interval, window, num_traced = windows[int(draws.integers(len(windows)))]
    machines = replace(
        job.machines,
        chip_spread=float(draws.choice([0.0, 0.01, 0.02, 0.03])),
        kernel_noise=float(draws.choice([0.003, 0.006, 0.012])),
        drift_noise=float(draws.choice([0.001, 0.003, 0.006])),
        host_noise=float(draws.choice([0.1, 0.2, 0.4])),
    )
    megatron = job.style == "megatron"
    return replace(
        job, machines=machines, interval=interval, window=window, num_traced=num_traced,
        layer_ns=float(draws.uniform(2.5, 8.0)) * MS,
        launch_ratio=float(draws.uniform(0.15, 0.5)),
        loader_ratio=float(draws.uniform(0.2, 0.6)),
        output_layer_ratio=float(draws.uniform(0.05, 0.25)),
        warm_up_ratio=float(draws.uniform(1.2, 2.0)),
        token_noise=float(draws.choice([0.0, 0.0, 0.02])),
        overlap_gradients=bool(megatron and draws.random() < 0.4),
        distributed_optimizer=bool(megatron and draws.random() < 0.4),
        granularity="base" if draws.random() < 0.12 else "full",
    )  # fmt: skip


def _families() -> list[tuple[str, tuple[str, ...], int, Maker]]:
    """Return (family, layouts, number of cases, maker): faults first, then what looks like them."""
    return [
        ("gpu_clock", _ALL, 32, _gpu_clock),
        ("gpu_clock, 64 ranks and more", ("tp8dp4pp2", "tp8dp8pp2"), 4, _gpu_clock),
        ("gpu_memory", _ALL[::3], 8, _gpu_memory),
        ("throttling", _ALL[::2], 18, _throttling),
        ("ecc", _ALL[1::3], 8, _ecc),
        ("nvlink", _SWITCHED, 16, _nvlink),
        ("nic", _TELLING_HOSTS, 16, _nic),
        ("rail", ("tp8dp4", "tp8dp2pp2", "tp4dp2pp2n", "tp4dp2n", "tp8dp4pp2"), 10, _rail),
        ("host_cpu", _SEVERAL_HOSTS, 18, _host_cpu),
        ("host_memory", _SEVERAL_HOSTS, 12, _host_memory),
        ("loader", (*_SMALL[:5], *_MIDDLE[:8], *_SEVERAL_HOSTS[:5]), 16, _loader),
        ("gc", _ALL[::3], 12, _gc),
        ("two faults", (*_MIDDLE, *_LARGE), 14, _two_faults),
        ("invisible tp", _UNSEEN_TP, 10, _invisible),
        ("invisible ep", _EXPERTS, 6, _invisible),
        ("short", (*_SMALL, *_MIDDLE), 15, _short),
        ("healthy", (*_ALL, "tp8dp4pp2"), 36, _healthy),
        ("healthy, noisy", _ALL[::3], 10, _noisy),
        ("healthy, short", _ALL[::3], 9, _short_healthy),
        ("healthy, invisible", _UNSEEN, 8, _invisible_healthy),
        ("look_alike: host-bound", (*_SMALL, *_MIDDLE[::2]), 10, _host_bound),
        ("look_alike: heavy last stage", _PIPELINES, 9, _heavy_last),
        ("look_alike: heavy stage", _HYBRIDS, 8, _heavy_stage),
        ("look_alike: uneven sequences", (*_SMALL, *_MIDDLE[2:10], "dp16"), 12, _uneven),
        ("look_alike: long replica", _REPLICAS, 14, _long_replica),
        ("look_alike: hot expert", _EXPERTS, 8, _hot_expert),
        ("look_alike: moving expert", _EXPERTS, 5, _moving_expert),
        ("look_alike: warm-up", _ALL[2::4], 7, _warm_up),
        ("look_alike: pauses", _ALL[1::4], 8, _pauses),
        ("look_alike: file server", (*_SMALL[:3], *_MIDDLE[:4]), 7, _file_server),
        ("look_alike: gc everywhere", _ALL[::5], 6, _gc_everywhere),
    ]  # fmt: skip


# -- faults
# -----------------------------------------------------------------------------------------


def _gpu_clock(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    factor = draft.pick((1.1, 1.3, 1.05, 2.0, 1.2, 1.5, 3.0))
    trouble = Trouble(
        kind="gpu_clock", ranks=(draft.rank(),), factor=factor, first_iteration=draft.onset()
    )
    return draft.job, (trouble,)


def _gpu_memory(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    """Plant slow device memory: what is memory-bound suffers most, the optimizer above all."""
    factor = draft.pick((1.3, 1.6, 2.2))
    return draft.job, (Trouble(kind="gpu_memory", ranks=(draft.rank(),), factor=factor),)


def _throttling(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    trouble = Trouble(
        kind="throttling", ranks=(draft.rank(),), factor=draft.pick((1.3, 1.6, 1.2)),
        share_of_time=float(draft.draws.choice([0.2, 0.2, 0.35])),
        burst_ratio=draft.pick((0.05, 0.3, 1.5, 4.0)),
    )  # fmt: skip
    job = draft.job
    if job.num_traced < 12 and job.num_ranks <= 16:
        job = replace(job, interval=1, window=1, num_traced=16)
    return job, (trouble,)


def _ecc(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    """Plant pauses of a GPU that retries or remaps memory: rare, short, whatever it computes."""
    trouble = Trouble(
        kind="ecc", ranks=(draft.rank(),), factor=8.0, share_of_time=draft.pick((0.02, 0.05)),
        burst_ratio=draft.pick((0.01, 0.03)),
    )  # fmt: skip
    return draft.job, (trouble,)


def _nvlink(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    trouble = Trouble(
        kind="nvlink", ranks=(draft.rank(),), factor=draft.pick((4.0, 2.0, 8.0)),
        first_iteration=draft.onset(),
    )  # fmt: skip
    return replace(draft.job, message_bytes=64e6, granularity="full"), (trouble,)


def _nic(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    trouble = Trouble(
        kind="nic", ranks=draft.host(), factor=draft.pick((2.0, 4.0)), first_iteration=draft.onset()
    )
    return replace(draft.job, message_bytes=64e6), (trouble,)


def _rail(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    width = draft.job.machines.gpus_per_host
    rail = int(draft.draws.integers(width))
    ranks = tuple(range(rail, draft.job.num_ranks, width))
    trouble = Trouble(kind="rail", ranks=ranks, factor=draft.pick((2.0, 4.0)), index=rail)
    return replace(draft.job, message_bytes=64e6, gradient_bytes=2e9), (trouble,)


def _host_cpu(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    trouble = Trouble(
        kind="host_cpu", ranks=draft.host(), factor=draft.pick((2.5, 1.7, 4.0)),
        first_iteration=draft.onset(),
    )  # fmt: skip
    return replace(draft.job, launch_ratio=float(draft.draws.uniform(0.5, 0.8))), (trouble,)


def _host_memory(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    trouble = Trouble(
        kind="host_memory", ranks=draft.host(), factor=1.0,
        share_of_time=draft.pick((0.4, 0.25)), burst_ratio=draft.pick((0.3, 0.1, 0.6)),
    )  # fmt: skip
    return replace(draft.job, launch_ratio=float(draft.draws.uniform(0.5, 0.8))), (trouble,)


def _loader(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    """Plant a slow loader on one rank of the first stage, or on a host of it."""
    several = draft.job.num_ranks > draft.job.machines.gpus_per_host
    size = draft.job.num_stage_ranks
    host = several and draft.number % 2 == 0
    ranks = draft.host(first_stage=True) if host else (draft.rank(stage=0),)
    last = draft.job.num_ranks - size
    loading = tuple(rank for rank in ranks if rank < size or rank >= last)
    trouble = Trouble(
        kind="loader",
        ranks=loading,
        factor=draft.pick((4.0, 3.0, 6.0)),
        first_iteration=draft.onset(),
    )
    return replace(draft.job, loader_ratio=0.5), (trouble,)


def _gc(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    trouble = Trouble(
        kind="gc", ranks=(draft.rank(),), share_of_time=draft.pick((0.5, 0.3)),
        burst_ratio=draft.pick((0.5, 1.0, 0.3)),
    )  # fmt: skip
    job = replace(draft.job, launch_ratio=float(draft.draws.uniform(0.5, 0.8)), granularity="full")
    return job, (trouble,)


def _two_faults(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    """Plant a slow GPU and, on another rank, a second fault of another kind or strength."""
    job, (first,) = _gpu_clock(draft)
    first = replace(first, factor=draft.pick((1.3, 1.6, 2.0)))
    makers = (_gpu_clock, _throttling, _loader)
    _, (second,) = makers[draft.number % 3](replace(draft, number=draft.number + 3))
    if set(second.ranks) & set(first.ranks):
        elsewhere = (first.ranks[0] + 1) % job.num_stage_ranks  # the next rank of the first stage
        second = replace(second, ranks=(elsewhere,))
    if second.kind == "loader":
        job = replace(job, loader_ratio=0.5)
    return job, (first, second)


def _invisible(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    """Plant a slow GPU among mates whose waits for it are inside their passes."""
    job, troubles = _gpu_clock(draft)
    return _unrecorded(job), tuple(replace(each, factor=max(each.factor, 1.2)) for each in troubles)


def _unrecorded(job: Job) -> Job:
    """Return the job as one whose TP (user buffers) or EP (DeepEP) communication no tracer sees."""
    if job.ep > 1:
        return replace(job, ep_recorded=False)
    return replace(job, tp_recorded=False, sequence_parallel=True)


def _short(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    job, troubles = _gpu_clock(draft)
    return _brief(job, draft), tuple(replace(each, first_iteration=1) for each in troubles)


def _brief(job: Job, draft: _Draft) -> Job:
    return replace(job, interval=5, window=2, num_traced=int(draft.pick((2, 3, 5))))


# -- healthy jobs and look-alikes
# ---------------------------------------------------------------------


def _healthy(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    spread = draft.pick((0.0, 0.01, 0.02, 0.03, 0.05))
    return replace(draft.job, machines=replace(draft.job.machines, chip_spread=spread)), ()


def _noisy(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    noisy = replace(
        draft.job.machines, kernel_noise=0.03, drift_noise=0.012, host_noise=0.8, spike_share=0.004
    )
    return replace(draft.job, machines=noisy, launch_ratio=0.5, token_noise=0.03), ()


def _short_healthy(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    return _brief(draft.job, draft), ()


def _invisible_healthy(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    return _unrecorded(_healthy(draft)[0]), ()


def _host_bound(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    """Let every GPU wait for its launches: small layers, a busy interpreter."""
    return replace(draft.job, launch_ratio=draft.pick((1.4, 1.15, 2.0)), layer_ns=1.5 * MS), ()


def _heavy_last(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    ratio = draft.pick((0.8, 1.6, 0.5))
    last = draft.job.pp - 1
    size = draft.job.num_stage_ranks
    ranks = tuple(range(last * size, (last + 1) * size))
    trouble = Trouble(
        kind="heavy_last_stage", ranks=ranks, factor=1 + ratio / draft.job.layers, index=last
    )
    return replace(draft.job, output_layer_ratio=ratio), (trouble,)


def _heavy_stage(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    """Give one stage heavier layers than the others, on all replicas."""
    factor = draft.pick((1.08, 1.25))
    stage = int(draft.draws.integers(draft.job.pp))
    size = draft.job.num_stage_ranks
    ranks = tuple(range(stage * size, (stage + 1) * size))
    trouble = Trouble(kind="heavy_stage", ranks=ranks, factor=factor, index=stage)
    return replace(draft.job, heavy_stage=(stage, factor)), (trouble,)


def _uneven(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    """Give every microbatch of every replica another number of tokens."""
    everybody = tuple(range(draft.job.num_ranks))
    spread = draft.pick((0.1, 0.25, 0.4))
    return draft.job, (Trouble(kind="long_sequences", ranks=everybody, burst_ratio=spread),)


def _long_replica(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    job = draft.job
    replica = int(draft.draws.integers(job.dp))
    ranks = tuple(rank for rank in range(job.num_ranks) if rank // job.tp % job.dp == replica)
    factor = draft.pick((1.06, 1.12, 1.03, 1.3))
    return job, (Trouble(kind="long_sequences", ranks=ranks, factor=factor, index=replica),)


def _hot_expert(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    job = draft.job
    expert = int(draft.draws.integers(job.ep))
    ranks = tuple(
        rank for rank in range(job.num_ranks) if rank // job.tp % job.dp % job.ep == expert
    )
    factor = draft.pick((1.3, 1.8, 1.5))
    return job, (Trouble(kind="hot_expert", ranks=ranks, factor=factor, index=expert),)


def _moving_expert(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    everybody = tuple(range(draft.job.num_ranks))
    return draft.job, (
        Trouble(kind="moving_hot_expert", ranks=everybody, factor=draft.pick((1.8, 2.5))),
    )


def _warm_up(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    """Let the first iteration compile, as long as it takes on each rank."""
    return replace(draft.job, warm_up_ratio=draft.pick((6.0, 15.0))), ()


def _pauses(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    evaluation = draft.number % 2 == 0
    job = replace(draft.job, evaluation=evaluation, checkpoint=not evaluation, interval=1, window=1)
    return replace(job, num_traced=12), ()


def _file_server(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    """Let the shared file server be slow for every loader."""
    everybody = tuple(range(draft.job.num_ranks))
    trouble = Trouble(kind="file_server", ranks=everybody, factor=draft.pick((2.5, 4.0)))
    return replace(draft.job, loader_ratio=0.5), (trouble,)


def _gc_everywhere(draft: _Draft) -> tuple[Job, tuple[Trouble, ...]]:
    """Let Python collect on every rank whenever it likes: each pause holds up all."""
    everybody = tuple(range(draft.job.num_ranks))
    trouble = Trouble(kind="gc_everywhere", ranks=everybody, share_of_time=0.15, burst_ratio=0.3)
    return replace(draft.job, launch_ratio=0.6, granularity="full"), (trouble,)
