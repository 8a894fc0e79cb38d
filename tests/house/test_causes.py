"""A cause that the detector can name is searched and explained."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest

from detect import causes, detector
from detect.causes.finding import CauseSpec
from detect.detector import CAUSES
from detect.report import Cause

VERDICT_PAGE = Path(__file__).parents[2] / "docs" / "verdict.md"


@pytest.mark.parametrize("cause", Cause)
def test_a_cause_is_searched_and_explained(cause: Cause) -> None:
    assert cause in {spec.cause for spec in CAUSES}, (
        "give a CauseSpec of it a line of CAUSES in detect/detector.py"
    )
    assert f"`{cause}`" in VERDICT_PAGE.read_text(encoding="utf-8"), (
        "name it in docs/verdict.md, in the list of causes, and say in "
        "docs/how-verdicts-are-reached.md what is compared"
    )


def test_every_search_of_the_room_is_carried_out() -> None:
    files = [
        importlib.import_module(f"detect.causes.{one.name}")
        for one in pkgutil.iter_modules(causes.__path__)
    ]
    files.append(detector)  # has those of profiles and probes
    specs = {
        id(value): f"{file.__name__.rpartition('.')[2]}.{name}"
        for file in files
        for name, value in vars(file).items()
        if isinstance(value, CauseSpec)
    }
    carried_out = {id(spec) for spec in CAUSES}
    assert [name for spec, name in specs.items() if spec not in carried_out] == [], (
        "put it into CAUSES of detect/detector.py, at its place in the order of search"
    )
