"""Time for which a device stands still inside its passes, its host late with the next launch.

Problem: a slow device multiplies every operation. A slow host lets the device run dry now and then:
in a few modules, or between them, while most modules take as long as ever:

    slow device  |── attention ────|── mlp ───|── attention ────|── mlp ───|
    slow host    |─ attention ─|  ·  |─ mlp ─|    ·    |─ attention ─|─ mlp ─|
                 · the queue is empty

Idea: what a pass should take follows from its own modules (`contents_of`). What it took beyond
that, it stood still (`stalled_time`). That needs no peers: a stage of one rank shows it, too.

    contents_of, stalled_time        passes and their modules
    launched_late                    the device waited for launches between layers
    loading_time                     loading of data
    collecting_time, within_stalls   garbage collection
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from detect.observe.operations import FORWARD
from detect.observe.spans import SpanIndex, cover_of, enclosed_time, enclosing, idle_within
from detect.observe.work import Samples
from detect.thresholds.observing import STALLS
from megascan.arrays import (
    Cover,
    Flags,
    Floats,
    Integers,
    combine,
    median_by,
)
from megascan.schema import NOT_APPLICABLE, Kind, Track
from megascan.timeline import codes, equals, numbers
from megascan.vocabulary import CONTAINERS, MOE, backward_of


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What is inside each pass, (pass,) each."""

    row: Integers
    role: Integers
    """A number for phase and chunk: passes with the same number are comparable."""
    num_modules: Integers
    modules_ns: Floats
    """What the recorded modules took."""
    expected_ns: Floats
    """What all modules should have taken, by what is typical of them."""
    unseen_ns: Floats
    """The part of `expected_ns` of modules that were not recorded."""
    late_ns: Floats
    """How long the device waited for launches between modules; infinite where not known."""


def contents_of(index: SpanIndex, passes: Flags, samples: Samples, modules: Flags) -> Contents:
    """Return what the `modules` of each pass took, and what they typically take on their rank.

    `samples` are those of `passes`. A module's typical time is its median over the rank's passes,
    times the pass's median ratio to these medians (a longer sequence, a slow phase: all modules of
    the pass alike). Experts take what they take, up to `STALLS.most_tokens_ratio` times what is
    typical: a router sends them now more and now fewer tokens.

    Where modules of only some layers were recorded, in turns, the others take what is typical of
    them on their rank, times the same ratio: each module is recorded in some iteration of the
    window. Layers of different turns are seen in different passes, and where sequences are uneven
    the passes of one turn are longer on the median. So a module's typical time is then its median
    share of a pass, times the median pass; otherwise the passes of a turn would seem to stand still
    in the layers of the other turns.
    """
    owner = enclosing(index, passes, modules)
    inside = owner >= 0
    owner, num_passes = owner[inside], len(samples.row)
    module_ns = index.self_time(modules)[inside]
    name = codes(index.table, "name")[0][modules][inside]
    layer = np.maximum(numbers(index.table, "layer")[modules][inside], 0)
    role = 2 * samples.chunk + samples.phase
    takes_turns = index.is_sampled and len(owner) > 0
    even_ns = module_ns
    if takes_turns:
        pass_ns = np.maximum(index.duration[passes].astype(np.float64), 1.0)
        even_ns = module_ns / (pass_ns / median_by(combine(samples.row, role), pass_ns))[owner]
    kind = combine(layer, name)
    typical = median_by(combine(samples.row[owner], kind), even_ns)
    routed = index.named((MOE, backward_of(MOE)))[modules][inside]
    scale = _scales(owner, module_ns / np.maximum(typical, 1.0), routed)
    usual = typical * scale
    most = np.maximum(np.minimum(module_ns, STALLS.most_tokens_ratio * usual), usual)
    usual = np.where(routed, most, usual)
    expected = np.bincount(owner, weights=usual, minlength=num_passes).astype(np.float64)
    unseen_ns: Floats = np.zeros(num_passes)
    if takes_turns:
        ratio = np.ones(num_passes)
        ratio[owner] = scale
        unseen_ns = _unseen_modules(combine(samples.row, role), owner, kind, typical) * ratio
    late_ns = launched_late(index, passes, modules)
    return Contents(
        row=samples.row,
        role=role,
        num_modules=np.bincount(owner, minlength=num_passes),
        modules_ns=np.bincount(owner, weights=module_ns, minlength=num_passes).astype(np.float64),
        expected_ns=expected + unseen_ns,
        unseen_ns=unseen_ns,
        late_ns=np.full(num_passes, np.inf) if late_ns is None else late_ns,
    )


