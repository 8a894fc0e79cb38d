"""Durations of one iteration: every row of every program, for every rank, with noise and faults.

All that is random or faulty is decided here, from one generator, so that a seed fixes a job. The
recursion in `megascan.simulate.engine` only adds and takes maxima.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megascan.fault_kinds import FaultKind
from megascan.simulate.faults import Fault, rank_factors
from megascan.simulate.grid import CROSS_STAGE_AXES, Flags, Floats, Grid, Integers
from megascan.simulate.job import JobModel
from megascan.simulate.program import StageProgram, Work

_CPU_SHARE_OF_TRANSFER = 0.3
"""CPU runs: part of a transfer that the thread spends copying rather than asleep."""


@dataclass(frozen=True)
class StageDraws:
    """One stage in one iteration, shapes (row, place) unless noted."""

    compute: Floats
    compute_cpu: Floats
    dispatch: Floats
    transfer: Floats
    transfer_cpu: Floats
    transfer_dispatch: Floats
    jitter: Floats
    """(slot or row, place): how much after a communication's end a member sees it."""
    pause: Floats
    """(place): collector pause, 0 for none."""
    save: Floats | None
    """(place): time to write a checkpoint; None in iterations without one."""
    on_device: Flags
    """(row): computed by the device, so that the host may run ahead."""
    host_is_device: bool


class Draws:
    """Draws the iterations of a job in order."""

    def __init__(
        self, job: JobModel, programs: list[StageProgram], faults: tuple[Fault, ...], seed: int
    ) -> None:
        self.job, self.programs, self.faults = job, programs, faults
        self.grid = Grid(job.layout)
        self.generator = np.random.default_rng(seed)
        self.tables = [_RowTable(program) for program in programs]
        world = job.layout.world_size
        self.device = np.exp(job.noise.device_ratio * self.generator.standard_normal(world))
        self.warmup = self.generator.uniform(0.5, 1.5, world)
        places = [job.layout.coordinates(int(rank)) for rank in self.grid.ranks[0]]
        self.replica = np.array([place.dp for place in places])
        self.loader = np.array([place.tp == 0 for place in places])

    def iteration(self, iteration: int) -> list[StageDraws]:
        """Values of every stage for an iteration (from 1)."""
        lengths = self._lengths()
        pauses = self._pauses(iteration)
        saves = self._saves(iteration)
        return [self._stage(table, iteration, lengths, pauses, saves) for table in self.tables]

    def _factors(self, kind: FaultKind, iteration: int) -> Floats:
        return rank_factors(self.faults, kind, iteration, self.job.layout.world_size)

    def _lengths(self) -> Floats:
        """Work in each microbatch against the mean, shape (microbatch + 1, place); the last row
        is 1: rows of no microbatch have index -1."""
        ratio = self.job.imbalance.sequence_ratio
        shape = (self.job.num_microbatches + 1, self.job.layout.dp)
        lengths = np.ones(shape)
        if ratio:
            lengths = np.exp(ratio * self.generator.standard_normal(shape) - ratio**2 / 2)
            lengths[-1] = 1.0
        return lengths[:, self.replica]

    def _pauses(self, iteration: int) -> Floats:
        """Collector pause of every rank in this iteration, ns."""
        imbalance = self.job.imbalance
        compute = np.zeros(self.job.layout.world_size)
        for ranks, table in zip(self.grid.ranks, self.tables, strict=True):
            compute[ranks] = table.device_ns
        pauses = (self._factors(FaultKind.GC, iteration) - 1.0) * compute
        if imbalance.gc_interval:
            due = self.generator.integers(0, imbalance.gc_interval, len(pauses)) == 0
            pauses[due] += imbalance.gc_ns * self.generator.uniform(0.7, 1.3, int(due.sum()))
        return pauses

    def _saves(self, iteration: int) -> Floats | None:
        imbalance = self.job.imbalance
        interval = imbalance.checkpoint_interval
        if not interval or iteration % interval:
            return None
        spread = self.generator.standard_normal(self.job.layout.world_size)
        return imbalance.checkpoint_ns * np.exp(0.1 * spread)

    def _noise(self, ratio: float, shape: tuple[int, int]) -> Floats:
        if ratio == 0.0:
            return np.ones(shape)
        return np.exp(ratio * self.generator.standard_normal(shape))

    def _stage(
        self,
        table: _RowTable,
        iteration: int,
        lengths: Floats,
        pauses: Floats,
        saves: Floats | None,
    ) -> StageDraws:
        ranks = self.grid.ranks[table.program.stage]
        compute = self._compute(table, ranks, iteration, lengths)
        host = self._factors(FaultKind.HOST, iteration)[ranks]
        cpu_time = compute
        if self.job.device == "cpu":
            compute = np.where(table.device[:, None], compute * host, compute)
        transfer = self._transfers(table, ranks, iteration)
        slots = max(len(table.axes), table.program.num_slots)
        noise = self.job.noise
        return StageDraws(
            compute=compute,
            compute_cpu=cpu_time,
            dispatch=self._launches(np.where(table.device, table.nominal, 0.0), host),
            transfer=transfer,
            transfer_cpu=transfer * _CPU_SHARE_OF_TRANSFER,
            transfer_dispatch=self._launches(table.transfer_nominal, host),
            jitter=self.generator.uniform(0.0, noise.end_jitter_ns, (slots, len(ranks))),
            pause=pauses[ranks],
            save=None if saves is None else saves[ranks],
            on_device=table.device,
            host_is_device=self.job.device == "cpu",
        )

    def _launches(self, nominal: Floats, host: Floats) -> Floats:
        """Host time to launch each row, shape (row, place); none on the CPU, which computes."""
        shape = (len(nominal), len(host))
        if self.job.device == "cpu":
            return np.zeros(shape)
        ratio = self.job.costs.dispatch_ratio
        needed = np.where(host > 1.0, max(ratio, 1.0) * host, ratio)
        return nominal[:, None] * needed * self._noise(self.job.noise.compute_ratio, shape)

    def _compute(
        self, table: _RowTable, ranks: Integers, iteration: int, lengths: Floats
    ) -> Floats:
        """Computation with everything that touches it."""
        noise, imbalance = self.job.noise, self.job.imbalance
        shape = (len(table.nominal), len(ranks))
        values: Floats = table.nominal[:, None] * self._noise(noise.compute_ratio, shape)
        if noise.spike_probability:
            spikes = self.generator.random(shape) < noise.spike_probability
            values += spikes * table.device[:, None] * noise.spike_ns
        speed = self._factors(FaultKind.COMPUTE, iteration)[ranks] * self.device[ranks]
        if imbalance.warmup_ratio:
            fading = imbalance.warmup_ratio / 5.0 ** (iteration - 1)
            speed = speed * (1.0 + fading * self.warmup[ranks])
        load = self._factors(FaultKind.LOADER, iteration)[ranks] * self.loader
        touched = np.where(table.load[:, None], load, 1.0)
        touched = np.where(table.device[:, None], lengths[table.microbatch] * speed, touched)
        return values * touched

    def _transfers(self, table: _RowTable, ranks: Integers, iteration: int) -> Floats:
        """Transfers: one draw a group, slowed by the worst link inside it."""
        noise = self._noise(self.job.noise.transfer_ratio, (len(table.axes), len(ranks)))
        links = _Links(self.grid, self.faults, iteration)
        values = table.transfer_nominal[:, None] * noise
        for axis in sorted(set(table.axes)):
            rows = np.flatnonzero(table.axes == axis)
            if axis == "pp":
                for peer in np.unique(table.peers[rows]):
                    chosen = rows[table.peers[rows] == peer]
                    values[chosen] *= links.between(table.program.stage, int(peer))
            else:
                values[rows] = self.grid.first_member(values[rows], axis)
                values[rows] *= links.within(table.program.stage, axis)
        return values


