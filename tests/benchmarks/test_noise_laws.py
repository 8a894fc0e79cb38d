"""The detector on windows that no simulator made: nobody is named, and who is slow is found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.detection.draws import Law, TableJob, draw
from benchmarks.detection.laws import LAWS, LAYOUTS, TWO_PERCENT, healthy_windows, named, tally
from detect import Cause, DetectorSettings, Owner
from detect.detector import judge
from megascan.topology import Layout

pytestmark = pytest.mark.usefixtures("without_power")
SETTINGS = DetectorSettings()
NOT_NULL = {"chips differ by 1 %", "uneven positions", "ranks wander 1 %"}
"""Ranks may truly differ by the floor here, and nothing in the window excuses them."""


@pytest.mark.parametrize("law", sorted(set(LAWS) - NOT_NULL))
def test_nobody_is_named(law):
    assert tally(healthy_windows(law, 1), SETTINGS).alarms == 0


@pytest.mark.parametrize("law", ["normal 2 %", "heavy tails", "contaminated", "odd iterations"])
@pytest.mark.parametrize("layout", ["dp4", "tp2-pp2-dp2", "tp8"])
def test_five_percent_is_found(law, layout):
    job = TableJob(layout=LAYOUTS[layout], law=LAWS[law], seed=3, slow={1: 1.05})
    assert named(judge(draw(job), SETTINGS)) == [(1,)]


@pytest.mark.parametrize("seed", range(4))
def test_three_slow_ranks_of_two_stages_are_all_named(seed):
    slow = {0: 1.1, 2: 1.2, 5: 1.3}
    job = TableJob(layout=Layout(dp=4, pp=2), law=LAWS["normal 2 %"], seed=seed, slow=slow)
    report = judge(draw(job), SETTINGS)
    assert sorted(named(report)) == [(0,), (2,), (5,)]
    for finding in report.findings:
        assert finding.slowdown == pytest.approx(slow[finding.ranks[0]], rel=0.02)


def test_more_than_half_of_a_group_is_never_named():
    slow = dict.fromkeys((0, 1, 2), 1.2)
    job = TableJob(layout=Layout(dp=4), law=LAWS["normal 2 %"], seed=1, slow=slow)
    assert len(named(judge(draw(job), SETTINGS))) <= 2


@pytest.mark.parametrize("first", [0, 7, 15])
def test_a_transient_is_dated_though_chips_differ(first):
    law = Law(operation=TWO_PERCENT, level_ratio=0.006)
    job = TableJob(
        layout=Layout(dp=4), law=law, seed=first, slow={3: 1.06}, during=(first, first + 4)
    )
    report = judge(draw(job), SETTINGS)
    assert named(report) == [(3,)]
    assert report.findings[0].first_iteration == 3 + first
    assert report.findings[0].last_iteration == 3 + first + 4


def test_a_position_that_is_slow_in_both_replicas_is_the_jobs():
    layout = Layout(tp=2, dp=2)
    both = TableJob(layout=layout, law=LAWS["normal 2 %"], seed=1, slow={0: 1.1, 2: 1.1})
    assert named(judge(draw(both), SETTINGS)) == []
    one = replace(both, slow={0: 1.1})
    assert named(judge(draw(one), SETTINGS)) == [(0,)]


def test_tensor_peers_share_their_data_however_it_varies():
    job = TableJob(layout=Layout(tp=2, dp=2), law=LAWS["data vary 30 %"], seed=2, slow={1: 1.25})
    assert named(judge(draw(job), SETTINGS)) == [(1,)]
    healthy = judge(draw(replace(job, slow={})), SETTINGS)
    assert [one.cause for one in healthy.findings] == [Cause.SEQUENCE_IMBALANCE]
    assert healthy.findings[0].owner is Owner.JOB


def test_a_seed_draws_the_same_window_again():
    job = TableJob(layout=Layout(dp=2), law=LAWS["heavy tails"], seed=5)
    np.testing.assert_array_equal(draw(job).work.log_ns, draw(job).work.log_ns)
    other = draw(replace(job, seed=6)).work.log_ns
    assert not np.array_equal(draw(job).work.log_ns, other)
