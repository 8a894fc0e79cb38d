"""Kineto files: what `export_chrome_trace` of a version of torch would have written of a rank.

Every version has its own dialect: names of categories, integer or fractional microseconds, since
the epoch or since `baseTimeNanoseconds`, collectives with or without arguments, the rank in
`distributedInfo` or in the file's name alone.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.grounds.profiles.engine import Meeting, Recorded, Times
from benchmarks.grounds.profiles.job import CHIPS, LOADER, Job, Kind, Op

_EPOCH_US = 1_712_195_495_000_000
_BASE_US = 1_711_964_646_000_000
_STREAMS = {"dp": 20, "tp": 24, "ep": 28, "prev": 32, "next": 36}
_UNSEEN = ("python", "logging", "torch.save")  # host work without an operator of its own
_ANNOTATIONS = {
    "all_reduce": "nccl:all_reduce", "all_gather": "nccl:_all_gather_base",
    "reduce_scatter": "nccl:_reduce_scatter_base", "all_to_all": "nccl:all_to_all",
    "send_recv": "nccl:coalesced",
}  # fmt: skip
_COLLECTIVES = {
    "all_reduce": "allreduce", "all_gather": "_allgather_base",
    "reduce_scatter": "_reduce_scatter_base", "all_to_all": "all_to_allv",
}  # fmt: skip
_DESCRIPTIONS = {"dp": "mesh_dp", "tp": "mesh_tp", "ep": "mesh_ep", "pp": "mesh_pp"}
_BYTES_A_BLOCK = 16_384
_MOST_RANKS = 30  # of a group that Kineto lists


@dataclass(frozen=True, kw_only=True)
class Era:
    """State how the profiler of one version of torch writes."""

    categories: dict[str, str]
    flow: str
    times: str  # integer, tenths or based
    external: str  # how the id of an operator is called
    described: int  # of collectives: 0 nothing, 1 name and sizes, 2 the group, too
    nccl: str  # how NCCL names its kernels: old, worker, device or storage
    informed: str  # distributedInfo: "", short or long


_OLD = {
    "cpu_op": "Operator", "user_annotation": "Operator", "cuda_runtime": "Runtime",
    "kernel": "Kernel", "gpu_memcpy": "Memcpy",
}  # fmt: skip
_MIDDLE = _OLD | {"cpu_op": "cpu_op", "user_annotation": "user_annotation"}
ERAS = {
    "1.8": Era(
        categories=_OLD, flow="async", times="integer", external="external id", described=0,
        nccl="old", informed="",
    ),
    "1.12": Era(
        categories=_MIDDLE, flow="async_gpu", times="integer", external="external id",
        described=0, nccl="old", informed="short",
    ),
    "2.0": Era(
        categories={}, flow="ac2g", times="integer", external="External id", described=0,
        nccl="worker", informed="short",
    ),
    "2.2": Era(
        categories={}, flow="ac2g", times="tenths", external="External id", described=1,
        nccl="device", informed="short",
    ),
    "2.4": Era(
        categories={}, flow="ac2g", times="based", external="External id", described=2,
        nccl="device", informed="long",
    ),
    "2.7": Era(
        categories={}, flow="ac2g", times="based", external="External id", described=2,
        nccl="storage", informed="long",
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Dress:
    """Say how the files of a job are named and laid out."""

    name: str  # tensorboard (host and process), rank, worker or dated
    informed: str  # head, tail or nowhere
    zipped: bool = False
    rewritten: bool = False  # read and dumped again by a script


class ProfileFiles:
    """Write the profiles of a job, each with its host's clock."""

    def __init__(self, directory: Path, job: Job, seed: int, dress: Dress) -> None:
        self._directory, self._job, self._dress = directory, job, dress
        draws = np.random.default_rng([seed, 91])
        num_hosts = job.host(job.num_ranks - 1) + 1
        self._offsets_us = draws.normal(0, 3000.0, num_hosts)
        self._drifts = draws.normal(0, 12e-6, num_hosts)
        self._gpu_late_us = draws.uniform(0, 1.5, job.num_ranks)
        self._processes = 4000 + draws.integers(0, 90_000, job.num_ranks)
        self._groups = _group_names(job)

    def write(self, rank: int, recorded: Recorded) -> Path:
        """Write the file of one rank."""
        job, host = self._job, self._job.host(rank)
        writer = _Writer(
            job=job, era=ERAS[job.era], rank=rank, process=int(self._processes[rank]),
            offset_us=float(self._offsets_us[host]), rate=1 + float(self._drifts[host]),
            gpu_late_us=float(self._gpu_late_us[rank]), groups=self._groups,
        )  # fmt: skip
        writer.window(recorded)
        path = self._directory / self._name(rank)
        text = self._document(rank, path.name, writer)
        text = json.dumps(json.loads(text)) if self._dress.rewritten else text
        content = text.encode()
        path.write_bytes(gzip.compress(content, 1) if self._dress.zipped else content)
        return path

    def _name(self, rank: int) -> str:
        host, process = self._job.host(rank), int(self._processes[rank])
        stamp = _EPOCH_US // 1000 + 900 + rank
        names = {
            "tensorboard": f"node{host:02d}_{process}.{stamp}.pt.trace.json",
            "rank": f"rank{rank}.json",
            "worker": f"worker{rank}_step_12.{stamp}.pt.trace.json",
            "dated": f"rank-{rank}.Apr_03_18_51_38.{process}.pt.trace.json",
        }
        return names[self._dress.name] + (".gz" if self._dress.zipped else "")

    def _document(self, rank: int, name: str, writer: _Writer) -> str:
        """Return the file's text: properties, then events, then what Kineto appends."""
        job, era = self._job, writer.era
        head = ['"schemaVersion": 1']
        if job.era not in ("1.8", "1.12"):
            chip = CHIPS[job.chip]
            device = {"id": 0, "name": chip.name, "numSms": chip.number_of_sms, "warpSize": 32}
            devices = [{**device, "id": number} for number in range(job.gpus_per_host)]
            head.append(f'"deviceProperties": {json.dumps(devices)}')
        tail = [f'"traceName": "/traces/{name}"']
        if era.times == "based":
            tail += ['"displayTimeUnit": "ms"', f'"baseTimeNanoseconds": {_BASE_US}000']
        if self._dress.informed != "nowhere" and era.informed:
            line = f'"distributedInfo": {json.dumps(self._information(rank, era))}'
            (head if self._dress.informed == "head" else tail).append(line)
        events = ",\n  ".join(writer.metadata() + writer.lines + writer.closing())
        return "{\n  " + ",\n  ".join([*head, f'"traceEvents": [\n  {events}\n  ]', *tail]) + "\n}"

    def _information(self, rank: int, era: Era) -> dict[str, object]:
        found: dict[str, object] = {
            "backend": "nccl", "rank": rank, "world_size": self._job.num_ranks,
        }  # fmt: skip
        if era.informed == "long":
            groups = [
                (self._groups[axis, members], axis, members)
                for axis, members in self._groups
                if rank in members
            ]
            found["pg_count"] = len(groups)
            found["pg_config"] = [
                {
                    "pg_name": name, "pg_desc": _described(name, axis),
                    "backend_config": "cuda:nccl", "pg_size": len(members), "ranks": list(members),
                }
                for name, axis, members in groups
            ]  # fmt: skip
            found["nccl_version"] = "2.21.5"
        return found


