"""Chats into prompts, by the template that a tokenizer's files bring along."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megascan.errors import InputError
from training.data.tokenizers import SubwordTokenizer

_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class TemplateError(Exception):
    """The template refuses a chat; its own words."""


class ChatTemplate:
    """A tokenizer's Jinja template, run in a sandbox: it comes from a file that others wrote."""

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
    """Return the template in a tokenizer's folder; None when there is none.

    Raises InputError when it is damaged.
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
    """Return the template itself; of several named ones the ``default``."""
    if isinstance(declared, list):
        named = {one.get("name"): one.get("template") for one in declared if isinstance(one, dict)}
        declared = named.get("default")
    return declared if isinstance(declared, str) else None


def _text(token: object) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""
