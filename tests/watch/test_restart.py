"""What survives: a restart, a kill, a disk that is full, channels that fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megascan.errors import ConfigError, InputError
from megascan.watch import watcher as state_module
from megascan.watch.watcher import StateFile

ROOT = Path(__file__).parents[2]


def test_a_restarted_watch_goes_on_with_the_same_findings(faulty, grow, watched, tmp_path):
    feed, state = grow(faulty), tmp_path / "state.json"
    first = watched(feed.target, state=state)
    feed.step(10)
    first.watcher.look()
    (before,) = [one for one in first.watcher.state.accounts.holding if one.owner == "node"]
    first.watcher.close()
    second = watched(feed.target, state=state)
    second.watcher.look()
    assert second.names == []  # it was told before
    assert second.watcher.exit_code == 3
    feed.step(1)
    second.watcher.look()
    (after,) = [one for one in second.watcher.state.accounts.holding if one.owner == "node"]
    assert (after.id, after.since_unix_s) == (before.id, before.since_unix_s)
    assert after.cost_gpu_hours > before.cost_gpu_hours
    second.watcher.close()


def test_what_came_and_went_while_no_watch_ran_is_told(faulty, grow, watched, tmp_path):
    feed, state = grow(faulty), tmp_path / "state.json"
    first = watched(feed.target, state=state)
    feed.step(6)
    first.watcher.look()
    first.watcher.close()
    feed.step(14)
    second = watched(feed.target, state=state, kept_iterations=8)
    second.watcher.look()
    assert second.names[0] == "raised"
    assert second.events[0]["finding"]["ranks"] == (5,)


def test_the_ring_after_a_restart_is_the_ring_before(faulty, grow, watched, tmp_path):
    feed, state = grow(faulty), tmp_path / "state.json"
    whole = watched(feed.target, kept_iterations=10)
    first = watched(feed.target, state=state, kept_iterations=10)
    feed.step(9)
    for watch in (whole, first):
        watch.watcher.look()
    first.watcher.close()
    second = watched(feed.target, state=state, kept_iterations=10)
    feed.step(1)
    for watch in (whole, second):
        watch.watcher.look()
    assert second.watcher.judgement.report == whole.watcher.judgement.report
    second.watcher.close()


def test_what_a_channel_was_not_told_is_told_after_the_restart(
    faulty, grow, watched, tmp_path, recorded
):
    feed, state = grow(faulty), tmp_path / "state.json"
    recorded.fails = True
    first = watched(feed.target, state=state, channels=[recorded])
    feed.step(10)
    first.watcher.look()
    first.watcher.close()
    assert recorded.events == []
    assert [each["event"]["event"] for each in json.loads(state.read_bytes())["pending"]] == [
        "raised"
    ]
    recorded.fails = False
    second = watched(feed.target, state=state, channels=[recorded])
    second.watcher.outbox.send()
    second.watcher.close()
    assert [(event["event"], event["number"] > 0) for event in recorded.events] == [
        ("raised", True)
    ]
    assert json.loads(state.read_bytes())["pending"] == []


def test_state_is_saved_before_anybody_is_told(faulty, grow, watched, tmp_path):
    feed, state, saved = grow(faulty), tmp_path / "state.json", []

    class Looks:
        name = key = "looks"

        def tell(self, event):
            saved.append(json.loads(state.read_bytes()))

    watch = watched(feed.target, state=state, channels=[Looks()])
    feed.step(10)
    watch.watcher.look()
    watch.watcher.close()
    assert [each["event"]["event"] for each in saved[0]["pending"]] == ["raised"]
    assert any(one["ranks"] == [5] for one in saved[0]["accounts"]["open"])


def test_a_full_disk_costs_the_state_and_not_the_watch(
    faulty, grow, watched, tmp_path, monkeypatch
):
    feed, state = grow(faulty), tmp_path / "state.json"
    watch = watched(feed.target, state=state)
    feed.step(4)
    watch.watcher.look()
    before = state.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state_module.os, "fsync", full)
    feed.step(6)
    watch.watcher.look()
    assert watch.names == ["raised"]
    assert len([one for one in watch.warnings if "No space left on device" in one]) == 1
    assert state.read_bytes() == before
    assert not list(tmp_path.glob("*.new"))
    monkeypatch.undo()
    feed.step(1)
    watch.watcher.look()
    assert json.loads(state.read_bytes())["judged_iteration"] == 22
    watch.watcher.close()


def test_two_watches_do_not_share_a_state(tmp_path):
    first = StateFile(tmp_path / "state.json")
    first.load()
    with pytest.raises(ConfigError, match="another watch keeps its state"):
        StateFile(tmp_path / "state.json").load()
    first.close()
    StateFile(tmp_path / "state.json").load()


@pytest.mark.parametrize(
    "content", [b"not json", b"{}", b'{"schema": 99}', b"[1]", b'{"schema":1}']
)
def test_a_damaged_state_is_refused_in_one_sentence(tmp_path, content):
    path = tmp_path / "state.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"is no state of a watch .* --state"):
        StateFile(path).load()


def test_kill_9_loses_no_finding(faulty, grow, tmp_path):
    """A real process, killed at once after the finding was printed; the next one delivers."""
    feed, told = grow(faulty), tmp_path / "told.jsonl"
    feed.step(10)
    slow = tmp_path / "slow.sh"
    slow.write_text("#!/bin/sh\nsleep 60\n")
    teller = tmp_path / "tell.sh"
    teller.write_text(f"#!/bin/sh\ncat >> {told}; echo >> {told}\n")
    for script in (slow, teller):
        script.chmod(0o755)
    words = [sys.executable, "-m", "megascan", "watch", str(feed.target), "--json"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    place = tmp_path / "on-finding.sh"
    place.symlink_to(slow)
    first = subprocess.Popen(
        [*words, "--exec", str(place)], stdout=subprocess.PIPE, env=environment, cwd=tmp_path,
        process_group=0,
    )  # fmt: skip
    state = feed.target / "megascan-watch.json"
    until = time.monotonic() + 120
    while time.monotonic() < until and not (state.exists() and b'"raised"' in state.read_bytes()):
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    place.unlink()
    place.symlink_to(teller)
    done = subprocess.run(
        [*words, "--exec", str(place), "--once"], capture_output=True, env=environment,
        cwd=tmp_path, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    events = [json.loads(line) for line in told.read_text().splitlines() if line]
    raised = [one for one in events if one["event"] == "raised"]  # a loaded machine may hang, too
    assert [one["finding"]["ranks"] for one in raised] == [[5]]
