"""The two records that frame a rank file: who recorded it (header), what a finished window holds.

A dataclass takes any values, so a record that is filled from JSON is checked here, field by field,
before a text can get into arithmetic. Fields may be numbers, texts, enums, other dataclasses,
tuples and mappings.

A few ordered ranks stand in JSON as a list, more ranks as the text of their progressions:

    [0, 1, 2, 3]          →  [0, 1, 2, 3]
    0, 1, 2, … 16383      →  "0-16383"
    3, 11, 19, … 16379    →  "3-16379/8"
    0 … 31, 64 … 95       →  "0-31,64-95"

So a header stays about as short in a job of thousands of ranks as in a job of eight, although it
names groups that hold all ranks.
"""

from __future__ import annotations

import math
import re
import reprlib
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from enum import Enum, IntEnum, StrEnum
from functools import lru_cache, partial
from typing import Any, TypeAlias, TypeVar, cast, get_args, get_origin, get_type_hints

from megascan.errors import ConfigError, InputError
from megascan.schema import SCHEMA_VERSION, Granularity
from megascan.topology import Coordinates, Layout

Record = TypeVar("Record")
Check: TypeAlias = Callable[[object, str], None]
"""Function that checks a value, given the path that names it; raises TypeError."""

_LARGEST = 1 << 63


def shown(value: object) -> str:
    """Return a value from a file as short text for a message, even if it nests deep."""
    return reprlib.repr(value)[:40]


def checked(record: Record) -> Record:
    """Return the record if all its fields have their types; raise TypeError naming the field.

    Whole numbers must fit into 64 bits, other numbers must be finite; a float field may have a
    whole number.
    """
    _check_fields(record, "")
    return record


def _check_fields(record: object, path: str, known: Collection[str] = ()) -> None:
    for name, check in _checks_of(type(record)):  # type: ignore[arg-type]  # types are hashable
        if name not in known:
            check(getattr(record, name), f"{path}{name}")


@lru_cache(maxsize=64)
def _checks_of(record_type: type) -> tuple[tuple[str, Check], ...]:
    hints = get_type_hints(record_type)
    return tuple((field.name, _check_of(hints[field.name])) for field in fields(record_type))


@lru_cache(maxsize=256)
def _check_of(kind: object) -> Check:
    """Make the check that a value of a declared type must pass."""
    arguments = get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        return partial(_check_record, kind)
    if get_origin(kind) is tuple and arguments[-1] is Ellipsis:
        return partial(_check_items, _check_of(arguments[0]))
    if get_origin(kind) is tuple:
        return partial(_check_places, tuple(map(_check_of, arguments)))
    if get_origin(kind) is Mapping:
        return partial(_check_mapping, _check_of(arguments[0]), _check_of(arguments[1]))
    return partial(_check_plain, kind)


def _check_record(kind: type, value: object, path: str) -> None:
    if not isinstance(value, kind):
        raise _misfit(value, kind, path)
    _check_fields(value, f"{path}.")


def _check_items(check: Check, value: object, path: str) -> None:
    if not isinstance(value, tuple):
        raise _misfit(value, tuple, path)
    for item in value:
        check(item, path)


def _check_places(checks: tuple[Check, ...], value: object, path: str) -> None:
    if not isinstance(value, tuple):
        raise _misfit(value, tuple, path)
    if len(value) != len(checks):
        raise TypeError(f"{path} holds {len(value)} values, expected {len(checks)}")
    for item, check in zip(value, checks, strict=True):
        check(item, path)


def _check_mapping(check_key: Check, check_value: Check, value: object, path: str) -> None:
    if not isinstance(value, Mapping):
        raise _misfit(value, Mapping, path)
    for key, item in value.items():
        check_key(key, f"a name in {path}")
        check_value(item, f"{path}[{shown(key)}]")


def _check_plain(kind: object, value: object, path: str) -> None:
    if type(value) is kind is str:  # fast path: nearly all values of thousands of headers
        return
    if type(value) is kind is int and -_LARGEST <= value < _LARGEST:
        return
    if not _is_plain(value, kind):
        raise _misfit(value, kind, path)


