"""Cut every rank's iterations at marks, and stack the ranks of a stage that ran the same marks.

A mark is the begin or end of a pass or of the optimizer, or a communication. Between two marks
lies local work. Ranks of one stage run the same program, so their marks stack to arrays
(lane, iteration, mark); an iteration that lost a span or ran other microbatches is left out.

    marks      B        C           E  B          E        B begin, E end of a pass
    rank 0     ├forward─┤all_reduce├┤  ├─backward─┤        C communication
    rank 1     ├─forward─┤all_reduce┤  ├backward──┤

Asynchronous messages may hold up the device all the same. With a single hardware queue
(CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron needs it for tensor parallelism) kernels run in launch
order, and a message that waits for its partner keeps the next pass from starting:

    forward ──┤░░░ recv_backward ░░░├── forward          the gap is waiting, not the host's

`messages_hold_up` recognises these messages by their ends: no pass begins before, and the next pass
begins at once.

Communication beside compute begins when its stream is free: in one iteration before the end of a
pass, in the next one after it. It is put where it began at the earliest in any iteration of any
rank of the stage: by then what it needs was ready. A profile knows no more of it than that a pass
lay beside it; what has one beside it in most iterations is taken to run beside compute in all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from megascan.arrays import (
    Flags,
    Integers,
    Words,
    combine,
    lower_medians,
    numbered,
    order_by,
    running_numbers,
)
from megascan.errors import InputError
from megascan.schema import COMMUNICATION_KINDS, Kind, Phase, Track
from megascan.timeline import Timeline, codes, equals, numbers
from megascan.vocabulary import LOSS_SYNC, CountsAs, axis_of_group, is_data_parallel, names_of

PASS_NAMES = names_of(CountsAs.PASS)
BACKWARD_NAMES = names_of(CountsAs.PASS, phases=[Phase.BACKWARD])
END, BEGIN, COMMUNICATION = range(3)
"""Edges of marks, in the order they take at the same instant."""
ROUNDING_NS = 2
"""By how much one span's end and the next one's begin may differ where they are one instant: both
are rounded to whole ns, and so are durations on aligned clocks."""


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Marks of all ranks, sorted by (rank, iteration, time); arrays (mark,).

    `row` is the mark's span in the timeline's table, `edge` one of the constants above, `key` is
    equal for marks that mean the same; `beside` flags communication that runs beside compute and
    holds up nothing before it is needed. `bounds` (rank, iteration, 2) are the first and last
    instants of each iteration, 0 where a rank has none.
    """

    row: Integers
    edge: Integers
    time_ns: Integers
    end_ns: Integers
    key: Integers
    beside: Flags
    segment: Integers
    """rank number x iterations + iteration number, ascending."""
    ranks: Integers
    iterations: Integers
    bounds: Integers


def replayed_spans(spans: pa.Table) -> pa.Table:
    """Return the spans that a replay looks at: all but modules and what else lies in passes."""
    kept = equals(spans, "kind", *COMMUNICATION_KINDS, Kind.ITERATION, Kind.OPTIMIZER)
    kept |= equals(spans, "kind", Kind.GC, Kind.DATA) | equals(spans, "name", *PASS_NAMES)
    return spans.filter(pa.array(kept))


