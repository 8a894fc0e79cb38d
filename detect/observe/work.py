"""Passes and layers as samples of work: their own times, by rank, iteration and operation.

Problem: in some passes a rank's own time and its waiting cannot be told apart. Megatron-Core
overlaps the reduction of input gradients over the TP group with the weight gradients. The pass then
waits for the group's slowest member inside its own compute spans, so on a GPU a slow rank makes the
backward passes of its whole TP group look slow.

Idea: modules and the collectives in them, both recorded, tell what a rank did by itself
(`own_times`). CPU runs do not need this: a thread that waits uses no CPU time.

    Samples, work_of             passes as (rank, iteration, operation)
    gathers_of, pass_times       passes that wait for sharded parameters
    parts_of, outside_waits      passes that wait in attention or experts, where nobody recorded it
    entangled_in, own_times      passes that wait inside their modules
    Layers, layers_of            layers as (rank, iteration, operation)
    stretches_of                 where no passes are marked: work between communications
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from detect.observe.axes import along, cut
from detect.observe.operations import BACKWARD, FORWARD, Work
from detect.observe.spans import (
    MEGATRON_LAYERS,
    MODULES,
    SpanIndex,
    enclosed_time,
    enclosing,
    sums_by_cell,
    where_text,
)
from detect.stats import robust
from detect.thresholds.observing import PASSES
from megascan.arrays import (
    Flags,
    Floats,
    Integers,
    group_lengths,
    group_starts,
    lower_medians,
    united,
)
from megascan.schema import Kind, Phase, Track
from megascan.timeline import codes, equals, numbers
from megascan.vocabulary import (
    ATTENTION,
    MODEL_AXES,
    MOE,
    OUTPUT_LAYER,
    PLAIN_LAYER,
    CountsAs,
    axis_of_group,
    backward_of,
    is_data_parallel,
    names_of,
    recompute_of,
)

LAYER_NAMES = {
    name: phase
    for phase, text in ((FORWARD, Phase.FORWARD), (BACKWARD, Phase.BACKWARD))
    for name in names_of(CountsAs.LAYER, phases=[text])
}
HEADS = (OUTPUT_LAYER, backward_of(OUTPUT_LAYER))
"""No modules of layers, but they may overlap a model-parallel collective as well."""
REPEATED_MODULES = names_of(CountsAs.MODULE, phases=[Phase.RECOMPUTE])
ATTENTION_NAMES, EXPERTS_NAMES = (
    (name, backward_of(name), recompute_of(name)) for name in (ATTENTION, MOE)
)
_WAIT_INSIDE = {"cp": ATTENTION_NAMES, "ep": EXPERTS_NAMES}
"""Modules in which ranks wait for others of an axis."""
_NEVER = np.iinfo(np.int64).max
_RANKS_THAT_TELL = 32
"""Ranks whose layers are compared, of all stages together: which layers a rank has is decided by
its stage, so a few of each tell as much as thousands, and are quickly looked at one by one."""


def layer_spans(index: SpanIndex) -> Flags:
    """Return which spans are layers: those of Megatron-Core, or else what a plain model repeats."""
    return index.named(MEGATRON_LAYERS if index.frame.has_layers else LAYER_NAMES)


def layer_modules(index: SpanIndex, *, with_repeated: bool = False) -> Flags:
    """Return which spans are the modules of layers, `with_repeated` forwards (recomputation) if
    asked: none lies in another.

    Of `mlp` inside `moe` the outer one counts. Where no modules were traced, as in models of plain
    PyTorch, the layers stand for them.
    """
    if not index.frame.has_modules:
        return layer_spans(index)
    modules = index.named((*MODULES, *(REPEATED_MODULES if with_repeated else ())))
    outer = index.named(EXPERTS_NAMES)
    if outer.any():
        inner = modules & ~outer
        owner = enclosing(index, outer, inner)
        start, end = index.axis
        # where one module ends and the next begins, digits that were cut off may let them overlap
        lies_in = (owner >= 0) & ((start[inner] + end[inner]) // 2 < end[outer][owner])
        modules[np.flatnonzero(inner)[lies_in]] = False
    return modules


def phases_of(index: SpanIndex, rows: Flags, names: dict[str, int]) -> Integers:
    """Return the phase of each span of `rows`, by its name."""
    code, texts = codes(index.table, "name")
    phase_of_code = np.array([names.get(text, 0) for text in texts], dtype=np.int64)
    return np.asarray(phase_of_code[code[rows]])


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Passes or layers, (sample,) each: where they were recorded, and which operation they are."""

    row: Integers
    slot: Integers
    phase: Integers
    chunk: Integers
    microbatch: Integers

    @classmethod
    def of(cls, index: SpanIndex, rows: Flags, names: dict[str, int]) -> Samples:
        """Take spans that have their phase by name."""
        return cls(
            row=index.row[rows],
            slot=index.slot[rows],
            phase=phases_of(index, rows, names),
            chunk=np.maximum(numbers(index.table, "chunk")[rows], 0),
            microbatch=np.maximum(numbers(index.table, "microbatch")[rows], 0),
        )

    def sums(self, amounts: Floats, shape: tuple[int, int]) -> Floats:
        """Return the sums of what samples amount to, (rank, iteration) of this shape."""
        return sums_by_cell(self.row, self.slot, amounts, shape)


