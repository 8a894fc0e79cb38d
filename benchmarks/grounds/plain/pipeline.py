"""1F1B of torch.distributed.pipelining, one stage a rank, alone or with replicas of each stage.

A batch of messages is one NCCL kernel: it begins where the stream gets to it and ends with its last
message, and a message is through when both ends are there and its bytes have crossed:

    stage 0   F0 | send F0, recv B0 ─────────── | B0 | send F1, recv B1 …
    stage 1   recv F0 ─ | F0 | send F1 … ─

All ranks of a stage are one array, so a batch waits for its counterpart stage by stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from benchmarks.grounds.plain.engine import Arguments, At, Engine, Mark, Row
from benchmarks.grounds.plain.machine import Floats
from benchmarks.grounds.plain.passes import Hooks, Passes
from benchmarks.grounds.plain.update import Update
from megascan.schema import Kind, Phase, Track
from megascan.vocabulary import RECV, SEND, message_name

_Key: TypeAlias = tuple[int, int, Phase, int]
"""Of a message: sender's stage, receiver's stage, direction, microbatch."""
_Batch: TypeAlias = tuple[tuple[_Key, ...], tuple[_Key, ...]]
"""Messages to launch, then messages to wait for."""


@dataclass
class Pipeline:
    """Runs every stage's program, each as far as its messages allow."""

    engine: Engine
    passes: Passes
    update: Update
    _posted: dict[_Key, tuple[Floats, int]] = field(default_factory=dict)
    """When one end of a message was there, and whose stage that was."""
    _done: dict[_Key, Floats] = field(default_factory=dict)
    _awaited: dict[tuple[int, _Key], Floats] = field(default_factory=dict)
    """When the stream of a stage had waited for a message."""
    _rows: list[tuple[int, tuple[_Key, ...], Row]] = field(default_factory=list)
    """Spans of messages whose ends are not known yet."""

    def iterate(self) -> None:
        """Do all passes of an iteration, then average the gradients of a stage's replicas."""
        stages = range(self.engine.job.num_stages)
        self._posted.clear()
        self._done.clear()
        programs = {stage: self._program(stage) for stage in stages}
        waiting: dict[int, tuple[_Key, ...]] = {}
        while programs:
            for stage in list(programs):
                if stage in waiting:
                    if not all(self._is_through(key) for key in waiting[stage]):
                        continue
                    self._complete(stage, waiting.pop(stage))
                self._advance(stage, programs, waiting)
        self._average()

    def _advance(
        self,
        stage: int,
        programs: dict[int, Iterator[_Batch]],
        waiting: dict[int, tuple[_Key, ...]],
    ) -> None:
        """Go on until the stage waits for others, or is done."""
        for launched, awaited in programs[stage]:
            self._post(stage, launched)
            if awaited:
                waiting[stage] = awaited
                return
        del programs[stage]

    def _ranks(self, stage: int) -> At:
        per_stage = self.engine.job.num_ranks // self.engine.job.num_stages
        return slice(stage * per_stage, (stage + 1) * per_stage)

    def _program(self, stage: int) -> Iterator[_Batch]:
        """Do the work of a stage; yield which messages it launches and which it waits for."""
        last = self.engine.job.num_stages - 1
        count = self.engine.job.microbatches
        warm_up = min(count, last + 1 - stage)
        self.update.fetch(self._ranks(stage))

        def messages(phase: Phase, microbatch: int, *, out: bool) -> tuple[_Key, ...]:
            step = 1 if (phase is Phase.FORWARD) is out else -1
            other = stage + step
            if not 0 <= other <= last:
                return ()
            ends = (stage, other) if out else (other, stage)
            return ((*ends, phase, microbatch),)

        sends, under_way = tuple[_Key, ...](), tuple[_Key, ...]()
        for microbatch in range(warm_up):
            received = messages(Phase.FORWARD, microbatch, out=False)
            yield received, received
            self._forward(stage, microbatch)
            yield (), under_way
            sends = messages(Phase.FORWARD, microbatch, out=True)
            under_way = sends if microbatch < warm_up - 1 else ()
            yield under_way, ()
        forwards, backwards = warm_up, 0
        while True:
            exchanged = (*sends, *messages(Phase.BACKWARD, backwards, out=False))
            yield exchanged, exchanged
            self._backward(stage, backwards)
            gradients = messages(Phase.BACKWARD, backwards, out=True)
            backwards += 1
            if forwards == count:
                break
            exchanged = (*gradients, *messages(Phase.FORWARD, forwards, out=False))
            yield exchanged, exchanged
            self._forward(stage, forwards)
            sends = messages(Phase.FORWARD, forwards, out=True)
            forwards += 1
        yield gradients, ()
        while backwards < count:
            received = messages(Phase.BACKWARD, backwards, out=False)
            yield received, received
            self._backward(stage, backwards)
            yield (), gradients
            gradients = messages(Phase.BACKWARD, backwards, out=True)
            yield gradients, ()
            backwards += 1
        yield (), gradients

    # Passes

    def _forward(self, stage: int, microbatch: int) -> None:
        is_last = stage == self.engine.job.num_stages - 1
        at = self._ranks(stage)
        self.passes.forward(microbatch, Hooks(), at=at, has_ends=(stage == 0, is_last))
        if is_last:
            self.passes.loss(at)

    def _backward(self, stage: int, microbatch: int) -> None:
        at, is_last = self._ranks(stage), stage == self.engine.job.num_stages - 1
        begin = self.passes.begin_backward(at, has_head=is_last)
        self.passes.layers_backward(microbatch, Hooks(), at=at, has_embedding=stage == 0)
        self.passes.end_backward(begin, microbatch, at)

    # Messages

    def _post(self, stage: int, keys: tuple[_Key, ...]) -> None:
        """Launch a batch; a message whose other end is there already has its end."""
        if not keys:
            return
        at = self._ranks(stage)
        begin = self.engine.mark(at)
        self.engine.host[at] += 2e-5 * len(keys)
        for key in keys:
            if key in self._posted:
                other, _ = self._posted[key]
                self._done[key] = np.maximum(other, begin.at_s) + self._transfer_s(key)
            else:
                self._posted[key] = begin.at_s, stage
        self._record(stage, keys, begin)

    def _is_through(self, key: _Key) -> bool:
        return key in self._done

    def _transfer_s(self, key: _Key) -> Floats:
        engine, machine = self.engine, self.engine.job.machine
        numbers, noise = np.arange(engine.job.num_ranks), engine.job.noise
        senders, receivers = numbers[self._ranks(key[0])], numbers[self._ranks(key[1])]
        is_near = machine.host_of[senders] == machine.host_of[receivers]
        sharing = 1 if machine.has_rails else min(machine.gpus_per_host, len(senders))
        speeds = np.where(is_near, machine.nvlink_bytes_per_s, machine.nic_bytes_per_s / sharing)
        factors = engine.conditions.message_factors(senders, receivers, is_near)
        factors = factors * np.exp(noise.transfer_ratio * engine.draws.normal()[senders])
        tail = -np.log(1.0 - 0.999 * engine.draws.even()[senders])
        factors = factors * np.where(is_near, 1.0, 1.0 + noise.congestion_ratio * tail)
        latencies_s = machine.latency_s + np.where(is_near, 0.0, machine.hop_s)
        took = latencies_s + engine.job.model.activation_bytes / speeds * factors
        return np.asarray(took, dtype=np.float64)

    def _complete(self, stage: int, keys: tuple[_Key, ...]) -> None:
        """Let the stream wait for messages, which ends those that nobody can watch."""
        at = self._ranks(stage)
        for key in keys:
            self.engine.device[at] = np.maximum(self.engine.device[at], self._done[key])
        for key in keys:
            self._awaited[stage, key] = self.engine.device[at].copy()

    def _record(self, stage: int, keys: tuple[_Key, ...], begin: Mark) -> None:
        """Record the messages of a batch, which have the same times; filled in at the end."""
        engine, at = self.engine, self._ranks(stage)
        per_stage = engine.job.num_ranks // engine.job.num_stages
        for key in keys:
            operation = SEND if key[0] == stage else RECV
            other = key[1] if operation == SEND else key[0]
            name = message_name(operation, key[2].value)
            arguments: Arguments = {
                "op": operation,
                "direction": key[2].value,
                "sequence": engine.number(name, str(other), stage),
                "size_bytes": int(engine.job.model.activation_bytes),
            }
            if engine.job.habits.ends_are_bounds:
                arguments["end_is_bound"] = 1
            shift = (other - stage) * per_stage
            peers = tuple(range(at.start + shift, at.stop + shift))
            row = Row(Kind.P2P, name, Track.OVERLAPPED, at, begin, begin.at_s, arguments)
            row.groups, row.peers = engine.groups["pp"], peers
            self._rows.append((stage, keys, row))

    def _average(self) -> None:
        """Hand the messages' rows over, now that all ends are known; average the gradients."""
        for stage, keys, row in self._rows:
            row.end_s = np.max([self._done[key] for key in keys], axis=0)
            if "end_is_bound" in row.arguments:
                row.end_s = np.max([self._awaited[stage, key] for key in keys], axis=0)
            self.engine.recorder.add(row)
        self._rows.clear()
        self._awaited.clear()
        engine, model = self.engine, self.engine.job.model
        if "dp" not in engine.groups:
            return
        for stage in range(engine.job.num_stages):
            half = (float(model.layer_bytes.sum()) + model.ends_bytes / 2) / 2
            for _ in range(2):
                engine.blocking(
                    "all_reduce", engine.groups["dp"], half, {},
                    at=self._ranks(stage), rows=slice(stage, stage + 1), stage=stage,
                )  # fmt: skip
