"""Say what each rank of a job does in an iteration, from the batch to the update.

Each stage is a generator that runs until it needs a message; it goes on when both ends of the
message have come to it. Messages of plain schedules block both ends (a rendezvous, as NCCL's send
and receive are), and the host waits for them, as with Megatron-Core's `batch_p2p_sync`; those of
interleaved schedules travel next to compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from benchmarks.grounds.harbour.engine import Facts, Mark, Ranks, Recorded
from benchmarks.grounds.harbour.hardware import Array, generator
from benchmarks.grounds.harbour.jobs import Job
from benchmarks.grounds.harbour.schedule import Message, Pass, ends, made, needed, passes
from benchmarks.grounds.harbour.trouble import Conditions, disturbed
from megascan.schema import Kind, Track
from megascan.vocabulary import backward_of, collection_of, message_name, recompute_of

_GRADIENT_BYTES = 4  # reduced in fp32, Megatron-Core's default
_TOKEN_BYTES = 8
_HOST_OF_PASS_S = 90e-6  # Python between passes: schedule, autograd's start
_BLOCKING_S = 25e-6  # what a synchronisation of the host with its device takes
_OTHERS_S = 30e-6  # what making room for a batch takes that comes from a tensor-parallel peer
_BACKWARD = (2.0, 1.9, 1.6)  # products, memory, kernels of a backward against its forward
_INPUT_HALF = 0.5  # of a backward's products, before the gradient of the input can travel


@dataclass(kw_only=True)
class Batches:
    """Hold what the data are: lengths by microbatch, loads of experts, times of the loader."""

    lengths: Array  # (microbatch, iteration, rank of a stage), 1: of the mean length
    waits: Array  # (microbatch, iteration, rank of the job), s: for batches that are not there yet
    loads: Array  # (layer, iteration, rank of the job), 1: an even share of the tokens


@dataclass(kw_only=True)
class _Mail:
    """Bring both ends of each message together."""

    job: Job
    stages: list[Ranks]
    seed: int
    posted: dict[tuple[Message, bool], Array] = field(default_factory=dict)
    arrived: dict[Message, Array] = field(default_factory=dict)

    def post(self, message: Message, *, sends: bool, at: Array) -> None:
        """Note that one end is ready."""
        self.posted[message, sends] = at
        if (message, not sends) not in self.posted:
            return
        sender, receiver = ends(self.job, message)
        name = f"{message.forward} {message.microbatch} {message.boundary}"
        noise = np.abs(generator(self.seed, name).standard_normal(at.shape))
        took = self.stages[0].network.message_s(sender, self.job.message_bytes, receiver)
        took = took * np.exp(self.job.site.link_noise_ratio * (noise - 1))
        ready = np.maximum(at, self.posted[message, not sends])
        self.arrived[message] = ready + took


@dataclass(frozen=True)
class _Post:
    """State one end of a message: by which pass of this stage it was posted, and when."""

    message: Message
    place: Pass
    op: str  # send, recv
    begin: Mark


class Stage:
    """One stage's program."""

    def __init__(self, ranks: Ranks, mail: _Mail, batches: Batches) -> None:
        self.ranks, self.mail, self.batches = ranks, mail, batches
        self.job, self.stage = ranks.job, ranks.stage
        self._buckets: list[Array] = []
        self._gathered: dict[int, Array] = {}
        self._disturbance = generator(ranks.seed, f"daemon {ranks.stage}")
        self._messages: Counter[tuple[int, str]] = Counter()

    def run(self) -> Iterator[list[Message]]:
        """Run the passes of an iteration; yield the messages that must arrive first."""
        order = passes(self.job, self.stage)
        if self.job.overlap_params:
            self._gather_parameters()
        go = self._interleaved if self.job.vpp > 1 else self._plain
        yield from go(order)

    def _plain(self, order: list[Pass]) -> Iterator[list[Message]]:
        """Exchange messages as schedules without interleaving do, both ends waiting.

        Where a forward follows a backward or the other way round, what is sent and what is needed
        next go in one exchange (send_forward_recv_backward); elsewhere one after the other.
        """
        received: Message | None = None
        for one, following in zip(order, [*order[1:], None], strict=True):
            wanted = needed(self.job, self.stage, one)
            if wanted and wanted != received:
                yield from self._exchange(one, None, one, wanted)
            self._pass(one)
            sent = made(self.job, self.stage, one)
            received = None
            if following is not None and one.forward != following.forward:
                received = needed(self.job, self.stage, following)
            if sent or received:
                yield from self._exchange(one, sent, following, received)

    def _exchange(
        self, one: Pass, sent: Message | None, following: Pass | None, received: Message | None
    ) -> Iterator[list[Message]]:
        """Send and receive in one blocking exchange; its spans have the same times."""
        ranks = self.ranks
        ends_of = [(sent, one, "send"), (received, following, "recv")]
        posted = [_Post(m, place, op, ranks.mark()) for m, place, op in ends_of if m and place]
        ranks.think(_BLOCKING_S)
        for post in posted:
            self.mail.post(post.message, sends=post.op == "send", at=post.begin[0])
        yield [post.message for post in posted]
        for post in posted:
            ranks.wait(self.mail.arrived[post.message])
        ranks.catch_up()
        for post in posted:
            self._note_message(post, ranks.device, Track.COMMUNICATION)

    def _interleaved(self, order: list[Pass]) -> Iterator[list[Message]]:
        """Exchange messages next to compute: receives are posted one pass ahead."""
        posted: list[_Post] = []
        self._post(order[0], "recv", posted)
        for one, following in zip(order, [*order[1:], None], strict=True):
            if following:
                self._post(following, "recv", posted)
            if wanted := needed(self.job, self.stage, one):
                yield [wanted]
                self.ranks.wait(self.mail.arrived[wanted])
            self._pass(one)
            self._post(one, "send", posted)
        yield [post.message for post in posted]
        for post in posted:
            end = self.mail.arrived[post.message]
            self._note_message(post, end, Track.OVERLAPPED)
            self.ranks.wait(end)

    def _post(self, one: Pass, op: str, posted: list[_Post]) -> None:
        message = (made if op == "send" else needed)(self.job, self.stage, one)
        if message:
            posted.append(_Post(message, one, op, self.ranks.mark()))
            self.mail.post(message, sends=op == "send", at=posted[-1].begin[0])

    def _note_message(self, post: _Post, end: Array, track: Track) -> None:
        sender, receiver = ends(self.job, post.message)
        other = receiver if post.op == "send" else sender
        direction = "forward" if post.message.forward else "backward"
        name = message_name(post.op, direction)
        number = self._messages[other, name]
        self._messages[other, name] += 1
        facts: Facts = {
            "op": post.op, "direction": direction, "sequence": number,
            "size_bytes": self.job.message_bytes, "microbatch": post.place.microbatch,
            "chunk": post.place.chunk,
        }  # fmt: skip
        start, launch = post.begin
        peer = (other - self.stage) * self.job.stage_size
        self.ranks.note(Recorded(Kind.P2P, name, track, start, end, facts, launch, "pp", peer))

    def _pass(self, one: Pass) -> None:
        """Run a forward or backward."""
        felt = self.ranks.felt
        mine = self.ranks.mine
        struck = disturbed(self._disturbance, self.ranks.shape)
        self.ranks.disturbance = felt.daemon[:, mine] * struck
        self.ranks.think(_HOST_OF_PASS_S)
        begin = self.ranks.mark()
        chunk = one.chunk * self.job.pp + self.stage
        phase = "forward" if one.forward else "backward"
        place: Facts = {"microbatch": one.microbatch, "chunk": one.chunk, "phase": phase}
        self._collect(one)
        if one.forward:
            self._forward(one, chunk, place)
        else:
            self._backward(one, chunk, place)
        self.ranks.note_since(begin, phase, place)

    def _collect(self, one: Pass) -> None:
        """Let the collector of Python stop the thread where it does so in this pass."""
        felt, mine = self.ranks.felt, self.ranks.mine
        for lengths, places in zip(felt.pauses, felt.pause_places, strict=True):
            here = lengths[:, mine] > 0
            here &= (places[:, mine] == one.microbatch) & one.forward & (one.chunk == 0)
            if here.any():
                start = self.ranks.host
                self.ranks.pause(np.where(here, lengths[:, mine], 0.0))
                shown = np.where(here, start, np.nan)
                name, end = collection_of(2), self.ranks.host
                self.ranks.note(Recorded(Kind.GC, name, Track.HOST, shown, end, {}))

    def _size(self, one: Pass) -> Array:
        """Return how many times the mean number of tokens a microbatch has, by rank."""
        usual: Array = self.batches.lengths[one.microbatch]
        return usual * self.ranks.felt.length[:, self.ranks.mine]

    def _load_batch(self, one: Pass, place: Facts) -> None:
        """Take the next batch from the loader; tensor-parallel peers have it from their first."""
        ranks, job = self.ranks, self.job
        start = ranks.host
        took = job.loader_ms / 1000 * np.exp(0.2 * ranks.normal())
        waits = self.batches.waits[one.microbatch][:, ranks.mine]
        reads = (np.arange(job.stage_size) % job.tp == 0).astype(float)
        ranks.think(reads * took + (1 - reads) * _OTHERS_S)
        ranks.pause(reads * waits)
        known = {key: place[key] for key in ("microbatch", "chunk")}
        ranks.note(Recorded(Kind.DATA, "batch-generator", Track.HOST, start, ranks.host, known))
        self.ranks.collective("broadcast", "tp", job.tokens * 2 * _TOKEN_BYTES, place)

    def _forward(self, one: Pass, chunk: int, place: Facts) -> None:
        ranks, job, size = self.ranks, self.job, self._size(one)
        last = chunk == job.pp * job.vpp - 1
        if chunk == 0 or last:
            self._load_batch(one, place)
        if self._gathered.get(one.chunk) is not None and one.microbatch == 0:
            ranks.wait(self._gathered[one.chunk])
        if chunk == 0:
            self._module("embedding", chunk, place, size)
        for number in job.numbers(chunk):
            self._layer(number, chunk, {**place, "layer": number}, size, "")
        if last:
            self._module("output_layer", chunk, place, size)
            begin = ranks.mark()
            ranks.compute(job.work("loss", chunk), size)
            ranks.note_since(begin, "loss", place)

    def _backward(self, one: Pass, chunk: int, place: Facts) -> None:
        job, size = self.job, self._size(one)
        if chunk == job.pp * job.vpp - 1:
            self._module("output_layer", chunk, place, size, backward=True)
        for number in reversed(job.numbers(chunk)):
            here = {**place, "layer": number}
            if job.recompute == "full":
                self._layer(number, chunk, {**here, "phase": "recompute"}, size, "recompute")
            self._layer(number, chunk, here, size, "backward")
        if chunk == 0:
            self._module("embedding", chunk, place, size, backward=True)
        if one.microbatch == job.num_microbatches - 1 and job.overlap_grads:
            self._reduce_chunk(chunk)

    def _layer(self, number: int, chunk: int, place: Facts, size: Array, again: str) -> None:
        """Run a layer's two modules, in its backward the other way round."""
        begin = self.ranks.mark()
        second = "moe" if self.job.experts else "mlp"
        heavy = self.ranks.felt.layer[:, self.ranks.mine]
        modules = (second, "attention") if again == "backward" else ("attention", second)
        for module in modules:
            self._module_of_layer(module, chunk, place, size * heavy, again)
        self.ranks.note_since(begin, _named("transformer_layer", again), place)

    def _module_of_layer(
        self, module: str, chunk: int, place: Facts, size: Array, again: str
    ) -> None:
        begin = self.ranks.mark()
        if module == "moe":
            self._experts(chunk, place, size, again)
        elif again == "backward":
            self._dense_backward(module, chunk, place, size)
        else:
            self._dense_forward(module, chunk, place, size)
        self.ranks.note_since(begin, _named(module, again), place)

    def _dense_forward(self, module: str, chunk: int, place: Facts, size: Array) -> None:
        job = self.job
        whole = job.activation_bytes
        if job.sequence_parallel:
            self.ranks.collective("all_gather", "tp", whole // job.tp, place)
        if module == "attention":
            self.ranks.collective("all_gather", "cp", 2 * whole // job.tp, place)
        self.ranks.compute(job.work(module, chunk), size)
        self.ranks.collective(
            "reduce_scatter" if job.sequence_parallel else "all_reduce", "tp", whole, place
        )

    def _dense_backward(self, module: str, chunk: int, place: Facts, size: Array) -> None:
        """Send the gradient of the input on its way while that of the weights is computed."""
        job, ranks = self.job, self.ranks
        whole = job.activation_bytes
        known = _of_backward(place)
        if module == "attention" and job.recompute == "selective":
            self._core_again(place, size)
        if job.sequence_parallel:
            self.ranks.collective("all_gather", "tp", whole // job.tp, known)
        work = job.work(module, chunk).times(*_BACKWARD)
        ranks.compute(work.times(_INPUT_HALF, 0.7, 0.6), size)
        if module == "attention":
            self.ranks.collective("reduce_scatter", "cp", 2 * whole // job.tp, known)
        op = "reduce_scatter" if job.sequence_parallel else "all_reduce"
        there = ranks.beside(op, "tp", whole, known)
        ranks.compute(work.times(1 - _INPUT_HALF, 0.3, 0.4), size)
        ranks.wait(there)

    def _core_again(self, place: Facts, size: Array) -> None:
        begin = self.ranks.mark()
        work = self.job.work("attention")
        self.ranks.compute(work.times(work.grows, 0.2, 0.2), size)
        again = {**place, "phase": "recompute"}
        self.ranks.note_since(begin, recompute_of("core_attention"), again)

    def _experts(self, chunk: int, place: Facts, size: Array, again: str) -> None:
        """Route, send tokens to experts, let them compute, send the results back."""
        job, ranks = self.job, self.ranks
        load = self.batches.loads[int(place["layer"]) - 1][:, ranks.mine]
        load = load * ranks.felt.load[:, ranks.mine]
        known = _of_backward(place) if again == "backward" else place
        sent = job.activation_bytes * job.top_k // job.tp
        work = job.work("moe", chunk).times(*(_BACKWARD if again == "backward" else (1, 1, 1)))
        ranks.compute(work.times(0.02, 0.25, 0.4), size)
        self.ranks.collective("all_to_all", "ep", sent, known)
        ranks.compute(work.times(0.98, 0.6, 0.5), size * load)
        self.ranks.collective("all_to_all", "ep", sent, known)
        ranks.compute(work.times(0.0, 0.15, 0.1), size)

    def _module(
        self, module: str, chunk: int, place: Facts, size: Array, *, backward: bool = False
    ) -> None:
        """Run the first or the last module of the model."""
        ranks, job = self.ranks, self.job
        begin = ranks.mark()
        work = job.work(module, chunk)
        if module == "output_layer" and job.sequence_parallel:
            self.ranks.collective("all_gather", "tp", job.activation_bytes // job.tp, place)
        ranks.compute(work.times(*_BACKWARD) if backward else work, size)
        if module == "embedding" and not backward:
            op = "reduce_scatter" if job.sequence_parallel else "all_reduce"
            self.ranks.collective(op, "tp", job.activation_bytes, place)
        ranks.note_since(begin, backward_of(module) if backward else module, place)

    def _gather_parameters(self) -> None:
        """Gather the parameters of every chunk next to compute; the first pass waits for them."""
        for chunk in range(self.job.vpp):
            size = int(self.job.parameters(self.stage) * 2 / self.job.vpp)
            shards = self.job.dp * self.job.cp
            self._gathered[chunk] = self.ranks.beside(
                "all_gather", "dp_cp", size // shards, {}, queued=True
            )

    def _reduce_chunk(self, chunk: int) -> None:
        """Reduce the gradients of a chunk next to the passes that are left."""
        op = "reduce_scatter" if self.job.distributed_optimizer else "all_reduce"
        share = _GRADIENT_BYTES / self.job.vpp
        size = int(self.job.parameters(self.stage) * share)
        self._buckets.append(self.ranks.beside(op, "dp_cp", size, {}, queued=True))
        if self.job.experts:
            size = int(self.job.parameters(self.stage, experts=True) * share)
            self._buckets.append(self.ranks.beside(op, "expt_dp", size, {}, queued=True))

    def synchronise(self) -> None:
        """Bring the gradients of all replicas together."""
        ranks, job = self.ranks, self.job
        begin = ranks.mark()
        op = "reduce_scatter" if job.distributed_optimizer else "all_reduce"
        for end in self._buckets:
            ranks.wait(end)
        if not job.overlap_grads:
            self.ranks.collective(
                op, "dp_cp", int(job.parameters(self.stage) * _GRADIENT_BYTES), {}
            )
            if job.experts:
                size = int(job.parameters(self.stage, experts=True) * _GRADIENT_BYTES)
                self.ranks.collective(op, "expt_dp", size, {})
        if job.sequence_parallel:
            self.ranks.collective("all_reduce", "tp", 4 * job.hidden * _GRADIENT_BYTES, {})
        ranks.note_since(begin, "grad-sync", {}, Kind.OPTIMIZER)


def _of_backward(place: Facts) -> Facts:
    """Return the arguments of a collective of autograd, which knows of no layers."""
    return {key: place[key] for key in ("microbatch", "chunk", "phase")}


def _named(module: str, again: str) -> str:
    if again == "backward":
        return backward_of(module)
    return recompute_of(module) if again else module


def run_passes(
    job: Job, felt: Conditions, stages: list[Ranks], batches: Batches, seed: int
) -> None:
    """Let all stages run until every gradient is summed; each message as soon as it can go."""
    mail = _Mail(job=job, stages=stages, seed=seed)
    programs = [Stage(ranks, mail, batches) for ranks in stages]
    waiting: list[tuple[Iterator[list[Message]], list[Message]]] = [
        (program.run(), []) for program in programs
    ]
    while waiting:
        left = []
        moved = False
        for program, wanted in waiting:
            if not all(message in mail.arrived for message in wanted):
                left.append((program, wanted))
                continue
            moved = True
            if (more := next(program, None)) is not None:
                left.append((program, more))
        if not moved:
            raise RuntimeError(f"stages wait for each other: {[wanted for _, wanted in waiting]}")
        waiting = left
    for one in programs:
        one.synchronise()
