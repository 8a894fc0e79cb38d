"""A watch over growing files: what it finds, when, and that it says what `megascan detect` says."""

from __future__ import annotations

import json
import shutil

import pytest

from aggregate import build_timeline
from detect import DetectorSettings, detect
from megascan.probes import (
    Point,
    Prober,
    header_line,
    probe_file_name,
    probe_line,
    read_probes,
)
from megascan.reader import read_trace
from megascan.topology import Layout


def test_a_fault_is_raised_within_four_iterations_and_cleared_when_it_is_gone(
    faulty, grow, watched
):
    feed = grow(faulty)
    watch = watched(feed.target)
    raised = cleared = None
    for window in range(feed.num_windows):
        feed.step()
        watch.watcher.look()
        if raised is None and watch.names:
            raised = 2 * (window + 1)
        if cleared is None and "cleared" in watch.names:
            cleared = 2 * (window + 1)
    assert watch.names == ["raised", "cleared"]
    assert 15 < raised <= 18
    assert 24 < cleared <= 34
    first, last = (event["finding"] for event in watch.events)
    assert (first["ranks"], first["cause"], first["owner"]) == ((5,), "compute", "node")
    assert first["id"] == last["id"]
    assert first["slowdown"] == pytest.approx(1.3, abs=0.03)
    assert first["hosts"] == ("n02",)
    assert first["devices"] == ("SIM-000005",)
    assert 14 <= first["since_iteration"] <= 16


def test_nobody_is_accused_while_all_is_well(healthy, grow, watched):
    feed = grow(healthy)
    watch = watched(feed.target)
    for _ in range(feed.num_windows):
        feed.step()
        watch.watcher.look()
    assert len(watch.verdicts) == feed.num_windows
    assert watch.names == []


@pytest.mark.power
def test_verdicts_are_those_of_detect_on_the_same_windows_digit_by_digit(faulty, grow, watched):
    feed = grow(faulty)
    watch = watched(feed.target, kept_iterations=100)
    for count in (2, 8, 5):
        feed.step(count)
        watch.watcher.look()
        report = detect(build_timeline(read_trace(feed.target)), DetectorSettings())
        assert watch.watcher.judgement.report.to_json() == report.to_json()
    assert report.findings


def test_the_sliding_ring_says_what_detect_says_of_a_folder_with_its_windows_only(
    faulty, grow, watched
):
    feed, kept = grow(faulty), 10
    watch = watched(feed.target, kept_iterations=kept)
    for number, count in ((8, 8), (12, 4)):
        feed.step(count)
        watch.watcher.look()
        first = number - kept // 2
        folder = feed.target.parent / f"ring-{number}"
        folder.mkdir()
        for name in feed.names:
            appends = feed.appends[name]
            header = b"\n".join(appends[0].split(b"\n")[:2]).rstrip(b",")
            (folder / name).write_bytes(header + b"".join(appends[first:number]))
        report = detect(build_timeline(read_trace(folder)), DetectorSettings())
        assert watch.watcher.judgement.report.to_json() == report.to_json()
        assert report.findings


def test_cost_so_far_is_the_time_wasted_on_all_devices(faulty, grow, watched):
    feed = grow(faulty)
    watch = watched(feed.target)
    costs = []
    for count in (8, 1, 1, 1, 1, 1):  # verdicts up to iterations 16, 18, … 26
        feed.step(count)
        watch.watcher.look()
        costs += [
            one.cost_gpu_hours
            for one in watch.watcher.state.accounts.holding
            if one.owner == "node"
        ]
    windows = [w for w in watch.watcher.ring.windows if 15 <= w.first_iteration <= 24]
    slow_s = (windows[-1].end_unix_ns - windows[0].start_unix_ns) / 1e9
    healthy = watch.watcher.ring.windows[0]
    usual_s = (healthy.end_unix_ns - healthy.start_unix_ns) / 1e9 * len(windows)
    assert costs == sorted(costs)
    assert costs[-1] == costs[-2]  # nothing is wasted after iteration 24
    assert costs[-1] == pytest.approx(8 * (slow_s - usual_s) / 3600, rel=0.15)


def test_a_long_history_is_not_read(faulty, grow, watched):
    feed = grow(faulty)
    feed.step(20)
    watch = watched(feed.target, kept_iterations=8)
    watch.watcher.look()
    assert watch.watcher.gauges.num_windows == 8
    assert len(watch.verdicts) == 1
    assert watch.verdicts[0]["iterations"] == [33, 40]


