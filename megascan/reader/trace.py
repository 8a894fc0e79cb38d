"""Read a trace: find the format, read all files, and make one run of what they hold.

    path ─ sniff ─ importer ─ segments ─ one run, one segment a rank ─ comparable ─ Trace
           what    one a      a rank     missing ranks, several runs   like with
           it is   format     and run    and contradictions said       like

Ranks or windows may differ on purpose: a bound on the size of files drops the oldest windows, on
some ranks more than on others, and a budget lowers the granularity in mid-run. `comparable` keeps
the iterations that every rank still has, at the granularity with which most of them were traced.
The rank files keep all.
"""

from __future__ import annotations

import importlib
import os
import re
from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import translate
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa

from megascan.errors import InputError, listed
from megascan.header import WindowRecord
from megascan.parallel import Here, Kept, Workers
from megascan.reader.lines import file_batches, read_start
from megascan.reader.segments import Importer, Packed, Segment, joined_ends, settled_shard
from megascan.schema import Granularity
from megascan.timeline import Completeness, Trace, codes, in_order, without
from megascan.topology import RANK_FILE_PATTERNS
from megascan.vocabulary import BACKWARD, GRAD_SYNC, LOSS, OPTIMIZER


@dataclass(frozen=True)
class Comparable:
    """Segments by rank, cut to what can be compared, and sentences about what was left out."""

    by_rank: Mapping[int, Segment]
    notes: tuple[str, ...] = ()


def comparable(by_rank: Mapping[int, Segment]) -> Comparable:
    """Cut the segments of one run to what can be compared; headers then have that granularity."""
    after_limit = _since_last_drop(by_rank)
    at_one = _at_one_granularity(after_limit.by_rank)
    notes = (*after_limit.notes, *at_one.notes, *_interval_notes(at_one.by_rank))
    return Comparable(at_one.by_rank, notes)


def _since_last_drop(by_rank: Mapping[int, Segment]) -> Comparable:
    """Leave out the iterations that any rank's file no longer holds."""
    headers = [segment.header for segment in by_rank.values()]
    last = max(header.last_iteration_dropped for header in headers)
    if not last:
        return Comparable(by_rank)
    dropped = {
        iteration
        for segment in by_rank.values()
        for window in segment.windows
        for iteration in _iterations(window)
        if iteration <= last
    }
    most_bytes = max(header.trace.max_bytes for header in headers)
    note = (
        f"begins after iteration {last}: earlier windows were dropped to keep each rank's file "
        f"within --trace-max-bytes {most_bytes:,}"
    )
    return Comparable(_without(by_rank, dropped), (note,))


def _at_one_granularity(by_rank: Mapping[int, Segment]) -> Comparable:
    """Leave out the iterations that any rank traced at another granularity than the most used."""
    counts: Counter[Granularity] = Counter()
    at: dict[Granularity, set[int]] = {}
    for segment in by_rank.values():
        for window in segment.windows:
            granularity = segment.header.trace.granularity
            if window.granularity:
                granularity = Granularity(window.granularity)
            counts[granularity] += window.last_iteration - window.first_iteration + 1
            at.setdefault(granularity, set()).update(_iterations(window))
    if not counts:
        return Comparable(by_rank)
    chosen = max(counts, key=lambda granularity: (counts[granularity], granularity))
    others = {i for granularity in at if granularity is not chosen for i in at[granularity]}
    kept = _without(by_rank, others) if others else by_rank
    notes = (_granularity_note(chosen, others, at[chosen] - others),) if others else ()
    return Comparable({rank: _at(segment, chosen) for rank, segment in kept.items()}, notes)


def _granularity_note(chosen: Granularity, others: set[int], kept: set[int]) -> str:
    return (
        f"granularity changed during the run (--trace-budget): {len(kept)} iterations of "
        f"{chosen} are analysed, {len(others)} of another granularity ({min(others)} to "
        f"{max(others)}) are left out, so that like is compared with like"
    )


