"""Every room says what is in it: the docstring of its `__init__.py` names each of its files.

And nothing in it is longer than one can read at a time.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from megascan.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
PACKAGES = ("megascan", "aggregate", "detect", "megascope", "training")
ROOMS = sorted(
    path.parent.relative_to(ROOT).as_posix()
    for package in PACKAGES
    for path in (ROOT / package).rglob("__init__.py")
)


def described(room: str) -> str:
    """Return what a room says of itself; of the core's own files docs/architecture.md says it."""
    text = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text("utf-8"))) or ""
    page = (ROOT / "docs/architecture.md").read_text("utf-8") if room == "megascan" else ""
    return " ".join([text, *re.findall(r"`megascan\.\w+`", page)])


def unnamed(stems: set[str], text: str) -> set[str]:
    return {stem for stem in stems if not re.search(rf"\b{stem}(\.py\b|`)", text)}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_names_each_of_its_files(room: str) -> None:
    stems = {path.stem for path in (ROOT / room).glob("*.py")} - {"__init__", "__main__"}
    where = "docs/architecture.md" if room == "megascan" else f"the docstring of {room}/__init__.py"
    advice = f"say in {where} what these files are for"
    if room == "megascan/cli":
        stems -= set(COMMANDS)  # a command's file has its name
        advice += "; a command needs a line of COMMANDS in megascan/cli/main.py instead"
    assert sorted(unnamed(stems, described(room))) == [], advice


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_names_no_file_that_is_gone(room: str) -> None:
    named = re.findall(r"[\w/]+\.py\b", described(room))
    gone = [one for one in named if not ((ROOT / room / one).exists() or (ROOT / one).exists())]
    assert gone == [], "the file has moved or is gone: mend the docstring of the room's __init__.py"


def test_a_file_that_is_not_named_is_found() -> None:
    text = "folding.py   one file of `lines`"
    assert unnamed({"fold", "file", "folding", "lines"}, text) == {"fold", "file"}


MOST_LINES = 50
"""Of a function, its docstring and signature among them."""


@pytest.mark.parametrize("package", PACKAGES)
def test_no_function_is_too_long_to_be_read_at_once(package: str) -> None:
    too_long = [
        f"{path.relative_to(ROOT)}: {node.name}, {length} lines"
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > MOST_LINES
    ]
    assert too_long == [], f"a function of one thought has at most {MOST_LINES} lines: part it"
