"""What the page shows, as Parquet: columns of equal length, numbers or texts."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from megascan.errors import ConfigError

_MOST_COLUMNS = 16
_LONGEST_NAME = 40


def to_parquet(body: Mapping[str, Any]) -> bytes:
    """Return the `columns` of a question as a Parquet file; ConfigError when they are none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = body.get("columns")
    if not isinstance(columns, dict) or not 0 < len(columns) <= _MOST_COLUMNS:
        raise ConfigError(f"columns must be an object of 1 to {_MOST_COLUMNS} lists")
    for name, values in columns.items():
        is_flat = isinstance(values, list) and all(
            one is None or isinstance(one, int | float | str) for one in values
        )
        if not is_flat or len(name) > _LONGEST_NAME:
            raise ConfigError(f"column {name[:_LONGEST_NAME]!r} must be a list of numbers or texts")
    try:
        table = pa.table({name: pa.array(values) for name, values in columns.items()})
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise ConfigError(f"the columns make no table ({str(error)[:100]})") from error
    content = io.BytesIO()
    pq.write_table(table, content)
    return content.getvalue()
