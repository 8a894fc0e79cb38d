"""Generating text: this project's engine beside Hugging Face's `generate` and Megatron-Core's own.

    python -m benchmarks.generation [--device cpu|gpu] [--size small|large] [-o RESULT.md]

A model of the Llama family with random weights is written as a Hugging Face folder. Workers,
each a process of its own, read it and generate greedily for batches of 1, 8 and 32 prompts:

- this project's engine, as `training.serve` runs it, and on GPUs (`ours-eager`) without recording
  CUDA graphs;
- `transformers`, `model.generate` with its default cache and attention;
- Megatron-Core's static engine, as its text generation server runs it.

Each worker first generates once per batch without being timed. Then the workers take turns, so that
a machine that others use disturbs all alike; the median over the rounds is reported. A first token
takes as long as a whole generation of one token, a next one the rest of a long generation divided
by its tokens. In float32 all must give the same tokens; in bfloat16 rounding has them part, and
`benchmarks.generation_agreement` judges whether it was that. On the CPU each has one thread (or as
many as OMP_NUM_THREADS says), and the seconds of the processor are given as well, which other jobs
on the machine disturb less; what a server does under load is measured by `benchmarks.serving`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.generation_agreement import (
    EXPLANATION,
    HEAD,
    Rows,
    comparisons,
    judge,
    line_of,
    partings,
)
from benchmarks.jobs import environment_line, publish

WORKERS = ("ours", "ours-eager", "transformers", "megatron-core")
BATCHES = (1, 8, 32)


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model and what it generates."""

    config: dict[str, int]
    num_prompt_tokens: int
    num_new_tokens: int
    num_rounds: int


