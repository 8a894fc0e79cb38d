"""MegaDPP: a step whose order is chosen while it runs.

A rank follows its plan and leaves it where the next action has no input and none is about to come
(`guided` holds the rule). Messages are announced: when a rank begins the work for a message, a
header of three numbers goes ahead on the CPU.

    sender     header ──┐   |── forward 1F3 ──| ── tensor ──┐
    receiver            └→ "2F3 is announced"               └→ "2F3 is there"

One thread a channel receives headers and tensors. Where several ranks compute one stage together
(tensor and context parallel), the first rank chooses and tells the other ranks over the CPU. The
first rank does not wait for the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from training.pipeline.channels import (
    Channel,
    Channels,
    Link,
    MessageEnd,
    SendQueue,
    cpu_group_of,
    end_step,
    link_of,
    start,
    transfer_of,
)
from training.pipeline.executor import ActionClock, Step
from training.pipeline.guided import Patience, PlanProgress, choose
from training.pipeline.plan import (
    Action,
    ActionKind,
    Message,
    PipelineShape,
    Plan,
    message_made,
    message_needed,
)

SOON_S = 1e-6
"""Seconds until an announced message, as `Outlook` gives them: the real time is not known."""

_KINDS = tuple(ActionKind)
_POLL_S = 20e-6
"""Pause between two looks at a receive on a GPU."""


class Arrivals:
    """Messages that were announced and messages that have come, filled by one thread a channel."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._announced: set[Message] = set()
        self._arrived: dict[Message, torch.Tensor] = {}
        self._error: BaseException | None = None

    def outlook(self, message: Message) -> float | None:
        """Return 0 when a message is there, `SOON_S` when it is announced, None otherwise."""
        if message in self._arrived:
            return 0.0
        return SOON_S if message in self._announced else None

    def announce(self, message: Message) -> None:
        """Note that the header of a message has come."""
        with self.changed:
            self._announced.add(message)
            self.changed.notify_all()

    def arrive(self, message: Message, tensor: torch.Tensor) -> None:
        """Note that a message has come."""
        with self.changed:
            self._arrived[message] = tensor
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Tell whoever waits that a channel is broken."""
        with self.changed:
            self._error = error
            self.changed.notify_all()

    def take(self, message: Message) -> torch.Tensor:
        """Wait for a message and return its tensor."""
        with self.changed:
            while message not in self._arrived:
                self.check()
                self.changed.wait()
            self._announced.discard(message)
            return self._arrived.pop(message)

    def check(self) -> None:
        """Raise the error that broke a channel, if any."""
        if self._error is not None:
            raise self._error

    def __str__(self) -> str:
        def listed(messages: Sequence[Message]) -> str:
            return " ".join(f"{m.stage}{m.kind.value}{m.microbatch}" for m in messages) or "none"

        return (
            f"inputs there: {listed(list(self._arrived))}; "
            f"announced: {listed(list(self._announced))}"
        )


class _Receiver:
    """The thread that receives one channel's headers and tensors.

    Each tensor has the shape, number format and device of `like`.
    """

    def __init__(
        self,
        channel: Channel,
        arrivals: Arrivals,
        pipeline: PipelineShape,
        like: torch.Tensor,
    ) -> None:
        self._channel = channel
        self._arrivals = arrivals
        self._pipeline = pipeline
        self._like = like
        self._due = threading.Semaphore(0)
        threading.Thread(target=self._run, daemon=True, name="pipeline-receiver").start()

    def expect(self, number: int) -> None:
        """Expect `number` messages in this step."""
        self._due.release(number)

    def _run(self) -> None:
        on_gpu = self._like.is_cuda
        if on_gpu:
            torch.cuda.set_device(self._like.device)
        stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
        try:
            while True:
                self._due.acquire()
                with torch.cuda.stream(stream) if stream is not None else nullcontext():
                    self._receive(on_gpu=on_gpu)
        except Exception as error:
            self._arrivals.fail(error)

    def _receive(self, *, on_gpu: bool) -> None:
        channel = self._channel
        assert channel.headers is not None
        header = torch.empty(3, dtype=torch.int64)
        channel.headers.receive(header)
        kind, stage, microbatch = map(int, header.tolist())
        message = Message(_KINDS[kind], stage, microbatch)
        self._arrivals.announce(message)
        tensor = torch.empty(self._like.shape, dtype=self._like.dtype, device=self._like.device)
        transfer = transfer_of(
            MessageEnd.RECEIVE, channel, message, self._pipeline.chunk_of(message.stage)
        )
        work = start(transfer, tensor, channel.way)
        if on_gpu:
            while not work.is_completed():
                time.sleep(_POLL_S)
        work.wait()
        self._arrivals.arrive(message, tensor)


class AnnouncedMail:
    """Messages of a step whose order is not known beforehand; each is announced by a header."""

    def __init__(
        self,
        channels: Channels,
        pipeline: PipelineShape,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        self.arrivals = Arrivals()
        self._pipeline = pipeline
        self._channels = channels
        self._kind = tuple(shape), dtype
        like = torch.empty(1, dtype=dtype, device=channels.device).expand(tuple(shape))
        self._on_gpu = channels.device != "cpu"
        self._outboxes = {channel.link: SendQueue(channel) for channel in channels.outgoing()}
        self._headers: list[tuple[dist.Work, torch.Tensor]] = []
        self._receivers = {
            channel.link: _Receiver(channel, self.arrivals, pipeline, like)
            for channel in channels.incoming()
        }

    def expect(self, plan: Plan) -> None:
        """Learn how many messages a step brings; all of them may be under way at once."""
        for channel in self._channels.own:
            link = channel.link
            number = len(plan.messages(link.sender, link.receiver, forward=link.forward))
            channel.way.reserve(number, *self._kind)
            if link in self._receivers:
                self._receivers[link].expect(number)

    def announce(self, link: Link, message: Message) -> None:
        """Tell the receiver that the work for a message begins."""
        channel = self._outboxes[link].channel
        assert channel.headers is not None
        header = torch.tensor([_KINDS.index(message.kind), message.stage, message.microbatch])
        self._headers.append((channel.headers.send(header), header))

    def send(self, link: Link, message: Message, chunk: int, tensor: torch.Tensor) -> None:
        """Begin to send a tensor that this rank's `chunk` made."""
        self._outboxes[link].send(message, chunk, tensor)

    def post(self, link: Link, message: Message) -> None:
        """Do nothing: a receive is posted when its header comes."""

    def take(self, link: Link, message: Message) -> torch.Tensor:
        """Wait for a message and return its tensor.

        A gradient proves that its sender has received the output of this stage.
        """
        del link
        tensor = self.arrivals.take(message)
        if message.kind is not ActionKind.FORWARD:
            output = Message(ActionKind.FORWARD, message.stage + 1, message.microbatch)
            self._outboxes[link_of(self._pipeline, output)].settle(output)
        if self._on_gpu:
            tensor.record_stream(torch.cuda.current_stream())
        return tensor

    def drain(self) -> None:
        """Wait until all headers and messages have left, then end the step on all ways."""
        for work, _ in self._headers:
            work.wait()
        self._headers.clear()
        for outbox in self._outboxes.values():
            outbox.drain()
        end_step(self._channels)


