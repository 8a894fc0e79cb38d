"""MegaFBD in a running job: steps with helpers that run forwards, and steps without helpers.

A helper is not a member of the job (`training.helper` is its side). It brings a stage the input
earlier than the previous stage does. Both copies come, the first one is used, and the two are
compared byte by byte. So nothing that a helper does or omits stops a step or changes a digit
unseen:

    helper           0F3 1F3 ──┐ input of stage 2, early
    rank 1        … 1F3 ───────│──┐ the same, late: compared and dropped
    rank 2                     └→ 2F3 …

Each step begins with one small broadcast: the first rank of the pipeline says which helpers take
part and how fast they are. From that all ranks make the same plan.
"""

from __future__ import annotations

import io
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from training.pipeline.channels import Channels, Link, Mail, cpu_group_of
from training.pipeline.costs import even_costs
from training.pipeline.disaggregation import Disaggregation, best_share
from training.pipeline.executor import Step, Stopwatch
from training.pipeline.plan import Action, ActionKind, Message, PipelineShape, Plan
from training.pipeline.reception import Address, Frame, FrameKind, Reception, bytes_of, tensor_of

if TYPE_CHECKING:
    from training.step import Microbatch

STEADY_RATIO = 1.25
"""A helper's speed counts as changed from this ratio on: each change makes a new plan."""


TRY_AGAIN_STEPS = 50
"""At every step whose number is a multiple of this, helpers that are left out as too slow are
tried again, so that their speed is measured anew."""


@dataclass(kw_only=True)
class _Copy:
    """The first copy of an input; `source` is the helper's number, None: the stage before."""

    tensor: torch.Tensor
    source: int | None
    is_taken: bool = False
    is_compared: bool = False


