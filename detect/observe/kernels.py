"""Work of a kernel sequence: what profiles have instead of passes and layers.

A profile tells no passes, but every kernel by its name and launch (`gemm<<<256, 128>>>`), stream,
iteration, and mostly the pass that launched it. A kernel's duration is its device's own time: it
holds no gap and, but for communication, waits for nobody. Ranks of a stage that launch the same
kernels equally often in an iteration run the same sequence, and are compared kernel by kernel:

    rank 0   gemm<<<256, 128>>> 4 times, wgrad<<<64, 128>>> twice
    rank 1   gemm<<<256, 128>>> 4 times, wgrad<<<64, 128>>> twice       the same sequence
    rank 2   gemm<<<320, 128>>> 4 times, wgrad<<<64, 128>>> twice       longer data: another one
    rank 3   gemm<<<320, 128>>> 4 times, wgrad<<<64, 128>>> twice       the same as rank 2's

Ranks of different sequences have other data or other parts of the model, and nothing can be said of
their speeds: kernels of equal launch may then differ, too (a weight gradient sums over tokens).
A rank that is alone with its sequence is not compared.

Each pass is cut into parts of about equal time, in the order of kinds of kernels, so that the
median over the parts is one over time, and a kind of kernel whose length depends on what is in the
data (attention over packed sequences) stays in parts of its own. The sample of a part is

    log (sum of own durations / sum of the same kernels' typical durations)

The typical duration of a kind is the lower median over the ranks and iterations of its sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from detect.observe.launches import launch_pace, quick_steps, starved_share
from detect.observe.members import Members
from detect.observe.observations import Observations
from detect.observe.operations import BACKWARD, FORWARD, Boundness, Work
from detect.observe.spans import (
    WORK_NAMES,
    SpanIndex,
    cover_of,
    idle_within,
    known_or_none,
    sums_by_cell,
    where_text,
)
from detect.observe.transfers import UnmatchedIn
from detect.observe.work import LAYER_NAMES
from detect.report import Cause
from detect.stats import robust
from detect.thresholds.observing import KERNELS, PACE
from megascan.arrays import (
    Flags,
    Floats,
    Integers,
    combine,
    group_lengths,
    group_starts,
    lower_medians,
    numbered,
)
from megascan.errors import listed
from megascan.schema import NOT_APPLICABLE, Kind, Phase, Track
from megascan.timeline import codes, equals, numbers
from megascan.vocabulary import is_bound_by_memory, is_copy, multiplies_matrices


def with_kernels(seen: Observations, index: SpanIndex) -> Observations:
    """Return the observations of a profile with its kernels as work."""
    compute = _kernels(index, Kind.COMPUTE)
    optimizer = _kernels(index, Kind.OPTIMIZER)
    both = compute | optimizer
    kernels = _Kernels.of(index, compute)
    sequence = _sequences(kernels, seen.members.stage[index.row[compute]])
    compared = replace(kernels, sequence=sequence)
    layers = _layers(index, kernels, seen.members)
    alike = compared
    if layers is not None and len(np.unique(seen.members.stage)) == len(seen.members):
        alike = replace(kernels, sequence=_sequence_of_shared(kernels, len(seen.members)))
    others_share = 1.0 - robust.median(_share_compared(index, alike), axis=1)
    has_messages = bool(equals(index.table, "kind", Kind.P2P).any())
    profile = replace(
        seen,
        work=_work(index, compared),
        layers=layers,
        history=_work(index, replace(kernels, sequence=_own_sequences(index, kernels))),
        busy_ns=index.sums(both, index.self_time(both)),
        optimizer_ns=index.sums_or_nan(optimizer, index.self_time(optimizer)),
        lost_ns={cause: lost for cause, lost in seen.lost_ns.items() if cause != Cause.GC},
        tells_passes=False,
        may_have_stages=seen.members.layout.pp == 1 and has_messages,
        notes=(*seen.notes, *_notes(seen.members, kernels, others_share)),
    )
    if index.is_cpu:
        return profile
    free_pace, held_pace = _paces(index, compute)
    return replace(
        profile,
        unmatched=_unmatched(index),
        boundness=_boundness(index, alike, compute, optimizer),
        starved_share=known_or_none(starved_share(index, both)),
        launch_pace=free_pace,
        held_pace=held_pace,
        stopped_ns=_stopped(index, both),
        launching_ns=_launching(index, both),
    )


def _unmatched(index: SpanIndex) -> tuple[UnmatchedIn, ...]:
    """Return the time of each rank's quickest collectives without counterparts, by operation and
    size: a twentieth of them are as quick, or quicker.
    """
    op, texts = codes(index.table, "op")
    size, rank = numbers(index.table, "size_bytes"), index.rank
    alone = index.of_kind(Kind.COLLECTIVE) & (numbers(index.table, "match") < 0)
    rows = np.flatnonzero(alone)
    rows = rows[np.lexsort((size[rows], op[rows], rank[rows]))]
    starts = group_starts(rank[rows], op[rows], size[rows])
    return tuple(
        UnmatchedIn(
            rank=int(rank[own[0]]),
            what=texts[op[own[0]]],
            size_bytes=int(size[own[0]]),
            number=len(own),
            an_iteration=len(own) / max(index.shape[1], 1),
            quickest_ns=float(np.quantile(index.duration[own], KERNELS.quickest_share)),
        )
        for own in np.split(rows, starts[1:])
        if len(own)
    )


def is_profile(index: SpanIndex) -> bool:
    """Return whether kernels are all there is: neither passes nor layers were marked."""
    marked = index.named(WORK_NAMES) | index.named(LAYER_NAMES)
    return not marked.any() and bool(_kernels(index, Kind.COMPUTE).any())


def _kernels(index: SpanIndex, kind: Kind) -> Flags:
    """Flag the kernels (on CPUs operators) of a kind; no copies, whose speed is not computing's."""
    copies = where_text(index.table, "name", is_copy)
    return np.asarray(index.of_kind(kind) & ~copies)


