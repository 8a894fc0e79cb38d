"""What the ranks of a training job leave in its folder for whoever looks."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from megascan.probes import Point, Prober, header_line, probe_file_name, probe_line
from megascan.topology import Layout

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
