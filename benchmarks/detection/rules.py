"""python -m benchmarks.detection.rules: what each rule of the detector is worth.

A rule is a function of `detect.causes` or `detect.stats` that answers yes or no, a reason, rows or
findings. It speaks when it answers anything but no and nothing. Every job is judged as it is, where
it is noted which rules speak, and then again without each of them (it answers no, or nothing),
where it speaks in few jobs: what speaks in most of them carries the verdict, and needs no proof.
Jobs are drawn from the grounds, and `--traces` adds folders of recorded ones, whose truth nobody
says. Neither shows all of reality: a rule that decides nothing here is to be read, not removed
blindly. What it protects may be in the tests alone, or in traces that nobody has.

examples:
  python -m benchmarks.detection.rules --ground depot --ground mill --draw 435 --every 4
  python -m benchmarks.detection.rules --draw 1 --every 8 --traces DIR --most 20 -o rules.md
"""

from __future__ import annotations

import argparse
import copy
import importlib
import os
import pkgutil
import sys
import tempfile
import types
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from inspect import getattr_static
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import numpy as np

from aggregate import build_timeline
from benchmarks.grounds.__main__ import GROUNDS, OTHERS, chosen_cases, ground_named
from benchmarks.grounds.ground import Case, Planted
from benchmarks.grounds.outcome import Outcome, kept_of
from detect.causes.finding import Answer
from detect.detector import judge
from detect.observe.extract import observe
from detect.observe.observations import Observations
from detect.report import Report
from detect.thresholds.adjustable import DetectorSettings
from megascan.errors import MegaScanError, report_errors
from megascan.reader import read_trace

PACKAGES = ("detect.causes", "detect.stats")
EMPTY: Mapping[str, Callable[[], object]] = {
    "bool": lambda: False,
    "str": str,
    "list": list,
    "tuple": tuple,
    "dict": dict,
    "set": set,
    "frozenset": frozenset,
    "Answer": Answer,
}
"""What a rule answers that is taken out, by the type of its answers; None where it may be None."""
FLAGS = "Flags"
"""Answers of this type flag rows: taken out, a rule flags none of as many."""
ASKED = "_asked_instead"
"""The name under which a rule's module knows who is asked in the rule's place."""

_T = TypeVar("_T")

Shown = tuple[str, tuple[tuple[str, str, tuple[int, ...]], ...]]
"""A verdict and its findings: owner, cause, ranks."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One function of the detector, and what it answers when it is taken out."""

    module: str
    name: str
    answers: str
    function: types.FunctionType = field(repr=False, compare=False)

    @property
    def where(self) -> str:
        """Return where to find it: `causes/links.py _is_at_its_end`."""
        return f"{self.module.removeprefix('detect.').replace('.', '/')}.py {self.name}"


@cache
def rules() -> tuple[Rule, ...]:
    """Return all rules in the order of files and lines, each with its number for a place."""
    return tuple(
        rule for package in PACKAGES for module in _modules(package) for rule in _rules_of(module)
    )


def _modules(package: str) -> Iterator[types.ModuleType]:
    parts = pkgutil.iter_modules(importlib.import_module(package).__path__)
    for name in sorted(one.name for one in parts):
        yield importlib.import_module(f"{package}.{name}")


def _rules_of(module: types.ModuleType) -> list[Rule]:
    found = []
    for name, function in _functions(module, module.__name__):
        answers = _answers(str(function.__annotations__.get("return", "")))
        if answers and not function.__code__.co_freevars:
            found.append(
                Rule(module=module.__name__, name=name, answers=answers, function=function)
            )
    return sorted(found, key=lambda rule: rule.function.__code__.co_firstlineno)


def _functions(
    owner: types.ModuleType | type, module: str, prefix: str = ""
) -> Iterator[tuple[str, types.FunctionType]]:
    """Yield the functions that a module or class defines, methods and properties included."""
    for name in vars(owner):
        value = getattr_static(owner, name)
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, cached_property):
            value = value.func
        if isinstance(value, type) and value.__module__ == module and not prefix:
            yield from _functions(value, module, f"{name}.")
        elif isinstance(value, types.FunctionType) and value.__module__ == module:
            is_generated = value.__code__.co_filename.startswith("<")  # a dataclass's own methods
            if not is_generated and value.__name__ != "<lambda>":
                yield f"{prefix}{name}", value


def _answers(annotation: str) -> str:
    """Return the kind of answers that an annotation promises, "" for what is no rule's."""
    if annotation.endswith("| None"):
        return "None"
    kind = annotation.split("[", maxsplit=1)[0]
    return kind if kind in EMPTY or kind == FLAGS else ""


