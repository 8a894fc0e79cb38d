"""The life of a finding: raised, holding, cleared, under an id that stays, with what it has cost.

A verdict covers the whole ring, so a fault that has ended is found in it for a while. What counts
as *active* is a finding whose last slow iteration lies in the newest windows, or in one that came
since the last verdict:

    windows        1  2  3  4  5  6  7  8  9 10 11 12 13
    rank 5 slow             x  x  x  x
    in the verdict             x  x  x  x  x  x  x  x
    active                     x  x  x
    the account                raised   |  |     |
                                        quiet 1, 2, 3: cleared

A finding as sure as `SURE_Q` is raised at once, a less sure one when two verdicts in a row name it.
It is cleared after `QUIET_VERDICTS` verdicts without it; what comes back to the same ranks
within `REOPENED_VERDICTS` is the same account again. Verdicts of the same few ranks whose cause
changes keep their account, too.

Cost: a verdict's ratio, iteration time now over that without the finding, is the mean from its
first to its last slow iteration. Each second of a job of N devices in between wastes
N · (1 - 1 / ratio) device-seconds. Example: 8 devices, ratio 1.11: half an hour of it costs
8 · 0.1 · 0.5 h = 0.4 GPU-hours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, cast

from megascan.header import Json, RankHeader
from megascan.watch.windows import JobWindow, headers_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from detect import Finding, Report

SURE_Q = 1e-4
"""A finding below this q-value is told at first sight; reports call it high confidence."""
SEEN_VERDICTS = 2
"""Others are told when so many verdicts in a row name them."""
QUIET_VERDICTS = 3
"""Verdicts in a row without a finding that clear it."""
REOPENED_VERDICTS = 60
"""A finding that comes back within so many verdicts is the same one."""
ACTIVE_WINDOWS = 2
"""A finding is active if it was slow in one of so many newest windows."""
_NS_PER_HOUR = 3.6e12
_MOST_CLOSED = 200
"""Cleared accounts that are kept; the oldest go."""


class LifePhase(StrEnum):
    """Where in its life a finding is."""

    SEEN = "seen"
    """Not sure enough to be told; nobody hears of it."""
    HOLDING = "holding"
    CLEARED = "cleared"


class AccountChange(StrEnum):
    """What is told."""

    RAISED = "raised"
    CHANGED = "changed"
    """Another cause, owner or other ranks."""
    CLEARED = "cleared"


@dataclass(frozen=True, kw_only=True)
class Account:
    """A finding from its first sight until it is cleared."""

    id: str
    run_id: str
    cause: str
    owner: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    """UUID of each rank's device, "" where it has none."""
    since_iteration: int
    since_unix_s: float
    phase: LifePhase
    slowdown: float
    cost_ratio: float
    q_value: float
    headline: str
    evidence: tuple[str, ...] = ()
    next_steps: tuple[str, ...] = ()
    last_iteration: int = 0
    """The last slow iteration that was seen."""
    cleared_unix_s: float = 0.0
    cleared_verdict: int = 0
    """Number of the verdict that cleared it."""
    num_seen: int = 0
    """Verdicts that named it, in a row until it is told."""
    num_quiet: int = 0
    """Verdicts in a row in which it was not active."""
    num_raised: int = 0
    cost_gpu_hours: float = 0.0
    counted_unix_ns: int = 0
    """Until when the cost was counted."""
    finding: Mapping[str, Json] = field(default_factory=dict)
    """As `megascan detect --json` has it, of the newest verdict that named it."""

    def to_json(self) -> dict[str, Json]:
        """Return it as the state file and machine-readable output have it."""
        return cast("dict[str, Json]", asdict(self))

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Account:
        """Read back. Raises TypeError, KeyError or ValueError for a damaged record."""
        known = {each.name for each in fields(cls)}
        values = {name: value for name, value in record.items() if name in known}
        for name in ("ranks", "hosts", "devices", "evidence", "next_steps"):
            values[name] = tuple(values[name])
        return cls(**{**values, "phase": LifePhase(values["phase"])})


@dataclass(frozen=True)
class Event:
    """Something to tell: a change in the life of an account."""

    change: AccountChange
    account: Account


