"""A large rank file is read in stretches of its windows, with what it holds as a whole."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import orjson
import pyarrow as pa
import pytest

from aggregate import align, build_shards, build_timeline, summary_of
from aggregate.merge import groups_of
from aggregate.summary import sums_of
from detect import detect
from megascan.errors import InputError
from megascan.export import write_timeline
from megascan.parallel import Here
from megascan.reader import read_ends, read_timeline, read_trace
from megascan.simulate import JobModel, compute_bound, simulate_trace, write_rank_files
from megascan.timeline import Extent, ShardedTimeline, Stay, numbers, with_column
from megascan.topology import Layout

LAYOUT = Layout(tp=2, pp=2, dp=1)
NUM_WINDOWS = 8


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank files of four ranks, a window an iteration."""
    model = JobModel(
        layout=LAYOUT,
        costs=compute_bound(LAYOUT),
        iterations=NUM_WINDOWS,
        interval=1,
        window=1,
        num_microbatches=2,
        num_layers=4,
    )
    folder = tmp_path_factory.mktemp("recorded") / "trace"
    write_rank_files(simulate_trace(model, seed=3), folder)
    return folder


@pytest.fixture
def folder(recorded: Path, tmp_path: Path) -> Path:
    """The same files, to be changed."""
    copy = tmp_path / "trace"
    copy.mkdir()
    for path in recorded.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set what a stretch holds, at least, and have each file read by itself."""

    def set_bytes(num_bytes: int) -> None:
        monkeypatch.setattr("megascan.reader.trace.SHARD_BYTES", 1)
        monkeypatch.setattr("megascan.reader.rank_files.STRETCH_BYTES", num_bytes)

    return set_bytes


def shards_of(folder: Path) -> tuple[ShardedTimeline, dict[str, object]]:
    """The timeline of a folder, and its summary as a record."""
    workers = Here(1)
    trace, kept = read_ends(folder, workers)
    sharded, sums = build_shards(align(trace), kept, workers, summed=True)
    num_matches = int(numbers(sharded.ends, "match").max()) + 1
    return sharded, summary_of(sharded.frame, sums, num_matches).to_json()


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


def test_stretches_hold_what_the_file_holds(recorded: Path, cut, tmp_path: Path) -> None:
    size = min(path.stat().st_size for path in files_of(recorded))
    found = []
    for num_bytes in (10 * size, size // 3, size // (3 * NUM_WINDOWS)):
        cut(num_bytes)
        sharded, summary = shards_of(recorded)
        output = tmp_path / f"{num_bytes}.pftrace"
        write_timeline(sharded, output)
        written = read_timeline(output)
        found.append((len(sharded.shards), sharded, summary, written))
    whole, *others = found
    assert whole[0] == 4
    assert others[0][0] == 3 * 4 and others[1][0] == NUM_WINDOWS * 4  # cuts without a window: none
    for _, sharded, summary, written in others:
        assert sharded.whole().spans.to_pylist() == whole[1].whole().spans.to_pylist()
        assert sharded.ends.to_pylist() == whole[1].ends.to_pylist()
        assert sharded.frame == replace(whole[1].frame, spans=sharded.frame.spans)
        assert summary == whole[2]
        assert written.spans.to_pylist() == whole[3].spans.to_pylist()


def test_verdicts_see_whole_ranks(recorded: Path, cut, without_power) -> None:
    reports = []
    for num_bytes in (1 << 30, 1 << 14):
        cut(num_bytes)
        sharded, _ = shards_of(recorded)
        reports.append(detect(sharded).to_json())
    assert reports[0] == reports[1]


def test_a_second_run_makes_the_file_be_read_as_a_whole(folder: Path, cut) -> None:
    first, *others = files_of(folder)
    run = "another-" + read_trace(first).run_id
    earlier = first.read_bytes().removesuffix(b"\n]\n")
    resumed = earlier.removeprefix(b"[\n").replace(b'"run_id":"', b'"run_id":"another-')
    first.write_bytes(earlier + b",\n" + resumed + b"\n]\n")
    for path in others:
        path.write_bytes(path.read_bytes().replace(b'"run_id":"', b'"run_id":"another-'))
    found = []
    for num_bytes in (1 << 30, 1 << 14):
        cut(num_bytes)
        trace, _ = read_ends(folder, Here(1), run=run)
        found.append((trace.completeness, trace.windows, trace.spans.to_pylist()))
    assert found[0] == found[1]
    assert [len(trace.stays[rank]) > 1 for rank in sorted(trace.stays)] == [False, True, True, True]


@pytest.mark.parametrize("line", [5, 200])
def test_damage_is_named_by_its_line_in_the_file(folder: Path, cut, line: int) -> None:
    path = files_of(folder)[1]
    lines = path.read_bytes().split(b"\n")
    lines[line - 1] = lines[line - 1][:30]
    path.write_bytes(b"\n".join(lines))
    cut(1 << 14)
    with pytest.raises(InputError, match=f"{path}: line {line} is not a JSON event; the file is"):
        read_ends(folder, Here(1))


def test_what_a_killed_process_left_behind_is_left_out(folder: Path, cut) -> None:
    path = files_of(folder)[2]
    text = path.read_bytes()
    path.write_bytes(text[: text.rindex(b'\n{"name":"megascan_window"') - 10])
    found = []
    for num_bytes in (1 << 30, 1 << 14):
        cut(num_bytes)
        trace, _ = read_ends(folder, Here(1))
        found.append((trace.completeness, trace.windows[2], trace.spans.to_pylist()))
    assert found[0] == found[1]
    assert found[0][0].num_unfinished_spans > 0
    assert any("and 1 torn or damaged lines behind" in note for note in found[0][0].notes)


def test_compressed_files_are_not_cut(folder: Path, cut) -> None:
    path = files_of(folder)[0]
    (folder / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    cut(1 << 10)
    trace, _ = read_ends(folder, Here(1))
    assert len(trace.stays[0]) == 1 and len(trace.stays[1]) == NUM_WINDOWS


def stay(shard: int, begin_ns: int, end_ns: int, iterations: tuple[int, int]) -> Stay:
    """A stretch of ten spans, the last of which ends last."""
    extent = Extent(
        num_ends=3,
        start_ns=begin_ns,
        last_start_ns=end_ns - 5,
        last=(end_ns - 5, 5),
        device=(begin_ns, 2),
        first_iteration=iterations[0],
        last_iteration=iterations[1],
    )
    return Stay(shard, 0, 10, extent=extent)


def test_ranks_are_divided_where_nothing_reaches_across() -> None:
    stays = [
        stay(0, 100, 200, (1, 2)),
        stay(1, 200, 300, (3, 4)),  # begins when the first has ended
        stay(2, 299, 400, (5, 6)),  # begins too early
        stay(3, 410, 500, (6, 7)),  # has a part of iteration 6
        stay(4, 510, 600, (8, 8)),
        stay(5, 700, 800, (9, 9)),
    ]

    def later(spans: pa.Table) -> pa.Table:
        return with_column(spans, "start_ns", numbers(spans, "start_ns") + 1000)

    groups = groups_of(7, stays, later)
    assert [[one.shard for one in group.stays] for group in groups] == [[0], [1, 2, 3], [4], [5]]
    assert [group.num_ends for group in groups] == [3, 9, 3, 3]
    assert [group.busy_until_ns for group in groups] == [None, 1102, 1412, 1512]


def test_two_that_fall_together_are_not_divided() -> None:
    """Spans that begin at one time are ordered by their lengths."""
    first = stay(0, 100, 200, (1, 2))
    instant = replace(first.extent, last_start_ns=200, last=(200, 0))
    stays = [replace(first, extent=instant), stay(1, 200, 300, (3, 4))]
    assert len(groups_of(0, stays, lambda spans: spans)) == 1


def test_spans_that_reach_over_a_border_are_settled_together(folder: Path, cut) -> None:
    """A checkpoint's copy that is under way in two iterations, its own rank's only."""
    path = files_of(folder)[1]
    lines = path.read_bytes().split(b"\n")
    place, line = next(
        (place, line) for place, line in enumerate(lines) if b'"cat":"compute"' in line
    )
    record = orjson.loads(line.rstrip(b","))
    windows = [number for number, each in enumerate(lines) if b'"megascan_window"' in each]
    later = orjson.loads(lines[windows[1] + 1].rstrip(b","))
    record["dur"] = later["ts"] - record["ts"] + 1.5
    lines[place] = orjson.dumps(record) + b","
    path.write_bytes(b"\n".join(lines))
    found = []
    for num_bytes in (1 << 30, 1 << 14):
        cut(num_bytes)
        sharded, summary = shards_of(folder)
        found.append((sharded.whole().spans.to_pylist(), sharded.ends.to_pylist(), summary))
    assert found[0] == found[1]
    num_shards = Counter(rank for shard in sharded.shards for rank in shard.ranks)
    stays = read_ends(folder, Here(1))[0].stays
    assert [len(stays[rank]) - num_shards[rank] for rank in range(4)] == [0, 1, 0, 0]


def test_a_gap_before_a_stretch_is_the_hosts_too(build) -> None:
    rows = [
        build.span(0, "compute", "forward", 0, 20, launch_ns=-30),
        build.span(0, "iteration", "iteration", 40, 100, iteration=2),
        build.span(0, "compute", "forward", 50, 60, launch_ns=-5, iteration=2),
    ]
    spans = build_timeline(build.trace(rows, domains=["host"] * 2, device="cuda")).spans
    whole, stretch = (
        sums_of(spans, []),
        sums_of(spans[1:], [], int(spans["start_ns"][0].as_py()) + 20),
    )
    assert stretch.iterations.to_pylist() == whole.iterations.to_pylist()[1:]
    assert stretch.iterations["dispatch_ns"].to_pylist() == [10]
    assert sums_of(spans[1:], []).iterations["dispatch_ns"].to_pylist() == [0]