def _scales(owner: Integers, ratio: Floats, routed: Flags) -> Floats:
    """Return each module's median ratio of its pass; `routed` ones count only by themselves."""
    scale = median_by(owner, ratio)
    if routed.any() and not routed.all():
        plain = ~routed
        of_pass = np.full(int(owner.max()) + 1, np.nan)
        of_pass[owner[plain]] = median_by(owner[plain], ratio[plain])
        known = np.isfinite(of_pass[owner])
        scale[known] = of_pass[owner[known]]
    return scale


def stalled_time(
    contents: Contents,
    stage: Integers,
    time_ns: Floats,
    own_ns: Floats,
    tolerance_share: float = STALLS.tolerance_share,
) -> Floats:
    """Return how long each pass stood still, (pass,) ns; 0 where it holds too few modules to tell.

    `stage` is the stage of the pass's rank, `time_ns` the pass's time, `own_ns` that time minus all
    waiting, (pass,) each. What is less than `tolerance_share` of a pass is scatter.

    Waiting for the TP group inside modules does not count: it is part of what is typical. Waiting
    for communication beside the pass is taken off afterwards (`Passes.beside_ns`): the first
    forward of an iteration waits for its parameters, which a late rank (it logs, or saves) has to
    share first.

    Launch times cannot tell this: a host that lost its core for 20 ms catches up within a few
    launches, so the queue is long again at nearly every start that was recorded.
    """
    enough = contents.num_modules >= STALLS.min_modules
    if not enough.any():
        return np.zeros(len(time_ns))
    expected = contents.expected_ns
    rest = time_ns - contents.modules_ns - contents.unseen_ns
    told = enough & (expected > 0)
    whole = expected + _usual_rest(contents, stage, told, np.maximum(rest, 0.0))
    over = own_ns - whole
    return np.where(told & (over > tolerance_share * whole), over, 0.0)


def _unseen_modules(place: Integers, owner: Integers, kind: Integers, typical: Floats) -> Floats:
    """Return what the modules that were not recorded typically take in each pass, (pass,) ns.

    `place` is a number for each pass's rank and role; `owner`, `kind` and `typical` are those of
    each recorded module.
    """
    _, first = np.unique(combine(place[owner], kind), return_index=True)
    whole = np.bincount(place[owner][first], weights=typical[first], minlength=place.max() + 1)
    seen = np.bincount(owner, weights=typical, minlength=len(place))
    return np.asarray(np.maximum(whole[place] - seen, 0.0), dtype=np.float64)


def _usual_rest(contents: Contents, stage: Integers, told: Flags, rest: Floats) -> Floats:
    """Return how long a pass should take besides its modules (embedding, loss, norms), (pass,) ns.

    This is the median rest of the rank, unless that is more than twice the least of the stage's
    ranks, in proportion to their modules. A longer rest still counts as the device's own if modules
    were launched long before in both phases: a host that is always late shows it in one of them.
    """
    role, expected = contents.role, contents.expected_ns
    by_rank, by_stage = combine(contents.row, role)[told], combine(stage, role)[told]
    usual = median_by(by_rank, rest[told])
    modules = median_by(by_rank, expected[told])
    fewest = _lowest_by(by_stage, modules)
    least = _lowest_by(by_stage, usual) * modules / np.maximum(fewest, 1.0)
    is_long = usual > STALLS.max_rest_ratio * least
    is_late = is_long & (median_by(by_rank, contents.late_ns[told]) >= 0.5 * (usual - least))
    waits = np.isin(contents.row[told], contents.row[told][is_late])  # in passes of either phase
    result = np.zeros(len(rest))
    result[told] = np.where(is_long & waits, least, usual)
    return result


