"""Short rank files are read together, with the result of reading them one by one."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from megascan.errors import InputError
from megascan.parallel import Here
from megascan.reader.rank_files import read_rank_file, read_rank_files, read_short_files
from megascan.reader.segments import Segment, event_schema
from megascan.reader.templates import Templates
from megascan.schema import SPAN_COLUMNS
from megascan.simulate import CostModel, JobModel, simulate_trace, write_rank_files
from megascan.timeline import numbers
from megascan.topology import Layout

if TYPE_CHECKING:
    from conftest import Folder

pytestmark = pytest.mark.usefixtures("each_way")

NUM_RANKS = 8


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    job = JobModel(
        layout=Layout(tp=2, pp=2, dp=2),
        costs=CostModel(),
        iterations=4,
        num_microbatches=2,
        num_layers=2,
        interval=2,
        window=2,
    )
    trace = simulate_trace(job)
    return sorted(write_rank_files(trace, tmp_path / "trace"))


def together(paths: list[Path]) -> list[Segment] | None:
    return read_short_files(paths, Templates(event_schema(SPAN_COLUMNS)))


def one_by_one(paths: list[Path]) -> list[Segment]:
    return [segment for path in paths for segment in read_rank_file(path)]


def plain(segments: list[Segment]) -> list[tuple[object, ...]]:
    return [
        (
            segment.path,
            segment.header,
            segment.windows,
            segment.spans.to_pylist(),
            segment.num_unfinished_spans,
            segment.notes,
        )
        for segment in segments
    ]


def rewrite(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    path.write_text("\n".join(change(path.read_text().split("\n"))))


def last_line(lines: list[str], beginning: str) -> int:
    return max(place for place, line in enumerate(lines) if line.startswith(beginning))


def test_the_same_as_one_by_one(paths: list[Path]) -> None:
    found = together(paths)
    assert found is not None
    assert len(found) == NUM_RANKS
    assert plain(found) == plain(one_by_one(paths))
    assert plain(read_rank_files(paths)) == plain(found)
    assert plain(read_rank_files(paths, Here(1))) == plain(found)


def test_unfinished_windows_are_left_out_with_the_same_words(paths: list[Path]) -> None:
    """Spans stand behind the last mark of one file, and the next file begins."""

    def without_last_mark(lines: list[str]) -> list[str]:
        place = last_line(lines, '{"name":"megascan_window"')
        return [line for at, line in enumerate(lines) if at != place]

    rewrite(paths[2], without_last_mark)
    found = together(paths)
    assert found is not None
    assert plain(found) == plain(one_by_one(paths))
    assert found[2].num_unfinished_spans > 0
    assert "left out" in found[2].notes[0]


def test_a_resumed_run_in_one_of_the_files(paths: list[Path]) -> None:
    lines = paths[1].read_text().rstrip("\n").removesuffix("\n]")
    run_id = one_by_one(paths[:1])[0].header.run_id
    again = lines.removeprefix("[\n").replace(run_id, "resumed")
    paths[1].write_text(f"{lines},\n{again}\n]\n")
    found = together(paths)
    assert found is not None
    assert len(found) == NUM_RANKS + 1
    assert plain(found) == plain(one_by_one(paths))


def test_compressed_files_and_files_without_an_end(paths: list[Path]) -> None:
    paths[0].write_bytes(gzip.compress(paths[0].read_bytes()))
    paths[3].write_text(paths[3].read_text().removesuffix("\n]\n"))
    found = together(paths)
    assert found is not None
    assert plain(found) == plain(one_by_one(paths))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def tear(path: Path) -> None:
    path.write_bytes(gzip.compress(path.read_bytes())[:-20])


def other_rank(path: Path) -> None:
    """The first span says it is another rank's."""

    def change(lines: list[str]) -> list[str]:
        place = next(at for at, line in enumerate(lines) if '"ph":"X"' in line)
        lines[place] = re.sub('"pid":[0-9]+', '"pid":99', lines[place])
        return lines

    rewrite(path, change)


def spans_before_the_header(path: Path) -> None:
    def change(lines: list[str]) -> list[str]:
        place = next(at for at, line in enumerate(lines) if '"ph":"X"' in line)
        return [lines[0], lines[place], *lines[1:]]

    rewrite(path, change)


@pytest.mark.parametrize("damage", [cut, empty, tear, other_rank, spans_before_the_header])
def test_damage_is_left_to_reading_one_by_one(
    damage: Callable[[Path], None], paths: list[Path]
) -> None:
    damage(paths[4])
    assert together(paths) is None
    try:
        expected = plain(one_by_one(paths))
    except InputError as error:
        with pytest.raises(InputError) as raised:
            read_rank_files(paths)
        assert str(raised.value) == str(error)
    else:
        assert plain(read_rank_files(paths)) == expected


def test_a_damaged_mark_is_named_with_its_file_and_line(paths: list[Path]) -> None:
    lines = paths[5].read_text().split("\n")
    place = last_line(lines, '{"name":"megascan_window"')
    lines[place] = lines[place].replace('"num_spans":', '"num_spans":"x","other":')
    paths[5].write_text("\n".join(lines))
    with pytest.raises(InputError, match=rf"{paths[5].name}, line {place + 1}: damaged window"):
        read_rank_files(paths)
    with pytest.raises(InputError, match=rf"{paths[5].name}, line {place + 1}: damaged window"):
        read_rank_file(paths[5])


def test_saves_between_windows_belong_to_no_iteration(folder: Folder) -> None:
    paths = [folder.write_rank(rank, saves=[2, 4, 5, 7]) for rank in range(4)]
    found = together(paths)
    assert found is not None
    assert plain(found) == plain(one_by_one(paths))
    for segment in found:
        assert sorted(set(numbers(segment.spans, "iteration").tolist())) == [-1, 1, 2, 6, 7]
