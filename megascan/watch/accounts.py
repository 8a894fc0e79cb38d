"""The life of a finding: raised, holding, cleared, under an id that stays, with what it has cost.

A verdict covers the whole ring, so a fault that has ended is found in it for a while. A finding is
*active* if its last slow iteration lies in the newest windows, or in one that came since the last
verdict:

    windows        1  2  3  4  5  6  7  8  9 10 11 12 13
    rank 5 slow             x  x  x  x
    in the verdict             x  x  x  x  x  x  x  x
    active                     x  x  x
    the account                raised   |  |     |
                                        quiet 1, 2, 3: cleared

A finding with a q-value below `TRUST.high_q` is raised at once, a less sure finding when two
verdicts in a row name it. It is cleared after `QUIET_VERDICTS` verdicts without it. A finding that
comes back to the same ranks within `REOPENED_VERDICTS` is the same account again. An account also
stays the same when the cause that verdicts name for its ranks changes.

Cost: a finding's ratio, iteration time now over iteration time without the finding, is the mean
from its first to its last slow iteration. Each second between these iterations wastes
N · (1 - 1 / ratio) device-seconds in a job of N devices. Example: 8 devices, ratio 1.11: half an
hour costs 8 · 0.1 · 0.5 h = 0.4 GPU-hours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, cast

from detect.thresholds.verdicts import TRUST
from megascan.header import Json, RankHeader
from megascan.watch.windows import JobWindow, headers_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from detect import Finding, Report

SEEN_VERDICTS = 2
"""A finding that chance may explain is raised when this many verdicts in a row name it."""
QUIET_VERDICTS = 3
"""A finding is cleared after this many verdicts in a row without it."""
REOPENED_VERDICTS = 60
"""A finding that comes back within this many verdicts is the same finding."""
ACTIVE_WINDOWS = 2
"""A finding is active if it was slow in one of this many newest windows."""
_NS_PER_HOUR = 3.6e12
_MOST_CLOSED = 200
"""Cleared accounts that are kept at most; the oldest are dropped."""


class LifePhase(StrEnum):
    """Where in its life a finding is."""

    SEEN = "seen"
    """Not sure enough to be reported to anybody."""
    HOLDING = "holding"
    CLEARED = "cleared"


class AccountChange(StrEnum):
    """What event reports of an account."""

    RAISED = "raised"
    CHANGED = "changed"
    """The finding has another cause, another owner or other ranks."""
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
    """UUID of each rank's device, "" for a device without UUID."""
    since_iteration: int
    since_unix_s: float
    phase: LifePhase
    slowdown: float
    cost_ratio: float
    q_value: float
    headline: str
    confidence: str = "low"
    """How sure the name is, as in reports; `low` of accounts that older state files hold."""
    evidence: tuple[str, ...] = ()
    next_steps: tuple[str, ...] = ()
    last_iteration: int = 0
    """The last slow iteration that was seen."""
    cleared_unix_s: float = 0.0
    cleared_verdict: int = 0
    """Number of the verdict that cleared the finding."""
    num_seen: int = 0
    """Verdicts that named the finding, in a row until it is raised."""
    num_quiet: int = 0
    """Verdicts in a row in which the finding was not active."""
    num_raised: int = 0
    cost_gpu_hours: float = 0.0
    counted_unix_ns: int = 0
    """Until when the cost was counted."""
    finding: Mapping[str, Json] = field(default_factory=dict)
    """The finding in the newest verdict that named it, as in `megascan detect --json`."""

    def to_json(self) -> dict[str, Json]:
        """Return the account as the state file and machine-readable output have it."""
        return cast("dict[str, Json]", asdict(self))

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Account:
        """Read an account from JSON. Raises TypeError, KeyError or ValueError if it is damaged."""
        known = {each.name for each in fields(cls)}
        values = {name: value for name, value in record.items() if name in known}
        for name in ("ranks", "hosts", "devices", "evidence", "next_steps"):
            values[name] = tuple(values[name])
        return cls(**{**values, "phase": LifePhase(values["phase"])})


@dataclass(frozen=True)
class Event:
    """A change in the life of an account, to be reported."""

    change: AccountChange
    account: Account


