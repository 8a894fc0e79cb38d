"""``POST /v1/completions``: text that goes on from a prompt."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from starlette.requests import Request as WebRequest
from starlette.responses import Response

from training.data.tokenizers import Tokenizer
from training.generation.detokenizing import token_text
from training.generation.request import Request, TokenScore
from training.generation.web.bodies import (
    MOST_CHOICES,
    Choice,
    ChoiceChange,
    Fields,
    RequestError,
    ServedModel,
    Wish,
    read_fields,
    read_wish,
    respond,
    rows_of,
    tokens_of,
    usage_of,
)

_MOST_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A completion request whose fields were checked."""

    wish: Wish
    requests: tuple[Request, ...]
    echoes: bool
    num_logprobs: int | None
    prompt_texts: tuple[str, ...]
    """Text of the prompt, by choice; empty without echo."""
    head: dict[str, object] = field(default_factory=dict)


async def complete(request: WebRequest, model: ServedModel) -> Response:
    """Answer one completion request."""
    asked = await _read(await read_fields(request), model)
    return await respond(
        request,
        model,
        asked.requests,
        asked.wish,
        head=asked.head,
        whole=lambda choice: _whole(asked, model, choice),
        events=lambda choices, changes: _events(asked, model, choices, changes),
    )


async def _read(fields: Fields, model: ServedModel) -> Asked:
    wish = read_wish(fields, model)
    num_logprobs = fields.optional_integer("logprobs", low=0, high=_MOST_LOGPROBS)
    echoes = fields.switch("echo")
    max_tokens = fields.integer("max_tokens", 16, low=0, high=10_000_000)
    fields.without_effect("suffix", "")
    fields.without_effect("best_of", wish.num_choices)
    prompts = fields.raw("prompt")
    fields.finish()
    if max_tokens == 0 and not echoes:
        raise RequestError("max_tokens is 0 without echo: nothing is asked for", param="max_tokens")
    if num_logprobs is not None:
        num_logprobs = min(num_logprobs, model.tokenizer.vocab_size)
    listed = _prompts(prompts)
    if len(listed) * wish.num_choices > MOST_CHOICES:
        raise RequestError(
            f"prompt has {len(listed)} prompts of n {wish.num_choices} choices, but at most "
            f"{MOST_CHOICES} choices are taken",
            param="prompt",
        )
    requests: list[Request] = []
    texts: list[str] = []
    for prompt in listed:
        ids = await tokens_of(prompt, model)
        requests += rows_of(
            ids,
            wish,
            model,
            max_tokens=max_tokens,
            num_logprobs=num_logprobs,
            scores_prompt=echoes and num_logprobs is not None,
        )
        if echoes:
            text = prompt if isinstance(prompt, str) else model.tokenizer.detokenize(ids)
            texts += [text] * wish.num_choices
    head: dict[str, object] = {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model.name,
    }
    return Asked(
        wish=wish,
        requests=tuple(requests),
        echoes=echoes,
        num_logprobs=num_logprobs,
        prompt_texts=tuple(texts),
        head=head,
    )


def _prompts(given: object) -> list[str | list[int]]:
    """Return a list of prompts from one text, several texts, one list of token ids, or several."""
    wrong = RequestError(
        "prompt must be a string, an array of strings, an array of token ids or an array of those, "
        "none of them empty",
        param="prompt",
    )
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list) or not given:
        raise wrong
    if all(type(one) is int for one in given):
        given = [given]
    for one in given:
        is_ids = isinstance(one, list) and one and all(type(token) is int for token in one)
        if not is_ids and not (isinstance(one, str) and one):
            raise wrong
    return cast(list[str | list[int]], given)


def _whole(asked: Asked, model: ServedModel, choice: Choice) -> dict[str, object]:
    prompt_text = asked.prompt_texts[choice.index] if asked.echoes else ""
    logprobs = None
    if asked.num_logprobs is not None:
        before = _prompt_scores(choice) if asked.echoes else []
        logprobs = Listing(model.tokenizer).add([*before, *choice.shown], asked.num_logprobs)
    return {
        "index": choice.index,
        "text": prompt_text + "".join(choice.pieces),
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
    }


def _prompt_scores(choice: Choice) -> list[TokenScore]:
    """Return the scores of the prompt's tokens; the first token has no log probability."""
    return [TokenScore(token=choice.prompt[0], logprob=None), *choice.prompt_scores]


class Listing:
    """Log probabilities as OpenAI's completions list them; offsets go on over parts of a stream."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def add(self, scores: Sequence[TokenScore], num_alternatives: int) -> dict[str, object]:
        """Return the entry for the next tokens."""
        names = [token_text(self._tokenizer, score.token) for score in scores]
        offsets = []
        for name in names:
            offsets.append(self._offset)
            self._offset += len(name)
        return {
            "tokens": names,
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": [self._alternatives(score) for score in scores]
            if num_alternatives
            else None,
            "text_offset": offsets,
        }

    def _alternatives(self, score: TokenScore) -> dict[str, float] | None:
        if score.logprob is None:
            return None
        listed = [
            (token_text(self._tokenizer, token), value) for token, value in score.alternatives
        ]
        # Two tokens may have the same text: the likelier one keeps the name.
        return dict(reversed(listed))


async def _events(
    asked: Asked,
    model: ServedModel,
    choices: Sequence[Choice],
    changes: AsyncIterator[ChoiceChange],
) -> AsyncIterator[object]:
    listings = [Listing(model.tokenizer) for _ in choices]
    no_usage = {"usage": None} if asked.wish.includes_usage else {}
    async for change in changes:
        part = _part(asked, change, listings[change.choice.index])
        if part is not None:
            yield asked.head | {"choices": [part]} | no_usage
    if asked.wish.includes_usage:
        usage = usage_of(choices, asked.wish.num_choices)
        yield asked.head | {"choices": [], "usage": usage}


def _part(asked: Asked, change: ChoiceChange, listing: Listing) -> dict[str, object] | None:
    """Return one event's choice; None when there is nothing to say yet."""
    choice, text = change.choice, change.piece
    scores = [*change.tokens]
    if asked.echoes:
        scores = [*change.prompt_scores, *scores]
        if change.is_first:
            text = asked.prompt_texts[choice.index] + text
            scores = [TokenScore(token=choice.prompt[0], logprob=None), *scores]
    if asked.num_logprobs is None:
        scores = []
    if not text and not scores and choice.finish_reason is None:
        return None
    has_scores = asked.num_logprobs is not None
    return {
        "index": choice.index,
        "text": text,
        "logprobs": listing.add(scores, asked.num_logprobs or 0) if has_scores else None,
        "finish_reason": choice.finish_reason,
    }
