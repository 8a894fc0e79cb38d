"""Any plan, carried out over Megatron-Core's model chunks, timed and watched.

`Executor` takes the place of the function that `get_forward_backward_func` returns: the same
keywords, the same reports, the same gradients to the last bit. It runs this rank's list of actions
by Megatron-Core's own `forward_step` and `backward_step`; the data-parallel reduction, the loss
scale and the end of the step (`finalize_model_grads_func`) are as in Megatron-Core's schedules.

    plan, rank 1 of 2:   1F0 1I0 1F1 1I1 1W0 1W1
    messages:            ← output of stage 0 for each F    → gradient after each I

`Stopwatch` and `ActionClock` time this rank's own work, on the CPU by the clock, on a GPU by
events. `Watchdog` reports a rank that has begun no action for too long.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random
from megatron.core.utils import get_model_config, get_model_type

from training.pipeline.channels import Channels, Link, Mail, link_of
from training.pipeline.guided import Patience, patience_for
from training.pipeline.plan import (
    GIVES_INPUT_GRADIENT,
    RECEIVES,
    SENDS,
    Action,
    ActionKind,
    Message,
    PipelineShape,
    Plan,
    message_made,
    message_needed,
    message_of_transfer,
)
from training.pipeline.split_backward import WeightGradients

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer import TransformerConfig


class Stopwatch:
    """Times the work of this rank inside `timing`; waits for messages lie outside of it.

    On a GPU pairs of events are read when the step is over.
    """

    def __init__(self, device: str) -> None:
        self._on_gpu = device != "cpu"
        self._busy_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Time what is inside."""
        if self._on_gpu:
            begin = recorded_event()
            yield
            self._events.append((begin, recorded_event()))
        else:
            began_s = time.perf_counter()
            yield
            self._busy_s += time.perf_counter() - began_s

    def read_s(self) -> float:
        """Wait for the timed work to end and return its seconds since the last call."""
        busy_s, self._busy_s = self._busy_s, 0.0
        for begin, end in self._events:
            end.synchronize()
            busy_s += begin.elapsed_time(end) / 1e3
        self._events.clear()
        return busy_s


def recorded_event() -> torch.cuda.Event:
    """Return an event recorded on the current stream now."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class ActionClock:
    """Times forwards; on a GPU also keeps the host from choosing far ahead of the GPU."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device != "cpu"
        self._forwards_s: list[float] = []
        self._events: deque[tuple[Action, torch.cuda.Event, torch.cuda.Event]] = deque()

    def patience(self) -> Patience | None:
        """Return how long to wait for an input, from the forwards timed since the last call; None
        where none were timed.
        """
        if not self._forwards_s:
            return None
        forward_s = statistics.median(self._forwards_s)
        self._forwards_s.clear()
        return patience_for(forward_s)

    def catch_up(self) -> None:
        """Wait until at most one action is left for the GPU to do."""
        while len(self._events) > 1:
            action, begin, end = self._events.popleft()
            end.synchronize()
            self._add(action, begin.elapsed_time(end) / 1e3)

    @contextmanager
    def timing(self, action: Action) -> Iterator[None]:
        """Time an action that is carried out inside."""
        if self._on_gpu:
            begin = recorded_event()
            yield
            self._events.append((action, begin, recorded_event()))
        else:
            began_s = time.perf_counter()
            yield
            self._add(action, time.perf_counter() - began_s)

    def _add(self, action: Action, seconds: float) -> None:
        if action.kind is ActionKind.FORWARD:
            self._forwards_s.append(seconds)


STALL_S = 60.0
"""A rank that begins no action for this long says where it stands. Actions take milliseconds to
seconds; the timeout of process groups, after which the job ends, is 10 minutes by default."""


class Watchdog:
    """Prints, once a step, where this rank stands when no action has begun for `stall_s`.

    A context around a step; call `beat` as each action begins. `describe` returns what the rank
    does next, which inputs it has, and what it holds.
    """

    def __init__(self, rank: int, describe: Callable[[], str], *, stall_s: float = STALL_S) -> None:
        self._rank = rank
        self._describe = describe
        self._stall_s = stall_s
        self._last_s = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="pipeline-watchdog")

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()

    def beat(self) -> None:
        """Note that an action begins."""
        self._last_s = time.monotonic()

    def _watch(self) -> None:
        while not self._over.wait(self._stall_s / 4):
            silent_s = time.monotonic() - self._last_s
            if silent_s > self._stall_s:
                print(
                    f"rank {self._rank} has waited for {silent_s:.0f} s: {self._describe()}",
                    file=sys.stderr,
                    flush=True,
                )
                return


