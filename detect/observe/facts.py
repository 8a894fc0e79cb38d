"""What the spans of some ranks say, before they are compared with those of others.

    shard 0   spans ── facts_of ──► Facts ┐
    shard 1   spans ── facts_of ──► Facts ┼── joined ──► Facts of all ranks ── observations
    …                                     ┘              (detect.observe.extract)

Questions about single spans, most of all which span lies in which, need one rank's spans only. The
process that has the spans answers them and hands over a few numbers for each pass, layer and module
that waits inside, a quarter of the spans' bytes at most. What is typical of all ranks is found
afterwards. Facts of all ranks are the same to the bit however the ranks were divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa

from detect.observe import launches, stalls, work
from detect.observe.launches import Launches
from detect.observe.spans import (
    WORK_NAMES,
    Frame,
    SpanIndex,
    enclosed_time,
    ending_time,
    uncovered_time,
    unsplit_time,
    waiting_beside,
    waiting_time,
)
from detect.observe.stalls import Collections, Contents
from detect.observe.work import Entangled, Gathers, Layers, Parts, Samples
from megascan.arrays import Cover, Flags, Floats, Integers, united
from megascan.schema import COMMUNICATION_KINDS, Kind, Track
from megascan.timeline import equals, numbers
from megascan.vocabulary import (
    ATTENTION,
    EMBEDDING,
    LOSS,
    MLP,
    OPTIMIZER,
    OUTPUT_LAYER,
    backward_of,
)

if TYPE_CHECKING:
    from detect.observe.modules import SlowRuns

Record = TypeVar("Record")
MODULES = (MLP, ATTENTION, OUTPUT_LAYER)
LOOKUPS = (EMBEDDING, LOSS)
"""Parts of a model that move memory for each token and hardly compute. The backward of the
embedding is none: most of it fills the gradient of the whole vocabulary
(benchmarks/results/lookups_h100.md).
"""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Forward and backward passes (layers where none are marked), (pass,) each."""

    samples: Samples
    time_ns: Floats
    """Own times minus loading."""
    wall_ns: Floats
    """Own times minus loading by the wall, where CPU time is used; 0 elsewhere."""
    beside_ns: Floats
    """For how long communication that the pass may have waited for was under way beside it."""
    reduces: Flags
    """Whether gradients are reduced over the replicas beside the pass; on CPUs not looked for."""
    gathers: Gathers
    parts: Parts | None
    """None where ranks share neither attention (CP) nor experts (EP)."""
    entangled: Entangled
    contents: Contents | None
    """None on the CPU, where nothing stands still."""


@dataclass(frozen=True, kw_only=True)
class Cells:
    """Sums by (rank, iteration); those that `Observations` has, too, are described there."""

    num_spans: Integers
    loading_ns: Floats
    loading_cost_ns: Floats
    """What loading costs the rank; `loading_ns` is how long its spans last."""
    saving_ns: Floats
    optimizer_ns: Floats
    attention_ns: Floats
    exchanged_bytes: Floats
    dense_ns: Floats
    """See `Tokenwise`, and so of `lookups_ns`."""
    lookups_ns: Floats
    modules_ns: Floats
    gap_ns: Floats
    """In no span."""
    ending_ns: Floats
    waiting_ns: Floats
    split_wait_ns: Floats
    beside_ns: Floats
    unsplit_ns: Floats
    starved_share: Floats


_NAN_IF_ABSENT = (
    "loading_ns", "loading_cost_ns", "optimizer_ns", "attention_ns", "dense_ns", "lookups_ns",
    "modules_ns", "starved_share", "exchanged_bytes",
)  # fmt: skip
"""Fields of `Cells` that are NaN for a rank without such spans; the others are 0."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that is known of some ranks by themselves."""

    ranks: Integers
    passes: Passes
    layers: Layers
    collecting: Collections
    cells: Cells
    launches: Launches | None
    slow_runs: SlowRuns | None
    is_split: bool
    """Some communication could be split into waiting and transfer."""
    longest_ns: Floats
    """(iteration,): the longest span of the iteration itself; 0 where there are none."""
    begin_ns: Floats
    """(iteration,): first start of all spans."""
    end_ns: Floats
    """(iteration,): last end of all spans."""


