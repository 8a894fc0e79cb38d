"""Write a run as torch.profiler exports it: one Chrome trace a rank, as torch 2.3 and newer do.

Kernels stand on streams of the device, their launches on the host's threads (the main one, and
autograd's for backward passes), tied by correlation. Kernels of NCCL carry what they transfer; a
batch of messages does not, its members are noted on the host only.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray

from benchmarks.grounds.formats.clocks import ORIGIN_NS, Clock, clocks_of
from benchmarks.grounds.formats.job import Job
from benchmarks.grounds.formats.program import Bound, Code, Communication, Message, Operation
from benchmarks.grounds.formats.world import Run

Event = dict[str, object]
Moments = tuple[float, float, float, float]
"""When the host came to an operation and issued it, when it began and ended on the device; µs."""
COMPUTE_STREAM, FIRST_STREAM, STREAM_STEP = 7, 19, 4
DESCRIPTIONS = {
    "world": "default_pg",
    "tp": "TENSOR_MODEL_PARALLEL_GROUP",
    "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
    "dp": "DATA_PARALLEL_GROUP",
    "dp_cp": "DATA_PARALLEL_GROUP_WITH_CP",
    "cp": "CONTEXT_PARALLEL_GROUP",
    "ep": "EXPERT_MODEL_PARALLEL_GROUP",
    "expt_dp": "EXPERT_DATA_PARALLEL_GROUP",
    "mp": "MODEL_PARALLEL_GROUP",
    "embd": "EMBEDDING_GROUP",
}
KERNELS = {
    "all_reduce": ("AllReduce_Sum_{}_RING_LL", "allreduce", "all_reduce"),
    "all_gather": ("AllGather_RING_LL", "_allgather_base", "_all_gather_base"),
    "reduce_scatter": (
        "ReduceScatter_Sum_{}_RING_LL", "_reduce_scatter_base", "_reduce_scatter_base"
    ),
    "all_to_all": ("SendRecv", "all_to_allv", "all_to_all"),
    "broadcast": ("Broadcast_RING_LL", "broadcast", "broadcast"),
    "barrier": ("AllReduce_Sum_i8_RING_LL", "allreduce", "all_reduce_barrier"),
}  # fmt: skip
"""An operation's kernel, its name in the kernel's arguments, and around its launch."""
NCCL_ARGUMENT = "(ncclDevKernelArgsStorage<4096ul>)"
USER_BUFFERS = "void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<8>(int, int, int, int, int, void**)"


@dataclass(frozen=True, kw_only=True)
class ProfileStyle:
    """What one job's profiler recorded, and how it wrote it down.

    `base`: "absolute" times, times since a "common" moment, or since a moment of each rank's "own".
    """

    operators: bool = True
    steps: bool = True
    arguments: bool = True  # only a profiler that records operators knows what NCCL's kernels move
    descriptions: bool = True
    base: str = "common"


def write_profiles(run: Run, style: ProfileStyle, directory: Path) -> None:
    """Write one file a rank into a folder."""
    directory.mkdir(parents=True, exist_ok=True)
    world = run.world
    clocks = clocks_of(world.cluster, world.seed, float(run.end_ns.max()))
    own: list[list[int]] = [[] for _ in range(world.job.shape.world)]
    for number, one in enumerate(run.program.operations):
        own[one.rank].append(number)
    messages: dict[int, list[Message]] = defaultdict(list)
    for message in run.program.messages:
        messages[message.operation].append(message)
    groups = {name: str(number) for number, name in enumerate(world.job.shape.groups)}
    for rank in range(world.job.shape.world):
        profile = _Profile(run, style, rank, clocks[rank], own[rank], messages, groups)
        document = profile.document()
        (directory / f"rank{rank}.json").write_bytes(orjson.dumps(document))


def _dtype(made: Communication) -> tuple[str, str, int]:
    """Return a payload's type as torch and NCCL call it, and its bytes."""
    axis = made.group.partition("@")[0]
    if made.op == "barrier":
        return "Char", "i8", 1
    if made.op == "broadcast":
        return "Long", "i64", 8
    is_float = axis in ("dp", "dp_cp", "expt_dp", "mp", "world") and made.op != "all_gather"
    return ("Float", "f32", 4) if is_float else ("BFloat16", "bf16", 2)


