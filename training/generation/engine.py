"""The loop that generates: requests in, answers out, on every rank of a job.

    commands from rank 0  →  scheduler  →  one step of the model  →  tokens  →  scheduler  →  …

All ranks run the same loop. Ranks differ only in `Stage` (which layers) and in `RankExchange` (who
speaks). A `GenerationCallback` watches the loop.

**What the ranks tell one another**, in addition to the model's own communication: rank 0 hears the
clients and tells all ranks which requests have come and which are over. The rank that has the
logits, the first of the last pipeline stage, tells all which tokens were chosen. Both go over gloo,
from memory to memory; a rank that waits for the next request, for hours maybe, sleeps in the
kernel. Commands travel as JSON: nothing that arrives is ever unpickled.

**A step in which every row computes one token** is recorded once and replayed (`ReplayedSteps`). A
GPU computes this step of a small model faster than Python can start the kernels. The kernels are
the same every time, so they are recorded as a CUDA graph, which is started as a whole. A recording
reads and writes fixed memory: the step's numbers are copied into a buffer, and the step's sizes are
rounded up. With 5 rows, the longest of 300 tokens, the recording for 6 rows and 384 places is
replayed; the sixth row computes something that nobody reads.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import orjson
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from training.generation.request import Answer, Limits, Request, Sampling, TokenScore
from training.generation.sampling import TokenChoice, choose
from training.generation.scheduler import (
    Decoding,
    RowTokens,
    Scheduler,
    Step,
    StepTokens,
    Target,
    lay_out,
)
from training.generation.stage import Stage

_PATIENCE = timedelta(days=365)


@dataclass(frozen=True, kw_only=True)
class Commands:
    """What all ranks must know before the next step."""

    requests: tuple[Request, ...] = ()
    cancelled: tuple[int, ...] = ()
    """Identifiers of requests whose clients are gone."""
    is_last: bool = False
    """Whether the job ends now."""
    asides: tuple[str, ...] = ()
    """Messages for the engine's callback."""


NOTHING = Commands()


class RankExchange:
    """Carries bytes and scores between the ranks of one job.

    Every rank calls the same methods in the same order.
    """

    def __init__(self, sampling_rank: int) -> None:
        self._sampling_rank = sampling_rank
        self._is_alone = dist.get_world_size() == 1
        self._group = None if self._is_alone else dist.new_group(backend="gloo", timeout=_PATIENCE)

    def share_commands(self, commands: Commands) -> Commands:
        """Return rank 0's commands on every rank."""
        if self._is_alone:
            return commands
        is_sender = dist.get_rank() == 0
        has_commands = is_sender and commands is not NOTHING
        payload = self.share(_encode(commands) if has_commands else b"")
        if not payload:
            return NOTHING
        return commands if is_sender else _decode(payload)

    def share(self, payload: bytes) -> bytes:
        """Return rank 0's bytes on every rank."""
        if self._is_alone:
            return payload
        is_sender = dist.get_rank() == 0
        size = torch.tensor([len(payload)])
        dist.broadcast(size, src=0, group=self._group)
        if not int(size):
            return b""
        if is_sender:
            content = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        else:
            content = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(content, src=0, group=self._group)
        return payload if is_sender else content.numpy().tobytes()

    def share_scores(
        self, scores: torch.Tensor | None, num_targets: int, num_columns: int
    ) -> torch.Tensor:
        """Return on every rank the sampling rank's table `(target, column)`, as float64."""
        if scores is None:
            scores = torch.empty(num_targets, num_columns, dtype=torch.float64)
        if not self._is_alone:
            dist.broadcast(scores, src=self._sampling_rank, group=self._group)
        return scores

    def collect(self, content: bytes) -> list[bytes] | None:
        """Return the bytes of every rank on rank 0, by rank; None on the other ranks."""
        if self._is_alone:
            return [content]
        own = torch.tensor([len(content)])
        sizes = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(sizes, own, group=self._group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        parts = None
        if dist.get_rank() == 0:
            parts = [torch.empty_like(padded) for _ in sizes]
        dist.gather(padded, parts, dst=0, group=self._group)
        if parts is None:
            return None
        return [
            part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)
        ]


def _encode(commands: Commands) -> bytes:
    return orjson.dumps(commands)


