"""SQL over a timeline by Perfetto's own engine, through its Python package."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import TypeVar

from perfetto.trace_processor import (
    TraceProcessor,
    TraceProcessorConfig,
    TraceProcessorException,
)

from megascan.errors import InputError, MissingError, UsageError
from megascan.viewer.presets import SPAN_VIEW, span_view
from megascan.viewer.rows import Rows

_LOG = logging.getLogger(__name__)
_ENGINES = ("trace_processor_shell", "trace_processor")
_START_SECONDS = 60
_BLOCK_BYTES = 32 << 20
_GIVE_ONE = (
    "give Perfetto's trace_processor_shell with --trace-processor, or put it on the search path"
)

Result = TypeVar("Result")


def run_query(path: Path, sql: str, *, trace_processor: Path | None = None) -> Rows:
    """Rows of PerfettoSQL over a timeline file of any format.

    Beside Perfetto's tables there is `megascan_span` (see `megascan.viewer.presets`). The engine
    is `trace_processor`, or one on the search path, or the one that the perfetto package fetches
    from the network once, which is announced. Raises MissingError when there is none, InputError
    when the file does not load, UsageError for a query that fails.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file; make a timeline with megascan aggregate")
    with _loaded(_engine(trace_processor), path) as engine:
        answer = _asked(lambda: engine.query(sql))
        columns = tuple(answer.column_names)
        _check_names(columns)
        rows = tuple(tuple(getattr(row, name) for name in columns) for row in answer)
    return Rows(columns, rows)


def _check_names(columns: tuple[str, ...]) -> None:
    """The package hands rows over by column name, so one of two equal ones would be lost."""
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise UsageError(
            f"the query gives several columns the name {twice[0]}; name them apart with 'as'"
        )


def _engine(given: Path | None) -> str | None:
    if given is not None:
        if not given.is_file():
            raise MissingError(f"{given}: no such engine; {_GIVE_ONE}")
        return str(given.absolute())
    for name in _ENGINES:
        found = shutil.which(name)
        if found:
            return found
    _LOG.warning("no engine given: the perfetto package fetches its own from the network, once")
    return None


class _Blocks:
    """A file in pieces; `begun` tells an engine that does not start from one that does not load."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.begun = False

    def __iter__(self) -> Iterator[bytes]:
        self.begun = True
        with self._path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                yield block


def _loaded(binary: str | None, path: Path) -> TraceProcessor:
    """An engine that has the file and the span view."""
    config = TraceProcessorConfig(bin_path=binary, load_timeout=_START_SECONDS)
    blocks = _Blocks(path)
    try:
        with redirect_stdout(sys.stderr):  # the package prints that it downloads
            engine = TraceProcessor(trace=iter(blocks), config=config)
            engine.query(span_view())
            return engine
    except Exception as error:  # the package raises bare Exceptions, too
        if blocks.begun:
            raise InputError(f"{path}: Perfetto cannot load it ({_reason(error)})") from error
        what = f"{binary} does not start" if binary else "Perfetto's engine cannot be fetched"
        raise MissingError(f"{what} ({_reason(error)}); {_GIVE_ONE}") from error


def _asked(ask: Callable[[], Result]) -> Result:
    try:
        return ask()
    except TraceProcessorException as error:
        raise UsageError(
            f"the query failed: {_reason(error)}; tables are slice, flow, counter, {SPAN_VIEW} "
            "and Perfetto's others"
        ) from error


def _reason(error: Exception) -> str:
    """The last line: what stands before it is where in the query, on several lines."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
