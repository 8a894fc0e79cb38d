"""Bodies of requests and responses: what completions and chat have in common.

In: a request's body, whose fields are checked one by one (`Fields`), becomes rows for the engine.
Chats become prompts by the template in a tokenizer's files (`ChatTemplate`).

Out: the choices of one response while they grow (`Choice`), sent as JSON, as a stream of events, or
as an error in OpenAI's shape. A response is made only while the client is connected. When the
client closes the connection, the work and its rows are cancelled.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn, TypeVar

import jinja2
import numpy as np
import orjson
from jinja2.sandbox import ImmutableSandboxedEnvironment
from starlette.requests import ClientDisconnect
from starlette.requests import Request as WebRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from megascan.errors import InputError
from megascan.listening import PATIENCE_S
from training.data.tokenizers import SubwordTokenizer, Tokenizer
from training.generation.detokenizing import TextStream
from training.generation.request import Answer, FinishReason, Limits, Request, Sampling, TokenScore
from training.generation.service import BusyError, EndedError, Service, Submission

Made = TypeVar("Made")


def json_response(
    content: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a response whose body is `content` as JSON."""
    return Response(
        orjson.dumps(content),
        status_code=status,
        headers=dict(headers or {}),
        media_type="application/json",
    )


class RequestError(Exception):
    """One sentence for a client, with the status of the response."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, object]:
        """Return the error as OpenAI's clients read it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """Return the error as a response."""
        headers = {"retry-after": "1"} if self.status == 429 else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return json_response(self.body(), status=self.status, headers=headers)


_ENDED = RequestError("the server has ended; ask again later", status=503)


class GoneError(Exception):
    """The client has closed its connection."""


