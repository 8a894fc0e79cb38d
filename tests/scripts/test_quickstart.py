"""quickstart.sh: wrong words are a sentence before anything is built."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import ranks

if TYPE_CHECKING:
    from conftest import Run


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--bogus"], 2, "unknown option '--bogus'"),
        (["--rank"], 2, "--rank needs a value"),
        (["--rank", "-1"], 2, "--rank is '-1', expected a whole number"),
        (["--rank", "8"], 2, "--rank is 8, expected 0 to 7 for 2 x 2 x 2 ranks"),
        (["--factor", "0"], 2, "--factor is '0', expected a number from 1 on"),
        (["--factor", "fast"], 2, "--factor is 'fast'"),
        (["--tp", "0"], 2, "--tp is '0', expected a whole number from 1"),
        (["--tp", "3"], 1, "--tp is 3, which does not divide the model's 4 attention heads"),
        (["--pp=3"], 1, "--pp is 3, which does not divide the model's 4 layers"),
        (["--iterations", "0"], 2, "--iterations is '0'"),
        (["--healthy", "--rank", "3"], 2, "--healthy makes no rank slow"),
        (["-o", "/dev/null"], 1, "--output is /dev/null, and /dev/null is no folder"),
        (["-o", ""], 2, "-o needs a value"),
    ],
)
def test_wrong_words(run: Run, tmp_path: Path, words: list[str], code: int, says: str) -> None:
    done = run("quickstart.sh", *words, CUDA_VISIBLE_DEVICES="", MEGASCAN_PYTHON=ranks.warm())
    assert (done.returncode, len(done.stderr.splitlines())) == (code, 1), done.stderr
    assert says in done.stderr
    assert done.stdout == ""
    assert not list((tmp_path / "work").iterdir())


def test_a_python_that_cannot_be_run(run: Run) -> None:
    done = run("quickstart.sh", MEGASCAN_PYTHON="/nowhere/python")
    assert done.returncode == 1
    assert "error: MEGASCAN_PYTHON is /nowhere/python, which cannot be run" in done.stderr
