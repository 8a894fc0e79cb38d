"""Switch the tracing of a running job on and off: by a file in its trace folder, or by a signal.

A job that is started armed (`--trace-armed`) records nothing until the file `trace-on` is in rank
0's trace folder, and stops when it is gone. SIGUSR2 makes or removes that file, so there is one
state and everybody can see it.

At the begin of each interval rank 0 looks for the file, and the others look up what rank 0 has
announced, over the key-value store by which the job found together. Both happen on a thread of
their own: a hung file system holds up no iteration. What was announced holds from an interval so
far ahead that all ranks know of it in time; one that learns of it later changes an interval later.
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
"""Between two looks, however short the intervals are."""
_AHEAD_S, _INTERVALS_AHEAD = 2.0, 3
"""A change holds so much later: some looks of every rank."""
_FINISH_S = 2.0


@dataclass(frozen=True)
class TracingSwitched:
    """Tracing is on, or off, from an iteration on."""

    on: bool
    from_iteration: int


class Switch:
    """Follows one armed job.

    `announce` hears of each change, on the switch's thread. `decides` is rank 0: it looks at the
    file and tells the others over the `board`.
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
        """Look, on the thread; called by training, which does not wait."""
        self._iteration = iteration
        self._look.set()

    def close(self) -> None:
        """Look no longer, and listen to no signal."""
        self.ignore_signal()
        self._ends = True
        self._look.set()
        self._thread.join(_FINISH_S)

    # The signal

    def obey_signal(self) -> None:
        """Let SIGUSR2 make or remove the file; only the main thread may ask for it."""
        with suppress(ValueError):  # another thread: the file remains
            self._earlier = signal.signal(_SIGNAL, self._toggle)
            self._listens = True

    def ignore_signal(self) -> None:
        """Put back what the signal did before, unless somebody else has taken it since."""
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
            except Exception as error:  # whatever it is, training goes on, and tracing as it is
                logger.warning("tracing can no longer be switched: %s", error)
                return
            time.sleep(_LEAST_PAUSE_S)

    def look(self) -> None:
        """Look once for the file, or for what rank 0 has announced of it."""
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
        """Return where an interval begins that all ranks reach after they know; None at first.

        How long an interval lasts shows between two looks.
        """
        now, iteration = time.monotonic(), self._iteration
        before, self._seen = self._seen, (iteration, now)
        if before is None or iteration <= before[0]:
            return None
        interval_s = (now - before[1]) / (iteration - before[0]) * self._interval
        ahead = max(_INTERVALS_AHEAD, math.ceil(_AHEAD_S / max(interval_s, 1e-6)))
        return ((iteration - 1) // self._interval + ahead) * self._interval + 1
