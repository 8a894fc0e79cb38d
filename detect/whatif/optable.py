"""Reads an op table: one Parquet row for each operation of each rank.

The format is that of the public traces of "Understanding Stragglers in Large Model Training Using
What-if Analysis" (OSDI 2025); `docs/whatif.md` lists its columns. Column buffers are read as they
are: Arrow's own conversion to numpy imports pandas, which costs more than the whole analysis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megascan.errors import InputError

_NUMBERS = ("dp_rank", "stage", "rank", "step", "seq_id", "mc")
_TIMES = ("start_ts", "duration")
_SIZES = ("dp_size", "pp_size", "tp_size", "dsp_size", "vpp_size")

Column = npt.NDArray[np.integer[Any]]
Singles = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class OpTable:
    """Columns of an op table, (row,) each; `optype` codes into `optypes`, times in seconds.

    `gpus_per_worker` is how many GPUs one recorded rank stands for (a TP group records one of its
    members); `has_data_parallelism` whether gradients are reduced at all.
    """

    dp_rank: Column
    stage: Column
    rank: Column
    step: Column
    seq_id: Column
    mc: Column
    optype: Column
    optypes: tuple[str, ...]
    start_ts: Singles
    duration: Singles
    source: str = "op table"
    gpus_per_worker: int = 1
    has_data_parallelism: bool = True

    def __len__(self) -> int:
        return len(self.rank)


def is_op_table(path: Path) -> bool:
    """Whether a path is a Parquet file, by its first four bytes."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def read_op_table(path: Path) -> OpTable:
    """Read an op table, and the job's sizes from `meta-<name>.yaml` beside it where there is one.

    Raises InputError for a file that is not Parquet, lacks a column, has missing values or no rows.
    """
    table = _read(path)
    for name in (*_NUMBERS, *_TIMES, "optype"):
        if name not in table.column_names:
            raise InputError(
                f"{path} has no column {name!r}, it has {', '.join(table.column_names)}; an op "
                "table has the columns that docs/whatif.md lists"
            )
    if not table.num_rows:
        raise InputError(f"{path} has no rows; record at least one step")
    columns = {name: _buffer(path, table, name) for name in _NUMBERS}
    start, duration = (_buffer(path, table, name).astype(np.float32, copy=False) for name in _TIMES)
    _check_values(path, columns, duration)
    codes, texts = _texts(path, table)
    sizes = _sizes(path, int(columns["dp_rank"].max()) + 1)
    return OpTable(
        **columns,
        optype=codes,
        optypes=texts,
        start_ts=start,
        duration=duration,
        source=path.name,
        gpus_per_worker=sizes["tp_size"] * sizes["dsp_size"],
        has_data_parallelism=sizes["dp_size"] * sizes["dsp_size"] > 1,
    )


def _check_values(path: Path, columns: dict[str, Column], duration: Singles) -> None:
    for name in ("dp_rank", "stage", "rank", "seq_id"):
        if columns[name].min() < 0:
            raise InputError(
                f"{path}: column {name!r} has {columns[name].min()}, expected 0 or more; every row "
                "is one operation of one rank"
            )
    if duration.min() < 0:
        raise InputError(
            f"{path}: an operation lasts {duration.min():.6f} s, expected 0 or more seconds"
        )


def _read(path: Path) -> pa.Table:
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            wanted = [*_NUMBERS, *_TIMES, "optype"]
            present = [name for name in wanted if name in file.schema_arrow.names]
            missing = len(present) < len(wanted)
            return file.read() if missing else file.read(columns=present)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} cannot be read as Parquet: {error}") from error


def _chunk(path: Path, table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    array = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
    if array.null_count:
        raise InputError(
            f"{path}: column {name!r} has {array.null_count} missing values in {len(array)} rows; "
            "an op table has none"
        )
    return array


def _view(array: pa.Array, kind: np.dtype[np.generic]) -> Column:
    values = np.frombuffer(array.buffers()[1], dtype=kind)
    return values[array.offset : array.offset + len(array)]


def _buffer(path: Path, table: pa.Table, name: str) -> Column:
    array = _chunk(path, table, name)
    bits = getattr(array.type, "bit_width", 0)
    if pa.types.is_integer(array.type):
        letter = "i" if pa.types.is_signed_integer(array.type) else "u"
        return _view(array, np.dtype(f"{letter}{bits // 8}"))
    if pa.types.is_floating(array.type):
        return _view(array, np.dtype(f"f{bits // 8}"))
    raise InputError(f"{path}: column {name!r} is {array.type}, expected a number")


def _texts(path: Path, table: pa.Table) -> tuple[Column, tuple[str, ...]]:
    array = _chunk(path, table, "optype")
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        array = array.dictionary_encode()
    if not pa.types.is_dictionary(array.type):
        raise InputError(f"{path}: column 'optype' is {array.type}, expected text")
    width = array.type.index_type.bit_width // 8
    return _view(array.indices, np.dtype(f"i{width}")), tuple(array.dictionary.to_pylist())


def _sizes(path: Path, num_replicas: int) -> dict[str, int]:
    """Sizes from the plain `key: value` lines of the file beside the table, 1 where it has none."""
    sizes = dict.fromkeys(_SIZES, 1) | {"dp_size": num_replicas}
    meta = path.with_name(path.name.replace("trace-", "meta-")).with_suffix(".yaml")
    if meta == path or not meta.is_file():
        return sizes
    return {**sizes, **_whole_numbers(meta)}


def _whole_numbers(path: Path) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() not in _SIZES:
            continue
        if not value.strip().isdigit() or int(value) < 1:
            raise InputError(f"{path}: {key.strip()} is {value.strip()!r}, expected 1 or more")
        found[key.strip()] = int(value)
    return found
