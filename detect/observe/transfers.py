"""Transfer times of communication, by edge and by process group.

The transfer of one operation is that of its quickest member: what one member alone takes longer
(it leaves late) is that member's own doing and is kept apart, as its lateness.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from detect.observe.axes import along
from detect.observe.members import hosts_of
from detect.observe.spans import SpanIndex, where_text
from detect.stats import robust
from detect.thresholds.networks import LINKS, NETWORKS
from megascan.arrays import (
    Flags,
    Floats,
    Integers,
    by_name,
    combine,
    group_lengths,
    group_numbers,
    group_starts,
    lower_medians,
    median_by,
)
from megascan.schema import Kind
from megascan.timeline import Timeline, codes, equals, numbers
from megascan.topology import Layout
from megascan.vocabulary import MUTUAL_OPS, ROOTED_OPS, axis_of_group


@dataclass(frozen=True)
class UntimedIn:
    """How long a group's collectives take whose ends are bounds only: when somebody saw them done.

    Not short of a transfer, but it may hold other work, and says something beside equal ones only.
    """

    members: tuple[int, ...]
    what: str
    """Axis and operation."""
    size_bytes: int
    """-1 where unknown."""
    crosses: bool
    """Whether the members are on several hosts."""
    shortest_ns: float
    """Median span of the member that is in them for the shortest time."""


@dataclass(frozen=True)
class UnmatchedIn:
    """How long a rank's quickest collectives take of those whose counterparts nobody knows, of one
    operation and size: they waited for nobody.
    """

    rank: int
    what: str
    size_bytes: int
    """-1 where unknown."""
    number: int
    an_iteration: float
    """The number of them in an iteration."""
    quickest_ns: float


@dataclass(frozen=True)
class LateIn:
    """A rank's lateness in the operations of one edge or group, ns an iteration."""

    rank: int
    members: tuple[int, ...]
    time_ns: float


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Transfer times of communication, one unit an edge (p2p) or a process group (collective).

    Units of one `kind` (operation, axis and size alike) are comparable with each other.
    """

    members: tuple[tuple[int, ...], ...] = field(metadata=along("unit"))
    """Global ranks of each edge or group."""
    kinds: tuple[str, ...]
    kind: Integers = field(metadata=along("unit"))
    """Index into `kinds`."""
    size_bytes: Integers = field(metadata=along("unit"))
    """-1 where unknown."""
    transfer_ns: Floats = field(metadata=along("unit", "iteration"))
    """Median of the transfers in the iteration."""
    sum_ns: Floats = field(metadata=along("unit", "iteration"))
    """Sum of the transfers in the iteration."""
    late_ns: Floats = field(metadata=along("row", "iteration"))
    """How much longer than the quickest member of the same operations the rank's own transfers
    take, summed over the iteration."""
    quick_ns: Floats = field(metadata=along("row", "iteration"))
    """Transfers of the quickest members of the rank's operations, summed over the iteration."""
    late_in: tuple[LateIn, ...] = ()
    """The edges and groups in which `late_ns` arose."""
    shortest_ns: Floats | None = field(default=None, metadata=along("unit", "iteration"))
    """Median, in the iteration, of the span of the member that is in an operation for the shortest
    time, by that member's clock."""
    untimed: tuple[UntimedIn, ...] = ()
    """Collectives that have no transfer time."""

    @cached_property
    def total_ns(self) -> Floats:
        """Return the mean over iterations of the sum of the transfers, (unit,)."""
        return np.asarray(self.sum_ns.mean(axis=1))

    @property
    def is_large(self) -> Flags:
        """Flag the units, (unit,), whose time tells of more than latency; unknown sizes count."""
        return (self.size_bytes < 0) | (self.size_bytes >= NETWORKS.min_bytes)


