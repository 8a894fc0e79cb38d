"""Where two engines of `benchmarks.generation` part, and whether rounding explains it.

    python -m benchmarks.generation_agreement FOLDER cpu|gpu < PARTINGS

In two bytes the logits of a model are so coarse that the best two may change places whenever a
product is computed in another shape: the same engine gives a prompt other tokens in another batch.
From then on two texts have nothing in common, so only the first token that differs tells anything.
There a judge, transformers in float32, computes the logits of both tokens. How far they lie apart
is compared with how far transformers' own logits in two bytes stray from those in float32.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

Rows = list[list[int]]
Answers = Mapping[tuple[int, str], Rows]
"""By batch and engine, the tokens of each row."""

# How many times the typical error of a logit a token may lie below the best and be chosen for
# rounding. The difference of two logits, each of two engines, errs by twice the error of one; four
# times that is beyond what happens by chance in some hundred rows.
_MOST_ERRORS = 8.0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The rows of one engine and batch beside those of the reference."""

    batch: int
    name: str
    rows: Rows
    others: Rows


@dataclass(frozen=True, kw_only=True)
class Parting:
    """The first token of a row that was chosen otherwise."""

    place: int
    """Among the new tokens."""
    prefix: list[int]
    """Prompt and tokens on which both agree."""
    own: int
    other: int


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What the judge finds at one parting."""

    gap: float
    """How far the worse of the two tokens lies below the best logit in float32."""
    error: float
    """Root mean square of what transformers' logits in two bytes stray from float32."""

    @property
    def is_rounding(self) -> bool:
        """Whether errors of rounding explain the choice."""
        return self.gap <= _MOST_ERRORS * self.error


def comparisons(answers: Answers, reference: str) -> list[Comparison]:
    """Return what is compared: engines with the reference, and that with itself in the largest
    batch, whose first prompts the smaller ones have.
    """
    largest = max(batch for batch, _ in answers)
    found = []
    for (batch, engine), rows in answers.items():
        if engine != reference:
            name, others = engine, answers[batch, reference]
        elif batch != largest:
            name, others = f"{engine} in a batch of {largest}", answers[largest, engine][:batch]
        else:
            continue
        found.append(Comparison(batch=batch, name=name, rows=rows, others=others))
    return found


def partings(comparison: Comparison, prompts: Rows) -> list[Parting]:
    """Return the first token that differs of each row that differs."""
    found = []
    for prompt, own, other in zip(prompts, comparison.rows, comparison.others, strict=False):
        pairs = enumerate(zip(own, other, strict=True))
        place = next((at for at, (one, two) in pairs if one != two), None)
        if place is not None:
            prefix = prompt + own[:place]
            found.append(Parting(place=place, prefix=prefix, own=own[place], other=other[place]))
    return found


def judge(folder: Path, device: str, found: Sequence[Parting]) -> list[Judged]:
    """Let a process of its own look at partings."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.generation_agreement", str(folder), device],
        input=json.dumps([asdict(one) for one in found]),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("["))
    return [Judged(**fields) for fields in json.loads(line)]


def line_of(comparison: Comparison, found: Sequence[Parting], judged: Sequence[Judged]) -> str:
    """Return a line of the table `HEAD`."""
    head = f"| {comparison.batch} | {comparison.name} | {len(found)} of {len(comparison.rows)} |"
    if not found:
        return head + " | | |"
    places = sorted(one.place for one in found)
    return head + (
        f" {places[0] + 1}, {places[len(places) // 2] + 1} "
        f"| {max(one.gap for one in judged):.4f} | {max(one.error for one in judged):.4f} |"
    )


EXPLANATION = (
    "Rows are compared with those of {reference} up to the first token that differs. Gap: how far "
    "the worse of the two tokens lies below the best logit in float32; error: root mean square of "
    "what transformers' own logits in bfloat16 stray from float32 there."
)
HEAD = (
    "| batch | compared | rows that differ | from new token, earliest and median "
    "| largest gap | error |\n|---|---|---|---|---|---|"
)


def main() -> int:
    """Read partings from stdin, write what the judge finds."""
    folder, device = sys.argv[1], sys.argv[2]
    import torch
    from transformers import AutoModelForCausalLM

    kind = "cpu" if device == "cpu" else "cuda"
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(kind).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    judged = []
    for fields in json.load(sys.stdin):
        parting = Parting(**fields)
        ids = torch.tensor([parting.prefix], device=kind)
        with torch.inference_mode():
            true, coarse = (
                model(ids, logits_to_keep=1).logits[0, -1].float() for model in (exact, rounded)
            )
        worse = torch.minimum(true[parting.own], true[parting.other])
        error = (coarse - true).square().mean().sqrt()
        what = Judged(gap=float(true.max() - worse), error=float(error))
        judged.append(asdict(what))
    print(json.dumps(judged))
    return 0


if __name__ == "__main__":
    sys.exit(main())