def _interval_notes(by_rank: Mapping[int, Segment]) -> list[str]:
    """Say from which iterations on windows became rarer; nothing is left out for that."""
    first = next(iter(by_rank.values()))
    return [
        f"a window every {after.interval} instead of {before.interval} iterations from iteration "
        f"{after.first_iteration} on, as tracing cost too much (--trace-budget)"
        for before, after in pairwise(first.windows)
        if before.interval and after.interval > before.interval
    ]


def _at(segment: Segment, granularity: Granularity) -> Segment:
    if segment.header.trace.granularity is granularity:
        return segment
    settings = replace(segment.header.trace, granularity=granularity)
    return replace(segment, header=replace(segment.header, trace=settings))


def _iterations(window: WindowRecord) -> Iterable[int]:
    return range(window.first_iteration, window.last_iteration + 1)


def _without(by_rank: Mapping[int, Segment], iterations: set[int]) -> dict[int, Segment]:
    return {rank: _cut(segment, iterations) for rank, segment in by_rank.items()}


def _cut(segment: Segment, iterations: set[int]) -> Segment:
    """Take some iterations out of a segment; a window without iterations left is dropped."""
    windows = tuple(
        window for window in segment.windows if not iterations.issuperset(_iterations(window))
    )
    stays = tuple(replace(one, left_out=one.left_out | iterations) for one in segment.stays)
    return replace(segment, spans=without(segment.spans, iterations), windows=windows, stays=stays)


def build_trace(
    path: Path,
    segments: Sequence[Segment],
    run: str | None,
    *,
    allow_missing_ranks: bool,
    beside: Sequence[str] = (),
) -> Trace:
    """Build one run out of everything that was read from `path`.

    A rank without a finished window is missing, like a rank without a file. `beside` are sentences
    about what else lies at `path` and was not read.

    Raises InputError for an unknown `run`, ranks that contradict each other, missing ranks unless
    allowed, and a run without a finished window.
    """
    chosen = _choose_run(path, segments, run)
    found = _one_a_rank(segment for segment in segments if segment.header.run_id == chosen)
    _check_agreement(found)
    others = sorted({segment.header.run_id for segment in segments} - {chosen})
    by_rank = {rank: segment for rank, segment in found.items() if segment.windows}
    if not by_rank:
        raise InputError(
            f"{path}: run {chosen} has no finished window (training ended or was killed inside its "
            "first traced window, or tracing was armed and never switched on); train past the end "
            "of a window and trace again"
        )
    missing = _missing_ranks(by_rank)
    if missing and not allow_missing_ranks:
        text = _missing_message(path, found, missing, chosen, others)
        raise InputError("; ".join((text, *beside)))
    cut = comparable(by_rank)
    notes = [*_notes(path, found, missing, chosen, others), *beside, *cut.notes]
    notes += _unseen_updates(cut.by_rank)
    return _trace(cut.by_rank, notes)


def _choose_run(path: Path, segments: Sequence[Segment], run: str | None) -> str:
    """Choose the run asked for, or the one whose clock origin is the latest."""
    newest: dict[str, int] = {}
    for segment in segments:
        header = segment.header
        origin = header.clock.origin_unix_ns
        newest[header.run_id] = max(origin, newest.get(header.run_id, origin))
    if run is None:
        return max(newest, key=lambda run_id: (newest[run_id], run_id))
    if run not in newest:
        raise InputError(
            f"{path} holds no run {run}; it holds {listed(sorted(newest))}: pass one with --run"
        )
    return run


def _one_a_rank(segments: Iterable[Segment]) -> dict[int, Segment]:
    """Return segments by rank, in the order of ranks; a rank in two files is an error."""
    found: dict[int, Segment] = {}
    for segment in segments:
        earlier = found.setdefault(segment.header.rank, segment)
        if earlier is not segment:
            raise InputError(
                f"{earlier.path} and {segment.path.name} both hold rank {segment.header.rank} of "
                f"run {segment.header.run_id}; move one of them out of the folder"
            )
    return dict(sorted(found.items()))


