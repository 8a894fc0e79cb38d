"""Findings of many jobs, by host and device, in one SQLite file.

    job       a run, and when it was last seen
    part      which devices took part in a job: host, UUID, rank
    finding   what was found of these devices

"This GPU was named in 3 of 5 jobs" is added to a finding as evidence. It is never a reason to
accuse: the history is read after the detector has judged. Devices are known by their UUID, or by
host and index if they have no UUID (CPUs). A run that is added again replaces its earlier record.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from megascan.errors import InputError, OutputError
from megascan.header import Json, RankHeader

if TYPE_CHECKING:
    from detect import Report

_SCHEMA = """
CREATE TABLE IF NOT EXISTS job (
    run_id TEXT PRIMARY KEY, seen_unix_s REAL NOT NULL, world_size INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS part (
    run_id TEXT NOT NULL, device TEXT NOT NULL, host TEXT NOT NULL, rank INTEGER NOT NULL,
    PRIMARY KEY (run_id, rank));
CREATE TABLE IF NOT EXISTS finding (
    run_id TEXT NOT NULL, id TEXT NOT NULL, rank INTEGER NOT NULL, cause TEXT NOT NULL,
    owner TEXT NOT NULL, slowdown REAL NOT NULL, gpu_hours REAL NOT NULL,
    PRIMARY KEY (run_id, id, rank));
CREATE INDEX IF NOT EXISTS part_of_device ON part (device);
"""
_APPLICATION_ID = 0x6D736877
"""Marks an SQLite file as a history ("mshw")."""
_BUSY_S = 10.0
_MOST_QUOTED = 4
"""Devices of one finding whose past is quoted at most."""


@dataclass(frozen=True, kw_only=True)
class Named:
    """A finding as the history keeps it; `gpu_hours` is 0 if no watch has counted the hours."""

    id: str
    ranks: tuple[int, ...]
    cause: str
    owner: str
    slowdown: float
    gpu_hours: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Past:
    """What the history knows of a device."""

    device: str
    host: str
    """Where the device was last."""
    num_jobs: int
    num_named: int
    """Jobs in which a finding that blames the node named the device."""
    causes: tuple[str, ...]
    worst_slowdown: float
    gpu_hours: float

    @property
    def words(self) -> str:
        """Return what is known as "was named in 3 of 5 earlier jobs (compute, up to 1.31x)"."""
        jobs = f"{self.num_jobs} earlier job{'s' * (self.num_jobs != 1)}"
        if not self.num_named:
            return f"was named in none of {jobs}"
        return (
            f"was named in {self.num_named} of {jobs} ({', '.join(self.causes)}, "
            f"up to {self.worst_slowdown:.2f}x)"
        )

    def to_json(self) -> dict[str, Json]:
        """Return the device's past for `megascan history show --json`."""
        return {
            **asdict(self),
            "causes": list(self.causes),
            "worst_slowdown": round(self.worst_slowdown, 4),
            "gpu_hours": round(self.gpu_hours, 6),
        }


def device_of(header: RankHeader) -> str:
    """Return the name by which a rank's device is known across jobs."""
    return header.device.uuid or f"{header.host}/{header.device.kind}{header.device.index}"


class History:
    """A history file. Raises InputError if it is no history, OutputError if it cannot be used."""

    def __init__(self, path: Path, *, must_exist: bool = False) -> None:
        self.path = path
        if must_exist and not path.is_file():
            there = "is not a file" if path.exists() else "no such file"
            raise InputError(f"{path}: {there}; megascan history add makes a history")
        with self._open() as database:
            (number,) = database.execute("PRAGMA application_id").fetchone()
            tables = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if number != _APPLICATION_ID and tables:
                raise InputError(f"{path} is a database of another program; name another file")
            if must_exist:
                if not tables:
                    raise InputError(f"{path} is empty, and no history; name another file")
                return
            if number != _APPLICATION_ID:
                database.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            database.executescript(_SCHEMA)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self.path, timeout=_BUSY_S)) as database, database:
                yield database
        except sqlite3.OperationalError as error:
            raise OutputError(
                f"the history {self.path} cannot be used ({error}); free some space, let its other "
                "user finish or name another file"
            ) from error
        except sqlite3.DatabaseError as error:
            raise InputError(
                f"{self.path} is no history ({error}); restore it or name another file"
            ) from error

    def add(
        self, headers: Mapping[int, RankHeader], findings: Iterable[Named], unix_s: float
    ) -> None:
        """Book a run: which devices took part in it, and what was found."""
        first = next(iter(headers.values()))
        with self._open() as database:
            database.execute(
                "INSERT OR REPLACE INTO job VALUES (?, ?, ?)",
                (first.run_id, unix_s, first.world_size),
            )
            database.executemany(
                "INSERT OR REPLACE INTO part VALUES (?, ?, ?, ?)",
                [
                    (first.run_id, device_of(header), header.host, rank)
                    for rank, header in headers.items()
                ],
            )
            database.execute("DELETE FROM finding WHERE run_id = ?", (first.run_id,))
            database.executemany(
                "INSERT OR REPLACE INTO finding VALUES (?, ?, ?, ?, ?, ?, ?)",
                [
                    (first.run_id, one.id, rank, one.cause, one.owner, one.slowdown, one.gpu_hours)
                    for one in findings
                    for rank in one.ranks
                ],
            )

    def merge(self, other: Path) -> int:
        """Copy jobs of another history that this one lacks or saw earlier; return how many."""
        History(other, must_exist=True)
        with self._open() as database:
            database.execute("ATTACH ? AS other", (str(other),))
            newer = (
                "SELECT run_id FROM other.job AS theirs WHERE NOT EXISTS (SELECT 1 FROM main.job "
                "WHERE run_id = theirs.run_id AND seen_unix_s >= theirs.seen_unix_s)"
            )
            runs = [(run,) for (run,) in database.execute(newer).fetchall()]
            for table in ("job", "part", "finding"):
                database.executemany(f"DELETE FROM main.{table} WHERE run_id = ?", runs)
                database.executemany(
                    f"INSERT INTO main.{table} SELECT * FROM other.{table} WHERE run_id = ?", runs
                )
        return len(runs)

    def past(self, devices: Sequence[str] = (), *, but_run: str = "") -> list[Past]:
        """Return what is known of devices (of all if none are given), most often named first.

        The run `but_run` is left out: the job that is being judged is no evidence for itself.
        """
        with self._open() as database:
            rows = database.execute(
                """
                SELECT part.device, part.host, part.run_id, finding.cause, finding.slowdown,
                       finding.gpu_hours
                FROM part JOIN job USING (run_id)
                LEFT JOIN finding ON finding.run_id = part.run_id AND finding.rank = part.rank
                    AND finding.owner = 'node'
                WHERE part.run_id <> ? ORDER BY job.seen_unix_s
                """,
                (but_run,),
            ).fetchall()
        by_device: dict[str, list[_Row]] = {}
        for device, *rest in rows:
            if not devices or device in devices:
                by_device.setdefault(device, []).append(cast("_Row", tuple(rest)))
        found = [_past(device, each) for device, each in by_device.items()]
        return sorted(found, key=lambda one: (-one.num_named, -one.gpu_hours, one.device))

    @property
    def num_jobs(self) -> int:
        """Return the number of jobs in the file."""
        with self._open() as database:
            return int(database.execute("SELECT count(*) FROM job").fetchone()[0])