def _lowest_by(key: Integers, values: Floats) -> Floats:
    """Return for each value the lowest of all values with the same key."""
    lowest = np.full(int(key.max(initial=0)) + 1, np.inf)
    np.minimum.at(lowest, key, values)
    return np.asarray(lowest[key])


def launched_late(index: SpanIndex, passes: Flags, layers: Flags) -> Floats | None:
    """Return for how long the device waited for launches between the layers of passes, (pass,) ns;
    None where launches were not recorded.

    With parameters sharded over the replicas (FSDP), the time between layers is waiting for the
    slowest replica's part of the next layer's parameters, or what causes that waiting: a host that
    was late with the launch. Time before the launch is lost by the host, time after it is waiting.

        late host    ── layer 1 ──|        launch|─ gather ─|── layer 2 ──
                                  |──── lost ────|
        its partner  ── layer 1 ──|──────── gather ─────────|── layer 2 ──      launched long before
    """
    start, end = index.axis
    order = np.argsort(start[layers], kind="stable")
    owner, rows = enclosing(index, passes, layers)[order], np.flatnonzero(layers)[order]
    launch = numbers(index.table, "launch_ns")[rows]
    is_known = launch != NOT_APPLICABLE
    if not is_known.any():
        return None
    finished = np.maximum.accumulate(end[rows])[:-1]
    late = np.maximum((start[rows] + np.minimum(launch, 0))[1:] - finished, 0)
    same = (owner[1:] == owner[:-1]) & (owner[1:] >= 0) & is_known[1:]
    lost = np.zeros(int(passes.sum()))
    np.add.at(lost, owner[1:][same], late[same])
    return lost


def loading_time(
    index: SpanIndex, passes: Flags, phase: Integers, data: Flags
) -> tuple[Floats, Floats]:
    """Return what each span of loading costs, (data span,) ns, and the part of it that lies within
    the spans of passes, (pass,) ns; `phase` is that of each pass.

    On the CPU a span of loading lies inside the pass that it interrupts, and all of it counts. On a
    GPU the host runs ahead of the device: while it loads the data of one microbatch the device
    computes an earlier one, and a copy that waits for the device to catch up makes the span long
    without costing anything. Only the time during which the device has nothing to do is lost:

        host      |── loading of microbatch 3 ──────────|
        device  ── backward 1 ──|   idle    | broadcast |── forward 3 ──
                                |── lost ───|

    A forward pass holds the loading of its own microbatch: the device passes its beginning and
    waits.
    """
    if index.is_cpu:
        inside = enclosed_time(index, passes, data, index.self_time(data))
        return index.wall_time(data), inside
    owner = _own_passes(index, passes, phase, data)
    start, end = index.axis
    begun, over = start[data], end[data]
    owned = owner >= 0
    mine = np.flatnonzero(passes)[owner[owned]]
    covered_from = start.copy()
    np.maximum.at(covered_from, mine, over[owned])
    cover = cover_of(covered_from, end, _on_device(index))
    inside = np.zeros(int(passes.sum()))
    idle = idle_within(cover, np.maximum(begun[owned], start[mine]), over[owned])
    np.add.at(inside, owner[owned], idle)
    return idle_within(cover, begun, over), inside


@dataclass(frozen=True, kw_only=True)
class Collections:
    """Garbage collections, (collection,) each, and what lies beside them."""

    row: Integers
    slot: Integers
    lost_ns: Floats
    outside_ns: Floats
    """How long the device idled during the collection outside of passes; 0 where all modules were
    recorded."""
    first: Integers
    last: Integers
    """The rank's passes `first` to `last` - 1, from 0, overlap the collection."""
    inside_ns: Floats
    """(pass,): the part of `lost_ns` that lies within the pass's own span."""


