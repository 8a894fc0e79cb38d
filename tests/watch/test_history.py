"""Findings of several jobs by device: counted, merged, quoted, and never a reason to accuse."""

from __future__ import annotations

import json
import sqlite3

import pytest

from megascan.errors import InputError
from megascan.header import RankHeader
from megascan.reader import read_trace
from megascan.watch.history import History, Named


@pytest.fixture(scope="module")
def headers(healthy) -> dict[int, RankHeader]:
    return dict(read_trace(healthy).headers)


def of_run(headers, run_id: str) -> dict[int, RankHeader]:
    from dataclasses import replace

    return {rank: replace(header, run_id=run_id) for rank, header in headers.items()}


SLOW = Named(id="c", ranks=(5,), cause="compute", owner="node", slowdown=1.31, gpu_hours=2.0)


def test_jobs_and_names_are_counted_by_device(headers, tmp_path):
    history = History(tmp_path / "h.db")
    for number in range(5):
        history.add(of_run(headers, f"run-{number}"), [SLOW] * (number < 3), 100.0 + number)
    (past,) = history.past(["SIM-000005"])
    assert (past.num_named, past.num_jobs, past.host) == (3, 5, "n02")
    assert past.words == "was named in 3 of 5 earlier jobs (compute, up to 1.31x)"
    assert past.gpu_hours == 6.0
    (before,) = history.past(["SIM-000005"], but_run="run-0")
    assert (before.num_named, before.num_jobs) == (2, 4)
    assert history.past()[0].device == "SIM-000005"
    assert len(history.past()) == 8


def test_findings_of_the_job_name_no_device(headers, tmp_path):
    history = History(tmp_path / "h.db")
    heavy = Named(id="s", ranks=(4, 5), cause="stage_imbalance", owner="job", slowdown=1.4)
    history.add(headers, [heavy], 1.0)
    assert [past.num_named for past in history.past()] == [0] * 8


def test_a_run_that_is_added_again_replaces_itself(headers, tmp_path):
    history = History(tmp_path / "h.db")
    history.add(headers, [SLOW], 1.0)
    history.add(headers, [], 2.0)
    assert history.num_jobs == 1
    assert history.past(["SIM-000005"])[0].num_named == 0


def test_histories_merge_and_the_later_record_of_a_job_stays(headers, tmp_path):
    ours, theirs = History(tmp_path / "ours.db"), History(tmp_path / "theirs.db")
    ours.add(of_run(headers, "both"), [], 10.0)
    theirs.add(of_run(headers, "both"), [SLOW], 20.0)
    theirs.add(of_run(headers, "only theirs"), [SLOW], 5.0)
    assert ours.merge(theirs.path) == 2
    assert ours.merge(theirs.path) == 0
    assert (ours.num_jobs, ours.past(["SIM-000005"])[0].num_named) == (2, 2)
    assert theirs.num_jobs == 2


def test_what_is_no_history_is_refused_and_left_alone(tmp_path):
    text, other = tmp_path / "text.db", tmp_path / "other.db"
    text.write_text("no database at all, but long enough to be looked at by SQLite\n" * 20)
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE theirs (x)")
    before = other.read_bytes()
    for path, says in ((text, "is no history"), (other, "database of another program")):
        with pytest.raises(InputError, match=says):
            History(path)
    assert other.read_bytes() == before
    with pytest.raises(InputError, match="no such file"):
        History(tmp_path / "none.db", must_exist=True)


def test_the_watch_books_the_job_and_quotes_earlier_ones_as_evidence_only(
    faulty, headers, grow, watched, tmp_path
):
    history = History(tmp_path / "h.db")
    history.add(of_run(headers, "before"), [SLOW, Named(**{**vars(SLOW), "ranks": (2,)})], 1.0)
    feed = grow(faulty)
    plain, watch = watched(feed.target), watched(feed.target, history=history)
    feed.step(10)
    for each in (plain, watch):
        each.watcher.look()
    (account,) = [one for one in watch.watcher.state.accounts.holding if one.owner == "node"]
    assert account.evidence[-1] == (
        "history: rank 5's device SIM-000005 was named in 1 of 1 earlier job (compute, up to "
        "1.31x); this did not count in the verdict"
    )
    named = [finding.ranks for finding in watch.watcher.judgement.report.findings]
    assert named == [finding.ranks for finding in plain.watcher.judgement.report.findings]
    assert history.num_jobs == 2
    assert history.past(["SIM-000005"])[0].num_named == 2
    assert history.past(["SIM-000002"])[0].num_named == 1


def test_a_healthy_job_is_booked_too_when_its_watch_ends(healthy, grow, watched, tmp_path):
    history = History(tmp_path / "h.db")
    feed = grow(healthy)
    watch = watched(feed.target, history=history)
    feed.step(4)
    watch.watcher.look()
    watch.watcher.end()
    assert history.num_jobs == 1
    assert all(past.num_named == 0 for past in history.past())


def test_the_commands(megascan, faulty, healthy, tmp_path):
    file = tmp_path / "h.db"
    for folder in (faulty, healthy):
        done = megascan("history", "add", file, folder)
        assert done.returncode == 0, done.stderr
    shown = megascan("history", "show", file)
    assert "SIM-000005  host n02  named in 1 of 2 jobs  compute up to 1.3" in shown.stdout
    assert shown.stdout.endswith("1 devices of 2 jobs\n")
    record = json.loads(megascan("history", "show", file, "--json", "--all").stdout)
    assert [one["num_jobs"] for one in record] == [2] * 8
    merged = megascan("history", "merge", tmp_path / "all.db", file)
    assert "took 2 jobs" in merged.stdout
    quoted = megascan("detect", faulty, "--history", file)
    assert "was named in 0 of 1" not in quoted.stdout
    assert "was named in none of 1 earlier job" in " ".join(quoted.stdout.split())
    refused = megascan("history", "show", tmp_path / "none.db")
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