def speaks(answer: object) -> bool:
    """Tell whether a rule says anything: not no, nothing, nobody."""
    if isinstance(answer, Answer):
        said = (answer.findings, answer.notes, answer.hides, answer.caveat, answer.unseen)
        return any(said) or (answer.slow is not None and bool(answer.slow.any()))
    if isinstance(answer, bool):
        return answer
    if isinstance(answer, np.ndarray):
        return bool(answer.any())
    return answer is not None if not hasattr(answer, "__len__") else len(answer) > 0


class Hearing:
    """Asks the rules, notes which speak, and lets one of them answer nothing.

    The code of each function is exchanged, and not the function: others hold it under many names
    and in tables.
    """

    def __init__(self, asked: Sequence[Rule]) -> None:
        self.heard: set[int] = set()
        self.silenced = -1
        self._rules = asked
        self._originals = [_copy(rule.function) for rule in asked]
        for number, rule in enumerate(asked):
            rule.function.__globals__[ASKED] = self._ask
            stand_in = f"lambda *given, **named: {ASKED}({number}, given, named)"
            rule.function.__code__ = eval(stand_in, {}).__code__
            rule.function.__defaults__ = rule.function.__kwdefaults__ = None

    def close(self) -> None:
        """Give every rule its code back."""
        for rule, original in zip(self._rules, self._originals, strict=True):
            rule.function.__code__ = original.__code__
            rule.function.__defaults__ = original.__defaults__
            rule.function.__kwdefaults__ = original.__kwdefaults__

    def _ask(self, number: int, given: tuple[object, ...], named: Mapping[str, object]) -> object:
        answers, original = self._rules[number].answers, self._originals[number]
        if number == self.silenced and answers != FLAGS:
            return EMPTY[answers]() if answers in EMPTY else None
        answer = original(*given, **named)
        if number == self.silenced:
            return np.zeros_like(answer)
        if speaks(answer):
            self.heard.add(number)
        return answer


def _copy(function: types.FunctionType) -> types.FunctionType:
    """Return a function of the same code, which stays when the other's is exchanged."""
    twin = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


@dataclass(frozen=True, kw_only=True)
class Job:
    """A case of a ground, or a folder of traces of which nobody says the truth."""

    case: Case | None = None
    folder: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What was said of a job: as it is (`rule` -1), or without a rule."""

    rule: int
    shown: Shown
    words: tuple[str, ...]
    """All that the report says of its findings, and its notes."""
    num_found: int
    num_wrong: int


@dataclass(frozen=True, kw_only=True)
class Worth:
    """What becomes of all jobs without one rule."""

    rule: Rule
    num_spoken: int
    num_judged: int = 0
    num_changed: int = 0
    num_reworded: int = 0
    """Jobs in which the verdict stays, and its words do not."""
    more_found: int = 0
    more_wrong: int = 0


_HEARING: list[Hearing] = []
"""The one hearing of a process; empty until `_hear` opens it."""


def _hear() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _HEARING.append(Hearing(rules()))


def judged(job: Job, without: Sequence[int]) -> tuple[list[Judged], frozenset[int]]:
    """Judge a job as it is and without some rules, and return which rules spoke as it was.

    What cannot be judged without a rule is left out: others rely on its answer.
    """
    hearing = _HEARING[0]
    with tempfile.TemporaryDirectory() as folder:
        planted: tuple[Planted, ...] = ()
        if job.case is not None:
            planted = ground_named(job.case.ground).write(job.case, Path(folder))
        try:
            trace = read_trace(job.folder or Path(folder), allow_missing_ranks=True)
            seen = observe(build_timeline(trace))
        except MegaScanError:
            return [], frozenset()
    hearing.heard.clear()
    results = [_judged(seen, planted, -1)]
    heard = frozenset(hearing.heard)
    for hearing.silenced in without:
        with (
            suppress(Exception),
            warnings.catch_warnings(action="ignore"),
            np.errstate(all="ignore"),
        ):
            results.append(_judged(seen, planted, hearing.silenced))
    hearing.silenced = -1
    return results, heard


def _judged(seen: Observations, planted: tuple[Planted, ...], silenced: int) -> Judged:
    report = judge(copy.deepcopy(seen), DetectorSettings())  # nothing may be left of other verdicts
    outcome = Outcome(
        ground="",
        name="",
        family="",
        num_ranks=0,
        verdict=report.verdict.value,
        planted=planted,
        findings=tuple(kept_of(one) for one in report.findings),
    )
    findings = tuple(sorted((one.owner, one.cause, one.ranks) for one in outcome.findings))
    return Judged(
        rule=silenced,
        shown=(outcome.verdict, findings),
        words=tuple(_words(report)),
        num_found=sum(outcome.finding_of(one) is not None for one in outcome.due),
        num_wrong=len(outcome.wrong),
    )


def _words(report: Report) -> Iterator[str]:
    for finding in report.findings:
        yield from (finding.headline, *finding.evidence, *finding.next_steps)
    yield from (*report.notes, *report.hides, *report.caveats)


def worths_of(jobs: Sequence[Job], *, most: int, workers: int) -> list[Worth]:
    """Return the worth of every rule; only those that speak in at most `most` jobs are tried."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_hear) as pool:
        first = list(_progress(pool.map(partial(judged, without=()), jobs), len(jobs), "heard"))
        spoken = Counter(number for _, heard in first for number in heard)
        tried = {number for number, count in spoken.items() if count <= most}
        left = [
            (job, sorted(heard & tried))
            for job, (_, heard) in zip(jobs, first, strict=True)
            if heard & tried
        ]
        again = pool.map(judged, *zip(*left, strict=True)) if left else iter(())
        results = [result for result, _ in _progress(again, len(left), "judged again")]
    worths = [Worth(rule=rule, num_spoken=spoken[n]) for n, rule in enumerate(rules())]
    for as_it_is, *others in (result for result in results if result):
        for one in others:
            worth = worths[one.rule]
            worths[one.rule] = replace(
                worth,
                num_judged=worth.num_judged + 1,
                num_changed=worth.num_changed + (one.shown != as_it_is.shown),
                num_reworded=worth.num_reworded
                + (one.shown == as_it_is.shown and one.words != as_it_is.words),
                more_found=worth.more_found + one.num_found - as_it_is.num_found,
                more_wrong=worth.more_wrong + one.num_wrong - as_it_is.num_wrong,
            )
    return worths


