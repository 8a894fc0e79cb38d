"""Let a job run on a cluster: host threads launch ahead of their GPUs, passes meet in
collectives, stages wait.

A stage's ranks are one vector: `_gpu` is when each GPU is free, `_host` when each launching thread
is. A module begins when the GPU has finished the one before *and* the host has launched it; where a
module meets its group, everybody leaves when the last has come and the bytes are through. Stages
run one another's messages by rendezvous: a message starts when both ends are there.

Example: two ranks of a TP group, work 3 and 5 ms, a reduction of 1 ms: both leave at 6 ms, the
first having waited for 2.
"""

from dataclasses import dataclass

import numpy as np

from benchmarks.grounds.cluster.files import (
    COMMUNICATION,
    COMPUTE,
    HOST,
    OVERLAPPED,
    RankFiles,
    Spans,
)
from benchmarks.grounds.cluster.hardware import MS, Cluster, Floats, Stall, stalls_of
from benchmarks.grounds.cluster.jobs import Action, Exchange, Job, Message, Module, Pass, schedule
from benchmarks.grounds.cluster.network import delivered, group_max, rates

_PASS_STREAM, _ITERATION_STREAM, _TOKEN_STREAM, _RECORD_STREAM = 11, 12, 13, 14
_LATENCY_NS = 2e3  # launch to start of an idle GPU
_PREFETCHED = 2  # batches that a loader keeps ready


@dataclass(kw_only=True)
class _Post:
    """Hold who has come to a message: when sender and receiver were ready, and when it was
    there.
    """

    sent: Floats | None = None
    awaited: Floats | None = None
    arrived: Floats | None = None
    sequence: int = 0


@dataclass(frozen=True)
class _Times:
    """Hold when the modules of a pass ran and were launched, shape (module, rank)."""

    modules: list[Module]
    starts: Floats
    ends: Floats
    launched: Floats