SIZES = {
    "small": Size(
        config={
            "hidden_size": 384,
            "intermediate_size": 1024,
            "num_hidden_layers": 6,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "vocab_size": 8000,
            "max_position_embeddings": 512,
        },
        num_prompt_tokens=64,
        num_new_tokens=33,
        num_rounds=5,
    ),
    "large": Size(
        config={
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 2048,
        },
        num_prompt_tokens=512,
        num_new_tokens=129,
        num_rounds=5,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One batch of one worker in one round."""

    first_token_s: float
    first_token_cpu_s: float
    total_s: float
    total_cpu_s: float
    tokens: list[list[int]]


class Worker:
    """A process that generates when it is told to."""

    def __init__(self, name: str, folder: Path, device: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.generation_worker", name, str(folder), device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Timed:
        """Generate `num_tokens` for each prompt, and before that one."""
        assert self._process.stdin is not None and self._process.stdout is not None
        order = json.dumps({"prompts": prompts, "num_tokens": num_tokens})
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                return Timed(**json.loads(line))
        raise SystemExit(f"the worker {self.name} has ended; see what it wrote")

    def close(self) -> None:
        """Let the process end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> int:
    """Measure and write the table; exit 1 when tokens differ that rounding does not explain."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="left out: bfloat16 on a GPU only"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--workers", nargs="+", choices=WORKERS, help="left out: all")
    parser.add_argument("--rounds", type=int, metavar="N", help="timed rounds of each batch")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    dtype = given.dtype or ("float32" if given.device == "cpu" else "bfloat16")
    size = SIZES[given.size]
    if given.rounds is not None:
        size = replace(size, num_rounds=given.rounds)
    with TemporaryDirectory() as name:
        folder = Path(name)
        make = [sys.executable, "-m", "benchmarks.generation_worker", "make", name, given.device]
        subprocess.run([*make, json.dumps(size.config), dtype], check=True)
        with ExitStack() as stack:
            workers = [
                Worker(worker, folder, given.device)
                for worker in given.workers or WORKERS
                if given.device == "gpu" or worker != "ours-eager"
            ]
            for worker in workers:
                stack.callback(worker.close)
            rows: list[str] = []
            answers: dict[tuple[int, str], Rows] = {}
            for batch in given.batches:
                for worker, timed in zip(workers, measure(workers, size, batch), strict=True):
                    rows.append(row(worker.name, batch, size, timed))
                    answers[batch, worker.name] = timed[0].tokens
        agreement, is_explained = agree(answers, size, folder, given.device)
    publish(page(given.device, given.size, size, dtype, [*rows, "", *agreement]), given.output)
    return 0 if is_explained else 1


def prompts_of(size: Size, batch: int) -> Rows:
    """Return prompts for a batch; those of a smaller one come first in a larger one."""
    vocabulary = size.config["vocab_size"]
    return [
        [(row * 7919 + place * 104729 + 11) % vocabulary for place in range(size.num_prompt_tokens)]
        for row in range(batch)
    ]


def measure(workers: Sequence[Worker], size: Size, batch: int) -> list[list[Timed]]:
    """Return what each worker does with a batch, round by round."""
    prompts = prompts_of(size, batch)
    for worker in workers:
        worker.generate(prompts, size.num_new_tokens)
    rounds = [
        [worker.generate(prompts, size.num_new_tokens) for worker in workers]
        for _ in range(size.num_rounds)
    ]
    return [list(timed) for timed in zip(*rounds, strict=True)]


def row(name: str, batch: int, size: Size, timed: Sequence[Timed]) -> str:
    """Return the line of the table for one worker and batch: medians over the rounds."""
    first = statistics.median(one.first_token_s for one in timed)
    first_cpu = statistics.median(one.first_token_cpu_s for one in timed)
    total = statistics.median(one.total_s for one in timed)
    following, following_cpu = (
        statistics.median(values) / (size.num_new_tokens - 1)
        for values in (
            [one.total_s - one.first_token_s for one in timed],
            [one.total_cpu_s - one.first_token_cpu_s for one in timed],
        )
    )
    line = (
        f"| {batch} | {name} | {1e3 * first:.1f} | {1e3 * following:.2f} "
        f"| {batch * size.num_new_tokens / total:.0f} "
        f"| {1e3 * first_cpu:.1f} | {1e3 * following_cpu:.2f} |"
    )
    print(line, file=sys.stderr, flush=True)
    return line


def agree(
    answers: Mapping[tuple[int, str], Rows], size: Size, folder: Path, device: str
) -> tuple[list[str], bool]:
    """Say how far the workers gave the same tokens, and whether rounding explains the rest."""
    names = {name for _, name in answers}
    reference = "transformers" if "transformers" in names else min(names)
    compared = comparisons(answers, reference)
    prompts = prompts_of(size, max(batch for batch, _ in answers))
    found = [partings(one, prompts) for one in compared]
    if not any(found):
        return ["All gave the same tokens."], True
    judged = iter(judge(folder, device, [one for each in found for one in each]))
    lines, is_explained = [HEAD], True
    for one, places in zip(compared, found, strict=True):
        own = list(islice(judged, len(places)))
        lines.append(line_of(one, places, own))
        is_explained = is_explained and all(what.is_rounding for what in own)
    return [EXPLANATION.format(reference=reference), "", *lines], is_explained


def page(device: str, name: str, size: Size, dtype: str, lines: Sequence[str]) -> str:
    """The result as a page."""
    config = size.config
    return "\n".join(
        [
            f"# Generating text, {device.upper()}",
            "",
            environment_line(device),
            "",
            f"Model `{name}`: {config['num_hidden_layers']} layers of {config['hidden_size']}, "
            f"{config['num_attention_heads']} heads, {config['num_key_value_heads']} groups, "
            f"vocabulary {config['vocab_size']}, {dtype}. "
            f"Prompts of {size.num_prompt_tokens} tokens, {size.num_new_tokens} new ones, greedy; "
            f"median of {size.num_rounds} rounds in turns.",
            "",
            "| batch | engine | first token (ms) | each next token (ms) | tokens/s "
            "| first, of the processor (ms) | next, of the processor (ms) |",
            "|---|---|---|---|---|---|---|",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
