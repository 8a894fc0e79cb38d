"""Write of which kind layers are, as the marks of windows have it: one digest for layers alike.

The tracer digests what a layer's modules are: their classes, shapes and settings. A ground has no
modules; it says in words what would have been found, and layers of the same words are of one kind.
Two things follow from what the tracer looks at, whatever it is told to record: a layer with experts
is written down without a digest, and a hybrid model of Megatron-Core, which is no GPTModel, leaves
the field out.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

EXPERTS = ""
"""What a layer is said to be made of, and its kind, where a router feeds any part of it."""


def kinds_of(layers: Iterable[tuple[int, str]]) -> dict[str, tuple[int, ...]]:
    """Return the numbers of layers by kind; each comes with what it is made of, in words."""
    found: dict[str, tuple[int, ...]] = {}
    for number, words in layers:
        kind = EXPERTS if words == EXPERTS else sha256(words.encode()).hexdigest()[:8]
        found[kind] = (*found.get(kind, ()), number)
    return found
