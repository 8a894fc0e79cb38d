"""Collectives of a stage: which are recorded, and on which groups they exist at all."""

from __future__ import annotations

from dataclasses import replace

from megascan.schema import NOT_APPLICABLE, Granularity, Kind, Track
from megascan.simulate.grid import Grid
from megascan.simulate.job import JobModel
from megascan.simulate.program import Instruction, SpanTemplate, StageProgram
from megascan.simulate.schedule import Pass


class Communications:
    """Adds collectives to a program; on an axis of size 1 there are none."""

    def __init__(self, job: JobModel, program: StageProgram) -> None:
        self._costs, self._grid, self._program = job.costs, Grid(job.layout), program
        self._full = job.granularity == Granularity.FULL

    def _template(self, op: str, axis: str, size_bytes: int) -> SpanTemplate | None:
        """Span of a collective; base granularity records only those over data parallelism."""
        if not self._full and axis != "dp_cp":
            return None
        return SpanTemplate(
            kind=Kind.COLLECTIVE, name=op, track=Track.COMMUNICATION, size_bytes=size_bytes
        )

    def collective(
        self,
        op: str,
        axis: str,
        nominal_ns: float,
        size_bytes: int,
        *,
        step: Pass | None = None,
        layer: int = NOT_APPLICABLE,
    ) -> None:
        """One within the stage; `step` and `layer` say where in the iteration it stands."""
        if self._grid.size(axis) < 2:
            return
        template = self._template(op, axis, size_bytes)
        if template is not None and step is not None:
            template = replace(
                template,
                microbatch=step.microbatch,
                chunk=step.chunk,
                phase=str(step.phase),
                layer=layer,
            )
        self._program.collective(op, axis, nominal_ns, template)

    def tensor_all_reduce(self, step: Pass, layer: int = NOT_APPLICABLE) -> None:
        """The sum of partial activations over tensor parallelism."""
        costs = self._costs
        self.collective(
            "all_reduce", "tp", costs.tensor_ns, costs.activation_bytes, step=step, layer=layer
        )

    def launch_tensor_all_reduce(self, step: Pass) -> Instruction | None:
        """The sum of partial gradients, beside the weights' gradients; None without TP."""
        if self._grid.size("tp") < 2:
            return None
        template = self._template("all_reduce", "tp", self._costs.activation_bytes)
        if template is not None:
            template = replace(
                template,
                track=Track.OVERLAPPED,
                microbatch=step.microbatch,
                chunk=step.chunk,
                phase=str(step.phase),
            )
        return self._program.launch("all_reduce", "tp", self._costs.tensor_ns, template)

    def join(self, axis: str, nominal_ns: float, size_bytes: int) -> None:
        """An all_reduce across stages."""
        if self._grid.size(axis) > 1:
            template = self._template("all_reduce", axis, size_bytes)
            self._program.join("all_reduce", axis, nominal_ns, template)
