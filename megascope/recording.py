"""What the ranks of a training job leave in its folder for whoever looks.

Files are appended and never read here; no port is opened, and nothing travels between the ranks.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from megascan.errors import InputError
from megascan.probes import Point, Prober, header_line, probe_file_name, probe_line
from megascan.topology import Layout
from megascope.frames import whole_frames

_LOG = logging.getLogger(__name__)


class ProbeFile:
    """This rank's probes, a line each; durable after each append.

    A folder that cannot be written is said once and ends the recording, never the training.
    """

    def __init__(self, folder: Path, *, layout: Layout, device: str) -> None:
        self._rank = dist.get_rank()
        self._path = folder / probe_file_name(self._rank)
        self._layout, self._device = layout, device
        self._is_open = False
        self._is_broken = False

    def append(self, iteration: int, points: Sequence[Point], sums: Sequence[str]) -> None:
        """Write one probe; the first one of a run writes its header, too."""
        if self._is_broken:
            return
        text = probe_line(iteration, sums)
        if not self._is_open:
            text = header_line(self._prober(points)) + text
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not self._is_open:
                end_line(self._path)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            self._is_open = True
        except OSError as error:
            self._is_broken = True
            _LOG.warning("no more probes are written: %s", error)

    def _prober(self, points: Sequence[Point]) -> Prober:
        return Prober(
            rank=self._rank, layout=self._layout, host=socket.gethostname(),
            device=self._device, points=tuple(points),
        )  # fmt: skip


def end_line(path: Path) -> None:
    """Cut off a last line that an earlier run could not finish."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


class DataFile:
    """This rank's frames, appended; at most `max_bytes` on the disk in two files.

    When the file has half of them it becomes the older one, in place of the one before.
    """

    def __init__(self, folder: Path, rank: int, *, max_bytes: int) -> None:
        self._path = folder / data_file_name(rank)
        self._max_bytes = max_bytes
        self._continued = b""
        self._size = 0

    def open(self, header: bytes, *, continued: bytes) -> None:
        """Begin a run with the frame that describes it; OSError when the folder refuses.

        `continued` describes it in a file that goes on with the run.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._continued = continued
        if self._path.exists():
            _cut_unfinished(self._path)
        self._append(header)

    def append(self, frame: bytes) -> None:
        """Add a frame; OSError when the disk refuses."""
        if self._size + len(frame) > self._max_bytes // 2:
            self._path.replace(self._path.with_suffix(".old.bin"))
            self._append(self._continued)
        self._append(frame)

    def _append(self, content: bytes) -> None:
        with self._path.open("ab") as file:
            file.write(content)
            self._size = file.tell()


def _cut_unfinished(path: Path) -> None:
    """Cut off a frame that an earlier run could not finish; a file of another kind is set aside."""
    content = path.read_bytes()
    try:
        end = max((end for _, end in whole_frames(content)), default=0)
    except InputError:
        path.replace(path.with_suffix(".damaged"))
        return
    if end < len(content):
        os.truncate(path, end)


def data_file_name(rank: int) -> str:
    """Name of a rank's file of frames in the folder."""
    return f"scope-data-{rank:05d}.bin"
