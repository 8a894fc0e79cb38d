"""Say what one rank does in an iteration: batches, layers, gradients, the optimizer's step."""

from __future__ import annotations

import numpy as np

from benchmarks.grounds.yard.engine import Exchange, Meeting, Running
from benchmarks.grounds.yard.jobs import Cost, Job, Load, costs_of
from benchmarks.grounds.yard.launching import BEGIN_S, LAUNCH_LATENCY_S, Arguments, Launcher
from benchmarks.grounds.yard.network import Ranks
from benchmarks.grounds.yard.schedule import Message, steps_of
from benchmarks.grounds.yard.trouble import Condition

_PARAMETER_BUCKETS = 3


class Loader:
    """Workers that read ahead for one rank: each has two batches in hand at most."""

    def __init__(self, job: Job, rng: np.random.Generator, now: float) -> None:
        self._job = job
        self._rng = rng
        self._ready = [now] * job.loader_workers
        self._taken = [now] * job.loader_workers

    def take(self, now: float, factor: float) -> float:
        """Return when the next batch is there for somebody who asks now."""
        number, workers = len(self._taken), self._job.loader_workers
        spread = self._job.storage_spread
        seconds = self._job.loader_s * float(np.exp(spread * self._rng.normal()))
        begin = self._ready[number - workers]
        if number >= 2 * workers:
            begin = max(begin, self._taken[number - 2 * workers])
        self._ready.append(begin + seconds * factor)
        self._taken.append(max(now, self._ready[-1]))
        return self._taken[-1]

    def skip(self, seconds: float) -> None:
        """Pass over iterations that are not traced: what was read ahead stays as it was."""
        self._ready = [each + seconds for each in self._ready]
        self._taken = [each + seconds for each in self._taken]


