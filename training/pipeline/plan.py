"""A pipeline schedule as data: the list of actions that each pipeline rank carries out in a step.

A pipeline of P ranks with V model chunks each has P·V stages, numbered in the order in which a
microbatch passes them. Stage s is chunk s // P; in a loop it lies on rank s mod P, in a V on the
rank that a ball rolling down and up again reaches:

    loop, P=2, V=2    rank 0: stages 0, 2    rank 1: stages 1, 3
    V,    P=2, V=2    rank 0: stages 0, 3    rank 1: stages 1, 2

An action is written as torch.distributed.pipelining writes it, stage, kind, microbatch:

    1F0      forward of microbatch 0 on stage 1
    1B0      whole backward; or in two parts:
    1I0      gradient of the stage's input (its send to stage 0 may follow)
    1W0      gradient of the stage's weights
    1R0      forward repeated, with its graph; in a plan with 1R0, 1F0 keeps only its input
    0SEND_F0 output of stage 0 to stage 1          1RECV_F0 the same, on stage 1's rank
    1SEND_B0 gradient of stage 1's input to stage 0  0RECV_B0 the same, on stage 0's rank

A plan need not name sends and receives: without them each output leaves when the work is done, and
each input is received when it comes, in the sender's order (`with_transfers` spells that out).

Within (kind, stage) plans keep microbatches in order 0 … m-1. So gradients are summed in the same
order whatever the interleaving, and results do not depend on the plan in a single bit.

As text (`format_plan`, `parse_plan`) a plan is torch's CSV, one line a pipeline rank, one cell an
action:

    0F0,0F1,0I0,0W0,0I1,0W1
    1F0,1I0,1F1,1I1,1W0,1W1

The sizes of the pipeline follow from what is in the file: ranks are lines, stages and microbatches
the largest numbers, and the place of the second chunk tells a loop from a V. Empty cells, which
torch writes for idle time, are skipped. A file may name sends and receives or leave them out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from megascan.errors import ConfigError, InputError


class ActionKind(StrEnum):
    """What an action does, in torch's letters; only R (recompute) is not torch's."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    RECOMPUTE = "R"
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"


SENDS = frozenset({ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD})
RECEIVES = frozenset({ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD})
TRANSFERS = SENDS | RECEIVES
GIVES_INPUT_GRADIENT = frozenset({ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT})
"""Work that needs the gradient of the stage's output and yields the gradient of its input."""


class Action(NamedTuple):
    """One entry of a rank's list; `stage` counts over the whole pipeline."""

    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


class Placement(StrEnum):
    """On which ranks the stages lie; see the picture at the top of the module."""

    LOOP = "loop"
    V = "v"


@dataclass(frozen=True, kw_only=True)
class PipelineShape:
    """Sizes of a pipeline and where its stages lie.

    Raises ConfigError for a size below 1 and for a V of other than two chunks.
    """

    num_ranks: int
    num_microbatches: int
    num_chunks: int = 1
    placement: Placement = Placement.LOOP

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_microbatches", "num_chunks"):
            if getattr(self, name) < 1:
                what = name.removeprefix("num_")
                raise ConfigError(
                    f"number of pipeline {what} is {getattr(self, name)}, expected 1 or more"
                )
        if self.placement is Placement.V and self.num_chunks != 2:
            raise ConfigError(
                f"a V has two model chunks on each pipeline rank, got {self.num_chunks}; "
                "give two chunks or use the loop"
            )

    @property
    def num_stages(self) -> int:
        """Return the number of stages that a microbatch passes."""
        return self.num_ranks * self.num_chunks

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank on which a stage lies."""
        rest = stage % self.num_ranks
        turned = self.placement is Placement.V and stage >= self.num_ranks
        return self.num_ranks - 1 - rest if turned else rest

    def chunk_of(self, stage: int) -> int:
        """Return the number of a stage among the model chunks of its rank."""
        return stage // self.num_ranks

    def stage_of(self, rank: int, chunk: int) -> int:
        """Return the stage that a model chunk of a pipeline rank is."""
        turned = self.placement is Placement.V and chunk == 1
        return chunk * self.num_ranks + (self.num_ranks - 1 - rank if turned else rank)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a pipeline rank, in the order of its chunks."""
        return tuple(self.stage_of(rank, chunk) for chunk in range(self.num_chunks))


