from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from aggregate.clocks import align_clocks
from aggregate.match import match_spans
from megascan.cli.main import main
from megascan.timeline import numbers
from megascan.topology import Layout

MS, US = 1e6, 1e3


def error_between(fit, one, other):
    """Error bars, ns, of comparing times between ranks."""
    return fit.accuracy.between(fit.domain[one], fit.domain[other])


def aligned(trace):
    matches = match_spans(trace.spans, trace.headers)
    return align_clocks(trace.spans, matches, trace.headers)


def clock_errors(build, fit, offset_ns, drift, times_ns):
    """(rank, time) error of the fitted clocks against the reference rank's, ns."""
    local = times_ns[None, :] - offset_ns[:, None] - drift[:, None] * times_ns[None, :]
    position = np.broadcast_to(np.arange(len(offset_ns))[:, None], local.shape)
    local = np.rint(local).astype(np.int64) + build.epoch_ns
    common = fit.lines.common(position.ravel(), local.ravel()).reshape(local.shape)
    return common - common[0]


def skews(layout, seed):
    random = np.random.default_rng(seed)
    offset = random.uniform(-100 * MS, 100 * MS, layout.world_size)
    return offset, random.uniform(-50e-6, 50e-6, layout.world_size)


@pytest.mark.parametrize("layout", [Layout(tp=2, dp=2, pp=2), Layout(tp=4, dp=2), Layout(dp=8)])
@pytest.mark.parametrize("seed", [1, 2])
def test_planted_skew_is_found_to_microseconds_without_bias_to_the_slow_rank(build, layout, seed):
    offset, drift = skews(layout, seed)
    trace, ends = build.skewed_job(
        layout, 300, offset_ns=offset, drift=drift, jitter_ns=20 * US, slow_rank=3, seed=seed
    )
    fit = aligned(trace)
    error = clock_errors(build, fit, offset, drift, ends)
    assert np.percentile(np.abs(error), 99) < 30 * US
    assert abs(error[3].mean()) < 10 * US
    assert (fit.residual_median_ns > 10 * US).all()
    assert (fit.residual_p99_ns < 120 * US).all()
    assert fit.num_anchors.tolist() == pytest.approx([300] * 8, abs=6)
    assert fit.component.tolist() == [0] * 8


def test_starts_do_not_enter_the_fit(build):
    layout = Layout(dp=4)
    offset, drift = skews(layout, 5)
    skew = {"offset_ns": offset, "drift": drift, "jitter_ns": 20 * US, "seed": 5}
    fits = [aligned(build.skewed_job(layout, 100, slow_rank=rank, **skew)[0]) for rank in (-1, 2)]
    assert fits[0].lines.offset_ns == pytest.approx(fits[1].lines.offset_ns, abs=2)
    assert fits[0].lines.drift == pytest.approx(fits[1].lines.drift, abs=1e-9)


def moved_ends(trace, rows, by_ns):
    duration = numbers(trace.spans, "duration_ns").copy()
    duration[rows] += np.asarray(by_ns, dtype=np.int64)
    place = trace.spans.schema.get_field_index("duration_ns")
    return trace.spans.set_column(place, "duration_ns", pa.array(duration))


def test_bad_matches_and_a_paused_rank_do_not_move_the_clocks(build):
    layout = Layout(tp=2, dp=4)
    offset, drift = skews(layout, 7)
    clean, ends = build.skewed_job(
        layout, 200, offset_ns=offset, drift=drift, jitter_ns=20 * US, seed=7
    )
    random = np.random.default_rng(0)
    rows = random.choice(clean.spans.num_rows, 80, replace=False)
    paused = np.flatnonzero(numbers(clean.spans, "rank") == 5)[90:110]
    spans = moved_ends(clean, rows, random.uniform(1 * MS, 50 * MS, 80))
    spans = moved_ends(build.trace(spans, layout=layout), paused, np.full(20, 300 * MS))
    groups = {name: ranks for h in clean.headers.values() for name, ranks in h.groups.items()}
    fit = aligned(build.trace(spans, groups, layout))
    error = clock_errors(build, fit, offset, drift, ends)
    assert np.percentile(np.abs(error), 99) < 30 * US
    assert any("were not believed" in note for note in fit.notes)


