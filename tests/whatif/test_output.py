"""Text, JSON, heat map and ideal timeline of a result."""

from __future__ import annotations

import json
import struct
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from aggregate import build_timeline
from detect.whatif import Replay, replay_of_timeline, saved_by_fixing
from detect.whatif.ideal import ideal_timeline
from detect.whatif.render import (
    colours,
    heat_grid,
    heat_map_png,
    heat_map_svg,
    render_text,
    to_json,
)
from detect.whatif.slowness import WhatIf, analyze, worst_ranks
from megascan.schema import Kind
from megascan.simulate import Imbalance, JobModel, compute_bound, parse_fault, simulate_trace
from megascan.timeline import TIMELINE_SCHEMA, Timeline, codes, numbers
from megascan.topology import Layout

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def slow(data_parallel_replay: Callable[[Sequence[float]], Replay]) -> WhatIf:
    return analyze(data_parallel_replay([1, 2, 1, 1]))


@pytest.fixture(scope="module")
def pipeline() -> Timeline:
    layout = Layout(tp=2, pp=2, dp=2)
    job = JobModel(layout=layout, costs=compute_bound(layout), iterations=4, num_microbatches=4)
    return build_timeline(simulate_trace(job, seed=3))


def test_the_first_line_is_the_answer(slow: WhatIf) -> None:
    text = render_text(slow, [saved_by_fixing(slow.replay, [1])])
    first = text.splitlines()[0]
    assert first.startswith("A step takes 12.75 s and would take 8.25 s")
    assert "35.3 % of the GPU time is lost (S = 1.545" in first
    assert "Most of it lies with single ranks" in text
    assert "rank 1 (DP1 PP0): step 6.75 s, the job 1.889x as fast" in text
    assert "differ by 0.00 %" in text


def test_a_healthy_job_reads_healthy(
    data_parallel_replay: Callable[[Sequence[float]], Replay],
) -> None:
    result = analyze(data_parallel_replay([1, 1]))
    text = render_text(result, [saved_by_fixing(result.replay, [0])])
    assert "Nothing stands out" in text
    assert "nothing gained, it runs like its peers" in text
    assert "There is no slowness to explain." in text


def test_json_has_the_names_of_the_definitions(slow: WhatIf) -> None:
    record = json.loads(json.dumps(to_json(slow, [saved_by_fixing(slow.replay, [1])])))
    assert record["T_ori"] == pytest.approx(12.75)
    assert record["S"] == pytest.approx(12.75 / 8.25)
    assert record["S_w"]["1"] == pytest.approx(12.75 / 8.25)
    assert set(record["S_w"]) == {"0", "1", "2", "3"}
    assert record["M_W"]["ranks"] == [1]
    assert record["savings"][0]["step_time_cost_ratio"] == pytest.approx(12.75 / 6.75)


def test_json_has_null_where_there_is_no_number(
    data_parallel_replay: Callable[[Sequence[float]], Replay],
) -> None:
    record = to_json(analyze(data_parallel_replay([1, 1])))
    assert "NaN" not in json.dumps(record)


def test_worst_ranks_cost_more_than_their_peers(slow: WhatIf) -> None:
    assert worst_ranks(slow) == (1,)
    assert worst_ranks(slow, least=0.5, most=2) == (1, 0)


def test_ranks_of_a_heavy_stage_are_not_the_worst() -> None:
    """Stage 1's ranks cost most, rank 0 alone more than its peers."""
    layout = Layout(pp=2, dp=4)
    job = JobModel(
        layout=layout,
        costs=compute_bound(layout),
        iterations=6,
        num_layers=4,
        imbalance=Imbalance(stage_ratio={1: 3.0}),
    )
    fault = parse_fault("rank=0,kind=compute,factor=2.5")
    timeline = build_timeline(simulate_trace(job, [fault], seed=3))
    result = analyze(replay_of_timeline(timeline))
    assert result.rank_ratio[1].min() > 1.2
    assert worst_ranks(result) == (0,)


