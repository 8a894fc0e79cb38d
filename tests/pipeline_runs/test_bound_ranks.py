"""Where a job is bound to GPUs all ranks split NCCL's communicator equally often."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import ranks


@pytest.mark.distributed
@pytest.mark.timeout(200)
def test_no_rank_of_a_pipeline_of_three_waits_for_a_split_of_others(tmp_path: Path) -> None:
    program = Path(__file__).with_name("bound_ranks.py")
    ranks.run(program, tmp_path / "found", num_ranks=3, timeout_s=150, check=True)
    found = [json.loads((tmp_path / f"found.{rank}.json").read_text()) for rank in range(3)]
    assert [one["channels"] for one in found] == [4, 4, 4]  # with two chunks a ring
    assert [one["splits"] for one in found] == [2, 2, 2]  # outside of two groups of one rank
