"""Numbers that decide a verdict stand in detect/thresholds, with unit, origin and meaning."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from detect.thresholds import Origin
from detect.thresholds.tables import thresholds

ROOT = Path(__file__).parents[2]
VERDICT_CODE = [
    *sorted((ROOT / "detect").glob("causes/*.py")),
    *sorted((ROOT / "detect").glob("observe/*.py")),
    *sorted((ROOT / "detect").glob("stats/*.py")),
    *sorted((ROOT / "detect").glob("comparison/*.py")),
    ROOT / "detect" / "detector.py",
]
STRUCTURAL = {0.0, 0.5, 1.0, 2.0}
"""Nothing, one half, unity and both sides: of formulas, not of judgement."""
GUARD = 1e-6
"""Smaller numbers keep a division from failing."""
NS_PER_SECOND = 1e9


def bare_fractions(source: str) -> list[tuple[int, float]]:
    return [
        (node.lineno, node.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, float)
        and node.value not in STRUCTURAL | {NS_PER_SECOND}
        and node.value > GUARD
    ]


@pytest.mark.parametrize("path", VERDICT_CODE, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_verdict_code_holds_no_bare_fractions(path):
    assert bare_fractions(path.read_text(encoding="utf-8")) == [], (
        "(line, number): give it a name, unit, origin and meaning in detect/thresholds"
    )


def test_a_bare_fraction_would_be_seen():
    assert bare_fractions("x = effect > 0.3 * other\ny = max(x, 1e-9)") == [(1, 0.3)]


def test_every_threshold_says_its_unit_origin_and_meaning():
    rows = list(thresholds())
    assert len({(row.subject, row.name) for row in rows}) == len(rows) > 100
    for row in rows:
        assert row.unit and isinstance(row.origin, Origin) and len(row.meaning) > 10, row.name
