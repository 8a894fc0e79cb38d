"""From the segments of many files to one Trace: which run, which ranks, what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from megascan.errors import InputError
from megascan.reader.comparable import comparable
from megascan.reader.segments import Segment
from megascan.reader.spans import in_order
from megascan.timeline import Completeness, Trace

_MOST_LISTED = 8


def build_trace(
    path: Path, segments: Sequence[Segment], run: str | None, *, allow_missing_ranks: bool
) -> Trace:
    """One run out of everything that was read from `path`.

    Raises InputError for an unknown `run`, ranks that contradict each other, missing ranks unless
    allowed, and a run without a finished window.
    """
    chosen = _choose_run(path, segments, run)
    by_rank = _one_a_rank(segment for segment in segments if segment.header.run_id == chosen)
    _check_agreement(by_rank)
    others = sorted({segment.header.run_id for segment in segments} - {chosen})
    missing = _missing_ranks(by_rank)
    if missing and not allow_missing_ranks:
        raise InputError(_missing_message(path, by_rank, missing, chosen, others))
    if not any(segment.windows for segment in by_rank.values()):
        raise InputError(
            f"{path}: run {chosen} has no finished window (training ended or was killed inside its "
            "first traced window); train past the end of a window and trace again"
        )
    cut = comparable(by_rank)
    notes = [*_notes(path, by_rank, missing, chosen, others), *cut.notes]
    return _trace(cut.by_rank, notes)


def listed(values: Sequence[int | str]) -> str:
    """Words for a list: "3", "3 and 11", "1, 2, 5 and 40 more"."""
    words = [str(value) for value in values]
    if len(words) > _MOST_LISTED:
        words = [*words[:_MOST_LISTED], f"{len(words) - _MOST_LISTED} more"]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _choose_run(path: Path, segments: Sequence[Segment], run: str | None) -> str:
    """The run asked for, or the one whose clock origin is the latest."""
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
    """Segments by rank, in the order of ranks; a rank that stands in two files is an error."""
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
    """All headers of a run tell the same world, and their ranks lie in it."""
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


def _missing_ranks(by_rank: Mapping[int, Segment]) -> list[int]:
    world_size = next(iter(by_rank.values())).header.world_size
    return sorted(set(range(world_size)) - set(by_rank))


def _missing_message(
    path: Path,
    by_rank: Mapping[int, Segment],
    missing: Sequence[int],
    run: str,
    others: Sequence[str],
) -> str:
    world_size = len(by_rank) + len(missing)
    text = (
        f"expected {world_size} rank files for world size {world_size}, found {len(by_rank)} "
        f"{f'of run {run} ' if others else ''}in {path}: {_are_missing(missing)}; "
    )
    if others:
        text += f"several runs are mixed, choose another with --run ({listed(others)}) or "
    return text + "pass --allow-missing-ranks to go on without them"


def _are_missing(ranks: Sequence[int]) -> str:
    verb = "are" if len(ranks) > 1 else "is"
    return f"{_ranks(ranks)} {verb} missing"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"


def _notes(
    path: Path,
    by_rank: Mapping[int, Segment],
    missing: Sequence[int],
    run: str,
    others: Sequence[str],
) -> list[str]:
    notes = []
    if others:
        notes.append(f"run {run} was read; {path} also holds {listed(others)} (--run chooses)")
    if missing:
        notes.append(_are_missing(missing))
    notes += _short_ranks(by_rank)
    return notes + [note for segment in by_rank.values() for note in segment.notes]


def _short_ranks(by_rank: Mapping[int, Segment]) -> list[str]:
    """Ranks whose last windows are missing, grouped by where they stop."""
    last = {
        rank: max((window.last_iteration for window in segment.windows), default=0)
        for rank, segment in by_rank.items()
    }
    end = max(last.values())
    stops: dict[int, list[int]] = {}
    for rank, iteration in last.items():
        if iteration < end:
            stops.setdefault(iteration, []).append(rank)
    return [_stop(ranks, iteration, end) for iteration, ranks in sorted(stops.items())]


def _stop(ranks: Sequence[int], iteration: int, end: int) -> str:
    many = len(ranks) > 1
    if not iteration:
        return f"{_ranks(ranks)} {'have' if many else 'has'} no finished window"
    return (
        f"{_ranks(ranks)} end{'' if many else 's'} with iteration {iteration}, "
        f"the others with {end}"
    )


def _trace(by_rank: Mapping[int, Segment], notes: Sequence[str]) -> Trace:
    header = next(iter(by_rank.values())).header
    ranks = tuple(by_rank)
    spans = pa.concat_tables([in_order(segment.spans) for segment in by_rank.values()])
    return Trace(
        run_id=header.run_id,
        layout=header.layout,
        headers={rank: segment.header for rank, segment in by_rank.items()},
        spans=spans.unify_dictionaries(),
        windows={rank: segment.windows for rank, segment in by_rank.items()},
        completeness=Completeness(
            world_size=header.world_size,
            ranks=ranks,
            missing_ranks=tuple(sorted(set(range(header.world_size)) - set(ranks))),
            num_spans=spans.num_rows,
            num_unfinished_spans=sum(item.num_unfinished_spans for item in by_rank.values()),
            notes=tuple(notes),
        ),
    )