def _check_agreement(by_rank: Mapping[int, Segment]) -> None:
    """Check that all headers of a run agree on the job, and that their ranks lie in its world."""
    first = next(iter(by_rank.values()))
    for rank, segment in by_rank.items():
        header = segment.header
        if header.world_size != header.layout.world_size:
            raise InputError(
                f"{segment.path}: header says world size {header.world_size}, but its layout has "
                f"{header.layout.world_size} ranks; the file is damaged, restore it"
            )
        if header.layout != first.header.layout:
            raise InputError(
                f"{segment.path} says world size {header.world_size} ({header.layout}), "
                f"{first.path.name} says {first.header.world_size} ({first.header.layout}); files "
                "of different jobs are mixed, put each job into a folder of its own"
            )
        if not 0 <= rank < header.world_size:
            raise InputError(
                f"{segment.path}: header says rank {rank} in a world of {header.world_size} ranks; "
                "the file is damaged, restore it"
            )


def _missing_ranks(by_rank: Mapping[int, Segment]) -> tuple[int, ...]:
    world_size = next(iter(by_rank.values())).header.world_size
    return tuple(sorted(set(range(world_size)) - set(by_rank)))


def _missing_message(
    path: Path,
    found: Mapping[int, Segment],
    missing: Sequence[int],
    run: str,
    others: Sequence[str],
) -> str:
    world_size = next(iter(found.values())).header.world_size
    text = (
        f"expected {world_size} rank files for world size {world_size}, found {len(found)} "
        f"{f'of run {run} ' if others else ''}in {path}: {_absence(found, missing)}; "
    )
    if others:
        text += f"several runs are mixed, choose another with --run ({listed(others)}) or "
    return text + "pass --allow-missing-ranks to go on without them"


def _absence(found: Mapping[int, Segment], missing: Sequence[int]) -> str:
    """Say which ranks have no file, and which have a file without a finished window."""
    begun = [rank for rank in missing if rank in found]
    absent = [rank for rank in missing if rank not in found]
    parts = []
    if absent:
        parts.append(f"{_ranks(absent)} {'are' if len(absent) > 1 else 'is'} missing")
    if begun:
        parts.append(f"{_ranks(begun)} {'have' if len(begun) > 1 else 'has'} no finished window")
    return " and ".join(parts)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"


def _notes(
    path: Path,
    found: Mapping[int, Segment],
    missing: Sequence[int],
    run: str,
    others: Sequence[str],
) -> list[str]:
    notes = []
    if others:
        notes.append(f"run {run} was read; {path} also holds {listed(others)} (--run chooses)")
    if missing:
        notes.append(_absence(found, missing))
    notes += _short_ranks({rank: one for rank, one in found.items() if one.windows})
    return notes + _notes_by_ranks(found)


def _notes_by_ranks(found: Mapping[int, Segment]) -> list[str]:
    """Return the notes of all ranks; equal notes of several ranks are joined into one."""
    ranks: dict[str, list[int]] = {}
    for rank, segment in found.items():
        for note in segment.notes:
            ranks.setdefault(note.removeprefix(f"rank {rank}: "), []).append(rank)
    return [
        note if note in found[own[0]].notes else f"{_ranks(own)}: {note}"
        for note, own in ranks.items()
    ]


def _short_ranks(by_rank: Mapping[int, Segment]) -> list[str]:
    """Say which ranks lack their last windows, grouped by where they stop."""
    last = {
        rank: max(window.last_iteration for window in segment.windows)
        for rank, segment in by_rank.items()
    }
    end = max(last.values())
    stops: dict[int, list[int]] = {}
    for rank, iteration in last.items():
        if iteration < end:
            stops.setdefault(iteration, []).append(rank)
    return [
        f"{_ranks(ranks)} end{'' if len(ranks) > 1 else 's'} with iteration {iteration}, "
        f"the others with {end}"
        for iteration, ranks in sorted(stops.items())
    ]