@dataclass
class Accounts:
    """All findings of a job that are alive, and those that were cleared lately."""

    open: list[Account] = field(default_factory=list)
    closed: list[Account] = field(default_factory=list)
    num_verdicts: int = 0
    newest_from: int = -1
    """First iteration of the newest windows of the last verdict."""

    @property
    def is_settled(self) -> bool:
        """Return whether the next verdict can tell nothing new of what the last one saw.

        It can of a finding that is not sure yet, or about to be cleared.
        """
        return all(
            one.phase is LifePhase.HOLDING
            and not one.num_quiet
            and one.last_iteration >= self.newest_from
            for one in self.open
        )

    @property
    def holding(self) -> list[Account]:
        """Return findings that were told and are not cleared, those of nodes first."""
        told = [account for account in self.open if account.phase is LifePhase.HOLDING]
        return sorted(told, key=lambda account: (account.owner != "node", -account.cost_ratio))

    def settle(
        self, report: Report, windows: Iterable[JobWindow], judged_iteration: int
    ) -> list[Event]:
        """Book a verdict on these windows; return what is to be told.

        The verdict before it ended with `judged_iteration`.
        """
        from detect.report import Owner

        seen = _Sight(list(windows), judged_iteration)
        self.num_verdicts += 1
        self.newest_from = seen.newest_from
        events: list[Event] = []
        unmatched = list(self.open)
        active = [
            finding for finding in report.findings if finding.last_iteration >= seen.active_from
        ]
        for finding in sorted(active, key=lambda one: one.owner is not Owner.NODE):
            account = _match(finding, unmatched)
            if account is not None:
                unmatched.remove(account)
                events += self._again(account, finding, seen)
            else:
                events += self._new(finding, seen)
        for account in unmatched:
            events += self._without(account, seen)
        return events

    def end_run(self, headers: Mapping[int, RankHeader], unix_s: float) -> list[Event]:
        """Clear what was said of hardware that the next run of the job does not use.

        What still runs on the same device stays, and the next verdicts tell.
        """
        now = {(header.host, header.device.uuid) for header in headers.values()}
        gone = [
            account
            for account in self.open
            if not now & set(zip(account.hosts, account.devices, strict=True))
        ]
        return [event for account in gone for event in self._clear(account, unix_s)]

    def _again(self, account: Account, finding: Finding, seen: _Sight) -> Iterator[Event]:
        told = account.phase is LifePhase.HOLDING
        after = replace(
            _renewed(account, finding, seen),
            num_seen=account.num_seen + 1,
            num_quiet=0,
        )
        if not told and _is_sure(finding, after.num_seen):
            after = replace(after, phase=LifePhase.HOLDING, num_raised=1)
            yield Event(AccountChange.RAISED, after)
        elif told and _identity(after) != _identity(account):
            yield Event(AccountChange.CHANGED, after)
        self.open[self.open.index(account)] = after

    def _new(self, finding: Finding, seen: _Sight) -> Iterator[Event]:
        before = self._closed_lately(finding)
        if before is not None:
            self.closed.remove(before)
        else:
            before = _opened(finding, seen)
        told = _is_sure(finding, 1)
        after = replace(
            _renewed(before, finding, seen),
            phase=LifePhase.HOLDING if told else LifePhase.SEEN,
            num_seen=1,
            num_quiet=0,
            num_raised=before.num_raised + told,
        )
        self.open.append(after)
        if told:
            yield Event(AccountChange.RAISED, after)

    def _closed_lately(self, finding: Finding) -> Account | None:
        lately = [
            account
            for account in self.closed
            if self.num_verdicts - account.cleared_verdict <= REOPENED_VERDICTS
        ]
        return _match(finding, lately)

    def _without(self, account: Account, seen: _Sight) -> Iterator[Event]:
        if account.phase is LifePhase.SEEN:
            self.open.remove(account)
            return
        quiet = replace(account, num_quiet=account.num_quiet + 1)
        self.open[self.open.index(account)] = quiet
        if quiet.num_quiet >= QUIET_VERDICTS:
            yield from self._clear(quiet, seen.end_unix_ns / 1e9)

    def _clear(self, account: Account, unix_s: float) -> Iterator[Event]:
        self.open.remove(account)
        if account.phase is LifePhase.HOLDING:
            cleared = replace(
                account,
                phase=LifePhase.CLEARED,
                cleared_unix_s=unix_s,
                cleared_verdict=self.num_verdicts,
            )
            self.closed = [*self.closed, cleared][-_MOST_CLOSED:]
            yield Event(AccountChange.CLEARED, cleared)

    def to_json(self) -> dict[str, Json]:
        """Return it as the state file has it."""
        return {
            "open": [account.to_json() for account in self.open],
            "closed": [account.to_json() for account in self.closed],
            "num_verdicts": self.num_verdicts,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Accounts:
        """Read back; errors as `Account.from_json`."""
        return cls(
            open=[Account.from_json(each) for each in record["open"]],
            closed=[Account.from_json(each) for each in record["closed"]],
            num_verdicts=int(record["num_verdicts"]),
        )


@dataclass(frozen=True)
class _Sight:
    """What an account needs to know of the judged windows."""

    windows: list[JobWindow]
    judged_iteration: int

    @property
    def newest_from(self) -> int:
        """Return the first iteration of the newest windows."""
        return self.windows[-ACTIVE_WINDOWS:][0].first_iteration

    @property
    def active_from(self) -> int:
        """Return the first iteration of the newest windows and of all without a verdict."""
        newest = self.newest_from
        return min(newest, self.judged_iteration + 1) if self.judged_iteration >= 0 else newest

    @property
    def end_unix_ns(self) -> int:
        return self.windows[-1].end_unix_ns

    def start_of(self, iteration: int) -> int:
        """Return the Unix time, in ns, at which the window with an iteration began."""
        within = [w.start_unix_ns for w in self.windows if w.last_iteration >= iteration]
        return min(within, default=self.windows[-1].start_unix_ns)

    def end_of(self, iteration: int) -> int:
        """Return the Unix time, in ns, at which the window with an iteration ended."""
        within = [w.end_unix_ns for w in self.windows if w.first_iteration <= iteration]
        return max(within, default=self.windows[0].end_unix_ns)

    def counted(self, account: Account, finding: Finding) -> Account:
        """Return the account with the cost counted until the last slow iteration."""
        begin = max(account.counted_unix_ns, self.start_of(finding.first_iteration))
        end = max(begin, self.end_of(finding.last_iteration))
        num_devices = next(iter(headers_of(self.windows).values())).world_size
        wasted = num_devices * (end - begin) / _NS_PER_HOUR * finding.lost_share
        return replace(account, counted_unix_ns=end, cost_gpu_hours=account.cost_gpu_hours + wasted)


def _is_sure(finding: Finding, num_seen: int) -> bool:
    return finding.q_value < SURE_Q or num_seen >= SEEN_VERDICTS


def _match(finding: Finding, accounts: Iterable[Account]) -> Account | None:
    """Find the account of a finding: same ranks and cause before same ranks, of one owner."""
    shared = [account for account in accounts if set(account.ranks) & set(finding.ranks)]
    same = [account for account in shared if account.cause == finding.cause.value]
    kin = [account for account in shared if account.owner == finding.owner.value]
    return next(iter(same or kin), None)


def _identity(account: Account) -> tuple[str, str, tuple[int, ...]]:
    return account.cause, account.owner, account.ranks


def _opened(finding: Finding, seen: _Sight) -> Account:
    run_id = seen.windows[-1].run_id
    text = f"{run_id} {finding.cause} {finding.ranks} {finding.first_iteration}"
    return _renewed(
        Account(
            id=f"{finding.cause}-rank{finding.ranks[0] if finding.ranks else ''}-"
            f"{hashlib.sha256(text.encode()).hexdigest()[:8]}",
            run_id=run_id,
            cause="",
            owner="",
            ranks=(),
            hosts=(),
            devices=(),
            since_iteration=finding.first_iteration,
            since_unix_s=seen.start_of(finding.first_iteration) / 1e9,
            phase=LifePhase.SEEN,
            slowdown=1.0,
            cost_ratio=1.0,
            q_value=1.0,
            headline="",
        ),
        finding,
        seen,
    )


def _renewed(account: Account, finding: Finding, seen: _Sight) -> Account:
    """Return the account with what the newest finding says."""
    headers = headers_of(seen.windows)
    return replace(
        seen.counted(account, finding),
        run_id=seen.windows[-1].run_id,
        cause=finding.cause.value,
        owner=finding.owner.value,
        ranks=finding.ranks,
        hosts=tuple(headers[rank].host if rank in headers else "" for rank in finding.ranks),
        devices=tuple(
            headers[rank].device.uuid if rank in headers else "" for rank in finding.ranks
        ),
        slowdown=finding.slowdown,
        cost_ratio=finding.step_time_cost_ratio,
        q_value=finding.q_value,
        headline=finding.headline,
        evidence=finding.evidence,
        next_steps=finding.next_steps,
        last_iteration=finding.last_iteration,
        finding=finding.to_json(),
    )
