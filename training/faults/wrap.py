"""Wrapping functions of other packages in place."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType

Function = Callable[..., object]
Wrapper = Callable[[Function], Function]


def wrap_attribute(owner: object, name: str, wrapper: Wrapper) -> None:
    """Replace ``owner.name`` by ``wrapper(owner.name)``; names that are not there are left out."""
    original = getattr(owner, name, None)
    if original is not None:
        setattr(owner, name, functools.wraps(original)(wrapper(original)))


def wrap_everywhere(module: ModuleType, name: str, wrapper: Wrapper) -> None:
    """Replace ``module.name``, and wherever Megatron-Core has already imported it from there."""
    original = getattr(module, name, None)
    if original is None:
        return
    replacement = functools.wraps(original)(wrapper(original))
    setattr(module, name, replacement)
    for holder_name, holder in list(sys.modules.items()):
        if not holder_name.startswith("megatron.core"):
            continue
        for alias, value in list(vars(holder).items()):
            if value is original:
                setattr(holder, alias, replacement)
