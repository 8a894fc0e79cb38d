"""What every rank of a job does, as a trainer on Megatron-Core does it, and what of it is recorded.

A rank is a coroutine: it loads, launches, sends, waits. It has two clocks, of the thread that
launches and of the device that works off what was launched; on a CPU they are one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from benchmarks.grounds.fleet.engine import Exchange, Key, Meeting, Trainer
from benchmarks.grounds.fleet.hardware import (
    ARITHMETIC,
    BOTH,
    DATA,
    EXPERTS,
    HOST,
    LOADING,
    LOCAL_LINK,
    MEMORY,
    PCIE,
    REMOTE_LINK,
    Floats,
    Machines,
    Trouble,
    strength,
)
from benchmarks.grounds.fleet.jobs import (
    AXES,
    MS,
    US,
    Job,
    Kernels,
    backward_of,
    kernels_of,
    order_of_work,
    stage_parameters,
    taken,
)

Args = dict[str, int | str]


@dataclass(slots=True)
class Span:
    """One recorded span in true time; `launch` is the host's time at its begin."""

    kind: str
    name: str
    track: int
    start: float
    end: float
    args: Args
    launch: float


class Run:
    """One simulation of a job, done when it is made."""

    def __init__(
        self, job: Job, seed: int, troubles: tuple[Trouble, ...], *, recorded: bool
    ) -> None:
        self.job, self.recorded = job, recorded
        self.machines = Machines(job, seed, troubles)
        self.lengths = _lengths(job, seed)
        self.loads = _expert_loads(job, seed)
        self.exchange = Exchange(job, seed)
        self.ranks = [Rank(self, rank) for rank in range(job.num_ranks)]
        self.exchange.let(self.ranks)

    def iteration_times(self) -> Floats:
        """Return how long each traced iteration took the job, first begin to last end."""
        begins = np.array([rank.begins for rank in self.ranks]).min(axis=0)
        ends = np.array([rank.ends for rank in self.ranks]).max(axis=0)
        return np.asarray(ends - begins)

    def pass_times(self) -> Floats:
        """Return how long each rank's kernels took, (rank, iteration)."""
        return np.array([rank.computed for rank in self.ranks])


def _lengths(job: Job, seed: int) -> Floats:
    """Return the relative length of each microbatch, (iteration, dp, microbatch)."""
    shape = (len(job.iterations), job.dp, job.num_microbatches)
    draws = np.random.default_rng((seed, 11)).normal(0, 1, shape)
    return np.asarray(np.exp(job.length_spread * draws).clip(0.25, 3.0))


def _expert_loads(job: Job, seed: int) -> Floats:
    """Return the relative load of each rank's experts, (iteration, rank within its group)."""
    draws = np.random.default_rng((seed, 13)).normal(0, 1, (len(job.iterations), job.ep))
    loads = np.exp(job.skew * draws)
    return np.asarray(loads / loads.mean(axis=1, keepdims=True))


