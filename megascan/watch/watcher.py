"""One look after the other: read what is new, judge the ring, keep account, report.

    rank files ── windows ── ring ── judge ── accounts ── state ── webhooks, commands
                                       │                    └ saved before anything is delivered
                                       └── log, screen, metrics

A window that looks unusual (`Spending`) is judged as it comes, and so is every window while a
finding is about to be raised or cleared. Other windows wait until the CPU time that the watch has
used, urgent verdicts included, is within its share of a core. Once three quarters of the ring's
iterations wait (half of them while a finding is open), they wait no longer than `LONGEST_WAIT_S`.
So where windows come faster than verdicts can be paid for, usual windows may leave the ring
unjudged. Windows that come all at once, after a restart, are all judged. A start without state
judges once, on the newest windows.

What survives a restart is `State`: findings, the events that reported them, how far windows were
judged. It is one JSON file, replaced as a whole after every verdict and before anything is
delivered, so that a kill at any moment loses nothing: the next watch delivers what had not been
delivered, at worst twice (receivers know repeated events by their number). If the disk is full, the
watch goes on without saving. A lock file next to the state keeps a second watch from reporting
everything twice.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import orjson

from megascan.errors import (
    EXIT_FINDING,
    EXIT_HANG,
    ConfigError,
    InputError,
    MegaScanError,
    OutputError,
)
from megascan.header import Json
from megascan.reader.growing import Wanted
from megascan.watch import delivery
from megascan.watch.accounts import Accounts
from megascan.watch.delivery import Outbox
from megascan.watch.hang import HangWatch
from megascan.watch.history import History, Named, quoted
from megascan.watch.metrics import Gauges, Pulse
from megascan.watch.policy import Decision, Rule, decisions
from megascan.watch.ring import KEPT_ITERATIONS, Judgement, Ring, Spending
from megascan.watch.windows import JobFiles, JobWindow, headers_of

if TYPE_CHECKING:
    from detect import DetectorSettings
    from megascan.watch.accounts import Event

STATE_SCHEMA = 1
STATE_FILE = "megascan-watch.json"


@dataclass
class State:
    """Everything a watch remembers."""

    run_id: str = ""
    judged_iteration: int = -1
    """Last iteration of the newest window that was judged."""
    ring_iteration: int = -1
    """First iteration that the ring held when the newest window was judged."""
    accounts: Accounts = field(default_factory=Accounts)
    pending: list[dict[str, Json]] = field(default_factory=list)
    """Events that a channel has not received yet, each with its number and channel."""
    num_events: int = 0

    def to_json(self) -> dict[str, Json]:
        """Return the state as it is written."""
        return {"schema": STATE_SCHEMA, **vars(self), "accounts": self.accounts.to_json()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> State:
        """Read a state from JSON. Raises KeyError, TypeError or ValueError if it is damaged."""
        if record["schema"] != STATE_SCHEMA:
            raise ValueError(f"schema {record['schema']!r}, this MegaScan reads {STATE_SCHEMA}")
        return cls(
            run_id=str(record["run_id"]),
            judged_iteration=int(record["judged_iteration"]),
            ring_iteration=int(record["ring_iteration"]),
            accounts=Accounts.from_json(record["accounts"]),
            pending=[dict(each) for each in record["pending"]],
            num_events=int(record["num_events"]),
        )


class StateFile:
    """The state on disk; without a path nothing is remembered. `close` gives up its lock."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock: TextIO | None = None

    def load(self) -> State:
        """Take the lock and read the state; return a new state if there is no file.

        Raises ConfigError when another watch holds the lock, InputError for a damaged file.
        """
        if self.path is None:
            return State()
        self._take_lock(self.path)
        try:
            return State.from_json(orjson.loads(self.path.read_bytes()))
        except FileNotFoundError:
            return State()
        except OSError as error:
            raise InputError(
                f"cannot read {self.path}: {error.strerror or error}; name another with --state"
            ) from error
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"{self.path} is no state of a watch ({error}); move it away (its findings are "
                "forgotten then) or name another with --state"
            ) from error

    def _take_lock(self, path: Path) -> None:
        lock = path.with_name(f".{path.name}.lock")
        try:
            self._lock = lock.open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another watch keeps its state in {path}; stop it or name another with --state"
            ) from error
        except OSError as error:
            raise OutputError(
                f"cannot lock {lock}: {error.strerror or error}; name a state file that can be "
                "written with --state, or go on without one with --no-state"
            ) from error

    def save(self, state: State) -> str:
        """Replace the file; return a sentence about why that failed, or an empty text."""
        if self.path is None:
            return ""
        temporary = self.path.with_name(f".{self.path.name}.new")
        try:
            with temporary.open("wb") as file:
                file.write(orjson.dumps(state.to_json()))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            return (
                f"cannot write the state to {self.path} ({error.strerror or error}); going on, "
                "but a restart would forget what has happened since the last time"
            )
        return ""

    def close(self) -> None:
        """Give up the lock, so that another watch can use the state."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


MOST_CAUGHT_UP = 500
"""Windows from before a restart that are read to find what happened meanwhile."""
CPU_SHARE = 0.02
MOST_OWED_S = 120.0
"""Urgent verdicts may exceed CPU_SHARE; the excess is made up later, up to CPU_SHARE times this."""
REMEMBERED_RINGS = 2
"""Rings of iterations that `Spending` remembers: what is usual must be known when windows wait."""
MOST_UNJUDGED = 0.75
"""Share of the ring's iterations that may wait for a verdict; the rest show what was usual."""
MOST_UNJUDGED_HOLDING = 0.5
"""MOST_UNJUDGED while a finding is open: the end of a finding is news, but looks usual."""
LONGEST_WAIT_S = 120.0
"""How long more iterations than MOST_UNJUDGED wait if a verdict would exceed CPU_SHARE."""
NODE, ALL = "node", "all"


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """What to watch and how."""

    folders: tuple[Path, ...]
    detector: DetectorSettings
    kept_iterations: int = KEPT_ITERATIONS
    cpu_share: float = CPU_SHARE
    """Share of a core, above which usual windows wait; 1: every window is judged as it comes."""
    hang_after_s: float | None = None
    notify: str = NODE
    """Findings that webhooks and commands get: of nodes (NODE), or also of the job and undecided
    findings (ALL)."""
    rules: tuple[Rule, ...] = ()


