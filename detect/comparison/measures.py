"""Measure step, roles, ranks and links in two traces, and tell a shift from noise.

A *role* is one operation of a stage, on every rank that does it (attention of stage PP1). Only the
same work done by the same number of ranks is compared; `comparable` finds it and says what is not.

    effect = median(after) − median(before)                              logarithms, or shares
    standard error² = 1.57 · inflation · (σ_before² / n + σ_after² / m) + between²

1.57: medians are less efficient than means. σ comes from median absolute deviations, pooled over
the rows (ranks) of a class and never below a row's own. `inflation` is (1 + r) / (1 − r) for the
correlation r of neighbouring iterations. `between` is what two runs of a healthy job differ by even
when each is steady: devices settle at slightly different clocks.

Example: 20 iterations each, 1 % noise, standard error sqrt(1.57 · 2 · 0.01² / 20 + 0.003²) = 0.5 %.

**Kinship** (`differences`). Traces of different jobs cannot be compared, and are recognised. A job
may change between two traces: more replicas, layers, microbatches, another pipeline. What stays is
what one rank does for one token: its device and, where TP and CP are the same, the bytes of an
activation, which show in the messages between stages and the collectives of tensor parallelism.
Where there are neither, the gradients of a rank show the size of its model.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from scipy import special

from detect.comparison.changes import Quantity
from detect.detector import Examination, examine, examine_op_table
from detect.observe.members import Members
from detect.observe.observations import Observations
from detect.observe.operations import PHASE_NAMES
from detect.observe.spans import SpanIndex, sums_by_cell, where_text
from detect.observe.transfers import Transfers, bytes_text
from detect.report import Cause
from detect.stats import robust
from detect.text import place, ranks_of
from detect.thresholds.adjustable import DetectorSettings
from detect.thresholds.comparison import COMPARISON, SMALL_SAMPLES
from megascan.arrays import Floats, Integers, combine
from megascan.errors import listed
from megascan.schema import Kind, Phase
from megascan.timeline import Timeline, codes, equals, numbers, rows_alike
from megascan.topology import Layout
from megascan.vocabulary import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    CountsAs,
    axis_of_group,
    is_data_parallel,
    names_of,
)

MEDIAN_LOSS = float(np.sqrt(np.pi / 2))
"""Standard error of a median over that of a mean."""
SETTINGS = DetectorSettings()


@dataclass(frozen=True)
class Traffic:
    """What the ranks of a job send: sizes by (axis, operation), and what a rank reduces.

    `gradient_bytes` is what a rank reduces over its replicas in an iteration, the median of ranks
    and iterations; 0 where it is not known.
    """

    sizes: Mapping[tuple[str, str], frozenset[int]] = field(default_factory=dict)
    gradient_bytes: float = 0.0


def traffic_of(spans: pa.Table) -> Traffic:
    """Return what the communication of a timeline shows of its job."""
    spans = spans.filter(pa.array(equals(spans, "kind", Kind.COLLECTIVE, Kind.P2P)))
    size = numbers(spans, "size_bytes")
    group, groups = codes(spans, "group")
    op, ops = codes(spans, "op")
    found: dict[tuple[str, str], set[int]] = defaultdict(set)
    kinds = np.unique(np.stack([group, op, size]), axis=1)
    for of_group, of_op, of_size in kinds[:, kinds[2] > 0].T.tolist():
        found[axis_of_group(groups[of_group]), ops[of_op]].add(of_size)
    reduced = where_text(spans, "group", is_data_parallel) & (size > 0)
    reduced &= equals(spans, "op", "all_reduce", "reduce_scatter")
    owner = combine(numbers(spans, "rank")[reduced], numbers(spans, "iteration")[reduced])
    _, number = np.unique(owner, return_inverse=True)
    totals = np.bincount(number, weights=size[reduced])
    return Traffic(
        {name: frozenset(sizes) for name, sizes in found.items()},
        float(np.median(totals)) if len(totals) else 0.0,
    )


def differences(before: Side, after: Side) -> Iterator[str]:
    """Yield what shows that two traces are of different jobs; nothing for one job."""
    had, has = (set(side.members.devices) - {""} for side in (before, after))
    if had and has and not had & has:
        yield f"devices ({listed(sorted(had))} before, {listed(sorted(has))} after)"
    old, new = before.members.layout, after.members.layout
    if (old.tp, old.cp) != (new.tp, new.cp):
        return
    sizes = before.traffic.sizes, after.traffic.sizes
    shared = [name for name in sorted(set(sizes[0]) & set(sizes[1])) if name[0] in ("tp", "pp")]
    tensor_ops = [{op for axis, op in one if axis == "tp"} for one in sizes]
    for name in shared:
        then, now = (max(one[name]) for one in sizes)
        alike = {then}
        if tensor_ops[0] != tensor_ops[1]:  # sequence parallelism cuts an activation into TP parts
            alike |= {then * old.tp, then // old.tp}
        if now not in alike:
            yield f"{' '.join(name)} ({bytes_text(then)} before, {bytes_text(now)} after)"
            return
    old_bytes, new_bytes = before.traffic.gradient_bytes, after.traffic.gradient_bytes
    is_told = not shared and old == new and old_bytes and new_bytes
    if is_told and abs(np.log(new_bytes / old_bytes)) > np.log(COMPARISON.max_gradient_change):
        yield (
            f"gradients of a rank ({bytes_text(old_bytes)} before, {bytes_text(new_bytes)} after)"
        )


@dataclass(frozen=True, kw_only=True)
class Shift:
    """Effect and standard error of each row, (row,), and the degrees of freedom of the t law."""

    effect: Floats
    error: Floats
    degrees: float

    @property
    def p_value(self) -> Floats:
        """Return the probability of as large a shift, up or down, if nothing changed; NaN is 1."""
        score = np.abs(self.effect) / self.error
        return np.nan_to_num(np.asarray(2.0 * special.stdtr(self.degrees, -score)), nan=1.0)

    @property
    def reach(self) -> Floats:
        """Return half the 95 % interval."""
        quantile = (1.0 + COMPARISON.confidence) / 2
        return np.asarray(special.stdtrit(self.degrees, quantile) * self.error)


def shift(before: Floats, after: Floats, between: float = COMPARISON.between_log) -> Shift:
    """Return the shift of every row between two (row, iteration) matrices of any lengths."""
    effect = robust.median(after, axis=1) - robust.median(before, axis=1)
    variance = _variance(before) + _variance(after)
    num_iterations = min(before.shape[1], after.shape[1])
    if num_iterations < COMPARISON.min_iterations:
        variance = np.full_like(effect, np.nan)
    rows = max(int(np.isfinite(effect).sum()), 1)
    degrees = (before.shape[1] + after.shape[1] - 2) * min(rows, 4)
    return Shift(
        effect=effect,
        error=np.sqrt(variance + between**2),
        degrees=float(np.clip(degrees, 2, COMPARISON.max_degrees)),
    )


def _variance(values: Floats) -> Floats:
    """Return the variance of each row's median, (row,)."""
    centred = values - robust.median(values, axis=1)[:, None]
    number = values.shape[1]
    own = robust.spread(values, axis=1) * _small_sample(number)
    pooled = float(np.nan_to_num(robust.median(own)))
    if number < COMPARISON.min_own_noise:
        own = np.full(len(values), pooled)
    sigma = np.fmax(np.fmax(own, pooled), COMPARISON.least_noise_log)
    known = np.maximum(np.isfinite(values).sum(axis=1), 1)
    return np.asarray(_inflation(centred) * (MEDIAN_LOSS * sigma) ** 2 / known)


