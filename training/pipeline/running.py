"""The pipeline of a running job: its plan, what the plan needs of the model, what runs the plan."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from itertools import count

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from training.arguments import Settings, Sizes
from training.pipeline.channels import Channels
from training.pipeline.costs import peak_memory
from training.pipeline.dynamic import GuidedDriver
from training.pipeline.executor import Driver, Executor, ListDriver, Stopwatch
from training.pipeline.generators import depth_first
from training.pipeline.helped import HelpedDriver
from training.pipeline.plan import Placement, Plan
from training.pipeline.rebalance import Deal, Rebalancer
from training.pipeline.schedule import deal_for, plan_for, schedule_name
from training.pipeline.split_backward import WeightGradients, split_backward
from training.step import ForwardBackward

HELPER: tuple[str, ...] = ("-m", "training.helper")
"""Arguments of Python that start a helper."""

HELPER_WAIT_S = 120.0
"""How long a job waits for the helpers that it starts itself; these load torch for seconds."""

HELPER_END_S = 10.0
"""How long helpers that the job has started may take to end with it; then they are killed."""


class Pipeline:
    """Runs the steps of a job as its flags ask, and moves microbatches between replicas.

    Order of use: `split` while the model is built, `start`, then in every step `forward_backward`
    and after it `deals_anew`.
    """

    forward_backward: ForwardBackward
    """What takes the place of Megatron-Core's schedule function."""

    def __init__(self, settings: Settings, sizes: Sizes) -> None:
        self._settings = settings
        self._sizes = sizes
        self._weight_gradients: list[WeightGradients] = []
        self._follows_plan = schedule_name(settings, sizes) is not None
        self.deal: Deal | None = deal_for(settings, sizes)
        self._rebalancer: Rebalancer | None = None
        self._stopwatch: Stopwatch | None = None
        self._executor: Executor | None = None
        self._helped: HelpedDriver | None = None
        self._own_helpers: list[subprocess.Popen[bytes]] = []
        self._channels: Channels | None = None
        self._plan_of = cache(self._make_plan)

    @property
    def split(self) -> Callable[[torch.nn.Module], None] | None:
        """Return what to call on each chunk before it is wrapped; None without split backwards."""
        if not self._follows_plan or not self._plan_of(self._own_share()).splits_backward:
            return None
        return self._split

    def _split(self, chunk: torch.nn.Module) -> None:
        self._weight_gradients.append(split_backward(chunk))

    def start(
        self, device: str, chunks: Sequence[torch.nn.Module], description: dict[str, object]
    ) -> None:
        """Make what runs a step; all ranks of the job call this together.

        `description` is what a helper must know to build a stage of the job.
        """
        if not self._follows_plan:
            self.forward_backward = get_forward_backward_func()
            return
        plan = self._plan_of(self._sizes.num_microbatches)
        if self._settings.pipeline.dpp_microbatches == "auto":
            self._stopwatch = Stopwatch(device)
            self._rebalancer = self._build_rebalancer(plan, device)
        plan_of_step: Callable[[int], Plan] = self._plan_of
        driver: Driver
        if self._settings.pipeline.forward_backward_disaggregating:
            driver = self._helped = self._open_to_helpers(plan, device, chunks[0], description)
            plan_of_step = driver.plan_of_step
        else:
            driver = self._build_driver(plan, device)
        if device != "cpu" and self._helped is None:
            plan_of_step = after_first_step(plan_of_step)
        self._executor = Executor(plan_of_step, driver, self._weight_gradients, self._stopwatch)
        self._take_share()

    def _build_rebalancer(self, plan: Plan, device: str) -> Rebalancer:
        assert self.deal is not None
        fill = (self._sizes.pipeline_size - 1) / self._sizes.model_chunks
        if plan.splits_backward:
            fill /= 3  # weight gradients fill the rest of the time in which ranks would wait
        exchange = partial(_largest_by_replica, device=device)
        return Rebalancer(self.deal, exchange, fill=fill)

    def close(self) -> None:
        """Release helpers and the other ranks' memory; the job has ended."""
        if self._helped is not None:
            self._helped.close()
        if self._channels is not None:
            self._channels.close()
        for helper in self._own_helpers:
            try:
                helper.wait(HELPER_END_S)
            except subprocess.TimeoutExpired:
                helper.kill()

    def _open_to_helpers(
        self, plan: Plan, device: str, chunk: torch.nn.Module, description: dict[str, object]
    ) -> HelpedDriver:
        """Make what runs steps with helpers, print where helpers may join, and start our own."""
        members = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
        channels = self._channels = Channels(plan.shape, members, device, timeout=self._timeout())
        driver = HelpedDriver(
            channels,
            members,
            chunk,
            self._plan_of,
            splits_backward=plan.splits_backward,
            port=self._settings.pipeline.fbd_port,
        )
        replica: int = parallel_state.get_data_parallel_rank()
        driver.open(description, self._sizes.data_size, replica)
        if dist.get_rank() == 0:
            host, port = driver.meeting
            program = [*HELPER, "--join", f"{host}:{port}"]
            print(f"helpers may join: python {' '.join(program)}", file=sys.stderr, flush=True)
            self._start_helpers(driver, program)
        return driver

    def _start_helpers(self, driver: HelpedDriver, program: list[str]) -> None:
        """Start our own helpers; wait for this replica's part of the helpers that are alive."""
        for _ in range(self._settings.pipeline.fbd_helpers):
            started = subprocess.Popen([sys.executable, *program], stdout=subprocess.DEVNULL)
            self._own_helpers.append(started)
        end_s = time.monotonic() + HELPER_WAIT_S
        while time.monotonic() < end_s:
            alive = sum(helper.poll() is None for helper in self._own_helpers)
            # Helpers are dealt to the replicas in turn, and the first replica gets the most.
            if driver.num_ready >= math.ceil(alive / self._sizes.data_size):
                break
            time.sleep(0.05)

    def _timeout(self) -> timedelta:
        return timedelta(minutes=self._settings.parallel.distributed_timeout_minutes)

    def _build_driver(self, plan: Plan, device: str) -> Driver:
        members = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
        guided = self._settings.pipeline.dpp_choice == "guided"
        channels = Channels(plan.shape, members, device, timeout=self._timeout(), announces=guided)
        self._channels = channels
        if not guided:
            return ListDriver(channels)
        limit = self._settings.pipeline.dpp_memory_limit
        slack = 0.0 if limit is None else max(0.0, limit - max(peak_memory(plan)))
        return GuidedDriver(channels, slack=slack)

    def deals_anew(self) -> bool:
        """Take in how long the last step took; return whether `deal` has changed."""
        if self._rebalancer is None or self._stopwatch is None:
            return False
        deal = self._rebalancer.after_step(self._stopwatch.read_s(), self._own_share())
        if deal is None:
            return False
        self.deal = deal
        self._take_share()
        if dist.get_rank() == 0:
            shares = ", ".join(map(str, deal.shares))
            print(f"microbatches by replica from now on: {shares}", file=sys.stderr, flush=True)
        return True

    def _take_share(self) -> None:
        assert self._executor is not None
        self.forward_backward = partial(self._executor, own_microbatches=self._own_share())

    def _own_share(self) -> int:
        if self.deal is None:
            return self._sizes.num_microbatches
        replica: int = parallel_state.get_data_parallel_rank()
        return self.deal.shares[replica]

    def _make_plan(self, num_microbatches: int) -> Plan:
        plan = plan_for(self._settings, self._sizes, num_microbatches)
        assert plan is not None
        return plan


