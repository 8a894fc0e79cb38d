"""Estimate how long a job's passes and iterations take, before anything is simulated."""

from __future__ import annotations

from benchmarks.grounds.rack.job import Job, num_parameters
from benchmarks.grounds.rack.parts import Plan, Planner


def pass_s(job: Job) -> float:
    """Return about what a forward and a backward pass of all chunks of a stage take together."""
    planner = Planner(job)

    def seconds(plan: Plan) -> float:
        by_device = float(plan.seconds.sum())
        return max(by_device, sum(plan.kernels) * job.habits.launch_s)

    return sum(
        seconds(plan(0, chunk))
        for chunk in range(job.num_chunks)
        for plan in (planner.forward, planner.backward)
    )


def iteration_s(job: Job) -> float:
    """Return about what an iteration takes: passes, the pipeline's filling, gradients over NICs."""
    parameters = max(sum(num_parameters(job, stage)) for stage in range(job.num_stages))
    shared = min(job.rack.gpus_per_host / job.layout.tp, job.layout.dp)
    is_far = job.layout.tp * job.layout.cp * job.layout.dp > job.rack.gpus_per_host
    rate = job.rack.nic_share_bytes_s * shared if is_far else job.rack.chip.nvlink_bytes_s
    reduces_s = 2.0 * job.habits.gradient_bytes * parameters / rate
    passes = job.habits.num_microbatches + job.num_stages - 1
    return passes * pass_s(job) + reduces_s * (job.layout.dp > 1)
