"""Estimate on paper what a job's iteration is made of, so that senseless jobs are not drawn.

Nobody trains where gradients take longer than passes, or where layers talk longer than they work:
such draws are thrown away, and so are iterations of a few milliseconds. The same estimates tell in
which jobs a slow thread or card is felt.
"""

from __future__ import annotations

from benchmarks.grounds.quarry.costs import Costs
from benchmarks.grounds.quarry.groups import members
from benchmarks.grounds.quarry.jobs import Job
from benchmarks.grounds.quarry.network import Network

LEAST_ITERATION_S = 0.04
KERNELS_OF_A_LAYER = 90  # launched for a microbatch, forward and backward


def _letters(job: Job) -> str:
    return "".join(each for row in job.chunks for each in row)


def work_s(job: Job) -> float:
    """Return how long a rank's kernels take for one microbatch, forward and backward."""
    costs = Costs(job)
    parts = {
        "d": costs.attention().alone_s + costs.mlp().alone_s,
        "e": costs.attention().alone_s + costs.router().alone_s + costs.experts().alone_s,
        "m": costs.mixer().alone_s,
    }
    work = sum(parts[letter] for letter in _letters(job)) / job.layout.pp
    return (3 + int(job.recompute)) * work


def launches_s(job: Job) -> float:
    """Return how long a rank's thread takes to launch them."""
    kernels = KERNELS_OF_A_LAYER * job.kernels_ratio * len(_letters(job)) / job.layout.pp
    return kernels * job.machines.launch_s


def usual_pass_s(job: Job) -> float:
    """Return how long one microbatch takes a rank, forward and backward, without any waiting."""
    return max(work_s(job), launches_s(job))


def usual_iteration_s(job: Job) -> float:
    """Return about how long an iteration takes, bubbles included."""
    turns = job.num_microbatches + (job.layout.pp - 1) / job.num_chunks
    return 1.25 * turns * usual_pass_s(job)


def gradients_s(job: Job) -> float:
    """Return how long the gradients of rank 0 take to be reduced."""
    costs = Costs(job)
    weights = sum(costs.layer_weights(each) for each in _letters(job)) / job.layout.pp
    weights += costs.end_weights()
    network = Network(job, (), {}, [])
    replicas = members(job.layout, 0, "dp_cp")
    if len(replicas) == 1:
        return 0.0
    return network.timed_s(replicas, "all_reduce", int(4 * weights), 0, 0.0)


def talking_s(job: Job) -> float:
    """Return how long the layers of a rank talk for one microbatch, forward and backward."""
    costs = Costs(job)
    network = Network(job, (), {}, [])
    layers = len(_letters(job)) / job.layout.pp
    found = 0.0
    for axis, op, share in (("tp", "all_reduce", 4.0), ("ep", "all_to_all", 4.0)):
        group = members(job.layout, 0, axis)
        if len(group) > 1:
            size = costs.tokens * costs.width
            if axis == "ep":
                size *= job.experts_per_token / job.layout.tp
            found += share * network.timed_s(group, op, int(size), 0, 0.0)
    return layers * found


def is_sensible(job: Job) -> bool:
    """Tell whether somebody would let such a job run."""
    passes_s = usual_pass_s(job) * job.num_microbatches
    if usual_iteration_s(job) < LEAST_ITERATION_S:
        return False
    beside = 1.0 if job.overlap_grads or job.style == "fsdp" else 0.5
    return gradients_s(job) < beside * passes_s and talking_s(job) < 0.7 * usual_pass_s(job)


def waits_for_threads(job: Job) -> bool:
    """Tell whether devices are at times about as fast as threads launch."""
    return launches_s(job) > 0.5 * work_s(job)


def waits_for_cards(job: Job) -> bool:
    """Tell whether what goes between hosts takes a good part of an iteration."""
    if job.num_hosts < 2:
        return False
    exposed = gradients_s(job) * (0.3 if job.overlap_grads or job.style == "fsdp" else 1.0)
    group = job.layout.group(0, "ep")
    afar = len({job.machines.host_of(rank) for rank in group}) > 1
    exposed += talking_s(job) * job.num_microbatches * float(afar)
    return exposed > 0.04 * usual_iteration_s(job)
