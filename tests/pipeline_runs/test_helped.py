"""Helpers that run forwards: no digit changes, whatever they do; they are counted with or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Compare

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

FLAGS = """
    --pipeline-model-parallel-size 3 --num-layers 3 --global-batch-size 4 --train-iters 6
    --hidden-dropout 0 --attention-dropout 0
""".split()  # noqa: SIM905
HELPED = ["--forward-backward-disaggregating", "--fbd-helpers"]
SPLIT = ["--pipeline-schedule", "zb-h1"]


def test_helpers_come_go_die_and_err_without_harm(compare: Compare, tmp_path: Path) -> None:
    """One that dies in mid-step, one that dawdles, one whose numbers are wrong by a thousandth."""
    runs = {
        "megatron": [],
        "nobody": [*HELPED, "0"],
        "one": [*HELPED, "1"],
        "two, split": [*HELPED, "2", *SPLIT],
        "one that dies": [*HELPED, "1"],
        "one that dawdles": [*HELPED, "1", *SPLIT],
        "one that lies": [*HELPED, "1"],
    }
    found = compare(3, FLAGS, runs)
    shares = json.loads((tmp_path / "found.helped").read_text(encoding="utf-8"))
    for name, result in found.items():
        if name != "one that lies":
            assert result == found["megatron"], name
    assert shares["megatron"] == []
    assert not any(shares["nobody"])
    assert all(shares["one"])
    assert all(shares["two, split"])
    assert all(shares["one that dies"][:2])
    assert not any(shares["one that dies"][2:])
    assert shares["one that dawdles"][0] > 0
    assert not all(shares["one that dawdles"])
    assert all(shares["one that lies"][:2])
    assert not any(shares["one that lies"][3:])
