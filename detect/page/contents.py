"""Lay out everything the page says in words and small tables, and write it as one HTML document.

What was traced (the job, its layout, its software) stands there as names and values (`Fact`).

The document loads nothing, and everything from a trace is escaped: host names, device names, group
names and notes are somebody else's text. The template engine escapes what it writes, numbers for
the script travel as JSON without `<`, and the script only ever sets text. The page's own policy
(CSP) allows one style and one script, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from detect.detector import POWER_WORDS, Examination
from detect.observe.observations import Observations
from detect.page import figures
from detect.page.strip import critical_strip
from detect.report import Cause, Finding, Owner, Report, Verdict
from detect.text import (
    HIDES,
    NOT_SHOWN,
    counted,
    milliseconds,
    owner_text,
    percent,
    ranks_text,
    render_text,
    slowdown_text,
    times,
)
from detect.thresholds.verdicts import COSTS
from detect.whatif.graph import NS_PER_S
from detect.whatif.savings import HOURS_A_DAY, PEERS, Saving
from detect.whatif.slowness import WhatIf
from megascan.arrays import Integers
from megascan.errors import MissingError, listed
from megascan.header import Json
from megascan.timeline import Timeline, codes
from megascan.topology import Layout

MOST_CHARTS = 12
MOST_RUNS_NAMED = 24
MOST_NAMED = 4
MOST_LETTERS_IN_A_FIGURE = 12
MOST_RANKS_IN_A_HEADLINE = 2
MOST_DEVICES = 2
"""Findings of more ranks do not list their devices."""
ENOUGH_ITERATIONS = 10
"""Fewer traced iterations see large figures.slowdowns only."""
VERDICT_WORDS = {
    Verdict.DEGRADED: "degraded: a node is at fault",
    Verdict.JOB: "no node is at fault: it is the job",
    Verdict.UNDECIDED: "undecided",
    Verdict.HEALTHY: "healthy",
}


@dataclass(frozen=True, kw_only=True)
class PageInputs:
    """What a page is made of.

    `source` is what was read, as the user named it. `shares` has the columns rank and
    `<share>_ratio`, one row a rank; None where the trace tells compute only. `whatif` is None where
    the step cannot be replayed, and `why_no_whatif` says why. `timeline` is what was examined, for
    the strip of one iteration; None for op tables, which hold no spans. `look` is the command that
    opens it in Perfetto, before `--at`; empty where there is none.
    """

    source: str
    examined: Examination
    facts: Sequence[Fact]
    shares: pa.Table | None = None
    whatif: WhatIf | None = None
    savings: Sequence[Saving] = ()
    why_no_whatif: str = ""
    timeline: Timeline | None = None
    look: str = ""


@dataclass(frozen=True)
class Fact:
    """One line of a table of facts."""

    name: str
    value: str


@dataclass(frozen=True)
class LargeFigure:
    """One of the numbers at the top: `value`, what it is, and a line below it."""

    value: str
    name: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class FindingView:
    """One finding as it stands on the page; sentences printed before it are left out."""

    number: int
    title: str
    cause: str
    owner: str
    facts: tuple[Fact, ...]
    evidence: tuple[str, ...]
    next_steps: tuple[str, ...]
    has_chart: bool


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
class CostsView:
    """What slowness costs, by replay of the step."""

    summary: str
    rows: tuple[CostRow, ...]
    parts: tuple[tuple[str, str], ...]
    trust: str


@dataclass(frozen=True, kw_only=True)
class PageView:
    """The page's words; its drawings are in `figures`.

    `window` is empty where the answer and the large figures say as much.
    """

    verdict_words: str
    headline: str
    headline_more: str
    large: tuple[LargeFigure, ...]
    window: str
    deciding: tuple[str, ...]
    findings: tuple[FindingView, ...]
    has_map: bool
    ranks_summary: str
    costs: CostsView | None
    power: tuple[tuple[str, str, str], ...]
    trust: tuple[Fact, ...]
    notes: tuple[str, ...]
    figures: dict[str, Json]
    view_command: str


class _Said:
    """The sentences printed so far, so that each one is printed once."""

    def __init__(self) -> None:
        self._sentences: set[str] = set()

    def new(self, sentences: Iterable[str]) -> tuple[str, ...]:
        """Return the sentences not printed yet, and take them as printed."""
        fresh = tuple(one for one in dict.fromkeys(sentences) if one not in self._sentences)
        self._sentences.update(fresh)
        return fresh


def page_view(inputs: PageInputs) -> PageView:
    """Lay everything out."""
    report = inputs.examined.report
    findings = sorted(report.findings, key=lambda one: -one.step_time_cost_ratio)
    headline, _, more = (findings[0].headline if findings else _answer(report)).partition("; ")
    said = _Said()
    said.new(finding.headline for finding in findings[:1])
    deciding = said.new(_deciding(inputs.examined, findings))
    views = tuple(
        _finding_view(number, finding, inputs.examined, said)
        for number, finding in enumerate(findings, 1)
    )
    first, last = report.iterations
    window = (
        f"{counted(report.num_iterations, 'iteration')} ({first} to {last}) of "
        f"{milliseconds(report.iteration_ns)}, {counted(report.world_size, 'rank')}"
    )
    drawn = _figures(inputs, findings)
    strip = drawn["strip"]
    return PageView(
        verdict_words=_verdict_words(report, findings),
        headline=headline,
        headline_more=more,
        large=tuple(_large(inputs, findings)),
        window=window if findings else "",
        deciding=deciding,
        findings=views,
        has_map=bool(np.isfinite(figures.slowdowns(inputs.examined)).any()),
        ranks_summary=_ranks_summary(inputs.examined),
        costs=None if inputs.whatif is None else _costs(inputs.whatif, inputs.savings),
        power=tuple(
            (name, percent(value), POWER_WORDS.get(Cause(name), ""))
            for name, value in report.minimum_detectable.items()
        ),
        trust=tuple(_trust(report)),
        notes=said.new(report.notes),
        figures=drawn,
        view_command=f"{inputs.look} --at {strip['at']}"
        if inputs.look and isinstance(strip, dict)
        else "",
    )


def _verdict_words(report: Report, findings: Sequence[Finding]) -> str:
    words = VERDICT_WORDS[report.verdict]
    if report.verdict == Verdict.DEGRADED and findings[0].owner != Owner.NODE:
        words += "; what costs most is not its doing"
    if report.verdict == Verdict.UNDECIDED and findings and findings[0].owner == Owner.JOB:
        words += "; what costs most is the job's own doing"
    return words


def _answer(report: Report) -> str:
    """Return the answer as `megascan detect` prints it, without its first word."""
    answer = render_text(report).split("\n", 1)[0]
    sentence = answer.partition(": ")[2].removesuffix(".")
    return sentence[:1].upper() + sentence[1:]


def _large(inputs: PageInputs, findings: Sequence[Finding]) -> list[LargeFigure]:
    report = inputs.examined.report
    if findings:
        return _large_of(findings[0], inputs)
    least = report.minimum_detectable_slowdown
    power = "not judged" if least is None else percent(least)
    num_hosts = len(set(inputs.examined.seen.members.hosts) - {""})
    hosts = f"on {counted(num_hosts, 'host')}" if num_hosts else "of hosts that were not recorded"
    return [
        LargeFigure(f"{report.world_size:,}", "rank" if report.world_size == 1 else "ranks", hosts),
        LargeFigure(
            power, "smallest slowdown seen", "a rank's compute; below that, nobody can tell"
        ),
        LargeFigure(milliseconds(report.iteration_ns), "an iteration", "median of the window"),
    ]


def _large_of(finding: Finding, inputs: PageInputs) -> list[LargeFigure]:
    report = inputs.examined.report
    low, high = finding.slowdown_interval
    bound = "at least; " if finding.slowdown_is_bound else ""
    share, whatif = finding.lost_share, inputs.whatif
    num_gpus = report.world_size if whatif is None else whatif.replay.num_gpus
    hours = share * num_gpus * HOURS_A_DAY
    how = "replayed" if finding.cost_is_replayed else "estimated"
    detail = f"{100 * share:.1f} % of every GPU's time, {how}"
    if finding.step_time_cost_ratio < COSTS.next_to_nothing_ratio:
        detail = HIDES if finding.cost_is_replayed else NOT_SHOWN
    return [
        LargeFigure(*_who(finding, report)),
        LargeFigure(
            times(finding.slowdown).replace("x", "×"),
            "slowdown",
            f"{bound}95 % interval {low:.3f} to {high:.3f}",
        ),
        LargeFigure(_hours(hours), "GPU-hours a day", detail),
    ]


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _who(finding: Finding, report: Report) -> tuple[str, str, str]:
    """Return whom the finding names: (large, what it is, where it is)."""
    where = " ".join(f"{axis.upper()}{place}" for axis, place in finding.coordinates.items())
    where = ", ".join(part for part in (where, finding.host) if part)
    ranks = finding.ranks
    if not ranks:
        return f"all {report.world_size:,}", "ranks", finding.cause.value.replace("_", " ")
    if finding.cause == Cause.STAGE_IMBALANCE and "pp" in finding.coordinates:
        return f"PP{finding.coordinates['pp']}", "stage", counted(len(ranks), "rank")
    short = _as_ranges(ranks)
    if len(short) > MOST_LETTERS_IN_A_FIGURE:
        shown = listed(ranks, most=6) + (where and f"; {where}")
        return f"{len(ranks):,} ranks", "named", shown
    return short, "rank" if len(ranks) == 1 else "ranks", where


def _as_ranges(ranks: Sequence[int]) -> str:
    """Return ranks as runs: 4, 5, 6, 9 as "4–6, 9"."""
    ordered = np.array(sorted(ranks), dtype=np.int64)
    runs = np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1)
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    left_out = len(texts) - MOST_RUNS_NAMED
    return ", ".join(texts[:MOST_RUNS_NAMED]) + (f" and {left_out} more" if left_out > 0 else "")


def _deciding(examined: Examination, findings: Sequence[Finding]) -> Iterable[str]:
    """Yield what would turn an undecided verdict into a decided one."""
    report = examined.report
    if report.verdict != Verdict.UNDECIDED:
        return
    for finding in findings:
        if finding.owner == Owner.UNDECIDED:
            yield from finding.next_steps
    if not report.judged:
        yield from (note for note in report.notes if note not in examined.seen.notes)
    if report.num_iterations < ENOUGH_ITERATIONS:
        how = (
            "--continuous-trace-iterations sets how many are traced in a row, --trace-interval how "
            "often"
        )
        if not examined.seen.tells_passes:
            how = "active of torch.profiler.schedule sets how many are profiled in a row"
        yield (
            f"Trace {ENOUGH_ITERATIONS} iterations or more after the first two (here "
            f"{report.num_iterations} could be judged): {how}"
        )


def _finding_view(number: int, finding: Finding, examined: Examination, said: _Said) -> FindingView:
    title = "".join(said.new([finding.headline])) or f"Why {_who_in_words(finding.ranks)}"
    return FindingView(
        number=number,
        title=title[:1].upper() + title[1:],
        cause=finding.cause.value.replace("_", " "),
        owner=finding.owner.value,
        facts=tuple(_finding_facts(finding, examined.seen.iterations, is_first=number == 1)),
        evidence=said.new(finding.evidence),
        next_steps=said.new(finding.next_steps),
        has_chart=number <= MOST_CHARTS and figures.series_of(finding, examined) is not None,
    )


def _who_in_words(ranks: Sequence[int]) -> str:
    if not ranks:
        return "all ranks"
    return f"ranks {_as_ranges(ranks)}" if len(ranks) > 2 else ranks_text(tuple(ranks))


def _finding_facts(finding: Finding, judged: Integers, *, is_first: bool) -> list[Fact]:
    """Return what is not in a finding's headline nor, of the first finding, at the page's top.

    Headlines say that a finding was there in all `judged` iterations, and how sure it is unless it
    is about wrong bits.
    """
    facts = [Fact("owner", owner_text(finding))]
    if finding.stretches != ((int(judged[0]), int(judged[-1])),):
        stretches = listed(f"{begin} to {end}" for begin, end in finding.stretches)
        share = f"(slower in {100 * finding.share_of_iterations:.0f} % of them)"
        facts.append(Fact("iterations", f"{stretches} {share}"))
    if not is_first:
        facts.insert(1, Fact("slowdown", slowdown_text(finding)))
    if finding.cause is Cause.CORRUPTION:
        facts.append(Fact("confidence", finding.sureness))
    if finding.step_time_cost_ratio >= COSTS.next_to_nothing_ratio and not is_first:
        how = "by replay of the step" if finding.cost_is_replayed else "estimate"
        ratio = f"{finding.step_time_cost_ratio:.3f}"
        facts.append(Fact("cost", f"an iteration takes {ratio} times as long with it ({how})"))
    if len(finding.ranks) > MOST_RANKS_IN_A_HEADLINE:
        facts.insert(0, Fact("ranks", _as_ranges(finding.ranks)))
    if finding.host:
        facts.append(Fact("host", finding.host))
    if finding.device and len(finding.ranks) <= MOST_DEVICES:
        facts.append(Fact("device", finding.device))
    return facts


def _ranks_summary(examined: Examination) -> str:
    """Return how many ranks keep up with their peers, and who is slowest."""
    members, value = examined.seen.members, figures.slowdowns(examined)
    known = np.flatnonzero(np.isfinite(value))
    if not len(known):
        return f"None of {counted(len(members), 'rank')} has a peer to be compared with."
    worst = int(known[np.argmax(value[known])])
    inside = int(((value[known] >= figures.ALIKE[0]) & (value[known] < figures.ALIKE[1])).sum())
    alone = len(members) - len(known)
    who = f"{ranks_text(members.workers[worst])} ({members.labels[worst]})"
    parts = [
        f"{inside:,} of {len(known):,} ranks compute within 3 % of their peers; the "
        f"slowest is {who} at {times(float(value[worst]))}."
        if len(known) > 1
        else f"{who[:1].upper()}{who[1:]} takes {times(float(value[worst]))} the time of its peers."
    ]
    if alone:
        verb = "has" if alone == 1 else "have"
        parts.append(f"{counted(alone, 'other rank').capitalize()} {verb} no sound peer.")
    missing = examined.report.completeness.get("missing_ranks")
    if isinstance(missing, list) and missing:
        parts.append(f"Not recorded and not shown: ranks {listed(missing)}.")
    if examined.across_stages:
        parts.append("No rank shares its stage: compared are transformer layers of all stages.")
    return " ".join(parts)


def _costs(result: WhatIf, savings: Sequence[Saving]) -> CostsView:
    factors = result.factors
    parts = [(name, f"{value:.3f}") for name, value in list(result.type_ratio.items())[:6]]
    if len(result.stage_ratio) > 1:
        parts += [(f"stage PP{n}", f"{ratio:.3f}") for n, ratio in enumerate(result.stage_ratio)]
    return CostsView(
        summary=(
            f"A step takes {milliseconds(result.traced_s * NS_PER_S)} and would take "
            f"{milliseconds(result.ideal_s * NS_PER_S)} were all ranks, stages and microbatches "
            f"alike: {100 * max(result.waste_ratio, 0.0):.1f} % of the time of "
            f"{counted(result.replay.num_gpus, 'GPU')} is lost (S = {result.slowdown:.3f}: scatter "
            f"{factors.random:.3f} × single ranks {factors.worker:.3f} × uneven stages "
            f"{factors.stage:.3f})."
        ),
        rows=tuple(_cost_row(each) for each in savings if each.compared_with != "nobody"),
        parts=tuple(parts),
        trust=f"Replayed and measured step times differ by {100 * result.error_ratio:.2f} % "
        f"(median of {counted(len(result.replay.steps), 'step')}).",
    )


def _cost_row(saving: Saving) -> CostRow:
    return CostRow(
        who=_who_in_words(saving.ranks),
        causes=listed(cause.value.replace("_", " ") for cause in saving.causes),
        step=milliseconds(saving.fixed_step_s * NS_PER_S),
        faster=f"{saving.speedup:.3f}×",
        per_hour=f"{saving.gpu_hours_per_hour:.2f}",
        per_day=_hours(saving.gpu_hours_per_day),
        against="its peers" if saving.compared_with == PEERS else "the other stages",
    )


def _trust(report: Report) -> Iterable[Fact]:
    """Yield how well clocks agree, and what is missing."""
    alignment = report.alignment
    if alignment is None:
        yield Fact("clocks", "times are compared as they were recorded")
    else:
        yield Fact(
            "clocks",
            f"agree within {milliseconds(alignment.residual_median_ns)} (median) and "
            f"{milliseconds(alignment.residual_p99_ns)} (p99), the error bar of every comparison "
            f"of times across ranks; {alignment.method}",
        )
        if alignment.num_components > 1:
            yield Fact("parts", f"{alignment.num_components} sets of ranks share no collective")
    complete = report.completeness
    names = {"unfinished": "num_unfinished_spans", "duplicates": "num_duplicates"}
    for name, key in names.items():
        if complete.get(key):
            yield Fact(name, f"{complete[key]:,} spans left out")
    recorded, missing = complete.get("ranks"), complete.get("missing_ranks")
    if isinstance(recorded, list):
        text = f"{counted(len(recorded), 'rank')} recorded"
        if isinstance(missing, list) and missing:
            text += f", {len(missing):,} missing: {listed(missing)}"
        yield Fact("complete", text)
    unmatched = complete.get("num_unmatched")
    if isinstance(unmatched, dict) and any(unmatched.values()):
        words = listed(f"{number} {kind}" for kind, number in unmatched.items() if number)
        yield Fact("unmatched", f"{words} spans without their counterparts")


def _figures(inputs: PageInputs, findings: Sequence[Finding]) -> dict[str, Json]:
    """Return what the page's script draws."""
    examined = inputs.examined
    seen = examined.seen
    shares = (
        figures.shares_of_compute(seen)
        if inputs.shares is None
        else figures.shares_of_table(inputs.shares)
    )
    series = [figures.series_of(finding, examined) for finding in findings[:MOST_CHARTS]]
    strip = None
    if inputs.timeline is not None:
        replay = None if inputs.whatif is None else inputs.whatif.replay
        strip = critical_strip(inputs.timeline, seen, next(iter(findings), None), replay)
    return {
        "source": inputs.source,
        "edges": list(figures.SHADE_EDGES),
        "link_edge": figures.LINK_EDGE,
        "ranks": figures.rank_columns(examined, shares, findings),
        "time": figures.time_matrices(examined),
        "links": figures.slow_links(seen.transfers, findings),
        "charts": [None if one is None else figures.chart_of(one) for one in series],
        "strip": strip,
    }


