"""The page: whole, self-contained, escaped, and saying what the report says."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pyarrow as pa
import pytest

from detect import Cause, Finding, Owner
from detect.detector import Examination
from detect.page import Fact, PageInputs, render_page
from megascan.timeline import Timeline
from megascan.topology import Layout

LAYOUTS = [Layout(), Layout(dp=2), Layout(pp=4), Layout(tp=2, pp=2, vpp=2), Layout(cp=2, dp=2)]


def test_it_is_well_formed(faulty_page: str, document) -> None:
    page = document(faulty_page)
    assert page.problems == []
    assert faulty_page.startswith("<!DOCTYPE html>")
    assert page.attributes("html", "lang") == ["en"]


def test_it_loads_nothing_and_runs_its_own_script_only(faulty_page: str, document) -> None:
    page = document(faulty_page)
    opened_by_a_click = "https://ui.perfetto.dev"
    assert set(re.findall(r"\w+://[^\"]*", faulty_page)) == {
        "http://www.w3.org/2000/svg", opened_by_a_click
    }  # fmt: skip
    assert not re.search(r"url\(|@import|\bimport\b|\bfetch\(|XMLHttp|innerHTML", faulty_page)
    assert {tag for tag, _ in page.tags} & {"link", "img", "iframe", "object"} == set()
    assert page.attributes("script", "src") == [] and page.count("script") == 2
    assert [name for _, attrs in page.tags for name in attrs if name.startswith("on")] == []
    assert all(target.startswith("#") for target in page.attributes("a", "href"))
    policy = page.attributes("meta", "content")[0]
    script = faulty_page.rpartition("<script>")[2].partition("</script>")[0]
    style = faulty_page.partition("<style>")[2].partition("</style>")[0]
    for kind, text in (("script", script), ("style", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy


def test_it_says_what_the_report_says(
    faulty: Timeline, inputs: Callable[[Timeline], PageInputs], faulty_page: str, document
) -> None:
    page = document(faulty_page)
    report = inputs(faulty).examined.report
    assert "degraded: a node is at fault rank 5 (DP0 PP1 TP1, host n00" in page.text
    for finding in report.findings:
        for sentence in (*finding.evidence, *finding.next_steps):
            assert page.text.count(" ".join(sentence.split())) == 1
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


def finding_with(examined: Examination, **changes: object) -> Finding:
    return replace(examined.report.findings[0], **changes)


def page_of(examined: Examination, *findings: Finding, **changes: object) -> str:
    report = replace(examined.report, findings=findings, **changes)
    return render_page(
        PageInputs(source="made", examined=replace(examined, report=report), facts=())
    )


def large_figures(page: str) -> list[str]:
    return re.findall(r"<b>(.*?)</b>", page.partition("<nav")[0])


def test_the_headline_is_the_finding_that_costs_most(
    faulty: Timeline, inputs: Callable[[Timeline], PageInputs], document
) -> None:
    examined = inputs(faulty).examined
    cheap = finding_with(examined, statement="rank 1 is cheap", step_time_cost_ratio=1.01)
    dear = finding_with(
        examined, statement="uneven sequences; they cost much", owner=Owner.JOB,
        cause=Cause.SEQUENCE_IMBALANCE, ranks=(), coordinates={}, step_time_cost_ratio=1.25,
        slowdown=1.4,
    )  # fmt: skip
    page = page_of(examined, cheap, dear)
    assert "<h1>uneven sequences</h1>" in page
    assert "what costs most is not its doing" in page
    # an iteration takes 1.25 times what it would: 0.2 of 8 GPUs for 24 hours
    assert large_figures(page) == ["all 8", "1.40×", "38.4"]
    assert document(page).text.count("they cost much") == 1


@pytest.mark.parametrize(
    ("ranks", "shown"),
    [
        ((5,), "5"),
        ((4, 5, 6, 7), "4–7"),
        ((0, 2, 3), "0, 2–3"),
        (tuple(range(0, 64, 2)), "32 ranks"),
    ],
)
def test_ranks_are_named_in_short(
    ranks: tuple[int, ...], shown: str, large: Callable[..., Examination]
) -> None:
    examined = large(Layout(dp=64), {3: 1.3})
    assert large_figures(page_of(examined, finding_with(examined, ranks=ranks)))[0] == shown


def test_a_sentence_of_several_findings_is_printed_once(
    faulty: Timeline, inputs: Callable[[Timeline], PageInputs], document
) -> None:
    examined = inputs(faulty).examined
    first = finding_with(examined, next_steps=("look at the node", "swap it"))
    second = finding_with(examined, statement="rank 7", next_steps=("look at the node",))
    text = document(page_of(examined, first, second, notes=("swap it",))).text
    assert text.count("look at the node") == 1 and text.count("swap it") == 1


def test_an_undecided_page_says_what_would_decide(
    simulated: Callable[..., Timeline], inputs: Callable[[Timeline], PageInputs], document
) -> None:
    page = document(render_page(inputs(simulated(Layout(), iterations=6))))
    decide = page.text.partition("What would decide ")[2].partition("Iteration ")[0]
    assert "Trace 10 iterations or more" in decide
    assert "iterations 1 to 2 were left out" not in decide
    assert "The job as a picture" not in page.text  # nobody has peers: no empty map


def test_steps_of_undecided_findings_decide(
    faulty: Timeline, inputs: Callable[[Timeline], PageInputs], document
) -> None:
    examined = inputs(faulty).examined
    unsure = finding_with(examined, owner=Owner.UNDECIDED, next_steps=("swap two GPUs",))
    text = document(page_of(examined, unsure)).text
    assert "What would decide swap two GPUs" in text and text.count("swap two GPUs") == 1


def test_it_can_be_heard(faulty_page: str, document) -> None:
    page = document(faulty_page)
    assert all(scope in ("col", "row") for scope in page.attributes("th", "scope"))
    assert len(page.attributes("th", "scope")) == page.count("th")
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
    name: str, faulty: Timeline, inputs: Callable, renamed: Callable, document
) -> None:
    hostile = replace(inputs(renamed(faulty, name, name)), source=name)
    page, usual = document(render_page(hostile)), document(render_page(inputs(faulty)))
    assert page.problems == []
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in usual.tags]
    assert {key for _, attrs in page.tags for key in attrs} == {
        key for _, attrs in usual.tags for key in attrs
    }
    assert "49" not in page.text.partition("MegaScan report")[2].partition("degraded")[0]


def test_a_healthy_job_has_a_healthy_page(
    simulated: Callable[..., Timeline], inputs: Callable[[Timeline], PageInputs], document
) -> None:
    page = document(render_page(inputs(simulated(Layout(dp=4)))))
    assert "healthy No rank, link or stage stands out" in page.text
    assert "Findings" not in page.text
    assert "4 of 4 ranks compute within 3 % of their peers" in page.text


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


def test_a_job_of_1024_ranks_has_a_page_below_400_kb(
    large: Callable[..., Examination], share_columns: Callable[[int], pa.Table], document
) -> None:
    layout = Layout(tp=4, pp=8, dp=32)
    text = render_page(
        PageInputs(
            source="large",
            examined=large(layout, {517: 1.2}, iterations=100),
            facts=(Fact("layout", "large"),),
            shares=share_columns(1024),
            why_no_whatif="not asked for",
        )
    )
    page = document(text)
    assert len(text.encode()) < 400_000
    assert page.problems == []
    assert "1023 of 1024 ranks compute within 3 %" in page.text.replace(",", "")
    figures = json.loads(text.partition('id="figures">')[2].partition("</script>")[0])
    assert len(figures["ranks"]["names"]) == 1024
    assert figures["time"]["iterations"][0] == [3, 4]
