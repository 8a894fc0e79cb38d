"""Which iterations and which rows are compared: warm-up and unsplittable groups left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from detect.observations import Bools, Floats, Ints, Members, Observations, Transfers, Work
from detect.settings import DetectorSettings
from detect.stats import robust

WARM_LEVEL = 1.15
"""A leading iteration whose compute is so much above the rest's is still warming up."""
MIN_KEPT = 3


def steady(observations: Observations, settings: DetectorSettings) -> Observations:
    """Without warm-up: the run's first iterations, and leading ones that are slow for everybody.

    At least `MIN_KEPT` iterations, and of more than nine two thirds, are always kept.
    """
    keep = _warm(observations, settings)
    if keep.all():
        return observations
    dropped = observations.iterations[~keep]
    note = (
        f"iterations {dropped[0]} to {dropped[-1]} were left out as warm-up"
        if len(dropped) > 1
        else f"iteration {dropped[0]} was left out as warm-up"
    )
    return _restricted(observations, keep, note)


def _warm(observations: Observations, settings: DetectorSettings) -> Bools:
    iterations = observations.iterations
    keep = iterations > settings.num_warmup_iterations
    level = robust.median(robust.median(observations.work.log_ns, axis=2), axis=0)
    typical = float(robust.median(level[keep])) if keep.any() else float(robust.median(level))
    for slot in range(len(level) // 3):
        if keep[slot] and level[slot] < typical + np.log(WARM_LEVEL):
            break
        keep[slot] = False
    if keep.sum() < min(MIN_KEPT, len(keep)):
        keep = np.ones(len(keep), dtype=bool)
        keep[: max(0, len(keep) - MIN_KEPT)] = iterations[: max(0, len(keep) - MIN_KEPT)] > 1
    return np.asarray(keep, dtype=bool)


def _restricted(seen: Observations, keep: Bools, note: str) -> Observations:
    def cut(values: Floats) -> Floats:
        return values[:, keep]

    return replace(
        seen,
        iterations=seen.iterations[keep],
        iteration_ns=seen.iteration_ns[keep],
        work=seen.work.restricted(keep),
        layers=None if seen.layers is None else seen.layers.restricted(keep),
        busy_ns=cut(seen.busy_ns),
        optimizer_ns=cut(seen.optimizer_ns),
        host_gap_ns=cut(seen.host_gap_ns),
        loader_ns=cut(seen.loader_ns),
        gc_ns=cut(seen.gc_ns),
        stalled_ns=cut(seen.stalled_ns),
        stolen_ns=cut(seen.stolen_ns),
        starved_share=None if seen.starved_share is None else cut(seen.starved_share),
        transfers=None if seen.transfers is None else _cut_transfers(seen.transfers, keep),
        notes=(*seen.notes, note),
    )


def _cut_transfers(transfers: Transfers, keep: Bools) -> Transfers:
    return replace(
        transfers,
        transfer_ns=transfers.transfer_ns[:, keep],
        late_ns=transfers.late_ns[:, keep],
        quick_ns=transfers.quick_ns[:, keep],
    )


def one_row_a_worker(seen: Observations) -> Observations:
    """One row for each TP (CP, EP) group whose inner communication was not traced.

    Inside such a group everybody waits for the slowest within its own passes, so their times are
    the same and only the group as a whole can be compared.
    """
    if seen.splits_tensor_groups:
        return seen
    members = seen.members
    keys = np.stack([members.replica, members.stage])
    _, first, of_row = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    of_row = of_row.reshape(-1)
    rows = np.sort(first)
    workers = tuple(tuple(members.ranks[of_row == of_row[row]].tolist()) for row in rows)
    note = (
        "communication inside TP groups was not traced (granularity base): a slow rank can be told "
        "only up to its TP group; trace with --trace-granularity full to split it"
    )
    return _rows(seen, members.taken(rows, workers), rows, note)


def _rows(seen: Observations, members: Members, rows: Ints, note: str) -> Observations:
    def cut(work: Work) -> Work:
        return replace(work, log_ns=work.log_ns[rows])

    transfers = seen.transfers
    return replace(
        seen,
        members=members,
        work=cut(seen.work),
        layers=None if seen.layers is None else cut(seen.layers),
        busy_ns=seen.busy_ns[rows],
        optimizer_ns=seen.optimizer_ns[rows],
        host_gap_ns=seen.host_gap_ns[rows],
        loader_ns=seen.loader_ns[rows],
        gc_ns=seen.gc_ns[rows],
        stalled_ns=seen.stalled_ns[rows],
        stolen_ns=seen.stolen_ns[rows],
        starved_share=None if seen.starved_share is None else seen.starved_share[rows],
        transfers=None
        if transfers is None
        else replace(transfers, late_ns=transfers.late_ns[rows], quick_ns=transfers.quick_ns[rows]),
        notes=(*seen.notes, note),
    )