def _unseen_updates(by_rank: Mapping[int, Segment]) -> list[str]:
    """Say which part of the update the tracer did not see, although it saw the job's passes."""
    header = next(iter(by_rank.values())).header
    if "megascan" not in header.versions:  # recorded by another tool, or simulated
        return []
    seen = {name for one in by_rank.values() for name in codes(one.spans, "name")[1]}
    notes = []
    if BACKWARD in seen and OPTIMIZER not in seen:
        notes.append(
            "no optimizer step was seen: the trainer's is neither torch's nor megatron.core's; "
            'enclose it in tracer.span("optimizer", megascan.Kind.OPTIMIZER)'
        )
    # plain trainers, for which no `loss` is recorded, reduce gradients in ways of their own
    if {BACKWARD, LOSS} <= seen and GRAD_SYNC not in seen and header.layout.dp > 1:
        notes.append(
            "no grad-sync was seen: gradients are finished by a function that the tracer does not "
            'know; enclose it in tracer.span("grad-sync", megascan.Kind.OPTIMIZER)'
        )
    return notes


_SHORT_ROWS = 1 << 10
"""Rows of a column's piece; a shorter piece costs more than its rows each time it is read."""


def _trace(by_rank: Mapping[int, Segment], notes: Sequence[str]) -> Trace:
    header = next(iter(by_rank.values())).header
    spans = _joined(tuple(by_rank.values()))
    return Trace(
        run_id=header.run_id,
        layout=header.layout,
        headers={rank: segment.header for rank, segment in by_rank.items()},
        spans=spans,
        windows={rank: segment.windows for rank, segment in by_rank.items()},
        completeness=Completeness(
            world_size=header.world_size,
            ranks=tuple(by_rank),
            missing_ranks=_missing_ranks(by_rank),
            num_spans=spans.num_rows,
            num_unfinished_spans=sum(item.num_unfinished_spans for item in by_rank.values()),
            notes=tuple(notes),
        ),
        stays={rank: one.stays for rank, one in by_rank.items() if one.stays},
    )


def _joined(segments: Sequence[Segment]) -> pa.Table:
    """Return the spans of some ranks, in the order of ranks and, within a rank, of time."""
    if all(one.stays for one in segments):
        return joined_ends(segments)
    tables = [in_order(one.spans) for one in segments]
    spans = pa.concat_tables(tables).unify_dictionaries()
    are_short = spans.num_rows < _SHORT_ROWS * len(tables)
    return spans.combine_chunks() if are_short else spans


_LOOK_BYTES = 1 << 16
_FIRST_EVENT_BYTES = 1 << 10
"""Bytes in which one of our rank files names its format; thousands of files are looked at."""
_EXPECTED = (
    "expected rank files of MegaScan (schema 1), rank files or a timeline of the original "
    "MegaScan, PyTorch profiler JSON or a timeline of megascan aggregate"
)


class Format(StrEnum):
    """Format of a file, or of the files of a folder."""

    RANK_FILES = "rank_files"
    ORIGINAL = "original"
    KINETO = "kineto"
    TIMELINE = "timeline"
    PERFETTO = "perfetto"
    OP_TABLE = "op_table"
    ORIGINAL_TIMELINE = "original_timeline"


_JSON_PATTERNS = ("*.json", "*.json.gz")
RANK_FORMATS = (Format.RANK_FILES, Format.ORIGINAL, Format.KINETO)
MERGED_FORMATS = (Format.TIMELINE, Format.PERFETTO)

_OWN_SIGN = re.compile(rb'"name"\s*:\s*"megascan(?:_window|(_timeline))?"')
"""Both of our JSON formats name themselves in their first event."""
_JSON_SIGNS: tuple[tuple[Format, re.Pattern[bytes]], ...] = (
    (Format.ORIGINAL, re.compile(rb'"(pad_before|rel_ts)"\s*:')),
    (Format.ORIGINAL_TIMELINE, re.compile(rb'"dp_rk"\s*:')),
    (
        Format.KINETO,
        re.compile(
            rb'"(deviceProperties|distributedInfo|traceName|record_shapes|baseTimeNanoseconds)"\s*:'
            rb'|"cat"\s*:\s*"(cpu_op|kernel|(gpu_)?user_annotation|cuda_runtime|python_function'
            rb'|gpu_mem(cpy|set)|Operator|Kernel|Runtime|Mem(cpy|set)|ac2g|async_gpu)"'
        ),
    ),
)


