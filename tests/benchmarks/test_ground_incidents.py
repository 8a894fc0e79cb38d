"""The ground of published incidents: what its cases are, that its files hold, and its truth."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from aggregate import build_timeline
from benchmarks.grounds import incidents
from benchmarks.grounds.ground import Case, Variation
from benchmarks.grounds.incidents.catalogue import plans
from benchmarks.grounds.incidents.schedule import passes_of
from benchmarks.grounds.incidents.troubles import Trouble
from megascan.reader import read_trace
from tests.benchmarks.catalogues import assert_alike_in_each_process

CASES = list(incidents.cases())
FAMILIES = sorted({case.family for case in CASES})


def case_of(family: str, *, profile: bool | None = None) -> Case:
    """The smallest case of a family, as rank files or as profiles."""
    fitting = [
        case
        for case in CASES
        if case.family == family and profile in (None, plans(0)[case.name][1][0].tracing.profile)
    ]
    return min(fitting, key=lambda one: one.num_ranks)


def test_cases_are_many_and_half_of_them_have_no_fault_of_a_node() -> None:
    assert 230 <= len(CASES) <= 280
    assert len({case.name for case in CASES}) == len(CASES)
    sound = sum(not case.at_fault for case in CASES)
    assert 0.45 <= sound / len(CASES) <= 0.6
    sizes = Counter(case.num_ranks for case in CASES)
    assert min(sizes) == 2
    assert max(sizes) == 128


def test_cases_are_the_same_in_each_process_and_others_in_other_draws() -> None:
    assert_alike_in_each_process("incidents")
    assert not {case.name for case in CASES} & {case.name for case in incidents.cases(1)}


def test_a_case_is_written_alike_each_time(tmp_path: Path) -> None:
    case = case_of("gpu_clock")
    for name in "ab":
        (tmp_path / name).mkdir()
        incidents.write(case, tmp_path / name)
    first = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert first == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}


@pytest.mark.parametrize("family", FAMILIES)
def test_files_are_read_and_costs_are_consistent(family: str, tmp_path: Path) -> None:
    case = case_of(family)
    planted = incidents.write(case, tmp_path)
    assert [one.kind for one in planted] == [one.kind for one in case.planted]
    for one in planted:
        assert one.cost_ratio > 0.99
        assert one.held_cost_ratio > 0.99
        assert set(one.ranks) <= set(range(case.num_ranks))
        assert not one.host or one.owner == "node"
    completeness = build_timeline(read_trace(tmp_path, allow_missing_ranks=True)).completeness
    job = plans(0)[case.name][1][0]
    if not (job.tracing.missing or job.tracing.torn):
        assert len(completeness.ranks) == case.num_ranks
        assert not any(completeness.num_unmatched.values())
        assert not completeness.missing_ranks


@pytest.mark.parametrize("profile", [False, True])
def test_healthy_jobs_of_both_forms_have_nothing_planted(profile: bool, tmp_path: Path) -> None:
    case = case_of("healthy", profile=profile)
    assert incidents.write(case, tmp_path) == ()
    assert len(list(tmp_path.iterdir())) == case.num_ranks


def test_what_is_hidden_costs_nothing(tmp_path: Path) -> None:
    for planted in incidents.write(case_of("no_effect"), tmp_path):
        assert planted.cost_ratio == pytest.approx(1.0, abs=0.005)


def test_a_slow_clock_costs_time_and_slowness_tells_it(tmp_path: Path) -> None:
    case = case_of("gpu_clock", profile=False)
    (planted,) = incidents.write(case, tmp_path)
    assert planted.cost_ratio > 1.0
    slowness = incidents.slowness(case)
    assert slowness.shape == (case.num_ranks, len(plans(0)[case.name][1][0].tracing.iterations))
    (slow,) = planted.ranks
    others = np.delete(slowness, slow, axis=0)
    assert 1 + 0.6 * (planted.factor - 1) < float(np.median(slowness[slow])) < 1.1 * planted.factor
    assert np.abs(np.median(others) - 1) < 0.02


def test_a_sound_job_is_slow_by_its_chips_only() -> None:
    slowness = incidents.slowness(case_of("healthy"))
    assert 0.95 < slowness.min() <= slowness.max() < 1.05


def test_a_variation_has_one_slow_chip_and_no_trouble(tmp_path: Path) -> None:
    case = case_of("noisy_neighbour", profile=False)
    alike = Variation(chip_spread_ratio=0.0)
    slow = Variation(chip_spread_ratio=0.0, slow_rank=1, factor=1.5)
    sound = incidents.write_varied(case, alike, None)
    varied = incidents.write_varied(case, slow, tmp_path)
    ratio = np.median(varied / sound, axis=1)
    assert 1.25 < ratio[1] <= 1.5
    # others overlap with collectives for longer or shorter, and no more
    assert np.allclose(np.delete(ratio, 1), 1.0, atol=0.03)
    assert len(read_trace(tmp_path).headers) == case.num_ranks


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_each_message_has_two_ends(num_stages: int, num_chunks: int) -> None:
    sent, received = Counter[object](), Counter[object]()
    for stage in range(num_stages):
        for one in passes_of(stage, num_stages, 2 * num_stages, num_chunks):
            around = [*one.before, *one.after, one.receives, one.sends]
            for message in filter(None, around):
                (sent if message.is_sent_by(stage) else received)[message] += 1
    assert sent == received
    assert set(sent.values()) == {1}


def test_bursts_cover_their_share_of_the_passes() -> None:
    trouble = Trouble(
        kind="x", cause="link", owner="node", ranks=(0,), share=0.3, burst_passes=5, first=11
    )
    active = trouble.activity(range(1, 2001), 10)
    assert not active[:10].any()
    assert float(active[10:].mean()) == pytest.approx(0.3, abs=0.04)