def _small_sample(number: int) -> float:
    """Return the factor by which a median absolute deviation of `number` values falls short."""
    beyond = number / max(number - COMPARISON.small_sample_lack, 1.0)
    return SMALL_SAMPLES.get(number, beyond)


def _inflation(centred: Floats) -> float:
    if centred.shape[1] < COMPARISON.min_own_noise:
        return 1.0
    limit = 4 * float(np.nan_to_num(robust.spread(centred))) + 1e-12
    clipped = np.nan_to_num(np.clip(centred, -limit, limit))
    energy = (clipped**2).sum(axis=1)
    lagged = (clipped[:, 1:] * clipped[:, :-1]).sum(axis=1)
    use = energy > 0
    if not use.any():
        return 1.0
    typical = float(np.clip(np.median(lagged[use] / energy[use]), 0.0, COMPARISON.max_correlation))
    return (1 + typical) / (1 - typical)


def q_values(p_values: Floats) -> Floats:
    """Return each test's false-discovery rate if all with its p or less are believed.

    Benjamini and Hochberg 1995: q of the k-th smallest p is the least p · m / j over j >= k.
    """
    order = np.argsort(p_values, kind="stable")
    number = len(p_values)
    scaled = p_values[order] * number / np.arange(1, number + 1)
    least = np.minimum.accumulate(scaled[::-1])[::-1]
    result = np.empty(number)
    result[order] = np.minimum(least, 1.0)
    return result