Report = dict[str, torch.Tensor]
Stream = Iterator[object]
ForwardStep = Callable[..., object]


class Post(Protocol):
    """Where a step's messages go and come from."""

    def send(self, link: Link, message: Message, chunk: int, tensor: torch.Tensor) -> None:
        """Begin to send a tensor that this rank's `chunk` made."""

    def post(self, link: Link, message: Message) -> None:
        """Post the receive of a message."""

    def take(self, link: Link, message: Message) -> torch.Tensor:
        """Wait for a message and return its tensor."""

    def drain(self) -> None:
        """Wait until all messages have left."""


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What a step works on: the arguments of a schedule function, arranged by chunk."""

    forward_step: ForwardStep
    streams: Sequence[Stream | None]
    """Data by chunk; None where a chunk needs none."""
    chunks: Sequence[DistributedDataParallel]
    config: TransformerConfig
    groups: ProcessGroupCollection
    divisor: int
    """What each microbatch's loss is divided by: the number of microbatches of an even share."""
    weight_gradients: Sequence[WeightGradients]
    """Weight gradients by chunk; empty where backward passes are whole."""
    stopwatch: Stopwatch | None = None
    """Times what this rank computes, where that is wanted."""


class Step:
    """One iteration on this rank: what is held between actions, and how each action is done."""

    def __init__(self, work: StepWork, plan: Plan, rank: int, post: Post) -> None:
        self.reports: list[Report] = []
        self.num_tokens = torch.zeros([], dtype=torch.int, device=torch.cuda.current_device())
        self._work = work
        self._plan = plan
        self._pipeline = plan.shape
        self._post = post
        self.final = frozenset(_final_actions(plan.actions[rank]))
        self._batches = [_Batches(stream) for stream in work.streams]
        self._held: dict[tuple[int, int], _Held] = {}
        self._made: dict[Message, torch.Tensor] = {}

    def batch(self, microbatch: int) -> object:
        """Return the data of a microbatch for this rank's first chunk; loads them when needed."""
        return self._batches[0].loaded(microbatch)

    def do(self, action: Action) -> None:
        """Carry out one action."""
        if action.kind in SENDS or action.kind in RECEIVES:
            self._transfer(action)
            return
        with self._reduction(action):
            match action.kind:
                case ActionKind.FORWARD:
                    self._forward(action)
                case ActionKind.RECOMPUTE:
                    self._recompute(action)
                case ActionKind.WEIGHT_GRADIENT:
                    self._weight_gradient(action)
                case _:
                    self._backward(action)

    def _reduction(self, action: Action) -> AbstractContextManager[object]:
        """Return a context in which gradients are reduced only after final actions."""
        sync = self._work.config.no_sync_func
        if sync is None or action.kind is ActionKind.FORWARD or action in self.final:
            return nullcontext()
        chunk = self._pipeline.chunk_of(action.stage)
        own = sync[chunk] if isinstance(sync, list) else sync
        return cast("AbstractContextManager[object]", own())

    def _forward(self, action: Action) -> None:
        held = _Held(inputs=self._input(action))
        self._held[action.stage, action.microbatch] = held
        is_repeated = self._plan.repeats(action)
        if is_repeated:
            held.random_states = random._get_all_rng_states()
        held.output = self._run(action, held.inputs, self.reports, keeps_graph=not is_repeated)
        self._hand_on(action, held.output)
        if is_repeated:
            held.output = None
        else:
            schedules.deallocate_output_tensor(
                held.output, self._work.config.deallocate_pipeline_outputs
            )

    def _recompute(self, action: Action) -> None:
        """Run a forward once more, with its graph and the random numbers of the first time."""
        held = self._held[action.stage, action.microbatch]
        with random._fork_rng():
            random._set_all_rng_states(*held.random_states)
            held.output = self._run(action, held.inputs, [])
        held.random_states = ()
        schedules.deallocate_output_tensor(
            held.output, self._work.config.deallocate_pipeline_outputs
        )

    def _run(
        self,
        action: Action,
        inputs: torch.Tensor | None,
        reports: list[Report],
        *,
        keeps_graph: bool = True,
    ) -> torch.Tensor:
        work, chunk = self._work, self._pipeline.chunk_of(action.stage)
        with self._timed():
            output, num_tokens = schedules.forward_step(
                work.forward_step if keeps_graph else torch.no_grad()(work.forward_step),
                self._batches[chunk].stream(action.microbatch),
                work.chunks[chunk],
                work.divisor,
                inputs,
                reports,
                work.config,
                cp_group_size=work.groups.cp.size(),
                is_first_microbatch=action.microbatch == 0,
                current_microbatch=action.microbatch,
                vp_stage=chunk if self._pipeline.num_chunks > 1 else None,
                is_last_stage=action.stage == self._pipeline.num_stages - 1,
            )
        if action.kind is ActionKind.FORWARD:
            self.num_tokens += num_tokens
        return cast(torch.Tensor, output)

    def _backward(self, action: Action) -> None:
        """Do both halves of a backward pass, or only the first (the gradient of the input)."""
        work, chunk = self._work, self._pipeline.chunk_of(action.stage)
        held = self._held.pop((action.stage, action.microbatch))
        assert held.output is not None
        self._batches[chunk].forget(action.microbatch)
        message = message_needed(self._pipeline, action)
        gradient = self._take(message) if message else None
        with self._timed():
            input_gradient = schedules.backward_step(
                held.inputs, held.output, gradient, get_model_type(work.chunks[chunk]), work.config
            )
        if work.weight_gradients:
            work.weight_gradients[chunk].end_pass(action.microbatch)
        self._hand_on(action, input_gradient)
        if work.weight_gradients and action.kind is ActionKind.BACKWARD:
            self._weight_gradient(action)

    def _weight_gradient(self, action: Action) -> None:
        chunk = self._pipeline.chunk_of(action.stage)
        with self._timed():
            self._work.weight_gradients[chunk].compute(action.microbatch, chunk)

    def _timed(self) -> AbstractContextManager[object]:
        watch = self._work.stopwatch
        return nullcontext() if watch is None else watch.timing()

    def _input(self, action: Action) -> torch.Tensor | None:
        message = message_needed(self._pipeline, action)
        return self._take(message).requires_grad_() if message else None

    def _take(self, message: Message) -> torch.Tensor:
        return self._post.take(link_of(self._pipeline, message), message)

    def _hand_on(self, action: Action, tensor: torch.Tensor) -> None:
        """Send what an action made; keep it where the plan names the send as an action."""
        message = message_made(self._pipeline, action)
        if message is None:
            return
        link = link_of(self._pipeline, message)
        if not self._plan.names_transfers or link.sender == link.receiver:
            self._post.send(link, message, self._pipeline.chunk_of(action.stage), tensor)
        else:
            self._made[message] = tensor.detach()

    def _transfer(self, action: Action) -> None:
        message = message_of_transfer(action)
        link = link_of(self._pipeline, message)
        if action.kind in RECEIVES:
            self._post.post(link, message)
        else:
            chunk = self._pipeline.chunk_of(action.stage)
            self._post.send(link, message, chunk, self._made.pop(message))


