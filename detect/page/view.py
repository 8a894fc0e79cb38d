"""Everything the page shows, laid out: the template only writes it down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from detect.examination import Examination
from detect.findings.text import render_text
from detect.findings.wording import confidence, counted, listed, milliseconds, percent, ranks_text
from detect.page.charts import Chart, chart_of
from detect.page.facts import Fact
from detect.page.heat import HeatMap, heat_map
from detect.page.series import Series, series_of
from detect.page.shares import Shares, ShareTable, share_table, shares_of_compute, shares_of_table
from detect.report import Cause, Finding, Owner, Report, Verdict
from detect.whatif.metrics import WhatIf
from detect.whatif.saving import Saving

MOST_CHARTS = 12
MOST_RANKS_NAMED = 24
MOST_DEVICES = 2
"""Findings of more ranks do not list their devices."""
OWNER_WORDS = {
    Owner.NODE: "the node: look at this hardware",
    Owner.JOB: "the job itself: its partition, data or settings",
    Owner.UNDECIDED: "undecided",
}
CLASS_WORDS = {
    Cause.COMPUTE.value: "a rank computes slower than its peers",
    Cause.LINK.value: "a connection transfers slower than equal ones",
    Cause.HOST.value: "a rank loses time to its host (share of the iteration)",
    Cause.LOADER.value: "a rank waits for its data (share of the iteration)",
    Cause.GC.value: "a rank stops for garbage collection (share of the iteration)",
}


@dataclass(frozen=True, kw_only=True)
class PageInputs:
    """What a page is made of.

    `source` is what was read, as the user named it. `shares` has the columns rank and
    `<share>_ratio`, one row a rank; None where the trace tells compute only. `whatif` is None where
    the step cannot be replayed, and `why_no_whatif` says why.
    """

    source: str
    examined: Examination
    facts: Sequence[Fact]
    shares: pa.Table | None = None
    whatif: WhatIf | None = None
    savings: Sequence[Saving] = ()
    why_no_whatif: str = ""


@dataclass(frozen=True, kw_only=True)
class FindingView:
    """One finding as it stands on the page."""

    number: int
    headline: str
    owner: str
    facts: tuple[Fact, ...]
    evidence: tuple[str, ...]
    next_steps: tuple[str, ...]
    chart: Chart | None


@dataclass(frozen=True, kw_only=True)
class CostRow:
    """What mending some ranks brings."""

    who: str
    causes: str
    step: str
    faster: str
    per_hour: str
    per_day: str
    against: str


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What slowness costs, by replay of the step."""

    summary: str
    rows: tuple[CostRow, ...]
    types: tuple[tuple[str, str], ...]
    stages: tuple[tuple[str, str], ...]
    trust: str


@dataclass(frozen=True, kw_only=True)
class PageView:
    """The page."""

    source: str
    verdict: Verdict
    answer: str
    window: str
    findings: tuple[FindingView, ...]
    heat: HeatMap
    steps: Chart | None
    shares: ShareTable
    costs: Costs | None
    why_no_costs: str
    power: tuple[tuple[str, str, str], ...]
    trust: tuple[Fact, ...]
    notes: tuple[str, ...]
    facts: tuple[Fact, ...]


def page_view(inputs: PageInputs) -> PageView:
    """Lay everything out."""
    report, seen = inputs.examined.report, inputs.examined.seen
    shares = shares_of_compute(seen) if inputs.shares is None else shares_of_table(inputs.shares)
    first, last = report.iterations
    return PageView(
        source=inputs.source,
        verdict=report.verdict,
        answer=render_text(report).split("\n", 1)[0],
        window=f"{counted(report.num_iterations, 'iteration')} ({first} to {last}) of "
        f"{milliseconds(report.iteration_ns)}, {counted(report.world_size, 'rank')}",
        findings=tuple(_findings(inputs.examined)),
        heat=heat_map(inputs.examined),
        steps=_step_chart(inputs.examined),
        shares=_shares(shares, inputs.examined),
        costs=None if inputs.whatif is None else _costs(inputs.whatif, inputs.savings),
        why_no_costs=inputs.why_no_whatif,
        power=tuple(
            (name, percent(value), CLASS_WORDS.get(name, ""))
            for name, value in report.minimum_detectable.items()
        ),
        trust=tuple(_trust(report)),
        notes=report.notes,
        facts=tuple(inputs.facts),
    )


def _findings(examined: Examination) -> list[FindingView]:
    views = []
    for number, finding in enumerate(examined.report.findings, 1):
        series = series_of(finding, examined) if number <= MOST_CHARTS else None
        views.append(
            FindingView(
                number=number,
                headline=finding.headline,
                owner=finding.owner.value,
                facts=tuple(_finding_facts(finding)),
                evidence=finding.evidence,
                next_steps=finding.next_steps,
                chart=None if series is None else chart_of(series),
            )
        )
    return views


