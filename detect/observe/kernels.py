"""Work of a kernel sequence: what profiles have instead of passes and layers.

A profile tells no passes, but every kernel by its name and launch (`gemm<<<256, 128>>>`), stream,
iteration, and mostly the pass that launched it. A kernel's duration is its device's own time: it
holds no gap and, but for communication, waits for nobody. Ranks of a stage that launch the same
kernels equally often in an iteration run the same sequence, and are compared kernel by kernel:

    rank 0   gemm<<<256, 128>>> 4 times, softmax<<<64, 32>>> twice
    rank 1   gemm<<<256, 128>>> 4 times, softmax<<<64, 32>>> twice      comparable
    rank 2   gemm<<<320, 128>>> 4 times, softmax<<<80, 32>>> twice      longer data: not comparable

A rank that launches other shapes has other data or another model part, and nothing can be said of
its speed: kernels of equal launch may then be longer, too (a weight gradient sums over tokens).

Each pass is cut into parts of about equal time, in the order of kinds of kernels, so that the
median over the parts is one over time, and a kind of kernel whose length depends on what is in the
data (attention over packed sequences) stays in parts of its own. The sample of a part is

    log (sum of own durations / sum of the same kernels' typical durations)

The typical duration of a kind is its median over ranks and iterations; what it is cancels when
ranks are compared, as long as they launch the same kinds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from detect.observe.observations import BACKWARD, FORWARD, Members, Observations, Work
from detect.observe.spans import WORK_NAMES, SpanIndex
from detect.observe.stalls import starved_share
from detect.report import Cause
from detect.stats import robust
from detect.thresholds import KERNELS
from megascan.arrays import Flags, Floats, Integers, combine, group_lengths, group_starts
from megascan.errors import listed
from megascan.schema import Kind, Phase, Track
from megascan.timeline import codes, equals
from megascan.vocabulary import is_copy


def with_kernels(seen: Observations, index: SpanIndex) -> Observations:
    """Return the observations of a profile with its kernels as work; others as they are."""
    if index.named(WORK_NAMES).any():
        return seen
    compute = _kernels(index, Kind.COMPUTE)
    if not compute.any():
        return seen
    optimizer = _kernels(index, Kind.OPTIMIZER)
    both = compute | optimizer
    kernels = _Kernels.of(index, compute)
    work, others_share = _work(index, kernels, seen.members.stage[index.row[compute]])
    lost = {cause: lost for cause, lost in seen.lost_ns.items() if cause is not Cause.GC}
    return replace(
        seen,
        work=work,
        layers=_layers(index, kernels, seen.members),
        busy_ns=np.nan_to_num(index.summed(both, index.self_time(both))),
        optimizer_ns=index.summed(optimizer, index.self_time(optimizer)),
        lost_ns=lost,
        starved_share=None if index.is_cpu else starved_share(index, both),
        notes=(*seen.notes, *_notes(seen.members, kernels, others_share)),
    )


def _kernels(index: SpanIndex, kind: Kind) -> Flags:
    """Mark the kernels (operators of a CPU run) of a kind; copies depend on other things."""
    name, names = codes(index.table, "name")
    copies = np.array([is_copy(text) for text in names] or [False], dtype=bool)[name]
    return equals(index.table, "kind", kind) & index.counts & ~copies


@dataclass(frozen=True)
class _Kernels:
    """Kernels, (kernel,) each: rank row, iteration slot, pass, a number for its kind, duration."""

    row: Integers
    slot: Integers
    phase: Integers
    kind: Integers
    time_ns: Floats
    tells_phase: bool

    @classmethod
    def of(cls, index: SpanIndex, rows: Flags) -> _Kernels:
        backward = equals(index.table, "phase", Phase.BACKWARD)[rows]
        name = codes(index.table, "name")[0][rows]
        beside = index.track[rows] == Track.OVERLAPPED
        keys = combine(backward.astype(np.int64), name, beside.astype(np.int64))
        return cls(
            row=index.row[rows],
            slot=index.slot[rows],
            phase=np.where(backward, BACKWARD, FORWARD),
            kind=np.unique(keys, return_inverse=True)[1].astype(np.int64),
            time_ns=np.maximum(index.duration[rows], 1).astype(np.float64),
            tells_phase=bool(backward.any()),
        )


def _work(index: SpanIndex, kernels: _Kernels, stage: Integers) -> tuple[Work, Floats]:
    """Return the samples within stages, and the share of each rank's time that is not compared."""
    kernels = replace(kernels, kind=_numbered(stage, kernels.kind))
    comparable = np.zeros(len(kernels.kind), dtype=bool)
    for one in np.unique(stage):
        mine = np.flatnonzero(stage == one)
        comparable[mine] = _equally_often(kernels, mine)
    log_ns = _samples(index, kernels, comparable)
    compared = _share(index, kernels, comparable)
    log_ns[~(compared >= KERNELS.least_alike_share)] = np.nan
    return _as_work(log_ns), 1.0 - robust.median(compared, axis=1)


def _layers(index: SpanIndex, kernels: _Kernels, members: Members) -> Work | None:
    """Return samples of the kernels that all stages launch, however often; None with one stage.

    These are the kernels of the layers: of the same shape on every stage, while embedding and head
    have kernels of their own.
    """
    if len(np.unique(members.stage)) < 2:
        return None
    everybody = np.flatnonzero(np.ones(len(kernels.kind), dtype=bool))
    shared = _by_all(kernels, everybody, len(members))
    compared = _share(index, kernels, shared)
    if not float(np.nanmin(compared)) >= KERNELS.least_layers_share:
        return None
    return _as_work(_samples(index, kernels, shared))


