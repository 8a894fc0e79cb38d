"""What the commands write is what they wrote when it was frozen: see golden.py."""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
CASES = tomllib.loads((HERE / "cases.toml").read_text())


@pytest.fixture(scope="module")
def golden() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden", HERE / "golden.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def commands(golden: ModuleType) -> Iterator[Any]:
    with golden.Commands() as commands:
        yield commands


@pytest.mark.parametrize("name", CASES)
def test_the_commands_write_what_was_frozen(name: str, golden: ModuleType, commands: Any) -> None:
    got = golden.outputs_of(CASES[name], commands)
    if not got:
        pytest.skip(f"{golden.PRODUCTION} is absent")
    assert not (differences := golden.differences_from_frozen(name, got)), "\n".join(differences)


def test_every_frozen_case_is_still_run() -> None:
    assert {path.name for path in (HERE / "expected").iterdir()} == set(CASES)


def test_every_example_trace_is_frozen() -> None:
    traces = {path.name for path in (HERE.parents[1] / "examples").glob("*.json.gz")}
    assert traces == {case["timeline"] for case in CASES.values() if "timeline" in case}
