"""What a model that speaks has computed, noted as it passes and looked at some steps later.

    notes = Notes(spots)
    model(…); model(…)
    for spot, tensors in notes.take():      # one tensor a pass
        …
    notes.close()

For one token of a small model each operation is short, and whatever Python does between two of them
empties caches: looking on the spot costs several times as much as looking afterwards at all that
passed. Nobody writes to a step's tensors again, so they may wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.utils.hooks import RemovableHandle

from megascope.capture import Output, value_of
from megascope.places import Side, Spot

_Pass: TypeAlias = tuple[tuple[Any, ...], Output | None]


@dataclass
class _Noted:
    """One module's spots, and what it was given and put out since they were last looked at."""

    spots: list[Spot]
    passed: list[_Pass] = field(default_factory=list)


class Notes:
    """Hooks on some spots, at most one a module, until `close`."""

    def __init__(self, spots: Sequence[Spot]) -> None:
        by_module: dict[torch.nn.Module, _Noted] = {}
        for spot in spots:
            by_module.setdefault(spot.module, _Noted([])).spots.append(spot)
        self._noted = list(by_module.values())
        self._handles = [_watch(module, noted) for module, noted in by_module.items()]

    def take(self) -> Iterator[tuple[Spot, list[torch.Tensor]]]:
        """Yield each spot with its tensors since the last time, one a pass, as the model had them:
        put them in order (`capture.in_order`) when they are one.
        """
        for noted in self._noted:
            passed = noted.passed.copy()
            noted.passed.clear()
            for spot in noted.spots:
                yield spot, _tensors(spot, passed)

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()


def _watch(module: torch.nn.Module, noted: _Noted) -> RemovableHandle:
    passed = noted.passed

    def note(
        module: torch.nn.Module, inputs: tuple[Any, ...], output: Output | None = None
    ) -> None:
        passed.append((inputs, output))

    if any(spot.place.side is Side.OUT for spot in noted.spots):
        return module.register_forward_hook(note)
    return module.register_forward_pre_hook(note)


def _tensors(spot: Spot, passed: Sequence[_Pass]) -> list[torch.Tensor]:
    if spot.place.side is Side.IN:
        index = spot.place.index
        return [inputs[index] for inputs, _ in passed]
    return [value_of(output) for _, output in passed if output is not None]