class Engine:
    """Run the iterations of one case; `files` gets the spans, unless nobody wants them."""

    def __init__(self, job: Job, cluster: Cluster, files: RankFiles | None) -> None:
        self._job, self._cluster, self._files = job, cluster, files
        shape = (job.pp, job.num_stage_ranks)
        self._ranks = np.arange(job.num_ranks).reshape(shape)
        self._gpu = np.zeros(shape)
        self._passes: list[Floats] = []  # of each iteration, time of the ranks' own modules
        self._host = np.zeros(shape)
        self._batch_ready = np.zeros(shape)
        self._batch_taken = np.zeros((_PREFETCHED, *shape))
        self._schedules = [schedule(job, stage) for stage in range(job.pp)]
        self._late = np.random.default_rng([cluster.seed, _RECORD_STREAM])
        self._spans: list[list[Spans]] = [[] for _ in range(job.pp)]

    def run(self) -> Floats:
        """Return the times of the traced iterations, in ns."""
        job = self._job
        times: list[float] = []
        window: list[int] = []
        for number, iteration in enumerate(job.iterations):
            if window and iteration != window[-1] + 1:
                self._flush(window)
                skipped = iteration - window[-1] - 1
                self._rest(times[-1] * skipped)
                window = []
            times.append(self._iteration(iteration))
            window.append(iteration)
            if job.checkpoint and number % 4 == 3:
                self._checkpoint(iteration)
        self._flush(window)
        return np.array(times)

    @property
    def pass_times_ns(self) -> Floats:
        """Return the time of each rank's modules, without waiting, shape (rank, iteration)."""
        return np.stack(self._passes, axis=-1).reshape(self._job.num_ranks, -1)

    def _flush(self, window: list[int]) -> None:
        if self._files:
            self._files.window(window, self._spans)
        for spans in self._spans:
            spans.clear()

    def _rest(self, duration_ns: float) -> None:
        """Let untraced iterations go by: the job is in step at their end."""
        now = self._gpu.max() + duration_ns
        self._gpu[:] = self._host[:] = now
        self._batch_ready += duration_ns
        self._batch_taken += duration_ns

    # -- one iteration ---------------------------------------------------------------------------

    def _iteration(self, iteration: int) -> float:
        job = self._job
        draws = np.random.default_rng([self._cluster.seed, _ITERATION_STREAM, iteration])
        self._now = iteration
        self._passes.append(np.zeros(self._gpu.shape))
        self._weather = self._cluster.weather(iteration)
        # a stage does the same things in the same order whatever goes wrong, and so draws the same
        self._draws = [
            np.random.default_rng([self._cluster.seed, _PASS_STREAM, iteration, stage])
            for stage in range(job.pp)
        ]
        self._prepare(iteration, draws)
        self._host[:] = self._gpu + draws.gamma(4.0, 0.1 * MS, size=self._gpu.shape)
        self._gpu[:] = self._host + _LATENCY_NS
        begin = self._gpu.copy()
        self._stalls = stalls_of(self._cluster, iteration, self._host.reshape(-1))
        if job.evaluation and iteration % 3 == 0:
            self._gpu += (
                2.5 * job.nominal_iteration_ns * draws.normal(1, 0.01, size=self._gpu.shape)
            )
            self._host[:] = self._gpu
        self._run_schedules()
        self._update(draws)
        for stage in range(job.pp):
            self._add(
                stage, "iteration", "iteration", COMPUTE, start=begin[stage], end=self._gpu[stage]
            )
        self._host[:] = np.maximum(self._host, self._gpu)
        self._gpu[:] = self._host
        return float(self._gpu.max() - begin.min())

    def _prepare(self, iteration: int, draws: np.random.Generator) -> None:
        """Work out what holds for the whole iteration: rates of links, tokens, factors of each
        rank.
        """
        job, cluster = self._job, self._cluster
        axes = {"tp": job.tp > 1, "ep": job.ep > 1, "fsdp": job.style == "fsdp", "dp": job.dp > 1}
        self._rate = {
            (stage, axis): rates(cluster, job, stage, axis, iteration)
            for stage in range(job.pp)
            for axis, used in axes.items()
            if used
        }
        clock = cluster.factor("gpu_clock", iteration)
        self._clock = clock.reshape(self._ranks.shape)
        self._memory = cluster.factor("gpu_memory", iteration).reshape(self._ranks.shape)
        warm = np.ones(self._ranks.shape)
        if iteration == 1:
            warm += (job.warm_up_ratio - 1) * draws.uniform(0.3, 1.0, size=warm.shape)
        self._warm = warm
        self._tokens = self._tokens_of(iteration)
        self._expert_load = self._expert_loads(iteration)
        self._sequence: dict[tuple[object, ...], int] = {}
        self._posts: dict[Message, _Post] = {}
        self._buckets: list[list[Floats]] = [[] for _ in range(job.pp)]

    def _tokens_of(self, iteration: int) -> Floats:
        """Return tokens over their nominal number, shape (microbatch, rank of a stage)."""
        job = self._job
        draws = np.random.default_rng([self._cluster.seed, _TOKEN_STREAM, iteration])
        spread = draws.normal(0, 1, size=(job.num_microbatches, job.dp))
        noise = job.token_noise
        tokens = np.exp(noise * spread - noise**2 / 2)
        for trouble in self._cluster.active("long_sequences", iteration):
            if trouble.burst_ratio:  # every microbatch another length
                tokens *= np.exp(trouble.burst_ratio * spread)
            else:
                tokens[:, trouble.index] *= trouble.factor
        return np.repeat(tokens, job.tp, axis=1)

    def _expert_loads(self, iteration: int) -> Floats:
        """Return tokens of each rank's experts over their mean, shape (rank of a stage,)."""
        job = self._job
        draws = np.random.default_rng([self._cluster.seed, _TOKEN_STREAM, iteration, 1])
        loads = draws.dirichlet(np.full(job.ep, 600.0)) * job.ep
        for kind in ("hot_expert", "moving_hot_expert"):
            for trouble in self._cluster.active(kind, iteration):
                hot = trouble.index if kind == "hot_expert" else int(draws.integers(job.ep))
                loads[hot] *= trouble.factor
        by_replica = loads[np.arange(job.dp) % job.ep]
        return np.repeat(by_replica, job.tp)

    def _run_schedules(self) -> None:
        """Let every stage go as far as its messages allow, until all are through."""
        places = [0] * self._job.pp
        while True:
            moved = False
            for stage, actions in enumerate(self._schedules):
                while places[stage] < len(actions) and self._act(stage, actions[places[stage]]):
                    places[stage] += 1
                    moved = True
            if not moved:
                break
        if any(
            place < len(actions) for place, actions in zip(places, self._schedules, strict=True)
        ):
            raise RuntimeError("the schedule of the ground deadlocks")

    def _act(self, stage: int, action: Action) -> bool:
        if isinstance(action, Exchange):
            return self._exchange(stage, action)
        self._load(stage, action)
        if self._job.style == "fsdp":
            self._sharded_pass(stage, action)
        else:
            self._pass(stage, action)
        return True

    # -- messages --------------------------------------------------------------------------------

    def _exchange(self, stage: int, action: Exchange) -> bool:
        """Post all messages; return False while one that this stage waits for has not arrived."""
        ready = self._gpu[stage].copy()
        for message in action.sends:
            post = self._posts.setdefault(message, _Post())
            if post.sent is None:
                post.sent = ready.copy()
                post.sequence = self._next(*self._ends(message), message.forward)
        for message in action.receives:
            post = self._posts.setdefault(message, _Post())
            if post.awaited is None:
                post.awaited = ready.copy()
        awaited = action.receives + (action.sends if action.waits_for_sends else ())
        for message in awaited:
            if not self._arrive(message):
                return False
        if not awaited:
            return True
        end = ready
        for message in awaited:
            end = np.maximum(end, self._arrival(message))
        for message in awaited:
            self._report_message(message, stage, ready, end)
        self._gpu[stage] = end + 30e3
        if action.waits_for_sends:
            self._host[stage] = np.maximum(self._host[stage], end + 15e3)
        return True

    def _arrival(self, message: Message) -> Floats:
        arrived = self._posts[message].arrived
        assert arrived is not None
        return arrived

    def _arrive(self, message: Message) -> bool:
        """Work out when a message is through, once both ends have come."""
        post = self._posts[message]
        if post.arrived is not None:
            return True
        if post.sent is None or post.awaited is None:
            return False
        source, target = self._ends(message)
        starts = np.maximum(post.sent, post.awaited)
        there = delivered(
            self._cluster, self._ranks[source], self._ranks[target], starts=starts,
            size_bytes=self._job.message_bytes, iteration=self._now,
        )  # fmt: skip
        post.arrived = there + 12e3
        if self._job.vpp > 1:
            self._report_message(message, source, post.sent, post.arrived)
        return True

    def _ends(self, message: Message) -> tuple[int, int]:
        step = 1 if message.forward else -1
        return message.virtual_stage % self._job.pp, (message.virtual_stage + step) % self._job.pp

    def _report_message(self, message: Message, stage: int, start: Floats, end: Floats) -> None:
        source, target = self._ends(message)
        sends = stage == source
        direction = "forward" if message.forward else "backward"
        number = self._posts[message].sequence
        virtual = (
            message.virtual_stage
            if sends
            else message.virtual_stage + (1 if message.forward else -1)
        )
        arguments = (
            f'"microbatch":{message.microbatch},"chunk":{virtual // self._job.pp},'
            f'"op":"{"send" if sends else "recv"}","sequence":{number},'
            f'"size_bytes":{int(self._job.message_bytes)},"direction":"{direction}"'
        )
        other = target if sends else source
        self._add(
            stage, "p2p", f"{'send' if sends else 'recv'}_{direction}",
            OVERLAPPED if self._job.vpp > 1 and sends else COMMUNICATION,
            start=start, end=end, arguments=arguments, axis="pp",
            peer_offset=(other - stage) * self._job.num_stage_ranks,
        )  # fmt: skip

    # -- passes ----------------------------------------------------------------------------------

    def _load(self, stage: int, action: Pass) -> None:
        """Take a batch from the loader, where this pass needs one; its workers produce ahead of
        it.
        """
        job = self._job
        first, last = (
            stage == 0 and action.chunk == 0,
            stage == job.pp - 1 and action.chunk == job.vpp - 1,
        )
        if not action.forward or not (first or last):
            return
        draws = self._draws[stage]
        ranks = self._ranks[stage]
        slower = self._cluster.factor("loader", self._now)[ranks] * self._weather.cores[ranks]
        produced = (
            job.loader_ratio * 3 * job.forward_ns * draws.gamma(12.0, 1 / 12.0, size=len(ranks))
        )
        produced *= slower * self._weather.file_server * self._tokens[action.microbatch]
        ready = np.maximum(self._batch_ready[stage], self._batch_taken[0, stage]) + produced
        start = self._host[stage].copy()
        copied = (
            0.35 * MS * draws.gamma(16.0, 1 / 16.0, size=len(ranks)) * self._weather.cores[ranks]
        )
        end = np.maximum(start, ready) + copied
        self._batch_ready[stage] = ready
        self._batch_taken[:-1, stage] = self._batch_taken[1:, stage]
        self._batch_taken[-1, stage] = end
        self._host[stage] = end
        where = f'"microbatch":{action.microbatch},"chunk":{action.chunk}'
        self._add(stage, "data", "batch-generator", HOST, start=start, end=end, arguments=where)

    def _costs(self, stage: int, action: Pass, modules: list[Module]) -> tuple[Floats, Floats]:
        """Return (work, launched), shape (module, rank): GPU time of each module and when the
        host launches it.
        """
        machines, ranks, draws = self._cluster.machines, self._ranks[stage], self._draws[stage]
        shape = (len(modules), len(ranks))
        base = np.array([each.base_ns for each in modules])[:, None]
        noise = machines.kernel_noise * np.clip(draws.standard_t(4, size=shape), -5.0, 9.0)
        spikes = (draws.random(shape) < machines.spike_share) * draws.gamma(2.0, 0.3, size=shape)
        tokens = self._tokens[action.microbatch][None, :]
        quadratic = np.array([each.quadratic for each in modules])[:, None]
        work = base * (1 + noise + spikes) * ((1 - quadratic) * tokens + quadratic * tokens**2)
        work *= self._cluster.chip[ranks] * self._weather.chip[ranks] * self._warm[stage]
        for row, module in enumerate(modules):
            if module.name == "experts":
                work[row] *= self._expert_load
        launches = self._job.launch_ratio * base * draws.gamma(30.0, 1 / 30.0, size=shape)
        launches = launches * self._weather.cores[ranks] * self._warm[stage] ** 2
        launched = self._host[stage] + np.cumsum(launches, axis=0)
        self._stall(stage, launched)
        at = np.maximum(self._gpu[stage], launched[0]) + np.cumsum(work, axis=0) - work
        clock_share = np.array([each.clock_share for each in modules])[:, None]
        speed = self._cluster.speed(np.broadcast_to(ranks, shape), at) * self._clock[stage]
        memory = 1 + (self._memory[stage] - 1) * (1.1 - clock_share)
        work = work * (1 + (speed - 1) * clock_share) * memory
        self._passes[-1][stage] += work.sum(axis=0)
        return work, launched

    def _stall(self, stage: int, launched: Floats) -> None:
        """Hold up the launches during which a host thread stalls; a stall while it waits costs
        what is left of it.
        """
        for local, rank in enumerate(self._ranks[stage]):
            pending = self._stalls.get(int(rank), [])
            while pending and pending[0].start_ns <= launched[-1, local]:
                stall = pending.pop(0)
                self._one_stall(stage, local, launched, stall)

    def _one_stall(self, stage: int, local: int, launched: Floats, stall: Stall) -> None:
        begun = self._host[stage, local]
        if stall.start_ns < begun:
            launched[:, local] += max(0.0, stall.start_ns + stall.duration_ns - begun)
        else:
            launched[launched[:, local] >= stall.start_ns, local] += stall.duration_ns
        if stall.collection:
            size = self._job.num_stage_ranks
            start = np.full(size, stall.start_ns)
            self._add(
                stage, "gc", "gc-generation-2", HOST, start=start,
                end=start + stall.duration_ns, only=(local,), detail=True,
            )  # fmt: skip

    def _pass(self, stage: int, action: Pass) -> None:
        """Run one microbatch through one chunk, module by module, meeting groups on the way."""
        modules = self._modules(stage, action)
        work, launched = self._costs(stage, action, modules)
        jitter = self._draws[stage].random(work.shape) * 2e3
        starts, ends = np.empty_like(work), np.empty_like(work)
        free = self._gpu[stage]
        for row, module in enumerate(modules):
            starts[row] = np.maximum(free, launched[row] + _LATENCY_NS)
            free = starts[row]
            if module.before:
                free = self._meet(stage, module, free, before=True)
            free = free + work[row]
            if module.after:
                free = self._meet(stage, module, free, before=False)
            free = free + jitter[row]
            ends[row] = free
        self._finish_pass(stage, action, _Times(modules, starts, ends, launched))

    def _modules(self, stage: int, action: Pass) -> list[Module]:
        if action.forward:
            return self._job.forward_modules(stage, action.chunk)
        return self._job.backward_modules(stage, action.chunk)

    def _meet(self, stage: int, module: Module, arrived: Floats, *, before: bool) -> Floats:
        """Return when all have left the collective that a module begins or ends with."""
        job = self._job
        axis = module.before if before else module.after
        if axis == "ep":
            op, members, recorded = "all_to_all", job.ep, job.ep_recorded
            size_bytes = 2 * job.message_bytes
        else:
            gathered = "all_gather" if before else "reduce_scatter"
            op, members, recorded = (
                gathered if job.sequence_parallel else "all_reduce",
                job.tp,
                job.tp_recorded,
            )
            size_bytes = job.message_bytes
        volume = size_bytes * (members - 1) / members * (2 if op == "all_reduce" else 1)
        transfer = (volume / self._rate[stage, axis] + 9e3) * (
            1 + 0.04 * self._draws[stage].gamma(1.0)
        )
        ends = group_max(job, axis, arrived) + transfer
        if recorded:
            self._collective(
                stage, op, axis, size_bytes=size_bytes, starts=arrived, ends=ends, detail=True
            )
        return ends

    def _collective(
        self, stage: int, op: str, axis: str, *, size_bytes: float, starts: Floats, ends: Floats,
        track: int = COMMUNICATION, detail: bool = False,
    ) -> None:  # fmt: skip
        sequence = 0 if axis == "mp" else self._next(stage, axis, op)
        self._add(
            stage, "collective", op, track, start=starts, end=ends, axis=axis, detail=detail,
            arguments=f'"op":"{op}","sequence":{sequence},"size_bytes":{int(size_bytes)}',
        )  # fmt: skip

    def _finish_pass(self, stage: int, action: Pass, times: _Times) -> None:
        self._gpu[stage] = times.ends[-1]
        self._host[stage] = times.launched[-1]
        phase = "forward" if action.forward else "backward"
        where = f'"microbatch":{action.microbatch},"chunk":{action.chunk},"phase":"{phase}"'
        self._add(
            stage, "compute", phase, COMPUTE, start=times.starts[0], end=times.ends[-1],
            arguments=where, launch=times.launched[0],
        )  # fmt: skip
        if self._files and self._job.granularity == "full":
            self._add_modules(stage, times, where, "" if action.forward else "-backward")
        reduces = self._job.overlap_gradients or self._job.style == "ddp"
        if reduces and not action.forward and action.microbatch == self._job.num_microbatches - 1:
            layers = [
                range_ for range_ in _ranges(times.modules) if times.modules[range_[0]].layer > 0
            ]
            self._buckets[stage] += [times.ends[last] for _, last in layers]

    def _add_modules(self, stage: int, times: _Times, where: str, suffix: str) -> None:
        """Add what the tracer sees in a pass: layers and their modules, nothing of Mamba's."""
        for first, last in _ranges(times.modules):
            module = times.modules[first]
            layer = f',"layer":{module.layer}' if module.layer > 0 else ""
            for name, begin, end in _named(times.modules, first, last, suffix):
                self._add(
                    stage, "compute", name + suffix, COMPUTE, start=times.starts[begin],
                    end=times.ends[end], arguments=where + layer, launch=times.launched[begin],
                )  # fmt: skip

    def _sharded_pass(self, stage: int, action: Pass) -> None:
        """Run a pass of FSDP: a layer's weights are gathered while the one before computes,
        gradients scattered after.
        """
        job = self._job
        modules = self._modules(stage, action)
        work, launched = self._costs(stage, action, modules)
        starts, ends = np.empty_like(work), np.empty_like(work)
        share = job.gradient_bytes / (job.layers * job.vpp)
        volume = share * (job.dp - 1) / job.dp
        free, gathered, scattered = self._gpu[stage], self._gpu[stage], self._gpu[stage]
        may_gather = np.maximum(self._gpu[stage], self._host[stage])
        for row, module in enumerate(modules):
            transfer = (volume / self._rate[stage, "dp"] + 15e3) * (
                1 + 0.04 * self._draws[stage].gamma(1.0, size=2)
            )[:, None]
            there = free
            if module.before == "fsdp":
                begin = np.maximum(gathered, may_gather)
                gathered = there = group_max(job, "dp", begin) + transfer[0]
                self._collective(
                    stage,
                    "all_gather",
                    "dp",
                    size_bytes=share / job.dp,
                    starts=begin,
                    ends=gathered,
                    track=OVERLAPPED,
                )
            starts[row] = np.maximum(np.maximum(free, launched[row] + _LATENCY_NS), there)
            may_gather = starts[row]
            free = ends[row] = starts[row] + work[row]
            if module.before == "fsdp" and not action.forward:
                begin = np.maximum(free, scattered)
                scattered = group_max(job, "dp", begin) + transfer[1]
                self._collective(
                    stage,
                    "reduce_scatter",
                    "dp",
                    size_bytes=share,
                    starts=begin,
                    ends=scattered,
                    track=OVERLAPPED,
                )
        self._finish_pass(stage, action, _Times(modules, starts, ends, launched))
        self._scattered = scattered

    # -- after the passes ------------------------------------------------------------------------

    def _update(self, draws: np.random.Generator) -> None:
        """Reduce gradients, agree on their norm over the whole model, update the weights."""
        job = self._job
        for stage in range(job.pp):
            begin = self._gpu[stage].copy()
            self._gpu[stage] = self._reduced(stage, begin + 0.2 * MS, draws)
            self._add(stage, "optimizer", "grad-sync", COMPUTE, start=begin, end=self._gpu[stage])
        begin = self._gpu.copy()
        self._agree_on_norm()
        work = (
            0.02
            * job.nominal_iteration_ns
            / (job.dp if job.distributed_optimizer or job.style == "fsdp" else 1)
        )
        slower = 1 + (self._cluster.speed(self._ranks, self._gpu) * self._clock - 1) * 0.3
        slower *= self._memory * self._cluster.chip[self._ranks] * self._weather.chip[self._ranks]
        self._gpu += work * slower * draws.gamma(400.0, 1 / 400.0, size=self._gpu.shape)
        for stage in range(job.pp):
            if job.distributed_optimizer and job.dp > 1:
                self._gather_weights(stage, draws)
            self._add(
                stage, "optimizer", "optimizer", COMPUTE, start=begin[stage], end=self._gpu[stage]
            )

    def _reduced(self, stage: int, ready: Floats, draws: np.random.Generator) -> Floats:
        """Return when the gradients of a stage are reduced."""
        job = self._job
        if job.style == "fsdp":
            return np.asarray(np.maximum(ready, self._scattered))
        if job.dp == 1:
            return ready
        op = "reduce_scatter" if job.distributed_optimizer else "all_reduce"
        axis = "dp" if job.style == "ddp" else "dp_cp"
        buckets = self._buckets[stage] or [ready]
        share = job.gradient_bytes / len(buckets)
        volume = share * (job.dp - 1) / job.dp * (1 if job.distributed_optimizer else 2)
        free = buckets[0]
        for bucket in buckets:
            begin = np.maximum(bucket, free)
            transfer = (volume / self._rate[stage, "dp"] + 20e3) * (1 + 0.03 * draws.gamma(1.0))
            free = group_max(job, "dp", begin) + transfer
            track = OVERLAPPED if self._buckets[stage] else COMMUNICATION
            self._collective(
                stage, op, axis, size_bytes=share, starts=begin, ends=free, track=track
            )
        return np.asarray(np.maximum(ready, free))

    def _agree_on_norm(self) -> None:
        """Meet all ranks of a replica of the model: the norm of its gradients is a sum over
        them.
        """
        job = self._job
        if job.tp * job.pp == 1:
            return
        arrived = self._gpu + 0.05 * MS
        by_replica = arrived.reshape(job.pp, job.dp, job.tp).max(axis=(0, 2)) + 40e3
        ends = np.broadcast_to(np.repeat(by_replica, job.tp), arrived.shape).copy()
        for stage in range(job.pp):
            self._collective(
                stage,
                "all_reduce",
                "mp",
                size_bytes=4,
                starts=arrived[stage],
                ends=ends[stage],
                detail=True,
            )
        self._gpu = ends

    def _gather_weights(self, stage: int, draws: np.random.Generator) -> None:
        job = self._job
        size_bytes = job.gradient_bytes / 2 / job.dp
        transfer = (
            size_bytes * (job.dp - 1) / self._rate[stage, "dp"] * (1 + 0.03 * draws.gamma(1.0))
        )
        arrived = self._gpu[stage].copy()
        self._gpu[stage] = group_max(job, "dp", arrived) + transfer + 20e3
        self._collective(
            stage,
            "all_gather",
            "dp_cp",
            size_bytes=size_bytes,
            starts=arrived,
            ends=self._gpu[stage],
        )

    def _checkpoint(self, iteration: int) -> None:
        """Save a checkpoint to the shared file server; the slowest writer ends it for all."""
        draws = np.random.default_rng([self._cluster.seed, _ITERATION_STREAM, iteration, 1])
        begin = self._gpu.copy()
        took = 3 * self._job.nominal_iteration_ns * self._weather.file_server
        end = begin + took * draws.gamma(60.0, 1 / 60.0, size=begin.shape)
        for stage in range(self._job.pp):
            self._add(
                stage,
                "checkpoint",
                "save-checkpoint",
                HOST,
                start=begin[stage],
                end=end[stage],
                detail=True,
            )
        self._gpu[:] = self._host[:] = end.max()

    # -- spans -----------------------------------------------------------------------------------

    def _next(self, *key: object) -> int:
        number = self._sequence.get(key, 0)
        self._sequence[key] = number + 1
        return number

    def _add(
        self, stage: int, kind: str, name: str, track: int, *, start: Floats, end: Floats,
        arguments: str = "", launch: Floats | None = None, axis: str = "", peer_offset: int = 0,
        only: tuple[int, ...] | None = None, detail: bool = False,
    ) -> None:  # fmt: skip
        """Keep a span for the files; `detail` is what granularity `base` leaves out."""
        full = self._job.granularity == "full"
        if self._files is None or (detail and not full):
            return
        if kind == "collective":  # members see the end of one a little apart
            end = end - self._late.random(len(end)) * 4e3
        if kind != "checkpoint":  # which is saved between iterations
            arguments = f'"iteration":{self._now}' + ("," if arguments else "") + arguments
        if launch is not None:  # read from a clock tied to the GPU's within a microsecond or two
            launch = launch + self._late.normal(0, 1.2e3, size=len(launch))
        self._spans[stage].append(
            Spans(
                kind=kind, name=name, track=track, start=start.copy(), end=end.copy(),
                arguments=arguments, launch=launch if full else None, axis=axis,
                peer_offset=peer_offset, only=only,
            )
        )  # fmt: skip


def _ranges(modules: list[Module]) -> list[tuple[int, int]]:
    """Return (first, last) of the modules of each layer, and of each module outside of layers."""
    places = [0]
    for row in range(1, len(modules)):
        if modules[row].layer < 0 or modules[row].layer != modules[row - 1].layer:
            places.append(row)
    return list(zip(places, [each - 1 for each in [*places[1:], len(modules)]], strict=True))


def _named(modules: list[Module], first: int, last: int, suffix: str) -> list[tuple[str, int, int]]:
    """Return (name, first module, last module) of the spans that a tracer makes of one layer."""
    module = modules[first]
    if module.layer < 0:
        return [] if module.name + suffix == "loss-backward" else [(module.name, first, last)]
    if module.name == "layer":
        return [("layer", first, last)]
    if module.name == "mamba":
        return []
    found = [("transformer_layer", first, last)]
    names = [each.name for each in modules]
    for row in range(first, last + 1):
        if names[row] in ("attention", "mlp"):
            found.append((names[row], row, row))
        elif row < last and {names[row], names[row + 1]} == {"router", "experts"}:
            found.append(("moe", row, row + 1))
    return found
