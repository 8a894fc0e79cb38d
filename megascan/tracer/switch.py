"""Switch the tracing of a running job on and off: by a file in its trace folder, or by a signal.

A job that is started armed (`--trace-armed`) records nothing until the file `trace-on` is in rank
0's trace folder, and stops when the file is gone. SIGUSR2 makes or removes that file, so there is
one state, and anybody can see it.

At the begin of each interval rank 0 looks for the file, and all other ranks look up what rank 0 has
announced in the job's key-value store. Both happen on a separate thread: a hung file system holds
up no iteration. An announced change holds from an interval that is so far ahead that all ranks know
of it in time; a rank that learns of it later changes an interval later.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from megascan.tracer.budget import Board

logger = logging.getLogger("megascan")

SWITCH_FILE = "trace-on"
_SIGNAL = signal.SIGUSR2
_LEAST_PAUSE_S = 0.5
"""Least pause between two looks, however short the intervals are."""
_AHEAD_S, _INTERVALS_AHEAD = 2.0, 3
"""How far ahead a change holds: time for some looks of every rank."""
_FINISH_S = 2.0


@dataclass(frozen=True)
class TracingSwitched:
    """A change: tracing is on, or off, from an iteration on."""

    on: bool
    from_iteration: int


class Switch:
    """Switches the tracing of one armed job.

    `announce` is called for each change, on the switch's thread. The switch that `decides`, on rank
    0, looks at the file and tells all other ranks over the `board`.
    """

    def __init__(
        self,
        folder: Path,
        board: Board,
        *,
        decides: bool,
        interval: int,
        announce: Callable[[TracingSwitched], None],
    ) -> None:
        self._file = folder / SWITCH_FILE
        self._board = board
        self._decides = decides
        self._interval = interval
        self._announce = announce
        self._on = False
        self._num_changes = 0
        self._last_from = 0
        self._iteration = 0
        self._seen: tuple[int, float] | None = None
        self._look = threading.Event()
        self._ends = False
        self._earlier: Callable[[int, FrameType | None], object] | int | None = None
        self._listens = False
        self._thread = threading.Thread(target=self._run, name="megascan-switch", daemon=True)
        self._thread.start()

    def interval_begins(self, iteration: int) -> None:
        """Have the switch's thread look; training calls this and does not wait."""
        self._iteration = iteration
        self._look.set()

    def close(self) -> None:
        """Stop looking, and stop listening to the signal."""
        self.ignore_signal()
        self._ends = True
        self._look.set()
        self._thread.join(_FINISH_S)

    # The signal

    def obey_signal(self) -> None:
        """Let SIGUSR2 make or remove the file; only the main thread can set that."""
        with suppress(ValueError):  # another thread: only the file can switch
            self._earlier = signal.signal(_SIGNAL, self._toggle)
            self._listens = True

    def ignore_signal(self) -> None:
        """Restore the signal's earlier handler, unless other code has replaced ours since."""
        if self._listens and signal.getsignal(_SIGNAL) == self._toggle:
            with suppress(ValueError):
                signal.signal(_SIGNAL, self._earlier)
        self._listens = False

    def _toggle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        try:
            if self._file.exists():
                self._file.unlink(missing_ok=True)
            else:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._file.touch()
        except OSError as error:
            logger.warning("tracing is not switched: %s (%s)", self._file, error.strerror or error)

    # The thread

    def _run(self) -> None:
        while True:
            self._look.wait()
            self._look.clear()
            if self._ends:
                return
            try:
                self.look()
            except Exception as error:  # any error: training and tracing go on as they are
                logger.warning("tracing can no longer be switched: %s", error)
                return
            time.sleep(_LEAST_PAUSE_S)

    def look(self) -> None:
        """Look once: rank 0 for the file, any other rank for rank 0's announcement."""
        change = self._decide() if self._decides else self._learn()
        if change is None:
            return
        self._num_changes += 1
        self._on = change.on
        self._announce(change)

    def _decide(self) -> TracingSwitched | None:
        first = self._first_interval_ahead()
        on = self._file.exists()
        if on == self._on or first is None:
            return None
        change = TracingSwitched(on, max(first, self._last_from))
        self._last_from = change.from_iteration
        self._board.publish(self._num_changes, f"{int(on)} {change.from_iteration}")
        state = "on" if on else "off"
        logger.warning("tracing is switched %s from iteration %d", state, change.from_iteration)
        return change

    def _learn(self) -> TracingSwitched | None:
        text = self._board.read(self._num_changes)
        if text is None:
            return None
        on, from_iteration = text.split()
        return TracingSwitched(on == "1", int(from_iteration))

    def _first_interval_ahead(self) -> int | None:
        """Return the first iteration of an interval that begins when all ranks know of a change.

        It is computed from the progress between two looks; None at the first look.
        """
        now, iteration = time.monotonic(), self._iteration
        before, self._seen = self._seen, (iteration, now)
        if before is None or iteration <= before[0]:
            return None
        interval_s = (now - before[1]) / (iteration - before[0]) * self._interval
        ahead = max(_INTERVALS_AHEAD, math.ceil(_AHEAD_S / max(interval_s, 1e-6)))
        return ((iteration - 1) // self._interval + ahead) * self._interval + 1