def hidden_axes(layout: Layout, transfers: Transfers | None) -> tuple[str, ...]:
    """Return the axes of a layout for `Observations.hidden_axes`."""
    shown = set()
    if transfers is not None:
        is_large = transfers.is_large
        for unit, ranks in enumerate(transfers.members):
            axis, operation = transfers.kinds[int(transfers.kind[unit])].split()[:2]
            if axis == "p2p" and layout.cp > 1 and ranks[1] in layout.group(ranks[0], "cp"):
                axis = "cp"
            if operation not in ROOTED_OPS and is_large[unit]:
                shown.add(axis)
    return tuple(one for one in ("tp", "cp", "ep") if getattr(layout, one) > 1 and one not in shown)


@dataclass(frozen=True)
class _Operations:
    """Matched communication of two members and more: its spans, ordered by match."""

    rows: Integers
    """Spans, with the members of one operation next to each other."""
    first: Integers
    """(operation,): the first member's span."""
    second: Integers
    """(operation,): the second member's span."""
    operation: Integers
    """(span of `rows`,): the number of its operation."""
    transfer_ns: Floats
    """(span of `rows`,)"""
    quickest_ns: Floats
    """(operation,): transfer of the quickest member."""
    shortest_ns: Floats
    """(operation,): span of the member that was in it for the shortest time."""


@dataclass(frozen=True)
class _Labels:
    """Which edge or group, and which kind of operation, each operation is."""

    unit: Integers
    members: list[tuple[int, ...]]
    kind: Integers
    kinds: tuple[str, ...]
    crosses: Flags
    """(member set,): whether the members are on several hosts."""
    between: Integers
    """(member set,): a number for the hosts that its members are on."""
    size: Integers
    """(operation,): bytes of an operation, or those for which all of its kind are reckoned."""


def transfers_of(index: SpanIndex, timeline: Timeline) -> Transfers | None:
    """Return transfers of all matched communication; None without any."""
    found = _operations(index, ~_are_untimed(index))
    if found is None:
        return None
    unit, members = _units(index, timeline, found)
    hosts = hosts_of(timeline.headers)
    places = [frozenset(hosts.get(one, "") for one in ranks) for ranks in members]
    number = {place: place_number for place_number, place in enumerate(dict.fromkeys(places))}
    num_hosts = np.array([len(place) for place in places])
    width = np.array([len(ranks) for ranks in members])
    # what is unknown is not equal: without its size, a transfer is like those of its own stage only
    stages = {rank: header.coordinates.pp for rank, header in timeline.headers.items()}
    stage = np.array([min((stages.get(one, -1) for one in ranks), default=-1) for ranks in members])
    alike = combine(width, num_hosts)
    kind, kinds, size = _kinds(index, found, unit, alike[unit], stage[unit])
    between = np.array([number[place] for place in places], dtype=np.int64)
    table = _table(index, found, _Labels(unit, members, kind, kinds, num_hosts > 1, between, size))
    return replace(table, untimed=_untimed(index, timeline, hosts))


def _are_untimed(index: SpanIndex) -> Flags:
    """Flag the spans whose transfer is not known, (span,)."""
    return numbers(index.table, "transfer_ns") < 0


def _untimed(
    index: SpanIndex, timeline: Timeline, hosts: Mapping[int, str]
) -> tuple[UntimedIn, ...]:
    """Return how long collectives take whose ends are bounds only."""
    is_bound = numbers(index.table, "end_is_bound") == 1
    found = _operations(index, _are_untimed(index) & is_bound & index.of_kind(Kind.COLLECTIVE))
    if found is None:
        return ()
    unit, members = _units(index, timeline, found)
    size = numbers(index.table, "size_bytes")[found.first]
    op, texts = _codes_by_name(index, "op")
    group, groups = _codes_by_name(index, "group")
    together = combine(unit, op[found.first], size)
    _, first, number = np.unique(together, return_index=True, return_inverse=True)
    typical_ns = median_by(number.reshape(-1), found.shortest_ns)[first]
    what = [
        f"{axis_of_group(groups[group[span]])} {texts[op[span]]}"
        for span in found.first[first].tolist()
    ]
    ranks = [members[one] for one in unit[first].tolist()]
    crosses = [len({hosts.get(one, "") for one in own}) > 1 for own in ranks]
    return tuple(map(UntimedIn, ranks, what, size[first].tolist(), crosses, typical_ns.tolist()))