def test_few_noisy_links_between_nodes_survive_many_exact_ones_inside(build):
    layout = Layout(tp=4, dp=2)
    offset, drift = skews(layout, 3)
    quiet, ends = build.skewed_job(
        layout, 400, period_ns=2 * MS, offset_ns=offset, drift=drift, jitter_ns=0.5 * US, seed=3
    )
    group = np.array(quiet.spans.column("group").to_pylist())
    between = np.flatnonzero(np.char.startswith(group, "dp"))
    between = between[numbers(quiet.spans, "sequence")[between] % 5 == 0]
    noise = np.random.default_rng(1).normal(0, 60 * US, len(between))
    keep = np.char.startswith(group, "tp")
    keep[between] = True
    spans = moved_ends(quiet, between, noise).filter(pa.array(keep))
    groups = {name: ranks for h in quiet.headers.values() for name, ranks in h.groups.items()}
    fit = aligned(build.trace(spans, groups, layout))
    error = clock_errors(build, fit, offset, drift, ends)
    assert np.abs(error[:4]).max() < 1 * US
    assert np.abs(error).max() < 60 * US
    assert fit.num_anchors.min() > 200


def test_sets_of_ranks_without_a_link_are_components_with_a_reference_each(build):
    groups = {"tp@0": (0, 1), "tp@2": (2, 3)}
    shift = (0, 5000, 0, -7000)
    rows = [
        build.collective(rank, f"tp@{rank // 2 * 2}", 10**6 * n - shift[rank],
                         10**6 * n + 10**5 - shift[rank], sequence=n)
        for rank in range(4) for n in range(5)
    ]  # fmt: skip
    fit = aligned(build.trace(rows, groups, Layout(tp=2, dp=2)))
    assert fit.component.tolist() == [0, 0, 1, 1]
    assert fit.lines.offset_ns == pytest.approx([0, 5000, 0, -7000], abs=1)
    assert "2 separate sets" in " ".join(fit.notes)
    one, other = np.array([0, 0]), np.array([1, 2])
    assert np.isfinite(error_between(fit, one, other)).tolist() == [True, False]


def test_without_collectives_the_host_clocks_stand_and_it_says_so(build):
    rows = [build.span(rank, "compute", "forward", 0, 100) for rank in (0, 1)]
    fit = aligned(build.trace(rows))
    assert fit.method == "host clocks: no matched communication links the clock domains"
    assert fit.lines.offset_ns.tolist() == fit.lines.drift.tolist() == [0, 0]
    assert fit.num_anchors.tolist() == [0, 0]


def test_one_domain_is_not_moved_but_its_residuals_are_told(build):
    rows = [
        build.collective(rank, "dp@0", 1000 * n, 1000 * n + 500 + 100 * rank, sequence=n)
        for rank in (0, 1)
        for n in range(10)
    ]
    fit = aligned(build.trace(rows, {"dp@0": (0, 1)}, domains=["host", "host"]))
    assert fit.method.startswith("one host clock")
    assert fit.lines.offset_ns.tolist() == fit.lines.drift.tolist() == [0, 0]
    assert fit.residual_median_ns.tolist() == [100, 100]
    assert error_between(fit, np.array([0]), np.array([1])).tolist() == [0]


def test_ranks_of_one_domain_move_together(build):
    groups = {"dp@0": (0, 1, 2, 3)}
    rows = [
        build.collective(rank, "dp@0", 10**6 * n - 4000 * (rank > 1), 10**6 * n + 50000
                         - 4000 * (rank > 1) + 30 * rank, sequence=n)
        for rank in range(4) for n in range(20)
    ]  # fmt: skip
    fit = aligned(build.trace(rows, groups, Layout(dp=4), domains=["a", "a", "b", "b"]))
    assert fit.lines.offset_ns[:2].tolist() == [0, 0]
    assert fit.lines.offset_ns[2] == fit.lines.offset_ns[3] == pytest.approx(4000 - 60, abs=1)