class Message(NamedTuple):
    """What one pipeline rank sends to another: a stage's output or its input's gradient.

    `kind` and `stage` are those of the work that needs the message: `Message(FORWARD, 1, 0)` is the
    output of stage 0.
    """

    kind: ActionKind
    stage: int
    microbatch: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Lists of actions by pipeline rank, (rank) → (actions in order).

    Nothing is checked here; `training.pipeline.simulator.check` says whether it can be carried out.
    """

    name: str
    shape: PipelineShape
    actions: tuple[tuple[Action, ...], ...]

    @cached_property
    def splits_backward(self) -> bool:
        """Return whether some weight gradients are actions of their own."""
        return any(
            action.kind is ActionKind.WEIGHT_GRADIENT
            for listed in self.actions
            for action in listed
        )

    @cached_property
    def recomputes(self) -> bool:
        """Return whether some forwards are repeated as actions of their own."""
        return bool(self._repeated)

    @cached_property
    def _repeated(self) -> frozenset[tuple[int, int]]:
        """Return stage and microbatch of the forwards that are repeated."""
        return frozenset(
            (action.stage, action.microbatch)
            for listed in self.actions
            for action in listed
            if action.kind is ActionKind.RECOMPUTE
        )

    def repeats(self, action: Action) -> bool:
        """Return whether the forward of an action's stage and microbatch is repeated as an action
        of its own.
        """
        return (action.stage, action.microbatch) in self._repeated

    @cached_property
    def names_transfers(self) -> bool:
        """Return whether sends and receives are actions of the plan."""
        return any(action.kind in TRANSFERS for listed in self.actions for action in listed)

    def work_of(self, rank: int) -> tuple[Action, ...]:
        """Return the actions of a rank without sends and receives."""
        return tuple(action for action in self.actions[rank] if action.kind not in TRANSFERS)

    def without_transfers(self) -> Plan:
        """Return the plan without sends and receives."""
        ranks = range(self.shape.num_ranks)
        return replace(self, actions=tuple(self.work_of(rank) for rank in ranks))

    def with_transfers(self, *, ahead: int = 0) -> Plan:
        """Return the plan with sends and receives spelt out.

        A send follows the work that makes its message. A receive stands before the work that needs
        its message, up to `ahead` actions of work earlier. Messages of one sender are received in
        the order in which they come, whatever the order in which they are needed.
        """
        ranks = range(self.shape.num_ranks)
        return replace(self, actions=tuple(tuple(self._spelt_out(r, ahead)) for r in ranks))

    def _spelt_out(self, rank: int, ahead: int) -> Iterator[Action]:
        work = self.work_of(rank)
        due = self._receives_by_position(rank, work, ahead)
        for position, action in enumerate(work):
            yield from due.get(position, ())
            yield action
            message = message_made(self.shape, action)
            if message and self.shape.rank_of(message.stage) != rank:
                yield _send_of(message)

    def _receives_by_position(
        self, rank: int, work: tuple[Action, ...], ahead: int
    ) -> dict[int, list[Action]]:
        """Return, by position in `work`, the receives that stand before it."""
        needed_at = {
            message: position
            for position, action in enumerate(work)
            if (message := message_needed(self.shape, action))
        }
        due: dict[int, list[Action]] = {}
        for sender in range(self.shape.num_ranks):
            for forward in (True, False):
                latest = len(work)
                for message in reversed(self.messages(sender, rank, forward=forward)):
                    latest = min(latest, max(0, needed_at.get(message, latest) - ahead))
                    due.setdefault(latest, []).insert(0, _receive_of(message))
        return due

    def messages(self, sender: int, receiver: int, *, forward: bool) -> list[Message]:
        """Return the messages from one rank to another, in the order in which they are made.

        With `forward` return outputs, otherwise gradients; the two take different channels.
        """
        if sender == receiver:
            return []
        made = (message_made(self.shape, action) for action in self.work_of(sender))
        return [
            message
            for message in made
            if message
            and (message.kind is ActionKind.FORWARD) == forward
            and self.shape.rank_of(message.stage) == receiver
        ]

    def renamed(self, name: str) -> Plan:
        """Return the plan under another name."""
        return replace(self, name=name)


def message_made(shape: PipelineShape, action: Action) -> Message | None:
    """Return what an action hands to another stage, if anything, even to one of the same rank."""
    if action.kind is ActionKind.FORWARD and action.stage + 1 < shape.num_stages:
        return Message(ActionKind.FORWARD, action.stage + 1, action.microbatch)
    if action.kind in GIVES_INPUT_GRADIENT and action.stage > 0:
        return Message(ActionKind.BACKWARD, action.stage - 1, action.microbatch)
    return None


def message_needed(shape: PipelineShape, action: Action) -> Message | None:
    """Return what an action needs from another stage, if anything."""
    if action.kind is ActionKind.FORWARD and action.stage > 0:
        return Message(ActionKind.FORWARD, action.stage, action.microbatch)
    if action.kind in GIVES_INPUT_GRADIENT and action.stage + 1 < shape.num_stages:
        return Message(ActionKind.BACKWARD, action.stage, action.microbatch)
    return None


def _send_of(message: Message) -> Action:
    if message.kind is ActionKind.FORWARD:
        return Action(ActionKind.SEND_FORWARD, message.stage - 1, message.microbatch)
    return Action(ActionKind.SEND_BACKWARD, message.stage + 1, message.microbatch)


def _receive_of(message: Message) -> Action:
    forward = message.kind is ActionKind.FORWARD
    kind = ActionKind.RECEIVE_FORWARD if forward else ActionKind.RECEIVE_BACKWARD
    return Action(kind, message.stage, message.microbatch)


def message_of_transfer(action: Action) -> Message:
    """Return the message that a send or receive carries."""
    if action.kind is ActionKind.SEND_FORWARD:
        return Message(ActionKind.FORWARD, action.stage + 1, action.microbatch)
    if action.kind is ActionKind.SEND_BACKWARD:
        return Message(ActionKind.BACKWARD, action.stage - 1, action.microbatch)
    forward = action.kind is ActionKind.RECEIVE_FORWARD
    kind = ActionKind.FORWARD if forward else ActionKind.BACKWARD
    return Message(kind, action.stage, action.microbatch)


_ACTION = re.compile(r"(\d{1,6})([A-Z_]+)(\d{1,6})")
_KINDS = {kind.value: kind for kind in ActionKind}


def format_plan(plan: Plan) -> str:
    """Return a plan as torch's CSV."""
    return "".join(",".join(map(str, listed)) + "\n" for listed in plan.actions)