def sniff(path: Path) -> Format:
    """Find the format of a file, or of the rank files of a folder.

    Raises InputError that says what a foreign path looks like and what is expected.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file or folder; {_EXPECTED}")
    if not path.is_dir() and not path.is_file():
        raise InputError(
            f"{path}: is neither a file nor a folder (a pipe or a device); {_EXPECTED}"
        )
    return sniff_folder(path)[0] if path.is_dir() else sniff_file(path)


def sniff_file(path: Path) -> Format:
    """Find the format of one file."""
    start = read_start(path, _LOOK_BYTES)
    if not start:
        raise InputError(f"{path} is empty; {_EXPECTED}")
    return _format_of(path, start)


def _format_of(path: Path, start: bytes) -> Format:
    found = _json_format(start)
    if found is None and start.startswith(b"PAR1") and _is_op_table(path):
        found = Format.OP_TABLE
    if found is None and not _is_json(start) and _is_perfetto(start):
        found = Format.PERFETTO
    if found is None:
        raise InputError(f"{path} looks like {_description(start)}; {_EXPECTED}")
    return found


def holds_ranks(path: Path) -> bool:
    """Return whether a file of a trace folder is a rank's trace, by its name or its content."""
    if _is_named(path.name, RANK_FILE_PATTERNS):
        return True
    return _sniff_stray(path) in RANK_FORMATS


def sniff_folder(folder: Path) -> tuple[Format, list[Path]]:
    """Return the format of a folder's rank files, and these files in the order of their names.

    If no file has the name of a rank file, other JSON files count that are a rank's trace.
    Everything else in the folder (ground truth, logs) is skipped. Raises InputError for files of
    several formats, for example profiles with the names of rank files among rank files.
    """
    named = _matching(folder, RANK_FILE_PATTERNS)
    if named:
        return _common_format(folder, {path: _sniff_named(path) for path in named})
    formats = {path: _sniff_stray(path) for path in _matching(folder, _JSON_PATTERNS)}
    ranks = {path: found for path, found in formats.items() if found in RANK_FORMATS}
    if not ranks:
        raise InputError(f"no rank files in {folder}{_hint(folder)}; {_EXPECTED}")
    return _common_format(folder, ranks)


def _matching(
    folder: Path, patterns: tuple[str, ...], known: Collection[str] = frozenset()
) -> list[Path]:
    """List the files of a folder that match any pattern, without `known` names, ordered by name.

    Unlike Path.glob, this raises InputError if the folder must not be read.
    """
    try:
        with os.scandir(folder) as entries:
            named = [one for one in entries if _is_named(one.name, patterns)]
            names = [one.name for one in named if one.name not in known and one.is_file()]
        for name in names[:1]:
            (folder / name).stat()  # some folders may be listed but not entered
        return [folder / name for name in sorted(names)]
    except OSError as error:
        raise InputError(
            f"{error.filename}: cannot be looked at ({error.strerror}); "
            "check the permissions of the folder"
        ) from error


def _is_named(name: str, patterns: tuple[str, ...]) -> bool:
    return _expression(patterns).match(name) is not None