def test_a_window_too_short_for_a_drift_claims_none(build):
    layout = Layout(dp=2)
    trace, _ = build.skewed_job(
        layout, 10, period_ns=MS, offset_ns=np.array([0, 5 * MS]), jitter_ns=20 * US, seed=2
    )
    fit = aligned(trace)
    assert fit.lines.drift.tolist() == [0, 0]
    assert abs(fit.lines.offset_ns[1] - 5 * MS) < 30 * US
    assert any("too short to determine the drift of" in note for note in fit.notes)


def test_a_broadcast_does_not_tie_clocks(build):
    rows = [build.collective(rank, "dp@0", 0, 500 + 9000 * rank, op="broadcast") for rank in (0, 1)]
    assert aligned(build.trace(rows, {"dp@0": (0, 1)})).num_anchors.tolist() == [0, 0]


def pipeline(build, offset, delays=(400, 400), backward=True):
    rows = []
    for n in range(30):
        at = 10**6 * n
        rows += [
            build.send(0, 1, at, at + delays[0], sequence=n),
            build.receive(1, 0, at - 50 - offset, at + delays[0] - offset, sequence=n),
        ]
        if backward:
            back = {"direction": "backward", "sequence": n}
            rows += [
                build.send(1, 0, at + 5000 - offset, at + 5000 + delays[1] - offset, **back),
                build.receive(0, 1, at + 4000, at + 5000 + delays[1], **back),
            ]
    return build.trace(rows)


def test_messages_both_ways_link_clocks_that_no_collective_does(build):
    fit = aligned(pipeline(build, 70_000))
    assert fit.component.tolist() == [0, 0]
    assert fit.lines.offset_ns[1] == pytest.approx(70_000, abs=60)
    assert fit.residual_p99_ns[1] >= 400
    assert "bounds from messages" in fit.method


@pytest.mark.parametrize(
    ("ends_early", "most_ns"), [(0, 3_000), (900_000, None)], ids=["rendezvous", "buffered"]
)
def test_ends_of_messages_that_wait_for_each_other_are_a_common_moment(build, ends_early, most_ns):
    """Sends forward wait a millisecond for their receives, so the bounds are as wide; both sides
    leave together, unless sends are buffered and end early.
    """
    rows, offset = [], 70_000
    for n in range(40):
        at = 10**7 * n
        away, home = at + 10**6, at + 5 * 10**6
        back = {"direction": "backward", "sequence": n}
        rows += [
            build.send(0, 1, at, away + 300_000 - ends_early, sequence=n),
            build.receive(1, 0, away - offset, away + 300_000 - offset, sequence=n),
            build.send(1, 0, home - offset, home + 300_000 - ends_early - offset, **back),
            build.receive(0, 1, home - 10**6, home + 300_000, **back),
        ]
    fit = aligned(build.trace(rows))
    if most_ns is None:
        assert fit.residual_p99_ns[1] >= 300_000
    else:
        assert fit.lines.offset_ns[1] == pytest.approx(offset, abs=60)
        assert fit.residual_p99_ns[1] <= most_ns


def test_messages_one_way_link_clocks_up_to_their_transfer_time(build):
    fit = aligned(pipeline(build, 70_000, backward=False))
    assert fit.lines.offset_ns[1] == pytest.approx(70_000 - 400, abs=60)
    assert fit.residual_p99_ns[1] >= 100_000


