"""Generate text in the terminal, from a checkpoint or a Hugging Face folder.

    python -m training.generate --load CHECKPOINTS --prompt "Once upon a time" --max-tokens 40
    torchrun --nproc-per-node 2 -m training.generate --load CHECKPOINTS
        --tensor-model-parallel-size 2 --prompt "Once upon a time"

The text appears as it is generated. Without --prompt each line that is typed is a prompt; the
command ends with the input (Ctrl-D).
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megascan.errors import ConfigError, InputError, MegaScanError, report_errors
from training.arguments import TrainerParser
from training.distributed import ONLY_RANK, Launch, carry_out, end_on_shared_error, read_launch
from training.generation.detokenizing import TextStream
from training.generation.job import GenerationJob, add_job_arguments, read_job
from training.generation.request import Answer, Request, Sampling

if TYPE_CHECKING:
    from training.generation.engine import Commands


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What to generate, and how."""

    prompt: str | None
    max_tokens: int
    sampling: Sampling
    stops: tuple[str, ...]


def main(arguments: Sequence[str]) -> int:
    """Generate for one prompt, or for each prompt that is typed; return the exit code."""
    launch = ONLY_RANK
    try:
        launch = read_launch(os.environ)
        job, wish = _parse(arguments, launch)
    except MegaScanError as error:
        return end_on_shared_error(launch, error)

    def generate() -> None:
        with job.joined():
            _generate(job, wish)

    return carry_out(launch, generate)


def _parse(arguments: Sequence[str], launch: Launch) -> tuple[GenerationJob, Wish]:
    parser = TrainerParser(
        prog="python -m training.generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_job_arguments(parser)
    group = parser.add_argument_group("text")
    group.add_argument("--prompt", help="what the text goes on from; left out: typed line by line")
    group.add_argument("--max-tokens", type=int, default=64, help="of each answer (default: 64)")
    group.add_argument(
        "--temperature", type=float, default=0.0,
        help="0 takes the likeliest token each time, 1 draws by the model's probabilities "
        "(default: 0)",
    )  # fmt: skip
    group.add_argument("--top-k", type=int, default=0, help="draw among so many tokens; 0: all")
    group.add_argument(
        "--top-p", type=float, default=1.0,
        help="draw among the likeliest tokens that reach this probability (default: 1)",
    )  # fmt: skip
    group.add_argument("--seed", type=int, default=1234, help="of the draws (default: 1234)")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends an answer; repeatable"
    )
    given = parser.parse_args(arguments)
    _check(given)
    wish = Wish(
        prompt=given.prompt,
        max_tokens=given.max_tokens,
        sampling=Sampling(
            temperature=given.temperature, top_k=given.top_k, top_p=given.top_p, seed=given.seed
        ),
        stops=tuple(given.stop),
    )
    return read_job(given, launch), wish


def _check(given: argparse.Namespace) -> None:
    for option, value, low, high in (
        ("--max-tokens", given.max_tokens, 1, 10_000_000),
        ("--temperature", given.temperature, 0, 100),
        ("--top-k", given.top_k, 0, 1_000_000),
        ("--top-p", given.top_p, 0, 1),
        ("--seed", given.seed, 0, 2**63 - 1),
    ):
        if not low <= value <= high:
            raise ConfigError(f"{option} is {value}, but must be from {low} to {high}")
    if not all(given.stop):
        raise ConfigError("--stop is empty, but must be a text")
    for option, texts in (("--prompt", [given.prompt or ""]), ("--stop", given.stop)):
        if any("\ud800" <= letter <= "\udfff" for letter in "".join(texts)):
            raise ConfigError(f"{option} has bytes that are no text here; write it in UTF-8")


def _generate(job: GenerationJob, wish: Wish) -> None:
    with closing(job.build_engine()) as engine:
        if job.launch.rank:
            for _ in engine.run():
                pass
            return
        prompts = _typed() if wish.prompt is None else iter([wish.prompt])
        conversation = Conversation(job, wish, prompts)
        for answers in engine.run(conversation.inbox):
            for answer in answers:
                conversation.take(answer)


class Conversation:
    """Rank 0's side: prompts go to the engine one after the other, answers to the terminal."""

    def __init__(self, job: GenerationJob, wish: Wish, prompts: Iterator[str]) -> None:
        self._job = job
        self._wish = wish
        self._prompts = prompts
        self._stream = TextStream(job.tokenizer)
        self._identifier = 0

    def inbox(self, waits: bool) -> Commands:
        """Return the commands for the engine: the next prompt when the last is answered.

        When the last answer has reached a stop string, also cancel its row.
        """
        from training.generation.engine import NOTHING

        if not waits:
            if self._stream.is_stopped:
                print(flush=True)
                return self._next(cancelled=(self._identifier,))
            return NOTHING
        return self._next()

    def _next(self, cancelled: tuple[int, ...] = ()) -> Commands:
        from training.generation.engine import Commands

        for prompt in self._prompts:
            try:
                request = self._request(prompt)
            except InputError as error:
                if self._wish.prompt is not None:
                    raise
                print(f"error: {error}", file=sys.stderr, flush=True)
                continue
            return Commands(requests=(request,), cancelled=cancelled)
        return Commands(is_last=True)

    def take(self, answer: Answer) -> None:
        """Print the new text of an answer."""
        piece = ""
        if answer.token is not None and answer.token.token not in self._job.stop_ids:
            piece = self._stream.add(answer.token.token)
        is_over = answer.finish_reason is not None
        if is_over:
            piece += self._stream.finish()
        print(piece, end="\n" if is_over else "", flush=True)

    def _request(self, prompt: str) -> Request:
        """Make the request of one prompt; raise InputError when it does not fit."""
        job, wish = self._job, self._wish
        ids = tuple(job.tokenizer.tokenize(prompt))
        longest = job.limits.max_length
        if not 0 < len(ids) < longest:
            raise InputError(
                f"the prompt has {len(ids)} tokens, but must have 1 to {longest - 1} for an answer "
                "to fit behind it"
            )
        self._identifier += 1
        self._stream = TextStream(job.tokenizer, stops=wish.stops, before=ids)
        return Request(
            identifier=self._identifier,
            prompt=ids,
            max_tokens=min(wish.max_tokens, longest - len(ids)),
            sampling=wish.sampling,
            stop_ids=job.stop_ids,
        )


def _typed() -> Iterator[str]:
    """Yield the lines of stdin that are not empty; ask for them on a terminal.

    Bytes that are not valid text become U+FFFD.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


if __name__ == "__main__":
    sys.exit(report_errors(lambda: main(sys.argv[1:])))
