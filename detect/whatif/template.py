"""The dependencies between the operations of one step of an op table.

Taken from one replica in one step and used for all. Rules, after the artifact of "Understanding
Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025), for one stage:

    compute        one chain: all forwards and backwards
    p2p            four chains, one a type; the k-th receive comes before the k-th compute of its
                   direction, the k-th send after it; the k-th receive waits for compute k - 1
    parameters     params-all-gather of a chunk before its first forward; one chain with the
                   grads-reduce-scatters
    end            last compute, gc, layernorm, embedding, reduce-scatters, clip, optimizer
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from detect.whatif.graph import EACH_LANE, Graph, Group, Node, partition_of

FORWARD, BACKWARD = "forward-compute", "backward-compute"
GATHER, SCATTER = "params-all-gather", "grads-reduce-scatter"
SEPARATE, EMBEDDING = "separate-grads-all-reduce", "embedding-grads-all-reduce"
CLIP, OPTIMIZER = "optimizer-clip-main-grad", "optimizer"
GC, LAYERNORM = "gc", "layernorm-grads-all-reduce"
P2P = ("forward-send", "forward-recv", "backward-send", "backward-recv")
LOCAL_TYPES = frozenset((FORWARD, BACKWARD, OPTIMIZER, GC, LAYERNORM))
MEAN_TYPES = frozenset((FORWARD, BACKWARD, OPTIMIZER, GC))
"""Their ideal is the mean; that of all others is the median."""
TYPES = frozenset((*LOCAL_TYPES, *P2P, GATHER, SCATTER, SEPARATE, EMBEDDING, CLIP))

_TOLERANCE_S = 50e-6
_ALL_LANES = "all"


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A row of the template replica; `number` is its node."""

    number: int
    stage: int
    optype: str
    ordinal: int
    chunk: int
    start_s: float
    end_s: float


def build_graph(operations: list[Operation], num_lanes: int, *, reduces_gradients: bool) -> Graph:
    """Graph of the step that `operations`, numbered from 0 without gaps, are one replica of."""
    stages = _stages(operations)
    edges: dict[int, set[int]] = {operation.number: set() for operation in operations}
    for stage in stages:
        for before, after in _edges(stage, len(stages), reduces_gradients):
            edges[after.number].add(before.number)
    return Graph(
        nodes=tuple(
            Node(
                stage=o.stage,
                optype=o.optype,
                is_local=o.optype in LOCAL_TYPES,
                microbatch=o.ordinal if o.optype in (FORWARD, BACKWARD) else -1,
                chunk=o.chunk,
            )
            for o in operations
        ),
        dependencies=tuple(tuple(sorted(edges[o.number])) for o in operations),
        groups=tuple(_groups(operations, stages)),
        partitions={_ALL_LANES: partition_of([0] * num_lanes)},
        finish=tuple(o.number for o in operations if o.optype == OPTIMIZER),
    )


class _Stage:
    """Operations of one stage by type, in order."""

    def __init__(self, number: int, operations: list[Operation]) -> None:
        self.number = number
        self.by_type: dict[str, list[Operation]] = defaultdict(list)
        for operation in operations:
            self.by_type[operation.optype].append(operation)
        self.computes = [o for o in operations if o.optype in (FORWARD, BACKWARD)]

    def __getitem__(self, optype: str) -> list[Operation]:
        return self.by_type.get(optype, [])

    def computes_of(self, optype: str) -> list[Operation]:
        """Computes of a p2p type's direction."""
        return self[FORWARD if optype.startswith("forward") else BACKWARD]


def _stages(operations: list[Operation]) -> list[_Stage]:
    by_stage: dict[int, list[Operation]] = defaultdict(list)
    for operation in sorted(operations, key=lambda o: (o.start_s, o.ordinal, o.optype)):
        by_stage[operation.stage].append(operation)
    return [_Stage(number, by_stage[number]) for number in range(max(by_stage) + 1)]


Edge = tuple[Operation, Operation]


def _edges(stage: _Stage, num_stages: int, reduces_gradients: bool) -> Iterator[Edge]:
    yield from pairwise(stage.computes)
    for optype in P2P:
        yield from pairwise(stage[optype])
        yield from _p2p_edges(stage, optype, num_stages)
    yield from _warmup_edges(stage)
    yield from _parameter_edges(stage)
    tail = _overlapped_tail if stage[SEPARATE] else _plain_tail
    yield from tail(stage, reduces_gradients)


def _p2p_edges(stage: _Stage, optype: str, num_stages: int) -> Iterator[Edge]:
    computes = stage.computes_of(optype)
    if len(computes) != len(stage[optype]):
        computes = [o for o in computes if not _is_model_end(stage, optype, o.chunk, num_stages)]
    if optype.endswith("send"):
        yield from zip(computes, stage[optype], strict=False)
        return
    yield from zip(stage[optype], computes, strict=False)
    yield from zip(computes, stage[optype][1:], strict=False)


