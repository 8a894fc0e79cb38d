"""Figures of a job without a pipeline, worked out by hand, and of scenarios by brute force."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from detect.whatif import Replay
from detect.whatif.graph import partition_of
from detect.whatif.slowness import analyze, keep_each_rank, keep_places, lane_classes

Make = Callable[[Sequence[float]], Replay]


def test_one_slow_replica_of_four(data_parallel_replay: Make) -> None:
    """Passes take 6 s and 12 s on the slow one: the mean is 7.5, the step 12.75 of 8.25 s."""
    result = analyze(data_parallel_replay([1, 2, 1, 1]))
    assert result.measured_s == pytest.approx(12.75)
    assert result.traced_s == pytest.approx(12.75)
    assert result.ideal_s == pytest.approx(8.25)
    assert result.slowdown == pytest.approx(12.75 / 8.25)
    assert result.rank_ratio[0].tolist() == pytest.approx([1, 12.75 / 8.25, 1, 1])
    assert result.type_ratio["forward-compute"] == pytest.approx((8.25 + 2 * 0.75) / 8.25)
    assert result.type_ratio["backward-compute"] == pytest.approx((8.25 + 2 * 1.5) / 8.25)
    assert result.type_ratio["optimizer"] == pytest.approx(1)
    assert result.top_ranks.ranks == (1,)
    assert result.top_ranks.removal == pytest.approx((12.75 - 8.25) / (12.75 - 8.25))
    assert result.factors.worker == pytest.approx(12.75 / 6.75)
    assert result.error_ratio == pytest.approx(0, abs=1e-6)


def test_a_healthy_job_has_nothing_to_explain(data_parallel_replay: Make) -> None:
    result = analyze(data_parallel_replay([1, 1]))
    assert result.slowdown == pytest.approx(1)
    assert np.isnan(result.top_ranks.removal)


@pytest.mark.parametrize("lanes", [1, 2, 5])
def test_classes_of_lanes_give_what_all_lanes_give(lanes: int, data_parallel_replay: Make) -> None:
    replay = data_parallel_replay([1 + 0.3 * n for n in range(lanes)])
    ranks_s, lanes_s = keep_each_rank(replay)
    kept = np.eye(lanes, dtype=bool)[:, None, :]
    np.testing.assert_allclose(ranks_s[0], keep_places(replay, kept))
    np.testing.assert_allclose(lanes_s, ranks_s[0])


def test_lanes_that_differ_alike_form_one_class() -> None:
    """TP 2 x DP 3: the lane itself, its TP peer, its DP peers, and the rest."""
    lanes = [(dp, tp) for dp in range(3) for tp in range(2)]
    partitions = {
        "tp": partition_of([dp for dp, _ in lanes]),
        "dp": partition_of([tp for _, tp in lanes]),
    }
    sizes, merged = lane_classes(partitions, len(lanes))
    assert sizes.tolist() == [1, 1, 2, 2]
    assert merged["tp"].tolist() == [0, 0, 1, 1]
    assert merged["dp"].tolist() == [0, 1, 0, 1]


def test_the_number_of_classes_does_not_grow_with_the_job() -> None:
    for num_replicas in (4, 64, 512):
        lanes = [(dp, tp) for dp in range(num_replicas) for tp in range(4)]
        sizes, _ = lane_classes(
            {
                "tp": partition_of([dp for dp, _ in lanes]),
                "dp": partition_of([tp for _, tp in lanes]),
                "all": partition_of([0] * len(lanes)),
            },
            len(lanes),
        )
        assert len(sizes) == 4
        assert sizes.sum() == 4 * num_replicas