@dataclass
class _Profile:
    """Collects the events of one rank."""

    run: Run
    style: ProfileStyle
    rank: int
    clock: Clock
    own: list[int]
    messages: dict[int, list[Message]]
    groups: dict[str, str]
    events: list[Event] = field(default_factory=list)
    streams: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        local = self.rank % self.run.world.cluster.gpus_a_node
        self.device, self.process = local, 23_100 + 131 * local
        self.backward_thread = self.process + 977
        self.base_ns = 0.0
        if self.style.base != "absolute":
            self.base_ns = float(ORIGIN_NS - 7_000_000_000_000_000)
        if self.style.base == "own":
            rng = np.random.default_rng((self.run.world.seed, 13, self.rank))
            self.base_ns = float(ORIGIN_NS - int(rng.uniform(5e9, 9e9)))
        self.shift_us = (ORIGIN_NS - int(self.base_ns)) / 1000
        self.correlation = 4_000 + 7 * self.rank

    def document(self) -> Event:
        self._names()
        for place in range(len(self.run.start)):
            self._iteration(place)
        job, cluster = self.run.world.job, self.run.world.cluster
        document: Event = {
            "schemaVersion": 1,
            "deviceProperties": [
                {"id": each, "name": cluster.chip.name, "totalGlobalMem": 85_017_493_504,
                 "computeMajor": 9 if "H100" in cluster.chip.name else 8, "computeMinor": 0,
                 "maxThreadsPerBlock": 1024, "warpSize": 32, "numSms": 132}
                for each in range(min(cluster.gpus_a_node, cluster.num_ranks))
            ],
            "cupti_version": 24,
            "cuda_runtime_version": 12040,
            "distributedInfo": self._distributed(job),
            "with_flops": 0, "record_shapes": 0, "with_stack": 0, "profile_memory": 0,
            "hostName": cluster.host(self.rank),
            "displayTimeUnit": "ms",
        }  # fmt: skip
        if self.style.base != "absolute":
            document["baseTimeNanoseconds"] = int(self.base_ns)
        document["traceEvents"] = self.events
        document["traceName"] = f"./profiles/rank{self.rank}.json"
        return document

    def _distributed(self, job: Job) -> Event:
        mine = {name: each for name, each in job.shape.groups.items() if self.rank in each}
        return {
            "backend": "nccl", "rank": self.rank, "world_size": job.shape.world,
            "pg_count": len(mine),
            "pg_config": [
                {"pg_name": self.groups[name], "pg_desc": self._described(name),
                 "backend_config": "cuda:nccl", "pg_size": len(each), "ranks": list(each)}
                for name, each in mine.items()
            ],
            "nccl_version": "2.21.5",
        }  # fmt: skip

    def _described(self, group: str) -> str:
        axis = group.partition("@")[0]
        plain = axis == "world" or self.style.descriptions
        return DESCRIPTIONS[axis] if plain else "undefined"

    def _names(self) -> None:
        threads = [(self.process, "thread 23100 (python)"), (self.backward_thread, "pt_autograd_0")]
        for pid, label in ((self.process, "CPU"), (self.device, f"GPU {self.device}")):
            for name, arguments in (
                ("process_name", {"name": "python"}), ("process_labels", {"labels": label})
            ):  # fmt: skip
                self.events.append(
                    {"name": name, "ph": "M", "ts": 0, "pid": pid, "tid": 0, "args": arguments}
                )
        for tid, label in threads:
            self.events.append(
                {"name": "thread_name", "ph": "M", "ts": 0, "pid": self.process, "tid": tid,
                 "args": {"name": label}}
            )  # fmt: skip

    def _add(
        self, category: str, name: str, thread: int, when: tuple[float, float],
        arguments: Event | None = None, *, on_device: bool = False,
    ) -> None:  # fmt: skip
        begin_us, end_us = when
        self.events.append(
            {"ph": "X", "cat": category, "name": name,
             "pid": self.device if on_device else self.process, "tid": thread,
             "ts": round(begin_us + self.shift_us, 3), "dur": round(max(0.0, end_us - begin_us), 3),
             "args": arguments or {}}
        )  # fmt: skip

    def _iteration(self, place: int) -> None:
        operations = self.run.program.operations
        issued = self.clock.read(self.run.issued[place][self.own]) / 1e3
        start = self.clock.read(self.run.start[place][self.own]) / 1e3
        end = self.clock.read(self.run.end[place][self.own]) / 1e3
        before = np.concatenate([[start[0]], issued[:-1]])
        loop = zip(self.own, before.tolist(), issued.tolist(), start.tolist(), end.tolist(),
                   strict=True)  # fmt: skip
        for number, began, now, begin, done in loop:
            one = operations[number]
            if one.code is Code.KERNEL:
                self._kernel(one, (began, now, begin, done))
            elif one.code is Code.JOIN:
                self._join(number, one, (began, now, begin, done))
            elif one.code is Code.SYNC:
                self._add("cuda_runtime", "cudaDeviceSynchronize", self.process, (began, now),
                          {"cbid": 165, "correlation": 0})  # fmt: skip
            elif one.name == "loader" and self.style.operators:
                name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
                self._add("user_annotation", name, self.process, (began, now))
        self._annotate(place, issued, start)

    def _annotate(
        self, place: int, issued: NDArray[np.float64], start: NDArray[np.float64]
    ) -> None:
        where = {number: position for position, number in enumerate(self.own)}
        if self.style.operators:
            for span in self.run.program.spans:
                if span.rank == self.rank and span.name == "optimizer":
                    self._add(
                        "user_annotation", "Optimizer.step#FusedAdam.step", self.process,
                        (float(issued[where[span.begin]]), float(issued[where[span.end]])),
                    )  # fmt: skip
        if not self.style.steps:
            return
        number = self.run.world.job.iterations[place] - 1
        finish = float(issued[-1])
        if place + 1 < len(self.run.start):
            later = self.run.start[place + 1][self.own[:1]]
            finish = float(self.clock.read(later)[0]) / 1e3 - 1.0
        self._add("user_annotation", f"ProfilerStep#{number}", self.process,
                  (float(start[0]), finish))  # fmt: skip

    def _thread_of(self, one: Operation) -> int:
        is_backward = one.phase in ("backward", "recompute")
        return self.backward_thread if is_backward else self.process

    def _launch(self, thread: int, began: float, now: float, name: str) -> tuple[int, float]:
        """Note the launch of a kernel; return its correlation and when the launch began."""
        self.correlation += 3
        begin = now - min(3.2, 0.6 * (now - began))
        self._add("cuda_runtime", name, thread, (begin, now),
                  {"External id": self.correlation - 1, "cbid": 211,
                   "correlation": self.correlation})  # fmt: skip
        return self.correlation, begin

    def _operator(self, name: str, thread: int, began: float, now: float) -> None:
        if self.style.operators:
            self._add("cpu_op", name, thread, (began, now), {"External id": self.correlation - 1})

    def _kernel(self, one: Operation, when: Moments) -> None:
        began, now = when[:2]
        operator, _, name = one.name.partition("|")
        thread = self._thread_of(one)
        correlation, _ = self._launch(thread, began, now, "cudaLaunchKernel")
        if one.phase == "backward" and not operator.startswith("Optimizer"):
            operator = f"autograd::engine::evaluate_function: {operator}"
        self._operator("aten::_fused_adam_" if operator.startswith("Opt") else operator, thread,
                       began, now)  # fmt: skip
        wide = one.bound in (Bound.PRODUCT, Bound.ATTENTION)
        blocks = 132 if wide else 1 + min(65_535, int(one.cost_ns) // 16)
        self._add("kernel", name, COMPUTE_STREAM, when[2:], {
            "External id": correlation - 1, "queued": 0, "device": self.device, "context": 1,
            "stream": COMPUTE_STREAM, "correlation": correlation,
            "registers per thread": 168 if wide else 32,
            "shared memory": 180_224 if wide else 0, "blocks per SM": round(blocks / 132, 3),
            "warps per SM": 12.0, "grid": [blocks, 1, 1], "block": [384 if wide else 128, 1, 1],
            "est. achieved occupancy %": 19 if wide else 75,
        }, on_device=True)  # fmt: skip

    def _stream(self, one: Operation) -> int:
        known = self.streams.setdefault(
            one.stream, FIRST_STREAM + STREAM_STEP * (len(self.streams) + 1)
        )
        return known

    def _join(self, number: int, one: Operation, when: Moments) -> None:
        began, now = when[:2]
        made = self.run.program.communications[one.communication]
        thread, messages = self._thread_of(one), self.messages.get(number, [])
        is_hidden = self.run.world.job.hidden_tp and made.group.startswith("tp@")
        if is_hidden and made.op == "all_reduce":
            name, described, arguments = USER_BUFFERS, "userbuffers_allreduce", Event()
        elif messages:
            name = f"ncclDevKernel_SendRecv{NCCL_ARGUMENT}"
            described = "nccl:coalesced" if one.synchronous else f"nccl:{messages[0].op}"
            arguments = Event() if one.synchronous else self._of_message(made, messages[0])
        else:
            kernel, _, described = KERNELS[made.op]
            name = f"ncclDevKernel_{kernel.format(_dtype(made)[1])}{NCCL_ARGUMENT}"
            described, arguments = f"nccl:{described}", self._of_collective(made)
        correlation, launched = self._launch(thread, began, now, "cudaLaunchKernelExC")
        if self.style.operators and described == "nccl:coalesced":
            self._note_batch(thread, (began, launched, now), messages, made)
        elif self.style.operators and arguments:
            self._note(thread, described, (began, launched, now), arguments)
        stream = self._stream(one)
        self._add("kernel", name, stream, when[2:], {
            "External id": correlation - 1, "queued": 0, "device": self.device, "context": 1,
            "stream": stream, "correlation": correlation, "registers per thread": 96,
            "shared memory": 82_240, "blocks per SM": 0.121, "warps per SM": 1.94,
            "grid": [16, 1, 1], "block": [512, 1, 1], "est. achieved occupancy %": 0,
            **(arguments if self.style.arguments else {}),
        }, on_device=True)  # fmt: skip

    def _note(
        self, thread: int, described: str, when: tuple[float, float, float], arguments: Event
    ) -> None:
        """Note what the host's thread did to launch a communication."""
        began, launched, now = when
        self._add("cpu_op", "record_param_comms", thread, (began, now),
                  {"External id": self.correlation - 1, **arguments})  # fmt: skip
        inner = began + 0.1 * (launched - began), now - 0.05 * (now - launched)
        self._add("user_annotation", described, thread, inner)

    def _note_batch(
        self, thread: int, when: tuple[float, float, float], messages: list[Message],
        made: Communication,
    ) -> None:  # fmt: skip
        """Note the members of a batch one after the other, then the launch of them all."""
        began, launched, now = when
        step = (launched - began) / (len(messages) + 1)
        for place, message in enumerate(messages):
            moment = began + place * step, began + (place + 0.8) * step
            arguments = self._of_message(made, message)
            self._add("cpu_op", "record_param_comms", thread, moment, arguments)
        last = began + len(messages) * step, now
        self._add("user_annotation", "nccl:coalesced", thread, last)

    def _of_group(self, group: str, members: tuple[int, ...]) -> Event:
        return {
            "Group size": len(members),
            "Process Group Name": self.groups[group],
            "Process Group Description": self._described(group),
            "Process Group Ranks": json.dumps(list(members)),
        }

    def _of_collective(self, made: Communication) -> Event:
        dtype, _, width = _dtype(made)
        count, size = max(1, made.size_bytes // width), len(made.members)
        incoming = count // size if made.op == "all_gather" else count
        outgoing = count // size if made.op == "reduce_scatter" else count
        return {
            "Collective name": KERNELS[made.op][1], "In msg nelems": incoming,
            "Out msg nelems": outgoing, "dtype": dtype, "In split size": "[]",
            "Out split size": "[]", **self._of_group(made.group, made.members),
        }  # fmt: skip

    def _of_message(self, made: Communication, message: Message) -> Event:
        members = self.run.world.job.shape.members("pp", self.rank)
        toward = "Dst Rank" if message.op == "send" else "Src Rank"
        count = message.size_bytes // 2
        return {
            "Collective name": message.op, "In msg nelems": count, "Out msg nelems": count,
            "dtype": "BFloat16", "In split size": "[]", "Out split size": "[]",
            "Rank": members.index(message.peer), toward: message.peer,
            **self._of_group(made.group, members),
        }  # fmt: skip