def _as_work(log_ns: Floats) -> Work:
    num_parts = log_ns.shape[2] // 2
    return Work(
        log_ns=log_ns,
        phase=np.repeat([FORWARD, BACKWARD], num_parts),
        microbatch=np.zeros(2 * num_parts, dtype=np.int64),
    )


def _numbered(*columns: Integers) -> Integers:
    return np.unique(combine(*columns), return_inverse=True)[1].astype(np.int64)


def _equally_often(kernels: _Kernels, rows: Integers) -> Flags:
    """Mark the kernels of a kind that the rank launches as often as most ranks of its stage do.

    `rows` are the stage's kernels. Iterations are looked at one after the other: shapes may change
    from one to the next.
    """
    result = np.zeros(len(rows), dtype=bool)
    num_ranks = len(np.unique(kernels.row[rows]))
    for slot in np.unique(kernels.slot[rows]):
        at = np.flatnonzero(kernels.slot[rows] == slot)
        mine = rows[at]
        rank = np.unique(kernels.row[mine], return_inverse=True)[1]
        kinds, kind = np.unique(kernels.kind[mine], return_inverse=True)
        count = np.zeros((num_ranks, len(kinds)), dtype=np.int64)
        np.add.at(count, (rank, kind), 1)
        usual = np.sort(count, axis=0)[(num_ranks - 1) // 2]
        result[at] = (count == usual)[rank, kind]
    return result


def _by_all(kernels: _Kernels, rows: Integers, num_ranks: int) -> Flags:
    """Mark the kernels of a kind that every rank launches."""
    pairs = np.unique(np.stack([kernels.kind[rows], kernels.row[rows]]), axis=1)
    num_users = np.bincount(pairs[0], minlength=int(kernels.kind.max()) + 1)
    return np.asarray(num_users[kernels.kind[rows]] == num_ranks)


def _samples(index: SpanIndex, kernels: _Kernels, compared: Flags) -> Floats:
    """Return (rank, iteration, part) logarithms of ns; NaN where nothing is compared."""
    num_ranks, num_iterations = index.shape
    num_ops = 2 * KERNELS.num_parts
    typical = _typical_ns(kernels)
    part = _parts(kernels, typical)
    cell = kernels.row * num_iterations + kernels.slot
    op = (kernels.phase * KERNELS.num_parts + part)[compared]
    flat = cell[compared] * num_ops + op
    size = num_ranks * num_iterations * num_ops
    own = np.bincount(flat, weights=kernels.time_ns[compared], minlength=size)
    expected = np.bincount(flat, weights=typical[compared], minlength=size)
    usual = np.bincount(op, weights=typical[compared], minlength=num_ops)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_ns = np.log(own / expected).reshape(-1, num_ops) + np.log(usual / len(np.unique(cell)))
    log_ns[~np.isfinite(log_ns)] = np.nan
    return np.asarray(log_ns.reshape(num_ranks, num_iterations, num_ops))


def _typical_ns(kernels: _Kernels) -> Floats:
    """Return for each kernel the median duration of its kind."""
    order = np.lexsort((kernels.time_ns, kernels.kind))
    first = group_starts(kernels.kind[order])
    length = group_lengths(first, len(order))
    middle = kernels.time_ns[order][first + (length - 1) // 2]
    return np.asarray(middle[kernels.kind])


def _parts(kernels: _Kernels, typical: Floats) -> Integers:
    """Return the part of its pass that each kernel is in, from 0.

    A pass's kinds stand one after the other, each as long as it takes in all; the first launches of
    a kind in an iteration stand before the later ones.
    """
    total = np.bincount(kernels.kind, weights=typical)
    phase = np.zeros(len(total), dtype=np.int64)
    phase[kernels.kind] = kernels.phase
    before = np.zeros(len(total))
    for one in (FORWARD, BACKWARD):
        ends = np.cumsum(total[phase == one])
        whole = max(float(ends[-1]), 1.0) if len(ends) else 1.0
        before[phase == one] = (ends - total[phase == one]) / whole
        total[phase == one] /= whole
    key = combine(kernels.row, kernels.slot, kernels.kind)
    order = np.argsort(key, kind="stable")
    first = group_starts(key[order])
    length = group_lengths(first, len(order))
    through = np.empty(len(order))
    number = np.arange(len(order)) - np.repeat(first, length)
    through[order] = (number + 0.5) / np.repeat(length, length)
    at = (before[kernels.kind] + total[kernels.kind] * through) * KERNELS.num_parts
    return np.minimum(at.astype(np.int64), KERNELS.num_parts - 1)


def _share(index: SpanIndex, kernels: _Kernels, compared: Flags) -> Floats:
    """Return the share of each rank's compute that is compared, (rank, iteration)."""
    cell = kernels.row * index.shape[1] + kernels.slot
    size = index.shape[0] * index.shape[1]
    whole = np.bincount(cell, weights=kernels.time_ns, minlength=size)
    part = np.bincount(cell, weights=kernels.time_ns * compared, minlength=size)
    with np.errstate(invalid="ignore"):
        return np.asarray((part / whole).reshape(index.shape))


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
