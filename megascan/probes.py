"""Records of probes: checksums of what every rank computed from the same tokens.

Each rank appends JSON lines to ``scope-probe-<rank>.jsonl``: a header that names the points where
the rank takes checksums, then one line a probe. A resumed run appends its own header; the newest
header counts. The job compares nothing; the detector does, which sees the whole folder
(`detect.causes.corruption`).

    {"schema":1,"rank":5,"layout":{…},"host":"n03","device":"H200","points":[[3,"fc1"],…]}
    {"iteration":40,"sums":["9f…",…]}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from megascan.errors import ConfigError, InputError
from megascan.topology import PROBE_FILE_PATTERN, Coordinates, Layout

SCHEMA = 1

Kind = TypeVar("Kind")


@dataclass(frozen=True, order=True)
class Point:
    """A tensor whose checksum is taken; layer 0 stands for tensors before the first layer."""

    layer: int
    name: str

    @property
    def words(self) -> str:
        """Return the point in words: ``layer 3 fc1``."""
        return f"layer {self.layer} {self.name}" if self.layer else self.name

    @property
    def is_weight(self) -> bool:
        """Return whether the tensor is a parameter, which depends on no earlier point."""
        return self.name.endswith(WEIGHT)

    @property
    def is_of_experts(self) -> bool:
        """Return whether the tensor is of experts, which expert-parallel ranks share out."""
        return self.name == "experts" or self.name.startswith("mlp.experts.")


WEIGHT = " (weight)"
"""End of the names of parameters."""


@dataclass(frozen=True, kw_only=True)
class Prober:
    """A rank that takes checksums."""

    rank: int
    layout: Layout
    host: str
    device: str
    points: tuple[Point, ...]
    """Points in the order of computation; a layer's weights stand before what they compute."""

    @property
    def coordinates(self) -> Coordinates:
        """Return the rank's coordinates."""
        return self.layout.coordinates(self.rank)


@dataclass(frozen=True, kw_only=True)
class Probes:
    """The probes of a job: `sums[rank][iteration]` has one checksum for each point of the rank."""

    probers: Mapping[int, Prober]
    sums: Mapping[int, Mapping[int, tuple[str, ...]]] = field(default_factory=dict)

    @property
    def iterations(self) -> tuple[int, ...]:
        """Return iterations after which at least one rank was probed."""
        return tuple(sorted({one for by_iteration in self.sums.values() for one in by_iteration}))


def probe_file_name(rank: int) -> str:
    """Return the name of a rank's file of probes."""
    return f"scope-probe-{rank:05d}.jsonl"


def header_line(prober: Prober) -> str:
    """Return the line with the header, which begins a run."""
    record = {
        "schema": SCHEMA,
        "rank": prober.rank,
        "layout": prober.layout.to_json(),
        "host": prober.host,
        "device": prober.device,
        "points": [[point.layer, point.name] for point in prober.points],
    }
    return json.dumps(record, separators=(",", ":")) + "\n"


def probe_line(iteration: int, sums: Sequence[str]) -> str:
    """Return the line of one probe."""
    return json.dumps({"iteration": iteration, "sums": list(sums)}, separators=(",", ":")) + "\n"


def probe_files(*folders: Path) -> list[Path]:
    """Return the files of probes in some folders, which need not exist."""
    there = [folder for folder in folders if folder.is_dir()]
    return [path for folder in there for path in sorted(folder.glob(PROBE_FILE_PATTERN))]


def read_probes(*folders: Path) -> Probes | None:
    """Read the probes of a job from its folder, or one folder a host; return None without probes.

    Raises InputError for a file that has no probes, or is damaged before its last line.
    """
    probers: dict[int, Prober] = {}
    sums: dict[int, dict[int, tuple[str, ...]]] = {}
    for path in probe_files(*folders):
        prober, own = _read_file(path)
        if prober is not None:
            probers[prober.rank], sums[prober.rank] = prober, own
    return Probes(probers=probers, sums=sums) if probers else None


def _read_file(path: Path) -> tuple[Prober | None, dict[int, tuple[str, ...]]]:
    prober: Prober | None = None
    own: dict[int, tuple[str, ...]] = {}
    for record in _records(path):
        try:
            if "points" in record:
                prober, own = _prober(record), {}
            elif prober is not None:
                values = tuple(_of_kind(str, one) for one in _of_kind(list, record["sums"]))
                if len(values) != len(prober.points):
                    raise ValueError(f"{len(values)} sums for {len(prober.points)} points")
                own[_of_kind(int, record["iteration"])] = values
        except (KeyError, TypeError, ValueError, ConfigError) as error:
            raise InputError(
                f"{path} is damaged ({error}); set it aside and read the folder again"
            ) from error
    return prober, own


def _records(path: Path) -> Iterator[dict[str, object]]:
    """Yield the records of a file; a last line that was cut short is left out."""
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise InputError(
                f"{path}, line {number}, is no JSON ({error}); set the file aside"
            ) from error
        if not isinstance(record, dict):
            raise InputError(f"{path}, line {number}, is no record of a probe; set the file aside")
        yield record


def _prober(record: Mapping[str, object]) -> Prober:
    if record["schema"] != SCHEMA:
        raise ValueError(f"schema {record['schema']}, expected {SCHEMA}")
    layout = record["layout"]
    if not isinstance(layout, dict):
        raise TypeError("no layout")
    points = []
    for pair in _of_kind(list, record["points"]):
        layer, name = _of_kind(list, pair)
        points.append(Point(_of_kind(int, layer), _of_kind(str, name)))
    return Prober(
        rank=_of_kind(int, record["rank"]),
        layout=Layout(**layout),
        host=_of_kind(str, record["host"]),
        device=_of_kind(str, record["device"]),
        points=tuple(points),
    )


_WORDS: Mapping[type, str] = {list: "list", int: "number", str: "text"}


def _of_kind(kind: type[Kind], value: object) -> Kind:
    """Return a value of JSON that must be a list, number or text; raise TypeError otherwise."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{str(value)[:40]!r} is no {_WORDS[kind]}")
    return value