_PASSES = (Phase.FORWARD, Phase.BACKWARD)
_LAYERS = names_of(CountsAs.LAYER, phases=[Phase.FORWARD])
_ALIKE_EVERYWHERE = names_of(CountsAs.LAYER, CountsAs.MODULE, phases=_PASSES)


@dataclass(frozen=True, order=True)
class Role:
    """What ranks of a stage do alike; `stage` and `chunk` are -1 when all of them are meant."""

    stage: int
    chunk: int
    name: str

    @property
    def words(self) -> str:
        """Return "attention of stage PP1, chunk 0"."""
        text = self.name
        if self.stage >= 0:
            text += f" of stage PP{self.stage}"
        return f"{text}, chunk {self.chunk}" if self.chunk >= 0 else text


@dataclass(frozen=True)
class RoleTimes:
    """Mean self time of one operation, (rank, iteration) ns, NaN where it did not run.

    `ranks` (rank,) are global; `count` is how often a rank does it in an iteration.
    """

    ranks: Integers
    time_ns: Floats
    count: float

    @property
    def share_ns(self) -> float:
        """Return the time that the role takes in an iteration on its median rank."""
        return float(robust.median(self.time_ns)) * self.count


def roles_of_timeline(timeline: Timeline, seen: Observations) -> dict[Role, RoleTimes]:
    """Return the times of every computation in the iterations that were judged."""
    index = SpanIndex.of(timeline)
    iteration = numbers(index.table, "iteration")
    judged = np.isin(iteration, seen.iterations)
    rows = index.of_kind(Kind.COMPUTE, Kind.OPTIMIZER) & judged
    slot, row = np.searchsorted(seen.iterations, iteration[rows]), index.row[rows]
    time_ns, layer = index.self_time(rows), numbers(index.table, "layer")[rows]
    stage = np.array([timeline.headers[int(rank)].coordinates.pp for rank in index.ranks])[row]
    chunk = np.full(len(row), -1)
    if timeline.layout.vpp > 1:
        chunk = np.maximum(numbers(index.table, "chunk")[rows], -1)
    code, names = codes(index.table, "name")
    code = code[rows]
    roles = {}
    for own in rows_alike(combine(stage, chunk, code)):
        first = own[0]
        members, member = np.unique(row[own], return_inverse=True)
        shape = (len(members), len(seen.iterations))
        mean_ns, count = _mean_times(member, slot[own], layer[own], time_ns[own], shape)
        role = Role(int(stage[first]), int(chunk[first]), names[code[first]])
        roles[role] = RoleTimes(index.ranks[members], mean_ns, count)
    return roles


