"""Simulate a job: all stages between two reductions over the whole job, iteration by iteration.

An iteration ends with the norm of all gradients, for which everybody waits; what a rank does after
it (Adam, the gathering of parameters, the trainer's log) is how much later than the others it
begins the next one. So the time of an iteration runs from norm to norm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.harbour.engine import Facts, Ranks, Recorded
from benchmarks.grounds.harbour.hardware import Array, generator
from benchmarks.grounds.harbour.jobs import Job, Work
from benchmarks.grounds.harbour.network import Network
from benchmarks.grounds.harbour.trainer import Batches, run_passes
from benchmarks.grounds.harbour.trouble import Conditions, Trouble, conditions
from megascan.schema import Kind, Track
from megascan.vocabulary import SAVE_CHECKPOINT

_GUESS_S = 0.5  # an iteration, for how far a clock wanders
_BETWEEN_S = 2.5e-3  # logging and the loop of the trainer, between two iterations
_CHECKPOINT_S = 6.0  # of a sound site's file system
_EVALUATION_S = 4.0
_PREFETCHED = 4  # batches that the workers of a loader have ready
_LOADER_USE = 0.45  # of the time between two batches that a sound loader takes for one
_WORKER_NOISE = 0.2
_WRITING_SHARE = 0.998  # of the time between two iterations, where a checkpoint is written
_UPDATE_SEED = 104_729  # the update has draws of its own


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """State what is simulated; all draws follow from the seed."""

    job: Job
    seed: int
    troubles: tuple[Trouble, ...] = ()
    even: bool = False  # chips that differ by nothing

    def without(self, *places: int) -> Scenario:
        """Return the same job without some of its troubles, or without any."""
        kept = tuple(one for place, one in enumerate(self.troubles) if place not in places)
        return replace(self, troubles=kept if places else ())


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Hold what happened; times of spans are seconds after the norm before their iteration."""

    scenario: Scenario
    begins_s: NDArray[np.float64]  # (iteration,), of the norm before, since the first one
    iteration_s: NDArray[np.float64]  # (iteration,), checkpoints and evaluations left out
    own_s: Array  # (iteration, rank), of passes less waiting and communication
    spans: tuple[tuple[Recorded, ...], ...]  # by stage
    felt: Conditions
    lengths: Array  # (microbatch, iteration, rank), 1: the job's sequence length


def simulate(scenario: Scenario, *, recording: bool = False) -> Outcome:
    """Run a job."""
    job = scenario.job
    numbers = np.array(job.iterations)
    felt = conditions(job, scenario.troubles, scenario.seed, numbers * _GUESS_S, even=scenario.even)
    waits = np.zeros((job.num_microbatches, len(numbers), job.num_ranks))
    if any(one.kind in ("loader", "host_memory") for one in scenario.troubles):
        usual = _run(scenario.without(), felt, waits, recording=False)
        waits = _late_batches(job, felt, usual.iteration_s, scenario.seed)
    return _run(scenario, felt, waits, recording=recording)


def _run(scenario: Scenario, felt: Conditions, waits: Array, *, recording: bool) -> Outcome:
    job, seed = scenario.job, scenario.seed
    network = Network(job, felt)
    batches = Batches(lengths=_lengths(job, seed), waits=waits, loads=_loads(job, seed))
    stages, ends = [], []
    for stage in range(job.pp):
        fresh = partial(
            Ranks, job=job, stage=stage, felt=felt, network=network, recording=recording
        )
        ends.append(_update(fresh(seed=seed + _UPDATE_SEED)))
        stages.append(fresh(seed=seed))
    saved = _saved(job)
    between, paused_s = _between(job, felt, saved, seed)
    for ranks, update in zip(stages, ends, strict=True):
        ranks.device = np.roll(update.device, 1, axis=0) + between[:, ranks.mine]
        ranks.host = ranks.began = ranks.device
    run_passes(job, felt, stages, batches, seed)
    norm_s = _norm(stages, network)
    for ranks, update in zip(stages, ends, strict=True):
        _append(ranks, update, norm_s)
        if saved.any():
            _note_checkpoints(ranks, update, saved)
    return Outcome(
        scenario=scenario,
        begins_s=_begins(job, norm_s),
        iteration_s=norm_s - paused_s,
        own_s=np.concatenate([ranks.own for ranks in stages], axis=1),
        spans=tuple(tuple(ranks.spans) for ranks in stages),
        felt=felt,
        lengths=np.tile(batches.lengths, (1, 1, job.pp)) * felt.length,
    )


def _update(ranks: Ranks) -> Ranks:
    """Run what follows the norm: Adam, bound by memory, and the gathering of new parameters."""
    job = ranks.job
    ranks.compute(Work(matrix_s=0.0, memory_s=job.update_s(ranks.stage), kernels=12))
    if job.distributed_optimizer and not job.overlap_params:
        size = int(job.parameters(ranks.stage) * 2 / (job.dp * job.cp))
        ranks.collective("all_gather", "dp_cp", size, {})
    return ranks


def _norm(stages: list[Ranks], network: Network) -> NDArray[np.float64]:
    """Let everybody wait for the norm of the gradients; return when it is there, (iteration,)."""
    job = stages[0].job
    last = np.max([ranks.mark()[0].max(axis=1) for ranks in stages], axis=0)
    axis = "intra_dist_opt" if job.distributed_optimizer else "mp"
    count = job.num_ranks if job.distributed_optimizer else job.tp * job.pp
    done: NDArray[np.float64] = last + network.whole_s(count)
    for ranks in stages:
        start, launch = ranks.mark()
        end = done[:, None] + 1e-6 * ranks.uniform()
        if count > 1:
            facts: Facts = {"op": "all_reduce", "sequence": 0, "size_bytes": 4}
            ranks.note(Recorded(Kind.COLLECTIVE, "all_reduce", Track.COMMUNICATION, start, end,
                                facts, launch, axis))  # fmt: skip
        ranks.note(Recorded(Kind.OPTIMIZER, "optimizer", Track.COMPUTE, start, end, {}, launch))
    return done


