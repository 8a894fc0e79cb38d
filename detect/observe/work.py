"""Passes and layers as samples of work: their own times, by rank, iteration and operation.

In some passes a rank's own time and its waiting cannot be told apart. Megatron-Core overlaps the
reduction of input gradients over the TP group with the weight gradients. The pass then waits for
the group's slowest member inside its own compute spans:

    mlp-backward   |── own compute ──|── weight gradients ──| waiting |── own ──|
    all_reduce                       |───── wait ───── transfer ──────|
                   |───── lead ──────|

On a GPU a slow rank therefore makes the backward passes of its whole TP group look slow, and a rank
that is a little faster than its partners gathers a lead over them from module to module. Between
launch and end of the collective a rank's own work cannot be seen where the transfer hides it; what
counts for it there is the same for all ranks, h. Two measures of a module's own time exist:

    span − collective + h   = exact for the last to arrive; too short by what is hidden in the wait
                              of others, or behind a transfer that takes longer than that work
    k · lead                = start to the launch of the first collective, times the usual ratio of
                              the first measure to the lead; blind for what is slow only afterwards

The larger one of their sums over an iteration counts. A device that is f times slower has f times
the lead, so f comes out whatever h and k are, even where the transfer hides all weight gradients.

Limit: in a TP group that has no equal anywhere in the job, k comes from the suspects themselves.
CPU runs do not need this: a thread that waits uses no CPU time.

Where no passes are marked, work is what lies between communications (`stretches_of`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detect.observe.observations import BACKWARD, FORWARD, Work
from detect.observe.spans import SpanIndex, SpanTimes, axis_of, enclosed_time, enclosing
from detect.stats import robust
from detect.thresholds import PASSES
from megascan.arrays import (
    Flags,
    Floats,
    Integers,
    group_lengths,
    group_starts,
    order_within,
    united,
)
from megascan.schema import Kind, Phase, Track
from megascan.timeline import codes, equals, numbers
from megascan.vocabulary import (
    MODEL_AXES,
    MOE,
    OUTPUT_LAYER,
    PLAIN_LAYER,
    TRANSFORMER_LAYER,
    CountsAs,
    axis_of_group,
    backward_of,
    is_data_parallel,
    names_of,
)

LAYER_NAMES = {
    name: phase
    for phase, text in ((FORWARD, Phase.FORWARD), (BACKWARD, Phase.BACKWARD))
    for name in names_of(CountsAs.LAYER, phases=[text])
}
_PHASES = (Phase.FORWARD, Phase.BACKWARD)
_MODULES = names_of(CountsAs.MODULE, phases=_PHASES)
_HEADS = (OUTPUT_LAYER, backward_of(OUTPUT_LAYER))


def layer_spans(index: SpanIndex) -> Flags:
    """Return which spans are layers; what a plain model repeats counts where it names none."""
    megatron = index.named((TRANSFORMER_LAYER, backward_of(TRANSFORMER_LAYER)))
    return megatron if megatron.any() else index.named(LAYER_NAMES)


def layer_modules(index: SpanIndex) -> Flags:
    """Return which spans are the modules of layers: none lies in another.

    Of `mlp` inside `moe` the outer one counts. Where no modules were traced, as in models of plain
    PyTorch, the layers stand for them.
    """
    modules = index.named(_MODULES)
    if not modules.any():
        return layer_spans(index)
    outer = index.named((MOE, backward_of(MOE)))
    if outer.any():
        inner = np.flatnonzero(modules & ~outer)
        modules[inner[enclosing(index, outer, modules & ~outer) >= 0]] = False
    return modules


def entangling_modules(index: SpanIndex) -> Flags:
    """Return which spans may overlap a model-parallel collective: modules and the output layer."""
    return layer_modules(index) | index.named(_HEADS)


def phases_of(index: SpanIndex, rows: Flags, names: dict[str, int]) -> Integers:
    """Return the phase of each of the spans by its name."""
    code, texts = codes(index.table, "name")
    phase_of_code = np.array([names.get(text, 0) for text in texts], dtype=np.int64)
    return np.asarray(phase_of_code[code[rows]])


def pass_times(
    index: SpanIndex, passes: Flags, phase: Integers, loading_ns: Floats
) -> tuple[Floats, Flags]:
    """Return how long each pass kept its device busy, (pass,) ns, and of which only layers count.

    `loading_ns` is the time that its loading of data takes of each. With parameters sharded over
    the replicas (FSDP), what lies between the layers is mostly waiting for the slowest replica's
    part of the next layer's parameters, so only the layers count:

        forward      |── layer 1 ──| waiting |── layer 2 ──| waiting |── layer 3 ──|
        all_gather   |──── parameters of 2 ──|──── parameters of 3 ──|
    """
    time_ns = index.self_time(passes) - loading_ns
    is_sharded = np.zeros(len(time_ns), dtype=bool)
    layers = index.named((PLAIN_LAYER, backward_of(PLAIN_LAYER)))
    group, texts = codes(index.table, "group")
    shares = np.array([is_data_parallel(text) for text in texts] or [False])[group]
    gathers = shares & equals(index.table, "op", "all_gather") & index.counts
    gathers &= numbers(index.table, "track") == Track.OVERLAPPED
    if layers.any() and gathers.any():
        layers_ns = enclosed_time(index, passes, layers, index.self_time(layers))
        if index.is_sampled:
            layers_ns *= _layers_a_recorded_one(index, passes, layers)
        holds = enclosed_time(index, passes, gathers, np.ones(int(gathers.sum()))) > 0
        for one in np.unique(phase):
            of_phase = phase == one
            if float(holds[of_phase].mean()) > PASSES.entangled_share:
                is_sharded |= of_phase & (layers_ns > 0)
        time_ns[is_sharded] = layers_ns[is_sharded]
    return np.maximum(time_ns, 1.0), is_sharded


def _layers_a_recorded_one(index: SpanIndex, passes: Flags, layers: Flags) -> Floats:
    """Return for how many layers each recorded one of a pass stands, (pass,)."""
    chunk = np.maximum(numbers(index.table, "chunk"), 0)
    place = index.row * (int(chunk.max(initial=0)) + 1) + chunk
    found = np.unique(np.stack([place[layers], numbers(index.table, "layer")[layers]]), axis=1)
    whole = np.bincount(found[0], minlength=int(place.max(initial=0)) + 1)[place[passes]]
    recorded = enclosed_time(index, passes, layers, np.ones(int(layers.sum())))
    return np.asarray(whole / np.maximum(recorded, 1.0))


def own_times_of(
    index: SpanIndex, passes: Flags, phase: Integers, time_ns: Floats, modules: Flags
) -> OwnTimes:
    """Own time of passes that overlap their model-parallel collectives."""
    group, texts = codes(index.table, "group")
    model_parallel = np.array([axis_of_group(text) in MODEL_AXES for text in texts] or [False])
    overlapped = equals(index.table, "kind", Kind.COLLECTIVE) & index.counts
    overlapped &= numbers(index.table, "track") == Track.OVERLAPPED
    overlapped &= model_parallel[group]
    marks = Entanglement(
        passes=passes,
        phase=phase,
        time_ns=time_ns,
        modules=modules,
        module_kind=codes(index.table, "name")[0][modules],
        overlapped=overlapped,
        stand_in=numbers(index.table, "layer")[modules] >= 0 if index.is_sampled else None,
    )
    return own_times(index, marks)


def work_of(index: SpanIndex, rows: Flags, time_ns: Floats, names: dict[str, int]) -> Work:
    """Return the mean time by (rank, iteration, phase x chunk x microbatch)."""
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
    """Return transformer layers, chunks and layers of a rank averaged; None when not traced or
    unlike.
    """
    rows = layer_spans(index)
    if not rows.any():
        return None
    time_ns = np.maximum(index.self_time(rows), 1.0)
    phase = phases_of(index, rows, LAYER_NAMES)
    if not index.uses_cpu_time:
        time_ns = own_times_of(index, rows, phase, time_ns, layer_modules(index)).time_ns
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


def _layers_alike(index: SpanIndex, rows: Flags, time_ns: Floats) -> bool:
    """Return False when layers of one rank differ by 15 % and more (dense and expert layers
    mixed).
    """
    forward = equals(index.table, "name", *names_of(CountsAs.LAYER, phases=[Phase.FORWARD]))[rows]
    few = np.flatnonzero(forward & (index.row[rows] < 32))  # a few stages' worth of ranks tells
    row, time_ns = index.row[rows][few], time_ns[few]
    layer = numbers(index.table, "layer")[rows][few]
    for one in np.unique(row).tolist():
        mine = row == one
        medians = [np.median(time_ns[mine & (layer == each)]) for each in np.unique(layer[mine])]
        if max(medians) > PASSES.layers_alike_ratio * min(medians):
            return False
    return True


@dataclass(frozen=True)
class OwnTimes:
    """Own time of entangled passes, by pass."""

    phases: tuple[int, ...]
    """Phases that are entangled."""
    time_ns: Floats
    """(pass,): the estimate; the pass's whole time where its phase is not entangled."""
    unwaited_ns: Floats
    """(pass,): what the pass took, less the waiting for others; transfers are part of it."""


