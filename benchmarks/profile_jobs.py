"""A training job on paper whose ranks write profiles as torch's profiler does on GPUs.

Every rank is a coroutine: it launches kernels on a host clock, each begins when it is launched and
its stream is free, and hands out each collective with its own start, to be told the end when all
members have come. Nothing here knows how the detector works.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megascan.vocabulary import is_bound_by_memory

BASE_NS = 1_760_000_000_000_000_000
TOKENS = 4096
COMPUTE_STREAM, COMM_STREAM = 7, 20
MAIN, ENGINE = 1001, 1002
"""Threads: the trainer's, autograd's."""

Meeting = tuple[tuple[str, int], tuple[int, ...], float, float]
"""A collective's key, its members, this rank's start, the time to transfer."""
Program = Generator[Meeting, float, None]


@dataclass(frozen=True, kw_only=True)
class Group:
    """A process group as profiles describe it."""

    name: str
    description: str
    ranks: tuple[int, ...]

    @property
    def arguments(self) -> dict[str, object]:
        """Return what a collective's event says of the group."""
        return {
            "Process Group Name": self.name,
            "Process Group Description": self.description,
            "Process Group Ranks": str(list(self.ranks)),
            "Group size": len(self.ranks),
        }


@dataclass(kw_only=True)
class Job:
    """What a job does and what is wrong with it; times in µs."""

    num_ranks: int = 4
    num_iterations: int = 8
    num_layers: int = 6
    seed: int = 1
    kernel_us: float = 400.0
    launch_us: float = 6.0
    loading_us: float = 200.0
    transfer_us: float = 300.0
    noise: float = 0.01
    chips: float = 0.003
    gpu: dict[int, float] = field(default_factory=dict)
    """Slowdown of a rank's kernels."""
    memory: dict[int, float] = field(default_factory=dict)
    """Slowdown of those of a rank's kernels that are bound by memory."""
    throttled: dict[int, dict[int, float]] = field(default_factory=dict)
    """Slowdown of a rank's kernels in some iterations, counted from 0."""
    host: dict[int, float] = field(default_factory=dict)
    """Slowdown of a rank's launches."""
    loader: dict[int, float] = field(default_factory=dict)
    """Slowdown of a rank's data loader."""
    link: dict[str, float] = field(default_factory=dict)
    """Slowdown of a group's transfers, by its name."""
    tokens: Callable[[int, int], int] = lambda rank, iteration: TOKENS
    """Of a rank's batch in an iteration."""
    records_operators: bool = True
    marks_steps: bool = True
    groups: tuple[Group, ...] = ()
    program: Callable[[Rank, int], Program] | None = None
    """One iteration of a rank; DDP without."""

    def run(self) -> list[Rank]:
        """Let the job run, and return its ranks with their events."""
        ranks = [Rank(self, number) for number in range(self.num_ranks)]
        programs = {rank.number: rank.iterations() for rank in ranks}
        asked = {number: next(program) for number, program in programs.items()}
        while asked:
            for key in {meeting[0] for meeting in asked.values()}:
                here = [number for number, meeting in asked.items() if meeting[0] == key]
                members = asked[here[0]][1]
                if set(here) != set(members):
                    continue
                end = max(asked[one][2] for one in here) + asked[here[0]][3]
                for number in here:
                    try:
                        asked[number] = programs[number].send(end)
                    except StopIteration:
                        del asked[number]
                break
            else:
                raise RuntimeError(f"the ranks wait for each other: {asked}")
        return ranks

    def write(self, folder: Path) -> Path:
        """Write a profile a rank."""
        folder.mkdir(exist_ok=True)
        for rank in self.run():
            path = folder / f"worker{rank.number}.pt.trace.json"
            path.write_text(json.dumps(rank.document()))
        return folder