def _decode(payload: bytes) -> Commands:
    parts: dict[str, Any] = orjson.loads(payload)
    return Commands(
        requests=tuple(_request(fields) for fields in parts["requests"]),
        cancelled=tuple(parts["cancelled"]),
        is_last=parts["is_last"],
        asides=tuple(parts["asides"]),
    )


def _request(fields: dict[str, Any]) -> Request:
    fields["prompt"] = tuple(fields["prompt"])
    fields["stop_ids"] = tuple(fields["stop_ids"])
    fields["sampling"] = Sampling(**fields["sampling"])
    return Request(**fields)


logger = logging.getLogger(__name__)

Compute = Callable[[], torch.Tensor]

_FEWEST_PLACES = 128
_MOST_RECORDINGS = 64


class StepRecorder(Protocol):
    """Makes callables that repeat a computation, from and into the same memory."""

    def record(self, compute: Compute) -> Compute:
        """Return what repeats `compute`, which must neither wait for the device nor read from it
        to decide something.
        """


class CudaGraphs:
    """Records CUDA graphs; what cannot be recorded is computed anew each time."""

    def __init__(self) -> None:
        # Graphs share memory: no two run at once, and no result is used after the next replay.
        self._pool = torch.cuda.graph_pool_handle()
        self._has_failed = False

    def record(self, compute: Compute) -> Compute:
        """Compute once, so that libraries are set up, then record and return the replay."""
        if self._has_failed:
            return compute
        current = torch.cuda.current_stream()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            compute()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use CUDA meanwhile: NCCL's thread queries events.
        recording = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
        try:
            # A recording that fails leaves its stream current; the outer context restores ours.
            with torch.cuda.stream(current), recording:
                result = compute()
        except RuntimeError as error:
            self._has_failed = True
            reason = str(error.__context__ or error).splitlines()[0]
            logger.warning(
                "no CUDA graph of a step could be recorded, going on without: %s", reason
            )
            return compute

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


class ReplayedSteps:
    """Computes steps of one token a row by replaying recordings, one for each size that occurs."""

    def __init__(self, stage: Stage, limits: Limits, recorder: StepRecorder) -> None:
        self._stage = stage
        self._limits = limits
        self._recorder = recorder
        self._memory = torch.zeros(4 * limits.num_rows, dtype=torch.int64, device=stage.device)
        self._recorded: OrderedDict[tuple[int, int], Compute] = OrderedDict()

    def takes(self, step: Step) -> bool:
        """Return whether a step computes one token of each row, and no hook watches the model."""
        if self._stage.is_watched or len(step.targets) != len(step.shares):
            return False
        slots_are_rows = [share.slot for share in step.shares] == [*range(len(step.shares))]
        return slots_are_rows and all(len(share.tokens) == 1 for share in step.shares)

    @torch.inference_mode()
    def run(self, shares: Sequence[RowTokens]) -> torch.Tensor:
        """Return the logits `(share, vocabulary)`; the next run overwrites them."""
        limits = self._limits
        num_rows = min(round_up(len(shares)), limits.num_rows)
        longest = max(share.end for share in shares)
        length = min(max(round_up(longest), _FEWEST_PLACES), limits.max_length)
        self._numbers(num_rows).copy_(self._fill(shares, num_rows))
        key = num_rows, length
        replay = self._recorded.pop(key, None)
        if replay is None:
            if len(self._recorded) == _MOST_RECORDINGS:
                self._recorded.popitem(last=False)
            replay = self._recorder.record(lambda: self._compute(num_rows, length))
        self._recorded[key] = replay  # put at the end: the most recently used
        return replay()[: len(shares)]

    @property
    def num_recorded(self) -> int:
        """Return the number of recordings that are kept."""
        return len(self._recorded)

    def forget(self) -> None:
        """Drop all recordings."""
        self._recorded.clear()

    def _numbers(self, num_rows: int) -> torch.Tensor:
        """Return the fixed memory for the numbers of a step of `num_rows` rows.

        `(4, row)`: token, position, place in the cache, number of places that the row sees.
        """
        return self._memory[: 4 * num_rows].view(4, num_rows)

    def _fill(self, shares: Sequence[RowTokens], num_rows: int) -> torch.Tensor:
        """Return the numbers of a step, on the CPU.

        Rows that only fill up write to the last place of their slots. That does no harm: a real row
        writes this place in the same step that first reads it.
        """
        max_length = self._limits.max_length
        columns = [
            (share.tokens[0], share.start, share.slot * max_length + share.start, share.end)
            for share in shares
        ]
        columns += [(0, 0, (slot + 1) * max_length - 1, 1) for slot in range(len(shares), num_rows)]
        return torch.tensor(list(zip(*columns, strict=True)))

    def _compute(self, num_rows: int, length: int) -> torch.Tensor:
        """Compute the step whose numbers are in the buffer."""
        stage, numbers = self._stage, self._numbers(num_rows)
        places = torch.arange(length, device=stage.device)
        is_seen = places < numbers[3][:, None]
        # In the form that is added to scores, made once here instead of in each layer.
        visible = torch.where(is_seen, 0.0, float("-inf")).to(stage.dtype)[:, None, None]
        layout = StepTokens(
            tokens=numbers[0:1],
            positions=numbers[1:2],
            places=numbers[2],
            decoding=Decoding(
                num_rows=num_rows, slots=slice(0, num_rows), length=length, visible=visible
            ),
            pieces=(),
        )
        logits = stage.run(layout, None)
        assert logits is not None  # the only stage is also the last stage
        return logits