def _operations(index: SpanIndex, use: Flags) -> _Operations | None:
    match = numbers(index.table, "match")
    transfer = numbers(index.table, "transfer_ns")
    communication = index.of_kind(Kind.COLLECTIVE, Kind.P2P)
    rows = np.flatnonzero((match >= 0) & use & communication)
    rows = rows[np.lexsort((index.rank[rows], match[rows]))]
    num_members = group_lengths(group_starts(match[rows]), len(rows))
    rows = rows[np.repeat(num_members > 1, num_members)]
    if not len(rows):
        return None
    starts = group_starts(match[rows])
    time_ns = transfer[rows].astype(np.float64)
    return _Operations(
        rows=rows,
        first=rows[starts],
        second=rows[starts + 1],
        operation=group_numbers(starts, len(rows)),
        transfer_ns=time_ns,
        quickest_ns=np.minimum.reduceat(time_ns, starts),
        shortest_ns=np.minimum.reduceat(index.duration[rows], starts).astype(np.float64),
    )


def _units(
    index: SpanIndex, timeline: Timeline, found: _Operations
) -> tuple[Integers, list[tuple[int, ...]]]:
    """Return the number of each operation's edge or group, and the ranks of each number."""
    groups: dict[str, tuple[int, ...]] = {}
    for header in timeline.headers.values():
        groups.update(header.groups)
    group, texts = _codes_by_name(index, "group")
    own, other = index.rank[found.first], index.rank[found.second]
    is_p2p = equals(index.table, "kind", Kind.P2P)[found.first]
    low, high = np.minimum(own, other), np.maximum(own, other)
    world = int(max(timeline.layout.world_size, index.ranks.max() + 1))
    key = np.where(is_p2p, -1 - (low * world + high), group[found.first])
    names, unit = np.unique(key, return_inverse=True)
    members = [
        groups.get(texts[name], ()) if name >= 0 else divmod(-1 - int(name), world)
        for name in names.tolist()
    ]
    return unit.astype(np.int64), members


def _codes_by_name(index: SpanIndex, name: str) -> tuple[Integers, list[str]]:
    """Return a text column as codes in the order of the texts, however a reader met them."""
    row_codes, texts = codes(index.table, name)
    return by_name(row_codes, texts), sorted(texts)


def _kinds(
    index: SpanIndex, found: _Operations, unit: Integers, alike: Integers, stage: Integers
) -> tuple[Integers, tuple[str, ...], Integers]:
    """Return what makes operations comparable: axis, operation, bytes, members, hosts crossed; with
    the names of the kinds, and the bytes for which each operation is reckoned, (operation,).

    Groups of as many members on as many hosts are `alike`, (operation,), and so are those of a
    `stage`, (operation,). Every operation is one of a `unit`, (operation,).
    """
    group, texts = _codes_by_name(index, "group")
    axis_of = [axis_of_group(text) for text in texts]
    axes = sorted({*axis_of, "p2p"})
    is_p2p = equals(index.table, "kind", Kind.P2P)[found.first]
    axis = np.array([axes.index(name) for name in axis_of], dtype=np.int64)[group[found.first]]
    axis = np.where(is_p2p, axes.index("p2p"), axis)
    op, op_texts = _codes_by_name(index, "op")
    op_code = np.where(is_p2p, -1, op[found.first])
    size = numbers(index.table, "size_bytes")[found.first]
    unsized = np.where(size < 0, stage, -1)
    size, slot = size.copy(), index.slot[found.first]
    size[is_p2p] = _reckoned(alike[is_p2p], unit[is_p2p], slot[is_p2p], size[is_p2p])
    together = combine(axis, op_code, size, alike, unsized)
    _, first, kind = np.unique(together, return_index=True, return_inverse=True)
    what = [
        f"{axes[axis[one]]} {'message' if is_p2p[one] else op_texts[op_code[one]]}"
        for one in first.tolist()
    ]
    return kind.reshape(-1).astype(np.int64), _named(what, size[first]), size