def facts_in(frame: Frame, *tables: pa.Table) -> Facts:
    """Return what the spans of a frame's ranks say; several tables follow each other in time."""
    spans = tables[0]
    if len(tables) > 1:
        spans = pa.concat_tables(tables).unify_dictionaries().combine_chunks()
    return facts_of(SpanIndex(spans, frame))


def facts_of(index: SpanIndex) -> Facts:
    """Return what the spans of some ranks say; iterations are those of the frame."""
    names = WORK_NAMES if index.frame.has_passes else work.LAYER_NAMES
    rows = index.named(names)
    samples = Samples.of(index, rows, names)
    data, saves = index.of_kind(Kind.DATA), index.of_kind(Kind.CHECKPOINT)
    loading_cost_ns, inside_ns = stalls.loading_time(index, rows, samples.phase, data)
    optimizer, attention = index.named((OPTIMIZER,)), index.named((ATTENTION,))
    split = index.is_split
    begin_ns, end_ns, longest_ns = _extent(index)
    return Facts(
        ranks=index.ranks,
        passes=_passes(index, rows, samples, data, inside_ns),
        layers=Layers.of(index),
        collecting=stalls.collecting_time(index, rows, index.of_kind(Kind.GC)),
        cells=Cells(
            num_spans=np.bincount(
                index.cell[index.in_iteration], minlength=index.num_cells
            ).reshape(index.shape),
            loading_ns=index.sums_or_nan(data, index.duration[data]),
            loading_cost_ns=index.sums_or_nan(data, loading_cost_ns),
            saving_ns=index.sums(saves, index.duration[saves]),
            optimizer_ns=index.sums_or_nan(optimizer, index.self_time(optimizer)),
            attention_ns=index.sums_or_nan(attention, index.self_time(attention)),
            exchanged_bytes=_exchanged(index),
            dense_ns=_dense(index),
            lookups_ns=_lookups(index),
            modules_ns=_modules(index),
            gap_ns=uncovered_time(index),
            ending_ns=ending_time(index),
            waiting_ns=waiting_time(index),
            split_wait_ns=index.sums(split, numbers(index.table, "wait_ns")[split]),
            beside_ns=waiting_beside(index),
            unsplit_ns=unsplit_time(index),
            # by modules, not passes: a pass begins with its launch whether the device is fed or not
            starved_share=launches.starved_share(index, launches.launched_in_turn(index)),
        ),
        launches=launches.launches_of(index),
        slow_runs=_slow_runs(index),
        is_split=bool(split.any()),
        longest_ns=longest_ns,
        begin_ns=begin_ns,
        end_ns=end_ns,
    )


def _exchanged(index: SpanIndex) -> Floats:
    """Return how many bytes a rank's all-to-alls carry, (rank, iteration)."""
    size = numbers(index.table, "size_bytes")
    rows = equals(index.table, "op", "all_to_all") & index.in_iteration & (size > 0)
    return index.sums_or_nan(rows, size[rows])


def _dense(index: SpanIndex) -> Floats:
    """Return the time of MLPs without experts and of the output layer, (rank, iteration).

    Of layers that are recorded by turns there are other ones in each iteration: only the output
    layer counts then.
    """
    rows = index.named((OUTPUT_LAYER, backward_of(OUTPUT_LAYER)))
    if not index.is_sampled:
        rows |= work.layer_modules(index) & index.named((MLP, backward_of(MLP)))
    return index.sums_or_nan(rows, index.self_time(rows))