def _is_model_end(stage: _Stage, optype: str, chunk: int, num_stages: int) -> bool:
    """Whether a compute has no such message: nothing comes before the model, nothing after it."""
    if optype in ("forward-recv", "backward-send"):
        return (stage.number, chunk) == (0, 0)
    last_chunk = max((o.chunk for o in stage.computes), default=0)
    return (stage.number, chunk) == (num_stages - 1, last_chunk)


def _warmup_edges(stage: _Stage) -> Iterator[Edge]:
    """Backward exchanges are posted after the compute two before the first backward."""
    first = next((n for n, o in enumerate(stage.computes) if o.optype == BACKWARD), 0)
    if first >= 2:
        for optype in ("backward-send", "backward-recv"):
            for operation in stage[optype][:1]:
                yield stage.computes[first - 2], operation


def _parameter_edges(stage: _Stage) -> Iterator[Edge]:
    shared = sorted(stage[GATHER] + stage[SCATTER], key=lambda o: (o.start_s, o.ordinal, o.optype))
    yield from pairwise(shared)
    for gather in stage[GATHER]:
        first = next((o for o in stage[FORWARD] if o.chunk == gather.chunk), None)
        if first is not None:
            yield gather, first


def _chain(*parts: list[Operation]) -> Iterator[Edge]:
    """Every operation of a part after every one of the part before; empty parts are left out."""
    for before, after in pairwise([part for part in parts if part]):
        for first in before:
            for second in after:
                yield first, second


def _plain_tail(stage: _Stage, reduces_gradients: bool) -> Iterator[Edge]:
    scatters = stage[SCATTER] if reduces_gradients else []
    last = stage.computes[-1:]
    ends = (stage[GC], stage[LAYERNORM], stage[EMBEDDING], scatters, stage[CLIP], stage[OPTIMIZER])
    yield from _chain(last, *ends)


def _overlapped_tail(stage: _Stage, reduces_gradients: bool) -> Iterator[Edge]:
    """Gradients of a chunk are reduced as soon as its last backward is done."""
    scatters = stage[SCATTER] if reduces_gradients else []
    for scatter in scatters:
        of_chunk = [o for o in stage[BACKWARD] if o.chunk == scatter.chunk]
        yield from _chain(of_chunk[-1:], [scatter])
    yield from _chain(stage.computes[-1:], stage[GC])
    before_layernorm = scatters[-1:] + (stage[GC] or stage.computes[-1:])
    ends = (stage[LAYERNORM], stage[EMBEDDING], stage[SEPARATE], stage[CLIP], stage[OPTIMIZER])
    yield from _chain(before_layernorm, *ends)


def _groups(operations: list[Operation], stages: list[_Stage]) -> Iterator[Group]:
    grouped: set[int] = set()
    for group in (*_pairs(stages), *_collectives(stages)):
        grouped.update(group.nodes)
        yield group
    for operation in operations:
        if operation.number not in grouped:
            yield Group(nodes=(operation.number,))


def _pairs(stages: list[_Stage]) -> Iterator[Group]:
    for number, stage in enumerate(stages):
        for direction, step in (("forward", 1), ("backward", -1)):
            peer = stages[(number + step) % len(stages)]
            sends = _valid(stage, f"{direction}-send", len(stages))
            receives = _valid(peer, f"{direction}-recv", len(stages))
            for send, receive in zip(sends, receives, strict=False):
                yield Group(nodes=(send.number, receive.number))


def _valid(stage: _Stage, optype: str, num_stages: int) -> list[Operation]:
    """Messages that carry something.

    A schedule may also log empty exchanges: a receive after its last compute has begun, a send
    before the first one has ended, and with several chunks those at the two ends of the model.
    """
    computes = stage.computes_of(optype)
    if not computes:
        return []
    if optype.endswith("recv"):
        limit = max(o.start_s for o in computes) + _TOLERANCE_S
        kept = [o for o in stage[optype] if o.start_s <= limit]
    else:
        limit = min(o.end_s for o in computes) - _TOLERANCE_S
        kept = [o for o in stage[optype] if o.end_s >= limit]
    chunks = [o.chunk for o in computes]
    if max(chunks) < 1 or len(stage[optype]) != len(computes):
        return kept
    return [o for o in kept if not _is_model_end(stage, optype, chunks[o.ordinal], num_stages)]


def _collectives(stages: list[_Stage]) -> Iterator[Group]:
    for stage in stages:
        for optype in (GATHER, SCATTER, SEPARATE):
            for operation in stage[optype]:
                yield Group(nodes=(operation.number,), partition=_ALL_LANES)
    for optype, partition in ((EMBEDDING, EACH_LANE), (CLIP, _ALL_LANES)):
        by_ordinal: dict[int, list[int]] = defaultdict(list)
        for stage in stages:
            for operation in stage[optype]:
                by_ordinal[operation.ordinal].append(operation.number)
        for nodes in by_ordinal.values():
            yield Group(nodes=tuple(nodes), partition=partition)
