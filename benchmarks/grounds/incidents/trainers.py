"""Run an iteration as trainers do: Megatron-Core's schedules, FSDP, HSDP and DDP on plain PyTorch.

Each is a program of a stage: it yields where it has to wait for another stage's program.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from benchmarks.grounds.incidents.engine import Mark, Program, Spec, Stage
from benchmarks.grounds.incidents.hardware import Floats
from benchmarks.grounds.incidents.jobs import DDP, HSDP, PYTHON, RECOMPUTE, Job
from benchmarks.grounds.incidents.model import BYTES, Work
from benchmarks.grounds.incidents.schedule import BACKWARD, FORWARD, Pass

_LAYERS_A_BUCKET = 4
_READ_S = 1.2e-3
_MOST_HEADS_BYTES = 1 << 30


class Data:
    """What the data make of the work of one iteration: lengths of sequences, loads of experts."""

    def __init__(self, job: Job, iteration: int, num_microbatches: int) -> None:
        layout, lanes = job.layout, job.lanes
        rng = np.random.default_rng([job.seed, 11, iteration])
        lengths = np.exp(job.lengths * rng.standard_normal((num_microbatches, layout.dp)))
        self.lengths = np.repeat(lengths, layout.tp * layout.cp, axis=1)
        layers = 1 + max(layer for stage in job.stages for chunk in stage for layer in chunk)
        slow = np.random.default_rng([job.seed, 12])  # what drifts from iteration to iteration
        usual = slow.standard_normal((layers, lanes)) * np.cos(iteration / 9.0)
        now = rng.standard_normal((num_microbatches, layers, lanes))
        self._loads = np.exp(job.routing * (0.8 * usual + 0.6 * now))
        self._ep = layout.ep

    def load(self, microbatch: int, layer: int) -> Floats:
        """Return the share of tokens of each lane's experts, 1: an equal share, (lane,)."""
        load = self._loads[microbatch, layer].reshape(-1, self._ep)
        return np.asarray((load / load.mean(1, keepdims=True)).reshape(-1))