def _reckoned(alike: Integers, unit: Integers, slot: Integers, size: Integers) -> Integers:
    """Return the bytes for which each message is reckoned, (message,): its own, or the median of
    all that are `alike` where most sizes of a unit are those of few iterations (`slot`), and all
    are so large that time is in proportion to them.

    Collectives are left out: of unlike sizes the largest member's decides. Example: documents are
    packed to unlike lengths, and messages of 25.7 to 40.2 MB hardly ever have one size twice.
    """
    of_unit = combine(alike, unit)
    of_size = combine(of_unit, size)
    is_rare = _num_slots(of_size, slot) < NETWORKS.least_of_size_share * _num_slots(of_unit, slot)
    found = size.copy()
    for one in np.unique(alike[is_rare]).tolist():
        mine = alike == one
        is_large = int(size[mine].min()) >= NETWORKS.min_scaled_bytes
        if is_large and 2 * int(is_rare[mine].sum()) > int(mine.sum()):
            found[mine] = int(np.median(size[mine]))
    return found


def _num_slots(key: Integers, slot: Integers) -> Integers:
    """Return for each key in how many iterations it occurs."""
    names = np.unique(combine(key, slot), return_index=True)[1]
    keys, num = np.unique(key[names], return_counts=True)
    return np.asarray(num[np.searchsorted(keys, key)])


def bytes_text(size_bytes: float) -> str:
    """Return 805306368 as "805 MB", decimal; small sizes to the byte."""
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if size_bytes >= size:
            return f"{size_bytes / size:.3g} {unit}"
    return f"{size_bytes:,.0f} bytes"


def _named(what: Sequence[str], size: Integers) -> tuple[str, ...]:
    """Name kinds of operations by their sizes; to the byte where rounded ones would be alike."""
    rounded = [
        f"{name} of {bytes_text(own) if own >= 0 else 'unknown size'}"
        for name, own in zip(what, size.tolist(), strict=True)
    ]
    names = Counter(rounded)
    return tuple(
        text if names[text] == 1 or own < 0 else f"{name} of {own:,} bytes"
        for text, name, own in zip(rounded, what, size.tolist(), strict=True)
    )


def _clock_errors(index: SpanIndex, found: _Operations, labels: _Labels) -> Floats:
    """Return by how much the clocks of each edge or group contradict cause and effect, ns.

    Nobody leaves an operation of all with all before its last member has arrived; where a trace
    says otherwise, clocks disagree by at least as much.
    """
    mutual = where_text(index.table, "op", MUTUAL_OPS.__contains__)[found.rows]
    rows, operation = found.rows[mutual], found.operation[mutual]
    arrived = np.full(len(labels.unit), np.iinfo(np.int64).min)
    left = np.full(len(labels.unit), np.iinfo(np.int64).max)
    np.maximum.at(arrived, operation, index.start[rows])
    np.minimum.at(left, operation, (index.start + index.duration)[rows])
    judged = arrived > np.iinfo(np.int64).min
    error = np.zeros(len(labels.members))
    np.maximum.at(error, labels.unit[judged], (arrived - left)[judged].astype(np.float64))
    return error