@cache
def _expression(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Return an expression that matches names by any of some patterns, made once."""
    return re.compile("|".join(map(translate, patterns)))


def _sniff_named(path: Path) -> Format | None:
    """Find a rank file's format; None for an empty file, left by a rank killed at its start."""
    start = read_start(path, _FIRST_EVENT_BYTES)
    if _OWN_SIGN.search(start) is None:
        start = read_start(path, _LOOK_BYTES)
    return _format_of(path, start) if start else None


def _sniff_stray(path: Path) -> Format | None:
    try:
        return sniff_file(path)
    except InputError:
        return None


def _common_format(folder: Path, found: Mapping[Path, Format | None]) -> tuple[Format, list[Path]]:
    formats = sorted({fmt for fmt in found.values() if fmt is not None})
    if len(formats) > 1:
        raise InputError(
            f"{folder} holds files of several formats ({', '.join(formats)}); put each run into a "
            "folder of its own"
        )
    return (formats[0] if formats else Format.RANK_FILES), list(found)


def _beside(path: Path, read: Format, files: Collection[Path]) -> list[str]:
    """Say which rank traces of other formats lie next to a folder's rank `files`."""
    if not path.is_dir():
        return []
    others = _matching(path, _JSON_PATTERNS, {file.name for file in files})
    formats = {file.name: _sniff_stray(file) for file in others}
    return [
        f"{_NAMES[other]} in the same folder were not read ({listed(names, most=2)}): "
        "each run needs a folder of its own"
        for other in RANK_FORMATS
        if other is not read
        and (names := [name for name, found in formats.items() if found is other])
    ]


_NAMES = {
    Format.RANK_FILES: "rank files of MegaScan",
    Format.ORIGINAL: "rank files of the original MegaScan",
    Format.KINETO: "PyTorch profiles",
}


def _hint(folder: Path) -> str:
    """Name a subfolder that has the rank files, if there is one."""
    named = (path for pattern in RANK_FILE_PATTERNS for path in folder.glob(f"*/{pattern}"))
    inner = sorted({path.parent.name for path in named})
    return f" itself, but there are some in its subfolder {inner[0]}" if inner else ""


def _json_format(start: bytes) -> Format | None:
    if not _is_json(start):
        return None
    own = _OWN_SIGN.search(start)
    if own is not None:
        return Format.TIMELINE if own[1] else Format.RANK_FILES
    return next((found for found, sign in _JSON_SIGNS if sign.search(start)), None)


def _is_json(start: bytes) -> bool:
    return start.lstrip(b"\xef\xbb\xbf \r\n\t")[:1] in (b"[", b"{")


def _is_op_table(path: Path) -> bool:
    from pyarrow import parquet  # takes longer to import than other formats take to find

    try:
        names = parquet.read_schema(path).names
    except (pa.ArrowException, OSError):
        return False
    return {"optype", "start_ts", "duration", "rank", "step"} <= set(names)


def _is_perfetto(start: bytes) -> bool:
    """Return whether bytes begin a Perfetto Trace message: packets, each 0x0A and a length."""
    return len(start) > 2 and start[0] == 0x0A and not start.isascii()


def _description(start: bytes) -> str:
    if _is_json(start):
        chrome = b'"ph"' in start or b'"traceEvents"' in start
        return "a Chrome trace of another tool" if chrome else "JSON that is no trace"
    if start.startswith(b"PAR1"):
        return "a Parquet file without the columns of an op table"
    return "text" if _is_text(start) else "a binary file"


def _is_text(start: bytes) -> bool:
    """Return whether bytes begin a text in UTF-8; the last character may be cut."""
    try:
        return "\0" not in getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False


Loader: TypeAlias = Callable[[Format, Sequence[Path]], list[Segment]]
"""Function that reads the segments of all files of a format."""
SHARD_BYTES = 8 << 20
"""Bytes of rank files that one piece of work reads, short files together. Smaller traces are one
shard."""
_ORIGINAL_SHARDS = 2
"""So much larger are shards of the original's files, where a span takes twice the bytes: what a
shard costs whatever its size is then shared by as many spans."""
_SHARD_ROWS = 1 << 15


def _load_here(found: Format, files: Sequence[Path]) -> list[Segment]:
    return _importer(found)(files, Here())


@dataclass(frozen=True)
class _ShardLoader:
    """Reads files by shards that stay with the workers; `kept` collects the shards."""

    workers: Workers
    meanwhile: Callable[[], None]
    kept: list[Kept] = field(default_factory=list)

    def __call__(self, found: Format, files: Sequence[Path]) -> list[Segment]:
        segments: list[Segment] = []
        for kept, packed in self._shards(found, self.workers.files(files)):
            self.kept.append(kept)
            segments += packed.segments
        return segments

    def _shards(self, found: Format, files: Sequence[Path]) -> Iterator[tuple[Kept, Packed]]:
        size = SHARD_BYTES * (_ORIGINAL_SHARDS if found is Format.ORIGINAL else 1)
        shards = list(file_batches(files, size, size))
        if found is Format.ORIGINAL:
            from megascan.reader.original import keep_original  # loaded only if needed

            yield from keep_original(shards, self.workers, self.meanwhile)
            return
        if found is not Format.RANK_FILES:  # needs all files: workers read, we divide
            for number, part in enumerate(_by_rows(_importer(found)(files, self.workers))):
                spans, packed = settled_shard(part, number)
                yield self.workers.put(spans), packed
            return
        from megascan.reader.rank_files import keep_rank_files

        yield from keep_rank_files(shards, self.workers, self.meanwhile)


def _by_rows(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Yield the segments of one shard after the other, each of _SHARD_ROWS spans or a few more."""
    part: list[Segment] = []
    for segment in segments:
        part.append(segment)
        if sum(one.spans.num_rows for one in part) >= _SHARD_ROWS:
            yield part
            part = []
    if part:
        yield part


def _nothing() -> None:
    """Do nothing while the workers read."""


def read_ends(
    path: Path,
    workers: Workers,
    *,
    run: str | None = None,
    allow_missing_ranks: bool = False,
    meanwhile: Callable[[], None] = _nothing,
) -> tuple[Trace, list[Kept]]:
    """Read a trace as `read_trace` does, but return only the ends; all spans stay with workers.

    `Trace.stays` says in which shards the spans of each rank are. `meanwhile` is called in this
    process when the workers have begun to read rank files.
    """
    load = _ShardLoader(workers, meanwhile)
    trace = _read(path, run, load, allow_missing_ranks=allow_missing_ranks)
    return trace, load.kept


def read_trace(
    path: Path,
    *,
    run: str | None = None,
    allow_missing_ranks: bool = False,
) -> Trace:
    """Read a folder of rank files, or one rank's file, as its ranks recorded it.

    The format is found from the content. Of several runs the newest (by clock origin) is taken
    unless `run` names another; a run that was moved into a subfolder is found by its id. A single
    file may be given for its rank alone. `Trace.completeness` says what was left out.

    Raises InputError, in one sentence that says what to do, for paths that hold no trace, damage
    inside finished windows, runs without a finished window, contradicting headers, and missing
    ranks unless `allow_missing_ranks`.
    """
    return _read(path, run, _load_here, allow_missing_ranks=allow_missing_ranks)


def _read(path: Path, run: str | None, load: Loader, *, allow_missing_ranks: bool) -> Trace:
    if run is not None and (path / run).is_dir() and _matching(path / run, RANK_FILE_PATTERNS):
        return _read(path / run, run, load, allow_missing_ranks=allow_missing_ranks)
    found, files = sniff_folder(path) if path.is_dir() else (sniff(path), [path])
    _check_format(found, path)
    segments = load(found, files)
    if not segments:
        raise InputError(
            f"{path}: none of {len(files)} rank files has a complete header (training was killed "
            "before its first traced window ended); trace again"
        )
    return build_trace(
        path,
        segments,
        run,
        allow_missing_ranks=allow_missing_ranks or not path.is_dir(),
        beside=_beside(path, found, files),
    )


_IMPORTERS = {
    Format.RANK_FILES: ("megascan.reader.rank_files", "read_rank_files"),
    Format.ORIGINAL: ("megascan.reader.original", "read_original"),
    Format.KINETO: ("megascan.reader.kineto", "read_kineto"),
    Format.ORIGINAL_TIMELINE: ("megascan.reader.original_timeline", "read_original_timelines"),
}


def _importer(found: Format) -> Importer:
    """Load the reader of a format, without loading the readers of other formats.

    The reader of rank files uses threads of this process only; `_ShardLoader` does not use it.
    """
    module, name = _IMPORTERS[found]
    importer: Importer = getattr(importlib.import_module(module), name)
    return importer


def _check_format(found: Format, path: Path) -> None:
    if found not in _IMPORTERS:
        hint = (
            "; it is merged already: look at it with megascan view, or name the slow rank with "
            "megascan detect"
            if found in MERGED_FORMATS
            else ""
        )
        raise InputError(
            f"{path} holds {found.value.replace('_', ' ')}, expected the rank files of a run{hint}"
        )
