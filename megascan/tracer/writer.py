"""The background thread that turns finished windows into lines of the rank file."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Full, Queue

from megascan.header import RankHeader, WindowRecord
from megascan.rankfile import (
    RANK_FILE_PATTERN,
    RankFile,
    encode_header,
    encode_spans,
    encode_window,
    rank_file_path,
    set_earlier_run_aside,
)
from megascan.topology import rank_file_name
from megascan.tracer.span import Span
from megascan.tracer.timer import Timer, WindowTimes

logger = logging.getLogger("megascan")

MAX_WAITING_WINDOWS = 4
"""Windows in memory behind a disk that does not keep up; further ones are dropped and counted."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """A finished window on its way to the file."""

    first_iteration: int
    last_iteration: int
    spans: Sequence[Span]
    times: WindowTimes
    num_dropped: int = 0


class TraceWriter:
    """Owns one rank's file. Only its own thread touches the disk.

    `on_failure` is called once, from that thread, with the first error; everything handed over
    afterwards is thrown away. What was written before stays readable.
    """

    def __init__(
        self,
        folder: Path,
        header: RankHeader,
        timer: Timer,
        *,
        resumed: bool,
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._folder = folder
        self._header = header
        self._timer = timer
        self._resumed = resumed
        self._on_failure = on_failure
        self._file: RankFile | None = None
        self._num_windows = 0
        self._queue: Queue[Window | None] = Queue(maxsize=MAX_WAITING_WINDOWS)
        self._thread = threading.Thread(target=self._run, name="megascan-writer", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        """The rank file."""
        return rank_file_path(self._folder, self._header)

    @property
    def run_id(self) -> str:
        """Id of the run that is written."""
        return self._header.run_id

    def submit(self, window: Window) -> bool:
        """Hand over a window without waiting; False when the disk is too far behind."""
        try:
            self._queue.put_nowait(window)
        except Full:
            return False
        return True

    def close(self, timeout_s: float) -> bool:
        """Write what is waiting and close the file; False when that takes longer than allowed."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except Full:
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._open()
            while (window := self._queue.get()) is not None:
                self._write(window)
            if self._file:
                self._file.close()
        except Exception as error:  # whatever it is, training goes on without a trace
            self._on_failure(error)
            self._drain()

    def _drain(self) -> None:
        """Make room, so that nobody waits for a writer that is gone."""
        try:
            while True:
                self._queue.get_nowait()
        except Empty:
            return

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if not self._resumed:
            set_earlier_run_aside(self.path)
            if self._header.rank == 0:
                self._set_strangers_aside()
        self._file = RankFile(self.path)
        self._file.append(encode_header(self._header))

    def _set_strangers_aside(self) -> None:
        """Files of an earlier, larger or differently laid out run that no rank of this one owns."""
        layout = self._header.layout
        ours = {
            rank_file_name(layout, layout.coordinates(rank)) for rank in range(layout.world_size)
        }
        for path in sorted(self._folder.glob(RANK_FILE_PATTERN)):
            if path.name not in ours:
                set_earlier_run_aside(path)

    def _write(self, window: Window) -> None:
        assert self._file is not None  # opened before the first window is taken
        rank = self._header.rank
        records = self._timer.resolve(window.spans, window.times)
        record = WindowRecord(
            run_id=self._header.run_id,
            window=self._num_windows,
            first_iteration=window.first_iteration,
            last_iteration=window.last_iteration,
            num_spans=len(records),
            num_dropped=window.num_dropped,
            counters=self._timer.counters(),
        )
        self._file.append([*encode_spans(rank, records), encode_window(rank, record)])
        self._num_windows += 1