@dataclass(frozen=True, kw_only=True)
class Entanglement:
    """Marks of spans: passes, their modules, and the collectives that overlap them.

    `phase` and `time_ns` are those of each pass, `module_kind` a number for the name of each
    module. Modules of a rank must not overlap each other. Collectives are always recorded; one in
    no module lies in a module that was not.
    """

    passes: Flags
    phase: Integers
    time_ns: Floats
    modules: Flags
    module_kind: Integers
    overlapped: Flags
    stand_in: Flags | None = None
    """(module,): those that stand for others, which were not recorded; None where all were."""


@dataclass(frozen=True)
class _Modules:
    """Modules that hold overlapped collectives, (module,) each."""

    row: Integers
    place: Integers
    """Row and iteration as one number."""
    kind: Integers
    owner: Integers
    """Number of the pass, -1 for none."""
    number: Integers
    """Place among the marked modules."""
    span_ns: Floats
    lead_ns: Floats
    """Start to the launch of the first overlapped collective."""
    collective_ns: Floats


def own_times(spans: SpanTimes, marks: Entanglement) -> OwnTimes:
    """Own time of every pass, and which phases are entangled."""
    if not marks.overlapped.any() or not marks.modules.any():
        return OwnTimes((), marks.time_ns, marks.time_ns)
    modules = _modules(spans, marks)
    holds = np.zeros(len(marks.phase), dtype=bool)
    holds[modules.owner[modules.owner >= 0]] = True
    phases = tuple(
        int(one)
        for one in np.unique(marks.phase)
        if float(holds[marks.phase == one].mean()) > PASSES.entangled_share
    )
    inside = modules.owner >= 0
    differences = []
    for part_ns in _parts(modules):
        difference = np.zeros(len(marks.phase))
        np.add.at(difference, modules.owner[inside], (part_ns - modules.span_ns)[inside])
        if marks.stand_in is not None:
            difference += _of_unseen_modules(spans, marks, modules, part_ns - modules.span_ns)
        difference[~np.isin(marks.phase, phases)] = 0.0
        differences.append(np.maximum(marks.time_ns + difference, 1.0))
    return OwnTimes(phases, differences[0], differences[1])


