from __future__ import annotations

import numpy as np
import pytest

from aggregate import fitting
from aggregate.anchors import Anchors
from aggregate.fitting import (
    LineProblem,
    conjugate_gradients,
    estimate_noise,
    fit_lines,
    unmoved_lines,
)


def ring_anchors(num_domains, num_events, noise_ns, seed=0):
    """Pairs of neighbours on a ring of clocks, and the true offset and drift of each clock."""
    random = np.random.default_rng(seed)
    offset = random.uniform(-1e6, 1e6, num_domains)
    drift = random.uniform(-5e-5, 5e-5, num_domains)
    true = np.sort(random.uniform(0, 1e10, num_events))
    first = random.integers(0, num_domains, num_events)
    domain = np.stack([first, (first + 1) % num_domains], axis=1).ravel()
    end = np.repeat(true, 2) + random.normal(0, noise_ns, 2 * num_events)
    local = np.rint(end - offset[domain] - drift[domain] * end).astype(np.int64)
    event = np.repeat(np.arange(num_events), 2)
    return Anchors(event, domain, local, np.zeros(len(event)), event * 0), offset, drift


def fitted(anchors, num_domains):
    problem = LineProblem.of(anchors, anchors.rank, num_domains)
    noise = estimate_noise(problem, anchors.label, anchors.slack_ns)
    return fit_lines(problem, noise, np.ones(num_domains, dtype=np.bool_))


def relative_errors(lines, offset, drift, at_ns):
    local = at_ns - offset - drift * at_ns
    common = (local - lines.centre_ns) * (1 + lines.drift) + lines.offset_ns
    return common - common[0]


@pytest.mark.parametrize("num_events", [3_000, 150_000])
def test_small_problems_and_those_solved_on_a_part_first_find_the_clocks(num_events):
    anchors, offset, drift = ring_anchors(8, num_events, 20_000)
    lines = fitted(anchors, 8)
    for at in (0.0, 5e9, 1e10):
        assert np.abs(relative_errors(lines, offset, drift, at)).max() < 10_000
    assert lines.noise_ns == pytest.approx(20_000, rel=0.1)


def test_a_small_class_keeps_its_noise_beside_a_large_one():
    many, _, _ = ring_anchors(4, 300_000, 1_000)
    few, _, _ = ring_anchors(4, 20, 90_000, seed=1)
    apart = Anchors(few.event, few.rank + 4, few.end_ns, few.slack_ns, few.label)
    both = many.joined(apart)
    noise = estimate_noise(LineProblem.of(both, both.rank, 8), both.label, both.slack_ns)
    assert noise[0] == pytest.approx(1_000, rel=0.05)
    assert noise[-1] > 20_000


def test_gross_errors_get_no_weight():
    anchors, offset, drift = ring_anchors(6, 3_000, 20_000)
    wrong = 2 * np.random.default_rng(1).choice(anchors.num_events, 200, replace=False)
    anchors.end_ns[wrong] += 50_000_000
    lines = fitted(anchors, 6)
    assert (lines.weights[wrong] == 0).all()
    assert np.abs(relative_errors(lines, offset, drift, 5e9)).max() < 10_000


def test_a_residual_is_the_distance_from_the_other_members():
    event = np.repeat(np.arange(50), 3)
    end = np.tile([0, 0, 300], 50) + event * 1_000_000
    zeros = np.zeros(150)
    anchors = Anchors(event, event * 0, end, zeros, event * 0)
    lines = unmoved_lines(LineProblem.of(anchors, anchors.rank, 1))
    assert lines.residual_ns.reshape(50, 3).tolist() == [pytest.approx([-150, -150, 300])] * 50


def test_domains_without_anchors_stay_as_they_are():
    anchors, _, _ = ring_anchors(4, 500, 1000)
    lines = fitted(anchors, 6)
    assert lines.offset_ns[4:].tolist() == lines.drift[4:].tolist() == [0, 0]


def test_offsets_alone_are_solved_as_drifts_of_zero_are():
    """By half of the matrix, to the last digit: as if one clock without anchors drifted."""
    anchors, _, _ = ring_anchors(4, 300, 1000)
    problem = LineProblem.of(anchors, anchors.rank, 5)
    weighed = problem.weighed(np.random.default_rng(1).uniform(0.5, 2.0, len(anchors.event)))
    found = weighed.solve(np.zeros(5, dtype=np.bool_), np.zeros(10))
    by_both = weighed.solve(np.arange(5) == 4, np.zeros(10))
    assert found.tolist() == by_both.tolist()
    assert found[:4].any() and not found[4:].any()


@pytest.mark.parametrize("is_drifting", [False, True], ids=["offsets", "drifts"])
def test_a_formed_matrix_solves_what_two_products_do(monkeypatch, is_drifting):
    anchors, _, _ = ring_anchors(6, 600, 1000)
    problem = LineProblem.of(anchors, anchors.rank, 6)
    weighed = problem.weighed(np.random.default_rng(1).uniform(0.5, 2.0, len(anchors.event)))
    drifting = np.full(6, is_drifting)
    formed = weighed.solve(drifting, np.zeros(12))
    monkeypatch.setattr(fitting, "_FORMED_COLUMNS", 0)
    by_products = weighed.solve(drifting, np.zeros(12))
    assert np.abs(formed).max() > 1e4 and bool(formed[6:].any()) is is_drifting
    np.testing.assert_allclose(formed, by_products, rtol=1e-9, atol=1e-3)


def test_the_solver_agrees_with_a_dense_solution():
    random = np.random.default_rng(0)
    half = random.normal(size=(30, 30))
    matrix = half @ half.T + np.eye(30)
    right = random.normal(size=30) * 1e4
    found = conjugate_gradients(lambda v: matrix @ v, right, matrix.diagonal(), np.zeros(30))
    np.testing.assert_allclose(found, np.linalg.solve(matrix, right), rtol=1e-4, atol=1e-3)


def test_the_solver_ends_where_rounding_leaves_a_part_it_cannot_reach():
    laplacian = np.array([[1.0, -1.0], [-1.0, 1.0]])
    right = np.array([1e6, -1e6 + 1e-3])
    found = conjugate_gradients(lambda v: laplacian @ v, right, np.ones(2), np.zeros(2))
    assert found[0] - found[1] == pytest.approx(1e6)