def test_messages_steady_clocks_where_collectives_are_few_and_noisy(build):
    random = np.random.default_rng(8)
    rows = []
    for n in range(40):
        at = 10**8 * n
        late = [int(random.choice([0, 450_000])) for _ in range(2)]
        rows += [
            build.collective(rank, "world@0", at, at + 10**6 + late[rank], iteration=n + 1)
            for rank in (0, 1)
        ]
        away, home = at + 2 * 10**6, at + 4 * 10**6
        noise = [int(abs(random.normal(0, 10_000))) for _ in range(2)]
        back = {"direction": "backward", "iteration": n + 1}
        rows += [
            build.send(0, 1, away, away + 600_000, iteration=n + 1),
            build.receive(1, 0, away, away + 600_000 + noise[0], iteration=n + 1),
            build.send(1, 0, home, home + 600_000, **back),
            build.receive(0, 1, home, home + 600_000 + noise[1], **back),
        ]
    groups, layout = {"world@0": (0, 1)}, Layout(pp=2)
    fit = aligned(build.trace(rows, groups, layout))
    only_collectives = [row for row in rows if row["kind"] == "collective"]
    without = aligned(build.trace(only_collectives, groups, layout))
    at = np.repeat(build.epoch_ns + np.array([0, 4 * 10**9]), 2)
    error = np.abs(fit.lines.common(np.array([0, 1, 0, 1]), at) - at).max()
    assert error < 50 * US
    assert error < np.abs(without.lines.common(np.array([0, 1, 0, 1]), at) - at).max()


def test_messages_that_bound_stages_loosely_tell_no_drift_between_them(build):
    """Rings tell the drift within each stage, 20 and -15 ppm; four messages that take up to 8 ms,
    at one time forward and at another backward, would say some 100 ppm between the stages.
    """
    drift = np.array([0.0, 20e-6, 0.0, -15e-6])

    def local(rank, time_ns):
        return round(time_ns * (1 - drift[rank]))

    rows = []
    for n in range(4):
        at, iteration = 15 * 10**9 * n, {"iteration": n + 1}
        for ring in range(10):
            end = at + ring * 10**7 + 10**6
            rows += [
                build.collective(rank, f"dp@{rank // 2 * 2}", local(rank, end - 10**6),
                                 local(rank, end), **iteration)
                for rank in range(4)
            ]  # fmt: skip
        slow = (8 * 10**6, 10**5) if n % 4 in (0, 1) else (10**5, 8 * 10**6)
        sent, back = at + 2 * 10**8, {"direction": "backward", **iteration}
        rows += [
            build.send(0, 2, local(0, sent), local(0, sent + 1000), **iteration),
            build.receive(2, 0, local(2, sent), local(2, sent + slow[0]), **iteration),
            build.send(2, 0, local(2, sent + 10**7), local(2, sent + 10**7 + 1000), **back),
            build.receive(0, 2, local(0, sent), local(0, sent + 10**7 + slow[1]), **back),
        ]
    groups = {"dp@0": (0, 1), "dp@2": (2, 3)}
    fit = aligned(build.trace(rows, groups, Layout(dp=2, pp=2)))
    assert fit.lines.drift * 1e6 == pytest.approx(drift * 1e6, abs=0.5)
    assert fit.component.tolist() == [0] * 4
    assert any("drift of 2 clocks" in note for note in fit.notes)


def test_a_slow_link_in_one_direction_does_not_move_clocks_that_collectives_tie(build):
    rows = []
    for n in range(40):
        at = 10**7 * n
        jitter = n % 5 * 1000
        rows += [
            build.collective(0, "world@0", at, at + 10**6, iteration=n + 1),
            build.collective(1, "world@0", at, at + 10**6 + jitter - 2000, iteration=n + 1),
            build.send(0, 1, at + 2 * 10**6, at + 5 * 10**6, iteration=n + 1),
            build.receive(1, 0, at + 2 * 10**6, at + 5 * 10**6, iteration=n + 1),
            build.send(1, 0, at + 6 * 10**6, at + 6_100_000, direction="backward",
                       iteration=n + 1),
            build.receive(0, 1, at + 6 * 10**6, at + 6_100_000, direction="backward",
                          iteration=n + 1),
        ]  # fmt: skip
    fit = aligned(build.trace(rows, {"world@0": (0, 1)}, Layout(pp=2)))
    assert abs(fit.lines.offset_ns[1]) < 2 * US