def _misfit(value: object, kind: object, path: str) -> TypeError:
    expected = getattr(kind, "__name__", str(kind))
    return TypeError(f"{path} is {shown(value)}, expected {expected}")


def _is_plain(value: object, kind: object) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and -_LARGEST <= value < _LARGEST
    if kind is float:
        return isinstance(value, int | float) and math.isfinite(value)
    if isinstance(kind, types.UnionType):
        return any(_is_plain(value, each) for each in get_args(kind))
    if kind is types.NoneType:
        return value is None
    return isinstance(kind, type) and issubclass(kind, str | Enum) and isinstance(value, kind)


_LONGEST_LIST = 16
_MOST_RANKS = 1 << 24
_PART = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?:/(\d{1,9}))?)?")


def packed(ranks: Sequence[int]) -> list[int] | str:
    """Return ordered ranks in the form that stands in JSON."""
    if len(ranks) <= _LONGEST_LIST:
        return list(ranks)
    return _text(tuple(ranks))


@lru_cache(maxsize=4096)  # the same groups stand in the headers of all their members
def _text(ranks: tuple[int, ...]) -> str:
    return ",".join(_texts(ranks))


def _texts(ranks: Sequence[int]) -> Iterator[str]:
    place = 0
    while place < len(ranks):
        first, count = ranks[place], _progression(ranks, place)
        step = ranks[place + 1] - first if count > 1 else 1
        by = f"/{step}" if step > 1 else ""
        yield f"{first}-{ranks[place + count - 1]}{by}" if count > 1 else f"{first}"
        place += count


def _progression(ranks: Sequence[int], place: int) -> int:
    """Count how many ranks from `place` on form a rising progression; 1 if fewer than three do."""
    step = ranks[place + 1] - ranks[place] if place + 1 < len(ranks) else 0
    end = place + 1
    while step > 0 and end < len(ranks) and ranks[end] - ranks[end - 1] == step:
        end += 1
    return end - place if end - place > 2 else 1


def unpacked(ranks: object) -> tuple[int, ...]:
    """Return ranks from either form in JSON. Raises ValueError for anything else."""
    if isinstance(ranks, str):
        return _from_text(ranks)
    if (
        isinstance(ranks, list)
        and {type(rank) for rank in ranks} <= {int}
        and all(0 <= rank < _MOST_RANKS for rank in ranks)
    ):
        return tuple(ranks)
    raise ValueError(
        f"ranks of a group are {shown(ranks)}, expected a list or a text like 0-7,16-23"
    )


