"""`megascan watch` as it is typed."""

from __future__ import annotations

import json
import re
import sys

import pytest

from megascan.cli.main import main
from megascan.watch.hang import Hang


def test_once_judges_what_is_there_and_the_exit_code_tells(megascan, faulty, healthy, grow):
    slow, well = grow(faulty, "slow"), grow(healthy, "well")
    slow.step(10)
    well.step(10)
    for feed in (slow, well):
        feed.close()
    done = megascan("watch", slow.target, "--once")
    assert done.returncode == 3, done.stderr
    lines = done.stdout.splitlines()
    assert "DEGRADED" in lines[0]
    assert "slowest rank 5" in lines[0]
    assert any("RAISED compute-rank5" in line and "owner node" in line for line in lines)
    again = megascan("watch", slow.target, "--once", "--json")
    assert again.returncode == 3
    (verdict,) = map(json.loads, again.stdout.splitlines())  # what was told is not told again
    assert verdict["event"] == "verdict"
    assert verdict["holding"]
    assert megascan("watch", well.target, "--once", "--no-state").returncode == 0
    assert not (well.target / "megascan-watch.json").exists()


def test_it_ends_with_the_job(megascan, healthy, grow):
    feed = grow(healthy)
    feed.step(5)
    feed.close()
    done = megascan("watch", feed.target, "--exit-when-done", "--interval", "0.05", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0])["event"] == "verdict"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["/nowhere", "--once"], 1, "no such folder; name one that a job traces into"),
        (["DIR", "--once", "--no-state"], 1, "holds no finished window; let the job run longer"),
        (["FILE", "--once"], 1, "is a file, expected a folder of rank files"),
        (["DIR", "--interval", "0"], 2, "--interval is 0.0, expected 0.01 to 3600 seconds"),
        (["DIR", "--interval", "nan"], 2, "--interval is nan"),
        (["DIR", "--keep", "7"], 2, "--keep is 7, expected 8 to 1000 iterations"),
        (["DIR", "--cpu-share", "0"], 2, "--cpu-share is 0.0, expected above 0 and at most 1"),
        (["DIR", "--cpu-share", "1.5"], 2, "--cpu-share is 1.5"),
        (["DIR", "--cpu-share", "nan"], 2, "--cpu-share is nan"),
        (["DIR", "--hang-after", "-1"], 2, "--hang-after is -1.0"),
        (["DIR", "--tui"], 2, "--tui needs a terminal"),
        (["DIR", "--tui", "--json"], 2, "leave out --json and --once"),
        (["DIR", "--webhook-format", "slack"], 2, "there is no --webhook"),
        (["DIR", "--webhook", "nonsense"], 1, "expected http(s)://host/"),
        (["DIR", "--once", "--dry-run-policy", "FILE"], 1, "expected [[drain]] tables"),
        (["DIR", "--once", "--state", "/no/such/x"], 1, "no such folder; make it or name another"),
        (["DIR", "--once", "--history", "FILE/x"], 1, "cannot be used"),
        (["DIR", "--min-slowdown", "0.9"], 2, "expected more than 1"),
        (["DIR", "--once", "--prometheus", "99999"], 1, "choose another port"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(capsys, tmp_path, words, code, says):
    from megascan.cli.main import main

    (tmp_path / "empty.toml").write_text("")
    (tmp_path / "folder").mkdir()
    places = {"DIR": str(tmp_path / "folder"), "FILE": str(tmp_path / "empty.toml")}
    typed = [places.get(word, word.replace("FILE", places["FILE"])) for word in words]
    assert main(["watch", *typed]) == code
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_the_screen_shows_verdict_ranks_findings_and_windows(faulty, grow, watched):
    from rich.console import Console

    from megascan.watch.screen import Screen

    feed = grow(faulty)
    watch = watched(feed.target)
    console = Console(width=100, height=32, record=True, force_terminal=True)
    screen = Screen(console)
    console.print(screen.draw(watch.watcher))
    assert "waiting for the first whole window" in console.export_text(clear=True)
    for count in (8, 2):
        feed.step(count)
        watch.watcher.look()
        screen.note("an event")
        text = _drawn(console, screen, watch)
    lines = text.splitlines()
    assert len(lines) <= 33
    assert any(
        "DEGRADED" in line and "iterations 1-20" in line and "8 ranks" in line for line in lines
    )
    ranks = [line for line in lines if "rank " in line and "x" in line and "│" in line]
    assert "rank 5" in ranks[0]
    assert "█" in ranks[0]
    assert any("compute-rank5" in line for line in lines)
    assert any(" 20 " in line and "degraded" in line for line in lines)
    # slow since iteration 15: the last two of the window before are enough
    assert any(" 16 " in line and "degraded" in line for line in lines)
    assert any("an event" in line for line in lines)


def test_a_screen_without_rich_is_refused_in_a_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "megascan.watch.screen", raising=False)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["watch", str(tmp_path), "--tui"]) == 1
    said = capsys.readouterr().err
    assert "--tui needs rich" in said and said.count("\n") == 1


def test_a_small_screen_shows_the_whole_of_a_hang(faulty, grow, watched):
    from rich.console import Console

    from megascan.watch.screen import Screen

    feed = grow(faulty)
    watch = watched(feed.target)
    feed.step(10)
    watch.watcher.look()
    watch.watcher.hangs.hang = Hang(
        silent_s=21.0, usual_gap_s=1.5, last_iteration=171, missing=(), silent=(1,)
    )
    console = Console(width=80, height=24, record=True, force_terminal=True)
    lines = _drawn(console, Screen(console), watch).splitlines()
    assert len(lines) <= 25
    words = " ".join(" ".join(line.strip("│ ") for line in lines).split())
    assert watch.watcher.hangs.hang.headline in words
    assert re.search(r"by slowness, \d of 8", words)


def _drawn(console, screen, watch) -> str:
    console.print(screen.draw(watch.watcher))
    return console.export_text(clear=True)
