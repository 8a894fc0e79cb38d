"""Write down what one rank's host thread issues: layers, passes, loading, the update.

Data-parallel reductions go beside the last backward where the job overlaps them, else all at the
end; parameters of a distributed optimizer are gathered after the update, or beside the first
forward. Reductions of tensor parallelism in the backward go beside the weight gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from benchmarks.grounds.formats.job import Job
from benchmarks.grounds.formats.model import Costing, Kernel
from benchmarks.grounds.formats.program import (
    Code,
    Communication,
    Operation,
    Program,
    SpanPlan,
)

OVERLAP_SLOWS = 1.04  # kernels that share the chip with a reduction
LOADER, PAUSE, LOG = "loader", "pause", "log"
"""Names of host operations that something else may lengthen."""


class Trainer:
    """Appends one rank's operations to a program."""

    def __init__(self, program: Program, job: Job, costing: Costing, rank: int) -> None:
        self.program, self.job, self.rank = program, job, rank
        self.costing = costing
        place = job.shape.place(rank)
        self.stage, self._tp = place["pp"], place["tp"]
        self._issued: Counter[tuple[str, str]] = Counter()
        self._microbatch = self._chunk = self._layer = -1
        self._phase = ""
        self._is_last_backward = False
        self._launch_ns = job.launch_us * 1e3
        self._reductions: list[int] = []
        self._gathers: dict[int, int] = {}  # chunk: communication

    # small steps

    def _add(self, code: Code, name: str, **given: object) -> int:
        operation = Operation(
            code=code, rank=self.rank, name=name, microbatch=self._microbatch, chunk=self._chunk,
            layer=self._layer, phase=self._phase,
        )  # fmt: skip
        for key, value in given.items():
            setattr(operation, key, value)
        return self.program.add(operation)

    def mark(self) -> int:
        """Take the time of the compute stream."""
        return self._add(Code.MARK, "mark")

    def kernels(self, kernels: Iterable[Kernel]) -> None:
        """Launch kernels on the compute stream."""
        slowed = OVERLAP_SLOWS if self._is_last_backward and self.job.overlap else 1.0
        for one in kernels:
            self._add(
                Code.KERNEL, f"{one.operator}|{one.name}", host_ns=self._launch_ns,
                cost_ns=one.cost_ns * slowed, bound=one.bound, expert=one.expert,
            )  # fmt: skip

    def python(self, share: float = 1.0) -> None:
        """Let the host thread compute."""
        self._add(Code.HOST, "python", host_ns=share * self.job.module_us * 1e3)

    def pause(self, name: str = PAUSE) -> int:
        """Leave a place where the host thread may be held up."""
        return self._add(Code.HOST, name)

    def sync(self) -> None:
        """Let the host thread wait for the device."""
        self._add(Code.SYNC, "sync", host_ns=4_000.0)

    def span(self, name: str, begin: int, end: int, *, kind: str = "compute", full: bool = False,
             layer: int = -1) -> None:  # fmt: skip
        """Note a span between two marks, of the pass that is under way."""
        self.program.spans.append(
            SpanPlan(
                self.rank, name, kind, begin, end, self._microbatch, self._chunk, layer,
                self._phase if kind == "compute" else "", full,
            )
        )  # fmt: skip

    def collective(
        self, axis: str, op: str, size_bytes: float, *, stream: str = "", synchronous: bool = True,
        rooted: bool = False,
    ) -> int:  # fmt: skip
        """Take part in a collective of a group; return its number, -1 where the rank is alone."""
        members = self.job.shape.members(axis, self.rank)
        if len(members) < 2:
            return -1
        group = f"{axis}@{min(members)}"
        sequence = self._issued[group, op]
        self._issued[group, op] += 1
        made = Communication(
            group, op, int(size_bytes), members, sequence, members[0] if rooted else -1
        )
        number = self.program.communication((group, op, sequence), made)
        self._add(
            Code.JOIN, op, host_ns=1.6 * self._launch_ns, communication=number,
            stream=stream or group, synchronous=synchronous,
        )  # fmt: skip
        return number

    def wait(self, communication: int) -> None:
        """Let the compute stream wait for a communication."""
        if communication >= 0:
            self._add(Code.WAIT, "wait", communication=communication)

    # parts of the model

    def _dense(self, beside: list[Kernel], size_bytes: float) -> None:
        number = self.collective("tp", "all_reduce", size_bytes, synchronous=False)
        self.kernels(beside)
        self.wait(number)

    def _layer_forward(self, layer: int, suffix: str, begin: int) -> int:
        """Run a layer forward, for the first time or again; return the mark at its end."""
        costing, job = self.costing, self.job
        self._layer = layer
        self.python()
        if job.shape.cp > 1:
            self.collective("cp", "all_gather", 2 * costing.activation_bytes * job.shape.cp)
        self.kernels(costing.attention_forward)
        self.collective("tp", "all_reduce", costing.activation_bytes)
        middle = self.mark()
        self.python()
        if job.num_experts:
            self.kernels(costing.router)
            self.collective("ep", "all_to_all", 2 * costing.activation_bytes)
            self.kernels(costing.experts(1.0))
            self.collective("ep", "all_to_all", 2 * costing.activation_bytes)
        else:
            self.kernels(costing.mlp_forward)
            self.collective("tp", "all_reduce", costing.activation_bytes)
        end = self.mark()
        wide = "moe" if job.num_experts else "mlp"
        self.span(f"attention{suffix}", begin, middle, full=True, layer=layer)
        self.span(f"{wide}{suffix}", middle, end, full=True, layer=layer)
        self.span(f"transformer_layer{suffix}", begin, end, full=True, layer=layer)
        self._layer = -1
        return end

    def _layer_backward(self, layer: int, begin: int) -> int:
        costing, job = self.costing, self.job
        if job.recompute:
            self._phase = "recompute"
            begin = self._layer_forward(layer, "-recompute", begin)
            self._phase = "backward"
        self._layer = layer
        self.python(0.6)
        if job.num_experts:
            self.collective("ep", "all_to_all", 2 * costing.activation_bytes)
            self.kernels(costing.experts(2.0))
            self.collective("ep", "all_to_all", 2 * costing.activation_bytes)
        else:
            first, beside = costing.mlp_backward
            self.kernels(first)
            self._dense(beside, costing.activation_bytes)
        self.kernels(costing.norm_backward)
        middle = self.mark()
        self.python(0.6)
        first, beside = costing.attention_backward
        self.kernels(first)
        self._dense(beside, costing.activation_bytes)
        if job.shape.cp > 1:
            self.collective("cp", "reduce_scatter", 2 * costing.activation_bytes * job.shape.cp)
        self.kernels(costing.norm_backward)
        end = self.mark()
        wide = "moe" if job.num_experts else "mlp"
        self.span(f"{wide}-backward", begin, middle, full=True, layer=layer)
        self.span("attention-backward", middle, end, full=True, layer=layer)
        self.span("transformer_layer-backward", begin, end, full=True, layer=layer)
        self._layer = -1
        return end

    # passes

    def load(self, microbatch: int, chunk: int) -> None:
        """Take a batch: the first rank of a TP group loads, the others get it from there."""
        first, last = self.job.is_first(self.stage, chunk), self.job.is_last(self.stage, chunk)
        if not (first or last):
            return
        if self._tp == 0:
            number = self._add(Code.HOST, LOADER, host_ns=self.job.loader_us * 1e3)
            self.program.spans.append(
                SpanPlan(self.rank, "batch-generator", "data", number, number, microbatch, chunk)
            )
        self.collective("tp", "broadcast", 16 * self.job.sequence * self.job.batch, rooted=True)

    def forward(self, microbatch: int, chunk: int) -> None:
        """Run one microbatch forward through one chunk."""
        job, costing = self.job, self.costing
        self._microbatch, self._chunk, self._phase = microbatch, chunk, "forward"
        self.pause()
        self.wait(self._gathers.pop(chunk, -1))
        begin = mark = self.mark()
        self.python(2.0)
        self.load(microbatch, chunk)
        if job.is_first(self.stage, chunk):
            mark = self.mark()
            self.kernels(costing.embedding(backward=False))
            self.collective("tp", "all_reduce", costing.activation_bytes)
            end = self.mark()
            self.span("embedding", mark, end, full=True)
            mark = end
        else:
            mark = self.mark()
        decoder = mark
        for layer in job.layers_of(self.stage, chunk):
            mark = self._layer_forward(layer, "", mark)
        self.span("decoder", decoder, mark, full=True)
        if job.is_last(self.stage, chunk):
            self._loss(mark)
        self.span("forward", begin, self.mark())
        self._microbatch = self._chunk = -1
        self._phase = ""

    def _loss(self, mark: int) -> None:
        self.python()
        self.kernels(self.costing.output(backward=False))
        end = self.mark()
        self.span("output_layer", mark, end, full=True)
        self.kernels(self.costing.loss(backward=False))
        self.collective("tp", "all_reduce", 4 * self.costing.tokens)
        begin = self.mark()
        self.kernels(self.costing.router[:1])
        if self.job.loss_reduced:
            self.collective("dp", "all_reduce", 8)
        self.span("loss", begin, self.mark())

    def backward(self, microbatch: int, chunk: int, *, is_last: bool) -> None:
        """Run one microbatch backward through one chunk; reduce gradients beside the last one."""
        job, costing = self.job, self.costing
        self._microbatch, self._chunk, self._phase = microbatch, chunk, "backward"
        self._is_last_backward = is_last
        self.pause()
        begin = mark = self.mark()
        self.python()
        if job.is_last(self.stage, chunk):
            self.kernels(costing.loss(backward=True) + costing.output(backward=True))
            end = self.mark()
            self.span("output_layer-backward", mark, end, full=True)
            mark = end
        for layer in reversed(job.layers_of(self.stage, chunk)):
            mark = self._layer_backward(layer, mark)
        if job.is_first(self.stage, chunk):
            self.kernels(costing.embedding(backward=True))
            end = self.mark()
            self.span("embedding-backward", mark, end, full=True)
        self.span("backward", begin, self.mark())
        self._microbatch = self._chunk = -1
        self._phase = ""
        if is_last and job.overlap:
            self.reduce_gradients(chunk)
        self._is_last_backward = False

    # the update

    def reduce_gradients(self, chunk: int) -> None:
        """Launch the reduction of a chunk's gradients; somebody waits for it later."""
        job = self.job
        op = "reduce_scatter" if job.distributed_optimizer else "all_reduce"
        size = 4 * self.costing.parameters(self.stage, chunk)
        self._reductions.append(self.collective("dp_cp", op, size, synchronous=False))
        if job.num_experts:
            self._reductions.append(self.collective("expt_dp", op, size, synchronous=False))

    def begin_iteration(self) -> int:
        """Clear gradients, meet the others where the job does so, gather parameters."""
        job = self.job
        self.pause(LOG)
        if job.barrier:
            self.collective("world", "barrier", 1)
            self.sync()
        begin = self.mark()
        self.pause()
        self.kernels([self.costing.zeroing(self.stage)])
        if job.distributed_optimizer and job.overlap:
            for chunk in range(job.shape.vpp):
                size = 2 * self.costing.parameters(self.stage, chunk)
                number = self.collective("dp_cp", "all_gather", size, synchronous=False)
                self._gathers[chunk] = number
        return begin

    def finish_iteration(self, begin: int) -> None:
        """Finish gradients, step the optimizer, wait for the device."""
        job, shape = self.job, self.job.shape
        start = self.mark()
        self.python(2.0)
        if not job.overlap:
            for chunk in range(shape.vpp):
                self.reduce_gradients(chunk)
        for number in self._reductions:
            self.wait(number)
        ends = self.stage in (0, shape.pp - 1)
        if job.tied and shape.pp > 1 and ends:
            self.collective("embd", "all_reduce", 2 * job.vocabulary * job.hidden / shape.tp)
        middle = self.mark()
        self.span("grad-sync", start, middle, kind="optimizer")
        self.python(2.0)
        norm, *steps = self.costing.update(self.stage)
        self.kernels([norm])
        self.collective("world" if job.distributed_optimizer else "mp", "all_reduce", 4)
        self.sync()
        self.kernels(steps)
        if job.distributed_optimizer and not job.overlap:
            for chunk in range(shape.vpp):
                self.collective(
                    "dp_cp", "all_gather", 2 * self.costing.parameters(self.stage, chunk)
                )
        end = self.mark()
        self.span("optimizer", middle, end, kind="optimizer")
        self.sync()
        finish = self.mark()
        self.span("iteration", begin, finish, kind="iteration")