class Inputs:
    """Inputs of this rank's forwards, each from the helper or the stage that brings it first.

    `differs` is called with a helper's number and a microbatch when the helper's copy differs from
    the pipeline's.
    """

    def __init__(self, device: str, differs: Callable[[int, int], None]) -> None:
        self._device = device
        self._differs = differs
        self._changed = threading.Condition()
        self._copies: dict[tuple[int, int], _Copy] = {}
        self._step = 0
        self._error: BaseException | None = None

    def begin(self, step: int) -> None:
        """Begin a step; forget inputs of earlier steps."""
        with self._changed:
            self._step = step
            for key in [key for key in self._copies if key[0] < step]:
                del self._copies[key]

    def bring(self, step: int, microbatch: int, tensor: torch.Tensor, source: int | None) -> None:
        """Take in an input; compare a second copy with the first."""
        with self._changed:
            first = self._copies.get((step, microbatch))
            if step < self._step:
                return
            if first is None:
                self._copies[step, microbatch] = _Copy(tensor=tensor, source=source)
                self._changed.notify_all()
                return
        self._compare(first, tensor, source, microbatch)
        with self._changed:
            first.is_compared = True
            if first.is_taken:
                self._copies.pop((step, microbatch), None)

    def take(self, microbatch: int) -> torch.Tensor:
        """Wait for the input of a microbatch and return it on this rank's device."""
        key = self._step, microbatch
        with self._changed:
            while key not in self._copies:
                if self._error is not None:
                    raise self._error
                self._changed.wait()
            copy = self._copies[key]
            copy.is_taken = True
            if copy.is_compared:
                del self._copies[key]
        if copy.tensor.is_cuda:
            copy.tensor.record_stream(torch.cuda.current_stream())
        return copy.tensor.detach().to(self._device)

    def fail(self, error: BaseException) -> None:
        """Make every wait for an input raise `error`, by which the stage before was lost."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def __str__(self) -> str:
        there = sorted(m for (step, m), copy in list(self._copies.items()) if not copy.is_taken)
        return "inputs there: " + (" ".join(map(str, there)) or "none")

    def _compare(
        self, first: _Copy, tensor: torch.Tensor, source: int | None, microbatch: int
    ) -> None:
        one, other = (bytes_of(copy) for copy in (first.tensor, tensor))
        helper = first.source if source is None else source
        if one != other and helper is not None:
            self._differs(helper, microbatch)


class _Feed:
    """The thread that takes in what the stage before sends, in the order of sending."""

    def __init__(self, take: Callable[[Message], torch.Tensor], inputs: Inputs, device: str):
        self._take = take
        self._inputs = inputs
        self._device = device
        self._due: queue.SimpleQueue[tuple[int, Sequence[Message]]] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        threading.Thread(target=self._run, daemon=True, name="pipeline-feed").start()

    def expect(self, step: int, messages: Sequence[Message]) -> None:
        """Take in `messages` of a step."""
        self._idle.clear()
        self._due.put((step, messages))

    def join(self) -> None:
        """Wait until all expected messages have come."""
        self._idle.wait()

    def _run(self) -> None:
        on_gpu = self._device != "cpu"
        if on_gpu:
            torch.cuda.set_device(self._device)
        stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
        while True:
            step, messages = self._due.get()
            try:
                for message in messages:
                    with torch.cuda.stream(stream) if stream is not None else nullcontext():
                        tensor = self._take(message)
                        if stream is not None:
                            stream.synchronize()  # holds up this thread, not the compute
                        self._inputs.bring(step, message.microbatch, tensor, None)
            except Exception as error:
                self._inputs.fail(error)
            self._idle.set()


class HelpedMail(Mail):
    """Messages of a step with helpers: an input comes from a helper or from the stage before."""

    def __init__(
        self, channels: Channels, shape: Sequence[int], dtype: torch.dtype, inputs: Inputs
    ) -> None:
        super().__init__(channels, shape, dtype)
        self.shape, self.dtype = tuple(shape), dtype
        self.step = 0
        self.is_helped = False
        self._inputs = inputs
        self._feeds = {
            link: _Feed(inbox.take, inputs, channels.device)
            for link, inbox in self._inboxes.items()
            if link.forward
        }

    def expect(self, plan: Plan) -> None:
        """Learn a step's messages from its plan."""
        super().expect(plan)
        if not self.is_helped:
            return
        for link, feed in self._feeds.items():
            feed.expect(self.step, plan.messages(link.sender, link.receiver, forward=True))

    def take(self, link: Link, message: Message) -> torch.Tensor:
        """Wait for a message and return its tensor."""
        if self.is_helped and link in self._feeds:
            return self._inputs.take(message.microbatch)
        return super().take(link, message)

    def drain(self) -> None:
        """Wait until every second copy has come and all messages have left."""
        for feed in self._feeds.values():
            feed.join()
        super().drain()

    def _room(self, plan: Plan, link: Link) -> int:
        """Return the number of a link's messages in a step: any number may be under way.

        With helpers no message proves that an earlier one came: the input may be a helper's copy.
        """
        return len(plan.messages(link.sender, link.receiver, forward=link.forward))


@dataclass(kw_only=True)
class _Known:
    """What the pipeline's first rank knows of a helper."""

    speed: float = 1.0
    busy_since: int | None = None
    """The step that the helper has not ended yet; None: it is idle."""

    def learn(self, own_forward_s: float, forward_s: float) -> None:
        """Update the speed from what a forward takes the pipeline's first rank and the helper."""
        if own_forward_s <= 0 or forward_s <= 0:
            return
        speed = own_forward_s / forward_s
        if not 1 / STEADY_RATIO < speed / self.speed < STEADY_RATIO:
            self.speed = float(f"{speed:.2g}")


