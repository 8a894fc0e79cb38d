"""The weights of a model in one piece of memory, in large pages where the kernel has them.

For every token of a small batch the processor reads all weights once. Spread over pages of 4 KiB,
a good part of that time goes into finding the pages: memory that is read in a row is found only to
the end of a page, and a virtual machine looks up every page twice. Linux has pages of 2 MiB for who
asks for them; it gives none for pieces that are smaller, as most of a small model's tensors are.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

_ALIGNMENT_BYTES = 64


def join_weights(model: torch.nn.Module) -> None:
    """Move the parameters of a model on the CPU into one block; what they hold is lost."""
    parameters = list(model.parameters())
    starts, size_bytes = [], 0
    for parameter in parameters:
        starts.append(size_bytes)
        size_bytes += -(-parameter.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    if not size_bytes:
        return
    block = mmap.mmap(-1, size_bytes)
    with suppress(AttributeError, OSError):  # a kernel without them
        block.madvise(mmap.MADV_HUGEPAGE)
    content = torch.frombuffer(block, dtype=torch.uint8)
    for parameter, start in zip(parameters, starts, strict=True):
        own = content[start : start + parameter.nbytes]
        parameter.data = own.view(parameter.dtype).view(parameter.shape)