@dataclass
class _Held:
    """What a forward leaves for its backward."""

    inputs: torch.Tensor | None
    output: torch.Tensor | None = None
    random_states: tuple[object, ...] = ()


class _Batches:
    """Data of a chunk by microbatch, loaded in the order of microbatches, not of forwards."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream
        self._loaded: dict[int, object] = {}
        self._num_loaded = 0

    def stream(self, microbatch: int) -> Stream | None:
        """Return an iterator over the data of one microbatch; None where the chunk needs none."""
        return None if self._stream is None else self._one(microbatch)

    def _one(self, microbatch: int) -> Stream:
        yield self.loaded(microbatch)

    def loaded(self, microbatch: int) -> object:
        """Return the data of one microbatch."""
        assert self._stream is not None
        while self._num_loaded <= microbatch:
            self._loaded[self._num_loaded] = next(self._stream)
            self._num_loaded += 1
        return self._loaded[microbatch]

    def forget(self, microbatch: int) -> None:
        """Drop the data of a microbatch that is needed no more."""
        self._loaded.pop(microbatch, None)


def _final_actions(actions: Sequence[Action]) -> Iterator[Action]:
    """Yield for each stage the last action that gives input gradients, and the last that gives
    weight gradients.

    The gradients of parameters outside linear layers are final after the first of these actions,
    all gradients after the second.
    """
    weights = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)
    for kinds in (GIVES_INPUT_GRADIENT, weights):
        yield from {action.stage: action for action in actions if action.kind in kinds}.values()


class Driver(Protocol):
    """Decides in which order a rank's list is carried out, and how messages travel."""

    def mail(self, pipeline: PipelineShape, shape: Sequence[int], dtype: torch.dtype) -> DriverPost:
        """Return what sends and receives this rank's messages, each of `shape` and `dtype`."""

    def run(self, step: Step, plan: Plan, rank: int, beat: Callable[[], None]) -> None:
        """Carry out a step; call `beat` as each action begins."""

    def describe(self) -> str:
        """Return where the step stands: the next action, the inputs there, what is held."""