class Rank:
    """One rank: its clocks, its place in the work, and what it has recorded."""

    def __init__(self, run: Run, number: int) -> None:
        self.run, self.job, self.number = run, run.job, number
        self.place = self.job.places[number]
        self.spans: list[list[Span]] = []  # of each window
        self.windows: list[list[int]] = []  # iterations of each window
        self.tokens: list[set[int]] = []  # that passes of the first chunk got, of each window
        self.begins: list[float] = []
        self.ends: list[float] = []
        self.computed: list[float] = []
        self.host = self.device = 1e9
        self.iteration = self.index = 0
        self.cpu = 0.0
        self._machines = run.machines
        self._host_troubles = self._machines.ails(number, HOST)
        self._arithmetic = self._machines.ails(number, ARITHMETIC)
        self._memory = self._machines.ails(number, MEMORY)
        self._both = self._machines.ails(number, BOTH)
        self._pauses = self._machines.ails(number, ("row_remap",))
        draws = self._machines.draws_of(number)
        self._noise: list[float] = np.exp(draws.normal(0, self.job.noise, 2048)).tolist()
        self._jitter = self._host_noise(draws)
        self._chance: list[float] = draws.random(4096).tolist()
        self._num_kernels = self._num_chances = self._num_strikes = 0
        self._counts: dict[tuple[object, ...], int] = {}
        self._pending: list[tuple[Meeting, float, Span | None]] = []
        self._loaded: deque[float] = deque([0.0, 0.0])
        self._produced = 0.0
        self._parameters = stage_parameters(self.job, self.place.pp)
        sizes = [len(layers) for layers in self.job.chunks[self.place.pp :: self.job.pp]]
        self._num_layers = max(sum(sizes), 1)
        self._num_buckets = max(sum(-(-size // 2) for size in sizes), 1)
        self._gathers: deque[Meeting | None] = deque()
        self._full = self.job.granularity == "full"
        self._groups = {
            axis: (self.job.members(number, axis), self.job.group(number, axis)) for axis in AXES
        }
        self._order, self._ahead = order_of_work(self.job, self.place.pp)
        self.trainer = self._train()

    def _host_noise(self, draws: np.random.Generator) -> list[float]:
        """Launching is noisy, and a daemon takes the core now and then."""
        noise = np.exp(draws.normal(0, self.job.host_jitter, 2048))
        taken_away = draws.random(2048) < 0.002
        noise[taken_away] *= draws.uniform(5, 40, int(taken_away.sum()))
        return list(noise * self._machines.hosts_slowness[self.number])

    # --- clocks -----------------------------------------------------------------------------

    def now(self) -> float:
        """Return when what is launched now would begin on the device."""
        return self.device if self.device > self.host else self.host

    def ailing(self, kinds: tuple[str, ...], time_ns: float) -> float:
        """Return how many times slower this rank's troubles of some kinds make something."""
        return strength(self._machines.ails(self.number, kinds), self.iteration, time_ns)

    def clock_ratio(self, iteration: int, time_ns: float) -> float:
        """Return how many times slower than its highest the clock runs at a moment."""
        own = self._machines.clock(self.number, time_ns)
        return own * strength(self._arithmetic, iteration, time_ns)

    def clock_held_by(self, iteration: int, time_ns: float) -> set[str]:
        """Return which troubles lower the clock at a moment."""
        return {one.kind for one in self._arithmetic if one.strength(iteration, time_ns) > 1}

    def _draw(self) -> float:
        self._num_chances += 1
        return self._chance[self._num_chances % 4096]

    def _strikes(self) -> float:
        """Draw for a trouble, apart from what the job without it draws."""
        self._num_strikes += 1
        return self._chance[-self._num_strikes % 4096]

    def _host_work(self, time_ns: float) -> None:
        """Let the launching thread do something of its own."""
        self._num_kernels += 1
        time_ns *= self._jitter[self._num_kernels * 3 % 2048]
        if self._host_troubles:
            time_ns *= strength(self._host_troubles, self.iteration, self.host)
        self.host += time_ns
        self.cpu += time_ns
        if not self.job.on_gpus:
            self.device = self.host

    def compute(self, kernels: Kernels, launches: int) -> None:
        """Launch kernels and let the device work them off."""
        self._num_kernels += 1
        start_host = self.host
        time = self.now()
        clock = self._machines.clock(self.number, time)
        memory = 1.0
        if self._arithmetic:
            clock *= strength(self._arithmetic, self.iteration, time)
        if self._memory:
            memory = strength(self._memory, self.iteration, time)
        if self._both:
            shared = strength(self._both, self.iteration, time)
            clock, memory = clock * shared, memory * shared
        length = taken(kernels, clock, memory) * self._noise[self._num_kernels % 2048]
        if self.iteration == 1:
            length *= self.job.warm_up
        if not self.job.on_gpus:
            busy = length
            if self._host_troubles:
                length *= strength(self._host_troubles, self.iteration, time)
            self.host += length * self._jitter[self._num_kernels % 2048] ** 0.5
            self.device = self.host
            self.cpu += busy
            self.computed[-1] += length
            return
        self._host_work(launches * self.job.launch_us * US * (3 if self.iteration == 1 else 1))
        begin = max(self.device, start_host + self.job.launch_us * US)
        self.device = max(begin + length, self.host)
        self.computed[-1] += length
        if self._pauses and self._strikes() < 0.02:
            self.device += (strength(self._pauses, self.iteration, time) - 1) * 10 * MS

    def _synchronize(self) -> None:
        """Let the launching thread wait for the device."""
        self.host = self.device = max(self.host, self.device)

    # --- spans ------------------------------------------------------------------------------

    def _open(self, kind: str, name: str, args: Args, track: int = 1) -> Span:
        start = self.host if track == 3 else self.now()
        span = Span(kind, name, track, start, 0.0, args | {"iteration": self.iteration}, self.host)
        if not self.job.on_gpus:
            span.args["cpu_ns"] = int(self.cpu)
        elif track != 3:
            span.args["launch_ns"] = 0
        return span

    def _close(self, span: Span, *, wanted: bool = True) -> None:
        span.end = self.host if span.track == 3 else self.now()
        if not self.job.on_gpus:
            span.args["cpu_ns"] = int(self.cpu) - int(span.args["cpu_ns"])
        if self.run.recorded and wanted:
            self.spans[-1].append(span)

    # --- communication ----------------------------------------------------------------------

    def _is_recorded(self, axis: str) -> bool:
        return self._full or axis in ("dp_cp", "expt_dp")

    def _count(self, *counted: object) -> int:
        """Return the running number, from 0, of something within the iteration."""
        number = self._counts[counted] = self._counts.get(counted, -1) + 1
        return number

    def _join(
        self, axis: str, op: str, size: float, place: Args, track: int
    ) -> tuple[Meeting, Span | None]:
        ranks, group = self._groups[axis]
        number = self._count(group, op)
        span = None
        if self._is_recorded(axis):
            span = self._open("collective", op, place, track)
            span.args |= {
                "op": op, "group": group, "sequence": number, "size_bytes": int(size),
            }  # fmt: skip
        key = (group, op, self.iteration, number)
        return self._come(key, ranks, op, size), span

    def _come(self, key: Key, ranks: tuple[int, ...], op: str, size: float) -> Meeting:
        arrival = self.now()
        kinds = REMOTE_LINK if self.job.is_remote(ranks) else LOCAL_LINK
        return self.run.exchange.join(
            key, ranks, op, size=size, arrival=arrival, demand=self.ailing(kinds, arrival)
        )

    def _collective(self, axis: str, op: str, size: float, place: Args) -> Trainer:
        """Do a collective whose end the device waits for."""
        if len(self._groups[axis][0]) == 1:
            return
        meeting, span = self._join(axis, op, size, place, 2)
        yield from self._wait(meeting)
        if span:
            self._close(span)

    def _begin_collective(self, axis: str, op: str, size: float, place: Args) -> Meeting | None:
        """Begin a collective beside the device's work."""
        if len(self._groups[axis][0]) == 1:
            return None
        meeting, span = self._join(axis, op, size, place, 4)
        self._pending.append((meeting, self.now(), span))
        return meeting

    def _wait(self, meeting: Meeting | None) -> Trainer:
        if meeting is None:
            return
        if meeting.end is None:
            yield meeting
        assert meeting.end is not None
        self._num_kernels += 1
        late = self._jitter[self._num_kernels % 2048] * (1.5 * US if self.job.on_gpus else 60 * US)
        self.device = max(self.device, meeting.end + late)
        if not self.job.on_gpus:
            self.host = self.device = max(self.host, self.device)

    def _drain(self) -> Trainer:
        """Wait for all that went on beside the work, and record it."""
        latest: dict[object, float] = {}
        for meeting, arrival, span in self._pending:
            yield from self._wait(meeting)
            if span is None:
                continue
            assert meeting.end is not None
            group = span.args.get("group") if span.kind == "collective" else None
            span.start = max(arrival, latest.get(group, 0.0)) if group else arrival
            span.end = max(meeting.end, span.start)
            latest[group] = span.end
            span.args.pop("cpu_ns", None)
            if not self.job.on_gpus and span.args["op"] in ("reduce_scatter", "send", "recv"):
                span.args["end_is_bound"] = 1
            if self.run.recorded:
                self.spans[-1].append(span)
        self._pending.clear()

    def _message(
        self, op: str, direction: str, microbatch: int, chunk: int, track: int
    ) -> tuple[Meeting, Span]:
        """Post one end of a message between stages."""
        pipeline = self._groups["pp"][0]
        forward = (op == "send") == (direction == "forward")
        peer = pipeline[(self.place.pp + (1 if forward else -1)) % self.job.pp]
        ends = (self.number, peer) if op == "send" else (peer, self.number)
        number = self._count(*ends, direction)
        tokens = self.job.sequence / self.job.cp * self._length(microbatch, sized=True)
        size = 2 * tokens * self.job.hidden
        size /= self.job.tp if self.job.sequence_parallel else 1
        args: Args = {
            "op": op, "direction": direction, "peer": peer, "group": self._groups["pp"][1],
            "sequence": number, "size_bytes": int(size), "microbatch": microbatch, "chunk": chunk,
        }  # fmt: skip
        span = self._open("p2p", f"{op}_{direction}", args, track)
        key = (*ends, direction, self.iteration, number)
        return self._come(key, ends, "message", size), span

    def _exchange(self, *messages: tuple[str, str, int, int]) -> Trainer:
        """Send and receive in one go; all of it is over at the same time."""
        posted = [self._message(*each, 2) for each in messages]
        for meeting, _ in posted:
            yield from self._wait(meeting)
        for _, span in posted:
            self._close(span)
        if posted:
            self._synchronize()

    # --- the model --------------------------------------------------------------------------

    def _length(self, microbatch: int, *, sized: bool = False) -> float:
        """Return how long a microbatch is; `sized`: as far as its tensors show it."""
        if sized and self.job.packed:
            return 1.0
        own = self.run.lengths[self.index, self.place.dp, microbatch]
        return float(own) * self.ailing(DATA, self.host)

    def _layer(self, layer: int, microbatch: int, chunk: int, phase: str) -> Trainer:
        """Do the forward of one layer, or repeat it."""
        kind, suffix = self.job.layers[layer - 1], "-recompute" if phase == "recompute" else ""
        args: Args = {"microbatch": microbatch, "chunk": chunk, "layer": layer, "phase": phase}
        length = round(self._length(microbatch), 3)
        if kind == "mamba":  # of another class than those that are traced
            kernels = kernels_of(self.job, "mamba", length)
            yield from self._part(kernels, {k: args[k] for k in args if k != "layer"}, length)
            return
        outer = self._open("compute", f"transformer_layer{suffix}", args)
        span = self._open("compute", f"attention{suffix}", args)
        yield from self._part(
            kernels_of(self.job, "attention", length), args, length, context=True
        )  # fmt: skip
        self._close(span, wanted=self._full)
        if kind == "moe":
            yield from self._experts(args, length, backward=False)
        else:
            span = self._open("compute", f"mlp{suffix}", args)
            yield from self._part(kernels_of(self.job, "mlp", length), args, length)
            self._close(span, wanted=self._full)
        self._close(outer, wanted=self._full)

    def _part(
        self, kernels: Kernels, args: Args, length: float, *, context: bool = False
    ) -> Trainer:
        """Do the forward of a module between the collectives of its tensor-parallel group."""
        size = self._activation_bytes(length)
        if context:
            yield from self._collective("cp", "all_gather", size / self.job.tp, args)
        if self.job.sequence_parallel:
            yield from self._collective("tp", "all_gather", size / self.job.tp, args)
        self.compute(kernels, 3 * len(kernels))
        op = "reduce_scatter" if self.job.sequence_parallel else "all_reduce"
        yield from self._collective("tp", op, size, args)

    def _activation_bytes(self, length: float) -> float:
        tokens = self.job.sequence / self.job.cp
        return 2 * tokens * self.job.hidden * (1.0 if self.job.packed else length)

    def _experts(self, args: Args, length: float, *, backward: bool) -> Trainer:
        """Route tokens to the ranks that hold their experts, and back."""
        phase = str(args["phase"])
        suffix = {"forward": "", "backward": "-backward", "recompute": "-recompute"}[phase]
        outside = {k: args[k] for k in args if k != "layer"} if backward else args
        load = float(self.run.loads[self.index, self.place.ep])
        load *= self.ailing(EXPERTS, self.host)
        routed = round(load * (1.0 if self.job.packed else length), 3)
        sent = 2 * self._activation_bytes(length)
        outer = self._open("compute", f"moe{suffix}", args)
        if not backward:
            self.compute(kernels_of(self.job, "router", 1.0), 9)
            yield from self._collective("tp_ep", "all_gather", 64, outside)
            self._synchronize()  # the host reads how many tokens go where
        yield from self._collective("ep", "all_to_all", sent * load if backward else sent, outside)
        inner = self._open("compute", f"mlp{suffix}", args)
        kernels = kernels_of(self.job, "experts", routed)
        self.compute(backward_of(kernels) if backward else kernels, 9)
        self._close(inner, wanted=self._full)
        yield from self._collective("ep", "all_to_all", sent if backward else sent * load, outside)
        self._close(outer, wanted=self._full)

    def _layer_backward(self, layer: int, microbatch: int, chunk: int) -> Trainer:
        if self.job.recompute:
            yield from self._layer(layer, microbatch, chunk, "recompute")
        kind = self.job.layers[layer - 1]
        args: Args = {
            "microbatch": microbatch, "chunk": chunk, "layer": layer, "phase": "backward",
        }  # fmt: skip
        length = round(self._length(microbatch), 3)
        if kind == "mamba":
            yield from self._part_backward(kernels_of(self.job, "mamba", length), args, length)
            return
        outer = self._open("compute", "transformer_layer-backward", args)
        if kind == "moe":
            yield from self._experts(args, length, backward=True)
        else:
            span = self._open("compute", "mlp-backward", args)
            yield from self._part_backward(kernels_of(self.job, "mlp", length), args, length)
            self._close(span, wanted=self._full)
        span = self._open("compute", "attention-backward", args)
        yield from self._part_backward(kernels_of(self.job, "attention", length), args, length)
        self._close(span, wanted=self._full)
        self._close(outer, wanted=self._full)

    def _part_backward(self, kernels: Kernels, args: Args, length: float) -> Trainer:
        """Gradients of a module: those of its weights are computed while its input's travel."""
        size = self._activation_bytes(length)
        args = {k: args[k] for k in args if k != "layer"}
        if self.job.sequence_parallel:
            yield from self._collective("tp", "all_gather", size / self.job.tp, args)
            gathered = self._begin_collective("tp", "all_gather", size / self.job.tp, args)
        self.compute(kernels, 3 * len(kernels))
        if self.job.sequence_parallel:
            yield from self._wait(gathered)
        op = "reduce_scatter" if self.job.sequence_parallel else "all_reduce"
        meeting = self._begin_collective("tp", op, size, args)
        self.compute(kernels, 2 * len(kernels))
        yield from self._wait(meeting)

    # --- one iteration ----------------------------------------------------------------------

    def _train(self) -> Trainer:
        job = self.job
        opened = -1
        for self.index, self.iteration in enumerate(job.iterations):
            window = (self.iteration - 1) // job.interval
            if window != opened:
                self.spans.append([])
                self.windows.append([])
                self.tokens.append(set())
                if opened >= 0:
                    self._skip(job.interval - job.window)
                opened = window
            self.windows[-1].append(self.iteration)
            yield from self._between()
            yield from self._iteration()

    def _skip(self, iterations: int) -> None:
        """Let iterations pass that nobody traces; they take all ranks the same time."""
        self.host = self.device = self.now() + iterations * 0.7e9
        self._loaded = deque([0.0, 0.0])

    def _between(self) -> Trainer:
        """Log, save, evaluate: whatever happens between two iterations."""
        job, before = self.job, self.iteration - 1
        if job.log_every and before and before % job.log_every == 0:
            self._synchronize()
            if self.number == 0:
                self.host += 25 * MS * (0.5 + self._draw())
        if job.save_every and before and before % job.save_every == 0:
            self._synchronize()
            span = self._open("checkpoint", "save-checkpoint", {}, 3)
            span.args["iteration"] = before
            self.host += 400 * MS * (0.6 + self._draw())
            self._close(span, wanted=self._full and job.window == job.interval)
            yield from self._barrier("save")
        if job.eval_every and before and before % job.eval_every == 0:
            self._synchronize()
            self.host += 600 * MS * (1 + 0.02 * self._draw())
            yield from self._barrier("evaluation")

    def _barrier(self, why: str) -> Trainer:
        key = (why, "barrier", self.iteration, 0)
        everybody = self._groups["world"][0]
        yield from self._wait(self._come(key, everybody, "barrier", 8))
        self._synchronize()

    def _iteration(self) -> Trainer:
        self._counts.clear()
        self.computed.append(0.0)
        whole = self._open("iteration", "iteration", {})
        self.begins.append(whole.start)
        self._host_work(150 * US)
        self._collect_garbage()
        if self.job.vpp == 1:
            yield from self._one_forward_one_backward()
        else:
            yield from self._interleaved()
        yield from self._update()
        self._close(whole)
        self.ends.append(whole.end)

    def _collect_garbage(self) -> None:
        """Python collects: a little in each iteration, everything on a rank that ails so."""
        span = self._open("gc", "gc-generation-0", {}, 3)
        self._host_work(120 * US)
        self._close(span, wanted=self._full)
        for one in self._machines.ails(self.number, ("gc", "gc_everywhere")):
            if one.strength(self.iteration, self.host) > 1 and self._strikes() < one.share:
                span = self._open("gc", "gc-generation-2", {}, 3)
                self._host_work(one.factor * MS)
                self._close(span, wanted=self._full)

    def _one_forward_one_backward(self) -> Trainer:
        if self.place.pp:
            yield from self._exchange(("recv", "forward", 0, 0))
        for number, (direction, microbatch, _) in enumerate(self._order):
            yield from self._work(direction, microbatch, 0)
            following = self._order[number + 1] if number + 1 < len(self._order) else None
            sent, needed = [], []
            if self._has_neighbour(to_next=direction == "forward"):
                sent.append(("send", direction, microbatch, 0))
            if following and self._has_neighbour(to_next=following[0] == "backward"):
                needed.append(("recv", following[0], following[1], 0))
            if following and following[0] != direction:
                yield from self._exchange(*sent, *needed)
            else:
                yield from self._exchange(*sent)
                yield from self._exchange(*needed)

    def _has_neighbour(self, *, to_next: bool) -> bool:
        return self.place.pp < self.job.pp - 1 if to_next else self.place.pp > 0

    def _interleaved(self) -> Trainer:
        """Exchange in warm-up; then receive one ahead and send what is done beside the work."""
        coming = None
        yield from self._exchange(*self._needed(0))
        for number, (direction, microbatch, chunk) in enumerate(self._order):
            yield from self._wait(coming)
            coming = None
            if number >= self._ahead:
                for needed in self._needed(number + 1):
                    coming = self._post(*needed)
            yield from self._work(direction, microbatch, chunk)
            made = [] if self._is_outermost(direction, chunk, first=False) else [
                ("send", direction, microbatch, chunk)
            ]  # fmt: skip
            if number < self._ahead:
                yield from self._exchange(*made, *self._needed(number + 1))
                continue
            for message in made:
                self._post(*message)

    def _is_outermost(self, direction: str, chunk: int, *, first: bool) -> bool:
        """Tell whether a pass begins (`first`) or ends its way through the pipeline here."""
        virtual = chunk * self.job.pp + self.place.pp
        at_head = (direction == "forward") == first
        return virtual == (0 if at_head else self.job.pp * self.job.vpp - 1)

    def _needed(self, number: int) -> list[tuple[str, str, int, int]]:
        """Return what must be received for a piece of work, if anything."""
        if number >= len(self._order):
            return []
        direction, microbatch, chunk = self._order[number]
        if self._is_outermost(direction, chunk, first=True):
            return []
        return [("recv", direction, microbatch, chunk)]

    def _post(self, op: str, direction: str, microbatch: int, chunk: int) -> Meeting:
        meeting, span = self._message(op, direction, microbatch, chunk, 4)
        self._pending.append((meeting, self.now(), span))
        return meeting

    def _work(self, direction: str, microbatch: int, chunk: int) -> Trainer:
        """Do one pass of one microbatch through one chunk."""
        args: Args = {"microbatch": microbatch, "chunk": chunk, "phase": direction}
        whole = self._open("compute", direction, args)
        self._host_work(40 * US)
        if direction == "forward":
            yield from self._forward(microbatch, chunk, args)
        else:
            yield from self._backward(microbatch, chunk, args)
        self._close(whole)

    def _forward(self, microbatch: int, chunk: int, args: Args) -> Trainer:
        head = self._is_outermost("forward", chunk, first=True)
        tail = self._is_outermost("forward", chunk, first=False)
        if head or tail:
            yield from self._load(microbatch, chunk)
        if (microbatch, chunk) == (0, 0):
            self._gather_parameters(args)
        if chunk == 0:
            local = self.job.sequence / self.job.cp
            self.tokens[-1].add(round(local * self._length(microbatch, sized=True)))
        if head:
            yield from self._end_of_model("embedding", args)
        for place, layer in enumerate(self._layers_of(chunk)):
            if place % 2 == 0 and microbatch == 0 and self._gathers:
                yield from self._wait(self._gathers.popleft())
            yield from self._layer(layer, microbatch, chunk, "forward")
        if tail:
            yield from self._end_of_model("output_layer", args)
            for _ in range(3):  # highest logit, predicted one, sum: over the vocabulary's shards
                size = 4 * self.job.sequence / self.job.cp
                yield from self._collective("tp", "all_reduce", size, args)
            span = self._open("compute", "loss", args)
            self.compute(kernels_of(self.job, "loss", 1.0), 6)
            self._close(span)

    def _backward(self, microbatch: int, chunk: int, args: Args) -> Trainer:
        if self._is_outermost("backward", chunk, first=True):
            yield from self._end_of_model("output_layer", args)
        layers = self._layers_of(chunk)
        for place, layer in enumerate(reversed(layers)):
            yield from self._layer_backward(layer, microbatch, chunk)
            complete = place % 2 or place == len(layers) - 1
            if complete and self.job.overlap and microbatch == self.job.num_microbatches - 1:
                self._reduce_bucket(2 if place % 2 else 1, args)
        if self._is_outermost("backward", chunk, first=False):
            yield from self._end_of_model("embedding", args)

    def _layers_of(self, chunk: int) -> tuple[int, ...]:
        return self.job.chunks[chunk * self.job.pp + self.place.pp]

    def _end_of_model(self, name: str, args: Args) -> Trainer:
        backward = args["phase"] == "backward"
        length = round(self._length(int(args["microbatch"])), 3)
        kernels = kernels_of(self.job, name, length)
        span = self._open("compute", f"{name}-backward" if backward else name, args)
        self.compute(backward_of(kernels) if backward else kernels, 6)
        if not backward and name == "embedding":
            yield from self._collective("tp", "all_reduce", self._activation_bytes(length), args)
        self._close(span, wanted=self._full)

    def _load(self, microbatch: int, chunk: int) -> Trainer:
        """Take the next microbatch from the workers, two of which are ahead; then broadcast it."""
        span = self._open("data", "batch-generator", {"microbatch": microbatch, "chunk": chunk}, 3)
        args: Args = {"microbatch": microbatch, "chunk": chunk, "phase": "forward"}
        size = 8.0 * self.job.sequence / self.job.cp
        if self.place.tp == 0:
            slow = self.ailing(LOADING, self.host)
            needed = self.job.loader_ms * MS * slow * (0.7 + 0.6 * self._draw())
            self._produced = max(self._produced, self._loaded.popleft()) + needed
            self.host = max(self.host, self._produced)
            self._loaded.append(self.host)
            self._host_work(300 * US)
            copy = 4 * size / self.job.chip.pcie_bytes_per_ns * self.ailing(PCIE, self.host)
            self.device = max(self.device, self.host) + copy
        if self.job.tp > 1:
            yield from self._broadcast(size, args)
        if not self.job.on_gpus:
            self.host = self.device = self.now()
        self._close(span)

    def _broadcast(self, size: float, args: Args) -> Trainer:
        """Hand the batch to the tensor-parallel group: its root waits for nobody."""
        group = self._groups["tp"][1]
        number = self._count(group, "broadcast")
        span = self._open("collective", "broadcast", args, 2)
        span.args |= {
            "op": "broadcast", "group": group, "sequence": number, "size_bytes": int(size),
        }  # fmt: skip
        key = (f"{group} broadcast", number, self.iteration)
        arrival = self.now() if self.place.tp == 0 else None
        yield from self._wait(self.run.exchange.broadcast(key, arrival=arrival))
        self._close(span, wanted=self._full)

    def _gather_parameters(self, args: Args) -> None:
        """Begin to gather the parameters that the last update has left in shards."""
        if not (self.job.overlap and self.job.distributed_optimizer):
            return
        dense, experts = self._parameters
        replicas = len(self._groups["dp_cp"][0])
        for _ in range(self._num_buckets):
            size = 2 * dense / self._num_buckets / replicas
            self._gathers.append(self._begin_collective("dp_cp", "all_gather", size, args))
        if experts:
            copies = len(self._groups["expt_dp"][0])
            self._begin_collective("expt_dp", "all_gather", 2 * experts / copies, args)

    def _reduce_bucket(self, layers: int, args: Args) -> None:
        """Begin to reduce the gradients of some layers, which are complete."""
        op = "reduce_scatter" if self.job.distributed_optimizer else "all_reduce"
        dense, experts = (4 * each * layers / self._num_layers for each in self._parameters)
        self._begin_collective("dp_cp", op, dense, args)
        if experts:
            self._begin_collective("expt_dp", op, experts, args)

    def _update(self) -> Trainer:
        """Finish gradients, then step."""
        job = self.job
        span = self._open("optimizer", "grad-sync", {})
        yield from self._drain()
        dense, experts = self._parameters
        if not job.overlap:
            op = "reduce_scatter" if job.distributed_optimizer else "all_reduce"
            yield from self._collective("dp_cp", op, 4 * dense, {})
            if experts:
                yield from self._collective("expt_dp", op, 4 * experts, {})
        if job.pp > 1 and self.place.pp in (0, job.pp - 1):
            size = 4 * job.vocabulary * job.hidden / job.tp
            yield from self._collective("embd", "all_reduce", size, {})
        if job.sequence_parallel:
            yield from self._collective("tp", "all_reduce", 8 * job.hidden, {})
        yield from self._collective("dp_cp", "all_reduce", 8, {})
        self._close(span)
        span = self._open("optimizer", "optimizer", {})
        shared = "tp_ep_pp" if job.ep > 1 else "mp"
        axis = "intra_dist_opt" if job.distributed_optimizer else shared
        yield from self._collective(axis, "all_reduce", 4, {})
        self._synchronize()  # the host reads the gradients' norm
        self._step(dense, experts)
        if job.distributed_optimizer and not job.overlap:
            replicas = len(self._groups["dp_cp"][0])
            yield from self._collective("dp_cp", "all_gather", 2 * dense / replicas, {})
        self._close(span)

    def _step(self, dense: float, experts: float) -> None:
        job, own = self.job, dense + experts
        if job.distributed_optimizer:
            own = dense / len(self._groups["dp_cp"][0])
            own += experts / len(self._groups["expt_dp"][0])
        if job.offload:
            copied = 12 * own / job.chip.pcie_bytes_per_ns * self.ailing(PCIE, self.host)
            self.device = self.now() + copied
        self.compute(((0.0, 28 * own / job.chip.bytes_per_ns),), 12)