class Rank:
    """One rank of a running job: its clocks and its events."""

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.number = job, number
        self.random = random.Random(job.seed * 1000 + number)
        self.speed = math.exp(self.random.gauss(0, job.chips)) * job.gpu.get(number, 1.0)
        self.now_us = 1000.0
        self.thread = MAIN
        self.free_us = {COMPUTE_STREAM: 0.0, COMM_STREAM: 0.0}
        self.correlation = 0
        self.counts: dict[str, int] = {}
        self.events: list[dict[str, Any]] = []
        self.offset_us = 37.0 * number
        """How far the clock of this rank's file is off."""
        self.iteration = 0

    def groups(self) -> list[Group]:
        """Return the groups that this rank is in."""
        job = self.job
        world = Group(name="0", description="default_pg", ranks=tuple(range(job.num_ranks)))
        return [one for one in (world, *job.groups) if self.number in one.ranks]

    def group(self, description: str) -> Group:
        """Return this rank's group of a description."""
        return next(one for one in self.groups() if one.description == description)

    def iterations(self) -> Program:
        """Run all iterations of the job's program."""
        job = self.job
        for iteration in range(job.num_iterations):
            self.iteration = iteration
            begin = self.now_us
            name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
            with_fault = job.loading_us * job.loader.get(self.number, 1.0)
            self.annotate(name, with_fault * self.random.uniform(0.9, 1.1))
            yield from (job.program or ddp)(self, job.tokens(self.number, iteration))
            self.synchronize()
            if job.marks_steps:
                self.event("user_annotation", f"ProfilerStep#{iteration + 3}", begin, self.now_us)

    def synchronize(self) -> None:
        """Let the host wait for the device."""
        self.now_us = max(self.now_us, *self.free_us.values()) + 20.0

    def annotate(self, name: str, length_us: float) -> None:
        """Add an annotation of the host that lasts so long."""
        self.event("user_annotation", name, self.now_us, self.now_us + length_us)
        self.now_us += length_us

    def launch(self) -> float:
        """Launch something, and return when the device has it."""
        self.correlation += 1
        cost = self.job.launch_us * self.job.host.get(self.number, 1.0)
        cost *= self.random.uniform(0.8, 1.2)
        self.event(
            "cuda_runtime",
            "cudaLaunchKernel",
            self.now_us,
            self.now_us + 0.8 * cost,
            correlation=self.correlation,
        )
        self.now_us += cost
        return self.now_us + 2.0

    def slowness(self, kernel: str) -> float:
        """Return how much longer than usual a kernel takes now, by what it is bound by."""
        job, clock = self.job, 1.0
        if self.number in job.throttled:
            clock = job.throttled[self.number].get(self.iteration, 1.0)
        if not is_bound_by_memory(kernel):
            return self.speed * clock
        return self.speed * job.memory.get(self.number, 1.0) * (1 + 0.3 * (clock - 1))

    def kernel(self, name: str, length_us: float, grid: int, after_us: float = 0.0) -> float:
        """Run a kernel on the compute stream, and return its end."""
        begin = max(self.launch(), self.free_us[COMPUTE_STREAM], after_us)
        length = length_us * self.slowness(name) * math.exp(self.random.gauss(0, self.job.noise))
        self.free_us[COMPUTE_STREAM] = end = begin + length
        place = {"stream": COMPUTE_STREAM, "correlation": self.correlation}
        shape = {"grid": [grid, 1, 1], "block": [128, 1, 1]}
        self.event("kernel", f"void {name}<float>(Args)", begin, end, **place, **shape)
        flow = {"ph": "f", "id": self.correlation, "cat": "ac2g", "name": "ac2g", "bp": "e"}
        self.events.append({**flow, "pid": 0, "tid": COMPUTE_STREAM, "ts": self.stamp(begin)})
        return end

    def collective(
        self, op: str, group: Group, num_elements: int, after_us: float, kernel: str = ""
    ) -> Generator[Meeting, float, float]:
        """Run a collective on the communication stream, and return its end."""
        begin = max(self.launch(), self.free_us[COMM_STREAM], after_us)
        correlation = self.correlation
        sequence = self.counts[group.name] = self.counts.get(group.name, 0) + 1
        transfer = self.job.transfer_us * num_elements / (1 << 20)
        transfer *= self.job.link.get(group.name, 1.0)
        end = yield (group.name, sequence), group.ranks, begin, transfer
        self.free_us[COMM_STREAM] = end
        words = "".join(word.title() for word in op.split("_"))
        self.event(
            "kernel",
            kernel or f"ncclDevKernel_{words}_Sum_f32_RING_LL(ncclDevKernelArgs)",
            begin,
            end + self.random.uniform(0, 1.0),
            stream=COMM_STREAM,
            correlation=correlation,
            grid=[24, 1, 1],
            block=[544, 1, 1],
            **{"Collective name": op, "In msg nelems": num_elements, "dtype": "Float"},
            **{"Seq": sequence, **group.arguments},
        )
        return end

    def event(
        self, category: str, name: str, begin_us: float, end_us: float, **arguments: object
    ) -> None:
        """Add an event of the device (with a stream) or of a host thread."""
        thread = arguments.get("stream", self.thread)
        times = {"ts": self.stamp(begin_us), "dur": round(end_us - begin_us, 3)}
        place = {"pid": 0 if "stream" in arguments else 4242, "tid": thread}
        self.events.append(
            {"ph": "X", "cat": category, "name": name, **place, **times, "args": arguments}
        )

    def stamp(self, time_us: float) -> float:
        """Return a time as this rank's file has it."""
        return round(time_us + self.offset_us, 3)

    def document(self) -> dict[str, Any]:
        """Return the profile."""
        groups = [
            {"pg_name": one.name, "pg_desc": one.description, "ranks": list(one.ranks)}
            for one in self.groups()
        ]
        world = {"rank": self.number, "world_size": self.job.num_ranks, "backend": "nccl"}
        return {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "numSms": 132}],
            "distributedInfo": {**world, "pg_count": len(groups), "pg_config": groups},
            "traceEvents": sorted(self.events, key=lambda event: event["ts"]),
            "traceName": f"worker{self.number}.json",
            "displayTimeUnit": "ms",
            "host_name": f"n{self.number // 8}",
            "baseTimeNanoseconds": BASE_NS,
        }


