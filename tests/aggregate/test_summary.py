from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregate import build_timeline, render_text, summarise
from aggregate.summary import SHARES
from megascan.schema import Track
from megascan.topology import Layout

PAIR = {"tp@0": (0, 1)}


def shares(build, rows, device="cpu", **options):
    options = {"domains": ["host"] * 8} | options
    timeline = build_timeline(build.trace(rows, PAIR, device=device, **options))
    return summarise(timeline).iterations.to_pylist()


def named(row):
    return {share: row[f"{share}_ns"] for share in SHARES if row[f"{share}_ns"]}


def test_shares_of_an_iteration_known_by_hand(build):
    rows = [
        build.span(0, "iteration", "iteration", 0, 100),
        build.span(0, "data", "data", 0, 10),
        build.span(0, "compute", "forward", 10, 60),
        build.collective(0, "tp@0", 40, 60),
        build.span(0, "optimizer", "optimizer", 70, 90),
        build.collective(1, "tp@0", 55, 60),
    ]
    first, second = shares(build, rows)
    assert named(first) == {"host": 10, "compute": 50, "wait": 15, "transfer": 5, "idle": 20}
    assert (first["rank"], first["iteration"], first["duration_ns"]) == (0, 1, 100)
    assert named(second) == {"transfer": 5}


def test_host_work_interrupts_compute_on_a_cpu_and_runs_beside_it_on_a_gpu(build):
    rows = [
        build.span(0, "iteration", "iteration", 0, 100),
        build.span(0, "compute", "forward", 0, 80),
        build.span(0, "gc", "gc", 60, 90, track=int(Track.HOST)),
    ]
    assert named(shares(build, rows, "cpu")[0]) == {"compute": 60, "host": 30, "idle": 10}
    assert named(shares(build, rows, "cuda")[0]) == {"compute": 80, "host": 10, "idle": 10}


def test_hidden_communication_is_compute_and_exposed_communication_is_not_idle(build):
    beside = {"track": int(Track.OVERLAPPED)}
    rows = [
        build.span(0, "iteration", "iteration", 0, 100),
        build.span(0, "compute", "backward", 0, 60),
        build.collective(0, "tp@0", 20, 90, **beside),
        build.collective(1, "tp@0", 80, 90, **beside),
    ]
    found = shares(build, rows, "cuda")[0]
    assert named(found) == {"compute": 60, "wait": 20, "transfer": 10, "idle": 10}


def test_waiting_for_gradients_that_travel_beside_it_is_no_computing(build):
    """`grad-sync` lasts until the slowest rank's gradients are there; what is left computes."""
    beside = {"track": int(Track.OVERLAPPED)}
    rows = [
        build.span(0, "iteration", "iteration", 0, 100),
        build.span(0, "compute", "backward", 0, 30),
        build.collective(0, "tp@0", 20, 80, **beside),
        build.span(0, "optimizer", "grad-sync", 30, 85),
        build.span(0, "optimizer", "optimizer", 85, 95),
        build.collective(1, "tp@0", 70, 80, **beside),
    ]
    found = shares(build, rows, "cuda")[0]
    assert named(found) == {"compute": 45, "wait": 40, "transfer": 10, "idle": 5}


def test_a_gap_is_the_hosts_when_it_launched_after_the_device_had_finished(build):
    rows = [
        build.span(0, "iteration", "iteration", 0, 100),
        build.span(0, "compute", "forward", 0, 20, launch_ns=-30),
        build.span(0, "compute", "forward", 50, 60, launch_ns=-5),
        build.span(0, "compute", "forward", 80, 90, launch_ns=-40),
    ]
    found = named(shares(build, rows, "cuda")[0])
    assert found == {"compute": 40, "dispatch": 30, "idle": 30}


def test_rare_words_are_explained_where_they_are_printed(build):
    rows = [
        build.span(0, "iteration", "iteration", 0, 100),
        build.collective(0, "tp@0", 10, 80),
    ]
    timeline = build_timeline(build.trace(rows, PAIR, domains=["host"] * 8))
    text = render_text(summarise(timeline))
    assert "unsplit: communication whose partners are not in the trace" in text
    assert "dispatch" not in text and "preempted" not in text


