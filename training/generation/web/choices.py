"""The choices of one response while they grow, and the response that they make."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request as WebRequest
from starlette.responses import Response

from training.data.tokenizers import Tokenizer
from training.generation.detokenizing import TextStream
from training.generation.request import Answer, FinishReason, Request, TokenScore
from training.generation.service import Submission
from training.generation.web.asking import Model, Wish, submit
from training.generation.web.responses import EventStream, json_response, respond_while_connected


@dataclass
class Choice:
    """One row as a client sees it."""

    index: int
    prompt: tuple[int, ...]
    stop_ids: tuple[int, ...]
    text: TextStream
    prompt_scores: list[TokenScore] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    """Of the generated tokens, the one that ends the row included."""
    pieces: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def take(self, answer: Answer) -> tuple[str, Sequence[TokenScore]]:
        """Take one answer; gives the text and the tokens that are new."""
        self.prompt_scores += answer.prompt_scores
        piece = ""
        new: tuple[TokenScore, ...] = ()
        token = answer.token
        if token is not None:
            self.scores.append(token)
            if token.token not in self.stop_ids:
                piece = self.text.add(token.token)
                new = (token,)
        self.finish_reason = answer.finish_reason
        if self.text.is_stopped:
            self.finish_reason = FinishReason.STOP
        elif self.finish_reason is not None:
            piece += self.text.finish()
            # The end may bring a stop string that was held back.
            if self.text.is_stopped:
                self.finish_reason = FinishReason.STOP
        self.pieces.append(piece)
        return piece, new

    @property
    def shown(self) -> list[TokenScore]:
        """Return the generated tokens whose text is shown: without the one that ends the row."""
        return [score for score in self.scores if score.token not in self.stop_ids]


@dataclass(frozen=True, kw_only=True)
class Change:
    """What one answer has changed in one choice."""

    choice: Choice
    piece: str
    tokens: Sequence[TokenScore]
    prompt_scores: Sequence[TokenScore]
    is_first: bool


def choices_of(
    requests: Sequence[Request], tokenizer: Tokenizer, stops: Sequence[str]
) -> list[Choice]:
    """Return a choice for each row, nothing generated yet."""
    return [
        Choice(
            index=index,
            prompt=request.prompt,
            stop_ids=request.stop_ids,
            text=TextStream(tokenizer, stops=stops, before=request.prompt),
        )
        for index, request in enumerate(requests)
    ]


async def follow(submission: Submission, choices: Sequence[Choice]) -> AsyncIterator[Change]:
    """Yield what changes until all choices are complete; one with its stop string is cut short."""
    async for index, answer in submission.answers():
        choice = choices[index]
        is_first = not choice.scores and not choice.prompt_scores
        piece, tokens = choice.take(answer)
        if choice.finish_reason is not None:
            submission.cancel(index)
        yield Change(
            choice=choice,
            piece=piece,
            tokens=tokens,
            prompt_scores=answer.prompt_scores,
            is_first=is_first,
        )


def usage_of(choices: Sequence[Choice], num_choices: int) -> dict[str, int]:
    """Return tokens read and generated; a prompt counts once for all its choices."""
    read = sum(len(choice.prompt) for choice in choices[::num_choices])
    generated = sum(len(choice.scores) for choice in choices)
    return {
        "prompt_tokens": read,
        "completion_tokens": generated,
        "total_tokens": read + generated,
    }


async def respond(
    request: WebRequest,
    model: Model,
    requests: Sequence[Request],
    wish: Wish,
    *,
    head: dict[str, object],
    whole: Callable[[Choice], dict[str, object]],
    events: Callable[[list[Choice], AsyncIterator[Change]], AsyncIterator[object]],
) -> Response:
    """Submit the rows of a request and answer as it wishes: at once, or in events as text comes.

    At once the answer is `head`, then each choice as `whole` tells it, then the usage.
    """
    submission = submit(model, requests)
    choices = choices_of(requests, model.tokenizer, wish.stops)
    if wish.streams:
        return EventStream(events(choices, follow(submission, choices)), submission.close)

    async def work() -> Response:
        async for _ in follow(submission, choices):
            pass
        return json_response(
            head
            | {
                "choices": [whole(choice) for choice in choices],
                "usage": usage_of(choices, wish.num_choices),
            }
        )

    return await respond_while_connected(request, work(), submission.close)