def layer_forward(rank: Rank, tokens: int, share: float = 1.0) -> float:
    """Launch a layer's forward kernels; what depends on tokens has their number in its grid."""
    work = rank.job.kernel_us * share * tokens / TOKENS
    rank.kernel("layer_norm", 0.05 * work, tokens // 8)
    rank.kernel("ampere_gemm_qkv", 0.35 * work, tokens // 4)
    rank.kernel("flash_fwd_kernel", 0.2 * work * tokens / TOKENS, tokens // 16)
    return rank.kernel("ampere_gemm_mlp", 0.4 * work, tokens // 2)


def layer_backward(rank: Rank, tokens: int, share: float = 1.0) -> float:
    """Launch a layer's backward kernels; the grid of a weight gradient says nothing of tokens."""
    work = 2 * rank.job.kernel_us * share * tokens / TOKENS
    begin = rank.now_us
    rank.kernel("ampere_gemm_dgrad", 0.4 * work, tokens // 4)
    rank.kernel("flash_bwd_kernel", 0.2 * work * tokens / TOKENS, tokens // 16)
    end = rank.kernel("ampere_gemm_wgrad", 0.4 * work, 256)
    if rank.job.records_operators:
        engine = "autograd::engine::evaluate_function: AddmmBackward0"
        rank.event("cpu_op", engine, begin, rank.now_us)
    return end


def optimizer_step(rank: Rank, share: float = 1.0) -> None:
    """Launch the optimizer's kernels, which do not depend on tokens."""
    begin = rank.now_us
    for _ in range(4):
        rank.kernel("multi_tensor_apply_kernel", 0.25 * rank.job.kernel_us * share, 320)
    if rank.job.records_operators:
        rank.event("user_annotation", "Optimizer.step#AdamW.step", begin, rank.now_us)


def ddp(rank: Rank, tokens: int) -> Program:
    """Reduce gradients in buckets of two layers while the backward pass goes on."""
    world = rank.group("default_pg")
    for _ in range(rank.job.num_layers):
        layer_forward(rank, tokens)
    rank.thread = ENGINE
    for layer in range(rank.job.num_layers):
        end = layer_backward(rank, tokens)
        if layer % 2:
            yield from rank.collective("allreduce", world, 1 << 20, end)
    rank.thread = MAIN
    rank.free_us[COMPUTE_STREAM] = max(rank.free_us.values())
    optimizer_step(rank)


def fsdp(rank: Rank, tokens: int) -> Program:
    """Gather each layer's parameters one layer ahead, scatter its gradients behind."""
    shards = rank.group("mesh_dp_shard")
    ready = yield from rank.collective("_allgather_base", shards, 1 << 19, 0.0)
    for layer in range(rank.job.num_layers):
        rank.free_us[COMPUTE_STREAM] = max(rank.free_us[COMPUTE_STREAM], ready)
        if layer + 1 < rank.job.num_layers:
            ready = yield from rank.collective("_allgather_base", shards, 1 << 19, 0.0)
        layer_forward(rank, tokens)
    rank.thread = ENGINE
    for _ in range(rank.job.num_layers):
        end = layer_backward(rank, tokens)
        yield from rank.collective("_reduce_scatter_base", shards, 1 << 19, end)
    rank.thread = MAIN
    rank.free_us[COMPUTE_STREAM] = max(rank.free_us.values())
    optimizer_step(rank)


def tensor_parallel(rank: Rank, tokens: int) -> Program:
    """Reduce every layer's output over the TP group, gradients over the replicas at the end."""
    tp = rank.group("TENSOR_MODEL_PARALLEL_GROUP")
    for layer_pass in (layer_forward, layer_backward):
        rank.thread = MAIN if layer_pass is layer_forward else ENGINE
        for _ in range(rank.job.num_layers):
            end = layer_pass(rank, tokens)
            ready = yield from rank.collective("allreduce", tp, 1 << 18, end)
            rank.free_us[COMPUTE_STREAM] = max(rank.free_us[COMPUTE_STREAM], ready)
    rank.thread = MAIN
    dp = rank.group("DATA_PARALLEL_GROUP_WITH_CP")
    ready = yield from rank.collective("allreduce", dp, 1 << 20, rank.free_us[COMPUTE_STREAM])
    rank.free_us[COMPUTE_STREAM] = max(rank.free_us[COMPUTE_STREAM], ready)
    optimizer_step(rank)


def pipeline(rank: Rank, tokens: int) -> Program:
    """Run four microbatches through two stages of unequal parts (GPipe), then reduce gradients.

    A message is a collective of the two ranks that takes no time to meet.
    """
    stage = rank.number // (rank.job.num_ranks // 2)
    pair = next(one for one in rank.groups() if one.description == "PIPELINE_MODEL_PARALLEL_GROUP")
    head = tokens * (4 if stage else 1)
    for _ in range(4):
        if stage:
            yield from _message(rank, pair, "recv")
        for _ in range(rank.job.num_layers // 2):
            layer_forward(rank, tokens // 4)
        rank.kernel("ampere_gemm_head" if stage else "embedding", 80.0, head // 8)
        if not stage:
            yield from _message(rank, pair, "send")
    rank.thread = ENGINE
    for _ in range(4):
        if not stage:
            yield from _message(rank, pair, "recv")
        for _ in range(rank.job.num_layers // 2):
            layer_backward(rank, tokens // 4)
        if stage:
            yield from _message(rank, pair, "send")
    rank.thread = MAIN
    dp = rank.group("DATA_PARALLEL_GROUP_WITH_CP")
    ready = yield from rank.collective("allreduce", dp, 1 << 20, rank.free_us[COMPUTE_STREAM])
    rank.free_us[COMPUTE_STREAM] = max(rank.free_us[COMPUTE_STREAM], ready)
    optimizer_step(rank, 1.5 if stage else 1.0)


def _message(rank: Rank, pair: Group, op: str) -> Program:
    kernel = "ncclDevKernel_SendRecv(ncclDevKernelArgs)"
    after = rank.free_us[COMPUTE_STREAM]
    end = yield from rank.collective(op, pair, 1 << 17, after, kernel)
    other = 1 - pair.ranks.index(rank.number)
    rank.events[-1]["args"]["Dst Rank" if op == "send" else "Src Rank"] = other
    rank.free_us[COMPUTE_STREAM] = max(rank.free_us[COMPUTE_STREAM], end)


def dlrm(rank: Rank, tokens: int) -> Program:
    """Look embeddings up where their tables lie, exchange them all to all, run the dense layers.

    Tables are of unequal size: each rank's lookups take another time, in kernels of other launches.
    """
    world = rank.group("default_pg")
    rows = 1024 + 256 * rank.number
    exchange = "ncclDevKernel_SendRecv(ncclDevKernelArgs)"
    found = rank.kernel("embedding_lookup", 0.3 * rank.job.kernel_us * rows / 1024, rows)
    dense = layer_forward(rank, tokens)  # the bottom MLP runs beside the exchange
    arrived = yield from rank.collective("all_to_all", world, 1 << 19, found, exchange)
    rank.free_us[COMPUTE_STREAM] = max(dense, arrived)
    for _ in range(rank.job.num_layers - 1):
        layer_forward(rank, tokens)
    rank.thread = ENGINE
    for _ in range(rank.job.num_layers):
        end = layer_backward(rank, tokens)
    arrived = yield from rank.collective("all_to_all", world, 1 << 19, end, exchange)
    rank.free_us[COMPUTE_STREAM] = max(rank.free_us[COMPUTE_STREAM], arrived)
    rank.kernel("embedding_backward", 0.3 * rank.job.kernel_us * rows / 1024, rows)
    ready = yield from rank.collective("allreduce", world, 1 << 20, end)
    rank.thread = MAIN
    rank.free_us[COMPUTE_STREAM] = max(rank.free_us[COMPUTE_STREAM], ready)
    optimizer_step(rank)


def mesh(num_ranks: int, size: int, description: str, *, strided: bool = False) -> Iterator[Group]:
    """Yield the groups of neighbours, or of ranks that are `num_ranks / size` apart."""
    step = num_ranks // size if strided else 1
    for number in range(num_ranks // size):
        first = number if strided else number * size
        members = tuple(range(first, first + step * size, step))
        yield Group(name=f"{description}{number}", description=description, ranks=members)


def megatron(num_ranks: int, axis: str) -> tuple[Group, ...]:
    """Return the groups of a job of two-rank TP or PP groups and replicas."""
    across = axis == "PIPELINE_MODEL_PARALLEL_GROUP"
    replicas = "DATA_PARALLEL_GROUP_WITH_CP"
    return (
        *mesh(num_ranks, 2, axis, strided=across),
        *mesh(num_ranks, num_ranks // 2, replicas, strided=not across),
    )


JOBS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"program": fsdp, "groups": tuple(mesh(4, 4, "mesh_dp_shard"))},
    "tp": {
        "program": tensor_parallel,
        "num_ranks": 8,
        "groups": megatron(8, "TENSOR_MODEL_PARALLEL_GROUP"),
    },
    "pp": {
        "program": pipeline,
        "num_ranks": 8,
        "groups": megatron(8, "PIPELINE_MODEL_PARALLEL_GROUP"),
    },
    "dlrm": {"program": dlrm},
}


def profile_job(kind: str, **changes: Any) -> Job:
    """Return a job of a kind with some things changed: `profile_job("ddp", gpu={2: 1.2})`."""
    return Job(**{**JOBS[kind], **changes})