@dataclass(frozen=True)
class _Kernels:
    """Kernels, (kernel,) each: rank row, iteration slot, pass, a number for its kind, duration."""

    row: Integers
    slot: Integers
    phase: Integers
    kind: Integers
    time_ns: Floats
    tells_phase: bool
    sequence: Integers
    """A number for the sequence that the kernel is part of, -1 for none."""

    @classmethod
    def of(cls, index: SpanIndex, rows: Flags) -> _Kernels:
        backward = equals(index.table, "phase", Phase.BACKWARD)[rows]
        name = codes(index.table, "name")[0][rows]
        beside = index.track[rows] == Track.OVERLAPPED
        return cls(
            row=index.row[rows],
            slot=index.slot[rows],
            phase=np.where(backward, BACKWARD, FORWARD),
            kind=numbered(backward.astype(np.int64), name, beside.astype(np.int64)),
            time_ns=np.maximum(index.self_time(rows), 1.0),
            tells_phase=bool(backward.any()),
            sequence=np.zeros(int(rows.sum()), dtype=np.int64),
        )


def _boundness(
    index: SpanIndex, kernels: _Kernels, compute: Flags, optimizer: Flags
) -> Boundness | None:
    """Return the work of kernels that are bound by memory, and of those that multiply matrices;
    None unless both are there.

    `compute` and `optimizer` flag the spans that are kernels of passes and of the optimizer.
    """
    by_memory = where_text(index.table, "name", is_bound_by_memory)[compute]
    by_matrix = where_text(index.table, "name", multiplies_matrices)[compute]
    if not by_memory.any() or not by_matrix.any():
        return None
    moving = optimizer.copy()
    moving[compute] = by_memory
    memory, matrix = (
        _work(index, replace(kernels, sequence=np.where(part, kernels.sequence, -1)))
        for part in (by_memory, by_matrix)
    )
    memory_ns = index.sums(moving, index.self_time(moving))
    return Boundness(memory=memory, matrix=matrix, memory_ns=memory_ns)