def _late_in(
    index: SpanIndex, rows: Integers, unit: Integers, late_ns: Floats, labels: _Labels
) -> tuple[LateIn, ...]:
    """Return lateness by rank and edge or group, the mean over the iterations."""
    num_units = len(labels.members)
    names, number = np.unique(index.row[rows] * num_units + unit, return_inverse=True)
    mean_ns = np.bincount(number, weights=late_ns) / max(index.shape[1], 1)
    return tuple(
        LateIn(int(index.ranks[name // num_units]), labels.members[name % num_units], time)
        for name, time in zip(names.tolist(), mean_ns.tolist(), strict=True)
    )


def _table(index: SpanIndex, found: _Operations, labels: _Labels) -> Transfers:
    """Return medians and sums by (unit, kind) and iteration.

    Lateness is what a transfer takes longer than that of the quickest member, minus what the clocks
    of the group's members may feign.
    """
    quickest_ns, unit = found.quickest_ns[found.operation], labels.unit[found.operation]
    late_ns = found.transfer_ns - quickest_ns - _clock_errors(index, found, labels)[unit]
    is_late = late_ns > 0
    late_rows, late_ns = found.rows[is_late], late_ns[is_late]
    num_kinds, num_iterations = len(labels.kinds), index.shape[1]
    own_size = numbers(index.table, "size_bytes")[found.first]
    scale = np.where(own_size == labels.size, 1.0, labels.size / np.maximum(own_size, 1))
    names, row = np.unique(labels.unit * num_kinds + labels.kind, return_inverse=True)
    cell = row * num_iterations + index.slot[found.first]
    sum_ns = np.zeros((len(names), num_iterations))
    np.add.at(sum_ns.reshape(-1), cell, found.quickest_ns)
    size = np.zeros(len(names), dtype=np.int64)
    size[row] = labels.size
    medians = _medians(cell, scale * found.quickest_ns, len(names) * num_iterations)
    transfer_ns = medians.reshape(len(names), num_iterations)
    shortest_ns = scale * found.shortest_ns
    kind, kinds = _by_wire(names, size, _medians(row, shortest_ns, len(names)), labels)
    shortest_ns = _medians(cell, shortest_ns, len(names) * num_iterations)
    moved = np.bincount(row, minlength=len(names)) * np.maximum(size, 0)
    keep = _worth_comparing(kind, kinds, sum_ns.sum(axis=1))
    keep |= _worth_comparing(kind, kinds, moved.astype(np.float64))
    return Transfers(
        members=tuple(labels.members[one // num_kinds] for one in names[keep].tolist()),
        kinds=kinds,
        kind=kind[keep],
        size_bytes=size[keep],
        transfer_ns=transfer_ns[keep],
        shortest_ns=shortest_ns.reshape(len(names), num_iterations)[keep],
        sum_ns=sum_ns[keep],
        late_ns=index.sums(late_rows, late_ns),
        quick_ns=index.sums(found.rows, quickest_ns),
        late_in=_late_in(index, late_rows, unit[is_late], late_ns, labels),
    )


def _by_wire(
    names: Integers, size: Integers, shortest_ns: Floats, labels: _Labels
) -> tuple[Integers, tuple[str, ...]]:
    """Return the kind of each row, (row,), and all kinds; those between hosts that are quicker than
    any NIC go over NVLink, inside a rack, and are kinds of their own.

    `names` (row,) is unit · kinds + kind. A unit that is so quick in one kind is so in all, and so
    should be one that joins the same hosts as others most of which are: wires are the hosts'. By
    `shortest_ns` (row,), the span of whoever comes last, by one clock: errors between clocks leave
    nothing of some transfers. Few bytes show no wire.

    Example: messages of 16.8 MB take 41 us between two hosts of a rack, 409 GB/s, and 350 us from
    there to the next rack: by design, not by a fault.
    """
    num_kinds = len(labels.kinds)
    unit, kind = np.divmod(names, num_kinds)
    factors = bus_factors(labels.kinds, kind, [labels.members[one] for one in unit.tolist()])
    with np.errstate(divide="ignore", invalid="ignore"):
        is_quick = factors * size / shortest_ns > NETWORKS.most_of_nic
    is_quick &= size >= NETWORKS.min_bytes
    quick_units = np.unique(unit[is_quick & labels.crosses[unit]])
    num_quick = np.bincount(labels.between[quick_units], minlength=int(labels.between.max()) + 1)
    num_all = np.bincount(labels.between[np.unique(unit)], minlength=len(num_quick))
    mostly_quick = (num_quick > NETWORKS.same_wire_share * num_all)[labels.between[unit]]
    over_nvlink = np.isin(unit, quick_units) | (mostly_quick & labels.crosses[unit])
    moved = [name.replace(" of ", " over NVLink of ", 1) for name in labels.kinds]
    return kind + num_kinds * over_nvlink, (*labels.kinds, *moved)


def _medians(cell: Integers, values: Floats, num_cells: int) -> Floats:
    """Return the median of the values of each cell; NaN where there are none."""
    table = np.full(num_cells, np.nan)
    table[cell] = median_by(cell, values)
    return table


def _worth_comparing(kind: Integers, kinds: tuple[str, ...], total: Floats) -> Flags:
    """Flag rows whose kind usually makes up a noticeable part of its axis's `total`, (row,): of the
    transfer time, or of the bytes.

    Usually (`usual_total`), because otherwise a small message that a late launch lengthens would
    count where it is slow. Example: next to all-reduces of 9.3 ms an iteration, a broadcast of
    131 kB takes 0.15 ms in one group and 3 ms in another. Of bytes, because one stage's rings of
    793 MB may take 72 ms for being slow, so that 11 ms for 478 MB of another's look like nothing.
    """
    axis = np.array([name.partition(" ")[0] for name in kinds])
    usual = usual_total(kind, len(kinds), total) * np.bincount(kind, minlength=len(kinds))
    _, number = np.unique(axis, return_inverse=True)
    of_axis = np.array([usual[number == one].sum() for one in range(len(kinds))])
    share = usual / np.maximum(of_axis[number], 1.0)
    return np.asarray(share[kind] >= LINKS.min_axis_share)


def usual_total(kind: Integers, num_kinds: int, total: Floats) -> Floats:
    """Return the lower median of each kind's totals, (kind,); 0 for a kind without rows."""
    found = np.zeros(num_kinds)
    kinds, medians = lower_medians(kind, total)
    found[kinds] = medians
    return found


def longest_of_a_rank(transfers: Transfers, which: Flags) -> float:
    """Return the transfer time per iteration of the rank that spends most in units of `which`."""
    total_ns = transfers.total_ns
    by_rank: dict[int, float] = defaultdict(float)
    for unit in np.flatnonzero(which).tolist():
        for rank in transfers.members[unit]:
            by_rank[rank] += float(total_ns[unit])
    return max(by_rank.values(), default=0.0)


def bus_factor(operation: str, size: int) -> float | None:
    """Return bus bandwidth over bytes a second, for `size` ranks; None where not defined."""
    return {
        "all_reduce": 2.0 * (size - 1) / size,
        "reduce_scatter": (size - 1) / size,
        "all_to_all": (size - 1) / size,
        "all_gather": float(size - 1),
    }.get(operation)


def bus_factors(kinds: Sequence[str], kind: Integers, members: Sequence[tuple[int, ...]]) -> Floats:
    """Return the bus factor of each row's `kind` among its members, (row,); 1 where undefined."""
    return np.array([
        bus_factor(kinds[one].split()[1], max(len(ranks), 1)) or 1.0
        for one, ranks in zip(kind.tolist(), members, strict=True)
    ])  # fmt: skip


def log_residuals(transfers: Transfers, excluded: Flags) -> Floats:
    """Return log transfer time minus the median of the kind's other rows, (row, iteration)."""
    log_ns = robust.log_of(transfers.transfer_ns)
    residual = np.full_like(log_ns, np.nan)
    for kind in np.unique(transfers.kind):
        rows = np.flatnonzero(transfers.kind == kind)
        residual[rows] = log_ns[rows] - robust.expected_from_others(log_ns[rows], excluded[rows])
    return residual