def _lookups(index: SpanIndex) -> Floats:
    """Return how long a span of each of `LOOKUPS` takes on the mean, (rank, iteration, kind).

    Not of those that began when they were launched: these last as long as their launches do.
    """
    kinds = []
    for name in LOOKUPS:
        rows = index.named((name,))
        rows[rows] = ~launches.launched_just_in_time(index, rows)
        kinds.append(_mean_span(index, rows))
    return np.stack(kinds, axis=2)


def _modules(index: SpanIndex) -> Floats:
    """Return how long a span of each of `MODULES` takes on the mean, (rank, iteration, kind)."""
    return np.stack([_mean_span(index, index.named((one,))) for one in MODULES], axis=2)


def _mean_span(index: SpanIndex, rows: Flags) -> Floats:
    """Return the mean time of some spans, (rank, iteration); NaN where there are none."""
    mean = np.full(index.shape, np.nan)
    number = index.sums(rows, np.ones(int(rows.sum())))
    np.divide(index.sums(rows, index.self_time(rows)), number, out=mean, where=number > 0)
    return mean


def _slow_runs(index: SpanIndex) -> SlowRuns | None:
    """Return the runs of slow modules; None on CPUs, where no modules were recorded, and where
    layers are recorded by turns. Import the search only here, for most traces hold no modules.
    """
    has_modules = index.frame.has_modules or bool(work.layer_spans(index).any())
    if index.is_cpu or index.is_sampled or not has_modules:
        return None
    from detect.observe.modules import slow_runs_of

    return slow_runs_of(index)


def _passes(
    index: SpanIndex, rows: Flags, samples: Samples, data: Flags, loading_ns: Floats
) -> Passes:
    wall_ns = np.zeros(len(samples.row))
    if index.uses_cpu_time:
        loads_ns = enclosed_time(index, rows, data, index.wall_time(data))
        wall_ns = numbers(index.table, "self_ns")[rows] - loads_ns
    modules = work.layer_modules(index)
    return Passes(
        samples=samples,
        time_ns=index.self_time(rows) - loading_ns,
        wall_ns=wall_ns,
        beside_ns=_communicating_beside(index, rows),
        reduces=work.reduces_beside(index, rows),
        gathers=work.gathers_of(index, rows, samples.phase),
        parts=work.parts_of(index, rows) if index.frame.shares_parts else None,
        entangled=work.entangled_in(index, rows, modules | index.named(work.HEADS)),
        contents=None if index.is_cpu else stalls.contents_of(index, rows, samples, modules),
    )


def _communicating_beside(index: SpanIndex, rows: Flags) -> Floats:
    """Return for how long communication was under way beside each of the spans, ns.

    A device goes on as soon as what it waited for is over, so communication that a span waited for
    ends in the span:

        forward      |── embedding ──|      waits     |── layer 1 ──|── layer 2 ──|
        parameters        |──────────── gather ──────|

    On CPUs all communication under way counts, whenever it ends: it may keep the process's core
    busy.
    """
    start, end = index.axis
    kinds = COMMUNICATION_KINDS if index.is_cpu else (Kind.COLLECTIVE,)  # passes await no messages
    beside = index.of_kind(*kinds) & (index.track == Track.OVERLAPPED)
    begins, ends = start[beside], end[beside]
    if not index.is_cpu and rows.any():
        order = np.argsort(start[rows], kind="stable")
        place = np.searchsorted(start[rows][order], ends) - 1
        owner = order[np.maximum(place, 0)]
        within = (place >= 0) & (ends <= end[rows][owner])
        begins, ends = np.maximum(begins, start[rows][owner])[within], ends[within]
    covered = Cover.of(*united(begins, ends))
    return covered.length_within(start[rows], end[rows]).astype(np.float64)


def _extent(index: SpanIndex) -> tuple[Floats, Floats, Floats]:
    """Return each iteration's first start, last end, and the longest span of itself."""
    first, (last, longest) = np.full(index.shape[1], np.inf), np.zeros((2, index.shape[1]))
    use, own = index.in_iteration, index.of_kind(Kind.ITERATION)
    np.minimum.at(first, index.slot[use], index.start[use].astype(np.float64))
    np.maximum.at(last, index.slot[use], (index.start + index.duration)[use].astype(np.float64))
    np.maximum.at(longest, index.slot[own], index.duration[own].astype(np.float64))
    return first, last, longest


