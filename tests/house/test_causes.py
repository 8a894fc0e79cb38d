"""A cause that the detector can name is searched, explained, and known to who acts on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from detect.causes.registry import CAUSES
from detect.report import Cause
from megascan.watch import policy

VERDICT_PAGE = Path(__file__).parents[2] / "docs" / "verdict.md"
NEVER_A_REASON_TO_DRAIN = {Cause.STAGE_IMBALANCE, Cause.SEQUENCE_IMBALANCE, Cause.CORRUPTION}
"""The job's own doing; and what probes show, which the watch does not read."""


@pytest.mark.parametrize("cause", Cause)
def test_a_cause_is_searched_and_explained(cause: Cause) -> None:
    assert cause in {spec.cause for spec in CAUSES}, "give it a line in detect/causes/registry.py"
    assert f"`{cause}`" in VERDICT_PAGE.read_text(encoding="utf-8"), "explain it in docs/verdict.md"


def test_a_policy_knows_every_cause_that_a_node_can_be_to_blame_for() -> None:
    assert {*policy.CAUSES} == {*Cause} - NEVER_A_REASON_TO_DRAIN
