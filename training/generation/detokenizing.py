"""From the tokens of an answer to text, token by token, and the strings that end the answer.

A token may hold half of a character or half of a stop string: this text is held back until later
tokens decide. All pieces joined give the same text, streamed or not.
"""

from __future__ import annotations

from collections.abc import Sequence

from training.data.tokenizers import Tokenizer

_BROKEN = "\ufffd"
# A character has at most four bytes: text still broken after this many tokens stays broken.
_LONGEST_WAIT = 8


class TextStream:
    """The text of one answer, piece by piece."""

    def __init__(
        self, tokenizer: Tokenizer, *, stops: Sequence[str] = (), before: Sequence[int] = ()
    ) -> None:
        """Begin after the tokens `before`, whose text is not given out: blanks may depend on it."""
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._ids = list(before[-_LONGEST_WAIT:])
        self._start = 0
        self._read = len(self._ids)
        self._held = ""
        self.is_stopped = False
        """Whether one of the stop strings has come; the text ends before it."""

    def add(self, token: int) -> str:
        """Take one more token; return the text that is now certain."""
        if self.is_stopped:
            return ""
        self._ids.append(token)
        return self._advance(self._decode(is_end=False))

    def finish(self) -> str:
        """End the answer; return the text that was held back."""
        if self.is_stopped:
            return ""
        text = self._advance(self._decode(is_end=True)) + self._held
        self._held = ""
        return text

    def _decode(self, *, is_end: bool) -> str:
        """Return the text that the unread tokens add; empty while it ends in a broken character."""
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
    """Return how many characters of `stop`, from its beginning, stand at the end of `text`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of one token; where it is half a character, its id as ``token_id:93``."""
    text = tokenizer.detokenize([token])
    return f"token_id:{token}" if _BROKEN in text else text