def _progress(results: Iterable[_T], total: int, words: str) -> Iterator[_T]:
    for number, one in enumerate(results, start=1):
        if sys.stderr.isatty():
            print(f"\r{number} of {total} jobs {words} ", end="", file=sys.stderr)
        yield one


def page_of(worths: Sequence[Worth], num_jobs: int, most: int, command: str) -> str:
    """Return the page: what decides, what speaks without deciding, and what never speaks."""
    tried = [one for one in worths if one.num_judged]
    deciding = [one for one in tried if one.num_changed]
    wording = [one for one in tried if not one.num_changed and one.num_reworded]
    idle = [one for one in tried if not one.num_changed and not one.num_reworded]
    silent = [one for one in worths if not one.num_spoken]
    lines = [
        "# What each rule of the detector is worth",
        "",
        f"`{command}`: {num_jobs} jobs, {len(worths)} rules. {len(silent)} never speak, "
        f"{len(worths) - len(silent) - len(tried)} speak in more than {most} jobs (or nothing can "
        f"be judged without them), {len(deciding)} of the others change a verdict, {len(wording)} "
        f"words only, {len(idle)} speak and change nothing.",
        "",
        "| rule | speaks in | verdicts changed without it | due faults found | wrong names |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| `{one.rule.where}` | {one.num_spoken} | {one.num_changed} | {one.more_found:+d} | "
        f"{one.more_wrong:+d} |"
        for one in sorted(
            deciding, key=lambda one: (one.more_found - one.more_wrong, one.rule.where)
        )
    ]
    for title, group in (
        ("Speak and change nothing (jobs in which they speak)", idle),
        ("Change words only", wording),
        ("Never speak here", silent),
    ):
        lines += ["", f"{title}:", "", *_by_file(group)]
    return "\n".join(lines) + "\n"


def _by_file(group: Iterable[Worth]) -> list[str]:
    files = defaultdict(list)
    for worth in group:
        file, name = worth.rule.where.split(" ")
        files[file].append(f"`{name}`" + (f" ({worth.num_spoken})" if worth.num_spoken else ""))
    return [f"- {file}: {', '.join(names)}" for file, names in files.items()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.detection.rules",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(unseen=False, only=None, cause=None)
    parser.add_argument("--ground", choices=(*GROUNDS, *OTHERS), action="append", metavar="GROUND")
    parser.add_argument("--draw", type=int, default=1, metavar="SEED", help="of the grounds (1)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th case")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folders of recorded jobs, too")
    parser.add_argument("--most", type=int, default=40, metavar="N", help="try rules that speak in "
                        "at most N jobs (40)")  # fmt: skip
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("-o", "--output", type=Path, help="write the page here, too")
    return parser


def main() -> int:
    """Judge, and print the page."""
    arguments = _parser().parse_args()
    jobs = [Job(case=case) for case in chosen_cases(arguments)]
    if arguments.traces:
        jobs += [Job(folder=one) for one in sorted(arguments.traces.iterdir()) if one.is_dir()]
    worths = worths_of(jobs, most=arguments.most, workers=arguments.workers)
    command = " ".join(["python -m benchmarks.detection.rules", *sys.argv[1:]])
    page = page_of(worths, len(jobs), arguments.most, command)
    print(page, end="")
    if arguments.output:
        arguments.output.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(report_errors(main))
