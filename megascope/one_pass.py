"""Sum of squares and largest magnitude of tensors on a GPU, each tensor read once.

What looking at a training costs there is memory that is read once more, and kernels to begin:
torch's own reductions read twice and begin eight. Here one kernel a tensor writes what each of its
programs has found into a row of a table; the rows are added up together, later.

    sizes = Sizes(device)
    energy, largest = sizes.of(tensor)      # filled by finish()
    sizes.finish()
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_NUM_PROGRAMS = 528
"""Four for each of the 132 multiprocessors of an H100 or H200."""
_BLOCK = 4096
_NUM_ROWS = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _read(tensor, parts, size, block: tl.constexpr, num_programs: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    energy = tl.zeros((block,), dtype=tl.float32)
    largest = tl.zeros((block,), dtype=tl.float32)
    for start in range(program * block, size, num_programs * block):
        at = start + tl.arange(0, block)
        values = tl.load(tensor + at, mask=at < size, other=0.0).to(tl.float32)
        energy += values * values
        largest = tl.maximum(largest, tl.abs(values))
    total = tl.sum(energy, axis=0)
    most = tl.max(largest, axis=0)
    # A maximum passes over NaN; a sum of squares is NaN exactly when one of them is.
    most = tl.where(total >= 0, most, total)
    tl.store(parts + program, total)
    tl.store(parts + num_programs + program, most)


class _Table(NamedTuple):
    parts: torch.Tensor
    """`(row, 2, program)`"""
    found: torch.Tensor
    """`(row, 2)`"""


class Sizes:
    """Sums of squares and largest magnitudes of the tensors of an iteration."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: list[_Table] = []
        self._num_rows = 0

    def of(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where its sum of squares and its largest magnitude will be, both (1, 1, 1)."""
        number, at = divmod(self._num_rows, _NUM_ROWS)
        if number == len(self._tables):
            shape = (_NUM_ROWS, 2, _NUM_PROGRAMS)
            parts = torch.empty(shape, dtype=torch.float32, device=self._device)
            self._tables.append(_Table(parts, torch.empty_like(parts[..., 0])))
        self._num_rows += 1
        parts, found = self._tables[number]
        tensor = tensor.contiguous()
        _read[(_NUM_PROGRAMS,)](
            tensor, parts[at], tensor.numel(), block=_BLOCK, num_programs=_NUM_PROGRAMS, num_warps=8
        )
        return found[at, 0].view(1, 1, 1), found[at, 1].view(1, 1, 1)

    def finish(self) -> None:
        """Fill what `of` returned since the last time; rows are used again from then on."""
        for number, table in enumerate(self._tables):
            count = min(self._num_rows - number * _NUM_ROWS, _NUM_ROWS)
            if count > 0:
                torch.sum(table.parts[:count, 0], dim=-1, out=table.found[:count, 0])
                torch.amax(table.parts[:count, 1], dim=-1, out=table.found[:count, 1])
        self._num_rows = 0
