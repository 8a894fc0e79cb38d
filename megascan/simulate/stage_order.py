"""Order the work of pipeline stages: when a stage computes and exchanges tensors.

Each stage runs a list of steps in order. A pass is the forward or backward of one microbatch on
one model chunk; an exchange is a batch of sends and receives that are posted together and waited
for together, as Megatron-Core does with batched p2p. Three orders, after
megatron.core.pipeline_parallel.schedules: no pipelining, 1F1B, and interleaved 1F1B.

    1F1B, 2 stages, 2 microbatches
      stage 0:  F0 [send F0]   F1 [send F1, recv B0]   B0   [recv B1]  B1
      stage 1:  [recv F0] F0 B0 [send B0, recv F1] F1 B1 [send B1]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megascan.errors import ConfigError
from megascan.schema import Phase


@dataclass(frozen=True)
class Pass:
    """Forward or backward of one microbatch on one chunk of a stage."""

    phase: Phase
    chunk: int
    microbatch: int


@dataclass(frozen=True)
class Transfer:
    """One send or receive; `sequence` numbers the transfers of a (stage, peer, direction, op)."""

    op: str
    direction: Phase
    peer_stage: int
    chunk: int
    microbatch: int
    sequence: int = 0


@dataclass(frozen=True)
class Exchange:
    """Transfers posted together and waited for together."""

    transfers: tuple[Transfer, ...]


Step = Pass | Exchange


def stage_steps(
    num_stages: int, num_chunks: int, num_microbatches: int
) -> tuple[tuple[Step, ...], ...]:
    """Return the steps of every stage for one iteration.

    Raises ConfigError for sizes that Megatron-Core also refuses.
    """
    if num_microbatches < 1:
        raise ConfigError(f"number of microbatches is {num_microbatches}, expected 1 or more")
    if num_chunks > 1:
        _check_interleaved(num_stages, num_microbatches)
        orders = [
            list(_Interleaved(stage, num_stages, num_chunks, num_microbatches).steps())
            for stage in range(num_stages)
        ]
    elif num_stages > 1:
        orders = [list(_one_f_one_b(s, num_stages, num_microbatches)) for s in range(num_stages)]
    else:
        orders = [list(_no_pipelining(num_microbatches))]
    return tuple(tuple(_numbered(order)) for order in orders)


def _check_interleaved(num_stages: int, num_microbatches: int) -> None:
    if num_stages < 2:
        raise ConfigError("interleaved pipelining (vpp above 1) needs pp of 2 or more")
    if num_microbatches < num_stages or num_microbatches % num_stages > 0:
        raise ConfigError(
            f"interleaved pipelining needs microbatches in multiples of pp, got "
            f"{num_microbatches} microbatches for pp {num_stages}"
        )


def _numbered(order: list[Step]) -> Iterator[Step]:
    """Give every transfer its running number."""
    counts: Counter[tuple[str, Phase, int]] = Counter()
    for step in order:
        if isinstance(step, Pass):
            yield step
            continue
        transfers = []
        for transfer in step.transfers:
            key = (transfer.op, transfer.direction, transfer.peer_stage)
            transfers.append(replace(transfer, sequence=counts[key]))
            counts[key] += 1
        yield Exchange(tuple(transfers))


def _no_pipelining(num_microbatches: int) -> Iterator[Step]:
    for microbatch in range(num_microbatches):
        yield Pass(Phase.FORWARD, 0, microbatch)
        yield Pass(Phase.BACKWARD, 0, microbatch)


def _one_f_one_b(stage: int, num_stages: int, num_microbatches: int) -> Iterator[Step]:
    first, last = stage == 0, stage == num_stages - 1
    num_warmup = min(num_stages - stage - 1, num_microbatches)
    num_steady = num_microbatches - num_warmup

    def previous(op: str, direction: Phase, microbatch: int) -> list[Transfer]:
        return [] if first else [Transfer(op, direction, stage - 1, 0, microbatch)]

    def following(op: str, direction: Phase, microbatch: int) -> list[Transfer]:
        return [] if last else [Transfer(op, direction, stage + 1, 0, microbatch)]

    for microbatch in range(num_warmup):
        yield from _exchange(previous("recv", Phase.FORWARD, microbatch))
        yield Pass(Phase.FORWARD, 0, microbatch)
        yield from _exchange(following("send", Phase.FORWARD, microbatch))
    if num_steady:
        yield from _exchange(previous("recv", Phase.FORWARD, num_warmup))
    for step in range(num_steady):
        forward = num_warmup + step
        yield Pass(Phase.FORWARD, 0, forward)
        yield from _exchange(
            following("send", Phase.FORWARD, forward) + following("recv", Phase.BACKWARD, step)
        )
        yield Pass(Phase.BACKWARD, 0, step)
        received = previous("recv", Phase.FORWARD, forward + 1) if step < num_steady - 1 else []
        yield from _exchange(previous("send", Phase.BACKWARD, step) + received)
    for microbatch in range(num_steady, num_microbatches):
        yield from _exchange(following("recv", Phase.BACKWARD, microbatch))
        yield Pass(Phase.BACKWARD, 0, microbatch)
        yield from _exchange(previous("send", Phase.BACKWARD, microbatch))


def _exchange(transfers: list[Transfer]) -> Iterator[Step]:
    if transfers:
        yield Exchange(tuple(transfers))


@dataclass(frozen=True)
class _Interleaved:
    """Order of a stage with several chunks; k numbers the slots of (chunk, microbatch)."""

    stage: int
    num_stages: int
    num_chunks: int
    num_microbatches: int

    @property
    def _total(self) -> int:
        return self.num_chunks * self.num_microbatches

    @property
    def _num_warmup(self) -> int:
        warmup = (self.num_stages - self.stage - 1) * 2 + (self.num_chunks - 1) * self.num_stages
        return min(warmup, self._total)

    def _slot(self, k: int, phase: Phase) -> tuple[int, int]:
        """Return (chunk, microbatch) of slot k: `num_stages` microbatches visit each chunk."""
        group, within = divmod(k, self.num_stages * self.num_chunks)
        chunk, offset = divmod(within, self.num_stages)
        if phase == Phase.BACKWARD:
            chunk = self.num_chunks - 1 - chunk
        return chunk, group * self.num_stages + offset

    def _pass(self, k: int, phase: Phase) -> Pass:
        return Pass(phase, *self._slot(k, phase))

    def _sends(self, k: int, phase: Phase) -> list[Transfer]:
        """Return the transfer that leaves after slot k; none at the model's end."""
        chunk, microbatch = self._slot(k, phase)
        forward = phase == Phase.FORWARD
        end_stage, end_chunk = (self.num_stages - 1, self.num_chunks - 1) if forward else (0, 0)
        if (self.stage, chunk) == (end_stage, end_chunk):
            return []
        peer = (self.stage + (1 if forward else -1)) % self.num_stages
        return [Transfer("send", phase, peer, chunk, microbatch)]

    def _receives(self, k: int, phase: Phase) -> list[Transfer]:
        """Return the transfers for a later slot that arrive together with slot k.

        The leading stage (first in forward, last in backward) is `num_stages` - 1 slots ahead of
        the stage that feeds it; all other stages receive for their next slot.
        """
        forward = phase == Phase.FORWARD
        leading = self.stage == (0 if forward else self.num_stages - 1)
        if leading:
            source = k - (self.num_stages - 1)
            if source < 0 or source >= self._total:
                return []
            chunk, microbatch = self._slot(source, phase)
            chunk += 1 if forward else -1
            if not 0 <= chunk < self.num_chunks:
                return []
        else:
            if k + 1 >= self._total:
                return []
            chunk, microbatch = self._slot(k + 1, phase)
        peer = (self.stage + (-1 if forward else 1)) % self.num_stages
        return [Transfer("recv", phase, peer, chunk, microbatch)]

    def steps(self) -> Iterator[Step]:
        yield from self._warmup()
        yield from self._steady()
        yield from self._cooldown()

    def _first_forward(self) -> list[Transfer]:
        return [] if self.stage == 0 else [Transfer("recv", Phase.FORWARD, self.stage - 1, 0, 0)]

    def _first_backward(self) -> list[Transfer]:
        if self.stage == self.num_stages - 1:
            return []
        chunk = self.num_chunks - 1
        return [Transfer("recv", Phase.BACKWARD, self.stage + 1, chunk, 0)]

    def _warmup(self) -> Iterator[Step]:
        yield from _exchange(self._first_forward())
        for k in range(self._num_warmup):
            yield self._pass(k, Phase.FORWARD)
            received = [] if k == self._total - 1 else self._receives(k, Phase.FORWARD)
            if k == self._num_warmup - 1 < self._total - 1:
                received = received + self._first_backward()
            yield from _exchange(self._sends(k, Phase.FORWARD) + received)

    def _steady(self) -> Iterator[Step]:
        num_steady = self._total - self._num_warmup
        for k in range(num_steady):
            forward = k + self._num_warmup
            yield self._pass(forward, Phase.FORWARD)
            yield self._pass(k, Phase.BACKWARD)
            arriving = [] if k == num_steady - 1 else self._receives(forward, Phase.FORWARD)
            yield from _exchange(
                self._sends(forward, Phase.FORWARD)
                + self._sends(k, Phase.BACKWARD)
                + arriving
                + self._receives(k, Phase.BACKWARD)
            )

    def _cooldown(self) -> Iterator[Step]:
        if self._num_warmup == self._total:
            yield from _exchange(self._first_backward())
        for k in range(self._total - self._num_warmup, self._total):
            yield self._pass(k, Phase.BACKWARD)
            received = [] if k == self._total - 1 else self._receives(k, Phase.BACKWARD)
            yield from _exchange(self._sends(k, Phase.BACKWARD) + received)
