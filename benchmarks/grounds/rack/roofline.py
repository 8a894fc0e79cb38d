"""Say how long kernels take: by arithmetic or by memory, whichever is more (the roofline model).

Williams, Waterman and Patterson, "Roofline" (CACM 2009). A product of M x N x K is cut into tiles,
which the multiprocessors take in waves; the last wave is as long as the others, however few tiles
it has (NVIDIA, "Matrix Multiplication Background User's Guide", sections on tile and wave
quantisation):

    time = ceil(ceil(M / 128) ceil(N / 256) / SMs) x 2 x 128 x 256 x K / (rate of one SM)

Attention is that of FlashAttention-2 (arXiv 2307.08691): 4 s^2 h flops forward, half of it where
the mask is causal, and 2.5 times as much backward. Everything else reads and writes memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.grounds.rack.hardware import Chip

_TILE_M, _TILE_N = 128, 256
_PRODUCT_EFFICIENCY = 0.78
"""Of the peak that a full wave reaches: power and the pipeline's ends take the rest."""
_ATTENTION_EFFICIENCY = 0.52
_ATTENTION_BACKWARD_EFFICIENCY = 0.45
_MEMORY_EFFICIENCY = 0.85
_KERNEL_S = 2.5e-6
"""What begin and end of a kernel take on the device."""
BYTES = 2
"""Of a number in bfloat16."""


@dataclass(frozen=True)
class Work:
    """What some kernels take on a sound chip, by what it depends on.

    `product_s` follows the clock and the tokens, `attention_s` the clock and the squares of the
    lengths, `memory_s` the memory's rate and the tokens.
    """

    product_s: float = 0.0
    attention_s: float = 0.0
    memory_s: float = 0.0
    num_kernels: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.product_s + other.product_s,
            self.attention_s + other.attention_s,
            self.memory_s + other.memory_s,
            self.num_kernels + other.num_kernels,
        )

    def times(self, factor: float) -> Work:
        """Return the same kernels, each so many times as long."""
        return Work(
            factor * self.product_s,
            factor * self.attention_s,
            factor * self.memory_s,
            self.num_kernels,
        )


def product(chip: Chip, m: float, n: float, k: float, *, kernels: int = 1) -> Work:
    """Return a product of (m, k) by (k, n), or what it takes where memory is the narrower side."""
    tiles = math.ceil(m / _TILE_M) * math.ceil(n / _TILE_N)
    waves = math.ceil(tiles / chip.num_sms)
    sm_flops = _PRODUCT_EFFICIENCY * chip.flops / chip.num_sms
    by_clock_s = waves * 2.0 * _TILE_M * _TILE_N * k / sm_flops + _KERNEL_S
    moved = BYTES * (m * k + k * n + m * n)
    by_memory_s = moved / (_MEMORY_EFFICIENCY * chip.hbm_bytes_s) + _KERNEL_S
    if by_memory_s > by_clock_s:
        return Work(memory_s=by_memory_s, num_kernels=kernels)
    return Work(product_s=by_clock_s, num_kernels=kernels)


def attention(chip: Chip, sequence: float, width: float, batch: int) -> Work:
    """Return causal attention over `width` features of this rank's heads, forward."""
    flops = 0.5 * 4.0 * batch * sequence * sequence * width
    return Work(attention_s=flops / (_ATTENTION_EFFICIENCY * chip.flops) + _KERNEL_S, num_kernels=1)


def attention_backward(chip: Chip, sequence: float, width: float, batch: int) -> Work:
    """Return its backward, which computes the scores anew."""
    flops = 2.5 * 0.5 * 4.0 * batch * sequence * sequence * width
    seconds = flops / (_ATTENTION_BACKWARD_EFFICIENCY * chip.flops) + 3.0 * _KERNEL_S
    return Work(attention_s=seconds, num_kernels=3)


def passes_over(chip: Chip, num_bytes: float, *, kernels: int = 1) -> Work:
    """Return kernels that move so many bytes and hardly compute: norms, sums, an update."""
    seconds = num_bytes / (_MEMORY_EFFICIENCY * chip.hbm_bytes_s) + kernels * _KERNEL_S
    return Work(memory_s=seconds, num_kernels=kernels)