class _OrderedProgress(PlanProgress):
    """Progress that keeps the order in which the stages' gradients become final.

    Replicas reduce the gradients of a stage as soon as they are final, so all replicas must finish
    their stages in the order of the plan.
    """

    def __init__(self, plan: Plan, rank: int, *, slack: float, final: frozenset[Action]) -> None:
        super().__init__(plan, rank, slack=slack)
        order = [action for action in plan.work_of(rank) if action in final]
        self._number = {action: number for number, action in enumerate(order)}
        self._next = 0

    def startable(self, action: Action) -> bool:
        """Return whether this rank may begin an action; final actions keep the plan's order."""
        return self._number.get(action, self._next) == self._next and super().startable(action)

    def take(self, action: Action) -> None:
        """Note that an action begins."""
        super().take(action)
        if action in self._number:
            self._next += 1


class Decisions:
    """Tells the ranks that compute a stage together what the first rank has chosen."""

    def __init__(self, timeout: timedelta) -> None:
        own = dist.get_process_group_ranks(parallel_state.get_tensor_and_context_parallel_group())
        self._members = list(own)
        self._group = cpu_group_of(own, timeout) if len(own) > 1 else None
        self.leads = dist.get_rank() == self._members[0]
        self._under_way: list[tuple[dist.Work, torch.Tensor]] = []

    def tell(self, action: Action) -> None:
        """Tell the other ranks the next action; called on the first rank."""
        if self._group is None:
            return
        said = torch.tensor([_KINDS.index(action.kind), action.stage, action.microbatch])
        for member in self._members[1:]:
            work = dist.isend(said, member, group=self._group)
            assert work is not None
            self._under_way.append((work, said))

    def hear(self) -> Action:
        """Wait for the next action from the first rank; called on the other ranks."""
        said = torch.empty(3, dtype=torch.int64)
        dist.recv(said, self._members[0], group=self._group)
        kind, stage, microbatch = map(int, said.tolist())
        return Action(_KINDS[kind], stage, microbatch)

    def drain(self) -> None:
        """Wait until all that was told has left."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()


_UNTIMED = Patience(announced_s=threading.TIMEOUT_MAX / 2, unannounced_s=threading.TIMEOUT_MAX / 2)
"""Patience before any forward has been timed: wait for the plan's next input without limit."""


