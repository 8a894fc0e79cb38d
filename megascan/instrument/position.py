"""Where a rank is within an iteration: microbatch, chunk, layer, pass; and the running numbers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TypeAlias

from megascan.schema import Phase
from megascan.tracer import Arguments, IterationListener

Slot: TypeAlias = tuple[int, int]
"""(microbatch, chunk)."""

_TEXTS = {phase: str(phase) for phase in Phase}


@dataclass
class Position(IterationListener):
    """State of one iteration; everything starts anew with the next.

    `outputs` remembers by identity which tensor a forward returned, so that its backward knows its
    microbatch and chunk; `received` which arguments wait for the tensor's use to learn theirs.
    Identities are safe: the schedule keeps these tensors until then. `passes_known` says that
    somebody tells where forward and backward begin and end.
    """

    slot: Slot | None = None
    phase: Phase | None = None
    layer: int | None = None
    passes_known: bool = False
    outputs: dict[int, Slot] = field(default_factory=dict)
    gradients: dict[int, Slot] = field(default_factory=dict)
    received: dict[int, Arguments] = field(default_factory=dict)
    _numbers: defaultdict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))

    def iteration_begins(self) -> None:
        """Forget the last iteration; numbers start at 0, so that a lost event shifts nothing."""
        self.slot = self.phase = self.layer = None
        for memory in (self.outputs, self.gradients, self.received, self._numbers):
            memory.clear()

    def number(self, group: str, operation: str) -> int:
        """Running number of an operation within (iteration, group)."""
        key = (group, operation)
        number = self._numbers[key]
        self._numbers[key] = number + 1
        return number

    def arguments(self) -> Arguments:
        """Microbatch, chunk, layer and phase as far as they apply here."""
        arguments: Arguments = {}
        if self.slot is not None:
            arguments["microbatch"], arguments["chunk"] = self.slot
        if self.layer is not None:
            arguments["layer"] = self.layer
        if self.phase is not None:
            arguments["phase"] = _TEXTS[self.phase]
        return arguments

    @property
    def is_elsewhere(self) -> bool:
        """Whether what runs now is an evaluation: it needs no gradients and belongs to no pass."""
        if not self.passes_known or self.phase is not None:
            return False
        import torch

        return not torch.is_grad_enabled()

    def learn(self, tensor: object, slot: Slot) -> None:
        """A received tensor is used: its message now has a microbatch and chunk."""
        arguments = self.received.pop(id(tensor), None)
        if arguments is not None:
            arguments["microbatch"], arguments["chunk"] = slot


def first_of(value: object) -> object:
    """The tensor of a schedule's slot, which is a tensor or a list that holds one."""
    return value[0] if isinstance(value, list) and value else value