def _finding_facts(finding: Finding) -> list[Fact]:
    low, high = finding.slowdown_interval
    facts = [
        Fact("cause", finding.cause.value),
        Fact("owner", OWNER_WORDS[finding.owner]),
        Fact("slowdown", f"{finding.slowdown:.3f} (95 % interval {low:.3f} to {high:.3f})"),
        Fact("iterations", _iterations(finding)),
        Fact("confidence", confidence(finding.q_value)),
    ]
    if finding.step_time_cost_ratio >= 1.001:
        how = "by replay of the step" if finding.cost_is_replayed else "estimate"
        ratio = f"{finding.step_time_cost_ratio:.3f}"
        cost = f"an iteration takes {ratio} times what it would without it ({how})"
        facts.insert(3, Fact("cost", cost))
    if finding.ranks:
        facts.insert(0, Fact("ranks", listed(finding.ranks, most=MOST_RANKS_NAMED)))
    if finding.host:
        facts.append(Fact("host", finding.host))
    if finding.device and len(finding.ranks) <= MOST_DEVICES:
        facts.append(Fact("device", finding.device))
    return facts


def _iterations(finding: Finding) -> str:
    episodes = finding.episodes or ((finding.first_iteration, finding.last_iteration),)
    text = listed(f"{first} to {last}" for first, last in episodes)
    return f"{text} (slower in {finding.share_of_iterations:.0%} of them)"


def _step_chart(examined: Examination) -> Chart | None:
    seen = examined.seen
    if len(seen.iterations) < 2:
        return None
    nothing = seen.iteration_ns * float("nan")
    return chart_of(
        Series(
            quantity="iteration time (longest over the ranks)",
            unit="ms",
            iterations=seen.iterations,
            lines=(("iteration", seen.iteration_ns / 1e6),),
            peers_name="",
            peers=nothing,
            peers_low=nothing,
            peers_high=nothing,
        )
    )


def _shares(shares: Shares, examined: Examination) -> ShareTable:
    members = examined.seen.members
    labels = {
        rank: members.labels[row] for row, workers in enumerate(members.workers) for rank in workers
    }
    layout = members.layout
    for rank in shares.ranks.tolist():
        if rank not in labels and rank < layout.world_size:
            labels[rank] = layout.label(rank)
    suspects = {
        rank
        for finding in examined.report.findings
        if finding.cause != Cause.STAGE_IMBALANCE
        for rank in finding.ranks
    }
    return share_table(shares, labels, suspects)


def _costs(result: WhatIf, savings: Sequence[Saving]) -> Costs:
    factors = result.factors
    return Costs(
        summary=(
            f"A step takes {milliseconds(result.traced_s * 1e9)} and would take "
            f"{milliseconds(result.ideal_s * 1e9)} were all ranks, stages and microbatches alike: "
            f"{100 * max(result.waste_ratio, 0.0):.1f} % of the time of "
            f"{counted(result.replay.num_gpus, 'GPU')} is lost (S = {result.slowdown:.3f}: scatter "
            f"{factors.random:.3f} × single ranks {factors.worker:.3f} × uneven stages "
            f"{factors.stage:.3f})."
        ),
        rows=tuple(_cost_row(each) for each in savings if each.compared_with != "nobody"),
        types=tuple((name, f"{value:.3f}") for name, value in list(result.type_ratio.items())[:6]),
        stages=tuple((f"PP{n}", f"{ratio:.3f}") for n, ratio in enumerate(result.stage_ratio))
        if len(result.stage_ratio) > 1
        else (),
        trust=f"Replayed and measured step times differ by {100 * result.error_ratio:.2f} % "
        f"(median of {counted(len(result.replay.steps), 'step')}).",
    )


def _cost_row(saving: Saving) -> CostRow:
    return CostRow(
        who=ranks_text(saving.ranks),
        causes=listed(cause.value for cause in saving.causes),
        step=milliseconds(saving.fixed_step_s * 1e9),
        faster=f"{saving.speedup:.3f}×",
        per_hour=f"{saving.gpu_hours_per_hour:.2f}",
        per_day=f"{saving.gpu_hours_per_day:.1f}",
        against="its peers" if saving.compared_with == "peers" else "the other stages",
    )


def _trust(report: Report) -> list[Fact]:
    facts = []
    if report.alignment is None:
        facts.append(Fact("clocks", "times are compared as they were recorded"))
    else:
        alignment = report.alignment
        facts.append(
            Fact(
                "clocks",
                f"agree within {milliseconds(alignment.residual_median_ns)} (median) and "
                f"{milliseconds(alignment.residual_p99_ns)} (p99), the error bar of every "
                f"comparison of times across ranks; {alignment.method}",
            )
        )
        if alignment.num_components > 1:
            facts.append(
                Fact("parts", f"{alignment.num_components} sets of ranks share no collective")
            )
    complete = report.completeness
    for name, key in (
        ("unfinished", "num_unfinished_spans"),
        ("duplicates", "num_duplicates"),
    ):
        if complete.get(key):
            facts.append(Fact(name, f"{complete[key]:,} spans left out"))
    missing = complete.get("missing_ranks")
    recorded = complete.get("ranks")
    if isinstance(recorded, list):
        text = f"{len(recorded):,} ranks recorded"
        if isinstance(missing, list) and missing:
            text += f", {len(missing):,} missing: {listed(missing)}"
        facts.append(Fact("complete", text))
    unmatched = complete.get("num_unmatched")
    if isinstance(unmatched, dict) and any(unmatched.values()):
        words = listed(f"{number} {kind}" for kind, number in unmatched.items() if number)
        facts.append(Fact("unmatched", f"{words} spans without their counterparts"))
    return facts