_Row: TypeAlias = tuple[str, str, str | None, float | None, float | None]
"""(host, run, cause, slowdown, GPU-hours) of a device in a job; the last three if it was named."""


def _past(device: str, rows: Sequence[_Row]) -> Past:
    named = [row for row in rows if row[2] is not None]
    return Past(
        device=device,
        host=rows[-1][0],
        num_jobs=len({run for _, run, *_ in rows}),
        num_named=len({run for _, run, *_ in named}),
        causes=tuple(sorted({str(cause) for _, _, cause, *_ in named})),
        worst_slowdown=max((slowdown or 1.0 for *_, slowdown, _ in named), default=1.0),
        gpu_hours=sum(hours or 0.0 for *_, hours in named),
    )


def evidence(
    history: History, headers: Mapping[int, RankHeader], ranks: Sequence[int]
) -> tuple[str, ...]:
    """Return a sentence about each device of some ranks from the history, without this run."""
    by_device = {device_of(headers[rank]): rank for rank in ranks if rank in headers}
    if not by_device:
        return ()
    run_id = next(iter(headers.values())).run_id
    return tuple(
        f"history: rank {by_device[past.device]}'s device {past.device} {past.words}; "
        "this did not count in the verdict"
        for past in history.past(list(by_device), but_run=run_id)[:_MOST_QUOTED]
    )


def quoted(report: Report, history: History, headers: Mapping[int, RankHeader]) -> Report:
    """Return the report with the history's sentences added to each finding's evidence.

    Findings of the job itself stay as they are: they blame no hardware.
    """
    findings = tuple(
        replace(finding, evidence=(*finding.evidence, *evidence(history, headers, finding.ranks)))
        if finding.owner != "job"
        else finding
        for finding in report.findings
    )
    return replace(report, findings=findings)


def named_in(report: Report) -> list[Named]:
    """Return a report's findings as the history keeps them."""
    return [
        Named(
            id=f"{finding.cause}-{finding.first_iteration}",
            ranks=finding.ranks,
            cause=finding.cause.value,
            owner=finding.owner.value,
            slowdown=finding.slowdown,
        )
        for finding in report.findings
    ]
