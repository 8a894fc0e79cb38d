"""A planned step in a trace: its spans, its messages, the verdict and the what-if over it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import megascan as scan

if TYPE_CHECKING:
    import subprocess

    from conftest import TrainTraced

NUM_MICROBATCHES = 4
Command = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]


def test_a_split_step_is_understood(
    tmp_path: Path, train_traced: TrainTraced, megascan: Command
) -> None:
    train_traced(tmp_path / "trace", ["--pipeline-schedule", "zb-h1"])
    tables = scan.read(tmp_path / "trace")
    spans = tables.spans.to_pandas()
    passes = spans[spans["kind"] == "compute"]
    for name in ("forward", "backward", "backward-weights"):
        own = passes[passes["name"] == name]
        counts = Counter(zip(own["rank"], own["iteration"], strict=True))
        assert set(counts.values()) == {NUM_MICROBATCHES}, name
        assert len(counts) == 4 * 6, name
        assert set(own["microbatch"]) == set(range(NUM_MICROBATCHES))
    messages = tables.messages.to_pandas()
    # Two pipelines, a tensor forward and a gradient back for each microbatch of six iterations.
    assert len(messages) == 2 * 2 * NUM_MICROBATCHES * 6
    assert set(messages["microbatch"]) == set(range(NUM_MICROBATCHES))
    verdict = megascan("aggregate", "-b", tmp_path / "trace", "-o", tmp_path / "x.json", "-d")
    assert verdict.returncode == 0, verdict.stderr
    assert "unmatched: none" in verdict.stdout and "; duplicates: 0" in verdict.stdout
    whatif = megascan("whatif", tmp_path / "trace", "--json", tmp_path / "whatif.json")
    assert whatif.returncode == 0, whatif.stderr
    assert "backward-compute" in json.loads((tmp_path / "whatif.json").read_text())["S_t"]


def test_a_step_chosen_at_run_time_leaves_no_message_unmatched(
    tmp_path: Path, train_traced: TrainTraced, megascan: Command
) -> None:
    train_traced(tmp_path / "trace", ["--use-dpp", "--dpp-choice", "guided", "--recompute-ahead"])
    spans = scan.read(tmp_path / "trace").spans.to_pandas()
    forwards = spans[(spans["name"] == "forward") & (spans["rank"] == 0)]
    assert len(forwards) == 2 * NUM_MICROBATCHES * 6  # each of stage 0 is repeated
    verdict = megascan("aggregate", "-b", tmp_path / "trace", "-o", tmp_path / "x.json", "-d")
    assert verdict.returncode == 0, verdict.stderr
    assert "unmatched: none" in verdict.stdout and "; duplicates: 0" in verdict.stdout
