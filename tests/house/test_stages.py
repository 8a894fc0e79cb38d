"""The suite's two stages: two files at a time, then the tests that run alone."""

from __future__ import annotations

from pathlib import Path

import pytest

MARK = "@pytest.mark.alone"


@pytest.mark.parametrize(
    ("name", "sources", "is_ignored"),
    [
        pytest.param("test_one.py", {"test_one.py": MARK}, False, id="the mark stands in the file"),
        pytest.param("test_one.py", {"conftest.py": MARK}, False, id="it stands in its conftest"),
        pytest.param("test_one.py", {"test_two.py": MARK}, True, id="no mark"),
        pytest.param("conftest.py", {}, False, id="no tests"),
        pytest.param("", {"test_two.py": MARK}, False, id="a folder with such a file"),
        pytest.param("", {}, True, id="a folder without one"),
    ],
)
def test_the_second_stage_imports_only_files_that_can_hold_its_tests(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    name: str, sources: dict[str, str], is_ignored: bool,
) -> None:  # fmt: skip
    config = request.config
    for file in ("conftest.py", "test_one.py", "test_two.py"):
        (tmp_path / file).write_text(sources.get(file, ""))

    def ignored() -> bool:
        path = tmp_path / name
        return bool(config.hook.pytest_ignore_collect(collection_path=path, config=config))

    monkeypatch.setattr(config.option, "markexpr", "alone")
    assert ignored() == is_ignored
    monkeypatch.setattr(config.option, "markexpr", "not alone")
    assert not ignored()
