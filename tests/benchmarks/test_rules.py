"""What each rule of the detector is worth: rules are heard, taken out, and given back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import cast

import numpy as np
import pytest

from benchmarks.detection import rules as subject
from benchmarks.detection.rules import (
    Hearing,
    Job,
    Rule,
    Worth,
    judged,
    page_of,
    rules,
    speaks,
    worths_of,
)
from detect.causes import links
from detect.causes.finding import Answer
from megascan.simulate import (
    Fault,
    FaultKind,
    JobModel,
    compute_bound,
    simulate_trace,
    write_rank_files,
)
from megascan.topology import Layout


@pytest.fixture
def hearing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hearing]:
    opened = Hearing(rules())
    monkeypatch.setattr(subject, "_HEARING", [opened])
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def slow_loader(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job in which the batches of rank 2 of 4 replicas are late."""
    folder = tmp_path_factory.mktemp("late")
    layout = Layout(dp=4)
    job = JobModel(layout=layout, costs=compute_bound(layout))
    fault = Fault(rank=2, kind=FaultKind.LOADER, factor=2000.0)
    write_rank_files(simulate_trace(job, [fault], seed=1), folder)
    return Job(folder=folder)


def number_of(where: str) -> int:
    (number,) = (n for n, rule in enumerate(rules()) if rule.where == where)
    return number


def test_rules_are_the_functions_that_answer_no_or_nothing() -> None:
    where = {rule.where: rule.answers for rule in rules()}
    assert len(where) > 500
    assert where["causes/links.py _is_at_its_end"] == "bool"
    assert where["causes/compute.py _search"] == "Answer"
    assert where["causes/pass_hits.py _Passes.is_noise"] == "bool"  # a property
    assert not any("__eq__" in one for one in where)
    assert "stats/robust.py median" not in where  # a number says neither


@pytest.mark.parametrize(
    ("answer", "is_said"),
    [
        ([], False),
        ("", False),
        (None, False),
        ("its host", True),
        (np.zeros(3, dtype=bool), False),
        (np.array([False, True]), True),
        (Answer(least_slowdown=1.03), False),
        (Answer(notes=("two hosts only",)), True),
        (Answer(slow=np.array([True, False])), True),
    ],
)
def test_a_rule_speaks_when_it_answers_anything(answer: object, is_said: bool) -> None:
    assert speaks(answer) is is_said


def test_a_rule_that_is_taken_out_answers_nothing_and_is_given_back() -> None:
    def flags(one: np.ndarray, /, *, least: int = 1) -> np.ndarray:
        return one >= least

    def doubt(words: str = "may be data") -> str | None:
        return words

    asked = [
        Rule(
            module="detect.causes.a",
            name="flags",
            answers="Flags",
            function=cast("FunctionType", flags),
        ),
        Rule(
            module="detect.causes.a",
            name="doubt",
            answers="None",
            function=cast("FunctionType", doubt),
        ),
    ]
    heard = Hearing(asked)
    try:
        assert flags(np.array([0, 1])).tolist() == [False, True]
        assert flags(np.array([0, 1]), least=2).tolist() == [False, False]
        assert (doubt(), heard.heard) == ("may be data", {0, 1})
        heard.silenced = 0
        assert flags(np.array([0, 1])).tolist() == [False, False]
        heard.silenced = 1
        assert doubt("or not") is None
    finally:
        heard.close()
    assert flags(np.array([0, 1]), least=0).tolist() == [True, True]
    assert doubt() == "may be data"


def test_without_the_rule_that_asks_who_is_named_a_late_rank_is_named_twice(
    slow_loader: Job, hearing: Hearing
) -> None:
    asks, idle = (
        number_of("causes/finding.py Inquiry.named_for"),
        number_of("causes/nvlinks.py _search"),
    )
    (as_it_is, without, same), spoke = judged(slow_loader, [asks, idle])
    late = ("node", "loader", (2,))
    assert as_it_is.shown == ("degraded", (late,))
    assert asks in spoke
    assert without.rule == asks
    assert without.shown == ("degraded", (late, late))
    assert same.shown == as_it_is.shown
    assert hearing.silenced == -1


def test_a_folder_that_cannot_be_read_is_left_out(tmp_path: Path, hearing: Hearing) -> None:
    assert judged(Job(folder=tmp_path), [0]) == ([], frozenset())
    assert not hearing.heard


def test_the_page_tells_what_decides_from_what_only_speaks() -> None:
    def worth(function: FunctionType, name: str, **counts: int) -> Worth:
        rule = Rule(module="detect.causes.links", name=name, answers="bool", function=function)
        return Worth(rule=rule, **counts)

    a_rule = cast("FunctionType", links._is_at_its_end)
    page = page_of(
        [
            worth(a_rule, "guards", num_spoken=3, num_judged=3, num_changed=2,
                  more_wrong=1),
            worth(a_rule, "idles", num_spoken=5, num_judged=5),
            worth(a_rule, "words", num_spoken=4, num_judged=4, num_reworded=1),
            worth(a_rule, "carries", num_spoken=90),
            worth(a_rule, "is_mute", num_spoken=0),
        ],
        100,
        40,
        "the command",
    )  # fmt: skip
    assert "100 jobs, 5 rules. 1 never speak, 1 speak in more than 40 jobs" in page
    assert "| `causes/links.py guards` | 3 | 2 | +0 | +1 |" in page
    assert (
        "Speak and change nothing (jobs in which they speak):\n\n- causes/links.py: `idles` (5)"
        in page
    )
    assert "Change words only:\n\n- causes/links.py: `words` (4)" in page
    assert "Never speak here:\n\n- causes/links.py: `is_mute`" in page
    assert "carries" not in page.split("rules.", maxsplit=1)[1]


def test_rules_are_tried_in_the_jobs_in_which_they_speak(slow_loader: Job) -> None:
    worths = {one.rule.where: one for one in worths_of([slow_loader], most=1, workers=1)}
    asks = worths["causes/finding.py Inquiry.named_for"]
    assert (asks.num_spoken, asks.num_judged, asks.num_changed) == (1, 1, 1)
    silent = worths["causes/nvlinks.py _search"]
    assert (silent.num_spoken, silent.num_judged) == (0, 0)


def test_the_command_judges_cases_of_a_ground(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "benchmarks.detection.rules", "--ground", "mill", "--draw", "2"]
    output = tmp_path / "rules.md"
    options = ["--every", "200", "--most", "0", "--workers", "2", "-o", str(output)]
    done = subprocess.run([*words, *options], capture_output=True, text=True, check=True)
    assert done.stdout == output.read_text()
    assert "# What each rule of the detector is worth" in done.stdout
    bad = subprocess.run([*words, "--every", "0"], capture_output=True, text=True, check=False)
    assert bad.returncode == 2
    assert "--every 0: want 0 or more, 1 or more" in bad.stderr
