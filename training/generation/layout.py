"""Where the tokens of one step stand: in the stream that the layers see, and in the cache.

All tokens of a step go through the linear layers as one stream of shape (token, 1, hidden): first
one token of every row that is being generated, then pieces of prompts. Only attention has to know
which token belongs to which row. An example with two rows in generation and a new prompt of 3:

    stream      a9  b4  c0 c1 c2
    positions    9   4   0  1  2
    decoding: slots 0, 1 with 10 and 5 tokens; one prompt piece: slot 2, tokens 0 to 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch.nn.attention.bias import causal_lower_right

from megascan.arrays import Integers


@dataclass(frozen=True, kw_only=True)
class RowTokens:
    """The tokens of one row that a step computes: those from position `start` to `end`."""

    slot: int
    start: int
    tokens: tuple[int, ...]

    @property
    def end(self) -> int:
        """Return the position after the last token."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Rows of one token each: `(row,)` slots, and which cached places each may see."""

    num_rows: int
    slots: slice | torch.Tensor
    length: int
    """Places of the longest row."""
    visible: torch.Tensor | None
    """`(row, 1, 1, place)`, a truth or what is added to scores; None when all rows see all `length`
    places."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Prompt pieces of equal place and length in neighbouring slots, computed together."""

    first_token: int
    num_rows: int
    num_tokens: int
    """Tokens of each row."""
    first_slot: int
    start: int
    visible: torch.Tensor | None
    """`(token, place)`; None where the piece begins its row, and is causal by itself."""


@dataclass(frozen=True, kw_only=True)
class StepTokens:
    """One step's tokens, ready for the model of any stage."""

    tokens: torch.Tensor
    """`(1, token)`"""
    positions: torch.Tensor
    """`(1, token)`"""
    places: torch.Tensor
    """`(token,)`, in the cache"""
    decoding: Decoding | None
    pieces: tuple[Piece, ...]


def lay_out(shares: Sequence[RowTokens], *, max_length: int, device: str) -> StepTokens:
    """Arrange the shares of a step, given as they stand in the stream: single tokens first."""
    single = [share for share in shares if len(share.tokens) == 1]
    pieces = shares[len(single) :]
    numbers = torch.from_numpy(_numbers(single, pieces, max_length)).to(device)
    return StepTokens(
        tokens=numbers[0:1],
        positions=numbers[1:2],
        places=numbers[2],
        decoding=_decoding(single, device) if single else None,
        pieces=tuple(_pieces(pieces, len(single), device)),
    )


def _numbers(single: Sequence[RowTokens], pieces: Sequence[RowTokens], max_length: int) -> Integers:
    """Return tokens, positions and places `(3, token)`, of prompts as many as a step may have."""
    first = len(single)
    numbers = np.empty((3, first + sum(len(piece.tokens) for piece in pieces)), dtype=np.int64)
    numbers[0, :first] = [share.tokens[0] for share in single]
    numbers[1, :first] = [share.start for share in single]
    numbers[2, :first] = [share.slot * max_length + share.start for share in single]
    for piece in pieces:
        own = numbers[:, first : first + len(piece.tokens)]
        own[0] = piece.tokens
        own[1] = np.arange(piece.start, piece.end)
        own[2] = own[1] + piece.slot * max_length
        first += len(piece.tokens)
    return numbers


def _decoding(shares: Sequence[RowTokens], device: str) -> Decoding:
    slots = [share.slot for share in shares]
    ends = [share.end for share in shares]
    longest = max(ends)
    neighbours = slots == list(range(slots[0], slots[0] + len(slots)))
    visible = None
    if min(ends) != longest:
        limit = torch.tensor(ends, device=device)
        visible = torch.arange(longest, device=device) < limit[:, None]
        visible = visible[:, None, None]
    return Decoding(
        num_rows=len(shares),
        slots=slice(slots[0], slots[-1] + 1) if neighbours else torch.tensor(slots, device=device),
        length=longest,
        visible=visible,
    )


def _pieces(shares: Sequence[RowTokens], first_token: int, device: str) -> list[Piece]:
    """Join neighbours of equal start, length and consecutive slots."""
    made = []
    numbered = enumerate(shares)
    for _, run in groupby(
        numbered, lambda pair: (pair[1].slot - pair[0], pair[1].start, pair[1].end)
    ):
        rows = [share for _, share in run]
        first = rows[0]
        made.append(
            Piece(
                first_token=first_token,
                num_rows=len(rows),
                num_tokens=len(first.tokens),
                first_slot=first.slot,
                start=first.start,
                visible=_visible(first, device) if first.start else None,
            )
        )
        first_token += len(rows) * len(first.tokens)
    return made


def _visible(share: RowTokens, device: str) -> torch.Tensor:
    """Return which places `(token, place)` the tokens of a piece see that does not begin its row.

    On GPUs by the name of the pattern: where heads share keys, torch's kernels that go without a
    table of all scores take no other mask.
    """
    if device != "cpu":
        return causal_lower_right(len(share.tokens), share.end)
    ends = torch.arange(share.start, share.end)[:, None]
    return torch.arange(share.end) <= ends
