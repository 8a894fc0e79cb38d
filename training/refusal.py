"""Combinations of flags that Megatron-Core itself refuses, as errors of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megascan.errors import ConfigError


@contextmanager
def refusals_as_errors() -> Iterator[None]:
    """Surround what Megatron-Core makes out of flags: its reasons, on every rank the same.

    `training.arguments` checks what it knows; Megatron-Core checks hundreds of combinations more,
    by assertions and ValueErrors.
    """
    try:
        yield
    except (AssertionError, ValueError, NotImplementedError) as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise ConfigError(
            f"Megatron-Core refuses these flags: {reason}; change the flags that it names"
        ) from error