@dataclass(frozen=True, kw_only=True)
class Gathers:
    """What each pass holds where parameters are sharded over the replicas, (pass,) each."""

    layers_ns: Floats
    holds: Flags
    """Whether parameters are gathered beside the pass."""


def gathers_of(index: SpanIndex, passes: Flags, phase: Integers) -> Gathers:
    """Return what passes of these phases hold that wait for sharded parameters.

    A model of Megatron-Core, whose loss is recorded, gathers its parameters once an iteration,
    beside the first forward passes, unless they are sharded as well (FSDP): then its backward
    passes gather them again, and its modules tell what the rank did by itself.
    """
    layers = index.named((PLAIN_LAYER, backward_of(PLAIN_LAYER)))
    holds = _hold(index, passes, _over_replicas(index, "all_gather"))
    is_megatron = index.frame.has_loss and not layers.any()
    if is_megatron:
        holds &= BACKWARD in _phases_that_hold(holds, phase)
    if not holds.any():
        return Gathers(layers_ns=np.zeros(len(holds)), holds=holds)
    if not is_megatron:
        stands_for = _layers_a_recorded_one(index, passes, layers)
        return Gathers(layers_ns=stands_for * _self_time_in(index, passes, layers), holds=holds)
    parts = layer_modules(index, with_repeated=True)
    stands_for = _layers_a_recorded_one(index, passes, layer_spans(index))
    layers_ns = stands_for * _self_time_in(index, passes, parts)
    if parts.any():
        layers_ns += _self_time_in(index, passes, index.named(HEADS))
    return Gathers(layers_ns=layers_ns, holds=holds)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What each pass computes in its modules, (pass,) ns each; 0 where none were recorded."""

    attention_ns: Floats
    experts_ns: Floats
    others_ns: Floats
    """MLPs and the output layer."""

    def outside(self, hidden: Collection[str]) -> Floats:
        """Return what is computed outside of the parts in which a rank waits for the others of an
        axis, `hidden` as nobody recorded it, (pass,) ns; 0 where no part is known to be its own.

        CP groups send keys and values round in a ring, inside attention; EP groups send tokens to
        their experts and back. Along TP ranks wait in all parts.

            slow rank    |── attention ────────|── mlp ────|── output layer ──|
            its mate     |── attention ─ waits ┈┈┈|── mlp ─|── output layer ─|
        """
        if "tp" in hidden or ("ep" in hidden and not self.experts_ns.any()):
            return np.zeros(len(self.others_ns))
        outside_ns = self.others_ns.copy()
        if "cp" not in hidden:
            outside_ns += self.attention_ns
        if "ep" not in hidden:
            outside_ns += self.experts_ns
        return outside_ns


def parts_of(index: SpanIndex, passes: Flags) -> Parts:
    """Return what each pass computes, part by part."""
    if not index.frame.has_modules:
        nothing = np.zeros(int(passes.sum()))
        return Parts(attention_ns=nothing, experts_ns=nothing, others_ns=nothing)
    modules = layer_modules(index, with_repeated=True)
    stands_for = _layers_a_recorded_one(index, passes, layer_spans(index))
    attention, experts = (index.named(names) for names in (ATTENTION_NAMES, EXPERTS_NAMES))
    others_ns = stands_for * _self_time_in(index, passes, modules & ~attention & ~experts)
    return Parts(
        attention_ns=stands_for * _self_time_in(index, passes, modules & attention),
        experts_ns=stands_for * _self_time_in(index, passes, modules & experts),
        others_ns=others_ns + _self_time_in(index, passes, index.named(HEADS)),
    )


def _self_time_in(index: SpanIndex, passes: Flags, parts: Flags) -> Floats:
    """Return the summed self time of the `parts` that start in each pass, (pass,) ns."""
    return enclosed_time(index, passes, parts, index.self_time(parts))


def _over_replicas(index: SpanIndex, *operations: str) -> Flags:
    """Return which spans are such collectives over the replicas, beside other work."""
    over_replicas = where_text(index.table, "group", is_data_parallel)
    asked = over_replicas & equals(index.table, "op", *operations) & index.in_iteration
    return np.asarray(asked & (index.track == Track.OVERLAPPED))


def _hold(index: SpanIndex, passes: Flags, inner: Flags) -> Flags:
    """Return in which passes spans of `inner` start, (pass,)."""
    return enclosed_time(index, passes, inner, np.ones(int(inner.sum()))) > 0


def reduces_beside(index: SpanIndex, passes: Flags) -> Flags:
    """Return beside which passes gradients are reduced over the replicas, (pass,).

    A kernel of NCCL holds multiprocessors for as long as it waits, so a pass beside it is longer on
    whoever waits for the slowest replica:

        slow replica     |── backward 1 ───|── backward 2 ───|
        its peer         |── backward 1 ──|── backward 2 ─────|     longer than its first one
        reductions                             |──────────────|

    Example: a quarter of a rank's multiprocessors is taken. Beside its peer's its forward takes
    1.39 times as long, its first backward 1.30 times, and its second one 0.82 times.
    """
    if index.is_cpu:
        return np.zeros(int(passes.sum()), dtype=bool)
    return _hold(index, passes, _over_replicas(index, "all_reduce", "reduce_scatter"))


def hide_waiting(phase: Integers, gathers: Gathers) -> bool:
    """Return whether passes wait for all other ranks while parameters are gathered, and no layers
    say how long: then all passes last as long as those of the slowest rank.
    """
    return not gathers.layers_ns.any() and len(_phases_that_hold(gathers.holds, phase)) > 0


def _phases_that_hold(holds: Flags, phase: Integers) -> tuple[int, ...]:
    """Return the phases whose passes hold something, more of them than `PASSES.entangled_share`."""
    return tuple(
        one
        for one in np.unique(phase).tolist()
        if float(holds[phase == one].mean()) > PASSES.entangled_share
    )


def pass_times(time_ns: Floats, phase: Integers, gathers: Gathers) -> tuple[Floats, Flags]:
    """Return how long each pass kept its device busy, (pass,) ns, and in which only layers count.

    `time_ns` is each pass's own time minus its loading of data. With parameters sharded over the
    replicas (FSDP), what lies between the layers is mostly waiting for the slowest replica's part
    of the next layer's parameters, so only the layers count:

        forward      |── layer 1 ──| waiting |── layer 2 ──| waiting |── layer 3 ──|
        all_gather   |──── parameters of 2 ──|──── parameters of 3 ──|
    """
    waits = np.isin(phase, _phases_that_hold(gathers.holds, phase))
    is_sharded = waits & (gathers.layers_ns > 0)
    return np.maximum(np.where(is_sharded, gathers.layers_ns, time_ns), 1.0), is_sharded


def outside_waits(
    parts: Parts, entangled: Entangled, phase: Integers, hidden: Collection[str]
) -> Floats:
    """Return what passes compute outside of the modules in which they wait for others of the
    `hidden` axes (`Parts.outside`), minus what they wait for in TP groups there, (pass,) ns; NaN
    where no part is known to be a rank's own.
    """
    outside_ns = parts.outside(hidden)
    names = [name for axis in hidden for name in _WAIT_INSIDE.get(axis, ())]
    others = cut(entangled, "module", ~np.isin(entangled.kinds, names)[entangled.kind])
    own_ns = own_times(others, phase, np.maximum(outside_ns, 1.0)).time_ns
    own_ns[outside_ns <= 0] = np.nan
    return own_ns


def as_whole_passes(outside_ns: Floats, time_ns: Floats, row: Integers, alike: Integers) -> Floats:
    """Return what passes take by themselves, (pass,) ns, of whose work only a part is known without
    waiting; NaN where it is not known.

    `time_ns` is that of whole passes with waiting; those of equal numbers in `alike` (stage, phase)
    hold the same parts. The slowest rank waits for nobody, so the least ratio of a whole pass to
    what lies outside of its waiting says what the rest adds:

        rank      whole pass   outside   ratio   by itself
        slow       12.0 ms      6.0 ms    2.00    12.0 ms
        its mate   12.0 ms      5.0 ms    2.40    10.0 ms
    """
    whole_ns = outside_ns.copy()
    known = np.isfinite(outside_ns)
    for one in np.unique(alike[known]).tolist():
        rows = known & (alike == one)
        _, ratios = lower_medians(row[rows], time_ns[rows] / outside_ns[rows])
        whole_ns[rows] *= ratios.min()
    return whole_ns


def _layers_a_recorded_one(index: SpanIndex, passes: Flags, layers: Flags) -> Floats:
    """Return for how many layers a recorded one of each pass stands, (pass,); 1 if all are."""
    if not index.is_sampled or not layers.any():
        return np.ones(int(passes.sum()))
    chunk = np.maximum(numbers(index.table, "chunk"), 0)
    place = index.row * (int(chunk.max(initial=0)) + 1) + chunk
    found = np.unique(np.stack([place[layers], numbers(index.table, "layer")[layers]]), axis=1)
    whole = np.bincount(found[0], minlength=int(place.max(initial=0)) + 1)[place[passes]]
    recorded = enclosed_time(index, passes, layers, np.ones(int(layers.sum())))
    return np.asarray(whole / np.maximum(recorded, 1.0))


def work_of(
    samples: Samples, time_ns: Floats, shape: tuple[int, int], held_up: Flags | None = None
) -> Work:
    """Return the mean time by (rank, iteration, phase x chunk x microbatch).

    Where some passes of a phase are `held_up`, (pass,), by what runs beside them, only those of
    other microbatches are known.
    """
    num_chunks = int(samples.chunk.max(initial=0)) + 1
    num_microbatches = int(samples.microbatch.max(initial=0)) + 1
    num_ops = 2 * num_chunks * num_microbatches
    op = (samples.phase * num_chunks + samples.chunk) * num_microbatches + samples.microbatch
    num_ranks, num_iterations = shape
    flat = (samples.row * num_iterations + samples.slot) * num_ops + op
    size = num_ranks * num_iterations * num_ops
    total = np.bincount(flat, weights=time_ns, minlength=size)
    count = np.bincount(flat, minlength=size)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_ns = np.log(total / count)
    log_ns[count == 0] = np.nan
    log_ns = log_ns.reshape(num_ranks, num_iterations, num_ops)
    if held_up is not None:
        log_ns[:, :, _left_out(op, held_up, num_ops, num_microbatches)] = np.nan
    ops = np.arange(num_ops)
    return Work(
        log_ns=log_ns,
        phase=ops // (num_chunks * num_microbatches),
        microbatch=ops % num_microbatches,
    )


def _left_out(op: Integers, held_up: Flags, num_ops: int, num_microbatches: int) -> Flags:
    """Return the operations that are held up, (operation,), of phases and chunks that have others.

    Example: of two backward passes gradients are reduced beside the second one; of one, none is
    left out.
    """
    known, is_held = (np.bincount(one, minlength=num_ops) > 0 for one in (op, op[held_up]))
    has_others = (known & ~is_held).reshape(-1, num_microbatches).any(axis=1)
    return is_held & np.repeat(has_others, num_microbatches)


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Transformer layers, (layer,) each."""

    samples: Samples
    time_ns: Floats
    number: Integers
    is_forward: Flags
    entangled: Entangled | None
    """None where CPU times are used, which hold no waiting."""

    @classmethod
    def of(cls, index: SpanIndex) -> Layers:
        """Take the layers of some ranks."""
        rows = layer_spans(index)
        forward = names_of(CountsAs.LAYER, phases=[Phase.FORWARD])
        entangled = None
        if not index.uses_cpu_time:
            entangled = entangled_in(index, rows, layer_modules(index))
        return cls(
            samples=Samples.of(index, rows, LAYER_NAMES),
            time_ns=np.maximum(index.self_time(rows), 1.0),
            number=numbers(index.table, "layer")[rows],
            is_forward=equals(index.table, "name", *forward)[rows],
            entangled=entangled,
        )