def _paces(index: SpanIndex, kernels: Flags) -> tuple[Floats | None, Floats | None]:
    """Return log times from the launch of a kernel to that of the next one over those of all ranks,
    (row, iteration) each: of hosts that are less ahead of their devices than a full queue lasts,
    and of all. None where launches were not recorded.
    """
    rows, at = _launches(index, kernels)
    if not len(rows):
        return None, None
    num_passes = 2
    backward = equals(index.table, "phase", Phase.BACKWARD)[rows]
    cell = num_passes * index.cell[rows] + backward
    order = np.lexsort((at, cell))
    step_ns = np.maximum(np.diff(at[order]), 1)
    same = np.flatnonzero(np.diff(cell[order]) == 0)
    lead_ns = (index.axis[0][rows] - at)[order][1:]
    free = same[lead_ns[same] < PACE.most_lead_ns]
    shape, at_step = (*index.shape, num_passes), cell[order]
    of_free, of_all = (
        launch_pace(quick_steps(shape, at_step[steps], step_ns[steps].astype(float)))
        for steps in (free, same)
    )
    return of_free, of_all


def _launches(index: SpanIndex, kernels: Flags) -> tuple[Integers, Integers]:
    """Return the rows of the kernels whose launch was recorded, and when that was, on one axis."""
    launch = numbers(index.table, "launch_ns")
    rows = np.flatnonzero(kernels & (launch != NOT_APPLICABLE))
    return rows, index.axis[0][rows] + launch[rows]


def _launching(index: SpanIndex, kernels: Flags) -> Floats | None:
    """Return how long hosts launch in an iteration, (row, iteration) ns; None where launches were
    not recorded.

    Steps from one launch to the next count, but for those that no launching takes as long as
    (`PACE.stop_ns`): there the host loads, waits for its device, or stands still.
    """
    rows, at = _launches(index, kernels)
    if not len(rows):
        return None
    order = np.lexsort((at, index.cell[rows]))
    cell, step_ns = index.cell[rows][order], np.diff(at[order])
    launches = np.flatnonzero((np.diff(cell) == 0) & (step_ns < PACE.stop_ns))
    sums = np.bincount(cell[launches], weights=step_ns[launches], minlength=index.num_cells)
    return np.asarray(sums.reshape(index.shape))


def _stopped(index: SpanIndex, kernels: Flags) -> Floats | None:
    """Return for how long hosts stop between two launches while the device has nothing to do, (row,
    iteration) ns; None where launches were not recorded. Not where they load, or collect garbage.

    A thread that holds the interpreter's lock gives it back after 5 ms, another process the core
    after 3 and more; in between launches are as quick as ever. A host that waits for its device
    launches late as well, but until then the device is busy.

    Example: five of 1,000 launches come 5 to 10 ms behind the one before, and the device is idle
    for 29 of 127 ms; on its peers for none.
    """
    rows, at = _launches(index, kernels)
    if not len(rows):
        return None
    order = np.lexsort((at, index.cell[rows]))
    rows, at, cell = rows[order], at[order], index.cell[rows][order]
    stops = 1 + np.flatnonzero((np.diff(cell) == 0) & (np.diff(at) >= PACE.stop_ns))
    (start, end), recorded = index.axis, ~index.of_kind(Kind.ITERATION)
    since = at[stops - 1]
    idle_ns = idle_within(cover_of(start, end, recorded), since, start[rows[stops]])
    return index.sums(rows[stops], np.minimum(idle_ns, at[stops] - since))


