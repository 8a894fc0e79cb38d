"""From a job to one program a stage: passes, exchanges, and the end of the iteration."""

from __future__ import annotations

from megascan.schema import Granularity, Kind, Phase, Track
from megascan.simulate.communications import Communications
from megascan.simulate.job import JobModel
from megascan.simulate.passes import Passes
from megascan.simulate.program import (
    Code,
    ExchangeEnd,
    SpanTemplate,
    StageProgram,
    TransferRow,
    Work,
)
from megascan.simulate.schedule import Exchange, Pass, Transfer, stage_steps


def _recorded_order(transfer: Transfer) -> int:
    names = ("send_backward", "recv_forward", "send_forward", "recv_backward")
    return names.index(f"{transfer.op}_{transfer.direction}")


def compile_job(job: JobModel) -> list[StageProgram]:
    """One program a stage. Raises ConfigError for sizes that the schedule refuses."""
    layout = job.layout
    orders = stage_steps(layout.pp, layout.vpp, job.num_microbatches)
    programs = []
    for stage, order in enumerate(orders):
        compiler = _StageCompiler(job, stage)
        compiler.iteration(order)
        programs.append(compiler.program)
    return programs


class _StageCompiler:
    """Writes the program of one stage."""

    def __init__(self, job: JobModel, stage: int) -> None:
        self.job, self.stage, self.costs = job, stage, job.costs
        self.full = job.granularity == Granularity.FULL
        self.program = StageProgram(stage)
        self.passes = Passes(job, self.program)
        self.communications = Communications(job, self.program)

    def iteration(self, order: tuple[Pass | Exchange, ...]) -> None:
        """All of it, from first load to checkpoint."""
        program = self.program
        whole = program.open(SpanTemplate(kind=Kind.ITERATION, name="iteration"))
        pause = (
            SpanTemplate(kind=Kind.GC, name="gc-generation-2", track=Track.HOST)
            if self.full
            else None
        )
        for number, step in enumerate(order):
            if number == len(order) // 2:
                program.simple(Code.PAUSE, pause)
            if isinstance(step, Exchange):
                self._exchange(step)
            elif step.phase == Phase.FORWARD:
                self.passes.forward(step)
            else:
                self.passes.backward(step)
        self._gradient_sync()
        self._optimizer()
        program.simple(Code.SYNCHRONIZE)
        program.close(whole)
        if self.job.imbalance.checkpoint_interval:
            save = SpanTemplate(kind=Kind.CHECKPOINT, name="save-checkpoint", track=Track.HOST)
            program.simple(Code.SAVE, save if self.full else None)
        program.compute(self.costs.between_iterations_ns, work=Work.HOST)
        program.simple(Code.SYNCHRONIZE)

    def _exchange(self, step: Exchange) -> None:
        """Spans of a batch stand in the tracer's order: previous stage first, sends first."""
        ends, templates = [], []
        for transfer in sorted(step.transfers, key=_recorded_order):
            if transfer.op == "recv":
                self.program.transfer_rows.append(
                    TransferRow(self.costs.pipeline_ns, "pp", transfer.peer_stage)
                )
            row = len(self.program.transfer_rows) - 1
            ends.append(
                ExchangeEnd(
                    transfer.peer_stage, transfer.op, transfer.direction, transfer.sequence, row
                )
            )
            templates.append(
                SpanTemplate(
                    kind=Kind.P2P,
                    name=f"{transfer.op}_{transfer.direction}",
                    track=Track.COMMUNICATION,
                    microbatch=transfer.microbatch,
                    chunk=transfer.chunk,
                    op=transfer.op,
                    direction=str(transfer.direction),
                    peer_stage=transfer.peer_stage,
                    axis="pp",
                    sequence=transfer.sequence,
                    size_bytes=self.costs.activation_bytes,
                )
            )
        self.program.exchange(tuple(ends), templates)

    def _gradient_sync(self) -> None:
        program, costs, layout = self.program, self.costs, self.job.layout
        last = self.stage == layout.pp - 1
        span = program.open(SpanTemplate(kind=Kind.OPTIMIZER, name="grad-sync"))
        op = "reduce_scatter" if self.job.distributed_optimizer else "all_reduce"
        ratio = 1 if self.job.distributed_optimizer else 2
        self.communications.collective(op, "dp_cp", costs.gradient_ns * ratio, costs.gradient_bytes)
        if self.job.tied_embeddings and layout.pp > 1 and (last or self.stage == 0):
            self.communications.join("embd", costs.embedding_sync_ns, costs.embedding_bytes)
        program.close(span)
        if last:  # the trainer averages the loss of its replicas
            self.communications.collective("all_reduce", "dp_cp", costs.norm_sync_ns, 8)

    def _optimizer(self) -> None:
        """Gradient norm, update, and the gathering of parameters that were updated in shards."""
        program, costs = self.program, self.costs
        span = program.open(SpanTemplate(kind=Kind.OPTIMIZER, name="optimizer"))
        axis = "intra_dist_opt" if self.job.distributed_optimizer else "mp"
        self.communications.join(axis, costs.norm_sync_ns, 4)
        program.compute(costs.optimizer_ns)
        if self.job.distributed_optimizer:
            self.communications.collective(
                "all_gather", "dp_cp", costs.parameter_ns, costs.parameter_bytes
            )
        program.close(span)