def round_up(count: int) -> int:
    """Return the next of 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, …: less than 1.5 times `count`."""
    power = 1 << (count - 1).bit_length()
    between = power // 4 * 3
    return between if count <= between else power


class GenerationCallback:
    """Moments in the life of an engine; all methods are called on the thread that computes."""

    def step(self, step: Step) -> AbstractContextManager[None]:
        """Surround the computation of one step, from the model's input to the chosen tokens."""
        del step
        return nullcontext()

    def answered(self, scheduler: Scheduler, answers: Sequence[Answer]) -> None:
        """Note the answers of a step, and what the batch holds after the step."""
        del scheduler, answers

    @property
    def has_work(self) -> bool:
        """Return whether `work` has something to do; the same on all ranks."""
        return False

    def receive(self, aside: str) -> None:
        """Take an aside: a message from a client of the callback to all ranks."""
        del aside

    def work(self) -> None:
        """Do one step of the callback's own work, between two steps of the engine, on all ranks."""


Inbox = Callable[[bool], Commands]
"""Returns what has arrived since the last call; with True waits until something arrives."""


class Engine:
    """Generates for all requests of a job; every rank has one engine."""

    def __init__(
        self,
        stage: Stage,
        limits: Limits,
        callback: GenerationCallback | None = None,
        recorder: StepRecorder | None = None,
    ) -> None:
        """Make an engine; with a recorder, steps of one token a row are replayed."""
        self.stage = stage
        self.limits = limits
        self._callback = callback or GenerationCallback()
        self._replay = None if recorder is None else ReplayedSteps(stage, limits, recorder)
        cache = stage.cache
        self.scheduler = Scheduler(
            num_slots=limits.num_rows,
            max_prompt_tokens=limits.max_prompt_tokens,
            move=lambda source, target, length: cache.move(
                source=source, target=target, length=length
            ),
        )
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        last_stage = dist.get_process_group_ranks(pipeline)[-1]
        # The first tensor-parallel rank of the last stage, where rank 0's pipeline ends.
        sampling_rank = last_stage - parallel_state.get_tensor_model_parallel_rank()
        self.is_sampling = dist.get_rank() == sampling_rank
        self.exchange = RankExchange(sampling_rank)

    @property
    def cache_bytes(self) -> int:
        """Return the memory of this rank's keys and values."""
        return self.stage.cache.num_bytes

    def run(self, inbox: Inbox | None = None) -> Iterator[list[Answer]]:
        """Serve what the inbox of rank 0 brings, step by step, until a command `is_last`.

        Yield the answers of each step, on every rank. Ranks other than 0 need no inbox.
        """
        while True:
            is_idle = not (self.scheduler.has_work or self._callback.has_work)
            own = NOTHING if inbox is None else inbox(is_idle)
            commands = self.exchange.share_commands(own)
            for request in commands.requests:
                self.scheduler.add(request)
            if commands.cancelled:
                self.scheduler.cancel(set(commands.cancelled))
                self._callback.answered(self.scheduler, ())
            if commands.is_last:
                return
            for aside in commands.asides:
                self._callback.receive(aside)
            self._callback.work()
            if self.scheduler.has_work:
                yield self._advance()

    @property
    def num_recorded(self) -> int:
        """Return for how many sizes a step can be replayed now."""
        return 0 if self._replay is None else self._replay.num_recorded

    def close(self) -> None:
        """Drop recorded graphs; the job's communicators cannot end while graphs use them."""
        if self._replay is not None:
            self._replay.forget()

    def generate(self, requests: Iterable[Request]) -> Iterator[list[Answer]]:
        """Answer a given set of requests; every rank calls this, only rank 0's requests count."""
        pending = [Commands(requests=tuple(requests))]

        def inbox(waits: bool) -> Commands:
            if pending:
                return pending.pop()
            return Commands(is_last=True) if waits else NOTHING

        return self.run(inbox)

    def _advance(self) -> list[Answer]:
        step = self.scheduler.plan()
        with self._callback.step(step):
            scores = self._compute(step)
        answers = self.scheduler.record(step, scores)
        self._callback.answered(self.scheduler, answers)
        return answers

    @torch.inference_mode()
    def _compute(self, step: Step) -> list[TokenScore]:
        targets = step.targets
        if self._replay is not None and self._replay.takes(step):
            logits: torch.Tensor | None = self._replay.run(step.shares)
        else:
            logits = self._run(step)
        if not targets:
            return []
        table = None
        if logits is not None and self.is_sampling:
            table = tabulate(logits, targets, step.num_logprobs)
        num_columns = 1 if step.num_logprobs is None else 2 + 2 * step.num_logprobs
        table = self.exchange.share_scores(table, len(targets), num_columns)
        return [_score(row, target) for row, target in zip(table.tolist(), targets, strict=True)]

    def _run(self, step: Step) -> torch.Tensor | None:
        """Compute any step; return the logits `(target, vocabulary)` on the last stage, else
        None.
        """
        stage = self.stage
        layout = lay_out(step.shares, max_length=self.limits.max_length, device=stage.device)
        # Without a target the last stage must still take part: it computes one position.
        indices = [target.index for target in step.targets] or [0]
        wanted = None
        if len(indices) < layout.places.shape[0]:
            wanted = torch.tensor(indices, device=stage.device)
        return stage.run(layout, wanted)


