"""The page over a model that generates: questions become commands of the session on all ranks."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any

from megascan.errors import ConfigError
from megascope.request import CHANGEABLE, Kind
from megascope.server import Answer, to_parquet
from megascope.session import MOST_TOKENS, MOST_WEIGHTS, STRIP_PLACES, read_command

_MOST_WAITING = 8
_LONGEST_TEXT = 100_000


class ModelPage:
    """Answers the page's questions about one model.

    `tell` hands a command to the sessions of all ranks; the session of rank 0 answers by `deliver`,
    on the thread that computes.
    """

    def __init__(
        self,
        described: Mapping[str, object],
        *,
        tell: Callable[[str], None],
        tokenize: Callable[[str], list[int]],
        text_of: Callable[[int], str],
        max_length: int,
        vocab_size: int,
    ) -> None:
        self._described = described
        self._tell = tell
        self._tokenize = tokenize
        self._text_of = text_of
        self._max_length, self._vocab_size = max_length, vocab_size
        self._identifiers = itertools.count(1)
        self._waiting: dict[int, asyncio.Queue[bytes | None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def answer(self, name: str, body: Mapping[str, Any]) -> Answer:
        """Answer `state`, `tokenize`, `parquet` or `ask`; `ask` by a stream of frames."""
        self._loop = asyncio.get_running_loop()
        if name == "state":
            return {
                "mode": "generation", "places": sorted(STRIP_PLACES), "kinds": list(Kind),
                "changeable": [name for name in CHANGEABLE if name != "logits"],
                "max_length": self._max_length, "most_weights": MOST_WEIGHTS,
                "most_rows": MOST_TOKENS, "vocab_size": self._vocab_size, **self._described,
            }  # fmt: skip
        if name == "tokenize":
            return await self._tokens(body)
        if name == "parquet":
            return await asyncio.to_thread(to_parquet, body)
        if name == "ask":
            return self._ask(body)
        raise KeyError(name)

    async def _tokens(self, body: Mapping[str, Any]) -> Answer:
        text = body.get("text")
        if not isinstance(text, str) or len(text) > _LONGEST_TEXT:
            raise ConfigError(f"text must be a text of at most {_LONGEST_TEXT} letters")
        if not _is_unicode(text):
            raise ConfigError("text has half of a character (a surrogate) that has no other half")
        ids = await asyncio.to_thread(self._tokenize, text)
        return {"ids": ids, "texts": [self._text_of(one) for one in ids]}

    def _ask(self, body: Mapping[str, Any]) -> AsyncIterator[bytes]:
        command = read_command(dict(body), self._max_length, self._vocab_size)
        if len(self._waiting) >= _MOST_WAITING:
            raise ConfigError("too many questions wait already; ask again later")
        identifier = next(self._identifiers)
        answers: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._waiting[identifier] = answers
        self._tell(json.dumps({**command, "id": identifier}))
        return self._answers(identifier, answers)

    async def _answers(
        self, identifier: int, answers: asyncio.Queue[bytes | None]
    ) -> AsyncIterator[bytes]:
        """Yield the frames of one command; stop the command when the client hangs up."""
        is_over = False
        try:
            while (frame := await answers.get()) is not None:
                yield frame
            is_over = True
        finally:
            self._waiting.pop(identifier, None)
            if not is_over:
                self._tell(json.dumps({"do": "stop", "id": identifier}))

    def deliver(self, identifier: int, frame: bytes | None) -> None:
        """Pass an answer of the session on; called on the thread that computes."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: no client is left
                self._loop.call_soon_threadsafe(self._put, identifier, frame)

    def _put(self, identifier: int, frame: bytes | None) -> None:
        answers = self._waiting.get(identifier)
        if answers is not None:
            answers.put_nowait(frame)


def _is_unicode(text: str) -> bool:
    """Return whether a text can be encoded: JSON can hold half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
