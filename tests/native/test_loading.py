"""The compiled part is used where it is of this version; anything else is passed over."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megascan import native


def test_what_is_no_library_is_passed_over(tmp_path: Path) -> None:
    assert native.loaded(tmp_path / "missing.so") is None
    path = tmp_path / "text.so"
    path.write_text("not a library")
    assert native.loaded(path) is None


def test_library_of_another_text_is_passed_over(
    library: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "copy.so"
    shutil.copy(library._name, path)
    assert native.loaded(path) is not None
    monkeypatch.setattr(native, "source_number", lambda: 7)
    assert native.loaded(path) is None


def test_library_without_one_of_the_functions_is_passed_over(
    builder: ModuleType, library: ctypes.CDLL, tmp_path: Path
) -> None:
    flags = (*builder.FLAGS, "-Dmegascan_join=something_else")
    assert not builder.build(tmp_path, flags=flags)
    assert native.loaded(tmp_path / builder.LIBRARY) is None


def test_switch_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "loaded", lambda path: path)
    assert native.library.__wrapped__() == native.LIBRARY
    monkeypatch.setenv(native.SWITCH, "0")
    assert native.library.__wrapped__() is None


def test_failing_compiler_is_a_reason_and_leaves_nothing(
    builder: ModuleType, tmp_path: Path
) -> None:
    assert builder.build(tmp_path, ["no-such-compiler"])
    program = "import sys; sys.exit('out of order')"
    assert builder.build(tmp_path, [sys.executable, "-c", program]) == "out of order"
    assert not list(tmp_path.iterdir())


def test_builder_and_loader_mean_the_same_file(builder: ModuleType) -> None:
    assert builder.SOURCE == native.SOURCE
    assert native.LIBRARY.name == builder.LIBRARY


def test_nothing_is_warned_of(library: ctypes.CDLL, builder: ModuleType, tmp_path: Path) -> None:
    words = [*builder.compiler(), *builder.FLAGS, "-Wall", "-Wextra", "-DSOURCE=0u"]
    done = subprocess.run(
        [*words, "-o", str(tmp_path / "library"), str(native.SOURCE)],
        capture_output=True,
        text=True,
    )
    assert not done.stderr
