"""The recorded ranks: where they sit in the job's layout, and on which hosts and devices they run.

Launchers number the ranks host by host and give the n-th of a host its n-th device:

    rank     0  1  2  3  4  5  6  7
    device   0  1  2  3  0  1  2  3        two hosts, #0 and #1

So a trace that names no hosts tells them all the same, if all of its ranks keep to that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from detect.observe.axes import along
from megascan.arrays import Flags, Integers, numbered
from megascan.header import RankHeader, Trainer
from megascan.topology import Coordinates, Layout


@dataclass(frozen=True, kw_only=True)
class Members:
    """The recorded ranks: where they sit and what they run on; row order of all matrices."""

    layout: Layout
    ranks: Integers = field(metadata=along("row"))
    place: Mapping[str, Integers] = field(metadata=along("row"))
    """Coordinates by axis (tp, cp, ep, dp, pp), each (row,)."""
    labels: tuple[str, ...] = field(metadata=along("row"))
    hosts: tuple[str, ...] = field(metadata=along("row"))
    devices: tuple[str, ...] = field(metadata=along("row"))
    device_index: tuple[int, ...] = field(metadata=along("row"))
    workers: tuple[tuple[int, ...], ...] = field(metadata=along("row"))
    """Global ranks that a row stands for: itself, or its TP group where that cannot be split."""
    device_kind: str = "cpu"
    trainer: Trainer = Trainer.UNKNOWN
    own_places: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    """Host and device number of each rank where rows stand for several."""

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def stage(self) -> Integers:
        """Return the pipeline stage of each row."""
        return self.place["pp"]

    @property
    def replica(self) -> Integers:
        """Return the data-parallel rank of each row: rows of one replica work on the same data."""
        return self.place["dp"]

    @property
    def tensor_group(self) -> Integers:
        """Return a number for each row's stage and replica: the row's TP (CP, EP) group."""
        return self.numbered("dp", "pp")

    def numbered(self, *axes: str) -> Integers:
        """Return a number for each row's place on some axes, (row,): equal on equal places."""
        return numbered(*(self.place[axis] for axis in axes))

    @cached_property
    def log_for_all(self) -> Flags:
        """Flag the rows that may log for all: those of the job's first rank and of its last, which
        logs in Megatron's loop. Loops on plain PyTorch log on the first rank, or where the losses
        are: on the last stage.
        """
        is_plain = self.trainer == Trainer.TORCH
        ends = {0} if is_plain else {0, self.layout.world_size - 1}
        logs = np.array([bool(ends & set(ranks)) for ranks in self.workers], dtype=bool)
        if is_plain and self.layout.pp > 1:
            logs |= self.stage == self.layout.pp - 1
        return logs

    def other_stages(self, row: int) -> Flags:
        """Flag the rows of the row's replica that are of other stages: they get the same data."""
        same_replica = self.replica == self.replica[row]
        return np.asarray(same_replica & (self.stage != self.stage[row]))

    def row(self, rank: int) -> int:
        """Return the row of a global rank."""
        return int(np.flatnonzero(self.ranks == rank)[0])

    def rows_of_stage(self, stage: int) -> Integers:
        """Return rows of one pipeline stage: a role's peers."""
        return np.flatnonzero(self.stage == stage)

    def ranks_of(self, rows: Iterable[int]) -> tuple[int, ...]:
        """Return the global ranks that some rows stand for, ascending."""
        return tuple(sorted(rank for row in rows for rank in self.workers[int(row)]))

    def rows_with(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the rows that stand for any of some global ranks, ascending."""
        named = set(ranks)
        return tuple(row for row, own in enumerate(self.workers) if named & set(own))

    @property
    def recorded(self) -> tuple[int, ...]:
        """Return the global ranks that any row stands for, ascending."""
        return tuple(sorted(rank for ranks in self.workers for rank in ranks))

    def device_of(self, rank: int) -> tuple[str, int]:
        """Return host and device number of a rank; -1 where the device is not known."""
        return self._devices.get(rank, ("", -1))

    def hosts_of(self, ranks: Iterable[int]) -> set[str]:
        """Return the hosts of some ranks; "" among them where one is not known."""
        return {self.device_of(rank)[0] for rank in ranks}

    @cached_property
    def _devices(self) -> Mapping[int, tuple[str, int]]:
        rows = zip(self.workers, self.hosts, self.device_index, strict=True)
        return self.own_places or {ranks[0]: (host, number) for ranks, host, number in rows}

    def are_inside_a_host(self, ranks: Iterable[int]) -> bool:
        """Return whether these ranks use GPUs of one host: no network lies between them.

        Where a trace names no host, devices tell: a job whose devices all have different numbers
        runs on one. On CPUs no link lies between them.
        """
        places = [self.device_of(rank) for rank in ranks]
        if self.device_kind == "cpu" or any(device < 0 for _, device in places):
            return False
        if any(self.hosts):
            hosts = {host for host, _ in places}
            return len(hosts) == 1 and "" not in hosts
        devices = [device for _, device in self._devices.values()]
        return len(set(devices)) == len(devices) == self.layout.world_size

    def coordinates(self, row: int) -> dict[str, int]:
        """Return the place of one row on the axes that the job uses."""
        used = self.layout.used("dp", "pp", "cp", "ep", "tp")
        return {axis: int(self.place[axis][row]) for axis in used}


def place_of(coordinates: list[Coordinates]) -> dict[str, Integers]:
    """Return coordinates of the rows by axis."""
    return {
        axis: np.array([getattr(place, axis) for place in coordinates], dtype=np.int64)
        for axis in ("tp", "cp", "ep", "dp", "pp")
    }


def hosts_of(headers: Mapping[int, RankHeader]) -> dict[int, str]:
    """Return the name of each rank's host: where the trace names none, a number told by the device
    numbers, or "" if they do not tell.
    """
    named = {rank: header.host for rank, header in headers.items()}
    devices = {rank: header.device.index for rank, header in headers.items()}
    size = max(devices.values(), default=0) + 1
    is_regular = all(rank % size == device for rank, device in devices.items())
    told = {rank: f"#{rank // size}" for rank in devices}
    if any(named.values()) or size < 2 or not is_regular or len(set(told.values())) < 2:
        return named
    return told


def are_guessed(headers: Mapping[int, RankHeader]) -> bool:
    """Return whether the trace names no hosts, so that device numbers tell them."""
    return not any(header.host for header in headers.values()) and any(hosts_of(headers).values())
