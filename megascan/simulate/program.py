"""What one stage does in an iteration, compiled once: instructions, spans, and rows of costs.

Every instruction acts on all ranks of the stage at once. Compute and transfer costs are numbered
rows; `megascan.simulate.draws` gives each row a value per rank and iteration.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum

from megascan.schema import NOT_APPLICABLE, Kind, Phase, Track


class Code(IntEnum):
    """Instructions of a stage."""

    OPEN = 0
    """A span starts."""
    CLOSE = 1
    COMPUTE = 2
    """The host launches, the device computes; a leaf span, if any, starts with it."""
    COLLECTIVE = 3
    """A communication within the stage, with its span."""
    POST = 4
    """The stage reaches an exchange or a collective across stages."""
    WAIT = 5
    """It leaves the exchange: all its transfers are done."""
    JOIN = 6
    """It leaves a collective across stages."""
    PAUSE = 7
    """The host stands still (garbage collection)."""
    SYNCHRONIZE = 8
    """Host and device wait for each other."""
    SAVE = 9
    """A checkpoint is written, in some iterations."""
    LAUNCH = 10
    """An overlapped collective begins; computation goes on."""
    FINISH = 11
    """Computation needs its result."""
    HOST_OPEN = 12
    """A span starts by the host's time, which on a GPU is ahead of the device's."""
    HOST_CLOSE = 13


class Work(StrEnum):
    """What a compute row is, and so which faults and imbalances touch it."""

    DEVICE = "device"
    LOAD = "load"
    HOST = "host"


NO_SPAN = -1


@dataclass(frozen=True, kw_only=True)
class SpanTemplate:
    """One span of every iteration of a stage's ranks; fields as the columns of a trace.

    `axis` becomes the group id and `peer_stage` the peer's rank.
    """

    kind: Kind
    name: str
    track: Track = Track.COMPUTE
    microbatch: int = NOT_APPLICABLE
    chunk: int = NOT_APPLICABLE
    layer: int = NOT_APPLICABLE
    phase: str = ""
    op: str = ""
    axis: str = ""
    sequence: int = NOT_APPLICABLE
    size_bytes: int = NOT_APPLICABLE
    peer_stage: int = NOT_APPLICABLE
    direction: str = ""


@dataclass(frozen=True)
class ComputeRow:
    """Cost of one computation; `microbatch` ties it to that microbatch's length."""

    nominal_ns: float
    work: Work
    microbatch: int


@dataclass(frozen=True)
class TransferRow:
    """Cost of one communication; for p2p the peer's stage, on the receiving side."""

    nominal_ns: float
    axis: str
    peer_stage: int = NOT_APPLICABLE


@dataclass(frozen=True)
class Instruction:
    """`span` is the first of `num_spans` spans it touches, `row` its row, `slot` its post."""

    code: Code
    span: int = NO_SPAN
    num_spans: int = 0
    row: int = 0
    axis: str = ""
    slot: int = 0


@dataclass(frozen=True)
class ExchangeEnd:
    """One transfer of an exchange, seen from one side; `row` is set on the receiving side."""

    peer_stage: int
    op: str
    direction: Phase
    sequence: int
    row: int


