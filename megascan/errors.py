"""Errors that a user can mend.

    MegaScanError
    ├── UsageError      the command line cannot be carried out            exit 2
    ├── InputError      a file or folder that was read                    exit 1
    ├── OutputError     a file that was to be written                     exit 1
    ├── ConfigError     sizes and flags that do not fit together          exit 1
    └── MissingError    a package, engine or device that is not there     exit 1

No errors: a command that was asked to fail on what it finds ends with EXIT_FINDING, and the watch
with EXIT_HANG where a job stands still.

A message is one sentence that says what is wrong with which values, where, and what to do. Only
`report_errors` prints messages.
"""

from __future__ import annotations

import io
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

EXIT_FINDING, EXIT_HANG = 3, 4
_MOST = 1000
"""Most characters of a message: names in damaged files may be of any length."""

_MOST_LISTED = 8

ENDING_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""Signals that ask a process to end, in addition to Ctrl-C."""
_ECHO_S = 1.0
"""Time in which a second signal is ignored: `timeout` and launchers send a signal to the process
and again to its group."""


class MegaScanError(Exception):
    """Base of every error that is printed as one sentence instead of a traceback."""

    exit_code = 1

    def __str__(self) -> str:
        """Return the message on one line, even if it has texts from files with line ends."""
        words = " ".join(super().__str__().splitlines())
        return words if len(words) <= _MOST else f"{words[: _MOST // 2]} … {words[-_MOST // 4 :]}"


class UsageError(MegaScanError):
    """Arguments that contradict each other or ask for the impossible."""

    exit_code = 2


class InputError(MegaScanError):
    """Something that was read is missing, damaged, foreign or inconsistent."""


class OutputError(MegaScanError):
    """Something could not be written: it exists, the disk is full, permissions."""


class ConfigError(MegaScanError):
    """Sizes or settings of a job that do not fit together."""


class MissingError(MegaScanError):
    """An optional package, an external program or a device that the request needs."""


class Terminated(KeyboardInterrupt):
    """A signal asks this process to end; code that cleans up after Ctrl-C handles this, too."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def report_errors(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; print a MegaScanError as one line on stderr.

    An unforeseen OSError is printed in the same way. Ctrl-C ends with 130, SIGTERM with 143 and a
    closed pipe (``| head``) silently, as shells expect; half-written files are removed before.
    """
    _take_any_text()
    try:
        with _taken_signals() as interrupts:
            return _without_disguise(command, interrupts)
    except MegaScanError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except Terminated as ended:
        print(f"ended by {signal.Signals(ended.number).name}", file=sys.stderr)
        return 128 + ended.number
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # keeps the interpreter from complaining at its exit
        return 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        advice = "check the current folder, the disk and permissions"
        print(f"error: {where}{error.strerror or error}; {advice}", file=sys.stderr)
    except MemoryError:
        advice = "run on a larger machine, or give it less at once"
        print(f"error: not enough memory; {advice}", file=sys.stderr)
    return 1


def _without_disguise(command: Callable[[], int], interrupts: list[int]) -> int:
    """Run a command; treat import errors after Ctrl-C as the Ctrl-C itself.

    An extension module whose import is interrupted raises as if it were broken.
    """
    try:
        return command()
    except (AttributeError, ImportError, SystemError) as error:
        if interrupts:
            raise _as_exception(interrupts[0]) from error
        raise


def _as_exception(number: int) -> KeyboardInterrupt:
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated(number)


@contextmanager
def _taken_signals() -> Iterator[list[int]]:
    """Turn Ctrl-C, SIGTERM and a terminal's end into exceptions; yield the signals so far.

    Handlers of the caller, and signals that ``nohup`` ignores, stay as they are. A rank leaves
    SIGTERM to the system: it may wait in a library for ranks that are gone, and never run Python.
    """
    noted: list[int] = []
    heard_s = -math.inf

    def take(number: int, frame: FrameType | None) -> None:
        nonlocal heard_s
        is_echo = number != signal.SIGINT and time.monotonic() - heard_s < _ECHO_S
        heard_s = time.monotonic()
        if not is_echo:
            noted.append(number)
            raise _as_exception(number)

    before = {
        number: handler
        for number in (signal.SIGINT, *(() if "LOCAL_RANK" in os.environ else ENDING_SIGNALS))
        if threading.current_thread() is threading.main_thread()
        and (handler := signal.getsignal(number)) in (signal.SIG_DFL, signal.default_int_handler)
    }
    for number in before:
        signal.signal(number, take)
    try:
        yield noted
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is take:
                signal.signal(number, handler)


def _take_any_text() -> None:
    """Have stdout and stderr show `?` for characters that they cannot encode, and allow them to be
    closed (``2>&-``).

    An ASCII locale has no µ, and a file's name need not be text at all.
    """
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 (for good)
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115 (for good)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def listed(values: Iterable[object], most: int = _MOST_LISTED) -> str:
    """Return a list in words: "3", "3 and 11", "1, 2, 5 and 40 more"."""
    words = [str(value) for value in values]
    if len(words) > most:
        words = [*words[:most], f"{len(words) - most} more"]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
