"""Timeline to observations: which spans count as what."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from detect.findings.counters import typical_readings
from detect.findings.replayed_cost import ReplayedCosts
from detect.observations import (
    BACKWARD,
    FORWARD,
    Bools,
    Floats,
    Ints,
    Members,
    Observations,
    Work,
    place_of,
)
from detect.observe.cover import enclosed_time, uncovered_time
from detect.observe.entangled import Entanglement, OwnTimes, own_times
from detect.observe.span_index import WORK_NAMES, SpanIndex
from detect.observe.stalls import Pieces, stalled_time
from detect.observe.starvation import collecting_time, loading_time
from detect.observe.transfers import transfers_of
from detect.report import Alignment
from megascan.header import Json
from megascan.schema import NOT_APPLICABLE, Granularity, Kind, Track
from megascan.timeline import Completeness, Timeline, codes, equals, numbers

LAYER_NAMES = {"transformer_layer": FORWARD, "transformer_layer-backward": BACKWARD}
LAYER_MODULES = ("attention", "mlp", "attention-backward", "mlp-backward")
MODULES = (*LAYER_MODULES, "output_layer", "output_layer-backward")
MODEL_AXES = ("tp", "cp", "ep", "tp_cp", "tp_ep", "expt_tp")
"""Axes over which ranks of one stage and replica wait for each other inside a pass."""
STARVED_NAMES = ("attention", "mlp", "attention-backward", "mlp-backward")
STARVED_LEAD_NS = 20_000
STARVED_LEAD_RATIO = 0.5
"""A host that is less ahead than a launch takes (5 to 10 µs), or than half of the operation that it
launches, does not keep its device busy."""
MAX_PAUSE_SHARE = 0.002
"""A pass with more garbage collection in it than this says nothing about compute."""


def observe(timeline: Timeline) -> Observations:
    """Everything the detector needs from a timeline."""
    index = SpanIndex(timeline)
    work_rows = index.named(WORK_NAMES)
    gc_rows = equals(index.table, "kind", Kind.GC) & index.counts
    data_rows = equals(index.table, "kind", Kind.DATA) & index.counts
    optimizer_rows = index.named(("optimizer",))
    phase = _phases(index, work_rows, WORK_NAMES)
    loading = loading_time(index, work_rows, phase, data_rows)
    busy_ns = np.maximum(index.self_time(work_rows) - loading.inside_ns, 1.0)
    own = OwnTimes((), busy_ns)
    if not index.uses_cpu_time:
        own = _own_times(index, work_rows, phase, busy_ns, MODULES)
    optimizer = index.summed(optimizer_rows, index.self_time(optimizer_rows))
    collecting = collecting_time(index, work_rows, gc_rows)
    paused = collecting.inside_ns > MAX_PAUSE_SHARE * busy_ns
    own_ns = own.time_ns - collecting.inside_ns
    stalled_ns = _stalled(index, timeline, work_rows, phase, (busy_ns, own_ns))
    busy_ns = busy_ns - stalled_ns
    iteration_rows = equals(index.table, "kind", Kind.ITERATION)
    return Observations(
        members=_members(timeline, index.ranks),
        iterations=index.iterations,
        iteration_ns=_iteration_times(index),
        work=_work(
            index, work_rows, np.where(paused, np.nan, own.time_ns - stalled_ns), WORK_NAMES
        ),
        layers=_layers(index),
        busy_ns=np.nan_to_num(index.summed(work_rows, busy_ns)) + np.nan_to_num(optimizer),
        optimizer_ns=optimizer,
        host_gap_ns=uncovered_time(index, iteration_rows),
        stalled_ns=np.nan_to_num(index.summed(work_rows, stalled_ns)),
        loader_ns=index.summed(data_rows, loading.lost_ns),
        gc_ns=np.nan_to_num(index.summed(gc_rows, collecting.lost_ns)),
        gc_traced=_is_full(timeline),
        stolen_ns=_stolen(index, work_rows, phase, data_rows, busy_ns),
        starved_share=_starved_share(index),
        entangled_phases=own.phases,
        mixes_communication=index.uses_cpu_time and _hides_model_parallel(timeline),
        splits_tensor_groups=_splits_tensor_groups(index, timeline),
        transfers=transfers_of(index, timeline),
        counters=typical_readings(timeline),
        alignment=_alignment(timeline),
        completeness=_completeness(timeline.completeness),
        notes=timeline.completeness.notes,
        costs=ReplayedCosts(timeline),
    )


def _phases(index: SpanIndex, rows: Bools, names: dict[str, int]) -> Ints:
    """Phase of each of the spans by its name."""
    code, texts = codes(index.table, "name")
    phase_of_code = np.array([names.get(text, 0) for text in texts], dtype=np.int64)
    return np.asarray(phase_of_code[code[rows]])


def _own_times(
    index: SpanIndex, passes: Bools, phase: Ints, time_ns: Floats, modules: tuple[str, ...]
) -> OwnTimes:
    """Own time of passes that overlap their model-parallel collectives."""
    group, texts = codes(index.table, "group")
    model_parallel = np.array([text.partition("@")[0] in MODEL_AXES for text in texts] or [False])
    overlapped = equals(index.table, "kind", Kind.COLLECTIVE) & index.counts
    overlapped &= numbers(index.table, "track") == Track.OVERLAPPED
    overlapped &= model_parallel[group]
    marks = Entanglement(
        passes=passes,
        phase=phase,
        time_ns=time_ns,
        modules=index.named(modules),
        module_kind=codes(index.table, "name")[0][index.named(modules)],
        overlapped=overlapped,
    )
    return own_times(index, marks)


def _stolen(index: SpanIndex, rows: Bools, phase: Ints, data_rows: Bools, cpu_ns: Floats) -> Floats:
    """Wall less CPU time of compute, (rank, iteration); 0 where CPU time was not measured.

    Passes that overlap collectives wait inside their spans, which is not the host's doing: they are
    supposed to lose as much as the others.
    """
    if not index.uses_cpu_time:
        return np.zeros(index.shape)
    waiting = np.isin(phase, _own_times(index, rows, phase, cpu_ns, MODULES).phases)
    loading_ns = enclosed_time(index, rows, data_rows, _wall_time(index, data_rows))
    wall_ns = numbers(index.table, "self_ns")[rows] - loading_ns
    lost_ns = np.where(waiting, 0.0, np.maximum(wall_ns - cpu_ns, 0.0))
    everything = np.nan_to_num(index.summed(rows, cpu_ns))
    measured = np.nan_to_num(index.summed(rows, np.where(waiting, 0.0, cpu_ns)))
    scale = np.where(measured > 0, everything / np.maximum(measured, 1.0), 0.0)
    return np.asarray(np.nan_to_num(index.summed(rows, lost_ns)) * scale)


def _stalled(
    index: SpanIndex,
    timeline: Timeline,
    passes: Bools,
    phase: Ints,
    time_ns: tuple[Floats, Floats],
) -> Floats:
    """Time that the device stood still inside each pass; 0 on CPU runs.

    `time_ns` is that of the passes, with and without their waiting.
    """
    if index.is_cpu:
        return np.zeros(len(phase))
    modules = index.named(LAYER_MODULES)
    chunk = np.maximum(numbers(index.table, "chunk")[passes], 0)
    layer = np.maximum(numbers(index.table, "layer")[modules], 0)
    name, texts = codes(index.table, "name")
    stage = _members(timeline, index.ranks).stage
    pieces = Pieces(
        passes=passes,
        role=2 * chunk + phase,
        stage=stage[index.row[passes]],
        time_ns=time_ns[0],
        own_ns=time_ns[1],
        modules=modules,
        module_kind=layer * len(texts) + name[modules],
        module_ns=index.self_time(modules),
    )
    return stalled_time(index, pieces)


def _wall_time(index: SpanIndex, rows: Bools) -> Floats:
    return np.maximum(numbers(index.table, "self_ns")[rows], 0).astype(np.float64)


def _is_full(timeline: Timeline) -> bool:
    return any(header.trace.granularity == Granularity.FULL for header in timeline.headers.values())


def _splits_tensor_groups(index: SpanIndex, timeline: Timeline) -> bool:
    """Whether self times within a TP (CP, EP) group are the ranks' own.

    They are where the group's collectives are traced, and where CPU time is used: a process that
    waits uses none.
    """
    return index.uses_cpu_time or not _hides_model_parallel(timeline)


def _hides_model_parallel(timeline: Timeline) -> bool:
    """Whether TP, CP or EP collectives happened inside passes without being recorded."""
    layout = timeline.layout
    return layout.tp * layout.cp * layout.ep > 1 and not _is_full(timeline)


def _members(timeline: Timeline, ranks: Ints) -> Members:
    headers = [timeline.headers[int(rank)] for rank in ranks]
    return Members(
        layout=timeline.layout,
        ranks=ranks,
        place=place_of([header.coordinates for header in headers]),
        labels=tuple(timeline.layout.label(int(rank)) for rank in ranks),
        hosts=tuple(header.host for header in headers),
        devices=tuple(header.device.name for header in headers),
        device_index=tuple(header.device.index for header in headers),
        workers=tuple((int(rank),) for rank in ranks),
        device_kind=headers[0].device.kind if headers else "cpu",
    )


def _iteration_times(index: SpanIndex) -> Floats:
    """Longest iteration span over the ranks; without such spans, last end less first start."""
    rows = equals(index.table, "kind", Kind.ITERATION) & index.counts
    longest = np.zeros(index.shape[1])
    if rows.any():
        np.maximum.at(longest, index.slot[rows], index.duration[rows].astype(np.float64))
        return np.asarray(longest)
    first = np.full(index.shape[1], np.inf)
    last = np.zeros(index.shape[1])
    use = index.counts
    np.minimum.at(first, index.slot[use], index.start[use].astype(np.float64))
    np.maximum.at(last, index.slot[use], (index.start + index.duration)[use].astype(np.float64))
    return np.asarray(last - first)


def _work(index: SpanIndex, rows: Bools, time_ns: Floats, names: dict[str, int]) -> Work:
    """Mean time by (rank, iteration, phase x chunk x microbatch)."""
    phase = _phases(index, rows, names)
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


def _layers(index: SpanIndex) -> Work | None:
    """Transformer layers, chunks and layers of a rank averaged; None when not traced or unlike."""
    rows = index.named(LAYER_NAMES)
    if not rows.any():
        return None
    time_ns = np.maximum(index.self_time(rows), 1.0)
    phase = _phases(index, rows, LAYER_NAMES)
    if not index.uses_cpu_time:
        time_ns = _own_times(index, rows, phase, time_ns, LAYER_MODULES).time_ns
    if not _layers_alike(index, rows, time_ns):
        return None
    work = _work(index, rows, time_ns, LAYER_NAMES)
    keys = work.phase * (work.microbatch.max() + 1) + work.microbatch
    slots = np.unique(keys)
    by_slot = [np.nanmean(work.log_ns[:, :, keys == key], axis=2) for key in slots]
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


def _starved_share(index: SpanIndex) -> Floats | None:
    """Share of module spans that the host launched only just in time; None on CPU runs."""
    if index.is_cpu:
        return None
    rows = index.named(STARVED_NAMES)  # a whole pass begins with its launch, fed or not
    launch = numbers(index.table, "launch_ns")[rows]
    known = launch != NOT_APPLICABLE
    if not known.any():
        return None
    flat = (index.row[rows] * index.shape[1] + index.slot[rows])[known]
    size = index.shape[0] * index.shape[1]
    enough = np.maximum(STARVED_LEAD_NS, STARVED_LEAD_RATIO * index.self_time(rows)[known])
    starved = np.bincount(flat, weights=(-launch[known] < enough), minlength=size)
    count = np.bincount(flat, minlength=size)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((starved / count).reshape(index.shape))


def _alignment(timeline: Timeline) -> Alignment | None:
    if not timeline.clocks:
        return None
    fits = list(timeline.clocks.values())
    return Alignment(
        method=timeline.clock_method,
        residual_median_ns=float(np.median([fit.residual_median_ns for fit in fits])),
        residual_p99_ns=float(max(max(fit.residual_p99_ns, fit.error_ns) for fit in fits)),
        num_components=len({fit.component for fit in fits}),
    )


def _completeness(found: Completeness) -> dict[str, Json]:
    record: dict[str, Json] = asdict(found)
    record["ranks"] = list(found.ranks)
    record["missing_ranks"] = list(found.missing_ranks)
    record["num_unmatched"] = dict(found.num_unmatched)
    record["notes"] = list(found.notes)
    return record