class HelpedDriver:
    """Runs steps with the helpers that are there; also says which plan a step follows.

    `members` are the global ranks of this rank's pipeline; `alone` returns the plan of a step
    without helpers. All ranks of the job make their drivers together.
    """

    def __init__(
        self,
        channels: Channels,
        members: Sequence[int],
        chunk: torch.nn.Module,
        alone: Callable[[int], Plan],
        *,
        splits_backward: bool,
        port: int = 0,
    ) -> None:
        self._channels = channels
        self._members = list(members)
        self._chunk = chunk
        self._alone = alone
        self._splits_backward = splits_backward
        self._rank = self._members.index(dist.get_rank())
        self._group = cpu_group_of(self._members, channels.timeout)
        self._inputs = Inputs(channels.device, self._distrust)
        self._mail: HelpedMail | None = None
        self._step = 0
        self._current: Disaggregation | None = None
        self._roster: list[tuple[int, float]] = []
        self._plans: dict[tuple[int, tuple[float, ...]], Disaggregation] = {}
        self._known: dict[int, _Known] = {}
        self._stopwatch = Stopwatch(channels.device)
        self._num_timed = 0
        self._forward_s = 0.0
        self._next: Action | None = None
        self._reception = Reception(
            stage_description(chunk), self._receive, port=port if dist.get_rank() == 0 else 0
        )

    @property
    def meeting(self) -> Address:
        """Return the address at which helpers find this rank."""
        return self._reception.address

    @property
    def num_ready(self) -> int:
        """Return how many helpers have come so far; known only on a pipeline's first rank."""
        return len(self._known)

    def open(self, description: dict[str, object], num_replicas: int, replica: int) -> None:
        """Let helpers join; all ranks of the job call this together.

        `description` is what a helper must know of the job.
        """
        own_address = replica, self._rank, self._reception.address
        gathered: list[tuple[int, int, Address] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, own_address)
        known = sorted(found for found in gathered if found is not None)

        def describe(number: int) -> dict[str, object]:
            helped = number % num_replicas
            addresses = [address for of_replica, _, address in known if of_replica == helped]
            return {**description, "number": number, "ranks": addresses}

        if dist.get_rank() == 0:
            self._reception.describe = describe

    def close(self) -> None:
        """Dismiss all helpers."""
        self._reception.close()

    def plan_of_step(self, num_microbatches: int) -> Plan:
        """Begin a step: agree on the helpers, send them their weights, return the plan."""
        self._step += 1
        if self._roster and self._current is None and self._step % TRY_AGAIN_STEPS == 0:
            for known in [*self._known.values()]:
                known.speed = 1.0
        self._inputs.begin(self._step)
        if self._num_timed:
            self._forward_s, self._num_timed = self._stopwatch.read_s() / self._num_timed, 0
        self._agree()
        if self._rank == 0:
            self._call_off()
        self._current = self._disaggregated(num_microbatches) if self._roster else None
        if self._current is None:
            return self._alone(num_microbatches)
        self._send_weights(self._current)
        return self._current.plan

    def mail(self, pipeline: PipelineShape, shape: Sequence[int], dtype: torch.dtype) -> HelpedMail:
        """Return what sends and receives this rank's messages; made at the first call."""
        del pipeline
        if self._mail is None:
            self._mail = HelpedMail(self._channels, shape, dtype, self._inputs)
        self._mail.step, self._mail.is_helped = self._step, self._current is not None
        return self._mail

    def run(self, step: Step, plan: Plan, rank: int, beat: Callable[[], None]) -> None:
        """Carry out one action after the other."""
        if rank == 0 and self._current is not None:
            self._send_batches(step, self._current)
        for action in plan.actions[rank]:
            self._next = action
            beat()
            if rank == 0 and action.kind is ActionKind.FORWARD:
                self._num_timed += 1
                with self._stopwatch.timing():
                    step.do(action)
            else:
                step.do(action)

    def describe(self) -> str:
        """Return the action under way, the inputs that are there, the helpers that take part."""
        numbers = " ".join(str(number) for number, _ in self._roster) or "none"
        return f"at {self._next}; {self._inputs}; helpers: {numbers}"

    def _agree(self) -> None:
        """Learn from the pipeline's first rank which helpers take part, and how fast they are."""
        said: list[object] = [self._present() if self._rank == 0 else None]
        dist.broadcast_object_list(said, src=self._members[0], group=self._group)
        before = {number for number, _ in self._roster}
        self._roster = said[0]  # type: ignore[assignment]
        now = {number for number, _ in self._roster}
        if self._rank == 0:
            for number in sorted(now - before):
                _say(f"helper {number} takes part from step {self._step} on")
            for number in sorted(before - now):
                gone = number not in set(self._reception.open_numbers())
                _say(f"helper {number} is {'gone' if gone else 'late'}; step {self._step} goes on "
                     "without it")  # fmt: skip

    def _present(self) -> list[tuple[int, float]]:
        """Return number and speed of the helpers that are connected and have ended their step."""
        open_numbers = set(self._reception.open_numbers())
        return [
            (number, known.speed)
            for number, known in sorted([*self._known.items()])  # helpers may join meanwhile
            if number in open_numbers and known.busy_since is None
        ]

    def _call_off(self) -> None:
        """Tell helpers that are still at an earlier step to drop it."""
        for number, known in [*self._known.items()]:
            if known.busy_since is not None:
                said: dict[str, object] = {"microbatches": []}
                self._reception.send(number, Frame.of(FrameKind.STEP, said, step=self._step))

    def _disaggregated(self, num_microbatches: int) -> Disaggregation | None:
        """Return a step with the helpers of the roster; None where they would slow it down."""
        speeds = tuple(speed for _, speed in self._roster)
        key = num_microbatches, speeds
        if key not in self._plans:
            shape = PipelineShape(num_ranks=len(self._members), num_microbatches=num_microbatches)
            self._plans[key] = best_share(
                even_costs(shape, recomputes=True).stages,
                num_microbatches,
                speeds=speeds,
                splits_backward=self._splits_backward,
            )
        found = self._plans[key]
        return found if found.share else None

    def _send_weights(self, made: Disaggregation) -> None:
        """Send each helper its microbatches of this step and the weights of the stages it runs."""
        is_fed = self._rank < len(self._members) - 1
        body = _snapshot(self._chunk) if is_fed else b""
        for position, (number, _) in enumerate(self._roster):
            microbatches = made.microbatches_of(position)
            if not microbatches:
                continue
            if self._rank == 0:
                self._known[number].busy_since = self._step
                said = {"microbatches": microbatches}
                self._reception.send(number, Frame.of(FrameKind.STEP, said, step=self._step))
            if is_fed:
                self._reception.send(number, Frame(FrameKind.WEIGHTS, body, self._step))

    def _send_batches(self, step: Step, made: Disaggregation) -> None:
        for microbatch, position in enumerate(made.helper_of):
            if position is not None:
                number, _ = self._roster[position]
                body = batch_bytes(step.batch(microbatch))  # type: ignore[arg-type]
                frame = Frame(FrameKind.BATCH, body, self._step, microbatch)
                self._reception.send(number, frame)

    def _receive(self, number: int, frame: Frame) -> None:
        """Take in what a helper sends; called on the thread of the helper's connection."""
        if frame.kind is FrameKind.INPUT and self._mail is not None:
            tensor = tensor_of(frame.body, self._mail.shape, self._mail.dtype)
            self._inputs.bring(frame.step, frame.microbatch, tensor, number)
        elif frame.kind is FrameKind.READY:
            self._known[number] = _Known()
        elif frame.kind is FrameKind.DONE and number in self._known:
            known = self._known[number]
            known.learn(self._forward_s, float(str(frame.said().get("forward_s"))))
            if frame.step == known.busy_since:
                known.busy_since = None

    def _distrust(self, number: int, microbatch: int) -> None:
        """Dismiss a helper whose digits differ from the pipeline's."""
        _say(
            f"helper {number} computed other digits than the pipeline for stage {self._rank}, "
            f"microbatch {microbatch} of step {self._step}, and is let go; its digits were used "
            "where they came first: give helpers the hardware and the software of the ranks"
        )
        self._reception.dismiss(number)


def stage_description(chunk: torch.nn.Module) -> dict[str, object]:
    """Return what a helper needs to build this stage: number of layers, shapes of parameters."""
    layers = sum(type(module).__name__ == "TransformerLayer" for module in chunk.modules())
    shapes = [[*parameter.shape] for parameter in chunk.parameters()]
    return {"num_layers": layers, "shapes": shapes}


def batch_bytes(batch: Microbatch) -> bytes:
    """Return what a first stage needs of a microbatch as bytes; `read_batch` reads them."""
    out = io.BytesIO()
    parts = {"tokens": batch.tokens, "position_ids": batch.position_ids}
    if batch.attention_mask is not None:
        parts["attention_mask"] = batch.attention_mask
    torch.save({name: part.cpu() for name, part in parts.items()}, out)
    return out.getvalue()


def _snapshot(chunk: torch.nn.Module) -> memoryview:
    """Return the bytes of all current parameters, one after the other, in host memory."""
    parts = [p.detach().reshape(-1).view(torch.uint8) for p in chunk.parameters()]
    return bytes_of(torch.cat(parts))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