class Rank(Launcher):
    """One rank of a job, iteration after iteration."""

    def __init__(self, job: Job, load: Load, rank: int, seed: int, *, recording: bool) -> None:
        super().__init__(job, rank, seed, recording=recording)
        self.place = job.layout.coordinates(rank)
        self.costs = costs_of(job)
        self.backward_costs = {name: cost.backward() for name, cost in self.costs.items()}
        begin = BEGIN_S - 2 * job.loader_s
        self.loader = Loader(job, np.random.default_rng([seed, rank, 4]), begin)
        self.work_s = 0.0  # of its passes in this iteration, waiting and communication left out
        self._load = load
        self._is_last = self.place.pp == job.pp - 1
        self._reducing = "reduce_scatter" if job.distributed_optimizer else "all_reduce"
        shared = job.everyone_loads or self.place.tp == 0
        self._loads = shared and (self.place.pp == 0 or self._is_last)

    def iteration(self, place: int, number: int, condition: Condition, meet: Exchange) -> Running:
        """Run one iteration, the `place`-th that is traced."""
        self._begin(number, condition, meet)
        self._begin_iteration(place)
        opened = self._open()
        for step in steps_of(self.job, self.place.pp):
            if step.what == "forward":
                yield from self._forward(step.microbatch, step.chunk)
            elif step.what == "backward":
                yield from self._backward(step.microbatch, step.chunk)
            elif step.what == "exchange":
                yield from self._exchange(step.messages)
            elif step.what == "post":
                self._post(step.messages[0])
            else:
                yield from self._wait(self._posted[step.messages[0]])
        yield from self._grad_sync()
        yield from self._optimizer()
        self.host = max(self.host, self.dev)
        self._close("iteration", "iteration", opened)
        yield from self._finish_beside()

    def _begin_iteration(self, place: int) -> None:
        self._place = place
        num_passes = 2 * self.job.num_microbatches * self.job.vpp
        lucks = np.random.default_rng([self._seed, self.rank, self._number, 13])
        self._lucks = lucks.normal(size=num_passes).tolist()
        self._num_passes = 0
        self._posted: dict[Message, Meeting] = {}
        self._reductions: list[Meeting] = []

    def _describe_message(self, message: Message) -> tuple[Ranks, str, Arguments]:
        line = self.groups["pp"]
        peer = line[message.peer_stage(self.place.pp, self.job.pp)]
        ends = (self.rank, peer) if message.is_send else (peer, self.rank)
        op = "send" if message.is_send else "recv"
        sequence = self._sequences[ends, message.direction]
        self._sequences[ends, message.direction] += 1
        arguments: Arguments = {
            "op": op, "direction": message.direction, "peer": peer, "group": f"pp@{line[0]}",
            "sequence": sequence, "size_bytes": self._message_bytes(message.microbatch),
            "microbatch": message.microbatch, "chunk": message.chunk,
        }  # fmt: skip
        return ends, f"{op}_{message.direction}", arguments

    def _message_bytes(self, microbatch: int) -> int:
        split = self.job.tp if self.job.sequence_parallel else 1
        return int(self._activations({"microbatch": microbatch}) / split)

    def _meet_for(self, message: Message, ends: Ranks, moment: float) -> Meeting:
        # The numbers of a message are its own; what a pair has under way holds up the next one.
        direction, microbatch, place = message.key(self.place.pp, self.job.pp)
        return self._meet.join(
            (direction, ends), microbatch * 1024 + place, self.rank, ends, op="message",
            size_bytes=self._message_bytes(microbatch), arrival=moment, noise=self._draw(),
        )  # fmt: skip

    def _exchange(self, messages: tuple[Message, ...]) -> Running:
        """Exchange messages with a neighbour; the host waits for the device afterwards."""
        self.host += 12e-6 * self._at.launch
        opened = self._open()
        told = [self._describe_message(message) for message in messages]
        meetings = [
            self._meet_for(message, ends, opened[0])
            for message, (ends, _, _) in zip(messages, told, strict=True)
        ]
        yield from self._wait(*meetings)
        for _, name, arguments in told:
            if self._recording:
                self._record("p2p", name, opened, self.dev, arguments)
        self.host = max(self.host, self.dev + 5e-6)

    def _post(self, message: Message) -> None:
        """Start a message next to what the device computes."""
        self.host += 8e-6 * self._at.launch
        moment = max(self.dev, self.host + LAUNCH_LATENCY_S)
        ends, name, arguments = self._describe_message(message)
        meeting = self._posted[message] = self._meet_for(message, ends, moment)
        arguments["launch_ns"] = round((self.host - moment) * 1e9)
        self._beside.append((meeting, moment, name, arguments))

    def _activations(self, within: Arguments) -> float:
        """Return the bytes of a microbatch's activations before they are split over a TP group."""
        job = self.job
        return 2.0 * job.tokens * job.hidden * self._shares(int(within["microbatch"]))[0]

    def _shares(self, microbatch: int) -> tuple[float, float]:
        """Return how much of a full microbatch's products and scores there is to do."""
        place = self.place.dp, self._place, microbatch
        return float(self._load.tokens[place]), float(self._load.scores[place])

    def _suffer(self) -> None:
        """Let happen to this pass what happens to hosts and devices now and then."""
        number, at = self._num_passes, self._at
        luck = self._lucks[number]
        self._num_passes += 1
        if luck > 2.6:  # the operating system had something else to do
            self.host += 1.5e-3 * (luck - 2.5)
        self.host += at.stalls.get(number, 0.0)
        self._paused_s = at.pauses.get(number, 0.0)
        if number % 2 == self.rank % 2:
            self._collect(0, 1.1e-4 * (1 + 0.2 * abs(luck)))
        if luck < -2.7 and not self.job.manual_gc:
            self._collect(2, 0.012 * abs(luck))
        if number in at.collections:
            self._collect(2, at.collections[number])

    def _collect(self, generation: int, seconds: float) -> None:
        begin = self.host
        self.host += seconds * (self._at.launch**0.5)
        self._note_host("gc", f"gc-generation-{generation}", begin, {})

    def _load_batch(self, microbatch: int, chunk: int) -> Running:
        """Take a batch from the workers; a TP group's first rank tells the others."""
        within: Arguments = {"microbatch": microbatch, "chunk": chunk}
        if self._loads:
            begin = self.host
            ready = self.loader.take(begin, self._at.loader)
            self.host = max(self.host, ready) + 2.5e-4 * self._at.launch
            self._note_host("data", "batch-generator", begin, within)
        ends = self.place.pp == 0 or self._is_last
        if ends and self.job.tp > 1:
            within["phase"] = "forward"
            for width in (8, 16):
                yield from self._talk("broadcast", "tp", width * self.job.tokens, within)

    def _forward(self, microbatch: int, chunk: int) -> Running:
        """Pass one microbatch forward through a chunk."""
        job, within = self.job, self._within(microbatch, chunk, "forward")
        begins = self.place.pp == 0 and chunk == 0
        ends = self._is_last and chunk == job.vpp - 1
        self.host += 1e-4 * self._at.launch * job.host_bound
        opened = self._open()
        self._suffer()
        if begins or ends:
            yield from self._load_batch(microbatch, chunk)
        gathers = self._gather_parameters(microbatch, within)
        if begins:
            yield from self._wait(*(gathers.pop(0) if gathers else ()))
            inner = self._open()
            self._compute(self.costs["embedding"], self._shares(microbatch)[0])
            op = "reduce_scatter" if job.sequence_parallel else "all_reduce"
            yield from self._talk(op, "tp", self._activations(within), within)
            self._close("compute", "embedding", inner, within, base=False)
        for layer in job.layers_of(self.place.pp, chunk):
            yield from self._wait(*(gathers.pop(0) if gathers else ()))
            yield from self._layer_forward(layer, within)
        if ends:
            yield from self._head_forward(within)
        self._close("compute", "forward", opened, within)

    @staticmethod
    def _within(microbatch: int, chunk: int, phase: str) -> Arguments:
        return {"microbatch": microbatch, "chunk": chunk, "phase": phase}

    def _gather_parameters(self, microbatch: int, within: Arguments) -> list[list[Meeting]]:
        """Start to gather a chunk's parameters next to its first forward pass."""
        job = self.job
        if not (job.overlap and job.distributed_optimizer) or microbatch:
            return []
        num = min(_PARAMETER_BUCKETS, len(job.layers_of(self.place.pp, int(within["chunk"]))))
        sizes = self._parameter_bytes(int(within["chunk"]))
        return [self._beside_by_axis("all_gather", sizes, 0.5 / num, within) for _ in range(num)]

    def _beside_by_axis(
        self, op: str, sizes: list[tuple[str, float]], share: float, within: Arguments
    ) -> list[Meeting]:
        """Start one collective an axis, over a share of its bytes; each gathers its part only."""
        parts = [
            (axis, size * share / (len(self.groups[axis]) if op == "all_gather" else 1))
            for axis, size in sizes
        ]
        begun = [self._talk_beside(op, axis, size, within) for axis, size in parts]
        return [meeting for meeting in begun if meeting]

    def _parameter_bytes(self, chunk: int) -> list[tuple[str, float]]:
        """Return a chunk's gradients by the axis over which they are reduced, in fp32."""
        job, layers = self.job, len(self.job.layers_of(self.place.pp, chunk))
        first, last = self.place.pp == 0 and not chunk, self._is_last and chunk == job.vpp - 1
        words = job.word_parameters if first or last else 0
        sizes = [("dp_cp", 4.0 * (job.parameters(layers) + words))]
        if job.experts:
            sizes.append(("expt_dp", 4.0 * job.parameters(layers, experts=True)))
        return sizes

    def _around(self, op: str, opposite: str, within: Arguments) -> Running:
        """Gather or scatter activations over the TP group, as sequence parallelism does."""
        size = self._activations(within)
        if not self.job.sequence_parallel:
            if opposite:
                yield from self._talk("all_reduce", "tp", size, within)
            return
        yield from self._talk(op, "tp", size / self.job.tp if op == "all_gather" else size, within)

    def _layer_forward(self, layer: int, within: Arguments) -> Running:
        """Pass through one layer; `within` says whether for the first time."""
        tokens, scores = self._shares(int(within["microbatch"]))
        suffix = "-recompute" if within["phase"] == "recompute" else ""
        within = within | {"layer": layer}
        opened = self._open()
        inner = self._open()
        yield from self._around("all_gather", "", within)
        if self.job.cp > 1:
            size = self._activations(within) / self.job.tp / 2  # grouped queries
            yield from self._talk("all_gather", "cp", size, within)
        self._compute(self.costs["attention"], tokens, scores)
        yield from self._around("reduce_scatter", "all_reduce", within)
        self._close("compute", f"attention{suffix}", inner, within, base=False)
        self._compute(self.costs["between"], tokens)
        inner = self._open()
        if self.job.experts:
            yield from self._experts(layer, within, self.costs)
        else:
            yield from self._around("all_gather", "", within)
            self._compute(self.costs["mlp"], tokens)
            yield from self._around("reduce_scatter", "all_reduce", within)
        name = "moe" if self.job.experts else "mlp"
        self._close("compute", f"{name}{suffix}", inner, within, base=False)
        self._close("compute", f"transformer_layer{suffix}", opened, within, base=False)

    def _experts(self, layer: int, within: Arguments, costs: dict[str, Cost]) -> Running:
        """Send tokens to their experts and back; the host waits for their numbers."""
        job = self.job
        tokens = self._shares(int(within["microbatch"]))[0]
        loads = self._load.experts[self._place, layer - 1]
        size = self._activations(within) * job.top_k / job.tp
        forward = within["phase"] != "backward"
        if forward:
            self._compute(costs["router"], tokens)
            yield from self._talk("all_gather", "tp_ep", 4 * job.experts, within)
            self.host = max(self.host, self.dev) + 1e-5
        carried = size * float(loads.max())
        yield from self._talk("all_to_all", "ep", size, within, carried=carried)
        own = float(loads[self.place.ep])
        self._compute(costs["mlp"], tokens * own)
        yield from self._talk("all_to_all", "ep", size * own, within, carried=carried)
        if not forward:
            self._compute(costs["router"], tokens)

    def _head_forward(self, within: Arguments) -> Running:
        """Compute logits and loss."""
        tokens = self._shares(int(within["microbatch"]))[0]
        inner = self._open()
        yield from self._around("all_gather", "", within)
        self._compute(self.costs["output_layer"], tokens)
        self._close("compute", "output_layer", inner, within, base=False)
        for _ in range(3):
            yield from self._talk("all_reduce", "tp", 4 * self.job.tokens, within)
        self._compute(self.costs["entropy"], tokens)
        inner = self._open()
        self._compute(self.costs["loss"])
        self._close("compute", "loss", inner, within)

    def _backward(self, microbatch: int, chunk: int) -> Running:
        """Pass the gradient of one microbatch back through a chunk."""
        job, within = self.job, self._within(microbatch, chunk, "backward")
        tokens = self._shares(microbatch)[0]
        self.host += 6e-5 * self._at.launch * job.host_bound
        opened = self._open()
        self._suffer()
        if self._is_last and chunk == job.vpp - 1:
            self._compute(self.backward_costs["entropy"], tokens)
            inner = self._open()
            yield from self._halves("output_layer", within, tokens, 1.0, scatter=False)
            self._close("compute", "output_layer-backward", inner, within, base=False)
        reduces = microbatch == job.num_microbatches - 1 and job.overlap
        layers = job.layers_of(self.place.pp, chunk)
        for layer in reversed(layers):
            if job.recompute == "full":
                yield from self._layer_forward(layer, within | {"phase": "recompute"})
            yield from self._layer_backward(layer, within)
            if reduces:
                sizes = self._parameter_bytes(chunk)
                self._reductions += self._beside_by_axis(
                    self._reducing, sizes, 1 / len(layers), within
                )
        if self.place.pp == 0 and chunk == 0:
            inner = self._open()
            if job.sequence_parallel:
                yield from self._around("all_gather", "", within)
            self._compute(self.backward_costs["embedding"], tokens)
            self._close("compute", "embedding-backward", inner, within, base=False)
        self._close("compute", "backward", opened, within)

    def _layer_backward(self, layer: int, within: Arguments) -> Running:
        """Go back through one layer, its MLP first; collectives there name no layer."""
        tokens, scores = self._shares(int(within["microbatch"]))
        named = within | {"layer": layer}
        opened = self._open()
        inner = self._open()
        if self.job.experts:
            yield from self._experts(layer, within, self.backward_costs)
        else:
            yield from self._halves("mlp", within, tokens, 1.0)
        name = "moe" if self.job.experts else "mlp"
        self._close("compute", f"{name}-backward", inner, named, base=False)
        self._compute(self.backward_costs["between"], tokens)
        inner = self._open()
        if self.job.recompute == "selective":
            part = self._open()
            self._compute(Cost(0.0, 0.0, self.costs["attention"].scores_s, 3), tokens, scores)
            recomputed = named | {"phase": "recompute"}
            self._close("compute", "core_attention-recompute", part, recomputed, base=False)
        yield from self._halves("attention", within, tokens, scores)
        if self.job.cp > 1:
            size = self._activations(within) / self.job.tp * self.job.cp
            yield from self._talk("reduce_scatter", "cp", size, within)
        self._close("compute", "attention-backward", inner, named, base=False)
        self._close("compute", "transformer_layer-backward", opened, named, base=False)

    def _halves(
        self, name: str, within: Arguments, tokens: float, scores: float, *, scatter: bool = True
    ) -> Running:
        """Compute the gradient of a module's input; hand it on while computing its weights'."""
        job, cost = self.job, self.backward_costs[name]
        half = Cost(cost.clock_s / 2, cost.memory_s / 2, cost.scores_s / 2, cost.num_kernels / 2)
        size = self._activations(within)
        gathered = None
        if job.sequence_parallel:
            if scatter:
                yield from self._talk("all_gather", "tp", size / job.tp, within)
            gathered = self._talk_beside("all_gather", "tp", size / job.tp, within)
        self._compute(half, tokens, scores)
        yield from self._wait(gathered)
        op = "reduce_scatter" if job.sequence_parallel else "all_reduce"
        handed = self._talk_beside(op, "tp", size, within)
        self._compute(half, tokens, scores)
        yield from self._wait(handed)

    def _grad_sync(self) -> Running:
        """Finish the gradients of all chunks."""
        job = self.job
        self.work_s = self.busy_s
        opened = self._open()
        yield from self._wait(*self._reductions)
        if not job.overlap:
            for chunk in range(job.vpp):
                for axis, size in self._parameter_bytes(chunk):
                    yield from self._talk(self._reducing, axis, size)
        if job.sequence_parallel:
            num = sum(len(job.layers_of(self.place.pp, chunk)) for chunk in range(job.vpp))
            yield from self._talk("all_reduce", "tp", 8 * job.hidden * num)
        if "embd" in self.groups and job.pp > 1:
            yield from self._talk("all_reduce", "embd", 4.0 * job.word_parameters)
        if self._is_last:
            yield from self._talk("all_reduce", "dp_cp", 8)
        self._close("optimizer", "grad-sync", opened)

    def _optimizer(self) -> Running:
        """Take the norm of the gradients, which the host waits for, and update parameters."""
        job = self.job
        opened = self._open()
        sizes = [each for chunk in range(job.vpp) for each in self._parameter_bytes(chunk)]
        held = sum(
            size / 4 / (len(self.groups[axis]) if job.distributed_optimizer else 1)
            for axis, size in sizes
        )
        memory = job.site.gpu.memory_bytes_per_s
        self._compute(Cost(0.0, 4 * held / memory, 0.0, 12))
        axis = "intra_dist_opt" if job.distributed_optimizer else "mp"
        yield from self._talk("all_reduce", axis, 4)
        self.host = max(self.host, self.dev) + 2e-5
        self._compute(Cost(0.0, 24 * held / memory, 0.0, 40))
        if job.distributed_optimizer and not job.overlap:
            for axis, size in sizes:
                yield from self._talk("all_gather", axis, size / 2 / len(self.groups[axis]))
        self._close("optimizer", "optimizer", opened)
