"""The two records that frame a rank file.

Who recorded it (header) and what a finished window holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias, cast

from megascan.errors import ConfigError, InputError
from megascan.rank_lists import packed, unpacked
from megascan.schema import SCHEMA_VERSION, Granularity
from megascan.topology import Coordinates, Layout
from megascan.typed import checked, shown

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
"""A header that speaks of more is damaged."""

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
    `max_bytes` bounds a rank's file (0: no bound); above `budget_ratio` of the run's time (0: no
    budget) the tracer lowers its granularity, see WindowRecord.
    """

    granularity: Granularity
    interval: int
    window: int
    compress: bool = False
    max_bytes: int = 0
    budget_ratio: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RankHeader:
    """Everything a reader must know about one rank of one run.
    `groups` maps a process group id, `<axis>@<smallest member>`, to its ordered global
    ranks (more than 16 as a text: `0-7,16-23`, `3-16379/8`). Two
    communicators over the same ranks have different axes in their ids (dp, dp_cp, …), so an id
    names one communicator of the job. `num_windows_dropped` windows, up to and including
    `last_iteration_dropped`, were taken off the file to keep it below `trace.max_bytes`.
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

    def __getstate__(self) -> dict[str, object]:
        """Pickled with groups in short: thousands of headers name groups of thousands of ranks."""
        return {**vars(self), "groups": {name: packed(each) for name, each in self.groups.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        groups = {name: unpacked(ranks) for name, ranks in state["groups"].items()}
        vars(self).update(state, groups=groups)

    def to_json(self) -> dict[str, Json]:
        """As the `args` of the header event."""
        record: dict[str, Json] = asdict(replace(self, groups={}))
        record["groups"] = {
            name: cast("Json", packed(ranks)) for name, ranks in self.groups.items()
        }
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Json], where: str) -> RankHeader:
        """Read back from a header event.

        Raises InputError naming `where` when it is damaged or newer than we are.
        """
        version = record.get("schema")
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise InputError(
                f"{where}: rank file of schema {shown(version)}, this MegaScan reads up to "
                f"{SCHEMA_VERSION}; update MegaScan"
            )
        fields = cast("dict[str, Any]", dict(record))
        try:
            trace = fields["trace"]
            fields["layout"] = layout_from_json(fields["layout"])
            fields["coordinates"] = Coordinates(**fields["coordinates"])
            groups = {name: unpacked(ranks) for name, ranks in fields["groups"].items()}
            fields["groups"] = {}  # checked by now: going through all members again would cost most
            fields["device"] = Device(**fields["device"])
            fields["clock"] = _clock_from_json(fields["clock"])
            fields["trace"] = TraceSettings(
                **{**trace, "granularity": Granularity(trace["granularity"])}
            )
            return replace(checked(cls(**fields)), groups=groups)
        except (
            KeyError, TypeError, ValueError, AttributeError, RecursionError, ConfigError,
        ) as error:  # fmt: skip
            raise InputError(
                f"{where}: damaged header ({error!s:.200}); restore the file or leave this rank "
                "out (--allow-missing-ranks)"
            ) from error


@dataclass(frozen=True, kw_only=True)
class WindowRecord:
    """End mark of a finished window: its iterations and how many spans stand before it.
    `granularity` and `interval` are those of this window, which a budget may have lowered ("" and 0
    in traces that do not say). `num_dropped` counts spans, of this window and of windows lost
    before it. `counters` holds device readings of the window (clock, power, temperature …) by name,
    empty on the CPU. On a GPU its clock was tied to the host's at both ends, within
    `tie_width_ns`; `drift_ppm` is how much faster it ran between them.
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
    timings: tuple[tuple[int, int, int], ...] = ()

    def to_json(self) -> dict[str, Json]:
        """As the `args` of the window event."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Json], where: str) -> WindowRecord:
        """Read back from a window event; raises InputError naming `where` when it is damaged."""
        fields = cast("dict[str, Any]", dict(record))
        try:
            fields["timings"] = tuple(tuple(timing) for timing in fields.get("timings", ()))
            return checked(cls(**fields))._checked_values()
        except (TypeError, ValueError, RecursionError) as error:
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
        return self


def _clock_from_json(record: dict[str, Any]) -> ClockOrigin:
    clock = checked(ClockOrigin(**record))
    if not 0 <= clock.origin_unix_ns < LATEST_NS:
        raise ValueError(f"clock begins at {clock.origin_unix_ns} ns, expected unix time")
    return clock


def layout_from_json(record: Json) -> Layout:
    """Layout of a header or a timeline. Raises TypeError, ValueError or ConfigError for damage."""
    if not isinstance(record, dict):
        raise TypeError(f"layout is {shown(record)}, expected sizes by axis")
    for axis, size in record.items():
        if axis != "order" and (not isinstance(size, int) or size > MOST_RANKS):
            raise TypeError(f"layout's {axis} is {shown(size)}, expected a size")
    layout = checked(Layout(**cast("dict[str, Any]", record)))
    if layout.world_size > MOST_RANKS:
        raise ValueError(f"layout has {layout.world_size} ranks, expected {MOST_RANKS} or fewer")
    return layout