def joined(parts: Sequence[Facts], ranks: Integers) -> Facts:
    """Return the facts of all `ranks`, ascending, from those of parts that divide them."""
    rows = [np.searchsorted(ranks, part.ranks) for part in parts]
    parts = [_with_global_rows(part, row_of) for part, row_of in zip(parts, rows, strict=True)]
    passes = _Order([part.passes.samples.row for part in parts])
    return Facts(
        ranks=ranks,
        passes=passes.record(
            [part.passes for part in parts],
            entangled=_joined_entangled([part.passes.entangled for part in parts], passes),
        ),
        layers=_joined_layers([part.layers for part in parts]),
        collecting=_joined_collections([part.collecting for part in parts], passes),
        cells=_joined_matrices([part.cells for part in parts], rows, len(ranks)),
        launches=_joined_launches([part.launches for part in parts], rows, len(ranks)),
        slow_runs=_joined_runs([part.slow_runs for part in parts]),
        is_split=any(part.is_split for part in parts),
        longest_ns=np.max([part.longest_ns for part in parts], axis=0),
        begin_ns=np.min([part.begin_ns for part in parts], axis=0),
        end_ns=np.max([part.end_ns for part in parts], axis=0),
    )


def _with_global_rows(part: Facts, row_of: Integers) -> Facts:
    """Return a part's facts with its row numbers replaced by those among all ranks, `row_of`."""

    def moved(record: Any) -> Any:
        changes = {}
        for field in fields(record):
            value = getattr(record, field.name)
            if field.name == "row":
                changes["row"] = row_of[value]
            elif is_dataclass(value):
                changes[field.name] = moved(value)
        return replace(record, **changes)

    placed: Facts = moved(part)
    return placed


class _Order:
    """Brings the entries of parts, each ordered by rank, into the order of all ranks.

    `row` is the rank's row of each joined entry.
    """

    def __init__(self, rows: Sequence[Integers]) -> None:
        row = np.concatenate(rows)
        self._order = np.argsort(row, kind="stable")
        self.row = row[self._order]
        place = np.argsort(self._order, kind="stable")
        bounds = np.cumsum([0, *map(len, rows)])
        self._place = [place[low:high] for low, high in pairwise(bounds)]
        """Where each entry of a part went."""

    def joined(self, arrays: Sequence[Any]) -> Any:
        """Return the arrays of the parts as one, in the order of all ranks."""
        return np.concatenate(arrays)[self._order]

    def record(self, parts: Sequence[Record], **known: object) -> Record:
        """Join the parts' records field by field, those inside them, too; `known` fields are given.

        A field that is None in the first part is None in all.
        """
        first: Any = parts[0]
        joined = dict(known)
        for name in [field.name for field in fields(first) if field.name not in known]:
            values = [getattr(part, name) for part in parts]
            if is_dataclass(values[0]):
                joined[name] = self.record(values)
            else:
                joined[name] = None if values[0] is None else self.joined(values)
        record: Record = type(first)(**joined)
        return record

    def moved(self, part: int, numbers: Integers) -> Integers:
        """Return the joined numbers of numbered entries of a part; -1 stays."""
        if not len(self._place[part]):
            return numbers
        return np.where(numbers >= 0, self._place[part][np.maximum(numbers, 0)], -1)


def _joined_layers(parts: Sequence[Layers]) -> Layers:
    order = _Order([part.samples.row for part in parts])
    entangled = [part.entangled for part in parts if part.entangled is not None]
    return order.record(parts, entangled=_joined_entangled(entangled, order) if entangled else None)


def _joined_runs(parts: Sequence[SlowRuns | None]) -> SlowRuns | None:
    known = [part for part in parts if part is not None]
    return _Order([part.row for part in known]).record(known) if known else None