def tabulate(
    logits: torch.Tensor, targets: Sequence[Target], num_logprobs: int | None
) -> torch.Tensor:
    """Choose and score all targets; return `(target, column)` in float64, on the CPU.

    Columns: the token, its log probability, then the tokens of the best alternatives, then the log
    probabilities of these. Where `num_logprobs` is None, the only column is the token.
    """
    tokens = _tokens(logits, targets)[:, None]
    if num_logprobs is None:
        return tokens.double().cpu()
    logits = logits.float()
    total = logits.logsumexp(dim=-1, keepdim=True)
    columns = [tokens.double(), (logits.gather(1, tokens) - total).double()]
    if num_logprobs:
        best = logits.topk(num_logprobs, dim=-1)
        columns += [best.indices.double(), (best.values - total).double()]
    return torch.cat(columns, dim=1).cpu()


def _tokens(logits: torch.Tensor, targets: Sequence[Target]) -> torch.Tensor:
    """Return the token of each target: the given token, or one chosen from the logits."""
    choices: list[TokenChoice] = [target.choice for target in targets if target.choice is not None]
    if len(choices) == len(targets):
        return choose(logits, choices)
    given = [target.given for target in targets]
    tokens = torch.tensor([token or 0 for token in given], device=logits.device)
    if choices:
        free = [index for index, token in enumerate(given) if token is None]
        rows = torch.tensor(free, device=logits.device)
        tokens[rows] = choose(logits[rows], choices)
    return tokens


def _score(row: Sequence[float], target: Target) -> TokenScore:
    """Return one target's score, with as many alternatives as its own request asked for."""
    wanted = target.row.request.num_logprobs
    if wanted is None or len(row) == 1:
        return TokenScore(token=int(row[0]), logprob=None)
    most = (len(row) - 2) // 2
    alternatives = zip(row[2 : 2 + wanted], row[2 + most : 2 + most + wanted], strict=True)
    return TokenScore(
        token=int(row[0]),
        logprob=row[1],
        alternatives=tuple((int(token), logprob) for token, logprob in alternatives),
    )