class DriverPost(Post, Protocol):
    """A step's messages, learnt from the plan before the step begins."""

    def expect(self, plan: Plan) -> None:
        """Learn which messages a step brings."""


class ListDriver:
    """Carries out a rank's list of actions in its order."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._mail: Mail | None = None
        self._next: Action | None = None

    def mail(self, pipeline: PipelineShape, shape: Sequence[int], dtype: torch.dtype) -> Mail:
        """Return what sends and receives this rank's messages; made at the first call."""
        del pipeline
        if self._mail is None:
            self._mail = Mail(self._channels, shape, dtype)
        return self._mail

    def run(self, step: Step, plan: Plan, rank: int, beat: Callable[[], None]) -> None:
        """Carry out one action after the other."""
        for action in plan.actions[rank]:
            self._next = action
            beat()
            step.do(action)

    def describe(self) -> str:
        """Return the action under way."""
        return f"at {self._next}"


class Executor:
    """A schedule function that carries out plans.

    `plan_for` returns the plan of the step that begins, for a number of microbatches.
    """

    def __init__(
        self,
        plan_for: Callable[[int], Plan],
        driver: Driver,
        weight_gradients: Sequence[WeightGradients],
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self._plan_for = plan_for
        self._driver = driver
        self._weight_gradients = weight_gradients
        self._stopwatch = stopwatch

    def __call__(
        self,
        *,
        forward_step_func: ForwardStep,
        data_iterator: Stream | list[Stream | None] | None,
        model: DistributedDataParallel | list[DistributedDataParallel],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        own_microbatches: int | None = None,
    ) -> list[Report]:
        """Run a step forward and backward; return the reports of the loss function.

        The loss is divided by `num_microbatches`. `own_microbatches` is how many this replica runs,
        where that is another number.
        """
        chunks = model if isinstance(model, list) else [model]
        config = get_model_config(chunks[0])
        groups = process_groups()
        work = StepWork(
            forward_step=forward_step_func,
            streams=data_iterator if isinstance(data_iterator, list) else [data_iterator],
            chunks=chunks,
            config=config,
            groups=groups,
            divisor=num_microbatches,
            weight_gradients=self._weight_gradients,
            stopwatch=self._stopwatch,
        )
        plan = self._plan_for(own_microbatches or num_microbatches)
        shape = message_shape(config, groups, seq_length, micro_batch_size)
        mail = self._driver.mail(plan.shape, shape, config.pipeline_dtype)
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(
                barrier=config.barrier_with_L1_time
            )
        step = Step(work, plan, groups.pp.rank(), mail)
        mail.expect(plan)
        with Watchdog(dist.get_rank(), self._driver.describe) as watchdog:
            self._driver.run(step, plan, groups.pp.rank(), watchdog.beat)
            mail.drain()
        if config.finalize_model_grads_func is not None:
            config.finalize_model_grads_func(
                chunks,
                step.num_tokens if config.calculate_per_token_loss else None,
                pg_collection=groups,
            )
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return step.reports


def message_shape(
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    seq_length: int,
    micro_batch_size: int,
) -> tuple[int, int, int]:
    """Return the shape of what one stage hands to the next, (position, sample, hidden)."""
    length = seq_length // groups.cp.size()
    if config.sequence_parallel:
        length //= groups.tp.size()
    return length, micro_batch_size, config.hidden_size


def process_groups() -> ProcessGroupCollection:
    """Return the process groups that the end of a step reduces over, as Megatron-Core's schedules
    do.
    """
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.cp = parallel_state.get_context_parallel_group()
    groups.dp_cp = parallel_state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=False
    )
    return groups