def layers_of(
    layers: Layers, stage: Integers, shape: tuple[int, int], *, are_alike: bool = False
) -> Work | None:
    """Return transformer layers, averaged over the chunks and layers of a rank; None where they
    were not traced, or are unlike.

    `stage` is (rank,). With `are_alike` the trace says that layers are alike, whatever their times.
    """
    time_ns = layers.time_ns
    if not len(time_ns):
        return None
    if layers.entangled is not None:
        time_ns = own_times(layers.entangled, layers.samples.phase, time_ns).time_ns
    if not are_alike and not _layers_alike(layers, stage, time_ns):
        return None
    work = work_of(layers.samples, time_ns, shape)
    keys = work.phase * (work.microbatch.max() + 1) + work.microbatch
    slots, first = np.unique(keys, return_index=True)
    by_slot = [robust.mean(work.log_ns[:, :, keys == key], axis=2) for key in slots]
    return Work(
        log_ns=np.stack(by_slot, axis=2), phase=work.phase[first], microbatch=work.microbatch[first]
    )


def _layers_alike(layers: Layers, stage: Integers, time_ns: Floats) -> bool:
    """Return False when layers of one rank differ by 15 % and more (dense and expert layers mixed).

    Asked are the first ranks of each stage, as many of each.
    """
    stages = np.unique(stage)
    num_of_each = -(-_RANKS_THAT_TELL // len(stages))
    asked = np.concatenate([np.flatnonzero(stage == one)[:num_of_each] for one in stages])
    use = layers.is_forward & np.isin(layers.samples.row, asked)
    row, time_ns, layer = layers.samples.row[use], time_ns[use], layers.number[use]
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
    """(pass,): what the pass took minus the waiting for others; transfers are included."""


@dataclass(frozen=True, kw_only=True)
class Entangled:
    """Modules that hold overlapped collectives, (module,) each."""

    row: Integers = field(metadata=along("module"))
    slot: Integers = field(metadata=along("module"))
    kind: Integers = field(metadata=along("module"))
    """Number of the module's name in `kinds`."""
    kinds: tuple[str, ...]
    owner: Integers = field(metadata=along("module"))
    """Number of the pass, -1 for none."""
    span_ns: Floats = field(metadata=along("module"))
    """The module's span minus communication for which the module stands still."""
    lead_ns: Floats = field(metadata=along("module"))
    """Compute before the launch of the first reduction, or else of the first collective."""
    collective_ns: Floats = field(metadata=along("module"))
    """The collectives in the module that it may have waited for."""
    unseen: Unseen | None
    """None where all modules were recorded."""


@dataclass(frozen=True, kw_only=True)
class Unseen:
    """What tells of modules that were not recorded: their collectives, which always are."""

    stands_in: Flags = field(metadata=along("module"))
    """Whether the module stands for others that were not recorded."""
    held: Integers = field(metadata=along("module"))
    """Number of collectives in the module."""
    lost: Integers = field(metadata=along("pass"))
    """Number of collectives in none of the pass's recorded modules."""
    lost_ns: Floats = field(metadata=along("pass"))
    """Time of the collectives that `lost` counts."""


def own_times(entangled: Entangled, phase: Integers, time_ns: Floats) -> OwnTimes:
    """Return the own time of each pass, and which phases are entangled.

    `phase` (pass,) and `time_ns` (pass,) are of the passes that own the modules of `entangled`; a
    phase is entangled where more than `PASSES.entangled_share` of its passes hold such a module.

        mlp-backward   |── own compute ──|── weight gradients ──| waiting |── own ──|
        all_reduce                       |───── wait ───── transfer ──────|
                       |───── lead ──────|

    A rank that is a little faster than its partners gathers a lead over them from module to module.
    Between launch and end of the collective a rank's own work cannot be seen where the transfer
    hides it; there the same time h is counted for all ranks. Two measures of a module's own time
    exist:

        span − collective + h   = exact for the last to arrive; too short by what is hidden in the
                                  wait of others, or behind a transfer that takes longer than that
                                  work
        k · lead                = start to the launch of the first reduction, times the usual ratio
                                  of the first measure to the lead; blind for what is slow only
                                  afterwards

    Each is summed over an iteration, and the larger sum counts. A device that is f times slower has
    f times the lead, so f comes out whatever h and k are, even where the transfer hides all weight
    gradients.

    Limit: in the only TP group of a job, k comes from the suspects themselves.
    """
    inside = entangled.owner >= 0
    owner = entangled.owner[inside]
    holds = np.zeros(len(phase), dtype=bool)
    holds[owner] = True
    phases = _phases_that_hold(holds, phase)
    estimates = []
    for part_ns in _own_and_unwaited(entangled):
        more_ns = part_ns - entangled.span_ns
        difference = np.zeros(len(phase))
        np.add.at(difference, owner, more_ns[inside])
        if entangled.unseen is not None:
            difference += _of_unseen_modules(entangled, entangled.unseen, more_ns)
        difference[~np.isin(phase, phases)] = 0.0
        estimates.append(np.maximum(time_ns + difference, 1.0))
    return OwnTimes(phases, *estimates)


def _of_unseen_modules(entangled: Entangled, unseen: Unseen, difference_ns: Floats) -> Floats:
    """Return the difference that modules which were not recorded make to each pass, (pass,) ns.

    How much own work a module has beyond its span minus its collective, the recorded modules of the
    pass tell. Collectives, and so the waits in them, are always recorded.
    """
    num_passes = len(unseen.lost)
    use = unseen.stands_in & (entangled.owner >= 0)
    owner = entangled.owner[use]
    more_ns = (difference_ns + entangled.collective_ns)[use]
    seen = np.bincount(owner, weights=unseen.held[use], minlength=num_passes)
    total_ns = np.bincount(owner, weights=more_ns, minlength=num_passes)
    usual_ns = unseen.lost * total_ns / np.maximum(seen, 1.0)
    return np.asarray(np.where(seen > 0, usual_ns - unseen.lost_ns, 0.0))


def entangled_in(index: SpanIndex, passes: Flags, modules: Flags) -> Entangled:
    """Return the `modules` that overlap model-parallel collectives, and the passes (layers) that
    hold them. Modules of a rank must not overlap each other.

    With sequence parallelism other collectives lie before the reduction. A collective that the
    module stands still for (a gather of output gradients) is not counted as part of the module. A
    gather of the module's input runs beside compute: the module waited for it only if the reduction
    begins as soon as the gather is over; otherwise the gather hides no time and costs none.

        mlp-backward   |waiting|── own compute ──|── weight gradients ──| waiting |
        all_gather     |───────| |─ of inputs ─|
        reduce_scatter         |── lead ─────────|─ wait ─── transfer ─|

    Collectives are always recorded: one in no module lies in a module that was not recorded.
    """
    overlapped = index.of_kind(Kind.COLLECTIVE) & (index.track == Track.OVERLAPPED)
    overlapped &= where_text(index.table, "group", lambda text: axis_of_group(text) in MODEL_AXES)
    reduces = equals(index.table, "op", "all_reduce", "reduce_scatter")[overlapped]
    blocking = index.blocking()
    module = enclosing(index, modules, overlapped)
    awaited = ~_is_hidden(index, overlapped, reduces, module)
    inside = (module >= 0) & awaited
    collective_ns = np.bincount(
        module[inside], weights=index.duration[overlapped][inside], minlength=int(modules.sum())
    )
    first = _launch_of_first(index.start[overlapped], reduces, module, len(collective_ns))
    length = index.duration[modules].astype(np.float64)
    length -= enclosed_time(index, modules, blocking, index.duration[blocking])
    others = blocking.copy()
    others[np.flatnonzero(overlapped)[awaited]] = True
    lead = first - index.start[modules] - _time_before(index, modules, others, first)
    name, names = codes(index.table, "name")
    found = Entangled(
        row=index.row[modules],
        slot=index.slot[modules],
        kind=name[modules],
        kinds=tuple(names),
        owner=enclosing(index, passes, modules),
        span_ns=np.maximum(length, 1.0),
        lead_ns=np.maximum(lead, 1.0),
        collective_ns=np.minimum(collective_ns, length),
        unseen=_unseen(index, passes, modules, overlapped, module) if index.is_sampled else None,
    )
    return cut(found, "module", first < _NEVER)


def _launch_of_first(
    start: Integers, reduces: Flags, module: Integers, num_modules: int
) -> Integers:
    """Return when each module launched its first reduction, (module,) ns; without a reduction, its
    first overlapped collective, and without any, `_NEVER`.

    `start`, whether it `reduces`, and the number of its `module` are of each collective.
    """
    inside = module >= 0
    first = np.full((2, num_modules), _NEVER)
    for row, chosen in zip(first, (inside & reduces, inside), strict=True):
        np.minimum.at(row, module[chosen], start[chosen])
    return np.asarray(np.where(first[0] < _NEVER, first[0], first[1]))


def _is_hidden(index: SpanIndex, overlapped: Flags, reduces: Flags, module: Integers) -> Flags:
    """Flag the overlapped collectives that nobody waited for, (collective,): compute went on beside
    them until after their end.

    That is known of collectives before a reduction of the same `module`, since a rank that waited
    for one launches the reduction at once. Example: of 100 µs up to the reduction a gather takes
    the first 60; nobody waited. Had it taken 99, somebody may have.
    """
    start, end = (times[overlapped] for times in index.axis)
    order = np.argsort(start, kind="stable")
    reductions = order[reduces[order]]
    if not len(reductions):
        return np.zeros(len(start), dtype=bool)
    place = np.searchsorted(start[reductions], start, side="right")
    following = reductions[np.minimum(place, len(reductions) - 1)]
    known = (place < len(reductions)) & (module == module[following]) & (module >= 0) & ~reduces
    rest = start[following] - end
    return np.asarray(known & (rest > PASSES.last_reach_share * (start[following] - start)))


def _time_before(index: SpanIndex, modules: Flags, inner: Flags, until: Integers) -> Floats:
    """Return for how long `inner` spans lasted in each module before `until`, (module,) ns."""
    owner = enclosing(index, modules, inner)
    within = owner >= 0
    owner, start, length = owner[within], index.start[inner][within], index.duration[inner][within]
    spent = np.clip(until[owner] - start, 0, length)
    return np.bincount(owner, weights=spent, minlength=len(until)).astype(np.float64)


def _unseen(
    index: SpanIndex, passes: Flags, modules: Flags, overlapped: Flags, module: Integers
) -> Unseen:
    """Count the collectives in each of the modules, and in each pass those in no module.

    `module` is the number of each collective's module, -1 for none.
    """
    num_modules, num_passes = int(modules.sum()), int(passes.sum())
    owner = enclosing(index, passes, overlapped)
    lost = (module < 0) & (owner >= 0)
    lost_ns = np.bincount(owner[lost], index.duration[overlapped][lost], num_passes)
    return Unseen(
        stands_in=numbers(index.table, "layer")[modules] >= 0,
        held=np.bincount(module[module >= 0], minlength=num_modules),
        lost=np.bincount(owner[lost], minlength=num_passes),
        lost_ns=lost_ns.astype(np.float64),
    )


def _own_and_unwaited(modules: Entangled) -> tuple[Floats, Floats]:
    """Return each module's own time, and each module's span minus the waiting for others."""
    own, unwaited = modules.span_ns.copy(), modules.span_ns.copy()
    for kind in np.unique(modules.kind):
        use = modules.kind == kind
        shortest = float(np.quantile(modules.collective_ns[use], PASSES.shortest_quantile))
        hidden = min(shortest, _typical(modules.row[use], modules.lead_ns[use]))
        own[use] = _own_of_kind(modules, use, shortest, hidden)
        unwaited[use] = np.minimum(own[use] + shortest - hidden, modules.span_ns[use])
    return own, unwaited


def _own_of_kind(modules: Entangled, use: Flags, shortest: float, hidden: float) -> Floats:
    """Return the own time of the modules of one kind."""
    row, lead = modules.row[use], modules.lead_ns[use]
    collective = modules.collective_ns[use]
    after = modules.span_ns[use] - collective + hidden
    exact = collective - shortest <= PASSES.last_reach_share * lead
    rest = after - lead - hidden
    ratio = after / lead
    if not exact.any() or np.median(rest[exact]) <= PASSES.last_reach_share * np.median(lead):
        # the transfer ends last, whoever arrives last: exact for all, low for slow ranks
        usual = _typical(row, ratio, upper=True)
    else:
        usual = _usual_ratio(row, ratio, exact)
    place = row * (int(modules.slot.max(initial=0)) + 1) + modules.slot[use]
    more = np.bincount(place, weights=usual * lead - after)
    return np.where(more[place] > 0, usual * lead, after)


def _usual_ratio(row: Integers, ratio: Floats, exact: Flags) -> float:
    """Return the usual ratio of own time to lead, by the modules whose ratio is exact.

    Where few ranks have enough of these, all modules of the other ranks are used instead, unless
    what is hidden in their waits explains the difference.
    """
    num_exact = np.bincount(row, weights=exact)[row]
    known = exact & (num_exact >= PASSES.min_exact_modules)
    others = ~np.isin(row, row[known])
    if not others.any() or 2 * len(np.unique(row[known])) >= len(np.unique(row)):
        return _typical(row[known], ratio[known])
    waiting = _typical(row[others], ratio[others])
    if not known.any():
        return waiting
    usual = _typical(row[known], ratio[known])
    return usual if waiting <= usual <= PASSES.max_hidden_ratio * waiting else waiting


def _typical(row: Integers, values: Floats, *, upper: bool = False) -> float:
    """Return the lower median over ranks (with `upper` the upper) of their lower medians."""
    medians = np.sort(lower_medians(row, values)[1])
    return float(medians[(len(medians) - (0 if upper else 1)) // 2])


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
    start, stop = index.axis
    covers = index.in_iteration & ~equals(index.table, "kind", Kind.ITERATION, Kind.COMPUTE)
    low, high = united(start[covers], stop[covers])
    begin, end = high[:-1], low[1:]  # what no communication or host span covers
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
    log_ns = np.full((index.num_cells, usual), np.nan)
    log_ns[cell[kept], number[kept]] = np.log(np.maximum(length[kept], 1.0))
    return _without_trifles(log_ns.reshape(*index.shape, usual))


def _cells(index: SpanIndex, end: Integers) -> tuple[Integers, Integers]:
    """Return rank and iteration of each stretch as one number, and when that iteration began.

    -1 for a stretch that ends between two iterations.
    """
    start, stop = index.axis
    rows = np.flatnonzero(index.in_iteration)
    cell = index.cell[rows]
    low = np.full(index.num_cells, np.iinfo(np.int64).max)
    high = np.full(index.num_cells, -1, dtype=np.int64)
    np.minimum.at(low, cell, start[rows])
    np.maximum.at(high, cell, stop[rows])
    order = np.argsort(low)
    place = np.searchsorted(low[order], end, side="left") - 1
    found = order[np.maximum(place, 0)]
    inside = (place >= 0) & (end <= high[found])
    return np.where(inside, found, -1), low[found]


def _without_trifles(log_ns: Floats) -> Work | None:
    """Leave out stretches that take next to nothing, and recognise backward passes by length."""
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