def _of_unseen_modules(
    spans: SpanTimes, marks: Entanglement, modules: _Modules, difference_ns: Floats
) -> Floats:
    """Return the difference that modules which were not recorded make to each pass, (pass,) ns.

    A module's time less its collective is work, more or less: how much more, the recorded ones of
    the pass tell. The collectives themselves are always recorded, and so is every wait in them.
    """
    num_passes = len(marks.phase)
    module = enclosing(spans, marks.modules, marks.overlapped)
    owner = enclosing(spans, marks.passes, marks.overlapped)
    unseen = (module < 0) & (owner >= 0)
    waits_ns = spans.duration[marks.overlapped][unseen].astype(np.float64)
    lost = np.bincount(owner[unseen], minlength=num_passes)
    lost_ns = np.bincount(owner[unseen], weights=waits_ns, minlength=num_passes)
    held = np.bincount(module[module >= 0], minlength=len(marks.module_kind))[modules.number]
    assert marks.stand_in is not None
    use = marks.stand_in[modules.number] & (modules.owner >= 0)
    more_ns = (difference_ns + modules.collective_ns)[use]
    seen = np.bincount(modules.owner[use], weights=held[use], minlength=num_passes)
    total_ns = np.bincount(modules.owner[use], weights=more_ns, minlength=num_passes)
    return np.asarray(np.where(seen > 0, lost * total_ns / np.maximum(seen, 1.0) - lost_ns, 0.0))


