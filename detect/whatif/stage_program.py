"""The nodes of one pipeline stage, walked off one rank's marks and weighed on all ranks at once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from detect.whatif.graph import EACH_LANE, Floats, Node
from detect.whatif.marks import BEGIN, COMMUNICATION, END
from detect.whatif.span_columns import SpanColumns
from detect.whatif.stacking import Stack
from megascan.schema import NOT_APPLICABLE, Kind

FORWARD, BACKWARD, OPTIMIZER = "forward-compute", "backward-compute", "optimizer"
DATA, HOST, GC = "data-loading", "host", "gc"
PASS_TYPES = {"forward": FORWARD, "backward": BACKWARD}


@dataclass(kw_only=True)
class DraftNode:
    """A node before stages are joined; `dependencies` number nodes of the same stage.

    `weight_ns` (lane, iteration) is NaN where unknown. `match` ties it to nodes of other stages.
    `duration_ns` of a communication includes its wait.
    """

    node: Node
    dependencies: tuple[int, ...]
    weight_ns: Floats
    axis: str = EACH_LANE
    match: int = NOT_APPLICABLE
    duration_ns: Floats | None = None
    is_collective: bool = False


@dataclass(kw_only=True)
class StageProgram:
    """Nodes of a stage in program order; the last one is the end of the iteration."""

    stage: int
    nodes: list[DraftNode] = field(default_factory=list)


def stage_program(stack: Stack, spans: SpanColumns, stage: int, lane: int) -> StageProgram:
    """Walk the marks of `lane` and weigh every node on all lanes."""
    walk = _Walk(stack, spans, stage, lane)
    for number in range(walk.num_marks):
        walk.visit(number)
    walk.finish()
    return walk.program


class _Walk:
    """State of the walk: what the next work waits for, and what it is part of."""

    def __init__(self, stack: Stack, spans: SpanColumns, stage: int, lane: int) -> None:
        marks, own = stack.marks, stack.stages[stage]
        self.spans = spans
        self.program = StageProgram(stage=stage)
        self.present = own.present
        self.num_marks = own.index.shape[2]
        template = own.index[lane, 0]
        self.rows, self.edges = marks.row[template], marks.edge[template]
        self.keys = marks.key[template]
        self.row = marks.row[own.index]
        begin = stack.bounds[stage, :, :, 0]
        self.time = (marks.time_ns[own.index] - begin[:, :, None]).astype(np.float64)
        self.end = (marks.end_ns[own.index] - begin[:, :, None]).astype(np.float64)
        self.length = (stack.bounds[stage, :, :, 1] - begin).astype(np.float64)
        self.pauses = spans.pauses_ns[own.index].astype(np.float64)
        self.loading = spans.loading_ns[own.index].astype(np.float64)
        self.until = np.zeros_like(self.length)
        """End of what came before, (lane, iteration)."""
        self.waits_for: tuple[int, ...] = ()
        self.burst: list[int] = []
        self.burst_waits_for: tuple[int, ...] = ()
        self.pending: dict[int, int] = {}
        """Overlapped communication not yet consumed: mark to node."""
        self.open: list[tuple[str, int, int]] = []
        self.parts: Counter[tuple[str, int, int]] = Counter()

    # --- marks ---------------------------------------------------------------------------------

    def visit(self, number: int) -> None:
        """One mark: the work before it, then what it is."""
        edge = self.edges[number]
        if edge == COMMUNICATION and self._joins_burst(number):
            self._post(number)
            return
        self._consume(number)
        self._work(self.time[:, :, number], self.pauses[:, :, number], self.loading[:, :, number])
        self.burst = []
        if edge == COMMUNICATION:
            self.burst_waits_for = self.waits_for
            self._post(number)
        elif edge == BEGIN:
            self.open.append(self._context(number))
        elif edge == END and self.open:
            self.open.pop()

    def finish(self) -> None:
        """The work after the last mark, and the end of all that is still under way."""
        for mark in list(self.pending):
            self._wait_for(mark)
        nothing = np.zeros_like(self.length)
        self._work(self.length, nothing, nothing, always=True)

    def _joins_burst(self, number: int) -> bool:
        """Whether a message is posted while the one before it is still under way."""
        if not self.burst or self.spans.overlapped[self.rows[number]]:
            return False
        early = self.time[self.present, :, number] < self.until[self.present]
        return bool(early.mean() > 0.5)

    def _context(self, number: int) -> tuple[str, int, int]:
        row = self.rows[number]
        kind = self.spans.kind[row]
        name = self.spans.name[row]
        optype = OPTIMIZER if kind == Kind.OPTIMIZER else PASS_TYPES[name]
        return optype, int(self.spans.microbatch[row]), int(self.spans.chunk[row])

    # --- nodes ---------------------------------------------------------------------------------

    def _add(self, draft: DraftNode) -> int:
        for times in (draft.weight_ns, draft.duration_ns):
            if times is not None:
                times[~self.present] = np.nan
        self.program.nodes.append(draft)
        return len(self.program.nodes) - 1

    def _work(self, until: Floats, pauses: Floats, loading: Floats, always: bool = False) -> None:
        """Local work up to an instant; none where there is no time for it on any rank.

        Loading and pauses are told apart from it; a pause only by what the work took too long.
        """
        work = np.maximum(until - self.until, 0.0)
        self.until = np.maximum(self.until, until)
        if not always and not work[self.present].any():
            return
        optype, microbatch, chunk = self.open[-1] if self.open else (HOST, -1, -1)
        loading = np.minimum(loading, work)
        rest = work - loading
        usual = np.median(rest[self.present])
        pauses = np.minimum(pauses, np.maximum(rest - usual, 0.0))
        for kind, part in ((DATA, loading), (GC, pauses)):
            if part[self.present].any():
                self._local(kind, microbatch, chunk, part)
        self._local(optype, microbatch, chunk, rest - pauses)

    def _local(self, optype: str, microbatch: int, chunk: int, weight_ns: Floats) -> None:
        place = (optype, microbatch, chunk)
        node = Node(
            stage=self.program.stage,
            optype=optype,
            is_local=True,
            microbatch=microbatch,
            chunk=chunk,
            part=self.parts[place],
        )
        self.parts[place] += 1
        number = self._add(DraftNode(node=node, dependencies=self.waits_for, weight_ns=weight_ns))
        self.waits_for = (number,)

    def _post(self, number: int) -> None:
        """A communication; a synchronous one holds up what follows."""
        row = self.rows[number]
        if self.spans.overlapped[row]:
            self.pending[number] = self._communication(number, self.waits_for)
            return
        node = self._communication(number, self.burst_waits_for)
        self.waits_for = (node,) if not self.burst else (*self.waits_for, node)
        self.burst.append(number)
        self.until = np.maximum(self.until, self.end[:, :, number])
        if len(self.burst) > 1:
            self._weigh_burst()

    def _communication(self, number: int, waits_for: tuple[int, ...]) -> int:
        row, spans = self.rows[number], self.spans
        group = spans.group[row].partition("@")[0]
        op = spans.op[row]
        direction = spans.direction[row]
        is_message = spans.kind[row] == Kind.P2P
        duration = self.end[:, :, number] - self.time[:, :, number]
        waited = spans.wait_ns[self.row[:, :, number]].astype(np.float64)
        transfer = np.where(waited >= 0, duration - waited, np.nan)
        node = Node(
            stage=self.program.stage,
            optype=f"{direction}-{op}" if is_message else f"{group}-{op}",
            is_local=False,
            microbatch=int(spans.microbatch[row]),
            chunk=int(spans.chunk[row]),
            size_bytes=int(spans.size_bytes[row]),
        )
        return self._add(
            DraftNode(
                node=node,
                dependencies=waits_for,
                weight_ns=transfer,
                duration_ns=duration,
                axis=EACH_LANE if is_message else group,
                match=int(spans.match[row]),
                is_collective=not is_message,
            )
        )

    def _weigh_burst(self) -> None:
        """Messages of one exchange end together: none began before the last of all partners."""
        numbers_ = self.burst
        waited = self.spans.wait_ns[self.row[:, :, numbers_]].astype(np.float64)
        begun = (self.time[:, :, numbers_] + np.maximum(waited, 0.0)).max(axis=2)
        for number, node in zip(numbers_, self.waits_for, strict=True):
            draft = self.program.nodes[node]
            if not draft.is_collective:
                draft.weight_ns = np.maximum(self.end[:, :, number] - begun, 0.0)
                draft.weight_ns[~self.present] = np.nan

    # --- overlapped communication ----------------------------------------------------------------

    def _consume(self, number: int) -> None:
        """Wait for the overlapped communication that the work before this mark needs."""
        for mark in list(self.pending):
            if self._is_consumed(mark, number):
                self._wait_for(mark)

    def _is_consumed(self, mark: int, number: int) -> bool:
        """Gradients are waited for in the optimizer, the rest as soon as it is there."""
        spans, row = self.spans, self.rows[mark]
        group = spans.group[row]
        op = spans.op[row]
        if op == "send":
            return False
        if group.startswith("dp") and op != "all_gather":
            return bool(self.open) and self.open[-1][0] == OPTIMIZER
        if op == "recv" and self.edges[number] == BEGIN:
            return self._feeds(row, number)
        late = self.end[self.present, :, mark] <= self.time[self.present, :, number]
        return bool(late.mean() > 0.5) and not (op == "recv" and spans.microbatch[row] >= 0)

    def _feeds(self, row: int, number: int) -> bool:
        """Whether a received tensor is the input of the pass that begins at a mark."""
        spans = self.spans
        optype, microbatch, chunk = self._context(number)
        direction = spans.direction[row]
        return (PASS_TYPES.get(direction), spans.microbatch[row], spans.chunk[row]) == (
            optype,
            microbatch,
            chunk,
        )

    def _wait_for(self, mark: int) -> None:
        self.waits_for = tuple(sorted({*self.waits_for, self.pending.pop(mark)}))
        self.until = np.maximum(self.until, np.minimum(self.end[:, :, mark], self.length))