def _joined_entangled(parts: Sequence[Entangled], outer: _Order) -> Entangled:
    """Join modules; `outer` is the order of the passes (layers) that own them."""
    kinds, places = _numbered([part.kinds for part in parts])
    kind = [place[part.kind] for part, place in zip(parts, places, strict=True)]
    order = _Order([part.row for part in parts])
    owner = [outer.moved(place, part.owner) for place, part in enumerate(parts)]
    unseen = [part.unseen for part in parts if part.unseen is not None]
    joined_unseen = None
    if unseen:
        joined_unseen = order.record(
            unseen,
            lost=outer.joined([part.lost for part in unseen]),
            lost_ns=outer.joined([part.lost_ns for part in unseen]),
        )
    return order.record(
        parts,
        kinds=kinds,
        kind=order.joined(kind),
        owner=order.joined(owner),
        unseen=joined_unseen,
    )


def _numbered(kinds: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], list[Integers]]:
    """Return the kinds of all parts, sorted, and of each part its kinds' places among them."""
    all_kinds = tuple(sorted({kind for of_part in kinds for kind in of_part}))
    number = {kind: place for place, kind in enumerate(all_kinds)}
    return all_kinds, [
        np.array([number[kind] for kind in of_part], dtype=np.int64) for of_part in kinds
    ]


def _joined_collections(parts: Sequence[Collections], passes: _Order) -> Collections:
    """Join collections; `first` and `last`, counted by rank, become numbers of joined passes."""
    order = _Order([part.row for part in parts])
    before = np.searchsorted(passes.row, order.row)
    return order.record(
        parts,
        first=order.joined([part.first for part in parts]) + before,
        last=order.joined([part.last for part in parts]) + before,
        inside_ns=passes.joined([part.inside_ns for part in parts]),
    )


def _joined_matrices(parts: Sequence[Record], rows: Sequence[Integers], num_ranks: int) -> Record:
    """Join records of matrices (rank, iteration, …); `rows` are the rows of each part's ranks among
    all.
    """
    joined: dict[str, Any] = {}
    for name, first in vars(parts[0]).items():
        missing = np.nan if name in _NAN_IF_ABSENT else 0
        joined[name] = np.full((num_ranks, *first.shape[1:]), missing, dtype=first.dtype)
        for own, part in zip(rows, parts, strict=True):
            joined[name][own] = getattr(part, name)
    return type(parts[0])(**joined)


def _joined_launches(
    parts: Sequence[Launches | None], rows: Sequence[Integers], num_ranks: int
) -> Launches | None:
    """Join the steps between launches; None where no part has any."""
    known = [(own, part) for own, part in zip(rows, parts, strict=True) if part]
    if not known:
        return None
    kinds, places = _numbered([part.kinds for _, part in known])
    shape = num_ranks, known[0][1].log_ns.shape[1]
    log_ns, log_held_ns = np.full((2, *shape, len(kinds)), np.nan)
    stopped_ns, launching_ns, first_ns, step_ns = np.zeros((4, *shape))
    for (own, part), columns in zip(known, places, strict=True):
        log_ns[own[:, None], :, columns] = np.moveaxis(part.log_ns, 2, 1)
        log_held_ns[own[:, None], :, columns] = np.moveaxis(part.log_held_ns, 2, 1)
        stopped_ns[own] = part.stopped_ns
        launching_ns[own] = part.launching_ns
        first_ns[own] = part.launching_first_ns
        step_ns[own] = part.launching_step_ns
    return Launches(
        kinds=kinds,
        log_ns=log_ns,
        log_held_ns=log_held_ns,
        stopped_ns=stopped_ns,
        launching_ns=launching_ns,
        launching_first_ns=first_ns,
        launching_step_ns=step_ns,
        pauses=_joined_matrices(
            [part.pauses for _, part in known], [own for own, _ in known], num_ranks
        ),
    )
