"""The page: whole, self-contained, escaped, and saying what the report says."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pyarrow as pa
import pytest

from detect.examination import Examination
from detect.page import Fact, PageInputs, render_page
from megascan.timeline import Timeline
from megascan.topology import Layout

LAYOUTS = [Layout(), Layout(dp=2), Layout(pp=4), Layout(tp=2, pp=2, vpp=2), Layout(cp=2, dp=2)]


def test_it_is_well_formed(faulty_page: str, document) -> None:
    page = document(faulty_page)
    assert page.problems == []
    assert faulty_page.startswith("<!DOCTYPE html>")
    assert page.attributes("html", "lang") == ["en"]


def test_it_loads_nothing_and_runs_nothing(faulty_page: str, document) -> None:
    page = document(faulty_page)
    assert "://" not in faulty_page
    assert not re.search(r"url\(|@import", faulty_page)
    assert {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object"} == set()
    assert [name for _, attrs in page.tags for name in attrs if name.startswith("on")] == []
    assert all(target.startswith("#") for target in page.attributes("a", "href"))
    policy = page.attributes("meta", "content")[0]
    assert "default-src 'none'" in policy


def test_it_says_what_the_report_says(
    faulty: Timeline, inputs: Callable[[Timeline], PageInputs], faulty_page: str, document
) -> None:
    page = document(faulty_page)
    report = inputs(faulty).examined.report
    assert "DEGRADED: rank 5 (DP0 PP1 TP1, host n00" in page.text
    (finding,) = [one for one in report.findings if one.cause == "compute"]
    for sentence in (*finding.evidence, *finding.next_steps):
        assert " ".join(sentence.split()) in page.text
    for name in report.minimum_detectable:
        assert name in page.text
    for fact in ("simulated-", "DP 2 × PP 2 × TP 2", "8 recorded of 8", "granularity full"):
        assert fact in page.text


def test_costs_are_in_step_time_and_gpu_hours(
    faulty: Timeline, inputs: Callable[[Timeline], PageInputs], faulty_page: str, document
) -> None:
    first = inputs(faulty).savings[0]
    text = document(faulty_page).text
    assert f"{first.gpu_hours_per_hour:.2f}" in text
    assert f"{first.gpu_hours_per_day:.1f}" in text
    assert f"{first.speedup:.3f}×" in text


def test_it_can_be_heard(faulty_page: str, document) -> None:
    page = document(faulty_page)
    pictures = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert pictures
    ids = set(page.attributes("title", "id"))
    assert all(picture["role"] == "img" for picture in pictures)
    assert {picture["aria-labelledby"] for picture in pictures} == ids
    assert all(scope in ("col", "row") for scope in page.attributes("th", "scope"))
    assert len(page.attributes("th", "scope")) == page.count("th")
    assert page.count("table") == page.count("caption")
    headings = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == 1 and headings.count(1) == 1
    assert all(later <= earlier + 1 for earlier, later in pairwise(headings))


def test_ids_are_unique_and_links_lead_somewhere(faulty_page: str, document) -> None:
    page = document(faulty_page)
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {target[1:] for target in page.attributes("a", "href")} <= set(ids)


@pytest.mark.parametrize(
    "name",
    [
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "</title></svg></style><b>",
        "{{ 7 * 7 }}{% raw %}",
        "n\u202e\u0000&amp;'",
    ],
)
def test_names_from_a_trace_stay_text(
    name: str, faulty: Timeline, inputs: Callable, renamed: Callable, faulty_page: str, document
) -> None:
    hostile = replace(inputs(renamed(faulty, name, name)), source=name)
    page, usual = document(render_page(hostile)), document(faulty_page)
    assert page.problems == []
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in usual.tags]
    assert {key for _, attrs in page.tags for key in attrs} == {
        key for _, attrs in usual.tags for key in attrs
    }
    assert "49" not in page.text.partition("MegaScan report")[2].partition("DEGRADED")[0]


def test_a_healthy_job_has_a_healthy_page(
    simulated: Callable[..., Timeline], inputs: Callable[[Timeline], PageInputs], document
) -> None:
    page = document(render_page(inputs(simulated(Layout(dp=4)))))
    assert "HEALTHY: no rank, link or stage stands out" in page.text
    assert "Findings" not in page.text
    assert "4 of 4 recorded ranks compute within 3 % of their peers" in page.text


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: f"world{one.world_size}pp{one.pp}")
def test_any_layout_has_a_page(
    layout: Layout, simulated: Callable[..., Timeline], inputs: Callable, document
) -> None:
    page = document(render_page(inputs(simulated(layout, iterations=6))))
    assert page.problems == []
    assert "nan" not in page.text.lower().split()


def test_without_a_replay_it_says_why(
    faulty: Timeline, inputs: Callable[[Timeline], PageInputs], document
) -> None:
    without = replace(inputs(faulty), whatif=None, savings=(), why_no_whatif="no complete replica")
    assert "could not be replayed: no complete replica" in document(render_page(without)).text


@pytest.mark.parametrize(
    ("layout", "limit"),
    [(Layout(tp=4, pp=8, dp=32), 300_000), (Layout(tp=8, pp=8, dp=64), 300_000)],
    ids=["1024", "4096"],
)
def test_a_large_job_has_a_small_page(
    layout: Layout,
    limit: int,
    large: Callable[..., Examination],
    share_columns: Callable[[int], pa.Table],
    document,
) -> None:
    examined = large(layout, {517: 1.2})
    number = layout.world_size
    text = render_page(
        PageInputs(
            source="large",
            examined=examined,
            facts=(Fact("layout", "large"),),
            shares=share_columns(number),
            why_no_whatif="not asked for",
        )
    )
    page = document(text)
    assert len(text.encode()) < limit
    assert page.problems == []
    assert "rank 517" in page.text
    assert f"{number - 24:,} of {number:,} ranks are left out" in page.text
    drawn = page.count("rect") + sum(path.count("z") for path in page.attributes("path", "d"))
    assert drawn == number