@dataclass
class Watcher:
    """Watches one job. `say` prints the record of an event or a verdict."""

    settings: WatchSettings
    state_file: StateFile
    outbox: Outbox
    say: Callable[[Mapping[str, Any]], None]
    warn: Callable[[str], None]
    history: History | None = None
    gauges: Gauges = field(default_factory=Gauges)
    pulse: Pulse = field(default_factory=Pulse)
    judgement: Judgement | None = None
    monotonic_s: Callable[[], float] = time.monotonic
    """Clock by which silence and waiting are measured."""
    cpu_s: Callable[[], float] = time.process_time
    """CPU time that this process has used."""

    def __post_init__(self) -> None:
        self.state: State = self.state_file.load()
        state, kept = self.state, self.settings.kept_iterations
        known = bool(state.run_id)
        self.files = JobFiles(
            self.settings.folders,
            Wanted(
                num_windows=max(kept, MOST_CAUGHT_UP) if known else kept,
                run_id=state.run_id,
                after_iteration=state.ring_iteration - 1 if known else -1,
            ),
        )
        self.ring = Ring(self.settings.folders, self.settings.detector, kept)
        self.spending = Spending(REMEMBERED_RINGS * kept)
        self.hangs = HangWatch(self.settings.hang_after_s)
        self._judged_at = (self.monotonic_s(), self.cpu_s())
        """Time, and CPU time of this process, when the last verdict was begun."""
        self._owed_s = 0.0
        """CPU time beyond the share of a core that had been spent before the last verdict."""
        self._told_decisions: set[tuple[str, str]] = set()
        self._still_since: tuple[float, float] | None = None
        """Time of the newest write, and when this machine's monotonic clock saw it."""
        self._said: set[str] = set()
        self._has_shown = False
        self.outbox.restore(state.pending)
        if state.pending:  # deliver them even if nothing new comes
            self.outbox.send()

    @property
    def job(self) -> str:
        """Return the name of the job in events: that of its first folder."""
        return self.settings.folders[0].resolve().name

    def look(self) -> int:
        """Read, judge and report what is new; return how many windows had come."""
        num_windows = 0
        while True:
            self.pulse.beat()
            windows = self.files.poll()
            for problem in self.files.problems():
                self._warn_once(problem)
            for window in windows:
                num_windows += 1
                self._take(window, is_late=num_windows > 1 or self.files.has_more)
            if not self.files.has_more:
                break
        if self.ring.windows:
            self._judge_newest()
        self._look_for_hang(moved=bool(num_windows))
        self._decide()
        self._publish()
        return num_windows

    @property
    def decisions(self) -> list[Decision]:
        """Return what the policy would drain now."""
        return list(decisions(self.settings.rules, self.state.accounts.holding, time.time()))

    @property
    def exit_code(self) -> int:
        """Return EXIT_FINDING while a node's finding holds (with a policy: while the policy would
        drain a node), EXIT_HANG while the job stands still, else 0.
        """
        if self.settings.rules:
            found = bool(self.decisions)
        else:
            found = any(one.owner == NODE for one in self.state.accounts.holding)
        return EXIT_FINDING if found else EXIT_HANG if self.hangs.hang else 0

    def close(self) -> None:
        """Deliver pending events, save the state, and give up its lock."""
        self.outbox.close()
        self._save()
        self.state_file.close()

    def _take(self, window: JobWindow, *, is_late: bool) -> None:
        """Put a window into the ring; judge if else too many windows would wait for a verdict.

        A window `is_late` if many windows come at once; it is then judged without waiting for
        LONGEST_WAIT_S.
        """
        state = self.state
        if window.run_id != state.run_id:
            self._begin_run(window)
        if self.hangs.hang is not None:
            self._tell_hang(delivery.MOVES_AGAIN)
        self.hangs.take([window])
        self.ring.push(window)
        self.spending.push(window)
        self.gauges.num_windows += 1
        most = MOST_UNJUDGED_HOLDING if state.accounts.open else MOST_UNJUDGED
        is_full = self._num_unjudged >= most * self.ring.num_iterations
        waited_s = self.monotonic_s() - self._judged_at[0]
        if state.judged_iteration >= 0 and is_full and (is_late or waited_s >= LONGEST_WAIT_S):
            self._judge(window)

    @property
    def _num_unjudged(self) -> int:
        """Return the number of traced iterations since the last verdict."""
        newer = self.ring.newer_than(self.state.judged_iteration)
        return sum(window.num_iterations for window in newer)

    def _left_s(self) -> float:
        """Return the CPU time left within the share of a core; negative if it is overdrawn."""
        began, cpu_began = self._judged_at
        gained_s = self.settings.cpu_share * (self.monotonic_s() - began)
        return gained_s - (self.cpu_s() - cpu_began) - self._owed_s

    def _is_due(self, newest: JobWindow) -> bool:
        """Return whether the new windows are to be judged now."""
        judged = self.judgement
        if judged is None or newest.missing != judged.window.missing:
            return True
        if self.files.is_closed or self.hangs.hang is not None:  # nothing to wait for
            return True
        return (
            self.spending.is_unusual(self._num_unjudged, newest.num_iterations)
            or self._left_s() >= 0.0
            or self.settings.cpu_share >= 1.0
            or not self.state.accounts.is_settled
        )

    def _judge_newest(self) -> None:
        """Judge new windows if that is due. After a restart without new windows, only show the
        verdict on the ring, which is booked already.
        """
        newest = self.ring.windows[-1]
        if newest.last_iteration > self.state.judged_iteration:
            if self._is_due(newest):
                self._judge(newest)
        elif self.judgement is None and not self._has_shown:
            self._has_shown = True
            self.judgement = self._judged()
            if self.judgement is not None:
                self.say(delivery.verdict_event(self.judgement, self.state.accounts.holding))

    def _begin_run(self, window: JobWindow) -> None:
        state = self.state
        if state.run_id:
            self._tell_all(state.accounts.end_run(headers_of([window]), time.time()))
        self.spending.clear()
        before = window.first_iteration - 1 if state.run_id else -1
        state.run_id, state.judged_iteration, state.ring_iteration = window.run_id, before, before

    def _judge(self, window: JobWindow) -> None:
        most = MOST_OWED_S * self.settings.cpu_share
        self._owed_s = min(most, max(0.0, -self._left_s()))
        self._judged_at = (self.monotonic_s(), self.cpu_s())
        before, self.state.judged_iteration = self.state.judged_iteration, window.last_iteration
        self.state.ring_iteration = self.ring.windows[0].first_iteration
        judgement = self._judged()
        if judgement is None:
            return
        self.judgement = judgement
        events = self.state.accounts.book(judgement.report, self.ring.windows, before)
        self.gauges.num_verdicts += 1
        self.say(delivery.verdict_event(judgement, self.state.accounts.holding))
        self._tell_all(events)
        if events:
            self._write_history()

    def _judged(self) -> Judgement | None:
        """Return the verdict on the ring, with what the history says; None if judging failed."""
        try:
            judgement = self.ring.judge()
        except MegaScanError as error:
            last = self.ring.windows[-1].last_iteration
            self._warn_once(f"no verdict on the windows up to iteration {last}: {error}")
            return None
        if self.history is None:
            return judgement
        try:
            report = quoted(judgement.report, self.history, self.ring.headers)
        except MegaScanError as error:
            self._warn_once(str(error))
            return judgement
        return replace(judgement, report=report)

    def _tell_all(self, events: Sequence[Event]) -> None:
        for event in events:
            record = delivery.finding_event(event, job=self.job, unix_s=time.time())
            self._tell(record, loudly=self.settings.notify == ALL or event.account.owner == NODE)
        self._save()
        self.outbox.send()

    def _tell(self, record: dict[str, Json], *, loudly: bool) -> None:
        """Print an event; if `loudly`, send it to all channels, too."""
        self.state.num_events += 1
        numbered: dict[str, Json] = {"number": self.state.num_events, **record}
        name = str(record["event"])
        self.gauges.events[name] = self.gauges.events.get(name, 0) + 1
        self.say(numbered)
        if loudly:
            self.outbox.put(numbered)

    def _look_for_hang(self, *, moved: bool) -> None:
        now, written = self.monotonic_s(), self.files.changed_unix_s
        if self._still_since is None:
            self._still_since = (written, now - max(0.0, time.time() - written))
        elif moved or written != self._still_since[0]:
            self._still_since = (written, now)
        if not self.files.headers or self.files.is_closed:
            return
        silent_s = now - self._still_since[1]
        if self.hangs.look(self.files, silent_s) is not None:
            self._tell_hang(delivery.HANG)

    def _tell_hang(self, name: str) -> None:
        assert self.hangs.hang is not None  # callers have checked it
        record = delivery.hang_event(
            name, self.hangs.hang, job=self.job, run_id=self.state.run_id, unix_s=time.time()
        )
        self._tell(record, loudly=True)
        self._save()
        self.outbox.send()

    def _decide(self) -> None:
        """Print what the policy would drain, once for each finding and rule."""
        for decision in self.decisions:
            key = (decision.rule, decision.account.id)
            if key not in self._told_decisions:
                self._told_decisions.add(key)
                self.say(decision.to_json())

    def _write_history(self) -> None:
        """Write the findings of this run into the history."""
        if self.history is None:
            return
        accounts = self.state.accounts
        named = [
            Named(
                id=one.id,
                ranks=one.ranks,
                cause=one.cause,
                owner=one.owner,
                slowdown=one.slowdown,
                gpu_hours=one.cost_gpu_hours,
            )
            for one in (*accounts.holding, *accounts.closed)
            if one.run_id == self.state.run_id
        ]
        try:
            self.history.add(self.ring.headers, named, time.time())
        except MegaScanError as error:
            self._warn_once(str(error))

    def end(self) -> None:
        """Book the run into the history as it ended: findings, or that there were none."""
        if self.ring.windows:
            self._write_history()

    def _save(self) -> None:
        self.state.pending = self.outbox.pending()
        problem = self.state_file.save(self.state)
        if problem:
            self._warn_once(problem)

    def _publish(self) -> None:
        gauges = self.gauges
        gauges.judgement = self.judgement
        gauges.holding = tuple(self.state.accounts.holding)
        gauges.hang = self.hangs.hang
        gauges.num_absent = len(self.files.absent)
        gauges.world_size = self.files.world_size
        gauges.changed_unix_s = self.files.changed_unix_s
        gauges.num_undelivered = len(self.outbox.pending())
        if self.outbox.take_delivered():
            self._save()

    def _warn_once(self, problem: str) -> None:
        self.gauges.num_problems += 1
        if problem not in self._said:
            self._said.add(problem)
            self.warn(problem)


def watch(watcher: Watcher, *, poll_s: float, until_closed: bool) -> Iterator[Watcher]:
    """Look every `poll_s` seconds, for ever; yield after each look.

    With `until_closed` this ends when the job has closed all its files.
    """
    while True:
        began = time.monotonic()
        watcher.look()
        yield watcher
        if until_closed and watcher.files.is_closed:
            return
        time.sleep(max(0.0, poll_s - (time.monotonic() - began)))
