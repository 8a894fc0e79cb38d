"""python -m benchmarks.large_file: one rank's file of two gigabytes, in each format that is read.

A small file of its format is written and its content repeated, window by window (ours), step by
step (the original MegaScan's) or event by event (PyTorch's profiler), until the file has the size.
`megascan aggregate` of it, in a process of its own, is timed, and its peak memory taken from the
kernel. The files need that much room in --work-dir.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson

from benchmarks.aggregate_scale.measuring import Measurement, measure
from benchmarks.aggregate_scale.original_files import write_original_files
from benchmarks.aggregate_scale.rank_files import ScaleJob, write_rank_files
from benchmarks.fuzz.samples import profile_document, profile_events
from benchmarks.jobs import machine_line
from megascan.errors import UsageError, report_errors
from megascan.topology import Layout

_ONE_RANK = Layout()
_TIMES = re.compile(rb'"ts":([0-9]+)')
_NUMBERS = re.compile(rb'"(iteration|window|first_iteration|last_iteration)":([0-9]+)')


def main(arguments: Sequence[str] | None = None) -> int:
    """Write each file, aggregate it, print a row of a Markdown table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.large_file",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gigabytes", type=float, default=2.0, metavar="SIZE", help="(2)")
    parser.add_argument("--format", choices=[*_WRITERS], action="append", help="(all)")
    parser.add_argument("--work-dir", type=Path, metavar="DIR", help="where files are written")
    chosen = parser.parse_args(arguments)
    if chosen.gigabytes <= 0:
        raise UsageError(f"--gigabytes is {chosen.gigabytes}, expected a size above 0")
    print(f"{machine_line()}. Seconds and peak memory are those of the whole process.\n")
    print("| format | file, bytes | s | CPU s | peak MiB | timeline, bytes |")
    print("|---|---|---|---|---|---|")
    for name in chosen.format or _WRITERS:
        with TemporaryDirectory(dir=chosen.work_dir) as place:
            folder = Path(place) / "trace"
            folder.mkdir()
            size = _write(folder / _NAMES[name], _WRITERS[name], int(chosen.gigabytes * 1e9))
            print(_row(name, size, measure(folder, ".json.gz")), flush=True)
    return 0


def _row(name: str, size: int, measured: Measurement) -> str:
    return (
        f"| {name} | {size:,} | {measured.seconds:.1f} | {measured.cpu_seconds:.1f} "
        f"| {measured.peak_bytes / (1 << 20):.0f} | {measured.output_bytes:,} |"
    )


def _write(path: Path, pieces: Callable[[Path], Iterator[bytes]], least_bytes: int) -> int:
    """Bytes written: pieces until there are enough, and the closing brackets."""
    size = 0
    with path.open("wb") as file, TemporaryDirectory(dir=path.parent.parent) as place:
        stream = pieces(Path(place) / "small")
        closing = b"\n]\n" if "benchmark-data" in path.name else b"\n  ]\n}\n"
        for piece in stream:
            size += file.write(piece)
            if size >= least_bytes:
                break
        return size + file.write(closing)


def _rank_file(folder: Path) -> Iterator[bytes]:
    """Windows of one iteration, each a second after the one before."""
    write_rank_files(_job(), folder)
    text = next(folder.iterdir()).read_bytes().removesuffix(b"\n]\n")
    head, window = _before_spans(text)
    yield head
    for number in count():
        yield _moved(window, number)


def _before_spans(text: bytes) -> tuple[bytes, bytes]:
    """The header's lines, and those of spans with their window's mark."""
    at = text.index(b'"ph":"X"')
    cut = text.rindex(b",\n{", 0, at)
    return text[:cut], text[cut:]


def _moved(window: bytes, number: int) -> bytes:
    """A window's text a second and an iteration later for each of `number`."""
    later = _TIMES.sub(lambda match: b'"ts":%d' % (int(match[1]) + number * 10**6), window)
    return _NUMBERS.sub(lambda match: b'"%b":%d' % (match[1], int(match[2]) + number), later)


def _original_file(folder: Path) -> Iterator[bytes]:
    """Steps: their times count from their own begin."""
    write_original_files(_job(), folder)
    text = next(folder.iterdir()).read_bytes()
    steps = text[text.index(b"[") + 1 : text.rindex(b"]")].rstrip()
    yield b"[" + steps
    while True:
        yield b"," + steps


def _profile(folder: Path) -> Iterator[bytes]:
    """Steps of the profiler, each a millisecond after the one before."""
    document = orjson.dumps(profile_document(0, world_size=1), option=orjson.OPT_INDENT_2)
    head = document[: document.index(b'"traceEvents": [') + len(b'"traceEvents": [')]
    separator = b""
    for first in count():
        events = [
            event
            for step in range(100 * first, 100 * first + 100)
            for event in profile_events(0, step, num_kernels=50)
        ]
        text = orjson.dumps({"traceEvents": events}, option=orjson.OPT_INDENT_2)
        body = text[text.index(b"[") + 1 : text.rindex(b"]")].rstrip()
        yield (head if not first else b"") + separator + body
        separator = b","


def _job() -> ScaleJob:
    return ScaleJob(layout=_ONE_RANK, num_spans=1, num_microbatches=32, num_layers=64)


_WRITERS: dict[str, Callable[[Path], Iterator[bytes]]] = {
    "rank file": _rank_file,
    "original": _original_file,
    "profiler": _profile,
}
_NAMES = {
    "rank file": "benchmark-data-0-pipeline-0-tensor-0.json",
    "original": "benchmark-data-0-pipeline-0-tensor-0.json",
    "profiler": "rank0.json",
}

if __name__ == "__main__":
    sys.exit(report_errors(main))