def collecting_time(index: SpanIndex, passes: Flags, gc: Flags) -> Collections:
    """Return what garbage collection costs.

    On the CPU all of it counts, on a GPU only the time in which the device has nothing to do, as
    with loading (`loading_time`). A device that has launches left stands still later than its host
    begins to collect, often in another pass:

        host    pass 1, pass 2, |── gc ──────────────────| launches the rest of pass 3
        device    pass 0 |pass 1 |pass 2 |pass 3 · · · · · · rest|      it stands still in pass 3
    """
    lost = index.duration[gc].astype(np.float64)
    start, end = index.axis
    outside = np.zeros(len(lost))
    cover: Cover | None = None
    if not index.is_cpu:
        on_device = _on_device(index)
        if index.is_sampled:
            outside = idle_within(cover_of(start, end, on_device), start[gc], end[gc])
        if index.frame.has_parts:
            busy = on_device & ~equals(index.table, "name", *CONTAINERS)
            cover = cover_of(start, end, busy)
            lost = idle_within(cover, start[gc], end[gc])
    first = np.searchsorted(end[passes], start[gc], side="right")
    last = np.maximum(np.searchsorted(start[passes], end[gc]), first)
    before = np.searchsorted(index.row[passes], index.row[gc])
    return Collections(
        row=index.row[gc],
        slot=index.slot[gc],
        lost_ns=lost,
        outside_ns=outside,
        first=first - before,
        last=last - before,
        inside_ns=enclosed_time(index, passes, gc, lost)
        if cover is None
        else _idle_beside(cover, (start[passes], end[passes]), (start[gc], end[gc]), first, last),
    )


def _idle_beside(
    cover: Cover,
    passes: tuple[Integers, Integers],
    collections: tuple[Integers, Integers],
    first: Integers,
    last: Integers,
) -> Floats:
    """Return how long the device stood still in each pass during collections, (pass,) ns.

    `passes` and `collections` are (begins, ends); passes `first` to `last` - 1 overlap each
    collection.
    """
    count = last - first
    collection = np.repeat(np.arange(len(count)), count)  # of each overlap
    before = np.cumsum(count) - count
    number = (first - before)[collection] + np.arange(len(collection))  # of the pass
    low = np.maximum(passes[0][number], collections[0][collection])
    high = np.minimum(passes[1][number], collections[1][collection])
    inside = np.zeros(len(passes[0]))
    np.add.at(inside, number, idle_within(cover, low, high))
    return inside


def within_stalls(collecting: Collections, stalled_ns: Floats) -> Collections:
    """Bound what collections cost by how long the passes beside them stood still, (pass,) ns.

    Where modules of only some layers were recorded, the device seems to have nothing to do in the
    other layers; what a pass took beyond what is typical tells how much of that is true. A
    collection costs what the device idled outside of passes, and the stalls of passes beside it.
    """
    first, last = collecting.first, collecting.last
    before = np.concatenate([[0.0], np.cumsum(stalled_ns)])
    bound = collecting.outside_ns + before[last] - before[first]
    beside = np.zeros(len(stalled_ns) + 1)
    np.add.at(beside, first, 1.0)
    np.add.at(beside, last, -1.0)
    return replace(
        collecting,
        lost_ns=np.minimum(collecting.lost_ns, bound),
        inside_ns=np.where(np.cumsum(beside)[:-1] > 0, stalled_ns, 0.0),
    )


def _on_device(index: SpanIndex) -> Flags:
    on_host = index.track == Track.HOST
    return np.asarray(index.in_iteration & ~index.of_kind(Kind.ITERATION) & ~on_host)


def _own_passes(index: SpanIndex, passes: Flags, phase: Integers, data: Flags) -> Integers:
    """Return the number of the forward pass whose microbatch each data span loads; -1 for none.

    It is -1, too, where the device reaches the pass only after the loading: nothing was lost in it.
    """
    start, end = index.axis
    microbatch = numbers(index.table, "microbatch")
    chunk = np.maximum(numbers(index.table, "chunk"), 0)
    key = combine(index.cell, chunk, np.maximum(microbatch, 0))
    forward = np.flatnonzero(phase == FORWARD)
    order = forward[np.argsort(key[passes][forward], kind="stable")]
    if not len(order):
        return np.full(int(data.sum()), -1, dtype=np.int64)
    keys = key[passes][order]
    place = np.minimum(np.searchsorted(keys, key[data]), len(keys) - 1)
    owner = order[place]
    known = (keys[place] == key[data]) & (microbatch[data] >= 0)
    reached = (start[passes][owner] < end[data]) & (end[data] < end[passes][owner])
    return np.where(known & reached, owner, -1)