def test_clocks_give_way_so_that_messages_end_after_they_were_sent(build):
    random = np.random.default_rng(4)
    rows = []
    for n in range(50):
        at, late = 10**6 * n, int(random.normal(4000, 2000))
        rows += [
            build.collective(0, "pp@0", at, at + 50_000, sequence=n),
            build.collective(1, "pp@0", at, at + 50_000 + late, sequence=n),
            build.send(0, 1, at + 100_000, at + 101_000, sequence=n),
            build.receive(1, 0, at + 100_000, at + 101_000, sequence=n),
        ]
    trace = build.trace(rows, {"pp@0": (0, 1)}, Layout(pp=2))
    fit = aligned(trace)
    matches = match_spans(trace.spans, trace.headers)
    op = np.array(trace.spans.column("op").to_pylist())
    start, duration = numbers(trace.spans, "start_ns"), numbers(trace.spans, "duration_ns")
    position = numbers(trace.spans, "rank")
    order = np.argsort(matches.match, kind="stable")
    sends, receipts = order[op[order] == "send"], order[op[order] == "recv"]
    sent = fit.lines.common(position[sends], start[sends])
    received = fit.lines.common(position[receipts], (start + duration)[receipts])
    assert (received >= sent - 1).all()
    assert any("moved by up to" in note for note in fit.notes)


def test_one_absurd_message_moves_no_clock(build):
    rows = [
        build.collective(rank, "pp@0", 10**6 * n, 10**6 * n + 50_000 + rank % 2 * (n % 3) * 10,
                         sequence=n)
        for rank in (0, 1) for n in range(50)
    ]  # fmt: skip
    bad = [build.send(0, 1, 90_000_000, 90_000_100), build.receive(1, 0, 0, 100)]
    fit = aligned(build.trace([*rows, *bad], {"pp@0": (0, 1)}, Layout(pp=2)))
    assert abs(fit.lines.offset_ns[1]) < 50


def test_corrected_times_keep_their_order(build):
    layout = Layout(dp=2)
    trace, _ = build.skewed_job(
        layout, 100, offset_ns=np.array([0, 3 * MS]), drift=np.array([0, 9e-5]), jitter_ns=US
    )
    fit = aligned(trace)
    times = build.epoch_ns + np.sort(np.random.default_rng(0).integers(0, 10**6, 10**5))
    for rank in (0, 1):
        common = fit.lines.common(np.full(len(times), rank), times)
        assert (np.diff(common) >= 0).all()


def test_the_fit_of_a_rank_is_told_for_a_reference_time(build):
    layout = Layout(dp=2)
    trace, _ = build.skewed_job(
        layout, 200, offset_ns=np.array([0, 3 * MS]), drift=np.array([0, 9e-5]), jitter_ns=US
    )
    fit = aligned(trace)
    reference = build.epoch_ns
    clock = fit.fits(reference)[1]
    local = np.array([build.epoch_ns + 123_456_789])
    told = local + clock.offset_ns + clock.drift_ppm * 1e-6 * (local - reference)
    assert abs(told - fit.lines.common(np.array([1]), local))[0] <= 512  # a double near 1.75e18 ns
    assert (clock.rank, clock.domain, clock.component) == (1, "clock1", 0)


def test_a_fit_does_not_depend_on_the_processor(tmp_path):
    """BLAS and numpy add in other orders on other processors; the last digits of a fit are kept.

    Few messages tie two hosts together here, so that a last digit of a sum would become 1e-4 ns.
    """
    layout = ["--tp", "4", "--pp", "2", "--dp", "4", "--ranks-per-host", "8", "--seed", "22"]
    size = ["--iterations", "6", "--layers", "2", "--microbatches", "2", "--granularity", "base"]
    assert main(["simulate", *layout, *size, "-o", str(tmp_path / "job")]) == 0
    program = (
        "import sys; from pathlib import Path; from aggregate import build_timeline; "
        "from megascan.reader import read_trace; "
        "print(build_timeline(read_trace(Path(sys.argv[1]))).clocks)"
    )
    plain = {"OPENBLAS_CORETYPE": "Prescott", "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4"}
    said = [
        subprocess.run(
            [sys.executable, "-c", program, tmp_path / "job"],
            env=os.environ | processor, capture_output=True, text=True, check=True,
        ).stdout
        for processor in ({}, plain)
    ]  # fmt: skip
    assert "drift" in said[0]
    assert said[0] == said[1]