def _append(ranks: Ranks, update: Ranks, norm_s: NDArray[np.float64]) -> None:
    """Put the update behind the passes, and the spans that enclose both around them."""
    if not ranks.recording:
        return
    optimizer = ranks.spans.pop()
    end = norm_s[:, None] + update.device
    ranks.spans += [
        replace(
            span, start=span.start + norm_s[:, None], end=span.end + norm_s[:, None],
            launch=None if span.launch is None else span.launch + norm_s[:, None],
            facts={**span.facts, "sequence": ranks.counts[span.name, span.axis]},
        )
        for span in update.spans
    ]  # fmt: skip
    ranks.spans.append(replace(optimizer, end=end))
    began = ranks.began
    ranks.note(Recorded(Kind.ITERATION, "iteration", Track.COMPUTE, began, end, {}, began))


def _note_checkpoints(ranks: Ranks, update: Ranks, saved: NDArray[np.bool_]) -> None:
    """Record the checkpoints, which lie between an iteration's update and the next iteration."""
    start = np.roll(update.device, 1, axis=0)
    end = start + _WRITING_SHARE * (ranks.began - start)
    shown = np.where(saved[:, None], start, np.nan)
    ranks.note(Recorded(Kind.CHECKPOINT, SAVE_CHECKPOINT, Track.HOST, shown, end, {}))


def _saved(job: Job) -> NDArray[np.bool_]:
    """Return before which iterations a checkpoint is written."""
    return _due(job, job.checkpoint_every)


def _due(job: Job, every: int) -> NDArray[np.bool_]:
    """Return before which iterations something is done that is done after every so many."""
    due = [bool(every) and number > 1 and (number - 1) % every == 0 for number in job.iterations]
    return np.array(due)


def _between(
    job: Job, felt: Conditions, saved: NDArray[np.bool_], seed: int
) -> tuple[Array, NDArray[np.float64]]:
    """Return the time from one iteration to the next on each rank, (iteration, rank), and how much
    of it everybody stands still for a checkpoint or an evaluation, (iteration,).
    """
    random = generator(seed, "between")
    shape = (len(job.iterations), job.num_ranks)
    took = _BETWEEN_S * felt.launching * np.exp(0.25 * random.standard_normal(shape))
    writing = _CHECKPOINT_S * np.exp(0.1 * random.standard_normal(shape))
    paused = np.where(saved[:, None], writing, 0.0)
    paused += np.where(_due(job, job.evaluate_every)[:, None], _EVALUATION_S, 0.0)
    return took + paused, paused.min(axis=1)


def _begins(job: Job, iteration_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return when each traced iteration begins; untraced ones take as long as the median."""
    skipped = np.diff(np.array(job.iterations), prepend=job.iterations[0] - 1) - 1
    before = np.concatenate([[0.0], iteration_s[:-1]])
    begins: NDArray[np.float64] = np.cumsum(before + skipped * np.median(iteration_s))
    return begins


def _lengths(job: Job, seed: int) -> Array:
    """Return how long each microbatch is, the same for all ranks of its replica."""
    shape = (job.num_microbatches, len(job.iterations), job.dp)
    drawn = job.length_spread_ratio * generator(seed, "lengths").standard_normal(shape)
    lengths = np.exp(np.clip(drawn, -1.0, 1.0)) if job.lengths else np.ones(shape)
    return np.repeat(lengths, job.tp * job.cp, axis=2)


def _loads(job: Job, seed: int) -> Array:
    """Return what share of the tokens each rank's experts have, 1 on average in each group."""
    shape = (sum(job.layers), len(job.iterations), job.num_ranks)
    if not job.experts:
        return np.ones(shape)
    drawn = np.exp(job.load_spread_ratio * generator(seed, "loads").standard_normal(shape))
    groups = drawn.reshape(*shape[:2], -1, job.ep)
    shares: Array = groups / groups.mean(axis=-1, keepdims=True)
    return shares.reshape(shape)


def _late_batches(job: Job, felt: Conditions, iteration_s: NDArray[np.float64], seed: int) -> Array:
    """Return how long each rank waits for each batch, (microbatch, iteration, rank).

    A loader makes one batch after the other and stops when enough are ready, so it matters only
    where it takes longer for a batch than training does, on average over what is prefetched:

        made[k] = max(made[k - 1], taken[k - prefetched]) + time of batch k
    """
    count, num_ranks = felt.loading.shape
    random = generator(seed, "batches")
    usual_s = float(np.median(iteration_s)) / job.num_microbatches
    waits = np.zeros((job.num_microbatches, count, num_ranks))
    made, late, now = np.zeros(num_ranks), np.zeros(num_ranks), 0.0
    taken = [np.zeros(num_ranks)] * _PREFETCHED
    for iteration in range(count):
        for microbatch in range(job.num_microbatches):
            noise = np.exp(_WORKER_NOISE * random.standard_normal(num_ranks))
            took = _LOADER_USE * usual_s * felt.loading[iteration] * noise
            made = np.maximum(made, taken[-_PREFETCHED]) + took
            wait = np.maximum(0.0, made - now - late)
            waits[microbatch, iteration] = wait
            late = late + wait
            taken.append(now + late)
            now += usual_s
    waits[:, 0] = np.minimum(waits[:, 0], usual_s * _LOADER_USE)  # ready when tracing begins
    return waits
