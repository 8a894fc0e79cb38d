"""A cause that the detector can name is searched and explained."""

from __future__ import annotations

from pathlib import Path

import pytest

from detect.causes.registry import CAUSES
from detect.report import Cause

VERDICT_PAGE = Path(__file__).parents[2] / "docs" / "verdict.md"


@pytest.mark.parametrize("cause", Cause)
def test_a_cause_is_searched_and_explained(cause: Cause) -> None:
    assert cause in {spec.cause for spec in CAUSES}, "give it a line in detect/causes/registry.py"
    assert f"`{cause}`" in VERDICT_PAGE.read_text(encoding="utf-8"), "explain it in docs/verdict.md"
