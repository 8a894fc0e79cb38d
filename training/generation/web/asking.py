"""From the connection to rows for the engine: what completions and chat have in common."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from starlette.requests import ClientDisconnect
from starlette.requests import Request as WebRequest

from megascan.errors import InputError
from megascan.listening import PATIENCE_S
from training.data.tokenizers import Tokenizer
from training.generation.request import Limits, Request, Sampling
from training.generation.service import BusyError, EndedError, Service, Submission
from training.generation.web.chat_template import ChatTemplate
from training.generation.web.fields import Fields
from training.generation.web.responses import RequestError

MOST_BYTES = 8 * 1024 * 1024
"""Of a request's body."""
# Above this, coding a text takes long enough to be felt by others on the event loop.
_QUICK_CHARACTERS = 4096
MOST_CHOICES = 128
"""Choices of one request, over all its prompts."""
_MOST_STOPS = 16
_LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Model:
    """What the endpoints know of the model that is served."""

    name: str
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]
    """Tokens that end an answer."""
    limits: Limits
    service: Service
    template: ChatTemplate | None = None
    """Of the tokenizer; without one there is no chat."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """The fields that both endpoints share."""

    sampling: Sampling
    num_choices: int
    stops: tuple[str, ...]
    streams: bool
    includes_usage: bool


async def read_fields(request: WebRequest) -> Fields:
    """Read the body of a request; RequestError when it is too large, too slow or no JSON object."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for part in request.stream():
                size += len(part)
                if size > MOST_BYTES:
                    raise RequestError(
                        f"the body is larger than {MOST_BYTES} bytes; send less", status=413
                    )
                parts.append(part)
    except TimeoutError:
        raise RequestError(
            f"the body did not arrive within {PATIENCE_S:.0f} s; send it at once", status=408
        ) from None
    except ClientDisconnect:
        raise RequestError("the body ended early; send all of it") from None
    return Fields.from_body(b"".join(parts))


def read_wish(fields: Fields, model: Model) -> Wish:
    """Read the shared fields; RequestError for the first that is out of range."""
    asked_for = fields.text("model", model.name)
    if asked_for != model.name:
        raise RequestError(
            f"the model {asked_for[:64]!r} is not here; this server has {model.name!r}",
            status=404,
            param="model",
            code="model_not_found",
        )
    sampling = Sampling(
        temperature=fields.number("temperature", 1.0, low=0.0, high=100.0),
        top_k=fields.integer("top_k", 0, low=0, high=1_000_000),
        top_p=fields.number("top_p", 1.0, low=0.0, high=1.0),
        presence_penalty=fields.number("presence_penalty", 0.0, low=-2.0, high=2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, low=-2.0, high=2.0),
        seed=fields.integer("seed", secrets.randbits(62), low=0, high=_LARGEST_SEED),
    )
    streams = fields.switch("stream")
    options = fields.inner("stream_options")
    includes_usage = options.switch("include_usage")
    options.finish()
    fields.text("user", "")  # names the client's own user: nothing to be done
    fields.without_effect("logit_bias", {})
    return Wish(
        sampling=sampling,
        num_choices=fields.integer("n", 1, low=1, high=MOST_CHOICES),
        stops=fields.strings("stop", most=_MOST_STOPS),
        streams=streams,
        includes_usage=streams and includes_usage,
    )


async def tokens_of(prompt: str | Sequence[int], model: Model) -> tuple[int, ...]:
    """Return the token ids of a prompt; RequestError when it cannot be coded."""
    if isinstance(prompt, str):
        try:
            if len(prompt) <= _QUICK_CHARACTERS:
                return tuple(model.tokenizer.tokenize(prompt))
            return tuple(await asyncio.to_thread(model.tokenizer.tokenize, prompt))
        except InputError as error:
            raise RequestError(f"prompt cannot be coded: {error}", param="prompt") from error
    largest = model.tokenizer.vocab_size - 1
    wrong = next((token for token in prompt if not 0 <= token <= largest), None)
    if wrong is not None:
        raise RequestError(
            f"prompt has the token id {wrong}, but ids go from 0 to {largest}", param="prompt"
        )
    return tuple(prompt)


def rows_of(
    prompt: tuple[int, ...],
    wish: Wish,
    model: Model,
    *,
    max_tokens: int | None,
    num_logprobs: int | None = None,
    scores_prompt: bool = False,
    param: str = "prompt",
) -> list[Request]:
    """Return the rows that one prompt asks for; without `max_tokens` up to the longest possible.

    Raises RequestError for a prompt that does not fit.
    """
    longest = model.limits.max_length
    if not prompt:
        raise RequestError(f"{param} has no tokens; send one at least", param=param)
    room = longest - len(prompt)
    if room < (1 if max_tokens is None else max_tokens):
        wanted = "" if max_tokens is None else f" and max_tokens {max_tokens}"
        raise RequestError(
            f"{param} has {len(prompt)} tokens{wanted}, but rows of this server have at most "
            f"{longest}; send less",
            param=param,
            code="context_length_exceeded",
        )
    return [
        Request(
            identifier=0,  # the service gives it
            prompt=prompt,
            max_tokens=room if max_tokens is None else max_tokens,
            sampling=choice_sampling(wish.sampling, choice),
            stop_ids=model.stop_ids,
            num_logprobs=num_logprobs,
            scores_prompt=scores_prompt,
        )
        for choice in range(wish.num_choices)
    ]


def choice_sampling(sampling: Sampling, choice: int) -> Sampling:
    """Return the sampling of a choice: the first has the seed, the others seeds made of it."""
    if choice == 0:
        return sampling
    made = np.random.SeedSequence([sampling.seed, choice]).generate_state(1, np.uint64)
    return Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=int(made[0]) >> 1,
    )


def submit(model: Model, requests: Sequence[Request]) -> Submission:
    """Hand rows to the engine; RequestError when it is busy or has ended."""
    try:
        return model.service.submit(requests)
    except BusyError:
        raise RequestError(
            "too many requests wait already; ask again later",
            status=429,
            code="rate_limit_exceeded",
        ) from None
    except EndedError:
        raise RequestError("the server is ending; ask again later", status=503) from None
