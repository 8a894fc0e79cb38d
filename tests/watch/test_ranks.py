"""Ranks that stay behind, die, come back; jobs that stand still."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest

from megascan.errors import InputError
from megascan.reader.flight_recorder import read_dump, read_standings, standing_of
from megascan.tracer.lookout import Standstill, standstill_path
from megascan.watch.hang import HangWatch


def test_a_window_waits_for_the_last_rank(healthy, grow, watched):
    feed = grow(healthy)
    watch = watched(feed.target)
    feed.step(3)
    watch.watcher.look()
    feed.step(1, ranks=range(7))
    assert watch.watcher.look() == 0
    feed.step(1, ranks=[7])
    assert watch.watcher.look() == 1
    assert watch.verdicts[-1]["missing_ranks"] == []


def test_a_rank_that_died_is_gone_on_without_and_taken_back(healthy, grow, watched):
    feed = grow(healthy)
    watch = watched(feed.target)
    feed.step(3)
    watch.watcher.look()
    for _ in range(4):
        feed.step(1, ranks=range(7))
        watch.watcher.look()
    assert watch.verdicts[-1]["missing_ranks"] == [7]
    assert watch.verdicts[-1]["iterations"][1] == 14
    assert watch.watcher.files.absent == {7}
    feed.step(5, ranks=[7])
    feed.step(1, ranks=range(7))
    watch.watcher.look()
    assert watch.verdicts[-1]["missing_ranks"] == []
    assert watch.verdicts[-1]["iterations"][1] == 16
    assert watch.names == []


def test_a_deleted_file_is_a_rank_that_writes_no_more(healthy, grow, watched):
    feed = grow(healthy)
    watch = watched(feed.target)
    feed.step(3)
    watch.watcher.look()
    feed.path(2).unlink()
    for _ in range(4):
        feed.step(1, ranks=[0, 1, 3, 4, 5, 6, 7])
        watch.watcher.look()
    assert watch.verdicts[-1]["missing_ranks"] == [2]
    assert watch.warnings == []


def test_a_job_that_stands_still_is_told_with_who_is_missing_and_that_it_moves_again(
    healthy, grow, watched, recorded
):
    feed = grow(healthy)
    watch = watched(feed.target, channels=[recorded], hang_after_s=1000.0)
    feed.step(4)
    watch.watcher.look()
    assert watch.names == []
    feed.step(1, ranks=[0, 1, 2, 3, 4, 6, 7])
    watch.watcher.look()
    watch.wait(1001)
    watch.watcher.look()
    watch.watcher.look()
    assert watch.names == ["hang"]
    (hang,) = watch.events
    assert hang["hang"]["missing_ranks"] == [5]
    assert "rank 5 did not finish the window up to iteration 10" in hang["text"]
    assert watch.watcher.exit_code == 4
    feed.step(1, ranks=[5])
    watch.watcher.look()
    assert watch.names == ["hang", "moves-again"]
    assert watch.watcher.exit_code == 0
    watch.watcher.close()
    assert [event["event"] for event in recorded.events] == ["hang", "moves-again"]
    assert recorded.events[0]["id"] == recorded.events[1]["id"]


def test_a_job_that_ended_does_not_hang(healthy, grow, watched):
    feed = grow(healthy)
    watch = watched(feed.target, hang_after_s=1000.0)
    feed.step(4)
    feed.close()
    watch.watcher.look()
    watch.wait(1001)
    watch.watcher.look()
    assert watch.watcher.files.is_closed
    assert watch.names == []


def test_patience_is_three_usual_gaps_and_ten_seconds_at_least(healthy, grow, watched):
    feed = grow(healthy)
    watch = watched(feed.target)
    feed.step(6)
    watch.watcher.look()
    windows = list(watch.watcher.ring.windows)
    hangs = HangWatch()
    hangs.take(windows[:2])
    assert hangs.patience_s() is None
    hangs.take(windows[2:])
    gap = (windows[-1].end_unix_ns - windows[-2].end_unix_ns) / 1e9
    assert hangs.usual_gap_s == pytest.approx(gap, rel=0.1)
    assert hangs.patience_s() == 10.0
    hangs._ends_ns = [end * 60 for end in hangs._ends_ns]
    assert hangs.patience_s() == pytest.approx(180 * hangs.usual_gap_s / 60)


def entry(state: str = "scheduled", retired: bool = False, **values: object) -> dict[str, object]:
    return {
        "process_group": ("3", "TENSOR_MODEL_PARALLEL_GROUP"), "collective_seq_id": 57,
        "p2p_seq_id": 0, "profiling_name": "nccl:all_reduce", "state": state, "retired": retired,
        "time_created_ns": 10**18, "is_p2p": False, **values,
    }  # fmt: skip


def test_where_a_rank_stands_is_its_oldest_entry_that_has_not_ended():
    done, begun, later = entry("completed"), entry("started"), entry(collective_seq_id=58)
    standing = standing_of(3, {"entries": [done, begun, later]})
    assert standing.words == ("in nccl:all_reduce 57 of group TENSOR_MODEL_PARALLEL_GROUP")
    assert standing_of(4, {"entries": [done, entry(retired=True)]}).words.startswith(
        "in none, the last was nccl:all_reduce 57"
    )
    assert standing_of(5, {"entries": []}).words == "no collective recorded"


def test_a_dump_may_be_a_pickle_or_json_and_never_runs_code(tmp_path):
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps({"entries": [entry()]}))
    (tmp_path / "nccl_trace_rank_1.json").write_text(json.dumps({"entries": [entry()]}))
    evil = tmp_path / "nccl_trace_rank_2"
    evil.write_bytes(pickle.dumps(_Evil(str(tmp_path / "ran"))))
    (tmp_path / "nccl_trace_rank_3").write_bytes(b"\x80\x04 damaged")
    (tmp_path / "nccl_trace_rank_4").write_bytes(pickle.dumps({"entries": [{"state": 1}]}))
    assert [one.rank for one in read_standings([tmp_path])] == [0, 1]
    with pytest.raises(InputError, match="no flight-recorder dump"):
        read_dump(evil)
    assert not (tmp_path / "ran").exists()


class _Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (self.path, "w")


def test_dumps_beside_the_files_tell_in_what_the_others_stand(healthy, grow, watched):
    feed = grow(healthy)
    watch = watched(feed.target, hang_after_s=1000.0)
    feed.step(4)
    watch.watcher.look()
    for rank in range(8):
        entries = [entry("completed")] if rank == 5 else [entry("started", collective_seq_id=58)]
        dump = pickle.dumps({"version": "2.10", "entries": entries})
        (feed.target / f"nccl_trace_rank_{rank}").write_bytes(dump)
    watch.wait(1001)
    watch.watcher.look()
    text = watch.events[-1]["text"]
    assert "all ranks finished iteration 8 and none the next window" in text
    assert "ranks 0, 1, 2, 3, 4, 6 and 7: in nccl:all_reduce 58" in text
    assert "rank 5: in none, the last was nccl:all_reduce 57" in text


def write_standstill(feed, watch, rank, **changes):
    found = Standstill(
        run_id=watch.watcher.files.run_id, rank=rank, host="n01", process_id=1, iteration=9,
        since_unix_s=0.0, patience_s=5.0, operation="all_reduce", group="dp@0",
    )  # fmt: skip
    standstill_path(feed.target, rank).write_bytes(replace(found, **changes).encode())


def test_lookouts_tell_in_what_the_others_stand_and_who_says_nothing(healthy, grow, watched):
    feed = grow(healthy)
    watch = watched(feed.target, hang_after_s=1000.0)
    feed.step(4)
    watch.watcher.look()
    write_standstill(feed, watch, 7)
    os.utime(standstill_path(feed.target, 7), (1, 1))  # of an earlier hang
    write_standstill(feed, watch, 6, run_id="another")
    watch.wait(1001)
    watch.watcher.look()
    assert "all_reduce" not in watch.events[-1]["text"]
    for rank in (0, 1, 2, 3, 6):
        write_standstill(feed, watch, rank)
    watch.watcher.look()
    text = watch.events[-1]["text"]
    assert "ranks 0, 1, 2, 3 and 6: in all_reduce of group dp@0, iteration 9" in text
    assert "not a word" not in text  # the others may write theirs a moment later
    write_standstill(feed, watch, 4, operation="", frames=("get (queue.py:171)",))
    watch.watcher.look()
    assert watch.names == ["hang", "hang"]
    watch.wait(6)
    watch.watcher.look()
    watch.watcher.look()
    assert watch.names == ["hang"] * 3
    assert len({event["id"] for event in watch.events}) == 1
    text, hang = watch.events[-1]["text"], watch.events[-1]["hang"]
    assert hang["silent_ranks"] == [5, 7]
    assert "ranks 5 and 7: not a word" in text
    assert "rank 4: in get (queue.py:171), iteration 9" in text
    assert [one["rank"] for one in hang["standstills"]] == [0, 1, 2, 3, 4, 6]
    feed.step(1)
    watch.watcher.look()
    assert watch.names[-1] == "moves-again"


def test_pytorchs_own_dump_is_understood(tmp_path):
    """torch writes it: one rank on gloo, in a process of its own."""
    program = f"""
import pickle, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
dump = b""
while not dump or not pickle.loads(dump)["entries"][0]["retired"]:  # by its thread, soon
    dump = torch._C._distributed_c10d._dump_fr_trace()
with open({str(tmp_path / "nccl_trace_rank_0")!r}, "wb") as file:
    file.write(dump)
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={"TORCH_FR_BUFFER_SIZE": "100"})
    (standing,) = read_standings([tmp_path])
    assert (standing.operation, standing.sequence) == ("gloo:all_reduce", 1)
    assert standing.group == "default_pg"
    assert not standing.is_inside
