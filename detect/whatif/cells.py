"""Where each row of an op table belongs in dense arrays (node, lane, step).

Rows are taken in blocks that fit a processor's cache: a table of millions of rows costs little more
than reading it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from detect.whatif.graph import Bools, Ints
from detect.whatif.optable import Column, OpTable
from detect.whatif.template import Operation

Singles = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int32]

_BLOCK_ROWS = 1 << 17
_MOST_COUNTED = 10_000_000


def _blocks(num_rows: int) -> Iterator[slice]:
    for first in range(0, num_rows, _BLOCK_ROWS):
        yield slice(first, first + _BLOCK_ROWS)


@dataclass(frozen=True)
class Steps:
    """Distinct step ids in order, how many rows each has, and the number of each id."""

    ids: Ints
    num_rows: Ints
    number: Codes
    """By id less the first id; empty where ids are too far apart to be counted."""

    @classmethod
    def of(cls, step: Column) -> Steps:
        """Steps of a column."""
        low, width = int(step.min()), int(step.max()) - int(step.min()) + 1
        if width > _MOST_COUNTED:
            ids, num_rows = np.unique(step, return_counts=True)
            return cls(ids.astype(np.int64), num_rows, np.zeros(0, dtype=np.int32))
        counts = np.zeros(width, dtype=np.int64)
        for block in _blocks(len(step)):
            counts += np.bincount(step[block] - low, minlength=width)
        offsets = np.flatnonzero(counts)
        number = np.zeros(width, dtype=np.int32)
        number[offsets] = np.arange(len(offsets))
        return cls(offsets + low, counts[offsets], number)

    def numbers(self, step: Column) -> Ints:
        """Number of each id."""
        if not len(self.number):
            return np.searchsorted(self.ids, step).astype(np.int64)
        numbers: Ints = self.number[step - self.ids[0]].astype(np.int64)
        return numbers

    @property
    def usual(self) -> int:
        """Id of the first step with the most common number of rows."""
        sizes, counts = np.unique(self.num_rows, return_counts=True)
        return int(self.ids[np.argmax(self.num_rows == sizes[np.argmax(counts)])])


def template(table: OpTable, step: int) -> tuple[list[Operation], Codes]:
    """Operations of the first replica in a step; the node by (stage, op type, ordinal), or -1."""
    rows = np.flatnonzero((table.step == step) & (table.dp_rank == table.dp_rank.min()))
    sizes = int(table.stage.max()) + 1, len(table.optypes), int(table.seq_id.max()) + 1
    lookup = np.full(sizes, -1, dtype=np.int32)
    operations = []
    for number, row in enumerate(rows):
        stage, code, ordinal = (
            int(column[row]) for column in (table.stage, table.optype, table.seq_id)
        )
        lookup[stage, code, ordinal] = number
        start = float(table.start_ts[row])
        operations.append(
            Operation(
                number=number,
                stage=stage,
                optype=table.optypes[code],
                ordinal=ordinal,
                chunk=int(table.mc[row]),
                start_s=start,
                end_s=start + float(table.duration[row]),
            )
        )
    return operations, lookup


def scatter(
    table: OpTable, lookup: Codes, steps: Steps, shape: tuple[int, int, int]
) -> tuple[Bools, Singles, Singles]:
    """(which steps are complete, start, duration), the latter (node, lane, step) in seconds.

    A step is not when it has an operation too few, too many, or twice.
    """
    start = np.full(int(np.prod(shape)), np.nan, dtype=np.float32)
    duration = start.copy()
    odd = np.zeros(shape[2], dtype=np.bool_)
    for block in _blocks(len(table)):
        node = lookup[table.stage[block], table.optype[block], table.seq_id[block]]
        number = steps.numbers(table.step[block])
        cell = (node.astype(np.int64) * shape[1] + table.dp_rank[block]) * shape[2] + number
        begin, length = table.start_ts[block], table.duration[block]
        if node.min() < 0:
            odd[number[node < 0]] = True
            known = node >= 0
            cell, begin, length = cell[known], begin[known], length[known]
        start[cell], duration[cell] = begin, length
    odd |= steps.num_rows != shape[0] * shape[1]
    complete: Bools = np.asarray(~np.isnan(duration.reshape(shape)).any(axis=(0, 1)) & ~odd)
    return complete, start.reshape(shape), duration.reshape(shape)