@dataclass
class StageProgram:
    """Instructions of a stage and what they refer to. Built by `compiler`, then only read."""

    stage: int
    instructions: list[Instruction] = field(default_factory=list)
    spans: list[SpanTemplate] = field(default_factory=list)
    compute_rows: list[ComputeRow] = field(default_factory=list)
    transfer_rows: list[TransferRow] = field(default_factory=list)
    exchanges: dict[int, tuple[ExchangeEnd, ...]] = field(default_factory=dict)
    """By post slot."""
    num_slots: int = 0
    _sequences: Counter[tuple[str, str]] = field(default_factory=Counter)

    def open(self, template: SpanTemplate) -> int:
        """Start a span; returns its number for `close`."""
        self.spans.append(template)
        span = len(self.spans) - 1
        on_host = template.track == Track.HOST
        self.instructions.append(Instruction(Code.HOST_OPEN if on_host else Code.OPEN, span))
        return span

    def close(self, span: int) -> None:
        """End a span; NO_SPAN is one that is not recorded."""
        if span != NO_SPAN:
            on_host = self.spans[span].track == Track.HOST
            self.instructions.append(Instruction(Code.HOST_CLOSE if on_host else Code.CLOSE, span))

    def compute(
        self,
        nominal_ns: float,
        microbatch: int = NOT_APPLICABLE,
        work: Work = Work.DEVICE,
        leaf: SpanTemplate | None = None,
    ) -> int:
        """A computation; `leaf` is a span that starts with it. Returns that span's number."""
        span = NO_SPAN
        if leaf is not None:
            self.spans.append(leaf)
            span = len(self.spans) - 1
        self.compute_rows.append(ComputeRow(nominal_ns, work, microbatch))
        row = len(self.compute_rows) - 1
        self.instructions.append(Instruction(Code.COMPUTE, span, row=row))
        return span

    def _collective_span(self, op: str, axis: str, template: SpanTemplate | None) -> int:
        if template is None:
            return NO_SPAN
        sequence = self._sequences[axis, op]
        self._sequences[axis, op] += 1
        values = dict(template.__dict__) | {"sequence": sequence, "axis": axis, "op": op}
        self.spans.append(SpanTemplate(**values))
        return len(self.spans) - 1

    def collective(
        self, op: str, axis: str, nominal_ns: float, template: SpanTemplate | None
    ) -> None:
        """A collective among ranks of this stage; unrecorded without a template."""
        span = self._collective_span(op, axis, template)
        self.transfer_rows.append(TransferRow(nominal_ns, axis))
        row = len(self.transfer_rows) - 1
        self.instructions.append(Instruction(Code.COLLECTIVE, span, row=row, axis=axis))

    def launch(
        self, op: str, axis: str, nominal_ns: float, template: SpanTemplate | None
    ) -> Instruction:
        """Begin a collective beside the computation; returns what `finish` takes."""
        span = self._collective_span(op, axis, template)
        self.transfer_rows.append(TransferRow(nominal_ns, axis))
        row, slot = len(self.transfer_rows) - 1, self.num_slots
        self.num_slots += 1
        begin = Instruction(Code.LAUNCH, span, row=row, axis=axis, slot=slot)
        self.instructions.append(begin)
        return replace(begin, code=Code.FINISH)

    def finish(self, pending: Instruction) -> None:
        """Wait for a collective that was launched."""
        self.instructions.append(pending)

    def join(self, op: str, axis: str, nominal_ns: float, template: SpanTemplate | None) -> None:
        """A collective across stages."""
        span = self._collective_span(op, axis, template)
        self.transfer_rows.append(TransferRow(nominal_ns, axis))
        row, slot = len(self.transfer_rows) - 1, self.num_slots
        self.num_slots += 1
        self.instructions.append(Instruction(Code.POST, span, int(span != NO_SPAN), slot=slot))
        self.instructions.append(
            Instruction(Code.JOIN, span, int(span != NO_SPAN), row=row, axis=axis, slot=slot)
        )

    def exchange(self, ends: tuple[ExchangeEnd, ...], templates: list[SpanTemplate]) -> None:
        """A batch of sends and receives; their spans share start and end."""
        span, slot = len(self.spans), self.num_slots
        self.num_slots += 1
        self.spans.extend(templates)
        self.exchanges[slot] = ends
        for code in (Code.POST, Code.WAIT):
            self.instructions.append(Instruction(code, span, len(templates), slot=slot))

    def simple(self, code: Code, template: SpanTemplate | None = None) -> None:
        """An instruction without a row (PAUSE, SYNCHRONIZE, SAVE)."""
        span = NO_SPAN
        if template is not None:
            self.spans.append(template)
            span = len(self.spans) - 1
        self.instructions.append(Instruction(code, span))