class Trainer:
    """One stage's part of an iteration; the same object runs all iterations."""

    def __init__(self, job: Job, stage: Stage) -> None:
        self.job, self.stage = job, stage
        self.layout, self.model = job.layout, job.model
        self.is_first = stage.number == 0
        self.is_last = stage.number == job.layout.pp - 1
        self.data = Data(job, 0, 1)
        self.recorded: frozenset[int] | None = None
        costs = self.costs = job.costs
        self.costs_tokens = costs.tokens
        self.passed = stage.busy
        self.bytes = costs.activation_bytes
        self.parts = {
            phase: {
                "attention": costs.attention(factor),
                "before": costs.attention(factor)[:3],
                "core": costs.attention(factor)[3:4],
                "after": costs.attention(factor)[4:],
                "mlp": costs.mlp(factor),
                "router": costs.router(),
                "experts": costs.experts(job.layout.ep, factor),
                "head": costs.head(factor),
                "embedding": costs.embedding(),
                "loss": costs.loss(),
            }
            for phase, factor in ((FORWARD, 1.0), (BACKWARD, 2.0), (RECOMPUTE, 1.0))
        }
        own = sum(len(chunk) for chunk in job.stages[stage.number])
        self.layer_bytes = int(self.model.layer_parameters / self.layout.tp) * BYTES
        experts = self.model.experts * self.model.mlp_parameters / max(self.layout.ep, 1)
        self.expert_bytes = int(experts) * BYTES
        ends = self.model.hidden * self.model.vocabulary / self.layout.tp
        self.end_bytes = min(int(ends) * BYTES, _MOST_HEADS_BYTES)
        held = own * (self.layer_bytes + self.expert_bytes) / BYTES
        held += ends * (self.is_first + self.is_last)
        shards = self.layout.dp * self.layout.cp if job.shards_optimizer else 1
        self.update = costs.optimizer(held / shards)
        self.scaling = costs.gradients(held)
        self.norm = costs.gradients(held / shards)[:1]
        self.launch_s = job.cluster.chip.launch_us * 1e-6 * job.host_ahead

    # what every trainer does

    def records(self, layer: int) -> bool:
        """Tell whether this layer's modules are recorded in this iteration."""
        return self.recorded is None or layer in self.recorded

    def run(self, place: int, iteration: int, num_microbatches: int) -> Program:
        """Run an iteration, with marks of its begin and end."""
        stage = self.stage
        self.data = Data(self.job, iteration, num_microbatches)
        stage.begin(iteration)
        stage.enter(place, 0)
        if iteration == 1 and self.job.compiles_s:
            rng = np.random.default_rng([self.job.seed, 13, stage.number])
            stage.pause(self.job.compiles_s * np.exp(0.1 * rng.standard_normal(self.job.lanes)), "")
        begin = stage.mark()
        opened = stage.host
        if self.job.trainer == "megatron":
            yield from self.megatron(place, num_microbatches)
        else:
            self.plain(place, num_microbatches)
        every = self.job.collects_together
        if every and iteration % every == 0:  # --manual-gc: all ranks collect at once
            rng = np.random.default_rng([self.job.seed, 14, stage.number, iteration])
            stage.pause(0.12 * np.exp(0.1 * rng.standard_normal(self.job.lanes)), "gc-generation-2")
        if self.job.syncs_steps:  # the loss is read for the log
            stage.synchronise()
        stage.keep(Spec("iteration", "iteration", 1), begin)
        stage.add_host(Spec("step", "step", 3), opened)
        stage.host = stage.host + 4e-4  # the loop's own: logging, the learning rate

    def load(self, microbatch: int, chunk: int, spans_as: str) -> None:
        """Take the next batch: wait until workers have it, and copy it."""
        stage = self.stage
        begin = stage.host
        period = self.job.loader_share * self.period_s * stage.rates["loader"]
        period = period * stage.rates["storage"]
        if self.layout.tp > 1:  # one rank of a TP group reads, and sends the batch to the others
            period = period * (np.arange(self.job.lanes) % self.layout.tp == 0)
        come = np.maximum(stage.host, stage.loaded)
        stage.loaded = np.maximum(stage.loaded, begin - self.job.loader_depth * period) + period
        noise = np.exp(0.3 * stage._draws("read", 1.0))
        stage.host = come + _READ_S * noise * stage.rates["host"]
        if self.layout.tp > 1:
            for size in (8 * self.costs_tokens, 16 * self.costs_tokens):
                spec = Spec("collective", "broadcast", 2, microbatch, chunk, -1, FORWARD)
                spec = spec._replace(op="broadcast", axis="tp", size=size)
                stage.collective(spec, size)
        if self.job.copies_block:
            stage.synchronise()
        stage.add_host(Spec("data", spans_as, 3, microbatch, chunk), begin)

    @property
    def period_s(self) -> float:
        """Return about how long a microbatch takes on a stage."""
        layers = sum(len(chunk) for chunk in self.job.stages[self.stage.number])
        parts = self.parts[FORWARD]
        work = (*parts["attention"], *(parts["experts" if self.model.experts else "mlp"]))
        return 3.2 * layers * sum(one.flop_s + one.memory_s for one in work)

    def part(self, work: Work, scale: Floats | float, phase: str, spec: Spec, marked: bool) -> None:
        """Run a module's kernels, as a span where `marked`."""
        stage = self.stage
        since = stage.mark() if marked else None
        stage.compute(work, self.launch_s * PYTHON[phase], scale, spec)
        if since is not None:
            stage.keep(spec, since)

    def close(self, spec: Spec, since: Mark, marked: bool = True) -> None:
        """Keep a span of modules if it is recorded."""
        if marked:
            self.stage.keep(spec, since)

    def named(self, name: str, phase: str) -> str:
        """Return a module's name in a pass."""
        return name if phase == FORWARD else f"{name}-{phase}"

    # Megatron-Core

    def megatron(self, place: int, num_microbatches: int) -> Program:
        """Run a pipeline's iteration."""
        stage = self.stage
        passes = self.job.passes(stage.number, num_microbatches)
        size = self.bytes // (self.layout.tp if self.costs.sequence_parallel else 1)
        seen = dict.fromkeys(range(self.layout.vpp), 0)
        stage.post(passes[0].receives, size, passes[0].chunk)
        for number, one in enumerate(passes):
            stage.enter(place, number)
            yield from stage.exchange(one.before, size, one.chunk)
            yield from stage.receive(one.receives, size)
            if number + 1 < len(passes):
                following = passes[number + 1]
                stage.post(following.receives, size, following.chunk)
            if one.direction == FORWARD:
                self.forward(one, first=one.microbatch == 0)
            else:
                seen[one.chunk] += 1
                self.backward(one, last=seen[one.chunk] == num_microbatches)
            stage.post(one.sends, size, one.chunk)
            yield from stage.exchange(one.after, size, one.chunk)
        stage.enter(place, self.job.num_passes - 1)
        self.passed = stage.busy.copy()
        yield from self.finish_gradients()
        yield from self.step()

    def scale(self, microbatch: int) -> Floats:
        """Return how much work this microbatch is, (variant, lane)."""
        if self.job.packs:
            return np.ones_like(self.stage.host)
        return np.asarray(self.data.lengths[microbatch] * self.stage.rates["work"])

    def attend(self, scale: Floats, phase: str, spec: Spec) -> None:
        """Run attention's kernels: where documents are packed, their lengths decide its core's."""
        parts = self.parts[phase]
        if not self.job.packs:
            self.part(parts["attention"], scale, phase, spec, False)
            return
        core = self.data.lengths[spec.microbatch] * self.stage.rates["work"]
        self.part(parts["before"], scale, phase, spec, False)
        self.part(parts["core"], core, phase, spec, False)
        self.part(parts["after"], scale, phase, spec, False)

    def forward(self, one: Pass, *, first: bool) -> None:
        """Run the forward pass of a chunk."""
        stage, chunk, microbatch = self.stage, one.chunk, one.microbatch
        begin = stage.mark()
        opens = self.is_first and chunk == 0
        closes = self.is_last and chunk == self.layout.vpp - 1
        spec = Spec("compute", "forward", 1, microbatch, chunk, -1, FORWARD)
        if opens or closes:
            self.load(microbatch, chunk, "batch-generator")
        scale = self.scale(microbatch)
        if opens:
            embed = spec._replace(name="embedding")
            self.part(self.parts[FORWARD]["embedding"], scale, FORWARD, embed, True)
            for _ in range(self.model.encoder_layers):  # the encoder's layers are not told apart
                self.part(self.parts[FORWARD]["attention"], scale, FORWARD, spec, False)
                self.part(self.parts[FORWARD]["mlp"], scale, FORWARD, spec, False)
        for place, layer in enumerate(self.job.stages[stage.number][chunk]):
            if first and self.job.overlaps_parameters and place % _LAYERS_A_BUCKET == 0:
                self.gather_parameters(spec, f"gather{place // _LAYERS_A_BUCKET}")
                stage.wait("dp")
            self.layer(spec, layer, scale, FORWARD)
        if closes:
            self.head(spec, scale, FORWARD)
        stage.keep(spec, begin)

    def head(self, spec: Spec, scale: Floats, phase: str) -> None:
        """Run the output layer and the loss, or their backward."""
        head = spec._replace(name=self.named("output_layer", phase))
        if phase == FORWARD and self.model.teacher_share:  # the teacher's logits come first
            work = self.parts[FORWARD]["mlp"]
            times = max(1, round(self.model.teacher_share * self.model.layers))
            for _ in range(times):
                self.part(work, scale, FORWARD, spec, False)
        self.part(self.parts[phase]["head"], scale, phase, head, True)
        loss = self.parts[phase]["loss"]
        if phase == BACKWARD:
            self.part(loss, scale, phase, spec, False)
            return
        for _ in range(3):  # maximum, sum and the target's logit of a vocabulary in parts
            size = 4 * self.costs_tokens
            self.gathered(spec, "all_reduce", "tp", (size, size))
        self.part(loss, scale, phase, spec._replace(name="loss"), True)

    def gathered(
        self, spec: Spec, op: str, axis: str, sizes: tuple[int, int], stream: str = ""
    ) -> None:
        """Run a collective of a pass; `sizes` are those of the whole and of what a rank gives."""
        whole, own = sizes
        call = spec._replace(
            kind="collective", name=op, op=op, axis=axis, size=own, track=4 if stream else 2
        )
        self.stage.collective(call, whole, stream=stream)

    def gather_parameters(self, spec: Spec, _bucket: str) -> None:
        """Gather a bucket's parameters beside computing, before the first microbatch needs them."""
        size = self.layer_bytes * _LAYERS_A_BUCKET
        ranks = self.layout.dp * self.layout.cp
        self.gathered(spec, "all_gather", "dp_cp", (size, size // max(ranks, 1)), stream="dp")

    def around(self, spec: Spec, phase: str, *, opens: bool) -> None:
        """Run the tensor-parallel collective before or after a module."""
        if self.layout.tp < 2:
            return
        whole, own = self.bytes, self.bytes // self.layout.tp
        if not self.costs.sequence_parallel:
            if not opens:
                self.gathered(spec, "all_reduce", "tp", (whole, whole))
        elif opens:
            self.gathered(spec, "all_gather", "tp", (whole, own))
        elif phase == BACKWARD or self.job.async_tp:
            self.gathered(spec, "reduce_scatter", "tp", (whole, whole), stream="tp")
            self.stage.wait("tp")
        else:
            self.gathered(spec, "reduce_scatter", "tp", (whole, whole))

    def layer(self, spec: Spec, layer: int, scale: Floats, phase: str) -> None:
        """Run one layer's pass: attention and MLP, or the other way round backward."""
        marked = self.records(layer)
        inner = spec._replace(layer=layer if marked and phase != BACKWARD else -1, phase=phase)
        since = self.stage.mark()
        second = self.experts if self.model.experts else self.mlp
        order = (self.attention, second)
        for part in order if phase != BACKWARD else order[::-1]:
            part(inner, layer, scale, phase, marked)
        whole = spec._replace(name=self.named("transformer_layer", phase), layer=layer, phase=phase)
        self.close(whole, since, marked)

    def attention(self, spec: Spec, layer: int, scale: Floats, phase: str, marked: bool) -> None:
        """Run attention, with its collectives over TP and CP."""
        since = self.stage.mark()
        self.around(spec, phase, opens=True)
        if self.layout.cp > 1:  # keys and values of all parts of the sequence (Llama 3, section 3)
            own = int(2 * self.bytes * self.model.kv_share / self.layout.tp)
            op = "reduce_scatter" if phase == BACKWARD else "all_gather"
            whole = own * self.layout.cp
            self.gathered(spec, op, "cp", (whole, whole if phase == BACKWARD else own))
        self.attend(scale, phase, spec)
        self.around(spec, phase, opens=False)
        self.close(spec._replace(name=self.named("attention", phase), layer=layer), since, marked)

    def mlp(self, spec: Spec, layer: int, scale: Floats, phase: str, marked: bool) -> None:
        """Run an MLP."""
        since = self.stage.mark()
        self.around(spec, phase, opens=True)
        self.part(self.parts[phase]["mlp"], scale, phase, spec, False)
        self.around(spec, phase, opens=False)
        self.close(spec._replace(name=self.named("mlp", phase), layer=layer), since, marked)

    def experts(self, spec: Spec, layer: int, scale: Floats, phase: str, marked: bool) -> None:
        """Route tokens to experts, run those, and bring tokens back."""
        stage = self.stage
        since = stage.mark()
        load = self.data.load(spec.microbatch, layer) * stage.rates["experts"]
        share = self.layout.tp if self.costs.sequence_parallel else 1
        sent = int(self.bytes * self.model.top_k / share)
        back = (sent * load[0]).astype(np.int64)
        if phase != BACKWARD:
            self.part(self.parts[phase]["router"], scale, phase, spec, False)
        there = partial(self._exchange_tokens, spec, float(load.max()))
        there(sent, None)
        self.part(self.parts[phase]["experts"], scale * load, phase, spec, False)
        there(sent, back)
        if phase == BACKWARD:
            self.part(self.parts[phase]["router"], 2 * scale, phase, spec, False)
        self.close(spec._replace(name=self.named("moe", phase), layer=layer), since, marked)

    def _exchange_tokens(self, spec: Spec, most: float, sent: int, sizes: object) -> None:
        """Send tokens to the ranks of their experts: the fullest rank's link takes longest."""
        call = spec._replace(kind="collective", name="all_to_all", op="all_to_all", axis="ep")
        call = call._replace(size=sent, track=2)
        own = sizes if isinstance(sizes, np.ndarray) else None
        self.stage.collective(call, sent * most, sizes=own)

    def backward(self, one: Pass, *, last: bool) -> None:
        """Run the backward pass of a chunk; with the last microbatch gradients are reduced."""
        stage, chunk, microbatch = self.stage, one.chunk, one.microbatch
        scale = self.scale(microbatch)
        spec = Spec("compute", "backward", 1, microbatch, chunk, -1, BACKWARD)
        begin = stage.mark()
        if self.is_last and chunk == self.layout.vpp - 1:
            self.head(spec, scale, BACKWARD)
        layers = self.job.stages[stage.number][chunk]
        for place, layer in enumerate(reversed(layers)):
            if self.job.recompute:
                self.layer(spec, layer, scale, RECOMPUTE)
            self.layer(spec, layer, scale, BACKWARD)
            ends_bucket = (place + 1) % _LAYERS_A_BUCKET == 0 or place == len(layers) - 1
            if last and self.job.overlaps_gradients and ends_bucket:
                self.reduce(spec, min(_LAYERS_A_BUCKET, place + 1), "dp")
        if self.is_first and chunk == 0:
            for _ in range(self.model.encoder_layers):
                self.part(self.parts[BACKWARD]["attention"], scale, BACKWARD, spec, False)
                self.part(self.parts[BACKWARD]["mlp"], scale, BACKWARD, spec, False)
            embed = spec._replace(name="embedding-backward")
            self.part(self.parts[BACKWARD]["embedding"], scale, BACKWARD, embed, True)
        stage.keep(spec, begin)

    def reduce(self, spec: Spec, num_layers: int, stream: str) -> None:
        """Reduce the gradients of some layers over their replicas, in fp32 as Megatron does."""
        op = "reduce_scatter" if self.job.shards_optimizer else "all_reduce"
        size = 2 * self.layer_bytes * num_layers
        self.gathered(spec, op, "dp_cp", (size, size), stream=stream)
        if self.model.experts:
            size = 2 * self.expert_bytes * num_layers
            expert_stream = f"{stream}-experts" if stream else ""
            self.gathered(spec, op, "expt_dp", (size, size), stream=expert_stream)

    def finish_gradients(self) -> Program:
        """Wait for gradients, or reduce them, and those of tied embeddings."""
        stage = self.stage
        since = stage.mark()
        spec = Spec("compute", "", 1)
        if self.job.overlaps_gradients:
            stage.wait("dp")
            stage.wait("dp-experts")
        else:
            layers = sum(len(chunk) for chunk in self.job.stages[stage.number])
            self.reduce(spec, layers, "")
        stage.compute(self.scaling, self.launch_s * 4, 1.0, Spec("optimizer", "", 1))
        if self.layout.pp > 1 and (self.is_first or self.is_last):
            last = self.layout.pp - 1
            seconds = self.end_bytes * 2 / self.job.cluster.nic_bytes_per_s
            size = self.end_bytes * 2
            call = Spec("collective", "all_reduce", 2, op="all_reduce", axis="embd", size=size)
            yield from stage.meet(call, "embd", (0, last), "", seconds)
        stage.keep(Spec("optimizer", "grad-sync", 1), since)

    def step(self) -> Program:
        """Step the optimizer: the norm of gradients over all ranks first, for which hosts wait."""
        stage = self.stage
        since = stage.mark()
        opened = stage.host
        axis = "world" if self.job.shards_optimizer else "mp"
        name = "intra_dist_opt" if self.job.shards_optimizer else "mp"
        call = Spec("collective", "all_reduce", 2, op="all_reduce", axis=name, size=4)
        stage.compute(self.norm, self.launch_s * 4, 1.0, Spec("optimizer", "", 1))
        members = self.job.num_ranks if axis == "world" else self.layout.tp * self.layout.pp
        if members > 1:
            lanes = "all" if axis == "world" else "tp"
            stages = range(self.layout.pp)
            yield from stage.meet(call, "norm", stages, lanes, 9e-5)
        stage.synchronise()
        spec = Spec("optimizer", "optimizer", 1)
        self.stage.compute(self.update, self.launch_s * 4, 1.0, spec)
        if self.job.shards_optimizer and not self.job.overlaps_parameters:
            layers = sum(len(chunk) for chunk in self.job.stages[stage.number])
            size, ranks = self.layer_bytes * layers, self.layout.dp * self.layout.cp
            self.gathered(Spec("compute", "", 1), "all_gather", "dp_cp", (size, size // ranks))
        stage.keep(spec, since)
        stage.add_host(Spec("step", "optimizer", 3), opened)

    # plain PyTorch

    def plain(self, place: int, num_microbatches: int) -> None:
        """Run an iteration of FSDP2, HSDP or DDP."""
        stage = self.stage
        for microbatch in range(num_microbatches):
            stage.enter(place, 2 * microbatch)
            self.load(microbatch, 0, "batch-generator")
            spec = Spec("compute", "forward", 1, microbatch, 0, -1, FORWARD)
            scale = self.scale(microbatch)
            self._plain_forward(spec, scale)
            stage.enter(place, 2 * microbatch + 1)
            syncs = not self.job.accumulates_alone or microbatch == num_microbatches - 1
            self._plain_backward(spec, scale, syncs)
        stage.enter(place, self.job.num_passes - 1)
        self.passed = stage.busy.copy()
        since = stage.mark()
        opened = stage.host
        axis = "dp" if self.job.trainer != HSDP else "shard"
        if self.job.trainer != DDP:
            call = Spec("collective", "all_reduce", 2, op="all_reduce", axis=axis, size=4 * 12)
            stage.collective(call, 48)
            stage.synchronise()
            since = stage.mark()
        spec = Spec("optimizer", "optimizer", 1)
        stage.compute(self.update, self.launch_s * 4, 1.0, spec)
        stage.keep(spec, since)
        stage.add_host(Spec("step", "optimizer", 3), opened)

    @property
    def _shard_axis(self) -> str:
        return "shard" if self.job.trainer == HSDP else "dp"

    def _unit(self, spec: Spec, op: str, num_bytes: int, axis: str, after: str = "") -> None:
        """Run a collective of one FSDP unit on a stream of its own."""
        ranks = self.stage.groups.size(axis)
        own = num_bytes // ranks if op == "all_gather" else num_bytes
        call = spec._replace(kind="collective", name=op, op=op, axis=axis, size=own, track=4)
        stream = "gather" if op == "all_gather" else "reduce"
        self.stage.collective(call, num_bytes, stream=stream, after=after)

    def _plain_layer(self, spec: Spec, layer: int, scale: Floats, phase: str) -> None:
        parts = self.parts[phase]
        whole = spec._replace(name=self.named("layer", phase), layer=layer, phase=phase)
        since = self.stage.mark()
        inner = spec._replace(phase=phase)
        self.attend(scale, phase, inner)
        self.part(parts["mlp"], scale, phase, inner, False)
        self.close(whole, since, self.records(layer))

    def _plain_forward(self, spec: Spec, scale: Floats) -> None:
        stage, layers = self.stage, self.job.stages[0][0]
        sharded = self.job.trainer != DDP
        begin = stage.mark()
        if sharded:
            self._unit(spec._replace(microbatch=-1), "all_gather", self.end_bytes, self._shard_axis)
            self._unit(spec, "all_gather", self.layer_bytes, self._shard_axis)
        self.part(self.parts[FORWARD]["embedding"], scale, FORWARD, spec, False)
        for place, layer in enumerate(layers):
            if sharded:
                stage.wait("gather")
                if place + 1 < len(layers):  # the next unit comes while this one computes
                    self._unit(spec, "all_gather", self.layer_bytes, self._shard_axis)
            self._plain_layer(spec, layer, scale, FORWARD)
        self.part(self.parts[FORWARD]["head"], scale, FORWARD, spec, False)
        self.part(self.parts[FORWARD]["loss"], scale, FORWARD, spec, False)
        stage.keep(spec, begin)

    def _plain_backward(self, forward: Spec, scale: Floats, syncs: bool) -> None:
        stage, layers = self.stage, self.job.stages[0][0]
        sharded = self.job.trainer != DDP
        spec = forward._replace(name="backward", phase=BACKWARD)
        begin = stage.mark()
        self.part(self.parts[BACKWARD]["loss"], scale, BACKWARD, spec, False)
        self.part(self.parts[BACKWARD]["head"], scale, BACKWARD, spec, False)
        for place, layer in enumerate(reversed(layers)):
            if sharded and place:
                stage.wait("gather")
            if sharded and place + 1 < len(layers):
                self._unit(spec, "all_gather", self.layer_bytes, self._shard_axis)
            if self.job.recompute:
                self._plain_layer(spec, layer, scale, RECOMPUTE)
            self._plain_layer(spec, layer, scale, BACKWARD)
            if sharded:
                self._reduce_unit(spec, self.layer_bytes)
            elif syncs and (place % _LAYERS_A_BUCKET == _LAYERS_A_BUCKET - 1):
                self._unit(spec, "all_reduce", self.layer_bytes * _LAYERS_A_BUCKET, "dp")
        stage.keep(spec, begin)
        since = stage.mark()
        if sharded:
            self._reduce_unit(spec, self.end_bytes)
        elif syncs:
            self._unit(spec, "all_reduce", self.end_bytes, "dp")
        stage.wait("reduce")
        stage.keep(Spec("optimizer", "grad-sync", 1), since)

    def _reduce_unit(self, spec: Spec, num_bytes: int) -> None:
        self._unit(spec, "reduce_scatter", 2 * num_bytes, self._shard_axis)
        if self.job.trainer == HSDP:
            shard = self.stage.groups.size("shard")
            self._unit(spec, "all_reduce", 2 * num_bytes // shard, "replicate")
