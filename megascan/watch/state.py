"""What survives a restart: findings, what was told of them, and how far windows were judged.

One JSON file, replaced as a whole after every verdict and before anybody is told, so that a kill at
any moment loses nothing: what had not been delivered is delivered by the next watch, at worst twice
(events carry a number by which receivers can tell). A disk that is full costs the state, not the
watch. A lock file next to it keeps two watches from telling everything twice.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import orjson

from megascan.errors import ConfigError, InputError, OutputError
from megascan.header import Json
from megascan.watch.accounts import Accounts

STATE_SCHEMA = 1
STATE_FILE = "megascan-watch.json"


@dataclass
class State:
    """Everything a watch remembers."""

    run_id: str = ""
    judged_iteration: int = -1
    """Last iteration of the newest window that was judged."""
    ring_iteration: int = -1
    """First iteration that the ring held then."""
    accounts: Accounts = field(default_factory=Accounts)
    pending: list[dict[str, Json]] = field(default_factory=list)
    """Events that somebody has not been told yet, each with its number and channels."""
    num_events: int = 0

    def to_json(self) -> dict[str, Json]:
        """Return it as it is written."""
        return {
            "schema": STATE_SCHEMA,
            "run_id": self.run_id,
            "judged_iteration": self.judged_iteration,
            "ring_iteration": self.ring_iteration,
            "accounts": self.accounts.to_json(),
            "pending": [*self.pending],
            "num_events": self.num_events,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> State:
        """Read back. Raises KeyError, TypeError or ValueError for a damaged record."""
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
    """The state on disk; None for a watch that remembers nothing. Close it to give up its lock."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock: TextIO | None = None

    def load(self) -> State:
        """Take the lock and read what is there; a new state when nothing is.

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
        """Replace the file; return a sentence about why that failed, or nothing."""
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
        """Let another watch have the state."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