def _modules(spans: SpanTimes, marks: Entanglement) -> _Modules:
    module = enclosing(spans, marks.modules, marks.overlapped)
    inside = module >= 0
    first = np.full(int(marks.modules.sum()), np.iinfo(np.int64).max)
    np.minimum.at(first, module[inside], spans.start[marks.overlapped][inside])
    busy_ns = spans.duration[marks.overlapped].astype(np.float64)
    collective = enclosed_time(spans, marks.modules, marks.overlapped, busy_ns)
    use = first < np.iinfo(np.int64).max
    start, length = spans.start[marks.modules], spans.duration[marks.modules]
    return _Modules(
        row=spans.row[marks.modules][use],
        place=(spans.row * spans.shape[1] + spans.slot)[marks.modules][use],
        kind=marks.module_kind[use],
        owner=enclosing(spans, marks.passes, marks.modules)[use],
        number=np.flatnonzero(use),
        span_ns=length[use].astype(np.float64),
        lead_ns=np.maximum(first - start, 1)[use].astype(np.float64),
        collective_ns=np.minimum(collective[use], length[use]),
    )


def _parts(modules: _Modules) -> tuple[Floats, Floats]:
    """Return of each module the rank's own time, and its span less the waiting for others."""
    own, unwaited = modules.span_ns.copy(), modules.span_ns.copy()
    for kind in np.unique(modules.kind):
        use = modules.kind == kind
        shortest = float(np.quantile(modules.collective_ns[use], PASSES.shortest_quantile))
        lead = modules.lead_ns[use]
        hidden = min(shortest, _middle(_medians(modules.row[use], lead, 1)))
        own[use] = _own(modules, use, shortest, hidden)
        unwaited[use] = np.minimum(own[use] + shortest - hidden, modules.span_ns[use])
    return own, unwaited


def _own(modules: _Modules, use: Flags, shortest: float, hidden: float) -> Floats:
    """Own time of the modules of one kind."""
    row, lead = modules.row[use], modules.lead_ns[use]
    collective = modules.collective_ns[use]
    after = modules.span_ns[use] - collective + hidden
    exact = collective - shortest <= PASSES.last_reach_share * lead
    rest = after - lead - hidden
    ratio = after / lead
    if not exact.any() or np.median(rest[exact]) <= PASSES.last_reach_share * np.median(lead):
        # the transfer ends last, whoever arrives last: exact for all, low for slow ranks
        usual = _middle(_medians(row, ratio, 1), upper=True)
    else:
        usual = _usual_ratio(row, ratio, exact)
    place = modules.place[use]
    more = np.bincount(place, weights=usual * lead - after)
    return np.where(more[place] > 0, usual * lead, after)


def _usual_ratio(row: Integers, ratio: Floats, exact: Flags) -> float:
    """Return of the modules whose ratio is exact: of each rank the median, of these the lower
    median.

    Where few ranks have any, all modules of the others stand in, unless what is hidden in their
    waits explains the difference.
    """
    known = _medians(row[exact], ratio[exact], PASSES.min_exact_modules)
    others = ~np.isin(row, list(known))
    if not others.any() or 2 * len(known) >= len(np.unique(row)):
        return _middle(known)
    waiting = _middle(_medians(row[others], ratio[others], 1))
    explained = known and waiting <= _middle(known) <= PASSES.max_hidden_ratio * waiting
    return _middle(known) if explained else waiting


def _medians(row: Integers, values: Floats, least: int) -> dict[int, float]:
    """Lower median of the values of every rank that has so many at least."""
    order = order_within(row, values)
    ranks, ordered = row[order], values[order]
    starts = group_starts(ranks)
    sizes = group_lengths(starts, len(ranks))
    middle = starts + (sizes - 1) // 2
    enough = sizes >= least
    return dict(zip(ranks[starts][enough].tolist(), ordered[middle][enough].tolist(), strict=True))


