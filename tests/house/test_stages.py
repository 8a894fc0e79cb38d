"""The suite's two stages: two files at a time, then the tests that run alone."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("name", "is_ignored"),
    [
        pytest.param("scripts/test_two_nodes.py", False, id="the mark stands in the file"),
        pytest.param("guides/test_guides.py", False, id="the mark stands in its conftest"),
        pytest.param("house/test_names.py", True, id="no mark"),
        pytest.param("conftest.py", False, id="no tests"),
    ],
)
def test_the_second_stage_imports_only_files_that_can_hold_its_tests(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, name: str, is_ignored: bool
) -> None:
    config = request.config

    def ignored() -> bool:
        return bool(config.hook.pytest_ignore_collect(collection_path=TESTS / name, config=config))

    monkeypatch.setattr(config.option, "markexpr", "alone")
    assert ignored() == is_ignored
    monkeypatch.setattr(config.option, "markexpr", "not alone")
    assert not ignored()
