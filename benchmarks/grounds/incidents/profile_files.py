"""Write PyTorch profiles, as torch.profiler of torch 2.5 and newer exports them, one a rank.

Kernels stand on streams, each with the launch that its correlation names; NCCL's kernels carry the
arguments of their process group. Backward passes are launched by autograd's engine on a thread of
its own. Steps, the optimizer's step and waiting for the data loader are annotations of the host.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import orjson

from benchmarks.grounds.incidents.clocks import Clocks
from benchmarks.grounds.incidents.engine import Span, Spec
from benchmarks.grounds.incidents.hardware import Floats
from benchmarks.grounds.incidents.jobs import HSDP, MEGATRON, Job
from benchmarks.grounds.incidents.rank_files import groups_of, iteration_begins
from benchmarks.grounds.incidents.simulation import Outcome

_COLLECTIVES = {
    "all_reduce": ("allreduce", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"),
    "all_gather": ("_allgather_base", "ncclDevKernel_AllGather_RING_LL"),
    "reduce_scatter": ("_reduce_scatter_base", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"),
    "all_to_all": ("all_to_allv", "ncclDevKernel_SendRecv"),
    "broadcast": ("broadcast", "ncclDevKernel_Broadcast_RING_LL"),
}
_DESCRIPTIONS = {
    "tp": "TENSOR_MODEL_PARALLEL_GROUP",
    "cp": "CONTEXT_PARALLEL_GROUP",
    "dp": "DATA_PARALLEL_GROUP",
    "dp_cp": "DATA_PARALLEL_GROUP_WITH_CP",
    "ep": "EXPERT_MODEL_PARALLEL_GROUP",
    "expt_dp": "EXPERT_DATA_PARALLEL_GROUP",
    "mp": "MODEL_PARALLEL_GROUP",
    "intra_dist_opt": "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
    "shard": "mesh_dp_shard",
    "replicate": "mesh_dp_replicate",
}
_STREAMS = {"tp": 20, "cp": 24, "ep": 28, "dp_cp": 32, "shard": 32, "replicate": 36, "dp": 32}
_COMPUTES, _OTHERS = 7, 40
_LAUNCH_US, _CALL_US = 5.5, 4.2
_A_NODE = 6  # kernels that one node of autograd's graph launches


def write_profiles(job: Job, outcome: Outcome, directory: Path) -> None:
    """Write one profile a rank but those that are missing."""
    begins = iteration_begins(job, outcome)
    clocks = Clocks(job, begins - begins[0])
    spans = [one for one in outcome.spans[0] if one.spec.kind in _KINDS]
    groups = groups_of(job)
    names = _group_names(job, groups)
    for rank in range(job.num_ranks):
        if rank not in job.tracing.missing:
            writer = _Profile(job, rank, groups[rank], names)
            text = writer.text(spans, clocks, float(begins[0]))
            path = directory / f"rank{rank}.pt.trace.json"
            if job.tracing.compress:
                path = path.with_suffix(".json.gz")
                text = gzip.compress(text, 3)
            path.write_bytes(text)


_KINDS = ("kernel", "collective", "data", "step")


def _group_names(
    job: Job, groups: dict[int, dict[str, tuple[int, ...]]]
) -> dict[tuple[str, int], str]:
    """Return the names that torch gives to groups: numbers, in the order in which they are made."""
    known = {(axis, min(ranks)) for own in groups.values() for axis, ranks in own.items()}
    return {key: str(number) for number, key in enumerate(sorted(known), start=1)}


class _Profile:
    """Builds the profile of one rank."""

    def __init__(
        self,
        job: Job,
        rank: int,
        groups: dict[str, tuple[int, ...]],
        names: dict[tuple[str, int], str],
    ) -> None:
        self.job, self.rank, self.groups = job, rank, groups
        self.names = names
        self.device = int(job.cluster.slots[rank])
        self.process = 52_000 + 11 * self.device
        self.correlation = 1000
        self.lines: list[str] = []
        self._sequences: dict[str, int] = {}
        self._known: dict[Spec, str] = {}

    def text(self, spans: list[Span], clocks: Clocks, first: float) -> bytes:
        """Return the file."""
        rank = self.rank
        places = np.zeros(len(spans), dtype=np.int64)
        begin = np.array([one.begin[rank] for one in spans])
        end = np.array([one.end[rank] for one in spans])
        launch = np.array([np.nan if s.launch is None else s.launch[rank] for s in spans])

        def shown(times: Floats) -> list[float]:
            return list((clocks.shown(rank, times - first, places) * 1e6 + 2e6).tolist())

        host = shown(np.where(np.isnan(launch), begin, launch))
        pending: list[float] = []
        for span, start, stop, at in zip(spans, shown(begin), shown(end), host, strict=True):
            kind = span.spec.kind
            if kind in ("data", "step"):
                self._annotate(span, start, stop)
                continue
            backward = span.spec.phase in ("backward", "recompute")
            if pending and (not backward or len(pending) >= _A_NODE):
                self._node(pending)
                pending = []
            if backward:
                pending.append(at)
            self._launch(at, backward)
            self._on_device(span, start, stop)
        self._node(pending)
        body = ",\n".join(self.lines)
        return self._head() + body.encode() + b"\n]}\n"

    def _head(self) -> bytes:
        job = self.job
        config = [
            {
                "pg_name": self._name_of(axis),
                "pg_desc": self._description(axis),
                "backend_config": "cuda:nccl",
                "pg_size": len(ranks),
                "ranks": list(ranks),
            }
            for axis, ranks in self.groups.items()
            if len(ranks) > 1
        ]
        header = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": self.device, "name": job.chip_name(self.rank)}],
            "distributedInfo": {
                "backend": "nccl",
                "rank": self.rank,
                "world_size": job.num_ranks,
                "pg_count": len(config),
                "pg_config": config,
                "nccl_version": "2.26.2",
            },
            "host_name": job.cluster.name_of(self.rank),
            "baseTimeNanoseconds": job.epoch_ns,
        }
        return orjson.dumps(header)[:-1] + b',"traceEvents":[\n'

    def _annotate(self, span: Span, start: float, stop: float) -> None:
        name = f"ProfilerStep#{span.iteration - 1}"
        if span.spec.kind == "data":
            name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
        elif span.spec.name == "optimizer":
            name = "Optimizer.step#AdamW.step"
        self._host("user_annotation", name, self.process, start, stop - start)

    def _host(self, kind: str, name: str, thread: int, start: float, length: float) -> None:
        self.lines.append(
            f'{{"ph":"X","cat":"{kind}","name":"{name}","pid":{self.process},"tid":{thread},'
            f'"ts":{start:.3f},"dur":{max(length, 0.001):.3f},"args":{{}}}}'
        )

    def _node(self, launches: list[float]) -> None:
        """Note the node of autograd's graph that launched these kernels."""
        if launches:
            name = "autograd::engine::evaluate_function: MmBackward0"
            start = launches[0] - _LAUNCH_US - 0.5
            self._host("cpu_op", name, self.process + 1, start, launches[-1] - start + 0.2)

    def _launch(self, at: float, backward: bool) -> None:
        self.correlation += 1
        thread = self.process + 1 if backward else self.process
        self.lines.append(
            f'{{"ph":"X","cat":"cuda_runtime","name":"cudaLaunchKernel","pid":{self.process},'
            f'"tid":{thread},"ts":{at - _LAUNCH_US:.3f},"dur":{_CALL_US},'
            f'"args":{{"cbid":211,"correlation":{self.correlation}}}}}'
        )

    def _on_device(self, span: Span, start: float, stop: float) -> None:
        spec = span.spec
        if spec.kind == "kernel":
            known = self._known.get(spec)
            if known is None:
                known = self._known[spec] = self._kernel(spec)
            grid = spec.grid if span.sizes is None else int(span.sizes[self.rank])
            says = f'"grid":[{grid},1,1],"block":[{spec.block},1,1]'
            self._event(known, _COMPUTES, (start, stop), says)
            return
        named, kernel = _COLLECTIVES[spec.op]
        stream = _STREAMS.get(spec.axis, _OTHERS)
        if spec.op == "reduce_scatter" and spec.stream == "reduce":
            stream += 1
        size = spec.size if span.sizes is None else int(span.sizes[self.rank])
        ranks = self.groups[spec.axis]
        width, dtype = (4, "Float") if size < 1024 else (2, "BFloat16")
        taken = max(1, size // width)
        given = taken * len(ranks) if spec.op == "all_gather" else taken
        given = max(1, taken // len(ranks)) if spec.op == "reduce_scatter" else given
        group = self._name_of(spec.axis)
        number = self._sequences[group] = self._sequences.get(group, 0) + 1
        says = (
            f'"Collective name":"{named}","In msg nelems":{taken},"Out msg nelems":{given},'
            f'"Group size":{len(ranks)},"dtype":"{dtype}","Process Group Name":"{group}",'
            f'"Process Group Description":"{self._description(spec.axis)}",'
            f'"Process Group Ranks":"{list(ranks)}","Seq":{number},'
            f'"grid":[24,1,1],"block":[544,1,1]'
        )
        name = f"{kernel}(ncclDevKernelArgsStorage<4096ul>)"
        self._event(name, stream, (start, stop), says)

    def _kernel(self, spec: Spec) -> str:
        return f"void {spec.name}<c10::BFloat16>(Params)"

    def _event(self, name: str, stream: int, times: tuple[float, float], says: str) -> None:
        self.lines.append(
            f'{{"ph":"X","cat":"kernel","name":"{name}","pid":{self.device},"tid":{stream},'
            f'"ts":{times[0]:.3f},"dur":{max(times[1] - times[0], 0.001):.3f},"args":{{{says},'
            f'"stream":{stream},"device":{self.device},"correlation":{self.correlation}}}}}'
        )

    def _is_default(self, axis: str) -> bool:
        return axis == "world" or (self.job.trainer not in (MEGATRON, HSDP) and axis == "dp")

    def _name_of(self, axis: str) -> str:
        return "0" if self._is_default(axis) else self.names[axis, min(self.groups[axis])]

    def _description(self, axis: str) -> str:
        return "default_pg" if self._is_default(axis) else _DESCRIPTIONS.get(axis, "undefined")