def facts_of_timeline(timeline: Timeline) -> tuple[Fact, ...]:
    """Return the facts of a traced run."""
    headers = list(timeline.headers.values())
    complete = timeline.completeness
    devices = Counter(header.device.name for header in headers)
    versions = {name: value for header in headers for name, value in header.versions.items()}
    software = ", ".join(f"{name} {value}" for name, value in sorted(versions.items()))
    settings = {
        f"{header.trace.window} of every {header.trace.interval} iterations at granularity "
        f"{header.trace.granularity.value}"
        for header in headers
    }
    code, names = codes(timeline.spans, "kind")
    numbers = np.bincount(code, minlength=len(names)).tolist()
    counts = Counter(dict(zip(names, numbers, strict=True)))
    kinds = [f"{number:,} {name}" for name, number in counts.most_common() if number]
    return (
        Fact("run", timeline.run_id),
        Fact("layout", _layout(timeline.layout)),
        Fact("ranks", _ranks(complete.world_size, len(headers), complete.missing_ranks)),
        Fact("hosts", _distinct(header.host for header in headers)),
        Fact("devices", listed(f"{number} × {name}" for name, number in devices.most_common())),
        Fact("backend", _distinct(header.backend for header in headers)),
        Fact("software", software or "not recorded"),
        Fact("traced", listed(sorted(settings))),
        Fact("spans", f"{timeline.spans.num_rows:,}, of them {listed(kinds, most=9)}"),
    )