@lru_cache(maxsize=4096)  # the same groups stand in the headers of all their members
def _from_text(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(f"ranks of a group are {text!r}, expected a text like 0-7,16-23")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if not step or not first <= last or (last - first) // step >= _MOST_RANKS - len(found):
            raise ValueError(f"ranks of a group are {text!r}, which is no rising progression")
        found += range(first, last + 1, step)
    return tuple(found)


Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


@dataclass(frozen=True, kw_only=True)
class Device:
    """What the rank computes on.

    `kind` is "cpu" or "cuda"; uuid tells one card from another across jobs.
    """

    kind: str
    name: str
    index: int = 0
    uuid: str = ""


LATEST_NS = 1 << 62
"""Unix time of the year 2116."""
_MOST_ITERATIONS = 1 << 20
MOST_RANKS = 1 << 20
"""A header with more ranks is damaged."""

RESTARTING_CLOCK = "CUDA events since step begin"
"""`ClockOrigin.source` of clocks that begin again at every iteration."""


@dataclass(frozen=True, kw_only=True)
class ClockOrigin:
    """Where a rank's time comes from.

    Ranks of one `domain` read the same physical clock and need no alignment among each other.
    Event times are relative to `origin_unix_ns` (unix time of the host clock when the origin was
    taken).
    """

    domain: str
    source: str
    origin_unix_ns: int


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """What the tracer was asked for: iterations i with (i - 1) mod interval < window are traced.
    At granularity full, modules of every `layer_stride`-th layer are recorded in each of them.
    `max_bytes` bounds a rank's file (0: no bound); above `budget_ratio` of the run's time the
    tracer records less (0: above 2 % modules of fewer layers, above 5 % fewer windows), see
    WindowRecord.
    """

    granularity: Granularity
    interval: int
    window: int
    compress: bool = False
    max_bytes: int = 0
    budget_ratio: float = 0.0
    layer_stride: int = 1


class Trainer(StrEnum):
    """Whose loop trains: by it one knows which ranks log for all."""

    UNKNOWN = ""
    MEGATRON = "megatron"
    """Megatron-Core's parallel state was there when tracing began: the last rank logs."""
    TORCH = "torch"
    """A loop on plain PyTorch, as those of torchtitan, Lightning and Accelerate are."""

    @classmethod
    def _missing_(cls, value: object) -> Trainer:
        """Take what a later MegaScan may write for unknown."""
        return cls.UNKNOWN


@dataclass(frozen=True, kw_only=True)
class RankHeader:
    """Everything a reader must know about one rank of one run.
    `groups` maps a process group id, `<axis>@<smallest member>`, to its ordered global
    ranks (more than 16 as a text: `0-7,16-23`, `3-16379/8`). Two
    communicators over the same ranks have different axes in their ids (dp, dp_cp, …), so an id
    names one communicator of the job. `num_windows_dropped` windows, up to and including
    `last_iteration_dropped`, were taken off the file to keep it below `trace.max_bytes`. `trainer`
    is megatron or torch; left out where it is not known.
    """

    run_id: str
    rank: int
    world_size: int
    layout: Layout
    coordinates: Coordinates
    groups: Mapping[str, tuple[int, ...]]
    host: str
    process_id: int
    device: Device
    backend: str
    clock: ClockOrigin
    trace: TraceSettings
    versions: Mapping[str, str] = field(default_factory=dict)
    num_windows_dropped: int = 0
    last_iteration_dropped: int = 0
    schema: int = SCHEMA_VERSION
    trainer: Trainer = Trainer.UNKNOWN

    def __getstate__(self) -> dict[str, object]:
        """Pickle groups in their short form: thousands of headers name large groups."""
        return {**vars(self), "groups": {name: packed(each) for name, each in self.groups.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        groups = {name: unpacked(ranks) for name, ranks in state["groups"].items()}
        vars(self).update(state, groups=groups)

    def to_json(self) -> dict[str, Json]:
        """Return the `args` of the header event."""
        record: dict[str, Json] = asdict(replace(self, groups={}))
        record["groups"] = {
            name: cast("Json", packed(ranks)) for name, ranks in self.groups.items()
        }
        return {name: record[name] for name in self.known_fields()}

    def known_fields(self) -> dict[str, Any]:
        """Return the fields by name, without copying values; not the trainer where it is unknown,
        which older MegaScans do not read.
        """
        return {name: value for name, value in vars(self).items() if name != "trainer" or value}

    @classmethod
    def from_json(cls, record: Mapping[str, Json], where: str) -> RankHeader:
        """Read the header from a header event.

        Raises InputError naming `where` if it is damaged or of a newer schema. Unknown fields,
        which a later MegaScan may write, are ignored.
        """
        version = record.get("schema")
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise InputError(
                f"{where}: rank file of schema {shown(version)}, this MegaScan reads up to "
                f"{SCHEMA_VERSION}; update MegaScan"
            )
        fields = _without_unknown(cls, record)
        try:
            fields["layout"] = _known(layout_from_json, fields["layout"])
            fields["coordinates"] = Coordinates(**fields["coordinates"])
            groups = {name: unpacked(ranks) for name, ranks in fields["groups"].items()}
            fields["groups"] = {}  # checked already: checking all members again would cost most
            fields["device"] = Device(**fields["device"])
            fields["clock"] = _clock_from_json(fields["clock"])
            fields["trace"] = _known(_settings_from_json, fields["trace"])
            fields["trainer"] = Trainer(fields.get("trainer", Trainer.UNKNOWN))
            header = cls(**fields)
            _check_fields(header, "", _CHECKED_FIELDS)
            vars(header)["groups"] = groups
            return header
        except (
            KeyError, TypeError, ValueError, AttributeError, RecursionError, ConfigError,
        ) as error:  # fmt: skip
            raise InputError(
                f"{where}: damaged header ({error!s:.200}); restore the file or leave this rank "
                "out (--allow-missing-ranks)"
            ) from error


def foreign_header(
    run_id: str,
    rank: int,
    layout: Layout,
    device: Device,
    clock: ClockOrigin,
    *,
    granularity: Granularity = Granularity.BASE,
    groups: Mapping[str, tuple[int, ...]] | None = None,
    host: str = "",
    backend: str = "",
    trainer: Trainer = Trainer.UNKNOWN,
) -> RankHeader:
    """Return the header of a rank that our tracer did not record: another tool did, or it never ran
    and its timeline is computed.
    """
    return RankHeader(
        run_id=run_id,
        rank=rank,
        world_size=layout.world_size,
        layout=layout,
        coordinates=layout.coordinates(rank),
        groups=groups or {},
        host=host,
        process_id=0,
        device=device,
        backend=backend,
        clock=clock,
        trace=TraceSettings(granularity=granularity, interval=1, window=1),
        trainer=trainer,
    )


class Activity(IntEnum):
    """What the tracer did during an iteration."""

    NONE = 0
    TRACED = 1
    WRITING = 2
    """The iteration was not traced, but the writer's thread was at work."""


@dataclass(frozen=True, kw_only=True)
class WindowRecord:
    """End mark of a finished window: its iterations and how many spans stand before it.
    `granularity` and `interval` are those of this window, which a budget may have lowered ("" and 0
    in traces that do not say). `num_dropped` counts spans, of this window and of windows lost
    before it. `counters` holds readings by name: of the device (clock, power, links, other
    processes …), none on the CPU, and of the host's network ports (`nic.<port>.…`). On a GPU its
    clock was tied to the host's at both ends, within `tie_width_ns`; `drift_ppm` is how much faster
    it ran between them.
    `tokens` are the fewest and the most that the first chunk got for a microbatch in any pass; none
    where that is not known, or is not all that a pass's length depends on (packed sequences).
    `layers` are [iteration, [layers]] of the iterations in which modules of these layers only were
    recorded; passes and communication always are, and so are all layers of iterations not named.
    `kinds` are digests of what layers are made of, with the numbers of those that are alike ("" of
    layers whose work the data decide); none where that is not known.
    `core_waits` are [iteration, ns] of the traced iterations: for how long the threads that launch
    the rank's work could have run and had no core; `other_threads` for how long other threads
    of Python in its process ran; none where the kernel does not tell. `page_reads` are [iteration,
    pages] of those traced iterations in which threads of the process stood still for pages of its
    memory, or of mapped files, that had to be read from swap or a disk. `pressure` holds readings
    by name of what came since the reading before: the percentage of time in which processes of the
    rank's container, or host, stood still for memory and for disks, what the rank had read and
    written, and the memory that it has.
    `connections` are [own address, other address, bytes, us, segments, us] of TCP connections with
    other hosts: what they have carried, for how long some of it was on its way and the other end
    had room, how many segments were sent again, and over what time all this was counted.
    `timings` are [iteration, activity, duration in ns] of iterations since the last record, traced
    ones and some that were not: what tracing costs is measured by them (megascan.overhead).
    """

    run_id: str
    window: int
    first_iteration: int
    last_iteration: int
    num_spans: int
    num_dropped: int = 0
    granularity: str = ""
    interval: int = 0
    counters: Mapping[str, float] = field(default_factory=dict)
    tie_width_ns: int = 0
    drift_ppm: float = 0.0
    tokens: tuple[int, ...] = ()
    layers: tuple[tuple[int, tuple[int, ...]], ...] = ()
    kinds: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    core_waits: tuple[tuple[int, int], ...] = ()
    other_threads: tuple[tuple[int, int], ...] = ()
    page_reads: tuple[tuple[int, int], ...] = ()
    pressure: Mapping[str, float] = field(default_factory=dict)
    connections: tuple[tuple[str, str, int, int, int, int], ...] = ()
    timings: tuple[tuple[int, int, int], ...] = ()

    def to_json(self) -> dict[str, Json]:
        """Return the `args` of the window event, without copying values.

        Kinds of layers and what the system counts are left out where nothing is known, as in the
        files of older MegaScans, which read nothing that they do not know.
        """
        record = dict(vars(self))
        for name in _LATER_FIELDS:
            if not record[name]:
                del record[name]
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Json], where: str) -> WindowRecord:
        """Read the record from a window event. Raises InputError naming `where` if it is damaged.

        Unknown fields, which a later MegaScan may write, are ignored.
        """
        fields = _without_unknown(cls, record)
        try:
            return checked(cls(**_tuples_in_window(fields)))._checked_values()
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            raise InputError(
                f"{where}: damaged window mark ({error!s:.200}); restore the file or leave this "
                "rank out (--allow-missing-ranks)"
            ) from error

    def _checked_values(self) -> WindowRecord:
        num_iterations = self.last_iteration - self.first_iteration + 1
        if self.first_iteration < 0 or not 0 <= num_iterations <= _MOST_ITERATIONS:
            raise ValueError(
                f"iterations {self.first_iteration} to {self.last_iteration} are no window"
            )
        if self.granularity:
            Granularity(self.granularity)
        if self.tokens and not (len(self.tokens) == 2 and 0 < self.tokens[0] <= self.tokens[1]):
            raise ValueError(f"tokens are {self.tokens}, expected the fewest and the most")
        return self


def _tuples_in_window(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a window's record with tuples where JSON has lists."""
    return {
        **fields,
        "timings": tuple(tuple(timing) for timing in fields.get("timings", ())),
        "core_waits": tuple(tuple(wait) for wait in fields.get("core_waits", ())),
        "other_threads": tuple(tuple(run) for run in fields.get("other_threads", ())),
        "page_reads": tuple(tuple(read) for read in fields.get("page_reads", ())),
        "connections": tuple(tuple(one) for one in fields.get("connections", ())),
        "tokens": tuple(fields.get("tokens", ())),
        "kinds": {kind: tuple(layers) for kind, layers in fields.get("kinds", {}).items()},
        "layers": tuple(
            (iteration, tuple(layers)) for iteration, layers in fields.get("layers", ())
        ),
    }


_LATER_FIELDS = (
    "kinds",
    "core_waits",
    "other_threads",
    "page_reads",
    "pressure",
    "connections",
)
"""Fields of a window's record that are left out where nothing is known."""
_CHECKED_FIELDS = ("layout", "clock", "trace")
"""Fields of a header that the functions which read them check."""


def _settings_from_json(record: dict[str, Any]) -> TraceSettings:
    settings = TraceSettings(**{**record, "granularity": Granularity(record["granularity"])})
    _check_fields(settings, "trace.")
    return settings


@lru_cache(maxsize=64, typed=True)  # typed, as True == 1 == 1.0
def _read_once(read: Callable[[dict[str, Any]], Record], **record: Any) -> Record:
    return read(record)


def _without_unknown(kind: type, record: Mapping[str, Json]) -> dict[str, Any]:
    """Return what a record from a file says of the fields of its kind."""
    known = kind.__dataclass_fields__  # type: ignore[attr-defined]  # of dataclasses
    return {name: value for name, value in record.items() if name in known}


def _known(read: Callable[[dict[str, Any]], Record], record: dict[str, Any]) -> Record:
    """Return a part of a header that is equal on all ranks of a job, and so read only once."""
    try:
        known: Record = _read_once(read, **record)
    except TypeError:  # no record, or one with a list in the place of a number
        return read(record)
    return known


def _clock_from_json(record: dict[str, Any]) -> ClockOrigin:
    clock = checked(ClockOrigin(**record))
    if not 0 <= clock.origin_unix_ns < LATEST_NS:
        raise ValueError(f"clock begins at {clock.origin_unix_ns} ns, expected unix time")
    return clock


def layout_from_json(record: Json) -> Layout:
    """Read a layout. Raises TypeError, ValueError or ConfigError for damage."""
    if not isinstance(record, dict):
        raise TypeError(f"layout is {shown(record)}, expected sizes by axis")
    for axis, size in record.items():
        if axis != "order" and (not isinstance(size, int) or size > MOST_RANKS):
            raise TypeError(f"layout's {axis} is {shown(size)}, expected a size")
    layout = checked(Layout(**cast("dict[str, Any]", record)))
    if layout.world_size > MOST_RANKS:
        raise ValueError(f"layout has {layout.world_size} ranks, expected {MOST_RANKS} or fewer")
    return layout
