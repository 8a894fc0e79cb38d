"""``POST /v1/chat/completions``: the assistant's next message, by the tokenizer's chat template."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request as WebRequest
from starlette.responses import Response

from training.data.tokenizers import Tokenizer
from training.generation.detokenizing import token_text
from training.generation.request import Request, TokenScore
from training.generation.web.bodies import (
    ChatTemplate,
    Choice,
    ChoiceChange,
    Fields,
    RequestError,
    ServedModel,
    TemplateError,
    Wish,
    read_fields,
    read_wish,
    respond,
    rows_of,
    usage_of,
)

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MOST_MESSAGES = 10_000
_MOST_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A chat request whose fields were checked."""

    wish: Wish
    requests: tuple[Request, ...]
    has_logprobs: bool
    head: dict[str, object] = field(default_factory=dict)


async def chat(request: WebRequest, model: ServedModel) -> Response:
    """Answer one chat request."""
    asked = await _read(await read_fields(request), model)
    return await respond(
        request,
        model,
        asked.requests,
        asked.wish,
        head=asked.head | {"object": "chat.completion"},
        whole=lambda choice: _whole(asked, model, choice),
        events=lambda choices, changes: _events(asked, model, choices, changes),
    )


async def _read(fields: Fields, model: ServedModel) -> Asked:
    if model.template is None:
        raise RequestError(
            "the tokenizer of this model has no chat template; use /v1/completions", status=404
        )
    wish = read_wish(fields, model)
    has_logprobs = fields.switch("logprobs")
    num_logprobs = fields.integer("top_logprobs", 0, low=0, high=_MOST_LOGPROBS)
    if num_logprobs and not has_logprobs:
        raise fields.wrong("top_logprobs", "needs logprobs true")
    max_tokens = fields.optional_integer("max_tokens", low=1, high=10_000_000)
    newer = fields.optional_integer("max_completion_tokens", low=1, high=10_000_000)
    for name in ("tools", "functions", "modalities", "response_format", "tool_choice"):
        fields.without_effect(name, [], {"type": "text"}, ["text"], "none", "auto")
    messages = _messages(fields.raw("messages"))
    fields.finish()
    prompt = await _tokens_of(model.template, messages)
    requests = rows_of(
        prompt,
        wish,
        model,
        max_tokens=max_tokens if newer is None else newer,
        num_logprobs=min(num_logprobs, model.tokenizer.vocab_size) if has_logprobs else None,
        param="messages",
    )
    head: dict[str, object] = {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": model.name,
    }
    return Asked(wish=wish, requests=tuple(requests), has_logprobs=has_logprobs, head=head)


def _messages(given: object) -> list[dict[str, str]]:
    """Return the messages, each with a role and a text; parts of a text are joined."""
    if not isinstance(given, list) or not 0 < len(given) <= _MOST_MESSAGES:
        raise RequestError(
            f"messages must be an array of 1 to {_MOST_MESSAGES} messages", param="messages"
        )
    return [_message(one, f"messages[{place}]") for place, one in enumerate(given)]


def _message(given: object, place: str) -> dict[str, str]:
    if not isinstance(given, dict):
        raise RequestError(f"{place} must be an object with role and content", param=place)
    fields = Fields(given, place=f"{place}.")
    role = fields.text("role", "")
    if role not in _ROLES:
        raise fields.wrong("role", f"must be one of {', '.join(_ROLES)}")
    name = fields.text("name", "")
    content = _content(fields.raw("content"), place)
    fields.finish()
    return {"role": role, "content": content} | ({"name": name} if name else {})


def _content(given: object, place: str) -> str:
    if isinstance(given, str):
        return given
    if isinstance(given, list) and all(map(_is_text_part, given)):
        return "".join(part["text"] for part in given)
    raise RequestError(
        f"{place}.content must be a string or an array of parts of type text",
        param=f"{place}.content",
    )


def _is_text_part(part: object) -> bool:
    if not isinstance(part, dict):
        return False
    return part.get("type") == "text" and isinstance(part.get("text"), str)


async def _tokens_of(template: ChatTemplate, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
    try:
        return await asyncio.to_thread(template.tokens_of, messages)
    except TemplateError as error:
        raise RequestError(
            f"the model's chat template refuses these messages: {error}", param="messages"
        ) from error


def _whole(asked: Asked, model: ServedModel, choice: Choice) -> dict[str, object]:
    return {
        "index": choice.index,
        "message": {"role": "assistant", "content": "".join(choice.pieces)},
        "logprobs": _logprobs(asked, model.tokenizer, choice.shown),
        "finish_reason": choice.finish_reason,
    }


def _logprobs(
    asked: Asked, tokenizer: Tokenizer, scores: Sequence[TokenScore]
) -> dict[str, object] | None:
    if not asked.has_logprobs:
        return None
    return {
        "content": [
            _named(tokenizer, score.token, score.logprob)
            | {"top_logprobs": [_named(tokenizer, *one) for one in score.alternatives]}
            for score in scores
        ]
    }


def _named(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, object]:
    text = token_text(tokenizer, token)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


async def _events(
    asked: Asked,
    model: ServedModel,
    choices: Sequence[Choice],
    changes: AsyncIterator[ChoiceChange],
) -> AsyncIterator[object]:
    head = asked.head | {"object": "chat.completion.chunk"}
    if asked.wish.includes_usage:
        head["usage"] = None
    for choice in choices:
        yield head | {"choices": [_delta(choice, {"role": "assistant", "content": ""}, None)]}
    async for change in changes:
        choice = change.choice
        logprobs = _logprobs(asked, model.tokenizer, change.tokens)
        has_news = change.piece or (logprobs and change.tokens)
        if has_news:
            delta = {"content": change.piece}
            yield head | {"choices": [_delta(choice, delta, None, logprobs)]}
        if choice.finish_reason is not None:
            yield head | {"choices": [_delta(choice, {}, choice.finish_reason)]}
    if asked.wish.includes_usage:
        usage = usage_of(choices, asked.wish.num_choices)
        yield head | {"choices": [], "usage": usage}


def _delta(
    choice: Choice,
    delta: dict[str, str],
    reason: str | None,
    logprobs: dict[str, object] | None = None,
) -> dict[str, object]:
    return {
        "index": choice.index,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": reason,
    }