def facts_of_op_table(seen: Observations) -> tuple[Fact, ...]:
    """Return the facts of an op table, which records no host, device or software."""
    members = seen.members
    return (
        Fact("layout", _layout(members.layout)),
        Fact("ranks", _ranks(members.layout.world_size, len(members), ())),
    )


def _layout(layout: Layout) -> str:
    used = layout.used("dp", "pp", "vpp", "cp", "ep", "tp")
    sizes = [f"{axis.upper()} {getattr(layout, axis)}" for axis in used]
    return " × ".join(sizes) or "a single rank"


def _ranks(world_size: int, num_recorded: int, missing: tuple[int, ...]) -> str:
    recorded = f"{num_recorded:,} recorded of {world_size:,}"
    return f"{recorded}, missing: {listed(missing)}" if missing else recorded


def _distinct(values: Iterable[str]) -> str:
    names = sorted({value for value in values if value})
    if not names:
        return "not recorded"
    text = listed(names, most=MOST_NAMED)
    return text if len(names) == 1 else f"{counted(len(names), 'name')}: {text}"


ROOM = Path(__file__).parent
TEMPLATE = "page.html.jinja"
SCRIPTS = ("elements.js", "chart.js", "topology.js", "strip.js", "table.js", "main.js")
"""In this order they are one script: later files use the functions of earlier ones."""


def render_page(inputs: PageInputs) -> str:
    """Return the page as one HTML document.

    Raises MissingError when the template engine (jinja2) is not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ModuleNotFoundError as error:
        raise MissingError(
            "a page needs the package 'jinja2', which is not installed; pip install jinja2"
        ) from error
    environment = Environment(
        loader=FileSystemLoader(ROOM),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = (ROOM / "page.css").read_text(encoding="utf-8")
    script = "\n".join((ROOM / "script" / name).read_text(encoding="utf-8") for name in SCRIPTS)
    view = page_view(inputs)
    page = environment.get_template(TEMPLATE).render(
        inputs=inputs,
        report=inputs.examined.report,
        page=view,
        style=style,
        style_hash=source_hash(style),
        script=script,
        script_hash=source_hash(script),
        figures=as_inline_json(view.figures),
    )
    return page + "\n"


def source_hash(text: str) -> str:
    """Return a CSP source expression that allows exactly this inline text."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def as_inline_json(value: Json) -> str:
    """Return JSON that cannot end the script element it stands in, whatever its texts are."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
