"""Times of a rank's own operations, by class: passes, layers, kernels, modules by what bounds them.

An operation is (phase, chunk, microbatch); ranks of one stage do the same operations.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from detect.observe.axes import along
from megascan.arrays import Floats, Integers

FORWARD, BACKWARD = 0, 1
MLP_OF_MODULES, ATTENTION_OF_MODULES, OUTPUT_OF_MODULES = 0, 1, 2
LOSS_OF_LOOKUPS = 1
PHASE_NAMES = ("forward", "backward")


@dataclass(frozen=True, kw_only=True)
class Work:
    """Self times of one class of operations, as logarithms of ns.

    An operation is (phase, chunk, microbatch); ranks of one stage do the same operations.
    """

    log_ns: Floats = field(metadata=along("row", "iteration", "operation"))
    phase: Integers = field(metadata=along("operation"))
    """FORWARD or BACKWARD"""
    microbatch: Integers = field(metadata=along("operation"))
    derived: dict[str, tuple[object, ...]] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )
    """Cache by name: what was last computed from this work, and for which arguments. A search asks
    for the same several times in a row."""


@dataclass(frozen=True, kw_only=True)
class Boundness:
    """Profiles: work by what its kernels are bound by, comparable as `Observations.work` is."""

    memory: Work
    """Kernels that move more than they compute: activations, norms, lookups; no optimizer."""
    matrix: Work
    """Matrix products, convolutions, attention."""
    memory_ns: Floats = field(metadata=along("row", "iteration"))
    """Time in kernels that move more than they compute, those of the optimizer included."""


@dataclass(frozen=True, kw_only=True)
class Tokenwise:
    """Rank files: parts of a model that take time in proportion to the number of tokens, whatever
    the length of documents and whatever a router sends to experts. NaN where none was traced.
    """

    dense_ns: Floats = field(metadata=along("row", "iteration"))
    """Products of matrices: MLPs without experts and the output layer, forward and backward."""
    lookups_ns: Floats = field(metadata=along("row", "iteration"))
    """(row, iteration, kind): what moves memory, a span of the embedding and of the loss."""