def test_communication_without_a_match_is_unsplit(build):
    rows = [
        build.span(0, "iteration", "iteration", 0, 100),
        build.collective(0, "tp@0", 20, 90),
        build.span(1, "compute", "forward", 0, 10),
    ]
    assert named(shares(build, rows)[0]) == {"unsplit": 70, "idle": 30}


def test_time_off_the_cpu_is_preempted_unless_something_else_explains_it(build):
    rows = [
        build.span(0, "iteration", "iteration", 0, 100),
        build.span(0, "compute", "forward", 0, 100, cpu_ns=60),
        build.span(0, "compute", "layer", 10, 90, cpu_ns=50),
        build.span(0, "data", "data", 20, 40, cpu_ns=2),
    ]
    assert named(shares(build, rows)[0]) == {"compute": 58, "preempted": 22, "host": 20}


def test_an_iteration_without_its_own_span_lasts_from_first_to_last(build):
    rows = [
        build.span(0, "compute", "forward", 5, 20, iteration=3),
        build.span(0, "compute", "backward", 25, 45, iteration=3),
        build.span(0, "gc", "gc", 90, 95, iteration=-1),
    ]
    (row,) = shares(build, rows)
    assert (row["iteration"], row["duration_ns"]) == (3, 40)
    assert named(row) == {"compute": 35, "idle": 5}


drawn_spans = st.lists(
    st.tuples(
        st.sampled_from(["compute", "optimizer", "data", "gc", "host", "collective", "p2p"]),
        st.integers(0, 2),
        st.integers(1, 3),
        st.integers(0, 90),
        st.integers(0, 60),
        st.integers(-1, 60),
        st.booleans(),
        st.integers(-40, 0),
    ),
    min_size=1,
    max_size=25,
)