@dataclass
class Accounts:
    """All findings of a job that are not cleared, and those that were cleared lately."""

    open: list[Account] = field(default_factory=list)
    closed: list[Account] = field(default_factory=list)
    num_verdicts: int = 0
    newest_from: int = -1
    """First iteration of the newest windows of the last verdict."""

    @property
    def is_settled(self) -> bool:
        """Return whether no finding is about to change at the next verdict.

        A finding may change if it is not sure yet, or on the way to be cleared.
        """
        return all(
            one.phase is LifePhase.HOLDING
            and not one.num_quiet
            and one.last_iteration >= self.newest_from
            for one in self.open
        )

    @property
    def holding(self) -> list[Account]:
        """Return findings that were raised and are not cleared, findings of nodes first."""
        told = [account for account in self.open if account.phase is LifePhase.HOLDING]
        return sorted(told, key=lambda account: (account.owner != "node", -account.cost_ratio))

    def book(
        self, report: Report, windows: Iterable[JobWindow], judged_iteration: int
    ) -> list[Event]:
        """Book a verdict on some windows; return the events to report.

        The verdict before ended with `judged_iteration`.
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
        """Clear findings of hardware that the next run of the job does not use.

        Findings whose device is used again stay open for the next verdicts.
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
            _renewed(account, finding, seen), num_seen=account.num_seen + 1, num_quiet=0
        )
        if not told and _is_sure(finding, after.num_seen):
            after = replace(after, phase=LifePhase.HOLDING, num_raised=1)
            yield Event(AccountChange.RAISED, after)
        elif told and (after.cause, after.owner, after.ranks) != (
            account.cause,
            account.owner,
            account.ranks,
        ):
            yield Event(AccountChange.CHANGED, after)
        self.open[self.open.index(account)] = after

    def _new(self, finding: Finding, seen: _Sight) -> Iterator[Event]:
        before = _match(
            finding,
            (
                account
                for account in self.closed
                if self.num_verdicts - account.cleared_verdict <= REOPENED_VERDICTS
            ),
        )
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
        """Return the accounts as the state file has them."""
        return {
            "open": [account.to_json() for account in self.open],
            "closed": [account.to_json() for account in self.closed],
            "num_verdicts": self.num_verdicts,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Accounts:
        """Read accounts from JSON; errors as in `Account.from_json`."""
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
        """Return the first iteration of the newest windows, or the first one not judged before."""
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
    return finding.q_value < TRUST.high_q or num_seen >= SEEN_VERDICTS


def _match(finding: Finding, accounts: Iterable[Account]) -> Account | None:
    """Find the account of a finding: it shares a rank, and the cause or else the owner."""
    shared = [account for account in accounts if set(account.ranks) & set(finding.ranks)]
    same = [account for account in shared if account.cause == finding.cause.value]
    kin = [account for account in shared if account.owner == finding.owner.value]
    return next(iter(same or kin), None)


def _opened(finding: Finding, seen: _Sight) -> Account:
    run_id = seen.windows[-1].run_id
    text = f"{run_id} {finding.cause} {finding.ranks} {finding.first_iteration}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return Account(
        id=f"{finding.cause}-rank{finding.ranks[0] if finding.ranks else ''}-{digest}",
        since_iteration=finding.first_iteration,
        since_unix_s=seen.start_of(finding.first_iteration) / 1e9,
        phase=LifePhase.SEEN,
        **_content(finding, seen),
    )


def _renewed(account: Account, finding: Finding, seen: _Sight) -> Account:
    """Return the account with the cost and content of its newest finding."""
    return replace(seen.counted(account, finding), **_content(finding, seen))


def _content(finding: Finding, seen: _Sight) -> dict[str, Any]:
    """Return the fields of an account that its newest finding decides."""
    headers = headers_of(seen.windows)
    known = [headers.get(rank) for rank in finding.ranks]
    return {
        "run_id": seen.windows[-1].run_id,
        "cause": finding.cause.value,
        "owner": finding.owner.value,
        "ranks": finding.ranks,
        "hosts": tuple(header.host if header else "" for header in known),
        "devices": tuple(header.device.uuid if header else "" for header in known),
        "slowdown": finding.slowdown,
        "cost_ratio": finding.step_time_cost_ratio,
        "q_value": finding.q_value,
        "headline": finding.headline,
        "confidence": finding.confidence.value,
        "evidence": finding.evidence,
        "next_steps": finding.next_steps,
        "last_iteration": finding.last_iteration,
        "finding": finding.to_json(),
    }