class GuidedDriver:
    """Runs steps by guided choice; the first step follows the plan, to time forwards.

    A rank may exceed the plan's own peak by the activations of `slack` microbatches.
    """

    def __init__(self, channels: Channels, *, slack: float) -> None:
        self._channels = channels
        self._slack = slack
        self._decisions = Decisions(channels.timeout)
        self._mail: AnnouncedMail | None = None
        self._clock = ActionClock(channels.device)
        self._progress: PlanProgress | None = None

    def mail(
        self, pipeline: PipelineShape, shape: Sequence[int], dtype: torch.dtype
    ) -> AnnouncedMail:
        """Return what sends and receives this rank's messages; made at the first call."""
        if self._mail is None:
            self._mail = AnnouncedMail(self._channels, pipeline, shape, dtype)
        return self._mail

    def run(self, step: Step, plan: Plan, rank: int, beat: Callable[[], None]) -> None:
        """Carry out a step."""
        assert self._mail is not None
        progress = _OrderedProgress(plan, rank, slack=self._slack, final=step.final)
        self._progress = progress
        patience = self._clock.patience() or _UNTIMED
        while progress.head is not None:
            if self._decisions.leads:
                action = self._choose(plan.shape, progress, patience)
                self._decisions.tell(action)
            else:
                action = self._decisions.hear()
            beat()
            progress.take(action)
            message = message_made(plan.shape, action)
            if message is not None:
                self._mail.announce(link_of(plan.shape, message), message)
            with self._clock.timing(action):
                step.do(action)
        self._decisions.drain()

    def describe(self) -> str:
        """Return where the step stands: the next action, inputs there, what is held."""
        assert self._mail is not None
        progress = self._progress
        if progress is None or progress.head is None:
            return "its list is done"
        return (
            f"next {progress.head}; {self._mail.arrivals}; holds activations of "
            f"{progress.held:.2f} microbatches"
        )

    def _choose(
        self, pipeline: PipelineShape, progress: PlanProgress, patience: Patience
    ) -> Action:
        assert self._mail is not None
        arrivals = self._mail.arrivals

        def outlook(action: Action) -> float | None:
            message = message_needed(pipeline, action)
            return 0.0 if message is None else arrivals.outlook(message)

        self._clock.catch_up()
        began_s = time.perf_counter()
        with arrivals.changed:
            while True:
                arrivals.check()
                choice = choose(progress, outlook, time.perf_counter() - began_s, patience)
                if choice.action is not None:
                    return choice.action
                arrivals.changed.wait(choice.wait_s)
