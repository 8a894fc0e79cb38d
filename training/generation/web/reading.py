"""From the connection to checked fields and token ids, and from there into the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.requests import ClientDisconnect
from starlette.requests import Request as WebRequest

from megascan.errors import InputError
from training.generation.request import Request
from training.generation.service import BusyError, EndedError, Submission
from training.generation.web.asking import Model
from training.generation.web.fields import Fields
from training.generation.web.responses import RequestError

MOST_BYTES = 8 * 1024 * 1024
"""Of a request's body."""
_PATIENCE_S = 60.0
"""For the whole body to arrive."""
# Above this, coding a text takes long enough to be felt by others on the event loop.
_QUICK_CHARACTERS = 4096


async def read_fields(request: WebRequest) -> Fields:
    """Read the body of a request; RequestError when it is too large, too slow or no JSON object."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(_PATIENCE_S):
            async for part in request.stream():
                size += len(part)
                if size > MOST_BYTES:
                    raise RequestError(
                        f"the body is larger than {MOST_BYTES} bytes; send less", status=413
                    )
                parts.append(part)
    except TimeoutError:
        raise RequestError(
            f"the body did not arrive within {_PATIENCE_S:.0f} s; send it at once", status=408
        ) from None
    except ClientDisconnect:
        raise RequestError("the body ended early; send all of it") from None
    return Fields.from_body(b"".join(parts))


async def tokens_of(prompt: str | Sequence[int], model: Model) -> tuple[int, ...]:
    """The token ids of a prompt; RequestError when it cannot be coded."""
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
