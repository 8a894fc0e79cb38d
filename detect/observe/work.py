"""Passes and layers as samples of work: their own times, by rank, iteration and operation."""

from __future__ import annotations

import numpy as np

from detect.observations import BACKWARD, FORWARD, Bools, Floats, Ints, Work
from detect.observe.entangled import Entanglement, OwnTimes, own_times
from detect.observe.span_index import SpanIndex
from detect.stats import robust
from megascan.schema import Kind, Track
from megascan.timeline import codes, equals, numbers

LAYER_NAMES = {"transformer_layer": FORWARD, "transformer_layer-backward": BACKWARD}
LAYER_MODULES = ("attention", "mlp", "attention-backward", "mlp-backward")
MODULES = (*LAYER_MODULES, "output_layer", "output_layer-backward")
MODEL_AXES = ("tp", "cp", "ep", "tp_cp", "tp_ep", "expt_tp")
"""Axes over which ranks of one stage and replica wait for each other inside a pass."""


def phases_of(index: SpanIndex, rows: Bools, names: dict[str, int]) -> Ints:
    """Phase of each of the spans by its name."""
    code, texts = codes(index.table, "name")
    phase_of_code = np.array([names.get(text, 0) for text in texts], dtype=np.int64)
    return np.asarray(phase_of_code[code[rows]])


def own_times_of(
    index: SpanIndex, passes: Bools, phase: Ints, time_ns: Floats, modules: tuple[str, ...]
) -> OwnTimes:
    """Own time of passes that overlap their model-parallel collectives."""
    group, texts = codes(index.table, "group")
    model_parallel = np.array([text.partition("@")[0] in MODEL_AXES for text in texts] or [False])
    overlapped = equals(index.table, "kind", Kind.COLLECTIVE) & index.counts
    overlapped &= numbers(index.table, "track") == Track.OVERLAPPED
    overlapped &= model_parallel[group]
    inside = index.named(modules)
    marks = Entanglement(
        passes=passes,
        phase=phase,
        time_ns=time_ns,
        modules=inside,
        module_kind=codes(index.table, "name")[0][inside],
        overlapped=overlapped,
    )
    return own_times(index, marks)


def work_of(index: SpanIndex, rows: Bools, time_ns: Floats, names: dict[str, int]) -> Work:
    """Mean time by (rank, iteration, phase x chunk x microbatch)."""
    phase = phases_of(index, rows, names)
    chunk = np.maximum(numbers(index.table, "chunk")[rows], 0)
    microbatch = np.maximum(numbers(index.table, "microbatch")[rows], 0)
    num_chunks = int(chunk.max(initial=0)) + 1
    num_microbatches = int(microbatch.max(initial=0)) + 1
    num_ops = 2 * num_chunks * num_microbatches
    op = (phase * num_chunks + chunk) * num_microbatches + microbatch
    num_ranks, num_iterations = index.shape
    flat = (index.row[rows] * num_iterations + index.slot[rows]) * num_ops + op
    size = num_ranks * num_iterations * num_ops
    total = np.bincount(flat, weights=time_ns, minlength=size)
    count = np.bincount(flat, minlength=size)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_ns = np.log(total / count)
    log_ns[count == 0] = np.nan
    ops = np.arange(num_ops)
    return Work(
        log_ns=log_ns.reshape(num_ranks, num_iterations, num_ops),
        phase=ops // (num_chunks * num_microbatches),
        microbatch=ops % num_microbatches,
    )


def layers_of(index: SpanIndex) -> Work | None:
    """Transformer layers, chunks and layers of a rank averaged; None when not traced or unlike."""
    rows = index.named(LAYER_NAMES)
    if not rows.any():
        return None
    time_ns = np.maximum(index.self_time(rows), 1.0)
    phase = phases_of(index, rows, LAYER_NAMES)
    if not index.uses_cpu_time:
        time_ns = own_times_of(index, rows, phase, time_ns, LAYER_MODULES).time_ns
    if not _layers_alike(index, rows, time_ns):
        return None
    work = work_of(index, rows, time_ns, LAYER_NAMES)
    keys = work.phase * (work.microbatch.max() + 1) + work.microbatch
    slots = np.unique(keys)
    by_slot = [robust.mean(work.log_ns[:, :, keys == key], axis=2) for key in slots]
    first = [int(np.flatnonzero(keys == key)[0]) for key in slots]
    return Work(
        log_ns=np.stack(by_slot, axis=2), phase=work.phase[first], microbatch=work.microbatch[first]
    )


def _layers_alike(index: SpanIndex, rows: Bools, time_ns: Floats) -> bool:
    """False when layers of one rank differ by 15 % and more (dense and expert layers mixed)."""
    layer = numbers(index.table, "layer")[rows]
    forward = equals(index.table, "name", "transformer_layer")[rows]
    for row in range(len(index.ranks)):
        mine = forward & (index.row[rows] == row)
        medians = [np.median(time_ns[mine & (layer == one)]) for one in np.unique(layer[mine])]
        if medians and max(medians) > 1.15 * min(medians):
            return False
        if row >= 31:  # a few stages' worth of ranks tells
            break
    return True
