"""The two public production traces against the figures that their authors' artifact computes.

The data are not in the repository; they are looked for beside it.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from detect.optable import read_op_table, replay_of_op_table
from detect.whatif import saved_by_fixing
from detect.whatif.slowness import WhatIf, analyze

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "whatif"

pytestmark = pytest.mark.skipif(
    not (DATA / "expected.json").is_file(),
    reason=f"the public op tables are not in {DATA}; docs/whatif.md says where they are from",
)


@pytest.fixture(scope="module", params=["AR", "ST"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def result(name: str) -> WhatIf:
    return analyze(replay_of_op_table(read_op_table(DATA / f"trace-{name}.parquet")))


@pytest.fixture(scope="module")
def expected(name: str) -> dict:
    return json.loads((DATA / "expected.json").read_text())["traces"][name]


@pytest.fixture(scope="module")
def relative() -> float:
    return float(json.loads((DATA / "expected.json").read_text())["tolerance"]["relative"])


def test_size_of_the_graph(result: WhatIf, expected: dict, name: str) -> None:
    graph = result.replay.graph
    assert len(graph.nodes) == expected["nodes_per_mp_group"]
    assert sum(len(group.nodes) > 1 or bool(group.partition) for group in graph.groups) == (
        202 if name == "AR" else 34
    )
    assert sum(len(set(before)) for before in graph.dependencies) == (1229 if name == "AR" else 165)


def test_step_times(result: WhatIf, expected: dict, relative: float) -> None:
    assert result.traced_s == pytest.approx(expected["T_ori"], rel=relative)
    assert result.ideal_s == pytest.approx(expected["T_ideal"], rel=relative)
    assert result.slowdown == pytest.approx(expected["S"], rel=relative)
    assert result.waste_ratio == pytest.approx(expected["waste"], rel=relative)
    assert result.measured_s == pytest.approx(expected["T_base"], rel=1e-6)
    assert result.launch_slowdown == pytest.approx(expected["launch_slowdown"], rel=1e-6)
    least, most = expected["S_step_min_max"]
    assert result.step_slowdown.min() == pytest.approx(least, rel=relative)
    assert result.step_slowdown.max() == pytest.approx(most, rel=relative)
    steps = result.replay.steps.tolist()
    for step, seconds in expected["T_ori_first_steps"].items():
        traced = result.replay.traced_s[steps.index(int(step))]
        assert traced == pytest.approx(seconds, rel=relative)


def test_ideal_weights(result: WhatIf, expected: dict, relative: float) -> None:
    graph = result.replay.graph
    for optype, seconds in expected["ideal_weight_s"].items():
        ideal = result.replay.ideal[graph.of_type(optype)]
        np.testing.assert_allclose(ideal, seconds, rtol=relative)


def test_types_stages_and_replicas(result: WhatIf, expected: dict, relative: float) -> None:
    assert result.type_ratio == pytest.approx(expected["S_t"], rel=relative)
    assert list(result.stage_ratio) == pytest.approx(expected["S_stage"], rel=relative)
    assert list(result.lane_ratio) == pytest.approx(expected["S_dp"], rel=relative)


@pytest.mark.parametrize("kind", ["S_w_exact_top", "S_w_top"])
def test_ranks(result: WhatIf, expected: dict, relative: float, kind: str) -> None:
    ratios = result.rank_ratio if kind == "S_w_exact_top" else result.approximate_rank_ratio
    for rank, dp, stage, ratio in expected[kind]:
        assert result.replay.ranks[stage, dp] == rank
        assert ratios[stage, dp] == pytest.approx(ratio, rel=relative)
    top = [rank for rank, *_ in expected[kind]]
    order = np.lexsort((result.replay.ranks.ravel(), -ratios.ravel()))
    assert result.replay.ranks.ravel()[order[: len(top)]].tolist() == top


def test_shares_of_slowness(result: WhatIf, expected: dict, relative: float) -> None:
    for share, figures in (
        (result.top_ranks, expected["M_W"]),
        (result.last_stage, expected["M_S"]),
    ):
        assert share.removal == pytest.approx(figures["rem"], abs=1e-7)
        assert share.addition == pytest.approx(figures["add"], abs=1e-7)
        assert share.removed_s == pytest.approx(figures["trem"], rel=relative)
        assert share.added_s == pytest.approx(figures["tadd"], rel=relative)
    assert list(result.top_ranks.ranks) == expected["M_W"]["workers_replaced"]


def test_the_product_separates_worker_from_stage(result: WhatIf, name: str) -> None:
    factors = result.factors
    assert factors.random * factors.worker * factors.stage == pytest.approx(result.slowdown)
    worker, stage = {"AR": (2.046, 0.965), "ST": (1.001, 1.166)}[name]
    assert factors.worker == pytest.approx(worker, abs=1e-3)
    assert factors.stage == pytest.approx(stage, abs=1e-3)


def test_fixing_the_slow_rank_but_not_the_heavy_stage(result: WhatIf, name: str) -> None:
    """AR's rank 0 is a fault: 2.02x as fast without. ST's rank 7 runs like its peer."""
    rank, speedup = {"AR": (0, 2.02), "ST": (7, 1.0)}[name]
    saving = saved_by_fixing(result.replay, [rank])
    assert saving.compared_with == "peers"
    assert saving.speedup == pytest.approx(speedup, abs=0.01)
    if name == "AR":
        assert saving.fixed_step_s == pytest.approx(22.92, rel=2e-3)
        assert saving.num_gpus == 64