def after_first_step(plan_of_step: Callable[[int], Plan]) -> Callable[[int], Plan]:
    """Return Megatron-Core's order for the first step, later the plans of `plan_of_step`.

    What is done for the first time (memory taken from the device, kernels compiled and loaded) may
    make the host wait until the device is idle, and a message that waits for its receiver keeps the
    device busy. In Megatron-Core's order the receiver is soon there; in a plan that has messages
    under way for long, ranks can wait for each other for ever (seen on two H200 with two chunks and
    the backward split; benchmarks/results/pipeline_runs_h200.md).
    """
    steps = count()

    def plan_of(num_microbatches: int) -> Plan:
        plan = plan_of_step(num_microbatches)
        if next(steps) > 0 or plan.shape.placement is not Placement.LOOP:
            return plan
        return depth_first(plan.shape)

    return plan_of


def _largest_by_replica(own: float, *, device: str) -> list[float]:
    """Return, by replica, the largest of the numbers that its ranks give."""
    mine = torch.tensor(
        [own, parallel_state.get_data_parallel_rank()], dtype=torch.float64, device=device
    )
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    largest = [0.0] * parallel_state.get_data_parallel_world_size()
    for number, replica in torch.stack(everyone).tolist():
        largest[int(replica)] = max(largest[int(replica)], number)
    return largest
