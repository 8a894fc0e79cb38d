"""Sum of squares and largest magnitude of tensors on a GPU, each tensor read once.

On a GPU, looking at a training costs reads of memory and launches of kernels: torch's own
reductions read a tensor twice and launch eight kernels, and a bias that Megatron-Core adds later
would be added in memory first. Here one kernel a tensor writes what each of its programs has found
into a row of a table; all rows are added up together, later.

    magnitudes = Magnitudes(device)
    energy, largest = magnitudes.of(tensor)      # filled by finish()
    magnitudes.finish()
"""

import torch
import triton
import triton.language as tl

_NUM_PROGRAMS = 1056
"""Programs of the kernel: as many as fit, 8 on each of an H100's or H200's 132 multiprocessors."""
_BLOCK = 4096
_NUM_ROWS = 1024


@triton.jit(do_not_specialize=["row"])  # type: ignore[untyped-decorator]
def _read(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    tensor, bias, parts, row, size,
    width: tl.constexpr, has_bias: tl.constexpr, block: tl.constexpr, num_programs: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    energy = tl.zeros((block,), dtype=tl.float32)
    largest = tl.zeros((block,), dtype=tl.float32)
    for start in range(program * block, size, num_programs * block):
        at = start + tl.arange(0, block)
        stored = tl.load(tensor + at, mask=at < size, other=0.0)
        values = stored.to(tl.float32)
        if has_bias:
            added = tl.load(bias + at % width, mask=at < size, other=0.0).to(tl.float32)
            values = (values + added).to(stored.dtype).to(tl.float32)
        energy += values * values
        largest = tl.maximum(largest, tl.abs(values))
    total = tl.sum(energy, axis=0)
    most = tl.max(largest, axis=0)
    # A maximum ignores NaN; a sum of squares is NaN exactly when one of the numbers is.
    most = tl.where(total >= 0, most, total)
    tl.store(parts + row * 2 * num_programs + program, total)
    tl.store(parts + (row * 2 + 1) * num_programs + program, most)


class _Table:
    """The numbers of up to `_NUM_ROWS` tensors."""

    def __init__(self, device: torch.device) -> None:
        shape = (_NUM_ROWS, 2, _NUM_PROGRAMS)
        self.parts = torch.empty(shape, dtype=torch.float32, device=device)
        self.found = torch.empty(2, _NUM_ROWS, dtype=torch.float32, device=device)
        energies, largest = (one.view(-1, 1, 1, 1).unbind() for one in self.found.unbind())
        self.rows = list(zip(energies, largest, strict=True))

    def finish(self, count: int) -> None:
        """Add up the first `count` rows."""
        torch.sum(self.parts[:count, 0], dim=-1, out=self.found[0, :count])
        torch.amax(self.parts[:count, 1], dim=-1, out=self.found[1, :count])


class Magnitudes:
    """Sums of squares and largest magnitudes of the tensors of an iteration."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: list[_Table] = []
        self._num_rows = 0

    def of(
        self, tensor: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two tensors (1, 1, 1) that `finish` fills: sum of squares and largest magnitude.

        A bias `(feature,)` counts as added to `tensor`.
        """
        number, row = divmod(self._num_rows, _NUM_ROWS)
        if number == len(self._tables):
            self._tables.append(_Table(self._device))
        self._num_rows += 1
        table, tensor = self._tables[number], tensor.contiguous()
        _read[(_NUM_PROGRAMS,)](
            tensor, tensor if bias is None else bias, table.parts, row, tensor.numel(),
            width=tensor.shape[-1], has_bias=bias is not None, block=_BLOCK,
            num_programs=_NUM_PROGRAMS, num_warps=8,
        )  # fmt: skip
        return table.rows[row]

    def finish(self) -> None:
        """Fill what `of` has returned since the last `finish`; the next `finish` overwrites it."""
        for number, table in enumerate(self._tables):
            count = min(self._num_rows - number * _NUM_ROWS, _NUM_ROWS)
            if count > 0:
                table.finish(count)
        self._num_rows = 0
