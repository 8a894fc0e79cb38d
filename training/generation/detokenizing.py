"""Tokens of an answer into text as they come, and the strings that end it.

A token may hold half of a character, and half of a stop string: such text is held back until the
next token tells. Whoever joins all pieces has the same text, streamed or not.
"""

from __future__ import annotations

from collections.abc import Sequence

from training.data.tokenizers import Tokenizer

_BROKEN = "\ufffd"
# A character has at most four bytes: what is broken after so many tokens stays broken.
_LONGEST_WAIT = 8


class TextStream:
    """The text of one answer, piece by piece."""

    def __init__(
        self, tokenizer: Tokenizer, *, stops: Sequence[str] = (), before: Sequence[int] = ()
    ) -> None:
        """Begin after the tokens `before`, whose text is known: blanks may depend on them."""
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._ids = list(before[-_LONGEST_WAIT:])
        self._start = 0
        self._read = len(self._ids)
        self._held = ""
        self.is_stopped = False
        """Whether one of the stop strings has come; the text ends before it."""

    def add(self, token: int) -> str:
        """Take one more token; gives the text that is now certain."""
        if self.is_stopped:
            return ""
        self._ids.append(token)
        return self._advance(self._decode(is_end=False))

    def finish(self) -> str:
        """Give what was held back; the answer is over."""
        if self.is_stopped:
            return ""
        text = self._advance(self._decode(is_end=True)) + self._held
        self._held = ""
        return text

    def _decode(self, *, is_end: bool) -> str:
        """Return the text that the unread tokens add to those read before."""
        if self._read == len(self._ids):
            return ""
        known = self._tokenizer.detokenize(self._ids[self._start : self._read])
        text = self._tokenizer.detokenize(self._ids[self._start :])
        is_broken = text.endswith(_BROKEN) and len(self._ids) - self._read < _LONGEST_WAIT
        if is_broken and not is_end:
            return ""
        del self._ids[: self._read]
        self._start, self._read = 0, len(self._ids)
        return text[len(known) :]

    def _advance(self, new: str) -> str:
        text = self._held + new
        found = [text.find(stop) for stop in self._stops]
        places = [place for place in found if place >= 0]
        if places:
            self.is_stopped = True
            self._held = ""
            return text[: min(places)]
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters `stop` begins with stand at the end of `text`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of one token; half a character is named by its id: ``token_id:93``."""
    text = tokenizer.detokenize([token])
    return f"token_id:{token}" if _BROKEN in text else text