@pytest.mark.parametrize("lanes", [2, 3, 4, 5])
def test_peers_are_the_others(
    lanes: int, data_parallel_replay: Callable[[Sequence[float]], Replay]
) -> None:
    result = analyze(data_parallel_replay([1 + 0.3 * (n * 3 % 5) for n in range(lanes)]))
    for lane in range(lanes):
        others = np.delete(result.rank_ratio[0], lane)
        assert result.peer_ratio[0, lane] == pytest.approx(np.median(others))


def test_the_heat_map_has_a_cell_for_every_rank(slow: WhatIf) -> None:
    root = ET.fromstring(heat_map_svg(slow))
    titles = [element.text or "" for element in root.iter(f"{SVG}title")]
    assert len(titles) == 4
    assert "rank 1 (DP1 PP0): 1.5455" in titles
    assert "1.55" in [element.text for element in root.iter(f"{SVG}text")]


def test_heat_map_rows_are_stages_and_tensor_ranks(pipeline: Timeline) -> None:
    grid = heat_grid(analyze(replay_of_timeline(pipeline)))
    assert grid.row_labels == ("PP0 TP0", "PP0 TP1", "PP1 TP0", "PP1 TP1")
    assert grid.column_labels == ("DP0", "DP1")
    assert grid.ranks.tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_colours_run_from_white_to_red() -> None:
    rgb = colours(np.array([[0.9, 1.0, 1.5, 3.0, np.nan]]))[0].tolist()
    assert rgb[0] == rgb[1] == [255, 255, 255]
    assert rgb[2] == rgb[3] == [178, 24, 43]
    assert rgb[4] == [224, 224, 224]


def test_the_picture_is_a_png_of_the_cells(slow: WhatIf) -> None:
    data = heat_map_png(slow, cell_pixels=8)
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (4 * 8, 8)
    length = struct.unpack(">I", data[33:37])[0]
    lines = np.frombuffer(zlib.decompress(data[41 : 41 + length]), dtype=np.uint8)
    pixels = lines.reshape(height, 1 + 3 * width)[:, 1:].reshape(height, width, 3)
    assert pixels[2, 8 + 2].tolist() == [178, 24, 43]
    assert pixels[2, 2].tolist() == [255, 255, 255]


def test_the_ideal_run_as_a_timeline(pipeline: Timeline) -> None:
    replay = replay_of_timeline(pipeline)
    ideal = ideal_timeline(replay, pipeline)
    assert ideal.spans.schema == TIMELINE_SCHEMA
    assert ideal.headers == pipeline.headers
    start = numbers(ideal.spans, "start_ns")
    end = start + numbers(ideal.spans, "duration_ns")
    iteration = numbers(ideal.spans, "iteration")
    assert sorted(set(iteration.tolist())) == replay.steps.tolist()
    first = iteration == replay.steps[0]
    assert (end[first].max() - ideal.origin_ns) * 1e-9 == pytest.approx(replay.ideal_s)
    assert start.min() == ideal.origin_ns
    rank = numbers(ideal.spans, "rank")
    order = np.lexsort((-(end - start), start, rank))
    assert (order == np.arange(len(rank))).all()


def test_ideal_messages_are_paired(pipeline: Timeline) -> None:
    ideal = ideal_timeline(replay_of_timeline(pipeline), pipeline)
    kind, kinds = codes(ideal.spans, "kind")
    messages = kind == kinds.index(Kind.P2P)
    match = numbers(ideal.spans, "match")[messages]
    assert messages.any()
    assert (np.unique(match, return_counts=True)[1] == 2).all()


def test_an_op_table_has_an_ideal_timeline_too(slow: WhatIf) -> None:
    ideal = ideal_timeline(slow.replay)
    assert ideal.spans.num_rows == 2 * 4 * 6
    assert sorted(ideal.headers) == [0, 1, 2, 3]
    assert ideal.layout.label(1) == "DP1"