def _sequences(kernels: _Kernels, stage: Integers) -> Integers:
    """Return the number of each kernel's sequence; -1 where no other rank of the stage runs it.

    Iterations are looked at one after the other: shapes may change from one to the next.
    """
    result = np.full(len(stage), -1, dtype=np.int64)
    known: dict[tuple[int, bytes], int] = {}
    order = np.argsort(combine(stage, kernels.slot), kind="stable")
    starts = group_starts(stage[order], kernels.slot[order])
    for rows in np.split(order, starts[1:]):
        ranks, rank = np.unique(kernels.row[rows], return_inverse=True)
        kinds, kind = np.unique(kernels.kind[rows], return_inverse=True)
        count = np.zeros((len(ranks), len(kinds)), dtype=np.int64)
        np.add.at(count, (rank, kind), 1)
        time_ns = np.zeros(count.shape)
        np.add.at(time_ns, (rank, kind), kernels.time_ns[rows])
        for founder, members in _ranks_of_same_kernels(count, time_ns):
            name = (int(stage[rows[0]]), np.stack([kinds, count[founder]]).tobytes())
            mine = members[rank] & (count[founder][kind] == count[rank, kind])
            result[rows[mine]] = known.setdefault(name, len(known))
    return result


def _ranks_of_same_kernels(count: Integers, time_ns: Floats) -> Iterator[tuple[int, Flags]]:
    """Yield sets of two or more ranks that launch the same kernels: first rank, flags (rank,).

    `count` and `time_ns` are of each rank and kind of kernel. Ranks are alike if they launch the
    kinds that most of their time is spent in equally often.
    """
    whole = np.maximum(time_ns.sum(axis=1), 1.0)
    free: Flags = np.ones(len(count), dtype=bool)
    for founder in range(len(count)):
        if not free[founder]:
            continue
        equal = count == count[founder]
        shared = np.minimum((time_ns * equal).sum(axis=1) / whole,
                            equal @ time_ns[founder] / whole[founder])  # fmt: skip
        members = free & (shared >= KERNELS.least_alike_share)
        free &= ~members
        if members.sum() > 1:
            yield founder, members


def _own_sequences(index: SpanIndex, kernels: _Kernels) -> Integers:
    """Return each rank's row as the sequence of the kernels that it launches equally often in every
    iteration; -1 for others, and for ranks that spend too little of their compute in them.
    """
    pair = numbered(kernels.row, kernels.kind)
    count = np.zeros((int(pair.max(initial=-1)) + 1, index.shape[1]), dtype=np.int64)
    np.add.at(count, (pair, kernels.slot), 1)
    repeats = (count == count[:, :1]).all(axis=1)
    sequence = np.where(repeats[pair], kernels.row, -1)
    shares = _share_compared(index, replace(kernels, sequence=sequence))
    knows = robust.median(shares, axis=1) >= KERNELS.least_alike_share
    return np.where(knows[kernels.row], sequence, -1)


def _layers(index: SpanIndex, kernels: _Kernels, members: Members) -> Work | None:
    """Return samples of the kernels that all stages launch, however often; None with one stage.

    These are the kernels of the layers: of the same shape on every stage, while embedding and head
    have kernels of their own.
    """
    if len(np.unique(members.stage)) < 2:
        return None
    kernels = replace(kernels, sequence=_sequence_of_shared(kernels, len(members)))
    if not float(np.nanmin(_share_compared(index, kernels))) >= KERNELS.least_layers_share:
        return None
    return _work(index, kernels)


def _sequence_of_shared(kernels: _Kernels, num_ranks: int) -> Integers:
    """Return 0 as the sequence of the kernels that all ranks launch, -1 for others."""
    pairs = np.unique(np.stack([kernels.kind, kernels.row]), axis=1)
    num_users = np.bincount(pairs[0])
    return np.where(num_users[kernels.kind] == num_ranks, 0, -1)


