"""What is asked of blind readings: jobs without their truth, and answers that are counted by it."""

from __future__ import annotations

import orjson
import pytest

from benchmarks.grounds.blind import Answer, answers_in, drawn, table_of_answers, write_jobs
from benchmarks.grounds.ground import Planted
from benchmarks.grounds.outcome import Named, Outcome
from megascan.errors import InputError, UsageError


def fault(*ranks):
    return Planted(
        kind="gpu_clock", cause="compute", owner="node", ranks=ranks, factor=1.3, cost_ratio=1.2
    )


def job(name, planted=(), *named, ground="kernels", num_ranks=4):
    findings = tuple(
        Named(
            ranks=ranks, cause="compute", owner="node", slowdown=1.3, interval=(1.2, 1.4),
            first_iteration=1, cost_ratio=1.2,
        )
        for ranks in named
    )  # fmt: skip
    return Outcome(
        ground=ground, name=name, family="f", num_ranks=num_ranks, verdict="", planted=planted,
        findings=findings,
    )  # fmt: skip


JOBS = (
    job("a", (fault(3),)),
    job("b", (fault(3),), (3,)),
    job("c"),
    job("d", (fault(1), fault(2)), (1,)),
    job("e", (), num_ranks=128),
)


def test_jobs_are_drawn_by_kind_and_the_same_ones_each_time():
    counts = {"missed": 2, "found": 1, "sound": 1}
    chosen = drawn(JOBS, counts, seed=1)
    assert sorted(one.name for one in chosen) == ["a", "b", "c", "d"]
    assert chosen == drawn(JOBS, counts, seed=1)
    with pytest.raises(UsageError, match="fewer jobs than asked for are sound"):
        drawn(JOBS, {**counts, "sound": 2}, seed=1)


def test_the_folder_of_a_job_holds_its_files_and_no_truth(tmp_path):
    from benchmarks.grounds.__main__ import ground_named

    case = min(ground_named("kernels").cases(11), key=lambda one: one.num_ranks)
    write_jobs([job(case.name)], 11, tmp_path)
    files = [path.name for path in (tmp_path / "jobs" / "00").rglob("*") if path.is_file()]
    assert len(files) == case.num_ranks
    assert not any(case.name in name for name in files)
    assert orjson.loads((tmp_path / "key.json").read_bytes()) == {
        "00": ["kernels", case.name, "sound"]
    }


def test_answers_are_counted_by_what_was_planted():
    key = {str(number): ("kernels", one.name, "x") for number, one in enumerate(JOBS)}
    key |= {"0": ("kernels", "a", "missed"), "2": ("kernels", "c", "sound")}

    def says(number, names, guess=()):
        return Answer(job=number, names=tuple(map(frozenset, names)), guess=frozenset(guess))

    told = [says("0", [], [3]), says("1", [[3]]), says("2", [[0]]), says("3", [[2], [1, 3]], [3])]
    rows = table_of_answers(JOBS, key, told).splitlines()
    assert rows[2:] == [
        "| missed | compute | 1 | 1 | 0 |",
        "| found | compute | 1 | 0 | 1 |",
        "",
        "Jobs in which a reader named an innocent rank: 0 of 1 missed, 1 of 1 sound.",
    ]


def test_a_bad_answer_is_said_with_its_line(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text('{"job": "00", "names": [[1]], "guess": [1]}\n{"job": "01"}\n')
    with pytest.raises(InputError, match=r"answers\.jsonl:2: want job, names and guess"):
        answers_in(path)