def test_ranks_that_are_read_in_several_steps_are_judged_up_to_the_newest_window(
    faulty, grow, watched, monkeypatch
):
    """Rank files of different lengths: the last window is whole before the last step."""
    monkeypatch.setattr("megascan.reader.growing._STEP_BYTES", 1 << 12)
    feed = grow(faulty)
    feed.step(12)
    feed.step(1, ranks=range(4))
    watch = watched(feed.target)
    watch.watcher.look()
    assert watch.verdicts[-1]["iterations"][1] == 24
    assert watch.names == ["raised"]


def test_windows_that_contradict_cost_a_verdict_and_not_the_watch(healthy, grow, watched):
    feed = grow(healthy)
    watch = watched(feed.target)
    feed.step(4)
    text = feed.path(3).read_bytes().replace(b'"world_size":8', b'"world_size":9', 1)
    feed.path(3).write_bytes(text)
    for _ in range(3):
        watch.watcher.look()
    assert len(watch.warnings) == 1
    assert "no verdict on the windows up to iteration 8" in watch.warnings[0]
    assert watch.verdicts == []


def test_several_folders_are_one_job(faulty, grow, watched, tmp_path):
    feed = grow(faulty)
    other = tmp_path / "other host"
    other.mkdir()
    watch = watched(feed.target, other)
    feed.step(10)
    for rank in (4, 5, 6, 7):
        shutil.move(feed.path(rank), other)
    watch.watcher.look()
    assert watch.names == ["raised"]
    assert watch.watcher.files.world_size == 8


def test_probes_of_another_host_count_and_are_read_when_they_have_changed(
    healthy, grow, watched, tmp_path, monkeypatch
):
    """DP replicas 0 to 3 of stage 0; rank 3, whose probes lie on another host, computes wrongly."""
    feed, other, reads = grow(healthy), tmp_path / "other host", []
    other.mkdir()
    layout = Layout(pp=2, dp=4)
    for rank in range(4):
        prober = Prober(rank=rank, layout=layout, host="h", device="", points=(Point(1, "fc1"),))
        text = header_line(prober) + probe_line(7, ["wrong" if rank == 3 else "right"])
        folder = other if rank > 1 else feed.target
        (folder / probe_file_name(rank)).write_text(text)
    monkeypatch.setattr(
        "megascan.probes.read_probes", lambda *folders: reads.append(1) or read_probes(*folders)
    )
    watch = watched(feed.target, other)
    for _ in range(2):
        feed.step(4)
        watch.watcher.look()
    assert [one["finding"]["ranks"] for one in watch.events] == [(3,)]
    assert watch.events[0]["finding"]["cause"] == "corruption"
    assert len(reads) == 1


def test_the_newest_run_of_a_folder_counts(faulty, healthy, grow, watched):
    feed = grow(faulty)
    feed.step(10)
    watch = watched(feed.target)
    watch.watcher.look()
    before = watch.watcher.state.run_id
    for rank in range(8):  # as a fresh run does: the old file goes into a subfolder
        path = feed.path(rank)
        folder = feed.target / "old"
        folder.mkdir(exist_ok=True)
        path.rename(folder / path.name)
        text = faulty.joinpath(path.name).read_bytes()
        path.write_bytes(_later(text, "run-after", 10**12))
    watch.watcher.look()
    assert watch.watcher.state.run_id == "run-after"
    assert watch.watcher.state.run_id != before
    assert watch.watcher.judgement.report.iterations == (21, 40)


def _later(text: bytes, run_id: str, by_ns: int) -> bytes:
    """The same rank file as of a run that began later."""
    lines = text.decode().splitlines()
    for place, line in enumerate(lines):
        if '"name":"megascan"' in line or '"name":"megascan_window"' in line:
            record = json.loads(line.rstrip(","))
            record["args"]["run_id"] = run_id
            if "clock" in record["args"]:
                record["args"]["clock"]["origin_unix_ns"] += by_ns
            lines[place] = json.dumps(record, separators=(",", ":")) + "," * line.endswith(",")
    return "\n".join(lines).encode()


def test_the_exit_code_says_whether_a_node_is_to_blame(faulty, healthy, grow, watched):
    feed = grow(faulty)
    watch = watched(feed.target)
    feed.step(6)
    watch.watcher.look()
    assert watch.watcher.exit_code == 0
    feed.step(5)
    watch.watcher.look()
    assert watch.watcher.exit_code == 3
