"""End a job that cannot go on with one sentence, from the rank that knows why (`carry_out`).

`refusals_as_errors` turns what Megatron-Core itself refuses into such a sentence.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from megascan.errors import ConfigError, MegaScanError
from training.distributed import Launch

# Long enough for a launcher to end this rank because another one has failed.
_GRACE_S = 5.0

# What gloo and NCCL say when the other side of a connection has ended.
_LOST = re.compile(
    r"connection (closed|reset) by peer|connection refused|broken pipe|socket closed|"
    r"remote process exited",
    re.IGNORECASE,
)
# What gloo says when the other side is there and says nothing.
_TIMED_OUT = re.compile(r"timed out waiting (\d+)ms for (send|recv) operation", re.IGNORECASE)


def end_alike(launch: Launch, error: MegaScanError) -> int:
    """End for an error that every rank comes to by itself: rank 0 speaks, the others are silent.

    They wait, so that a launcher which ends the job with the first failing rank does not end rank
    0 before it has spoken. Returns the exit code.
    """
    if launch.rank == 0:
        _say(str(error))
    else:
        _wait(error.exit_code, _GRACE_S)
    return error.exit_code


def end_alone(launch: Launch, error: MegaScanError) -> int:
    """End for an error that this rank, or every rank, has met on the way; returns the exit code.

    When all ranks fail alike, rank 0 speaks at once and the launcher ends the others while they
    wait; when one rank fails alone, it speaks after the wait.
    """
    if launch.rank:
        _wait(error.exit_code, _GRACE_S)
        _say(f"rank {launch.rank}: {error}")
    else:
        _say(str(error))
    return error.exit_code


def carry_out(launch: Launch, work: Callable[[], object]) -> int:
    """Do a rank's work together with the others; return the exit code, 0 where it was done."""
    try:
        work()
    except MegaScanError as error:
        return end_alone(launch, error)
    except RuntimeError as error:
        if is_lost_connection(error):
            return end_left_alone(launch)
        waited = _TIMED_OUT.search(str(error))
        if waited is None:
            raise
        _say(
            f"rank {launch.rank}: another rank has said nothing for {int(waited[1]) / 60e3:g} min "
            "(--distributed-timeout-minutes) and stands still; see what it wrote, or its host"
        )
        return 1
    return 0


def is_lost_connection(error: RuntimeError) -> bool:
    """Tell whether communication failed because another rank has ended."""
    return _LOST.search(str(error)) is not None


def end_left_alone(launch: Launch) -> int:
    """End because another rank has ended; returns the exit code.

    Whoever ended first knows why: this rank speaks only if nothing has been heard of it for long.
    """
    _wait(1, 2 * _GRACE_S)
    _say(f"rank {launch.rank}: another rank has ended in mid-run; see what it wrote, or its host")
    return 1


def end_interrupted(launch: Launch) -> int:
    """End for Ctrl-C, of which every rank hears; returns the exit code that shells expect."""
    if launch.rank == 0:
        print("interrupted", file=sys.stderr, flush=True)
    return 130


def _say(text: str) -> None:
    print(f"error: {text}", file=sys.stderr, flush=True)


def _wait(exit_code: int, duration_s: float) -> None:
    """Wait for the launcher; being ended by it is the failure that this rank has had as well."""

    def leave(number: int, frame: FrameType | None) -> None:
        del number, frame
        sys.exit(exit_code)

    signal.signal(signal.SIGTERM, leave)
    time.sleep(duration_s)


@contextmanager
def refusals_as_errors() -> Iterator[None]:
    """Surround what Megatron-Core makes out of flags: its reasons, on every rank the same.

    `training.arguments` checks what it knows; Megatron-Core checks hundreds of combinations more,
    by assertions and ValueErrors.
    """
    try:
        yield
    except (AssertionError, ValueError, NotImplementedError) as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise ConfigError(
            f"Megatron-Core refuses these flags: {reason}; change the flags that it names"
        ) from error