class _RowTable:
    """A program's rows as arrays."""

    def __init__(self, program: StageProgram) -> None:
        rows, transfers = program.compute_rows, program.transfer_rows
        self.program = program
        self.nominal = np.array([row.nominal_ns for row in rows], dtype=np.float64)
        self.microbatch = np.array([row.microbatch for row in rows], dtype=np.int64)
        self.device = np.array([row.work == Work.DEVICE for row in rows], dtype=np.bool_)
        self.load = np.array([row.work == Work.LOAD for row in rows], dtype=np.bool_)
        self.device_ns = float(self.nominal[self.device].sum())
        self.transfer_nominal = np.array([row.nominal_ns for row in transfers], dtype=np.float64)
        self.axes = np.array([row.axis for row in transfers], dtype=np.str_)
        self.peers = np.array([row.peer_stage for row in transfers], dtype=np.int64)


class _Links:
    """Slowness of connections in one iteration."""

    def __init__(self, grid: Grid, faults: tuple[Fault, ...], iteration: int) -> None:
        self.grid = grid
        world = grid.layout.world_size
        self.ranks = rank_factors(faults, FaultKind.LINK, iteration, world)
        self.pairs = [
            (fault.rank, fault.peer, fault.factor)
            for fault in faults
            if fault.peer is not None and fault.active(iteration)
        ]

    def between(self, stage: int, peer_stage: int) -> Floats:
        """Factor of p2p between two stages, shape (place)."""
        ours, theirs = self.grid.ranks[stage], self.grid.ranks[peer_stage]
        factors: Floats = np.maximum(self.ranks[ours], self.ranks[theirs])
        for rank, peer, factor in self.pairs:
            there = (ours == rank) & (theirs == peer) | (ours == peer) & (theirs == rank)
            factors = np.where(there, factors * factor, factors)
        return factors

    def within(self, stage: int, axis: str) -> Floats:
        """Factor of a collective, shape (place): its slowest member's; pairs slow a ring too."""
        grid = self.grid
        factors = self.ranks[grid.ranks]
        for rank, peer, factor in self.pairs:
            if self._together(rank, peer, axis):
                factors = np.where(grid.ranks == rank, factors * factor, factors)
        if axis in CROSS_STAGE_AXES:
            factors = factors[list(grid.stages_of(axis))].max(axis=0, keepdims=True)
            slowest: Floats = grid.group_max(factors, axis)[0]
            return slowest
        return grid.group_max(factors[stage], axis)

    def _together(self, rank: int, peer: int, axis: str) -> bool:
        if (
            axis == "embd"
            and not np.isin([rank, peer], self.grid.ranks[list(self.grid.stages_of(axis))]).all()
        ):
            return False
        smallest = self.grid.smallest_members(axis)
        groups = smallest[np.isin(self.grid.ranks, [rank, peer])]
        return bool(groups[0] == groups[1])
