"""Find what the host did when it launched events: which thread, inside which operator.

    thread 1   |── Optimizer.step#AdamW.step ──────────|      a user annotation
                  └ cudaLaunchKernel, correlation 7            the launch
    stream 7                     |── multi_tensor_apply ──|   correlation 7: launched by the step

Kernels launched by autograd's engine belong to backward passes; kernels launched by an optimizer's
step belong to this step; all other kernels of a rank that records operators belong to forward
passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc

from megascan.arrays import Flags, Integers, united
from megascan.header import Trainer
from megascan.reader.kineto.document import ANNOTATION, LAUNCH, ON_DEVICE, OPERATOR, Profile
from megascan.reader.kineto.steps import OPTIMIZER_STEP
from megascan.schema import NOT_APPLICABLE, Phase

_ENGINE = r"^autograd::engine::evaluate_function"
_LOADER = r"^enumerate\(DataLoader\)#"
_MEGATRON = (
    r"^(LinearWithGradAccumulationAndAsyncCommunication|LinearWithFrozenWeight|MakeViewlessTensor"
    r"|_VocabParallelCrossEntropy"
    r"|_(Copy|Reduce|Scatter|Gather|ReduceScatter)(To|From)(Model|Sequence|Tensor)Parallel\w+)$"
)
"""Functions of megatron.core's that autograd records by their names."""
_TORCH = r"^(DistributedDataParallel\.forward|FullyShardedDataParallel\.forward|FSDP::.*)$"
"""What torch's own wrappers of a model say of their passes."""


@dataclass(frozen=True)
class Host:
    """Launch time and launching thread of every event; host events are launched at their start.

    `launch` is NOT_APPLICABLE for device events whose launch was not recorded.
    """

    profile: Profile
    start: Integers
    end: Integers
    launch: Integers
    thread: Integers

    @classmethod
    def of(cls, profile: Profile, start: Integers, end: Integers) -> Host:
        """Find the launches of device events by their correlation ids."""
        threads = profile.events.column("tid").fill_null(NOT_APPLICABLE).to_numpy()
        device = profile.of_category(*ON_DEVICE)
        row = _launch_rows(profile, device)
        found = row >= 0
        launch, thread = start.copy(), threads.copy()
        launch[device], thread[device] = NOT_APPLICABLE, NOT_APPLICABLE
        launch[found], thread[found] = start[row[found]], threads[row[found]]
        return cls(profile, start, end, launch, thread)

    @property
    def is_loading(self) -> Flags:
        """Mark the waits for a DataLoader's next batch."""
        return self._named(_LOADER, ANNOTATION)

    def in_loading(self) -> Flags:
        """Mark the events that were launched while the host waited for data."""
        return self._launched_in(self.is_loading)

    def in_optimizer(self) -> Flags:
        """Mark the events that were launched by an optimizer's step."""
        return self._launched_in(self._named(f"^{OPTIMIZER_STEP}", ANNOTATION))

    def trainer(self) -> Trainer:
        """Tell whose loop trains by what its libraries left among the host's events: Megatron-Core
        may shard its parameters by torch, a loop on plain PyTorch does not call Megatron-Core.
        """
        if self._named(_MEGATRON, OPERATOR).any():
            return Trainer.MEGATRON
        is_wrapped = self._named(_TORCH, ANNOTATION, OPERATOR).any()
        return Trainer.TORCH if is_wrapped else Trainer.UNKNOWN

    def phases(self) -> tuple[Integers, list[str]]:
        """Return each event's pass as a code, and the codes' texts; "" for an unknown pass."""
        engine = self._named(_ENGINE, OPERATOR)
        words = ["", str(Phase.FORWARD), str(Phase.BACKWARD)]
        if not engine.any():
            return np.zeros(len(self.start), dtype=np.int64), words
        known = self.launch >= 0
        return np.where(known, np.where(self._launched_in(engine), 2, 1), 0), words

    def enclosing(self, outer: Integers, inner: Integers) -> Integers:
        """Return for each event of `inner` the last event of `outer` in which it was launched, or
        -1; events of `outer` on one thread must not overlap.
        """
        result = np.full(len(inner), NOT_APPLICABLE, dtype=np.int64)
        threads = self.thread[outer]
        for thread in np.unique(threads):
            own = outer[threads == thread]
            own = own[np.argsort(self.start[own], kind="stable")]
            mine = np.flatnonzero(self.thread[inner] == thread)
            at = self.launch[inner[mine]]
            place = np.searchsorted(self.start[own], at, side="right") - 1
            inside = (place >= 0) & (at <= self.end[own[np.maximum(place, 0)]])
            result[mine[inside]] = own[place[inside]]
        return result

    def _launched_in(self, outer: Flags) -> Flags:
        """Mark the events that a thread launched while it was in one of its `outer` events."""
        result: Flags = np.zeros(len(self.start), dtype=np.bool_)
        for thread in np.unique(self.thread[outer]):
            own = outer & (self.thread == thread)
            low, high = united(self.start[own], self.end[own])
            mine = np.flatnonzero((self.thread == thread) & (self.launch >= 0))
            place = np.searchsorted(low, self.launch[mine], side="right") - 1
            result[mine] = (place >= 0) & (self.launch[mine] < high[np.maximum(place, 0)])
        return result

    def _named(self, pattern: str, *categories: str) -> Flags:
        names = pc.fill_null(self.profile.events.column("name"), "")
        matches = np.asarray(pc.match_substring_regex(names, pattern))
        return matches & self.profile.of_category(*categories)


def _launch_rows(profile: Profile, device: Flags) -> Integers:
    """Return the row of each device event's launch; NOT_APPLICABLE for all other events."""
    ids = profile.events.column("correlation").fill_null(NOT_APPLICABLE).to_numpy()
    calls = np.flatnonzero(profile.of_category(LAUNCH) & (ids > 0))
    calls = calls[np.argsort(ids[calls], kind="stable")]
    rows = np.full(len(ids), NOT_APPLICABLE, dtype=np.int64)
    if len(calls):
        at = np.minimum(np.searchsorted(ids[calls], ids), len(calls) - 1)
        found = device & (ids[calls][at] == ids)
        rows[found] = calls[at][found]
    return rows
