"""What models are made of, and what their parts cost on a chip without any fault.

A product of m × k and k × n is done in tiles of 128 × 256, as many at a time as the chip has
processors: a tile more than fits takes another whole wave. All else reads and writes memory. The
time of a part is kept in two portions, since a low clock stretches the one and slow memory the
other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.grounds.campus.hardware import Chip

TILE_ROWS, TILE_COLUMNS = 128, 256
WAVE_OVERHEAD_S = 1.5e-6
BYTES = 2  # of an activation or a weight
DENSE, EXPERTS, MAMBA, WIDE, LOCAL = "dense", "experts", "mamba", "wide", "local"
"""Kinds of layers: attention and MLP; attention and experts; a state-space mixer and MLP; an MLP
twice as wide; attention within a window."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """State the sizes of a model, and what one microbatch of a replica holds."""

    hidden: int
    sequence: int
    micro_batch: int = 1
    ffn_ratio: float = 4.0
    vocabulary: int = 32_000
    num_experts: int = 0
    top_k: int = 2

    @property
    def tokens(self) -> int:
        """Return the tokens of a microbatch, when its sequences are full."""
        return self.sequence * self.micro_batch


@dataclass(frozen=True, kw_only=True)
class Cost:
    """State what a part takes: products, memory, and how many kernels the host launches for it.

    `square_s` is what grows with the square of a document's length, and is products, too.
    """

    matrix_s: float = 0.0
    memory_s: float = 0.0
    square_s: float = 0.0
    kernels: int = 1

    def scaled(self, factor: float, kernels: float = 1.0) -> Cost:
        """Return the cost of so many times the work."""
        return Cost(
            matrix_s=self.matrix_s * factor,
            memory_s=self.memory_s * factor,
            square_s=self.square_s * factor,
            kernels=max(1, round(self.kernels * kernels)),
        )

    @property
    def total_s(self) -> float:
        """Return what the part takes on a typical chip."""
        return self.matrix_s + self.memory_s + self.square_s


def product_s(chip: Chip, rows: float, inner: float, columns: float) -> float:
    """Return what a product takes, in whole waves of tiles."""
    tiles = math.ceil(rows / TILE_ROWS) * math.ceil(columns / TILE_COLUMNS)
    waves = math.ceil(tiles / chip.num_processors)
    of_a_tile = 2.0 * TILE_ROWS * TILE_COLUMNS * inner
    return waves * (of_a_tile * chip.num_processors / chip.matrix_flops + WAVE_OVERHEAD_S)


def passing_s(chip: Chip, num_bytes: float) -> float:
    """Return what reading and writing so many bytes takes."""
    return num_bytes / chip.memory_bytes_s


@dataclass(frozen=True, kw_only=True)
class Parts:
    """State the costs of a model's parts on one rank, forward; a backward is twice the work."""

    norm: Cost
    mixers: dict[str, Cost]  # by the kind of the layer
    feeds: dict[str, Cost]
    embedding: Cost
    output: Cost
    loss: Cost
    parameters: dict[str, float]  # of a layer by its kind, and of `embedding`; on this rank

    def layer_s(self, kind: str) -> float:
        """Return what a layer takes forward."""
        return 2 * self.norm.total_s + self.mixers[kind].total_s + self.feeds[kind].total_s


def parts_of(
    model: Model, chip: Chip, *, tp: int = 1, cp: int = 1, ep: int = 1, spread_norms: bool = True
) -> Parts:
    """Return what the parts of a model cost on a rank of such a layout."""
    tokens, hidden = model.tokens / cp, model.hidden
    plane = tokens * hidden * BYTES  # bytes of an activation
    norm_plane = plane / tp if spread_norms else plane
    projections = product_s(chip, tokens, hidden, 3 * hidden / tp)
    projections += product_s(chip, tokens, hidden / tp, hidden)
    scores = 2.0 * tokens * model.sequence * hidden / tp / (0.55 * chip.matrix_flops)
    attention = Cost(
        matrix_s=projections, square_s=scores, memory_s=passing_s(chip, 5 * plane / tp), kernels=9
    )
    near = Cost(
        matrix_s=projections + min(1.0, 1024 / model.sequence) * scores,
        memory_s=attention.memory_s, kernels=9,
    )  # fmt: skip
    mixer = Cost(matrix_s=1.3 * projections, memory_s=passing_s(chip, 24 * plane / tp), kernels=16)
    mlp = _feed(model, chip, tokens, tp, model.ffn_ratio)
    wide = _feed(model, chip, tokens, tp, 2 * model.ffn_ratio)
    moe = _experts(model, chip, tokens, tp, ep)
    weights = 4.0 * hidden**2 / tp
    feed_weights = 2.0 * model.ffn_ratio * hidden**2 / tp
    owned = feed_weights * max(1, model.num_experts // ep)
    return Parts(
        norm=Cost(memory_s=passing_s(chip, 4 * norm_plane), kernels=2),
        mixers={DENSE: attention, EXPERTS: attention, MAMBA: mixer, WIDE: attention, LOCAL: near},
        feeds={DENSE: mlp, EXPERTS: moe, MAMBA: mlp, WIDE: wide, LOCAL: mlp},
        embedding=Cost(memory_s=passing_s(chip, 3 * plane), kernels=4),
        output=Cost(
            matrix_s=product_s(chip, tokens, hidden, model.vocabulary / tp),
            memory_s=passing_s(chip, 2 * tokens * model.vocabulary / tp * BYTES), kernels=3,
        ),
        loss=Cost(memory_s=passing_s(chip, 6 * tokens * model.vocabulary / tp), kernels=8),
        parameters={
            DENSE: weights + feed_weights, MAMBA: weights + feed_weights,
            LOCAL: weights + feed_weights, WIDE: weights + 2 * feed_weights,
            EXPERTS: weights + owned, "embedding": hidden * model.vocabulary / tp,
        },
    )  # fmt: skip


def _feed(model: Model, chip: Chip, tokens: float, tp: int, ratio: float) -> Cost:
    inner = ratio * model.hidden / tp
    return Cost(
        matrix_s=product_s(chip, tokens, model.hidden, inner)
        + product_s(chip, tokens, inner, model.hidden),
        memory_s=passing_s(chip, 3 * tokens * inner * BYTES),
        kernels=5,
    )


def _experts(model: Model, chip: Chip, tokens: float, tp: int, ep: int) -> Cost:
    """Return what the experts of a rank take when every expert gets as many tokens."""
    if not model.num_experts:
        return Cost()
    owned = max(1, model.num_experts // ep)
    each = _feed(model, chip, tokens * model.top_k / owned, tp, model.ffn_ratio)
    routed = passing_s(chip, 8 * tokens * model.top_k * model.hidden * BYTES)
    return Cost(
        matrix_s=each.matrix_s * owned, memory_s=each.memory_s * owned + routed,
        kernels=14 + 3 * owned,
    )  # fmt: skip
