"""Tokens into text, piece by piece."""

from __future__ import annotations

import pytest

from training.data.tokenizers import ByteTokenizer, NullTokenizer
from training.generation.detokenizing import TextStream, token_text


def pieces_of(text: bytes, *stops: str) -> tuple[list[str], bool]:
    stream = TextStream(ByteTokenizer(), stops=stops)
    pieces = [stream.add(token) for token in text]
    return [*pieces, stream.finish()], stream.is_stopped


def test_pieces_join_to_the_text() -> None:
    pieces, stopped = pieces_of("grüße, 世界 🙂!".encode())
    assert "".join(pieces) == "grüße, 世界 🙂!"
    assert not stopped
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_stop_string_ends_the_text_before_it() -> None:
    pieces, stopped = pieces_of(b"one two three", " three", "wo")
    assert "".join(pieces) == "one t"
    assert stopped


def test_the_beginning_of_a_stop_string_is_held_back_and_given_when_it_does_not_come() -> None:
    stream = TextStream(ByteTokenizer(), stops=("abc",))
    assert [stream.add(token) for token in b"xabab"] == ["x", "", "", "ab", ""]
    assert stream.finish() == "ab"
    assert not stream.is_stopped


def test_bytes_that_are_no_text_do_not_hold_the_rest_back_for_ever() -> None:
    pieces, _ = pieces_of(b"a" + b"\x80" * 40)
    assert "\ufffd" in "".join(pieces[:10])
    assert "".join(pieces) == "a" + "\ufffd" * 40


def test_a_character_that_the_end_cuts_is_shown_broken() -> None:
    pieces, _ = pieces_of("ü".encode()[:1])
    assert pieces == ["", "\ufffd"]


def test_words_go_on_after_the_prompt_with_a_blank() -> None:
    stream = TextStream(NullTokenizer(50), before=[1, 2])
    assert [stream.add(3), stream.add(4)] == [" 3", " 4"]


@pytest.mark.parametrize(("token", "text"), [(97, "a"), (200, "token_id:200")])
def test_half_a_character_is_named_by_its_id(token: int, text: str) -> None:
    assert token_text(ByteTokenizer(), token) == text
