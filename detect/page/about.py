"""List what was traced, as names and values: the job, its layout, its software, the trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from detect.observe.observations import Observations
from detect.text import counted
from megascan.errors import listed
from megascan.header import RankHeader
from megascan.timeline import Timeline, codes
from megascan.topology import Layout

MOST_NAMED = 4


@dataclass(frozen=True)
class Fact:
    """One line of the table."""

    name: str
    value: str


def facts_of_timeline(timeline: Timeline) -> tuple[Fact, ...]:
    """Return the facts of a traced run."""
    headers = list(timeline.headers.values())
    complete = timeline.completeness
    devices = Counter(header.device.name for header in headers)
    return (
        Fact("run", timeline.run_id),
        Fact("layout", _layout(timeline.layout)),
        Fact("ranks", _ranks(complete.world_size, len(headers), complete.missing_ranks)),
        Fact("hosts", _distinct(header.host for header in headers)),
        Fact("devices", listed(f"{number} × {name}" for name, number in devices.most_common())),
        Fact("backend", _distinct(header.backend for header in headers)),
        Fact("software", _versions(headers)),
        Fact("traced", _settings(headers)),
        Fact("spans", f"{timeline.spans.num_rows:,}, of them {_kinds(timeline)}"),
    )


def facts_of_op_table(seen: Observations) -> tuple[Fact, ...]:
    """Return the facts of an op table, which records no host, device or software."""
    members = seen.members
    return (
        Fact("layout", _layout(members.layout)),
        Fact("ranks", _ranks(members.layout.world_size, len(members), ())),
    )


def _layout(layout: Layout) -> str:
    sizes = [
        f"{axis.upper()} {getattr(layout, axis)}"
        for axis in ("dp", "pp", "vpp", "cp", "ep", "tp")
        if getattr(layout, axis) > 1
    ]
    return " × ".join(sizes) or "a single rank"


def _ranks(world_size: int, num_recorded: int, missing: tuple[int, ...]) -> str:
    recorded = f"{num_recorded:,} recorded of {world_size:,}"
    return f"{recorded}, missing: {listed(missing)}" if missing else recorded


def _distinct(values: Iterable[str]) -> str:
    names = sorted({value for value in values if value})
    if not names:
        return "not recorded"
    text = listed(names, most=MOST_NAMED)
    return text if len(names) == 1 else f"{counted(len(names), 'name')}: {text}"


def _versions(headers: list[RankHeader]) -> str:
    versions = {name: value for header in headers for name, value in header.versions.items()}
    return ", ".join(f"{name} {value}" for name, value in sorted(versions.items())) or (
        "not recorded"
    )


def _settings(headers: list[RankHeader]) -> str:
    words = {
        f"{header.trace.window} of every {header.trace.interval} iterations at granularity "
        f"{header.trace.granularity.value}"
        for header in headers
    }
    return listed(sorted(words))


def _kinds(timeline: Timeline) -> str:
    code, names = codes(timeline.spans, "kind")
    counts = Counter({names[one]: int((code == one).sum()) for one in range(len(names))})
    shown = [f"{number:,} {name}" for name, number in counts.most_common() if number]
    return listed(shown, most=9)
