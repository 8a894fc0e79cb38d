"""A predicted step as a picture: lines of text, or a timeline for Perfetto.

rank 0  F0   F1   ·····     B0        B1
rank 1       F0   B0        F1   B1
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from megascan.header import ClockOrigin, Device, RankHeader, computed_header
from megascan.schema import NOT_APPLICABLE, TIMELINE_COLUMNS, Kind, Phase, Track
from megascan.timeline import TIMELINE_SCHEMA, Completeness, Timeline
from megascan.topology import Layout
from megascan.vocabulary import BACKWARD, BACKWARD_WEIGHTS, FORWARD
from training.pipeline.costs import even_costs
from training.pipeline.generators import depth_first
from training.pipeline.plan import ActionKind, PipelineShape, Placement, Plan
from training.pipeline.simulator import Prediction, Timed, predict
from training.pipeline.validity import forward_order, numerics_note

_SPANS = {
    ActionKind.FORWARD: (FORWARD, Phase.FORWARD),
    ActionKind.RECOMPUTE: (FORWARD, Phase.RECOMPUTE),
    ActionKind.BACKWARD: (BACKWARD, Phase.BACKWARD),
    ActionKind.INPUT_GRADIENT: (BACKWARD, Phase.BACKWARD),
    ActionKind.WEIGHT_GRADIENT: (BACKWARD_WEIGHTS, Phase.BACKWARD),
}
"""Names as the tracer gives them to the same work."""
_NS_PER_S = 1e9


def describe(plan: Plan) -> str:
    """Return a plan as text, with even costs: its picture, time, memory, and order of sums."""
    shape = plan.shape
    table = even_costs(shape).table(shape)
    prediction = predict(plan, table)
    lines = [
        draw_text(prediction, shape),
        f"{shape.num_ranks} pipeline ranks, {shape.num_chunks} chunk(s) each, "
        f"{shape.num_microbatches} microbatches; {prediction.bubble_ratio:.1%} of the time waiting "
        "with even stages",
        f"held at most, microbatches by rank: {' '.join(f'{p:.2f}' for p in prediction.peak)}",
        numerics_note(plan)
        or "sums have Megatron-Core's order: losses and gradients are the same bit by bit",
    ]
    if shape.placement is Placement.LOOP:
        usual = depth_first(shape)
        ratio = prediction.step_s / predict(usual, table).step_s
        lines.insert(2, f"{ratio:.3f} of the time of Megatron-Core's order")
        ranks = range(shape.num_ranks)
        if any(forward_order(plan, rank) != forward_order(usual, rank) for rank in ranks):
            lines.append(
                "forwards have another order than Megatron-Core's, so dropout draws other masks"
            )
    return "\n".join(lines)


def draw_text(prediction: Prediction, shape: PipelineShape, *, width: int = 100) -> str:
    """Return one line a rank, as wide as asked for; dots where it waits.

    An action is its letter and microbatch; with several chunks, chunk 1's letters are lower case,
    and so on in turn.
    """
    lines = []
    for rank, row in enumerate(prediction.timeline):
        cells = ["·"] * width
        for timed in row:
            first = round(timed.begin_s / prediction.step_s * width)
            last = max(first + 1, round(timed.end_s / prediction.step_s * width))
            cells[first:last] = _label(timed, shape).ljust(last - first, "-")[: last - first]
        lines.append(f"rank {rank:<3} {''.join(cells[:width])}")
    return "\n".join(lines)


def _label(timed: Timed, shape: PipelineShape) -> str:
    kind, stage, microbatch = timed.action
    letter = kind.value if shape.chunk_of(stage) % 2 == 0 else kind.value.lower()
    return f"{letter}{microbatch}"


def draw_timeline(prediction: Prediction, shape: PipelineShape, *, name: str) -> Timeline:
    """Return a timeline of the step's work, for `megascan.export`."""
    layout = Layout(pp=shape.num_ranks, vpp=shape.num_chunks)
    spans = _spans(prediction, shape)
    return Timeline(
        run_id=name,
        layout=layout,
        headers=_headers(layout, name),
        spans=spans,
        windows={},
        clocks={},
        clock_method="predicted; all ranks on one clock",
        origin_ns=0,
        completeness=Completeness(
            world_size=layout.world_size,
            ranks=tuple(range(layout.world_size)),
            num_spans=spans.num_rows,
        ),
    )


def _spans(prediction: Prediction, shape: PipelineShape) -> pa.Table:
    timed = [(rank, entry) for rank, row in enumerate(prediction.timeline) for entry in row]
    begin_ns = np.rint([entry.begin_s * _NS_PER_S for _, entry in timed]).astype(np.int64)
    end_ns = np.rint([entry.end_s * _NS_PER_S for _, entry in timed]).astype(np.int64)
    actions = [entry.action for _, entry in timed]
    columns: Mapping[str, object] = {
        "rank": [rank for rank, _ in timed],
        "kind": [Kind.COMPUTE.value] * len(timed),
        "name": [_SPANS[action.kind][0] for action in actions],
        "track": [int(Track.COMPUTE)] * len(timed),
        "start_ns": begin_ns,
        "duration_ns": end_ns - begin_ns,
        "iteration": [1] * len(timed),
        "microbatch": [action.microbatch for action in actions],
        "chunk": [shape.chunk_of(action.stage) for action in actions],
        "phase": [_SPANS[action.kind][1].value for action in actions],
        "self_ns": end_ns - begin_ns,
    }
    arrays = []
    for column in TIMELINE_COLUMNS:
        absent = "" if column.type == "text" else NOT_APPLICABLE
        values = pa.array(columns.get(column.name, [absent] * len(timed)))
        arrays.append(values.dictionary_encode() if column.type == "text" else values)
    return pa.table(arrays, names=TIMELINE_SCHEMA.names).cast(TIMELINE_SCHEMA)


def _headers(layout: Layout, name: str) -> dict[int, RankHeader]:
    clock = ClockOrigin(domain="predicted", source="simulator", origin_unix_ns=0)
    device = Device(kind="cpu", name="")
    return {
        rank: computed_header(name, rank, layout, device, clock)
        for rank in range(layout.world_size)
    }