def parse_plan(text: str, *, name: str = "plan") -> Plan:
    """Return the plan that a CSV describes; error messages name the file `name`.

    Raises InputError with line and cell for what is no action, and for lines and stages that do not
    make a pipeline. `simulator.check` tells whether the plan can be carried out.
    """
    lines = text.strip("\n").split("\n")
    rows = tuple(_parse_line(line, name, number) for number, line in enumerate(lines, 1))
    return Plan(name=Path(name).stem, shape=_shape_of(rows, name), actions=rows)


def read_plan(path: Path) -> Plan:
    """Read a plan; InputError for a file that cannot be read or that `parse_plan` refuses."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise InputError(
            f"{path}: no such plan; give a CSV file that megascan plan wrote"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a plan ({error})") from error
    return parse_plan(text, name=str(path))


def _parse_line(line: str, name: str, number: int) -> tuple[Action, ...]:
    cells = [cell.strip() for cell in line.split(",")]
    return tuple(
        _parse_cell(cell, f"{name}, line {number}, cell {position}")
        for position, cell in enumerate(cells, 1)
        if cell
    )


def _parse_cell(cell: str, where: str) -> Action:
    match = _ACTION.fullmatch(cell)
    kind = _KINDS.get(match[2]) if match else None
    if match is None or kind is None:
        raise InputError(
            f"{where}: {cell[:40]!r} is no action; expected stage, kind, microbatch as in 0F3, "
            f"kinds {' '.join(_KINDS)}"
        )
    return Action(kind, int(match[1]), int(match[3]))


def _shape_of(rows: tuple[tuple[Action, ...], ...], name: str) -> PipelineShape:
    """Return the sizes of the pipeline that the lists of actions in `rows` are for."""
    empty = next((number for number, row in enumerate(rows, 1) if not row), None)
    if empty is not None:
        raise InputError(f"{name}, line {empty}: no action; each line is one pipeline rank's list")
    num_ranks = len(rows)
    num_stages = 1 + max(action.stage for row in rows for action in row)
    if num_stages % num_ranks:
        raise InputError(
            f"{name}: {num_stages} stages on {num_ranks} lines; the stages must be a multiple of "
            "the pipeline ranks, one line each"
        )
    try:
        return PipelineShape(
            num_ranks=num_ranks,
            num_chunks=num_stages // num_ranks,
            num_microbatches=1 + max(action.microbatch for row in rows for action in row),
            placement=_placement(rows, num_stages),
        )
    except ConfigError as error:
        raise InputError(f"{name}: {error}") from error


def _placement(rows: tuple[tuple[Action, ...], ...], num_stages: int) -> Placement:
    """Return V where the first stage of the second chunk lies on the last rank, else LOOP."""
    num_ranks = len(rows)
    turned = num_stages == 2 * num_ranks and any(a.stage == num_ranks for a in rows[-1])
    return Placement.V if turned and num_ranks > 1 else Placement.LOOP