def _work(index: SpanIndex, kernels: _Kernels) -> Work:
    """Return the kernels as samples (rank, iteration, part); NaN where nothing is compared."""
    num_ops = 2 * KERNELS.num_parts
    log_ns = np.full((index.num_cells, num_ops), np.nan)
    rows = np.flatnonzero(kernels.sequence >= 0)
    if len(rows):
        cell = (kernels.row * index.shape[1] + kernels.slot)[rows]
        phase, time_ns = kernels.phase[rows], kernels.time_ns[rows]
        sequence = numbered(kernels.sequence[rows], phase)
        kind = numbered(sequence, kernels.kind[rows])
        typical = lower_medians(kind, time_ns)[1][kind]  # of two ranks, the faster one's
        op = phase * KERNELS.num_parts + _part_of_pass(sequence, kind, cell, typical)
        own, expected = (
            np.bincount(cell * num_ops + op, weights=weights, minlength=log_ns.size)
            for weights in (time_ns, typical)
        )
        usual = np.bincount(op, weights=typical, minlength=num_ops) / len(np.unique(cell))
        with np.errstate(divide="ignore", invalid="ignore"):
            log_ns = np.log(own / expected).reshape(log_ns.shape) + np.log(usual)
        log_ns[~np.isfinite(log_ns)] = np.nan
    return Work(
        log_ns=log_ns.reshape(*index.shape, num_ops),
        phase=np.repeat([FORWARD, BACKWARD], KERNELS.num_parts),
        microbatch=np.zeros(num_ops, dtype=np.int64),
    )


def _part_of_pass(sequence: Integers, kind: Integers, cell: Integers, typical: Floats) -> Integers:
    """Return the part of its sequence's pass that each kernel is in, from 0.

    The kinds of a pass stand one after the other, each as long as it takes in all; the first
    launches of a kind by a rank in an iteration stand before the later ones.
    """
    total = np.bincount(kind, weights=typical)
    of_kind = np.zeros(len(total), dtype=np.int64)
    of_kind[kind] = sequence  # ascending: kinds are numbered by sequence first
    ends, starts = np.cumsum(total), group_starts(of_kind)
    whole = np.add.reduceat(total, starts)[of_kind]
    before = ends - total - (ends - total)[starts][of_kind]
    order = np.lexsort((kind, cell))
    first = group_starts(cell[order], kind[order])
    length = group_lengths(first, len(order))
    through = np.empty(len(order))
    through[order] = (np.arange(len(order)) - np.repeat(first, length) + 0.5) / np.repeat(
        length, length
    )
    at = (before[kind] + total[kind] * through) / whole[kind] * KERNELS.num_parts
    return np.minimum(at.astype(np.int64), KERNELS.num_parts - 1)


def _share_compared(index: SpanIndex, kernels: _Kernels) -> Floats:
    """Return the share of each rank's compute that is compared, (rank, iteration)."""
    compared_ns = kernels.time_ns * (kernels.sequence >= 0)
    whole, part = (
        sums_by_cell(kernels.row, kernels.slot, time_ns, index.shape)
        for time_ns in (kernels.time_ns, compared_ns)
    )
    with np.errstate(invalid="ignore"):
        return part / whole


def _notes(members: Members, kernels: _Kernels, others_share: Floats) -> list[str]:
    notes = []
    unlike = np.flatnonzero(others_share > 1.0 - KERNELS.least_alike_share)
    if len(unlike) and len(members) > 1:
        ranks = members.ranks[unlike].tolist()
        notes.append(
            f"rank{'s' * (len(ranks) > 1)} {listed(ranks)} spend{'s' * (len(ranks) == 1)} up to "
            f"{float(others_share[unlike].max()):.0%} of their compute in kernels or shapes that "
            "the other ranks do not launch as often (other data, or another part of the model): "
            "their speed is not compared"
        )
    if not kernels.tells_phase:
        notes.append(
            "the profile does not tell which pass launched a kernel (operators were not recorded): "
            "all count as forward"
        )
    return notes