@given(drawn_spans, st.sampled_from(["cpu", "cuda"]))
@settings(max_examples=150, deadline=None)
def test_shares_are_never_negative_and_add_up_exactly(build, drawn, device):
    rows = []
    for number, (kind, rank, iteration, after, length, cpu, beside, launch) in enumerate(drawn):
        start = 100 * iteration + after
        more = {"iteration": iteration, "cpu_ns": cpu, "sequence": number // 3}
        more |= {"launch_ns": launch} if device == "cuda" else {}
        more |= {"track": int(Track.OVERLAPPED)} if beside and kind in ("collective", "p2p") else {}
        if kind == "collective":
            rows.append(build.collective(rank, "tp@0", start, start + length, **more))
        elif kind == "p2p":
            rows.append(build.send(rank, 1 - rank % 2, start, start + length, **more))
        else:
            rows.append(build.span(rank, kind, kind, start, start + length, **more))
    for row in shares(build, rows, device, layout=Layout(dp=3)):
        parts = [row[f"{share}_ns"] for share in SHARES]
        assert min(parts) >= 0
        assert sum(parts) == row["duration_ns"]


@pytest.fixture
def timeline(build):
    offset = np.array([0, 4e7, -3e7, 1e7])
    trace, _ = build.skewed_job(Layout(dp=4), 40, offset_ns=offset, jitter_ns=2e4, slow_rank=2)
    return build_timeline(trace)


def test_the_rank_that_everyone_waits_for_stands_first(timeline):
    summary = summarise(timeline)
    ranks = summary.ranks.to_pylist()
    assert ranks[0]["rank"] == 2
    assert ranks[0]["wait_ratio"] < 0.05
    assert ranks[1]["wait_ratio"] > 0.3
    for row in ranks:
        assert sum(row[f"{share}_ratio"] for share in SHARES) == pytest.approx(1, abs=1e-12)


def test_text_tells_shares_clocks_and_completeness(timeline):
    text = render_text(summarise(timeline))
    lines = text.splitlines()
    assert lines[0] == "run run: 4 of 4 ranks, 160 spans, 40 matched communications"
    (head,) = [place for place, line in enumerate(lines) if line.startswith("rank  place")]
    assert lines[head + 1].split()[:2] == ["2", "DP2"]
    assert not any("preempted" in line or "unsplit" in line for line in lines)
    assert any("ends of collectives: robust least squares over 4 clock domains" in s for s in lines)
    (row,) = [line.split() for line in lines if " clock1 " in line]
    assert float(row[2]) == pytest.approx(40, abs=0.02)
    assert "unmatched: none; duplicates: 0" in lines
    assert not text.endswith("\n")


def test_json_holds_all_and_is_json(timeline):
    record = json.loads(json.dumps(summarise(timeline).to_json(), allow_nan=False))
    assert [len(record[key]) for key in ("ranks", "iterations")] == [4, 4]
    assert [clock["rank"] for clock in record["alignment"]["clocks"]] == [0, 1, 2, 3]
    assert record["completeness"]["num_unmatched"] == {"collective": 0, "p2p": 0}
    assert record["num_matches"] == 40


def test_a_slow_first_iteration_does_not_stand_for_the_others(build):
    """Rank 0 loads for 900 ns first; its later iterations take 100, 110 and 120 ns."""
    times = [(0, 900), (900, 1000), (1000, 1110), (1110, 1230)]
    rows = [
        build.span(rank, "iteration", "iteration", *time, iteration=number)
        for rank in (0, 1)
        for number, time in enumerate(times[rank:], start=1)
    ]
    summary = summarise(build_timeline(build.trace(rows)))
    found = {row["rank"]: row for row in summary.to_json()["ranks"]}
    assert found[0]["iteration_median_ns"] == 115
    assert found[1]["iteration_median_ns"] == 110
    assert (found[0]["duration_ns"], found[0]["num_iterations"]) == (1230, 4)
    text = render_text(summary)
    assert "median iteration, and shares of the time of all" in text
    assert [line.split()[2:5] for line in text.splitlines() if " DP0 " in line] == [
        ["0.00", "ms", "0.0"]
    ]


def test_a_large_job_is_shown_in_short(build):
    layout = Layout(tp=4, dp=8)
    trace, _ = build.skewed_job(layout, 12, jitter_ns=1e3)
    lines = render_text(summarise(build_timeline(trace)), most_ranks=5).splitlines()
    assert "… and 27 more ranks" in lines
    assert any(line.startswith("32 clocks of 32 ranks: offset") for line in lines)


def test_a_timeline_without_iterations_still_has_a_text(build):
    rows = [build.span(0, "gc", "gc", 0, 5, iteration=-1)]
    text = render_text(summarise(build_timeline(build.trace(rows))))
    assert "no iteration was traced" in text


def test_one_clock_is_explained_instead_of_tabled(build):
    trace, _ = build.skewed_job(Layout(dp=4), 40, jitter_ns=2e6)
    timeline = build_timeline(trace)
    one = {rank: replace(fit, domain="vm:boot") for rank, fit in timeline.clocks.items()}
    lines = render_text(summarise(replace(timeline, clocks=one))).splitlines()
    (told,) = [line for line in lines if "leave a collective within" in line]
    assert " ms of each other" in told
    assert not any(line.startswith("ranks  clock") for line in lines)


def test_a_gpus_clock_is_shown_by_host_and_card_and_kept_whole_in_json(build):
    trace, _ = build.skewed_job(Layout(dp=2), 12, jitter_ns=1e3)
    timeline = build_timeline(trace)
    domains = {rank: f"{head.host}:boot:GPU-{rank}:41" for rank, head in timeline.headers.items()}
    headers = {
        rank: replace(
            head,
            clock=replace(head.clock, domain=domains[rank]),
            device=replace(head.device, kind="cuda", index=6 + rank, uuid=f"GPU-{rank}"),
        )
        for rank, head in timeline.headers.items()
    }
    clocks = {rank: replace(fit, domain=domains[rank]) for rank, fit in timeline.clocks.items()}
    summary = summarise(replace(timeline, headers=headers, clocks=clocks))
    text = render_text(summary)
    assert f"{headers[1].host} GPU 7 " in text
    assert "boot" not in text
    assert summary.to_json()["alignment"]["clocks"][1]["domain"] == domains[1]


def test_text_fits_a_terminal(build):
    trace, _ = build.skewed_job(Layout(tp=2, dp=2, pp=2), 12, jitter_ns=1e3)
    assert max(map(len, render_text(summarise(build_timeline(trace))).splitlines())) <= 120