def _mean_times(
    row: Integers, slot: Integers, layer: Integers, time_ns: Floats, shape: tuple[int, int]
) -> tuple[Floats, float]:
    """Return the mean time of a role's spans, (rank, iteration), and how often a rank does it in an
    iteration; not all of its layers need be recorded in every iteration.
    """
    total, count = (
        sums_by_cell(row, slot, amounts, shape) for amounts in (time_ns, np.ones_like(time_ns))
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(total > 0, total / count, np.nan)
    layers, number = np.unique(layer, return_inverse=True)
    each = np.bincount((row * shape[1] + slot) * len(layers) + number)
    return mean, float(np.median(each[each > 0])) * len(layers)


def roles_of_observations(seen: Observations) -> dict[Role, RoleTimes]:
    """Return the times of passes and optimizer, all that an op table tells."""
    roles = {}
    members = seen.members
    for stage in np.unique(members.stage).tolist():
        rows = members.rows_of_stage(stage)
        for phase, name in enumerate(PHASE_NAMES):
            use = seen.work.phase == phase
            time_ns = np.exp(robust.mean(seen.work.log_ns[rows][:, :, use], axis=2))
            roles[Role(stage, -1, name)] = RoleTimes(members.ranks[rows], time_ns, float(use.sum()))
        optimizer = seen.optimizer_ns[rows]
        if np.isfinite(optimizer).any():
            roles[Role(stage, -1, OPTIMIZER)] = RoleTimes(members.ranks[rows], optimizer, 1.0)
    return roles


def layers_of_all_stages(roles: dict[Role, RoleTimes]) -> dict[Role, RoleTimes]:
    """Return layers and their modules with the ranks of all stages together: all do the same."""
    pooled: dict[str, list[RoleTimes]] = defaultdict(list)
    for role, times in roles.items():
        if role.name in _ALIKE_EVERYWHERE:
            pooled[role.name].append(times)
    return {
        Role(-1, -1, name): RoleTimes(
            np.concatenate([times.ranks for times in parts]),
            np.concatenate([times.time_ns for times in parts]),
            float(np.median([times.count for times in parts])),
        )
        for name, parts in pooled.items()
    }


AXES = ("dp", "pp", "vpp", "cp", "ep", "tp")
COUNTS_ALIKE = 1e-6


@dataclass(frozen=True)
class Comparable:
    """Roles that both traces did alike, and whether iterations and ranks may be compared."""

    roles: tuple[tuple[Role, RoleTimes, RoleTimes], ...]
    iterations: bool
    ranks: bool
    reasons: tuple[str, ...]
    """What cannot be compared, and why; sentences."""


def comparable(before: Side, after: Side) -> Comparable:
    """Return what the two traces have in common."""
    old, new = before.members.layout, after.members.layout
    differing = [axis for axis in AXES if getattr(old, axis) != getattr(new, axis)]
    reasons = []
    if differing:
        reasons.append(
            f"iterations and ranks: the layouts differ ({_sizes(old)} before, {_sizes(new)} after)"
        )
    elif old.order != new.order:
        reasons.append(f"ranks: their order differs ({old.order} before, {new.order} after)")
    passes = _num_passes(before), _num_passes(after)
    if passes[0] != passes[1]:
        reasons.append(f"iterations: {passes[0]} microbatches before, {passes[1]} after")
    old_roles, new_roles = (_roles(side, differing) for side in (before, after))
    heavier = _other_layers(old_roles, new_roles)
    if heavier:
        reasons.append(
            "iterations and passes of "
            + listed(f"stage PP{stage} ({then:g} layers before, {now:g} after)"
                     for stage, then, now in heavier)
        )  # fmt: skip
    changed_stages = {stage for stage, _, _ in heavier}
    shared = [
        (role, old_roles[role], new_roles[role])
        for role in sorted(set(old_roles) & set(new_roles))
        if not (role.stage in changed_stages and role.name in (FORWARD, BACKWARD, OPTIMIZER))
    ]
    only = sorted({role.name for role in set(old_roles) ^ set(new_roles)})
    if only:
        reasons.append(f"operations that only one trace holds: {listed(only)}")
    if differing and not shared:
        reasons.append("operations: ranks of the two jobs do different shares of the work")
    same_ranks = not differing and old.order == new.order
    return Comparable(
        roles=tuple(shared),
        iterations=not differing and passes[0] == passes[1] and not heavier,
        ranks=same_ranks and not heavier,
        reasons=tuple(reasons),
    )


def _sizes(layout: Layout) -> str:
    used = layout.used(*AXES)
    return " ".join(f"{axis.upper()}{getattr(layout, axis)}" for axis in used) or "one rank"


def _num_passes(side: Side) -> int:
    return int(side.examined.seen.work.microbatch.max(initial=-1)) + 1


def _roles(side: Side, differing: list[str]) -> dict[Role, RoleTimes]:
    """Return the roles that mean the same work in both layouts."""
    if not differing:
        return side.roles
    if differing == ["dp"]:  # a distributed optimizer steps a share of the parameters
        return {role: times for role, times in side.roles.items() if role.name != OPTIMIZER}
    return layers_of_all_stages(side.roles) if set(differing) <= {"dp", "pp", "vpp"} else {}


def _other_layers(
    old: dict[Role, RoleTimes], new: dict[Role, RoleTimes]
) -> list[tuple[int, float, float]]:
    """Return the stages whose number of layers changed: (stage, before, after)."""
    found = []
    for role in sorted(set(old) & set(new)):
        if role.name not in _LAYERS or role.stage < 0:
            continue
        passes = Role(role.stage, role.chunk, FORWARD)
        if passes not in old or passes not in new:
            continue
        then = old[role].count / old[passes].count
        now = new[role].count / new[passes].count
        if not np.isclose(then, now, rtol=COUNTS_ALIKE):
            found.append((role.stage, then, now))
    return found


@dataclass(frozen=True, kw_only=True)
class Side:
    """A trace, by the name that the user gave it.

    `shares` has the columns rank and `<share>_ratio`, one row a rank; None where the trace tells
    compute only (op tables); `traffic` is then empty.
    """

    name: str
    examined: Examination
    roles: dict[Role, RoleTimes]
    shares: pa.Table | None = None
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def members(self) -> Members:
        """Return the recorded ranks."""
        return self.examined.seen.members


def side_of_timeline(
    name: str, timeline: Timeline, shares: pa.Table, settings: DetectorSettings
) -> Side:
    """Return a side from a timeline and the shares of its ranks' time."""
    examined = examine(timeline, settings)
    return Side(
        name=name,
        examined=examined,
        roles=roles_of_timeline(timeline, examined.seen),
        shares=shares,
        traffic=traffic_of(timeline.spans),
    )


def side_of_op_table(name: str, path: Path, settings: DetectorSettings) -> Side:
    """Return a side from an op table. Raises InputError for a bad file."""
    examined = examine_op_table(path, settings)
    return Side(name=name, examined=examined, roles=roles_of_observations(examined.seen))


LOSSES = {
    "data loading": Cause.LOADER,
    "garbage collection": Cause.GC,
    "time outside operations": Cause.HOST,
}


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One quantity in both traces; `effect` and `error` are logarithms of its ratio."""

    kind: Quantity
    subject: str
    row: int
    """Which of the things that were compared together this is."""
    effect: float
    error: float
    reach: float
    p_value: float
    before_ns: float
    after_ns: float
    ranks: tuple[int, ...] = ()
    least: float = 0.0
    """Smallest effect that counts, if it is larger than the one that the user asked for."""
    notes: tuple[str, ...] = ()


def _measures(
    moved: Shift, kind: Quantity, subjects: list[str], times: tuple[Floats, Floats]
) -> list[Measure]:
    p_value, reach = moved.p_value, moved.reach
    return [
        Measure(
            kind=kind,
            subject=subject,
            row=row,
            effect=float(moved.effect[row]),
            error=float(moved.error[row]),
            reach=float(reach[row]),
            p_value=float(p_value[row]),
            before_ns=float(times[0][row]),
            after_ns=float(times[1][row]),
        )
        for row, subject in enumerate(subjects)
        if np.isfinite(moved.effect[row])
    ]


def _log_measures(
    kind: Quantity,
    subjects: list[str],
    values: Sequence[Floats],
    *,
    between: float = COMPARISON.between_log,
    shown: Sequence[Floats] | None = None,
) -> list[Measure]:
    """Compare the logarithms of the values before and after, (row, iteration) each.

    `shown` are the times to report, if they are not the values.
    """
    old, new = (robust.median(one, axis=1) for one in shown or values)
    moved = shift(robust.log_of(values[0]), robust.log_of(values[1]), between)
    return _measures(moved, kind, subjects, (old, new))


def step_measures(before: Side, after: Side) -> list[Measure]:
    """Compare the iteration time."""
    steps = [side.examined.seen.iteration_ns[None] for side in (before, after)]
    return _log_measures(Quantity.STEP, ["an iteration"], steps)


def role_measures(
    before: Side, after: Side, shared: Comparable, slow_ranks: set[int]
) -> Iterator[Measure]:
    """Compare every operation on its median rank, leaving out ranks that are slow themselves."""
    least_ns = COMPARISON.least_share * _step_ns(before)
    for role, old, new in shared.roles:
        if max(old.share_ns, new.share_ns) < least_ns:
            continue
        typical = []
        for times in (old, new):
            is_sound = ~np.isin(times.ranks, sorted(slow_ranks))
            sound = times.time_ns[is_sound] if is_sound.any() else times.time_ns
            typical.append(robust.median(sound, axis=0)[None])
        yield from _log_measures(Quantity.ROLE, [role.words], typical)


def _step_ns(side: Side) -> float:
    return float(np.median(side.examined.seen.iteration_ns))


def rank_measures(before: Side, after: Side) -> Iterator[Measure]:
    """Compare every rank's compute relative to its peers, and the time it loses outside compute."""
    rows = _shared_rows(before, after)
    if not len(rows[0]):
        return
    old, new = before.examined, after.examined
    busy = old.seen.busy_ns[rows[0]], new.seen.busy_ns[rows[1]]
    busy_ns = robust.median(busy[0], axis=1), robust.median(busy[1], axis=1)
    relative = old.slowness[rows[0]], new.slowness[rows[1]]
    has_peers = np.isfinite(robust.median(relative[0], axis=1) + robust.median(relative[1], axis=1))
    # a rank without peers is compared with what all ranks changed by
    logs = robust.log_of(busy[0]), robust.log_of(busy[1])
    change = robust.median(logs[1], axis=1) - robust.median(logs[0], axis=1)
    logs = logs[0], logs[1] - float(np.nan_to_num(robust.median(change)))
    compared = [np.where(has_peers[:, None], *one) for one in zip(relative, logs, strict=True)]
    moved = shift(compared[0], compared[1])
    own_effect = np.log(np.maximum(busy_ns[1], 1.0) / np.maximum(busy_ns[0], 1.0))
    stage = new.seen.members.stage
    has_few_peers = (np.bincount(stage)[stage] < COMPARISON.min_peers)[rows[1]]
    names = [_name(after, row) for row in rows[1].tolist()]
    for measure in _measures(moved, Quantity.RANK, names, busy_ns):
        own = own_effect[measure.row] * np.sign(measure.effect)
        if not has_few_peers[measure.row] or own > abs(measure.effect) / 2:
            yield _ranked(measure, before, after, rows)
    yield from _loss_measures(before, after, rows)


def _ranked(
    measure: Measure, before: Side, after: Side, rows: tuple[Integers, Integers]
) -> Measure:
    """Return the measure of one of the shared `rows` with its ranks, and a note of another host."""
    old, new = int(rows[0][measure.row]), int(rows[1][measure.row])
    old_host, new_host = before.members.hosts[old], after.members.hosts[new]
    moved = old_host and old_host != new_host
    notes = (f"it ran on host {old_host} before",) if moved else ()
    return replace(measure, ranks=after.members.workers[new], notes=notes)


def _name(side: Side, row: int) -> str:
    return f"{ranks_of(side.members, row)} ({place(side.members, row)})"


def _shared_rows(before: Side, after: Side) -> tuple[Integers, Integers]:
    """Return the rows of the same workers in both traces, (before, after)."""
    old = {ranks: row for row, ranks in enumerate(before.members.workers)}
    pairs = [(old[ranks], row) for row, ranks in enumerate(after.members.workers) if ranks in old]
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _loss_measures(before: Side, after: Side, rows: tuple[Integers, Integers]) -> Iterator[Measure]:
    """Compare loading, collection and gaps as shares of the iteration, by rank and for all."""
    sides = before, after
    steps = [_step_ns(side) for side in sides]
    for name, cause in LOSSES.items():
        lost = [side.examined.seen.lost(cause)[own] for side, own in zip(sides, rows, strict=True)]
        if not all(np.isfinite(one).any() for one in lost):
            continue
        shares = [one / step for one, step in zip(lost, steps, strict=True)]
        fleet = [robust.median(one, axis=0) for one in shares]
        old, new = (robust.mean(one[None], axis=1) * step
                    for one, step in zip(fleet, steps, strict=True))  # fmt: skip
        moved = _mean_shift(fleet[0][None], fleet[1][None])
        yield from _measures(moved, Quantity.LOSS, [f"{name} of all ranks"], (old, new))
        if len(rows[0]) < 2:
            continue
        old, new = (robust.mean(one, axis=1) for one in lost)
        moved = _mean_shift(shares[0] - fleet[0], shares[1] - fleet[1])
        names = [f"{name} of {_name(after, row)}" for row in rows[1].tolist()]
        for measure in _measures(moved, Quantity.LOSS, names, (old, new)):
            yield _ranked(measure, before, after, rows)


def _mean_shift(before: Floats, after: Floats) -> Shift:
    """Return the shift of means: lost times come in bursts, which a median does not see."""
    usual = shift(before, after, between=0.0)
    means = [robust.mean(one, axis=1) for one in (before, after)]
    effect = means[1] - means[0]
    variance = np.zeros_like(effect)  # of the means
    for one, mean in zip((before, after), means, strict=True):
        squares = robust.mean((one - mean[:, None]) ** 2, axis=1)
        variance += np.nan_to_num(squares) / max(one.shape[1] - 1, 1)
    return Shift(
        effect=np.log1p(np.maximum(effect, COMPARISON.least_change)),
        error=np.sqrt(variance + usual.error**2),
        degrees=usual.degrees,
    )


def link_measures(before: Side, after: Side) -> Iterator[Measure]:
    """Compare transfers of every edge and group, by operation and bytes; whole kinds first."""
    old, new = before.examined.seen.transfers, after.examined.seen.transfers
    if old is None or new is None:
        return
    error_ns = max(_clock_error_ns(side) for side in (before, after))
    least_ns = COMPARISON.least_share * _step_ns(before)
    old_rows, new_rows = _rows_by_kind(old), _rows_by_kind(new)
    widths = Counter(name for name, _ in {*old_rows, *new_rows})
    for name, width in sorted(set(old_rows) & set(new_rows)):
        rows = old_rows[name, width], new_rows[name, width]
        largest = max(float(old.total_ns[rows[0]].max()), float(new.total_ns[rows[1]].max()))
        kind = name if widths[name] == 1 else f"{name} in groups of {width}"
        if largest >= least_ns:
            yield from _of_kind(kind, (old, new), rows, error_ns)


def _rows_by_kind(transfers: Transfers) -> dict[tuple[str, int], Integers]:
    """Return the rows of transfers by kind and number of members, which a kind's name leaves out:
    an all-reduce of as many bytes takes longer in a group of eight than in one of two.
    """
    kinds = [
        (transfers.kinds[kind], len(members))
        for kind, members in zip(transfers.kind.tolist(), transfers.members, strict=True)
    ]
    return {one: np.flatnonzero([kind == one for kind in kinds]) for one in dict.fromkeys(kinds)}


def _of_kind(
    name: str,
    transfers: tuple[Transfers, Transfers],
    rows: tuple[Integers, Integers],
    error_ns: float,
) -> Iterator[Measure]:
    times = [one.transfer_ns[own] for one, own in zip(transfers, rows, strict=True)]
    fleet = [robust.median(one, axis=0)[None] for one in times]
    members = [[one.members[row] for row in own.tolist()]
               for one, own in zip(transfers, rows, strict=True)]  # fmt: skip
    if len(members[0]) == 1 and members[0] == members[1]:
        only = members[0][0]
        yield from _compare_connections(
            [f"{name} among ranks {_members(only)}"], fleet, [only], error_ns
        )
        return
    yield from _compare_connections([f"{name}, all connections"], fleet, [()], error_ns)
    both = [ranks for ranks in members[0] if ranks in set(members[1])]
    if len(both) < 2:
        return
    own = [one[[list(names).index(ranks) for ranks in both]]
           for one, names in zip(times, members, strict=True)]  # fmt: skip
    levels = [robust.median(one) for one in own]
    names = [f"{name} among ranks {_members(ranks)}" for ranks in both]
    relative = own[1] * float(levels[0] / levels[1])
    yield from _compare_connections(names, [own[0], relative], both, error_ns, shown=own)


def _members(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown


def _compare_connections(
    subjects: list[str],
    values: list[Floats],
    ranks: list[tuple[int, ...]],
    error_ns: float,
    shown: list[Floats] | None = None,
) -> Iterator[Measure]:
    """Compare connections; only a difference larger than the clocks' error counts."""
    least = float(np.log(SETTINGS.min_link_slowdown))
    measures = _log_measures(
        Quantity.LINK, subjects, values, between=COMPARISON.between_links_log, shown=shown
    )
    for measure in measures:
        old, new = (float(robust.median(one[measure.row])) for one in values)
        p_value = measure.p_value if abs(new - old) > 2 * error_ns else 1.0
        yield replace(measure, ranks=ranks[measure.row], least=least, p_value=p_value)


def _clock_error_ns(side: Side) -> float:
    alignment = side.examined.report.alignment
    return 0.0 if alignment is None else alignment.residual_p99_ns