@dataclass(kw_only=True)
class _Writer:
    """Turn what one rank did into lines of events."""

    job: Job
    era: Era
    rank: int
    process: int
    offset_us: float
    rate: float
    gpu_late_us: float
    groups: dict[tuple[str, tuple[int, ...]], str]
    lines: list[str] = field(default_factory=list)
    _external: int = 1
    _correlation: int = 1000
    _begins_us: float = 0.0
    _ends_us: float = 0.0
    _work: dict[str, float] = field(default_factory=dict)  # of the iteration being written

    def __post_init__(self) -> None:
        self._device = self.rank % self.job.gpus_per_host
        self._autograd = self.process + 1262
        self._dtype = "c10::Half" if self.job.chip == "V100" else "BFloat16"

    def window(self, recorded: Recorded) -> None:
        """Write the profiled iterations, and the kernels that the one before left behind."""
        self._begins_us = recorded.times[1][0][1] - 30.0
        self._left_behind(recorded)
        for number in range(1, len(recorded.programs)):
            program, times = recorded.programs[number], recorded.times[number]
            self._work = recorded.works[number]
            self._iteration(number, program, times, recorded.meetings[number])
        last = recorded.times[-1][-1][1]
        self._ends_us = max(last, recorded.ends[-1]) + 60.0
        self._runtime("cudaDeviceSynchronize", last + 20, self._ends_us - 20)

    def _left_behind(self, recorded: Recorded) -> None:
        program, times, self._work = recorded.programs[0], recorded.times[0], recorded.works[0]
        for place, (op, (_, _, start, stop)) in enumerate(zip(program, times, strict=True)):
            if start < self._begins_us:
                continue
            if op.kind == Kind.COLLECTIVE:
                meeting = recorded.meetings[0][place]
                self._nccl(op, start, meeting.end, self._next_correlation())
            else:
                self._gpu(op, start, stop, self._next_correlation())

    def _iteration(
        self, number: int, program: list[Op], times: list[Times], meetings: dict[int, Meeting]
    ) -> None:
        opened: list[tuple[float, int]] = []
        for place, (op, (begin, end, start, stop)) in enumerate(zip(program, times, strict=True)):
            if op.kind <= Kind.COPY:
                self._launched(op, begin, end, start, stop)
            elif op.kind == Kind.COLLECTIVE:
                self._communicated(op, begin, end, start, meetings[place].end)
            elif op.kind == Kind.BEGIN:
                opened.append((end, place))
            elif op.kind == Kind.END:
                opened_us, first = opened.pop()
                self._annotation(number, op, opened_us, end)
                self._annotation_on_gpu(op, times[first:place], program[first:place])
            elif op.kind == Kind.SYNC:
                for name in op.names:
                    self._cpu(name, begin, end, op)
                self._runtime("cudaStreamSynchronize", begin + 0.3, end - 0.3)
            elif op.kind == Kind.HOST and op.names[0] not in _UNSEEN:
                category = "user_annotation" if op.names[0] == LOADER else "cpu_op"
                self._cpu(op.names[0], begin, end, op, category=category)
            elif op.kind == Kind.WAIT:
                self._runtime("cudaStreamWaitEvent", begin, end, op.backward)

    # -- events

    def _cpu(
        self,
        name: str,
        begin: float,
        end: float,
        op: Op,
        *,
        category: str = "cpu_op",
        more: str = "",
    ) -> None:
        self._external += 1
        self.lines.append(
            f'{{"ph": "X", "cat": "{self._category(category)}", "name": "{name}", '
            f'"pid": {self.process}, "tid": {self._thread(op.backward)}, '
            f'{self._times(begin, end)}, "args": {{"External id": {self._external}{more}}}}}'
        )

    def _launched(self, op: Op, begin: float, end: float, start: float, stop: float) -> None:
        """Write operators within each other, the launch at the end of the innermost, the kernel."""
        step = (end - begin) * 0.08
        for depth, name in enumerate(op.names):
            self._cpu(name, begin + depth * step, end - 0.3 * depth * step, op)
        name = "cudaMemcpyAsync" if op.kind == Kind.COPY else "cudaLaunchKernel"
        launch = begin + 0.6 * (end - begin)
        correlation = self._runtime(name, launch, end - step, op.backward)
        self._flow("s", launch, correlation, self._thread(op.backward))
        self._gpu(op, start, stop, correlation)
        self._flow("f", start + self.gpu_late_us, correlation, 7)

    def _gpu(self, op: Op, start: float, stop: float, correlation: int) -> None:
        start, stop = start + self.gpu_late_us, stop + self.gpu_late_us
        common = f'"{self.era.external}": {self._external}, "device": {self._device}, "context": 1'
        if op.kind == Kind.COPY:
            rate = op.size_bytes / max(stop - start, 0.1) / 1000
            category, more = (
                "gpu_memcpy",
                (f'"bytes": {int(op.size_bytes)}, "memory bandwidth (GB/s)": {rate:.4f}'),
            )
        else:
            category, more = (
                "kernel",
                (
                    '"queued": 0, "registers per thread": 96, "shared memory": 0, "blocks per SM": '
                    f'2.5, "warps per SM": 20, "grid": [{self._num_blocks(op)}, 1, 1], '
                    '"block": [256, 1, 1], '
                    '"est. achieved occupancy %": 50'
                ),
            )
        self.lines.append(
            f'{{"ph": "X", "cat": "{self._category(category)}", "name": "{op.kernel}", '
            f'"pid": {self._device}, "tid": 7, {self._times(start, stop)}, "args": {{{common}, '
            f'"stream": 7, "correlation": {correlation}, {more}}}}}'
        )

    def _num_blocks(self, op: Op) -> int:
        """Return how many blocks a launch has: as many as its outputs take. A weight gradient has
        those of its parameters, however many tokens it sums over.
        """
        sums = "_nt" in op.kernel or "wgrad" in op.kernel
        ratio = 1.0 if sums else self._work.get(op.scales, 1.0)
        return max(1, -(-int(op.size_bytes * ratio) // _BYTES_A_BLOCK))

    def _communicated(self, op: Op, begin: float, end: float, start: float, stop: float) -> None:
        size = self._message(op)
        step = (end - begin) * 0.1
        described = f", {size}" if self.era.described and size else ""
        if op.kernel != "send_recv":
            self._cpu("record_param_comms", begin, end, op, more=described)
        around = _ANNOTATIONS[op.kernel]
        self._cpu(around, begin + step, end - step, op, category="user_annotation")
        launch = begin + 0.7 * (end - begin)
        name = "cudaLaunchKernelExC" if self.era.described else "cudaLaunchKernel"
        correlation = self._runtime(name, launch, end - step, op.backward)
        self._flow("s", launch, correlation, self._thread(op.backward))
        self._nccl(op, start, stop, correlation)
        self._flow("f", start + self.gpu_late_us, correlation, _STREAMS[op.axis])
        if self.era.described:
            late = self.gpu_late_us
            self._on_gpu(around, start + late - 0.5, stop + late + 0.5, _STREAMS[op.axis])

    def _nccl(self, op: Op, start: float, stop: float, correlation: int) -> None:
        start, stop = start + self.gpu_late_us, stop + self.gpu_late_us
        stream, size = _STREAMS[op.axis], self._message(op)
        described = f", {size}" if self.era.described and size else ""
        self.lines.append(
            f'{{"ph": "X", "cat": "{self._category("kernel")}", "name": "{self._kernel_name(op)}", '
            f'"pid": {self._device}, "tid": {stream}, {self._times(start, stop)}, "args": '
            f'{{"{self.era.external}": {self._external}, "queued": 0, "device": {self._device}, '
            f'"context": 1, "stream": {stream}, "correlation": {correlation}, "registers per '
            f'thread": 96, "shared memory": 82240, "blocks per SM": 0.18, "warps per SM": 3, '
            '"grid": [24, 1, 1], "block": [544, 1, 1], "est. achieved occupancy %": 0'
            f"{described}}}}}"
        )

    def _message(self, op: Op) -> str:
        """Return the arguments of a collective as Kineto adds them; grouped sends have none."""
        if op.kernel == "send_recv":
            return ""
        members = self.job.members(self.rank, op.axis)
        into = out = int(op.size_bytes / 2)
        if op.kernel == "all_gather":
            into //= len(members)
        if op.kernel == "reduce_scatter":
            out //= len(members)
        text = (
            f'"Collective name": "{_COLLECTIVES[op.kernel]}", "In msg nelems": {into}, '
            f'"Out msg nelems": {out}, "Group size": {len(members)}, "dtype": "{self._dtype}", '
            '"In split size": "[]", "Out split size": "[]"'
        )
        if self.era.described < 2:
            return text
        name = self.groups[op.axis, members]
        listed = ", ".join(map(str, members[:_MOST_RANKS]))
        more = ", ..." if len(members) > _MOST_RANKS else ""
        return (
            f'{text}, "Process Group Name": "{name}", "Process Group Description": '
            f'"{_described(name, op.axis)}", "Process Group Ranks": "[{listed}{more}]"'
        )

    def _kernel_name(self, op: Op) -> str:
        words = op.kernel.title().replace("_", "")
        words = "SendRecv" if op.kernel in ("send_recv", "all_to_all") else words
        short, long = ("f16", "half") if self.job.chip == "V100" else ("bf16", "__nv_bfloat16")
        reduces = op.kernel in ("all_reduce", "reduce_scatter")
        if self.era.nccl in ("old", "worker"):
            protocol = "SIMPLE" if words == "SendRecv" else "LL"
            arguments = {
                "old": "ncclWorkElem", "worker": "ncclDevComm*, unsigned long, ncclWork*",
            }[self.era.nccl]  # fmt: skip
            kind = long if reduces else "int8_t"
            return f"ncclKernel_{words}_RING_{protocol}_Sum_{kind}({arguments})"
        arguments = "ncclDevComm*, unsigned long, ncclWork*"
        if self.era.nccl == "storage":
            arguments = "ncclDevKernelArgsStorage<4096ul>"
        shape = "" if words == "SendRecv" else "_RING_LL"
        return f"ncclDevKernel_{words}{f'_Sum_{short}' if reduces else ''}{shape}({arguments})"

    def _annotation(self, number: int, op: Op, begin: float, end: float) -> None:
        name = op.names[0]
        if name == "ProfilerStep":
            if not self.job.annotated:
                return
            name = f"ProfilerStep#{self.job.first_step + number - 1}"
        self._cpu(name, begin, end, op, category="user_annotation")

    def _annotation_on_gpu(self, op: Op, times: list[Times], program: list[Op]) -> None:
        if not self.era.described or op.names[0] == "ProfilerStep":
            return
        inside = [
            (start, stop)
            for each, (_, _, start, stop) in zip(program, times, strict=True)
            if each.kind == Kind.KERNEL
        ]
        if inside:
            late = self.gpu_late_us
            self._on_gpu(op.names[0], inside[0][0] + late, inside[-1][1] + late, 7)

    def _on_gpu(self, name: str, start: float, stop: float, stream: int) -> None:
        self.lines.append(
            f'{{"ph": "X", "cat": "gpu_user_annotation", "name": "{name}", "pid": {self._device}, '
            f'"tid": {stream}, {self._times(start, stop)}, "args": '
            f'{{"External id": {self._external}}}}}'
        )

    def _runtime(self, name: str, begin: float, end: float, backward: bool = False) -> int:
        """Write a call of CUDA's runtime; return the number that ties it to its kernel."""
        correlation = self._next_correlation()
        self.lines.append(
            f'{{"ph": "X", "cat": "{self._category("cuda_runtime")}", "name": "{name}", '
            f'"pid": {self.process}, "tid": {self._thread(backward)}, '
            f'{self._times(begin, end)}, "args": {{"{self.era.external}": {self._external}, '
            f'"cbid": 211, "correlation": {correlation}}}}}'
        )
        return correlation

    def _next_correlation(self) -> int:
        self._correlation += 3
        return self._correlation

    def _thread(self, backward: bool) -> int:
        return self._autograd if backward else self.process

    def _flow(self, phase: str, at: float, correlation: int, thread: int) -> None:
        place = f'"pid": {self.process if phase == "s" else self._device}, "tid": {thread}'
        end = ', "bp": "e"' if phase == "f" else ""
        self.lines.append(
            f'{{"ph": "{phase}", "id": {correlation}, {place}, "ts": {self._at(at)}, '
            f'"cat": "{self.era.flow}", "name": "{self.era.flow}"{end}}}'
        )

    def metadata(self) -> list[str]:
        """Return what Kineto says of processes and threads."""
        at = self._at(self._begins_us)
        places = [
            ("process_name", self.process, 0, '"name": "python3"'),
            ("process_labels", self.process, 0, '"labels": "CPU"'),
            ("process_name", self._device, 0, '"name": "python3"'),
            ("process_labels", self._device, 0, f'"labels": "GPU {self._device}"'),
            ("thread_name", self._device, 7, '"name": "stream 7 "'),
            ("thread_name", self.process, self.process, '"name": "thread (python3)"'),
            ("thread_name", self.process, self._autograd, '"name": "thread (pt_autograd_0)"'),
        ]
        return [
            f'{{"name": "{name}", "ph": "M", "ts": {at}, "pid": {process}, "tid": {thread}, '
            f'"args": {{{arguments}}}}}'
            for name, process, thread, arguments in places
        ]

    def closing(self) -> list[str]:
        """Return the profiler's own span and marks."""
        span = self._times(self._begins_us - 20.0, self._ends_us)
        return [
            f'{{"ph": "X", "cat": "Trace", {span}, "pid": "Spans", "tid": "PyTorch Profiler", '
            '"name": "PyTorch Profiler (0)", "args": {"Op count": 0}}',
            '{"name": "Iteration Start: PyTorch Profiler", "ph": "i", "s": "g", "pid": "Traces", '
            f'"tid": "Trace PyTorch Profiler", "ts": {self._at(self._begins_us - 20.0)}}}',
            '{"name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": "", '
            f'"ts": {self._at(self._ends_us + 5.0)}}}',
        ]

    # -- times and words

    def _category(self, name: str) -> str:
        return self.era.categories.get(name, name)

    def _at(self, true_us: float) -> str:
        since = true_us * self.rate + self.offset_us + 1e6
        if self.era.times == "integer":
            return str(_EPOCH_US + int(since))
        if self.era.times == "tenths":
            return f"{_EPOCH_US + since:.1f}"
        return f"{_EPOCH_US - _BASE_US + since:.3f}"

    def _times(self, begin: float, end: float) -> str:
        lasts = (end - begin) * self.rate
        text = str(int(lasts)) if self.era.times == "integer" else f"{lasts:.3f}"
        return f'"ts": {self._at(begin)}, "dur": {text}'


def _described(name: str, axis: str) -> str:
    return "default_pg" if name == "0" else _DESCRIPTIONS[axis]


def _group_names(job: Job) -> dict[tuple[str, tuple[int, ...]], str]:
    """Return the name of each process group: a number, counted as the groups were made."""
    names: dict[tuple[str, tuple[int, ...]], str] = {}
    for axis in ("dp", "tp", "ep"):
        for rank in range(job.num_ranks):
            key = (axis, job.members(rank, axis))
            if axis in job.axes(rank) and key not in names:
                whole = axis == "dp" and len(key[1]) == job.num_ranks
                names[key] = "0" if whole else str(len(names) + 1)
    for first in range(job.num_stage_ranks if job.pp > 1 else 0):
        members = tuple(range(first, job.num_ranks, job.num_stage_ranks))
        names["pp", members] = str(len(names) + 1)
    return names
