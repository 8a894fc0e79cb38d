"""Simulate a job with and without its troubles and write down the one with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.grounds.kernels.cluster import USUAL, Noise, Numbers, Trouble, conditions
from benchmarks.grounds.kernels.engine import Engine
from benchmarks.grounds.kernels.files import RunFiles
from benchmarks.grounds.kernels.job import Job

LOGGING_NS = 1.5e6  # between the end of an iteration and the begin of the next


@dataclass(frozen=True, kw_only=True)
class Result:
    """Hold a simulated run: its engine, and when each traced iteration begins."""

    engine: Engine
    begins_ns: Numbers

    @property
    def iteration_times_ns(self) -> Numbers:
        """Return the time of each traced iteration, mean over all ranks, (iteration,)."""
        times = self.engine.iteration_ns
        return np.asarray(times.reshape(len(times), -1).mean(axis=1))

    @property
    def mean_iteration_ns(self) -> float:
        """Return the mean time of a traced iteration over all ranks."""
        return float(self.engine.iteration_ns.mean())

    @property
    def pass_times_ns(self) -> Numbers:
        """Return the time of each rank's passes, without waiting for others, (rank, iteration)."""
        times = self.engine.passes_ns
        return times.reshape(len(times), -1).T


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Hold what a case is simulated from; `pauses_between_ns` stop all ranks between windows."""

    job: Job
    noise: Noise = USUAL
    troubles: tuple[Trouble, ...] = ()
    pauses_between_ns: float = 0.0

    def simulate(self, seed: int, troubles: tuple[Trouble, ...]) -> Result:
        """Run the job under some of its troubles; bursts fall where a healthy run would be by
        then.
        """
        rough = self._run(seed, (), np.zeros(len(self.job.iterations)), 1.0)
        length = rough.mean_iteration_ns
        return self._run(seed, troubles, rough.begins_ns, length) if troubles else rough

    def _run(
        self, seed: int, troubles: tuple[Trouble, ...], begins_ns: Numbers, iteration_ns: float
    ) -> Result:
        now = conditions(self.job, self.noise, troubles, seed, iteration_ns)
        engine = Engine(self.job, self.noise, now, seed, begins_ns)
        return Result(engine=engine, begins_ns=self._begins(engine))

    def _begins(self, engine: Engine) -> Numbers:
        """Lay the traced iterations one after another, with those between that are not traced."""
        ends = engine.start_ns + engine.iteration_ns
        axes = (1, 2, 3, 4)
        last, first = ends.max(axis=axes), engine.start_ns.min(axis=axes)
        gaps = np.diff(self.job.iterations) - 1
        usual = float(np.median(engine.iteration_ns)) + LOGGING_NS
        steps = last[:-1] - first[1:] + LOGGING_NS + gaps * usual
        steps += np.where(gaps > 0, self.pauses_between_ns, 0.0)
        begins = np.concatenate([[0.0], np.cumsum(steps)]) + 5e7 - first[0]
        return np.asarray(begins, dtype=np.float64)

    def write(self, seed: int, directory: Path) -> tuple[Numbers, list[Numbers]]:
        """Write the rank files of the run with all troubles; return its iteration times, and those
        of the runs without each of them.
        """
        whole = self.simulate(seed, self.troubles)
        self.write_files(seed, whole, directory)
        runs_without = []
        for left_out in self.troubles:
            others = tuple(trouble for trouble in self.troubles if trouble is not left_out)
            runs_without.append(self.simulate(seed, others).iteration_times_ns)
        return whole.iteration_times_ns, runs_without

    def write_files(self, seed: int, run: Result, directory: Path) -> None:
        """Write the rank files of a run."""
        engine = run.engine
        RunFiles(self.job, engine.now, engine.operations, run.begins_ns, seed).write(directory)