def marks_of(timeline: Timeline) -> Marks:
    """Return the marks of a timeline's traced iterations."""
    table = timeline.spans
    ranks, rank = np.unique(numbers(table, "rank"), return_inverse=True)
    iteration, start = numbers(table, "iteration"), numbers(table, "start_ns")
    end = start + numbers(table, "duration_ns")
    counts = iteration > 0
    iterations = np.unique(iteration[counts])
    segment = rank * len(iterations) + np.searchsorted(iterations, iteration)
    bounds = _bounds(table, counts, segment, (start, end), (len(ranks), len(iterations)))
    of_stage = np.array([timeline.layout.coordinates(int(rank)).pp for rank in ranks])
    row, edge = (np.concatenate(parts) for parts in zip(*_selected(table, counts), strict=True))
    time = np.where(edge == END, end[row], start[row])
    until = np.where(edge == COMMUNICATION, end[row], time)
    flat = bounds.reshape(-1, 2)[segment[row]]
    inside = (time >= flat[:, 0] - ROUNDING_NS) & (until <= flat[:, 1] + ROUNDING_NS)
    row, edge, time, until = row[inside], edge[inside], time[inside], until[inside]
    key = _keys(table, row, edge)
    sooner = time - ROUNDING_NS * (edge == END)  # what ends when the next begins comes first
    order = _in_order(segment[row], sooner, edge, key)
    beside = numbers(table, "track")[row[order]] == Track.OVERLAPPED
    marks = Marks(
        row=row[order],
        edge=edge[order],
        time_ns=time[order],
        end_ns=until[order],
        key=key[order],
        beside=beside & (edge[order] == COMMUNICATION),
        segment=segment[row][order],
        ranks=ranks,
        iterations=iterations,
        bounds=_with_heads(bounds, of_stage == 0),
    )
    stage = of_stage[marks.segment // len(iterations)]
    marks = replace(marks, beside=_mostly_beside(marks, stage))
    messages = equals(table, "kind", Kind.P2P)[marks.row]
    if messages_hold_up(marks, marks.beside & messages):
        marks = replace(marks, beside=marks.beside & ~messages)
    group, groups = codes(table, "group")
    is_data = np.array([is_data_parallel(name) for name in groups] or [False])[group]
    if _gathers_in_backward(marks, table, is_data):
        is_data &= ~equals(table, "op", "all_gather")
    is_pass = equals(table, "kind", Kind.COMPUTE)
    return _when_launched(_at_their_earliest(marks, stage), stage, is_pass, is_data)


def _gathers_in_backward(marks: Marks, table: pa.Table, is_data: Flags) -> bool:
    """Return whether parameters are gathered in backward passes as well, as FSDP and ZeRO 3 do:
    layer by layer, each of which waits for its own; `is_data` (row,) flags what goes over
    data-parallel groups.
    """
    gathers = marks.edge == COMMUNICATION
    gathers &= (is_data & equals(table, "op", "all_gather"))[marks.row]
    opened = _before(~gathers)
    inside = equals(table, "name", *BACKWARD_NAMES)[marks.row[opened]]
    return bool((gathers & inside & (marks.edge[opened] == BEGIN)).any())


def _mostly_beside(marks: Marks, stage: Integers) -> Flags:
    """Return `marks.beside`, the same for each n-th communication of a name on a stage: what it is
    in most iterations of most ranks.
    """
    talks = np.flatnonzero(marks.edge == COMMUNICATION)
    if not len(talks):
        return marks.beside
    same = _same_on_stage(marks, talks, stage)
    beside = np.zeros_like(marks.beside)
    beside[talks] = (2 * np.bincount(same, weights=marks.beside[talks]) > np.bincount(same))[same]
    return beside


def _same_on_stage(marks: Marks, chosen: Integers, stage: Integers) -> Integers:
    """Return a number, (chosen,), that is equal for the n-th marks of a key on a stage's ranks."""
    key = marks.key[chosen]
    ordinal = running_numbers(combine(marks.segment[chosen], key))
    return numbered(stage[chosen], key, ordinal)


def _in_order(segment: Integers, time: Integers, edge: Integers, key: Integers) -> Integers:
    """Return the order by segment, time, edge and key."""
    if not len(time):
        return np.zeros(0, dtype=np.int64)
    origin = int(time.min())
    return order_by(segment * (int(time.max()) - origin + 1) + (time - origin), edge, key)


def _at_their_earliest(marks: Marks, stage: Integers) -> Marks:
    """Return the marks with communication beside compute where it began at the earliest.

    A place counts the other marks of the iteration before it; `stage` is (mark,). The n-th
    communication of a name is the same one in every iteration of a stage. Where it began later, the
    work up to the next mark is taken to lie before it. Of several in one place, the first is the
    one that usually begins first.
    """
    floating = np.flatnonzero(marks.beside)
    if not len(floating):
        return marks
    fixed = ~marks.beside
    before: Integers = np.cumsum(fixed) - fixed  # of all segments up to here
    first = np.searchsorted(marks.segment, np.arange(int(marks.segment.max()) + 2))
    place: Integers = before - before[first[marks.segment]]
    same = _same_on_stage(marks, floating, stage)
    earliest = np.full(int(same.max()) + 1, len(fixed))
    np.minimum.at(earliest, same, place[floating])
    place[floating] = earliest[same]
    began = (marks.time_ns - marks.time_ns[first[marks.segment]])[floating]
    usually = np.bincount(same, weights=began) / np.bincount(same)
    turn = np.full(len(fixed), len(earliest))  # after the communication that is put before it
    turn[floating] = np.argsort(np.argsort(usually, kind="stable"))[same]
    order = np.lexsort((turn, place, marks.segment))
    return replace(
        marks,
        row=marks.row[order],
        edge=marks.edge[order],
        time_ns=_no_later_than_next(marks.time_ns[order], fixed[order], marks.segment),
        end_ns=marks.end_ns[order],
        key=marks.key[order],
        beside=marks.beside[order],
    )


def _no_later_than_next(time: Integers, fixed: Flags, segment: Integers) -> Integers:
    """Return times (mark,), none after that of the next `fixed` mark of its segment."""
    return _ascending(np.minimum(time, time[_next(fixed, segment)]), segment)


def _when_launched(marks: Marks, stage: Integers, is_pass: Flags, is_data: Flags) -> Marks:
    """Return the marks with gradients and parameters that travel beside a pass where they are
    launched: as far into the pass as mostly on the rank where that is least. Passes with any other
    communication, which may hold them up (each layer's parameters, say), stay.

    `stage` is (mark,); `is_pass` and `is_data` say of a span, (row,), whether it is a pass, or goes
    over a data-parallel group. What waits for its stream begins late, but rarely on all ranks
    alike. Example: reductions are launched at 20, 40 and 60 % of a backward pass. On quick ranks
    they queue behind the first, which waits for a slow rank, and begin when the pass is long over;
    on the slow one they begin in time.
    """
    floating = marks.beside & is_data[marks.row]
    ahead, past = _next(~floating, marks.segment), _before(~floating)
    opens = is_pass[marks.row[past]] & (marks.edge[past] == BEGIN)
    closes = is_pass[marks.row[ahead]] & (marks.edge[ahead] == END)
    chosen = np.flatnonzero(floating & opens & closes)
    if not len(chosen):
        return marks
    ahead, past = ahead[chosen], past[chosen]
    begin_ns = marks.time_ns[past]
    width_ns = np.maximum(marks.time_ns[ahead] - begin_ns, 1)
    part = np.clip((marks.time_ns[chosen] - begin_ns) / width_ns, 0.0, 1.0)
    same = _same_on_stage(marks, chosen, stage)
    least = np.ones(int(same.max()) + 1)
    of_rank = numbered(same, marks.segment[chosen] // len(marks.iterations))
    np.minimum.at(least, same, lower_medians(of_rank, part)[1][of_rank])
    time = marks.time_ns.copy()
    time[chosen] = begin_ns + (np.minimum(part, least[same]) * width_ns).astype(np.int64)
    return replace(marks, time_ns=_ascending(time, marks.segment))


def _next(chosen: Flags, segment: Integers) -> Integers:
    """Return the place of the next `chosen` mark of the segment, (mark,); its own if none."""
    place = np.arange(len(chosen))
    following = np.minimum.accumulate(np.where(chosen, place, len(place))[::-1])[::-1]
    following = np.where(following < len(place), following, place)
    return np.where(segment[following] == segment, following, place)


def _before(chosen: Flags) -> Integers:
    """Return the place of the last `chosen` mark up to each, (mark,); 0 if none."""
    return np.maximum.accumulate(np.where(chosen, np.arange(len(chosen)), 0))


def _ascending(time: Integers, segment: Integers) -> Integers:
    """Return times, (mark,), none before one further ahead in its segment."""
    origin, width = int(time.min()), int(np.ptp(time)) + 1
    latest = np.maximum.accumulate(segment * width + (time - origin))
    return np.asarray(latest - segment * width + origin)


def _bounds(
    table: pa.Table,
    counts: Flags,
    segment: Integers,
    times: tuple[Integers, Integers],
    shape: tuple[int, int],
) -> Integers:
    """Return begin and end of each (rank, iteration), by its iteration span or by all spans."""
    rows = equals(table, "kind", Kind.ITERATION) & counts
    if not rows.any():
        rows = counts
    first = np.full(shape[0] * shape[1], np.iinfo(np.int64).max)
    last = np.zeros_like(first)
    np.minimum.at(first, segment[rows], times[0][rows])
    np.maximum.at(last, segment[rows], times[1][rows])
    first[last == 0] = 0
    return np.stack([first, last], axis=-1).reshape(*shape, 2)


def _with_heads(bounds: Integers, is_first: Flags) -> Integers:
    """Return the bounds, (rank, iteration, 2), of ranks of the first stage (`is_first`, (rank,))
    with the time at their head by which they begin an iteration later than the first of them.

    It counts once all ranks have ended the iteration before; other stages may wait for messages.
    Example: a slow host gets its next batch, which nobody traces, for 130 ms, and others for 8.
    """
    begins, ends = np.moveaxis(bounds, -1, 0)
    known = (ends > 0) & is_first[:, None]
    earliest = np.where(known, begins, np.iinfo(np.int64).max).min(axis=0)
    earliest[1:] = np.maximum(earliest[1:], ends.max(axis=0)[:-1])
    return np.stack([np.where(known, np.minimum(begins, earliest), begins), ends], axis=-1)


def _selected(table: pa.Table, counts: Flags) -> Iterator[tuple[Integers, Integers]]:
    """Yield (rows, edge) of every kind of mark."""
    brackets = (
        equals(table, "kind", Kind.COMPUTE) & equals(table, "name", *PASS_NAMES),
        equals(table, "kind", Kind.OPTIMIZER),
    )
    for chosen in brackets:
        rows = np.flatnonzero(chosen & counts)
        yield rows, np.full(len(rows), BEGIN)
        yield rows, np.full(len(rows), END)
    has_partner = (numbers(table, "peer") >= 0) | ~equals(table, "group", "")
    has_partner |= equals(table, "name", LOSS_SYNC)
    communication = equals(table, "kind", *COMMUNICATION_KINDS) & has_partner
    rows = np.flatnonzero(communication & counts)
    yield rows, np.full(len(rows), COMMUNICATION)


def _keys(table: pa.Table, row: Integers, edge: Integers) -> Integers:
    """Return a number for what each mark means, the same on every rank of a stage."""
    communication = edge == COMMUNICATION
    group, groups = codes(table, "group")
    axes = np.array([axis_of_group(name) for name in groups] or [""])
    axis = np.unique(axes, return_inverse=True)[1][group[row]]
    parts = [
        edge,
        np.where(communication, axis, 0),
        codes(table, "name")[0][row],
        np.where(communication, codes(table, "direction")[0][row], 0),
        np.where(communication, 0, numbers(table, "microbatch")[row] + 1),
        np.where(communication, 0, numbers(table, "chunk")[row] + 1),
    ]
    key: Integers = np.ravel_multi_index(parts, [int(part.max(initial=0)) + 1 for part in parts])
    return key


def programs(marks: Marks) -> Words:
    """Return a hash of each (rank, iteration)'s sequence of marks; 0 where it has none."""
    size = len(marks.ranks) * len(marks.iterations)
    lengths = np.bincount(marks.segment, minlength=size)
    first = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    place = np.arange(len(marks.segment)) - first[marks.segment]
    seed = np.random.default_rng(0)
    odd = seed.integers(0, 2**63, int(lengths.max(initial=0)) + 1, dtype=np.uint64) * 2 + 1
    key = (marks.key * 2 + marks.beside).astype(np.uint64)
    word = (key * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1)) * odd[place]
    total = np.zeros(size, dtype=np.uint64)
    filled = lengths > 0
    total[filled] = np.add.reduceat(word, first[filled])
    return (total ^ lengths.astype(np.uint64)).reshape(len(marks.ranks), len(marks.iterations))


def host_work_before_marks(timeline: Timeline, marks: Marks, kind: Kind) -> Integers:
    """Return the time of one kind's spans that began since the mark before, (mark,) ns.

    Communication inside the spans is left out. On GPUs it is 0 throughout: there the host runs
    ahead, and what holds it up need not hold up the device.
    """
    total = np.zeros(len(marks.row), dtype=np.int64)
    if any(header.device.kind != "cpu" for header in timeline.headers.values()):
        return total
    table = timeline.spans
    rows = np.flatnonzero(equals(table, "kind", kind) & (numbers(table, "iteration") > 0))
    if not len(rows) or not len(total):
        return total
    rank = np.searchsorted(marks.ranks, numbers(table, "rank")[rows])
    iteration = np.searchsorted(marks.iterations, numbers(table, "iteration")[rows])
    start = numbers(table, "start_ns")[rows]
    origin = min(int(marks.time_ns.min()), int(start.min()))
    width = max(int(marks.time_ns.max()), int(start.max())) - origin + 1
    axis = marks.segment * width + (marks.time_ns - origin)
    segment = rank * len(marks.iterations) + iteration
    place = np.searchsorted(axis, segment * width + (start - origin), side="right")
    inside = place < len(total)
    inside[inside] = marks.segment[place[inside]] == segment[inside]
    np.add.at(total, place[inside], np.maximum(numbers(table, "self_ns")[rows][inside], 0))
    return total


@dataclass(frozen=True)
class TextColumn:
    """A text column: code of each row, text of each code."""

    codes: Integers
    texts: list[str]

    def __getitem__(self, row: int) -> str:
        return self.texts[int(self.codes[row])]


@dataclass(frozen=True, kw_only=True)
class SpanColumns:
    """What is asked of single spans, by row of the timeline's table."""

    kind: TextColumn
    name: TextColumn
    op: TextColumn
    direction: TextColumn
    group: TextColumn
    microbatch: Integers
    chunk: Integers
    size_bytes: Integers
    match: Integers
    wait_ns: Integers
    duration_ns: Integers
    overlapped: Flags
    pauses_ns: Integers
    """Garbage collection in the work before each mark (mark,)."""
    loading_ns: Integers
    """Data loading in the work before each mark (mark,)."""

    @classmethod
    def of(cls, timeline: Timeline, marks: Marks) -> SpanColumns:
        """Return the columns of a timeline."""
        table = timeline.spans
        overlapped = np.zeros(table.num_rows, dtype=np.bool_)
        overlapped[marks.row[marks.beside]] = True
        return cls(
            kind=TextColumn(*codes(table, "kind")),
            name=TextColumn(*codes(table, "name")),
            op=TextColumn(*codes(table, "op")),
            direction=TextColumn(*codes(table, "direction")),
            group=TextColumn(*codes(table, "group")),
            microbatch=numbers(table, "microbatch"),
            chunk=numbers(table, "chunk"),
            size_bytes=numbers(table, "size_bytes"),
            match=numbers(table, "match"),
            wait_ns=numbers(table, "wait_ns"),
            duration_ns=numbers(table, "duration_ns"),
            overlapped=overlapped,
            pauses_ns=host_work_before_marks(timeline, marks, Kind.GC),
            loading_ns=host_work_before_marks(timeline, marks, Kind.DATA),
        )


LEAST_NS = 200_000
"""Shorter messages hardly wait, so they cannot tell whether they hold up passes."""
LEAST_SHARE_BEFORE = 0.95
"""Least share of the messages' time that lies before the next pass, if they hold it up."""
MOST_IDLE_AFTER = 0.2
"""Most idle time between the messages and the next pass over the messages' own time, if they hold
it up."""


def messages_hold_up(marks: Marks, messages: Flags) -> bool:
    """Return whether asynchronous `messages`, (mark,), keep passes from starting.

    False where no message waits: then it makes no difference.
    """
    begins = np.flatnonzero(marks.edge == BEGIN)
    length = marks.end_ns - marks.time_ns
    waiting = np.flatnonzero(messages & (length >= LEAST_NS))
    place = np.searchsorted(begins, waiting, side="right")
    following = np.append(begins, -1)[place]
    same = (following >= 0) & (marks.segment[following] == marks.segment[waiting])
    waiting, following = waiting[same], following[same]
    if not len(waiting):
        return False
    total = float(length[waiting].sum())
    gap = marks.time_ns[following] - marks.end_ns[waiting]
    overlap = float(np.minimum(np.maximum(-gap, 0), length[waiting]).sum())
    idle = float(np.maximum(gap, 0).sum())
    return overlap <= (1 - LEAST_SHARE_BEFORE) * total and idle <= MOST_IDLE_AFTER * total


NUM_WARMUP_ITERATIONS = 2
"""The first iterations of a run compile and allocate; they are left out where others remain."""
_LEAST_SHARE = 0.5
"""A rank that ran its stage's usual program in fewer iterations is taken as missing."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """All stages over the iterations they share; `ranks` (stage, lane), `iterations` their ids.

    `places` are, by stage, (lane, iteration, mark): where in `marks` each mark is, -1 where a lane
    is missing. `present` (stage, lane) flags what was recorded; `bounds` (stage, lane, iteration,
    2) are begin and end of every rank's iterations, ns.
    """

    marks: Marks
    places: tuple[Integers, ...]
    present: Flags
    ranks: Integers
    iterations: Integers
    bounds: Integers
    notes: tuple[str, ...]

    @property
    def complete_lane(self) -> int:
        """Return a lane that was recorded on every stage.

        Raises InputError when there is none: messages between stages could not be paired.
        """
        whole = self.present.all(axis=0)
        if not whole.any():
            raise InputError(
                "no replica of the model has a usable record of every pipeline stage; aggregate "
                "a trace in which at least one replica is complete"
            )
        return int(np.argmax(whole))


def stack_marks(timeline: Timeline) -> Stack:
    """Stack what all ranks ran alike. Raises InputError when no iteration did."""
    marks = marks_of(timeline)
    ranks = ranks_by_stage(timeline)
    rows = {int(rank): row for row, rank in enumerate(marks.ranks)}
    grid = np.array([[rows.get(int(rank), -1) for rank in lanes] for lanes in ranks])
    usual = _runs_usual_program(programs(marks), grid)
    present = usual.mean(axis=2) >= _LEAST_SHARE
    kept = np.all(usual | ~present[:, :, None], axis=(0, 1)) & present.any()
    is_warmup = marks.iterations <= NUM_WARMUP_ITERATIONS
    num_warmup = 0
    if (kept & ~is_warmup).sum() >= 2:
        kept, num_warmup = kept & ~is_warmup, int(is_warmup.sum())
    if not kept.any():
        raise InputError(
            f"none of the {len(marks.iterations)} traced iterations ran the same operations on "
            "all ranks of a stage, so there is no step to replay; trace more iterations, or the "
            "job with an order that is not chosen at run time and equal shares of microbatches"
        )
    chosen = np.flatnonzero(kept)
    size = len(marks.iterations)
    first = np.searchsorted(marks.segment, np.arange(len(marks.ranks) * size))
    lengths = np.bincount(marks.segment, minlength=len(first))
    segments = np.where(grid[:, :, None] < 0, -1, grid[:, :, None] * size + chosen)
    places = []
    for own, recorded in zip(segments, present, strict=True):
        length = int(lengths[own[np.argmax(recorded), 0]]) if recorded.any() else 0
        place = first[own][:, :, None] + np.arange(length)
        place[~recorded] = -1
        places.append(place)
    bounds = marks.bounds.reshape(-1, 2)[segments]
    bounds[~present] = 0
    return Stack(
        marks=marks,
        places=tuple(places),
        present=present,
        ranks=ranks,
        iterations=marks.iterations[chosen],
        bounds=bounds,
        notes=_notes(ranks[~present], len(marks.iterations) - len(chosen), num_warmup),
    )


def ranks_by_stage(timeline: Timeline) -> Integers:
    """Return global ranks, (stage, lane), in order of rank, so that one lane is one replica."""
    layout = timeline.layout
    stage = [layout.coordinates(rank).pp for rank in range(layout.world_size)]
    return np.argsort(stage, kind="stable").reshape(layout.pp, -1)


def _runs_usual_program(fingerprints: Words, grid: Integers) -> Flags:
    """Flag each (stage, lane, iteration) whose sequence of marks is its stage's most common one."""
    usual = np.zeros((*grid.shape, fingerprints.shape[1]), dtype=np.bool_)
    for number, lanes in enumerate(grid):
        found = fingerprints[lanes[lanes >= 0]]
        values, counts = np.unique(found[found != 0], return_counts=True)
        if len(values):
            same = fingerprints[lanes] == values[np.argmax(counts)]
            usual[number] = same & (lanes >= 0)[:, None]
    return usual


def _notes(missing: Integers, num_left_out: int, num_warmup: int) -> tuple[str, ...]:
    notes = []
    if len(missing):
        names = ", ".join(map(str, np.sort(missing)[:8]))
        more = ", …" if len(missing) > 8 else ""
        notes.append(
            f"{len(missing)} rank(s) without a usable record ({names}{more}) are replayed like "
            "the median of their peers"
        )
    if num_warmup:
        notes.append(f"{num_warmup} first iteration(s) of the run are left out (warm-up)")
    if num_left_out > num_warmup:
        notes.append(
            f"{num_left_out - num_warmup} traced iteration(s) with other or lost operations are "
            "left out"
        )
    return tuple(notes)
