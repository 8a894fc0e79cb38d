"""Timeline to observations: which spans count as what.

passes (forward, backward)   work, busy_ns; what they take beyond their modules is stalled_ns
transformer layers           layers
optimizer                    optimizer_ns, busy_ns
data, garbage collection     lost_ns[LOADER], lost_ns[GC]
no span at all               host_gap_ns
matched communication        transfers, lost_ns[LINK], waiting_ns
kernels of a profile         all of the above that passes would tell (detect.observe.kernels)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np

from detect.observe.devices import are_guessed, hosts_of, typical_readings
from detect.observe.kernels import is_profile, with_kernels
from detect.observe.launches import launch_pace
from detect.observe.observations import Members, Observations, Transfers, Work, place_of
from detect.observe.spans import (
    WORK_NAMES,
    SpanIndex,
    axis_of,
    enclosed_time,
    uncovered_time,
    waiting_time,
)
from detect.observe.stalls import (
    Pieces,
    collecting_time,
    launched_late,
    loading_time,
    stalled_time,
    starved_share,
    within_stalls,
)
from detect.observe.transfers import transfers_of
from detect.observe.work import (
    LAYER_NAMES,
    OwnTimes,
    entangling_modules,
    layer_modules,
    layers_of,
    own_times_of,
    pass_times,
    phases_of,
    stretches_of,
    work_of,
)
from detect.report import Alignment, Cause
from detect.thresholds import PASSES, STALLS
from detect.whatif.savings import ReplayedCosts
from megascan.arrays import Cover, Flags, Floats, Integers, united
from megascan.header import Json
from megascan.schema import COMMUNICATION_KINDS, Granularity, Kind, Track
from megascan.timeline import Completeness, Timeline, codes, equals, numbers
from megascan.vocabulary import OPTIMIZER

GUESSED = (
    "the trace names no hosts: ranks whose device numbers count up from 0 are taken for one host, "
    "#0 for the first"
)


def observe(timeline: Timeline) -> Observations:
    """Return everything the detector needs from a timeline."""
    index = SpanIndex(timeline)
    members = _members(timeline, index.ranks)
    passes = _Passes.of(index, members)
    optimizer_rows = index.named((OPTIMIZER,))
    optimizer = index.summed(optimizer_rows, index.self_time(optimizer_rows))
    stalled = np.nan_to_num(index.summed(passes.rows, passes.stalled_ns))
    stolen = _stolen(index, passes)
    gaps = uncovered_time(index, equals(index.table, "kind", Kind.ITERATION))
    transfers = transfers_of(index, timeline)
    lost = passes.lost_ns | {Cause.HOST: gaps + stalled + stolen}
    work = work_of(index, passes.rows, passes.work_ns, passes.names)
    notes = timeline.completeness.notes
    if are_guessed(timeline.headers):
        notes = (*notes, GUESSED)
    if passes.names is LAYER_NAMES and not is_profile(index):
        work, note = _unmarked(index, work, timeline)
        work = _without_collections(work, lost[Cause.GC], _iteration_times(index))
        notes = (*notes, note)
        lost.pop(Cause.HOST)  # what lies outside of spans is mostly computing
    seen = Observations(
        members=members,
        iterations=index.iterations,
        iteration_ns=_iteration_times(index),
        work=work,
        layers=layers_of(index),
        busy_ns=np.nan_to_num(index.summed(passes.rows, passes.busy_ns)) + np.nan_to_num(optimizer),
        optimizer_ns=optimizer,
        lost_ns=_recorded(lost, timeline, transfers, index),
        host_gap_ns=gaps,
        stalled_ns=stalled,
        stolen_ns=stolen,
        waiting_ns=waiting_time(index),
        # not of passes: they begin with their launch, fed or not
        starved_share=None if index.is_cpu else starved_share(index, layer_modules(index)),
        loading_ns=index.summed(passes.data_rows, index.duration[passes.data_rows].astype(float)),
        launch_pace=launch_pace(index),
        entangled_phases=passes.entangled_phases,
        mixes_communication=index.uses_cpu_time and _hides_model_parallel(timeline),
        splits_tensor_groups=_splits_tensor_groups(index, timeline),
        transfers=transfers,
        counters=typical_readings(timeline),
        alignment=_alignment(timeline),
        completeness=_completeness(timeline.completeness),
        notes=notes,
        costs=ReplayedCosts(timeline),
    )
    return with_kernels(seen, index)


@dataclass(frozen=True)
class _Passes:
    """Forward and backward passes (layers where none are marked), (pass,) each, and their times."""

    names: dict[str, int]
    rows: Flags
    phase: Integers
    data_rows: Flags
    busy_ns: Floats
    """Own times less loading and stalls."""
    work_ns: Floats
    """What is compared: waiting for others is out, too; NaN where the collector paused it long."""
    stalled_ns: Floats
    entangled_phases: tuple[int, ...]
    lost_ns: dict[Cause, Floats]
    """(rank, iteration) of loading and collecting."""

    @classmethod
    def of(cls, index: SpanIndex, members: Members) -> _Passes:
        names = WORK_NAMES if index.named(WORK_NAMES).any() else LAYER_NAMES
        rows = index.named(names)
        phase = phases_of(index, rows, names)
        data_rows = equals(index.table, "kind", Kind.DATA) & index.counts
        loading = loading_time(index, rows, phase, data_rows)
        busy_ns, is_sharded = pass_times(index, rows, phase, loading.inside_ns)
        own = OwnTimes((), busy_ns, busy_ns)
        if not index.uses_cpu_time:
            own = own_times_of(index, rows, phase, busy_ns, entangling_modules(index))
        gc_rows = equals(index.table, "kind", Kind.GC) & index.counts
        collecting = collecting_time(index, rows, gc_rows)
        stall = partial(_stalled, index, members.stage, rows, phase, time_ns=busy_ns)
        if index.is_sampled and not index.is_cpu:
            stood_still_ns = stall(own_ns=own.unwaited_ns, tolerance_share=0.0)
            collecting = within_stalls(index, rows, gc_rows, collecting, stood_still_ns)
        stalled_ns = stall(own_ns=own.unwaited_ns - collecting.inside_ns)
        paused = collecting.inside_ns > PASSES.max_pause_share * busy_ns
        # of these only the layers are busy time, which holds no standing still
        inside_ns = np.where(is_sharded, 0.0, stalled_ns)
        if is_sharded.any() and not index.is_cpu:
            late_ns = launched_late(index, rows, layer_modules(index))
            stalled_ns = np.where(is_sharded, late_ns, stalled_ns)
        return cls(
            names=names,
            rows=rows,
            phase=phase,
            data_rows=data_rows,
            busy_ns=busy_ns - inside_ns,
            work_ns=np.where(paused, np.nan, own.time_ns - inside_ns),
            stalled_ns=stalled_ns,
            entangled_phases=own.phases,
            lost_ns={
                Cause.LOADER: index.summed(data_rows, loading.lost_ns),
                Cause.GC: np.nan_to_num(index.summed(gc_rows, collecting.lost_ns)),
            },
        )


def _unmarked(index: SpanIndex, layers: Work, timeline: Timeline) -> tuple[Work, str]:
    """Return what stands for the passes where none are marked, and a sentence that says so."""
    missing = "no forward and backward passes were traced: "
    if np.isfinite(layers.log_ns).any():
        return layers, missing + "transformer layers are compared"
    stretches = stretches_of(index) if timeline.layout.pp == 1 else None
    if stretches is None:
        return layers, missing + "what ranks compute cannot be compared"
    return stretches, missing + "what lies between communications is compared"


def _without_collections(work: Work, collecting_ns: Floats, iteration_ns: Floats) -> Work:
    """Leave iterations out in which some rank collected garbage, where enough others are left.

    Without passes nobody tells what a stretch of computing holds: others may wait in it, where no
    communication is recorded, for the rank that collects.
    """
    hit = (collecting_ns > PASSES.max_pause_share * iteration_ns).any(axis=0)
    if not hit.any() or float(hit.mean()) > PASSES.max_collected_share:
        return work
    log_ns = work.log_ns.copy()
    log_ns[:, hit] = np.nan
    return replace(work, log_ns=log_ns)


def _recorded(
    lost: dict[Cause, Floats], timeline: Timeline, transfers: Transfers | None, index: SpanIndex
) -> dict[Cause, Floats]:
    """Return the lost times that this trace can tell about, late exits among them; NaN where a rank
    recorded nothing of an iteration: it lost what nobody knows.
    """
    place = (index.row * index.shape[1] + index.slot)[index.counts]
    absent = np.bincount(place, minlength=index.shape[0] * index.shape[1]).reshape(index.shape) == 0
    kept = {cause: time_ns for cause, time_ns in lost.items() if np.isfinite(time_ns).any()}
    if not _is_full(timeline):
        kept.pop(Cause.GC, None)
    if transfers is not None:
        kept[Cause.LINK] = transfers.late_ns
    return {cause: np.where(absent, np.nan, time_ns) for cause, time_ns in kept.items()}


def _stolen(index: SpanIndex, passes: _Passes) -> Floats:
    """Return wall less CPU time of compute, (rank, iteration); 0 without measured CPU times.

    Passes that overlap model-parallel collectives wait inside their spans, which is not the host's
    doing: they are supposed to lose as much as the others. A pass that reduces its gradients over
    the replicas beside computing (DDP) waits for the last of them: what is under way beside it
    explains as much time off the CPU as it covers.
    """
    if not index.uses_cpu_time:
        return np.zeros(index.shape)
    rows, cpu_ns = passes.rows, passes.busy_ns
    own = own_times_of(index, rows, passes.phase, cpu_ns, entangling_modules(index))
    waiting = np.isin(passes.phase, own.phases)
    data_rows = passes.data_rows
    loading_ns = enclosed_time(index, rows, data_rows, _wall_time(index, data_rows))
    wall_ns = numbers(index.table, "self_ns")[rows] - loading_ns
    off_core_ns = np.maximum(wall_ns - cpu_ns - _communicating_beside(index, rows), 0.0)
    lost_ns = np.where(waiting, 0.0, off_core_ns)
    everything = np.nan_to_num(index.summed(rows, cpu_ns))
    measured = np.nan_to_num(index.summed(rows, np.where(waiting, 0.0, cpu_ns)))
    scale = np.where(measured > 0, everything / np.maximum(measured, 1.0), 0.0)
    return np.asarray(np.nan_to_num(index.summed(rows, lost_ns)) * scale)


def _communicating_beside(index: SpanIndex, rows: Flags) -> Floats:
    """Return for how long of each of the spans communication beside it was under way, ns."""
    start, end = axis_of(index)
    beside = equals(index.table, "kind", *COMMUNICATION_KINDS) & index.counts
    beside &= numbers(index.table, "track") == Track.OVERLAPPED
    covered = Cover.of(*united(start[beside], end[beside]))
    return covered.length_within(start[rows], end[rows]).astype(np.float64)


def _stalled(
    index: SpanIndex,
    stage: Integers,
    passes: Flags,
    phase: Integers,
    *,
    time_ns: Floats,
    own_ns: Floats,
    tolerance_share: float = STALLS.tolerance_share,
) -> Floats:
    """Time that the device stood still inside each pass; 0 on CPU runs.

    `stage` is that of each row; `time_ns` and `own_ns` are the passes' with and without waiting.
    """
    if index.is_cpu:
        return np.zeros(len(phase))
    modules = layer_modules(index)
    chunk = np.maximum(numbers(index.table, "chunk")[passes], 0)
    layer = np.maximum(numbers(index.table, "layer")[modules], 0)
    name, texts = codes(index.table, "name")
    pieces = Pieces(
        passes=passes,
        role=2 * chunk + phase,
        stage=stage[index.row[passes]],
        time_ns=time_ns,
        own_ns=own_ns,
        modules=modules,
        module_kind=layer * len(texts) + name[modules],
        module_ns=index.self_time(modules),
        is_sampled=index.is_sampled,
    )
    return stalled_time(index, pieces, tolerance_share)


def _wall_time(index: SpanIndex, rows: Flags) -> Floats:
    return np.maximum(numbers(index.table, "self_ns")[rows], 0).astype(np.float64)


def _is_full(timeline: Timeline) -> bool:
    return any(header.trace.granularity == Granularity.FULL for header in timeline.headers.values())


def _splits_tensor_groups(index: SpanIndex, timeline: Timeline) -> bool:
    """Return whether self times within a TP (CP, EP) group are the ranks' own.

    They are where the group's collectives are traced, and where CPU time is used: a process that
    waits uses none.
    """
    return index.uses_cpu_time or not _hides_model_parallel(timeline)


def _hides_model_parallel(timeline: Timeline) -> bool:
    """Return whether TP, CP or EP collectives happened inside passes without being recorded."""
    layout = timeline.layout
    return layout.tp * layout.cp * layout.ep > 1 and not _is_full(timeline)


def _members(timeline: Timeline, ranks: Integers) -> Members:
    headers = [timeline.headers[int(rank)] for rank in ranks]
    hosts = hosts_of(timeline.headers)
    return Members(
        layout=timeline.layout,
        ranks=ranks,
        place=place_of([header.coordinates for header in headers]),
        labels=tuple(timeline.layout.label(int(rank)) for rank in ranks),
        hosts=tuple(hosts[int(rank)] for rank in ranks),
        devices=tuple(header.device.name for header in headers),
        device_index=tuple(header.device.index for header in headers),
        workers=tuple((int(rank),) for rank in ranks),
        device_kind=headers[0].device.kind if headers else "cpu",
    )


def _iteration_times(index: SpanIndex) -> Floats:
    """Return the longest iteration span over the ranks; without such spans, last end less first
    start.
    """
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


def _alignment(timeline: Timeline) -> Alignment | None:
    if not timeline.clocks:
        return None
    fits = list(timeline.clocks.values())
    return Alignment(
        method=timeline.clock_method,
        residual_median_ns=float(np.median([fit.residual_median_ns for fit in fits])),
        residual_p99_ns=float(max(max(fit.residual_p99_ns, fit.error_ns) for fit in fits)),
        num_components=len({fit.component for fit in fits}),
        is_measured=any(fit.num_anchors for fit in fits),
    )


def _completeness(found: Completeness) -> dict[str, Json]:
    record: dict[str, Json] = asdict(found)
    record["ranks"] = list(found.ranks)
    record["missing_ranks"] = list(found.missing_ranks)
    record["num_unmatched"] = dict(found.num_unmatched)
    record["notes"] = list(found.notes)
    return record