async def while_connected(receive: Receive, work: Awaitable[Made]) -> Made:
    """Await `work` as long as the client is there; raise GoneError when it leaves."""
    working = asyncio.ensure_future(work)
    listening = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, listening), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise GoneError
        return working.result()
    finally:
        for task in (working, listening):
            task.cancel()
        await asyncio.gather(working, listening, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, one JSON object each, closed by ``[DONE]`` as OpenAI's clients expect."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[object], close: Callable[[], None]) -> None:
        """Hold the events to stream; `close` is called at the end in any case."""
        super().__init__()
        self._events = events
        self._close = close
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-store"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the last one or until the client leaves."""
        del scope
        try:
            with suppress(GoneError, OSError):
                await while_connected(receive, self._send_all(send))
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await _send_part(send, b"data: " + orjson.dumps(event) + b"\n\n")
        except EndedError:
            await _send_part(send, b"data: " + orjson.dumps(_ENDED.body()) + b"\n\n")
        else:
            await _send_part(send, b"data: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_part(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})


async def respond_while_connected(
    request: WebRequest, work: Awaitable[Response], close: Callable[[], None]
) -> Response:
    """Return the response that `work` makes; call `close` at the end in any case."""
    try:
        return await while_connected(request.receive, work)
    except GoneError:
        return Response(status_code=499)  # nobody reads it
    finally:
        close()


Kind = TypeVar("Kind")

_NAMES = {str: "a string", bool: "true or false", dict: "an object", list: "an array"}


class Fields:
    """A JSON object that is read field by field; `finish` refuses fields that were not read.

    A field that is null counts as left out, as OpenAI's clients mean it.
    """

    def __init__(self, values: Mapping[str, object], place: str = "") -> None:
        self._values = values
        self._place = place
        self._asked: set[str] = set()

    @classmethod
    def from_body(cls, body: bytes) -> Fields:
        """Read a body; RequestError when it is no JSON object."""
        try:
            values = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise RequestError(f"the body is not JSON ({error}); send a JSON object") from error
        if not isinstance(values, dict):
            raise RequestError(f"the body is {_kind_of(values)}; send a JSON object")
        return cls(values)

    def raw(self, name: str) -> object:
        """Return the unchecked value of a field; None when it is left out."""
        self._asked.add(name)
        return self._values.get(name)

    def integer(self, name: str, default: int, *, low: int, high: int) -> int:
        """Read a whole number from `low` to `high`."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(name, f"is {_shown(value)}, but must be a whole number")
        if not low <= value <= high:
            raise self.wrong(name, f"is {value}, but must be from {low} to {high}")
        return value

    def optional_integer(self, name: str, *, low: int, high: int) -> int | None:
        """Read a whole number, or None when it is left out."""
        return None if self.raw(name) is None else self.integer(name, low, low=low, high=high)

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        """Read a number from `low` to `high`."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, f"is {_shown(value)}, but must be a number")
        if not low <= value <= high:
            raise self.wrong(name, f"is {value}, but must be from {low} to {high}")
        return float(value)

    def switch(self, name: str, default: bool = False) -> bool:
        """Read true or false."""
        return self._typed(name, bool, default)

    def text(self, name: str, default: str) -> str:
        """Read a string."""
        return self._typed(name, str, default)

    def strings(self, name: str, *, most: int) -> tuple[str, ...]:
        """Read one string or an array of up to `most`, none of them empty."""
        value = self.raw(name)
        if value is None:
            return ()
        given = [value] if isinstance(value, str) else value
        if not isinstance(given, list) or not all(isinstance(one, str) and one for one in given):
            raise self.wrong(name, "must be a string or an array of strings, none of them empty")
        if len(given) > most:
            raise self.wrong(name, f"has {len(given)} strings, but at most {most} are taken")
        return tuple(given)

    def inner(self, name: str) -> Fields:
        """Read a field that is an object, as `Fields`; empty when it is left out."""
        value: dict[str, object] = self._typed(name, dict, {})
        return Fields(value, place=f"{self._place}{name}.")

    def without_effect(self, name: str, *values: object) -> None:
        """Refuse a field unless it is left out or has one of `values`, which ask for nothing."""
        value = self.raw(name)
        if value is not None and value not in values:
            raise self.wrong(name, "is not supported by this server; leave it out")

    def finish(self) -> None:
        """Refuse fields that were not read: they would be ignored silently."""
        unknown = sorted(set(self._values) - self._asked)
        if unknown:
            raise self.wrong(unknown[0][:64], "is not known to this server; leave it out")

    def wrong(self, name: str, reason: str) -> RequestError:
        """Return an error about a field."""
        named = self._place + name
        return RequestError(f"{named} {reason}", param=named)

    def _typed(self, name: str, kind: type[Kind], default: Kind) -> Kind:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise self.wrong(name, f"is {_shown(value)}, but must be {_NAMES[kind]}")
        return value


def _kind_of(value: object) -> str:
    if value is None:
        return "null"
    return next((name for kind, name in _NAMES.items() if isinstance(value, kind)), "a number")


def _shown(value: object) -> str:
    """Return a value for a message: the value when it is short, else its kind."""
    if isinstance(value, int | float):
        return orjson.dumps(value).decode() if isinstance(value, bool) else str(value)
    return repr(value) if isinstance(value, str) and len(value) <= 40 else _kind_of(value)


MOST_BYTES = 8 * 1024 * 1024
"""Largest body of a request."""
# Tokenizing a longer text would hold up other requests on the event loop.
_QUICK_CHARACTERS = 4096
MOST_CHOICES = 128
"""Most choices of one request, over all its prompts."""
_MOST_STOPS = 16
_LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What the endpoints know of the model that is served."""

    name: str
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]
    """Tokens that end an answer."""
    limits: Limits
    service: Service
    template: ChatTemplate | None = None
    """The tokenizer's chat template; None: there is no chat."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """The fields that completions and chat share."""

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


def read_wish(fields: Fields, model: ServedModel) -> Wish:
    """Read the fields that completions and chat share; RequestError for the first bad one."""
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
    fields.text("user", "")  # names the client's own user: read and ignored
    fields.without_effect("logit_bias", {})
    return Wish(
        sampling=sampling,
        num_choices=fields.integer("n", 1, low=1, high=MOST_CHOICES),
        stops=fields.strings("stop", most=_MOST_STOPS),
        streams=streams,
        includes_usage=streams and includes_usage,
    )


async def tokens_of(prompt: str | Sequence[int], model: ServedModel) -> tuple[int, ...]:
    """Return the token ids of a prompt; RequestError when it cannot be tokenized."""
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
    model: ServedModel,
    *,
    max_tokens: int | None,
    num_logprobs: int | None = None,
    scores_prompt: bool = False,
    param: str = "prompt",
) -> list[Request]:
    """Return one row for each choice of a prompt; without `max_tokens` a row may fill all room.

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
            identifier=0,  # the service sets it
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
    """Return the sampling of a choice: choice 0 has the given seed, others have derived seeds."""
    if choice == 0:
        return sampling
    made = np.random.SeedSequence([sampling.seed, choice]).generate_state(1, np.uint64)
    return replace(sampling, seed=int(made[0]) >> 1)


def submit(model: ServedModel, requests: Sequence[Request]) -> Submission:
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


_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class TemplateError(Exception):
    """A chat template refuses a chat; the message is the template's."""


class ChatTemplate:
    """A tokenizer's Jinja template, run in a sandbox because its file is not ours."""

    def __init__(self, source: str, tokens: Mapping[str, str], tokenizer: SubwordTokenizer) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self._template = environment.from_string(source)
        self._tokens = dict(tokens)
        self._tokenizer = tokenizer

    def tokens_of(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Return the tokens of a chat, up to where the assistant's answer begins.

        Raises TemplateError when the template does not take these messages.
        """
        return tuple(self._tokenizer.tokenize_plainly(self._render(messages)))

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=True, **self._tokens
            )
        except (
            jinja2.TemplateError, TypeError, ValueError, ArithmeticError, AttributeError,
            LookupError, RecursionError,
        ) as error:  # fmt: skip
            raise TemplateError(str(error) or type(error).__name__) from error


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def read_chat_template(folder: Path, tokenizer: SubwordTokenizer) -> ChatTemplate | None:
    """Return the chat template in a tokenizer's folder; None when there is none.

    Raises InputError when the folder's files or the template are damaged.
    """
    config_file, own_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
        source = own_file.read_text(encoding="utf-8") if own_file.is_file() else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the tokenizer's {config_file} ({error}); mend it") from error
    if not isinstance(config, dict):
        raise InputError(f"{config_file} is not a table of settings; mend it")
    source = source or _source(config.get("chat_template"))
    if source is None:
        return None
    tokens = {name: _text(config.get(name)) for name in _TOKENS}
    try:
        return ChatTemplate(source, tokens, tokenizer)
    except jinja2.TemplateError as error:
        raise InputError(f"the chat template in {folder} is damaged ({error}); mend it") from error


def _source(declared: object) -> str | None:
    """Return the text of the declared template; where several are named, ``default``."""
    if isinstance(declared, list):
        named = {one.get("name"): one.get("template") for one in declared if isinstance(one, dict)}
        declared = named.get("default")
    return declared if isinstance(declared, str) else None


def _text(token: object) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


@dataclass
class Choice:
    """One row as a client sees it."""

    index: int
    prompt: tuple[int, ...]
    stop_ids: tuple[int, ...]
    text: TextStream
    prompt_scores: list[TokenScore] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    """Scores of the generated tokens, including a token that ends the row."""
    pieces: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def take(self, answer: Answer) -> tuple[str, Sequence[TokenScore]]:
        """Take one answer; return the new text and the new tokens."""
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
        """Return the generated tokens whose text is shown: all but a token that ends the row."""
        return [score for score in self.scores if score.token not in self.stop_ids]


@dataclass(frozen=True, kw_only=True)
class ChoiceChange:
    """What one answer of the engine has changed in one choice."""

    choice: Choice
    piece: str
    tokens: Sequence[TokenScore]
    prompt_scores: Sequence[TokenScore]
    is_first: bool


def choices_of(
    requests: Sequence[Request], tokenizer: Tokenizer, stops: Sequence[str]
) -> list[Choice]:
    """Return an empty choice for each row."""
    return [
        Choice(
            index=index,
            prompt=request.prompt,
            stop_ids=request.stop_ids,
            text=TextStream(tokenizer, stops=stops, before=request.prompt),
        )
        for index, request in enumerate(requests)
    ]


async def follow(submission: Submission, choices: Sequence[Choice]) -> AsyncIterator[ChoiceChange]:
    """Yield changes until all choices are complete; cancel the row of a choice that is complete."""
    async for index, answer in submission.answers():
        choice = choices[index]
        is_first = not choice.scores and not choice.prompt_scores
        piece, tokens = choice.take(answer)
        if choice.finish_reason is not None:
            submission.cancel(index)
        yield ChoiceChange(
            choice=choice,
            piece=piece,
            tokens=tokens,
            prompt_scores=answer.prompt_scores,
            is_first=is_first,
        )


def usage_of(choices: Sequence[Choice], num_choices: int) -> dict[str, int]:
    """Return the numbers of tokens read and generated; a prompt counts once for its choices."""
    read = sum(len(choice.prompt) for choice in choices[::num_choices])
    generated = sum(len(choice.scores) for choice in choices)
    return {
        "prompt_tokens": read,
        "completion_tokens": generated,
        "total_tokens": read + generated,
    }


async def respond(
    request: WebRequest,
    model: ServedModel,
    requests: Sequence[Request],
    wish: Wish,
    *,
    head: dict[str, object],
    whole: Callable[[Choice], dict[str, object]],
    events: Callable[[list[Choice], AsyncIterator[ChoiceChange]], AsyncIterator[object]],
) -> Response:
    """Submit the rows of a request and answer in one piece, or in events if `wish` streams.

    In one piece the answer is `head`, each choice as returned by `whole`, and the usage.
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
