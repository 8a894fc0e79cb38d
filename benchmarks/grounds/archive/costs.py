"""Compute what the operations of a GPT layer cost, by curves of efficiency instead of a roofline.

A product of m × k and k × n reaches, of the best rate r of its chip,

    r · m/(m + m½) · n/(n + n½) · k/(k + k½)          (Hockney's half-performance lengths)

so that it has half of r where one size is at its half length, and nearly all of it where all are
large. The rest of a layer moves memory, with a fixed time for each of its kernels. With r = 238
TFLOP/s a product of 4096 × 4096 × 4096 takes 0.66 ms instead of 0.58 ms.

Attention is unfused, as it was with `--transformer-impl local`: two batched products at a lower
rate, and a softmax that goes over s × s scores several times.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.grounds.archive.job import Chip, Job, Model

HALF_ROWS, HALF_COLUMNS, HALF_DEPTH = 160.0, 192.0, 200.0
KERNEL_US = 2.5  # a kernel's start and tail on the device
ATTENTION_RATE = 0.38  # of the best rate, of batched products with a depth of 128
HEAD_SIZE = 128
SCORE_BYTES = 14.0  # read and written by scaling, mask, softmax and dropout, of each score
BACKWARD_LAUNCH = 0.6  # autograd launches from C++, at a part of what Python takes
USUAL_VOCABULARY = 50_304


@dataclass(frozen=True)
class Work:
    """State what one operation takes on a chip alone (µs), and how many kernels it launches."""

    product_us: float
    attention_us: float
    memory_us: float
    num_launches: float

    def __add__(self, other: Work) -> Work:
        return Work(
            self.product_us + other.product_us,
            self.attention_us + other.attention_us,
            self.memory_us + other.memory_us,
            self.num_launches + other.num_launches,
        )

    @property
    def alone_us(self) -> float:
        """Return its time on a sound chip that is not waiting for launches."""
        return self.product_us + self.attention_us + self.memory_us

    def times(self, factor: float) -> Work:
        """Return so many of it at once."""
        return Work(
            self.product_us * factor,
            self.attention_us * factor,
            self.memory_us * factor,
            self.num_launches * factor,
        )

    def backward(self) -> Work:
        """Return its backward pass: two products for one, and gradients written beside inputs."""
        return Work(
            2 * self.product_us,
            2.1 * self.attention_us,
            1.6 * self.memory_us,
            1.7 * BACKWARD_LAUNCH * self.num_launches,
        )


@dataclass(frozen=True)
class Layer:
    """State the parts of one layer: norm and residual, attention, and the two-layer perceptron."""

    norm: Work
    attention: Work
    mlp: Work

    def whole(self) -> Work:
        """Return all of it."""
        return self.norm.times(2) + self.attention + self.mlp


def product_us(chip: Chip, rows: float, columns: float, depth: float) -> float:
    """Return the time of a product of (rows × depth) and (depth × columns)."""
    share = (rows / (rows + HALF_ROWS)) * (columns / (columns + HALF_COLUMNS))
    rate = chip.tflops * 1e6 * share * depth / (depth + HALF_DEPTH)  # FLOP in a µs
    return KERNEL_US + 2 * rows * columns * depth / rate


def memory_us(chip: Chip, size_bytes: float, num_kernels: float) -> float:
    """Return the time of kernels that move `size_bytes` together."""
    return num_kernels * KERNEL_US + size_bytes / (chip.hbm_gbps * 1e3)


def layer_of(chip: Chip, model: Model, tp: int) -> Layer:
    """Return one layer's forward work on one of `tp` ranks."""
    tokens, hidden = model.tokens, model.hidden
    heads = max(hidden // HEAD_SIZE // tp, 1)
    scores = float(model.samples * heads * model.sequence**2)
    attention_flop = 4 * scores * HEAD_SIZE
    return Layer(
        norm=Work(0, 0, memory_us(chip, 10.0 * tokens * hidden, 4), 5),
        attention=Work(
            product_us(chip, tokens, 3 * hidden / tp, hidden)
            + product_us(chip, tokens, hidden, hidden / tp),
            attention_flop / (chip.tflops * 1e6 * ATTENTION_RATE) + 2 * KERNEL_US,
            memory_us(chip, SCORE_BYTES * scores + 12.0 * tokens * hidden / tp, 9),
            17,
        ),
        mlp=Work(
            product_us(chip, tokens, 4 * hidden / tp, hidden)
            + product_us(chip, tokens, hidden, 4 * hidden / tp),
            0,
            memory_us(chip, 6.0 * tokens * 4 * hidden / tp, 3),
            8,
        ),
    )


def embedding_of(chip: Chip, model: Model) -> Work:
    """Return the first stage's lookup, its mask and dropout."""
    return Work(0, 0, memory_us(chip, 12.0 * model.tokens * model.hidden, 6), 9)


def output_of(chip: Chip, model: Model, tp: int, vocabulary: int) -> Work:
    """Return the last stage's output layer and cross entropy."""
    columns = vocabulary / tp
    logits = 18.0 * model.tokens * columns  # bytes: in fp32, over and over again
    return Work(
        product_us(chip, model.tokens, columns, model.hidden), 0, memory_us(chip, logits, 8), 16
    )


def parameters_of(job: Job, stage: int) -> float:
    """Return the number of parameters on each rank of a stage."""
    shape, model = job.shape, job.model
    ends = (stage == 0) + (stage == shape.pp - 1 > 0)
    layers = 12.0 * model.hidden**2 * shape.layers[stage]
    return (layers + ends * model.vocabulary * float(model.hidden)) / shape.tp


def optimizer_of(job: Job, stage: int) -> Work:
    """Return Adam's step: 4-byte gradient, master copy and two moments, read and written."""
    moved = 30.0 * parameters_of(job, stage)
    return Work(0, 0, memory_us(job.site.chip, moved, 12), 30)
