"""python -m benchmarks.grounds.blind: what can people tell from the traces that a verdict missed?

Recall says how much is found of what was planted, not how much could be found: the member of a
ring that only its own NIC slows down is in no trace. So let somebody read the files who knows
neither the truth nor the verdict, and count.

    python -m benchmarks.grounds --ground … --draw 11 --keep judged.jsonl
    python -m benchmarks.grounds.blind --draw 11 --keep judged.jsonl --into DIR
    … people read DIR/jobs/00, 01, … and write answers.jsonl, without a look at DIR/key.json …
    python -m benchmarks.grounds.blind --keep judged.jsonl --into DIR --score answers.jsonl …

Jobs with a fault that was missed are mixed with found ones and sound ones, so that nobody may take
for granted that something is wrong. An answer is one JSON object a job: `names`, the faults that
its reader would have a node drained for (lists of ranks), and `guess`, what to look at first.

    {"job": "07", "names": [[5]], "guess": [5]}
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from benchmarks.grounds.__main__ import ground_named
from benchmarks.grounds.ground import Planted
from benchmarks.grounds.outcome import Outcome
from megascan.errors import InputError, UsageError, report_errors

MOST_RANKS = 64
"""Of a job that a person reads."""
KINDS = ("missed", "found", "sound")
Key = Mapping[str, tuple[str, str, str]]
"""By the number of a job: its ground, its name there, and its kind."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grounds.blind", description=__doc__)
    parser.add_argument("--keep", type=Path, required=True, help="outcomes of benchmarks.grounds")
    parser.add_argument("--into", type=Path, required=True, help="folder of the jobs and their key")
    parser.add_argument("--draw", type=int, default=0, metavar="SEED", help="which was judged")
    for kind, usual in zip(KINDS, (48, 12, 15), strict=True):
        parser.add_argument(f"--{kind}", type=int, default=usual, metavar="N", help="such jobs")
    parser.add_argument("--seed", type=int, default=0, help="of the lot by which jobs are drawn")
    parser.add_argument("--score", type=Path, nargs="+", metavar="ANSWERS", help="count answers")
    return parser


def outcomes_in(path: Path) -> list[Outcome]:
    """Return the outcomes that `benchmarks.grounds --keep` wrote."""
    return [Outcome.from_json(orjson.loads(line)) for line in path.read_bytes().splitlines()]


def kind_of(outcome: Outcome) -> str:
    """Return whether a due fault was missed, all were found, or none was there; "" otherwise."""
    if outcome.due:
        are_found = all(outcome.finding_of(fault) for fault in outcome.due)
        return "found" if are_found else "missed"
    return "" if outcome.at_fault else "sound"


def drawn(outcomes: Iterable[Outcome], counts: Mapping[str, int], seed: int) -> list[Outcome]:
    """Return so many jobs of each kind by lot, mixed."""
    lot = random.Random(seed)
    by_kind: dict[str, list[Outcome]] = {kind: [] for kind in (*counts, "")}
    for outcome in outcomes:
        if outcome.num_ranks <= MOST_RANKS:
            by_kind[kind_of(outcome)].append(outcome)
    few = [kind for kind, count in counts.items() if len(by_kind[kind]) < count]
    if few:
        raise UsageError(f"fewer jobs than asked for are {', '.join(few)}: judge more of them")
    chosen = [one for kind, count in counts.items() for one in lot.sample(by_kind[kind], count)]
    lot.shuffle(chosen)
    return chosen


def write_jobs(chosen: Sequence[Outcome], draw: int, folder: Path) -> None:
    """Write the files of each job into a numbered folder, and the key beside them."""
    key: dict[str, tuple[str, str, str]] = {}
    for number, outcome in enumerate(chosen):
        job = f"{number:02d}"
        ground = ground_named(outcome.ground)
        case = next(one for one in ground.cases(draw) if one.name == outcome.name)
        (folder / "jobs" / job).mkdir(parents=True)
        ground.write(case, folder / "jobs" / job)
        key[job] = (outcome.ground, outcome.name, kind_of(outcome))
    (folder / "key.json").write_bytes(orjson.dumps(key))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a reader says of one job."""

    job: str
    names: tuple[frozenset[int], ...]
    """Ranks that the reader would have drained, a set a fault."""
    guess: frozenset[int]
    """Ranks to look at first; none where nothing stands out."""

    def of(self, fault: Planted, at_fault: frozenset[int]) -> str:
        """Return whether the reader named a fault, guessed it, or did not tell it."""

        def is_right(ranks: frozenset[int]) -> bool:
            return bool(ranks & set(fault.ranks)) and ranks <= at_fault

        if any(map(is_right, self.names)):
            return "named"
        return "guessed" if is_right(self.guess) else "not told"


def answers_in(path: Path) -> list[Answer]:
    """Return the answers in a file of JSON lines."""
    answers = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            said = orjson.loads(line)
            names = tuple(frozenset(map(int, ranks)) for ranks in said["names"])
            guess = frozenset(map(int, said["guess"] or ()))
            answers.append(Answer(job=str(said["job"]), names=names, guess=guess))
        except (ValueError, TypeError, KeyError) as problem:
            raise InputError(f"{path}:{number}: want job, names and guess: {problem}") from None
    return answers


def table_of_answers(outcomes: Iterable[Outcome], key: Key, answers: Iterable[Answer]) -> str:
    """Return one Markdown row a cause: of the faults that the verdict missed, and of those that it
    found, how many a reader named, or would have looked at first; below, names of innocents.
    """
    judged = {(one.ground, one.name): one for one in outcomes}
    told: Counter[tuple[str, str, str]] = Counter()
    accused, asked = Counter[str](), Counter[str]()
    for answer in answers:
        ground, name, kind = key[answer.job]
        outcome = judged[ground, name]
        asked[kind] += 1
        accused[kind] += any(ranks - outcome.at_fault for ranks in answer.names)
        for fault in outcome.due:
            ours = "found" if outcome.finding_of(fault) else "missed"
            told[ours, fault.cause, answer.of(fault, outcome.at_fault)] += 1
    words = ("named", "guessed", "not told")
    rows = [f"| by the verdict | cause | {' | '.join(words)} |", "|---|---|---|---|---|"]
    for ours, cause in sorted({(ours, cause) for ours, cause, _ in told}, reverse=True):
        counts = " | ".join(str(told[ours, cause, word]) for word in words)
        rows.append(f"| {ours} | {cause} | {counts} |")
    wrong = ", ".join(f"{accused[kind]} of {asked[kind]} {kind}" for kind in KINDS if asked[kind])
    return "\n".join([*rows, "", f"Jobs in which a reader named an innocent rank: {wrong}."])


def main() -> int:
    """Write the jobs, or count the answers."""
    arguments = _parser().parse_args()
    if not arguments.keep.exists():
        raise InputError(f"{arguments.keep}: no such file; write it by benchmarks.grounds --keep")
    outcomes = outcomes_in(arguments.keep)
    if arguments.score:
        key = orjson.loads((arguments.into / "key.json").read_bytes())
        answers = [answer for path in arguments.score for answer in answers_in(path)]
        print(table_of_answers(outcomes, key, answers))
        return 0
    if arguments.into.exists():
        raise UsageError(f"{arguments.into} exists: name a new folder")
    counts = {kind: getattr(arguments, kind) for kind in KINDS}
    write_jobs(drawn(outcomes, counts, arguments.seed), arguments.draw, arguments.into)
    print(f"{sum(counts.values())} jobs in {arguments.into / 'jobs'}; do not look at key.json")
    return 0


if __name__ == "__main__":
    sys.exit(report_errors(main))
