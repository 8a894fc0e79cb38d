"""What the ranks of a serving job tell one another beside the model's own communication.

Rank 0 hears the clients and tells all ranks which requests have come and which are over. The rank
that has the logits, the first of the last pipeline stage, tells all which tokens were chosen. Both
go over gloo, from memory to memory; a rank that waits for the next request, for hours maybe, sleeps
in the kernel. Commands travel as JSON: nothing that arrives is ever unpickled.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import orjson
import torch
import torch.distributed as dist

from training.generation.request import Request, Sampling

_PATIENCE = timedelta(days=365)


@dataclass(frozen=True, kw_only=True)
class Commands:
    """What has to be known before the next step."""

    requests: tuple[Request, ...] = ()
    cancelled: tuple[int, ...] = ()
    """Requests whose clients are gone."""
    is_last: bool = False
    """The job ends."""
    asides: tuple[str, ...] = ()
    """For the engine's callback."""


NOTHING = Commands()


class Exchange:
    """The two ways of one job; every rank calls the same methods in the same order."""

    def __init__(self, sampling_rank: int) -> None:
        self._sampling_rank = sampling_rank
        self._is_alone = dist.get_world_size() == 1
        self._group = None if self._is_alone else dist.new_group(backend="gloo", timeout=_PATIENCE)

    def share_commands(self, commands: Commands) -> Commands:
        """Give every rank the commands of rank 0."""
        if self._is_alone:
            return commands
        is_sender = dist.get_rank() == 0
        payload = self.share(_encode(commands) if is_sender and commands is not NOTHING else b"")
        if not payload:
            return NOTHING
        return commands if is_sender else _decode(payload)

    def share(self, payload: bytes) -> bytes:
        """Give every rank the bytes of rank 0."""
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
        """Give every rank the table `(target, column)` that the sampling rank has, as float64."""
        if scores is None:
            scores = torch.empty(num_targets, num_columns, dtype=torch.float64)
        if not self._is_alone:
            dist.broadcast(scores, src=self._sampling_rank, group=self._group)
        return scores

    def collect(self, content: bytes) -> list[bytes] | None:
        """Bring the bytes of every rank to rank 0, by rank; None on the others."""
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
