"""The compiled part, wherever it is: beside its source, or built for the tests."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import pytest

from megascan import native

ROOT = Path(__file__).parents[2]
Result = TypeVar("Result")


@pytest.fixture(scope="session")
def builder() -> ModuleType:
    """hatch_build.py, as a module."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def library(builder: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    found = native.loaded(native.LIBRARY)
    if found is None:
        folder = tmp_path_factory.mktemp("library")
        reason = builder.build(folder)
        if reason:
            pytest.skip(f"no C compiler here: {reason}")
        found = native.loaded(folder / builder.LIBRARY)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def both(library: ctypes.CDLL) -> Callable[[Callable[[], Result]], tuple[Result, Result]]:
    """Does something with the compiled part and without; what it returned, or raised in words."""

    def run(make: Callable[[], Result]) -> tuple[Result, Result]:
        results = []
        for found in (library, None):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(native, "library", lambda found=found: found)
                results.append(make())
        return results[0], results[1]

    return run