def _middle(values: dict[int, float], *, upper: bool = False) -> float:
    """Lower median of the values, or the upper one."""
    ordered = sorted(values.values())
    return ordered[(len(ordered) - (0 if upper else 1)) // 2]


def stretches_of(index: SpanIndex) -> Work | None:
    """Return the stretches between communications, (rank, iteration, number); None without any.

    For traces in which no passes are marked. A trainer that marks only its communication still
    shows what its ranks compute: all of it lies between one communication and the next, and ranks
    of one stage communicate in the same order.

        rank 0   |── 1 ──| all_reduce |── 2 ──| all_reduce |──────── 3 ────────| optimizer |
        rank 1   |─── 1 ───| all_red. |─── 2 ───| all_red. |───────── 3 ──────────| optimizer |

    So the n-th stretch that nothing covers is an operation. The longest of a microbatch follows the
    loss: the backward pass. Communication inside it may be hidden, and so is the waiting in it; the
    stretches of the forward pass are the rank's own.

    Limit: with pipeline stages a stretch may hold waiting for a message that nobody recorded. Such
    traces are not read this way.
    """
    begin, end = _stretches(index)
    if not len(begin):
        return None
    cell, since = _cells(index, end)
    known = cell >= 0
    cell, length = cell[known], (end - np.maximum(begin, since))[known].astype(np.float64)
    starts = group_starts(cell)
    count = group_lengths(starts, len(cell))
    if not len(count):
        return None
    usual = int(np.median(count))  # an iteration with another number of them is not comparable
    number = np.arange(len(cell)) - np.repeat(starts, count)
    kept = np.repeat(count == usual, count)
    log_ns = np.full((index.shape[0] * index.shape[1], usual), np.nan)
    log_ns[cell[kept], number[kept]] = np.log(np.maximum(length[kept], 1.0))
    return _without_trifles(log_ns.reshape(*index.shape, usual))


def _stretches(index: SpanIndex) -> tuple[Integers, Integers]:
    """Return begin and end, on the axis of all ranks, of what no communication or host span
    covers.
    """
    covers = index.counts & ~equals(index.table, "kind", Kind.ITERATION, Kind.COMPUTE)
    start, end = axis_of(index)
    low, high = united(start[covers], end[covers])
    return high[:-1], low[1:]


def _cells(index: SpanIndex, end: Integers) -> tuple[Integers, Integers]:
    """Return rank and iteration of each stretch as one number, and when that iteration began.

    -1 for a stretch that ends between two iterations.
    """
    start, stop = axis_of(index)
    rows = np.flatnonzero(index.counts)
    cell = (index.row * index.shape[1] + index.slot)[rows]
    size = index.shape[0] * index.shape[1]
    low = np.full(size, np.iinfo(np.int64).max)
    high = np.full(size, -1, dtype=np.int64)
    np.minimum.at(low, cell, start[rows])
    np.maximum.at(high, cell, stop[rows])
    order = np.argsort(low)
    place = np.searchsorted(low[order], end, side="left") - 1
    found = order[np.maximum(place, 0)]
    inside = (place >= 0) & (end <= high[found])
    return np.where(inside, found, -1), low[found]


def _without_trifles(log_ns: Floats) -> Work | None:
    """Leave out stretches that take next to nothing, and tell backward passes by their length."""
    seen: Flags = np.asarray(np.isfinite(log_ns).any(axis=(0, 1)))
    typical = np.zeros(len(seen))
    typical[seen] = np.exp(np.nanmedian(log_ns[:, :, seen], axis=(0, 1)))
    kept = typical >= PASSES.least_segment_share * typical.sum()
    if not kept.any():
        return None
    lasting = typical[kept]
    is_backward = lasting > PASSES.backward_ratio * np.median(lasting)
    return Work(
        log_ns=log_ns[:, :, kept],
        phase=np.where(is_backward, BACKWARD, FORWARD).astype(np.int64),
        microbatch=np.cumsum(np.r_[0, is_backward[:-1]]).astype(np.int64),
    )
