"""Timeline to report: every class searched, findings put in order, the verdict."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detect.causes.compute import ComputeSearch, least_slowdown, search_compute
from detect.causes.consequences import folded, without_victims
from detect.causes.imbalance import HeavyStage, heavy_stages, sequence_skew
from detect.causes.links import LinkSearch, search_links
from detect.causes.pauses import LossSearch, is_host_bound, losses, search_loss
from detect.findings.of_compute import compute_findings
from detect.findings.of_job import sequence_finding, stage_finding
from detect.findings.of_links import link_findings
from detect.findings.of_losses import loss_findings
from detect.observations import Bools, Observations
from detect.observe.extract import observe
from detect.observe.window import one_row_a_worker, steady
from detect.report import Cause, Finding, Owner, Report
from detect.settings import DetectorSettings
from detect.stats.noise import Noise, minimum_detectable_effect
from megascan.timeline import Timeline

LEAST_ITERATIONS = 2
ORDER = (Owner.NODE, Owner.UNDECIDED, Owner.JOB)


def detect(timeline: Timeline, settings: DetectorSettings | None = None) -> Report:
    """Which rank is slow, of what, since when, how sure, at what cost, and whose fault it is.

    Silent about everything below `settings.min_slowdown`; the report says what the window could
    not have shown.
    """
    return judge(observe(timeline), settings or DetectorSettings())


def judge(observations: Observations, settings: DetectorSettings) -> Report:
    """The report on observations, whatever they were read from."""
    seen = steady(one_row_a_worker(observations), settings)
    if len(seen.iterations) < LEAST_ITERATIONS or not np.isfinite(seen.work.log_ns).any():
        return _unjudged(seen, settings)
    classes = losses(seen, settings)
    num_tests = len(seen.members) * (1 + len(classes))
    compute = search_compute(seen, settings, num_tests)
    slow = compute.slow_rows
    lost = [
        without_victims(
            seen,
            search_loss(seen, loss, settings, num_tests, _forbidden(seen, compute, loss.cause)),
            slow,
        )
        for loss in classes
    ]
    links = search_links(seen, settings, num_tests)
    done = _Searches(compute, least_slowdown(seen, settings), lost, links)
    findings = compute_findings(seen, compute)
    findings += [finding for one in lost for finding in loss_findings(seen, one, slow)]
    findings += link_findings(seen, links) if links else []
    findings = folded(findings)
    findings += [stage_finding(seen, heavy) for heavy in _stages(seen, settings, slow)]
    skew = sequence_skew(seen, settings, slow)
    findings += [sequence_finding(seen, skew)] if skew else []
    return Report(
        world_size=seen.members.layout.world_size,
        iterations=(int(observations.iterations[0]), int(observations.iterations[-1])),
        num_iterations=len(seen.iterations),
        findings=tuple(_ordered(findings)),
        minimum_detectable=_power(len(seen.iterations), settings, num_tests, done),
        iteration_ns=float(np.median(seen.iteration_ns)),
        alignment=seen.alignment,
        completeness=seen.completeness,
        notes=(*seen.notes, *_limits(seen, compute)),
        judged=compute.num_compared > 0,
        source=seen.source,
        min_slowdown=settings.min_slowdown,
        false_discovery_rate=settings.false_discovery_rate,
    )


def _forbidden(seen: Observations, compute: ComputeSearch, cause: Cause) -> Bools:
    """Slow computation explains gaps and late exits of the same rank, not its loader."""
    if cause in (Cause.HOST, Cause.LINK):
        return compute.slow_rows
    return np.zeros(len(seen.members), dtype=bool)


def _stages(seen: Observations, settings: DetectorSettings, slow: Bools) -> list[HeavyStage]:
    return [
        heavy
        for heavy in heavy_stages(seen, settings, slow)
        if float(np.mean(heavy.saved_ns)) > (settings.min_slowdown - 1) * seen.iteration_ns.mean()
    ]


def _ordered(findings: list[Finding]) -> list[Finding]:
    return sorted(
        findings,
        key=lambda one: (ORDER.index(one.owner), -one.step_time_cost_ratio, one.q_value),
    )


def _unjudged(seen: Observations, settings: DetectorSettings) -> Report:
    iterations = seen.iterations if len(seen.iterations) else np.zeros(1, dtype=np.int64)
    return Report(
        world_size=seen.members.layout.world_size,
        iterations=(int(iterations[0]), int(iterations[-1])),
        num_iterations=len(seen.iterations),
        findings=(),
        minimum_detectable={},
        iteration_ns=float(np.median(seen.iteration_ns)) if len(seen.iteration_ns) else 0.0,
        alignment=seen.alignment,
        completeness=seen.completeness,
        notes=(
            *seen.notes,
            f"{len(seen.iterations)} traced iterations with forward and backward passes: a verdict "
            f"needs {LEAST_ITERATIONS} at least, and 10 or more to see small slowdowns",
        ),
        judged=False,
        source=seen.source,
        min_slowdown=settings.min_slowdown,
        false_discovery_rate=settings.false_discovery_rate,
    )


@dataclass(frozen=True)
class _Searches:
    """Results of every class."""

    compute: ComputeSearch
    compute_floor: float
    lost: list[LossSearch]
    links: LinkSearch | None


def _power(
    num_iterations: int, settings: DetectorSettings, num_tests: int, done: _Searches
) -> dict[str, float]:
    """Minimum detectable slowdown by class."""

    def least(noise: Noise) -> float:
        rate, power = settings.false_discovery_rate, settings.power
        return minimum_detectable_effect(noise, num_iterations, 2 * num_tests, rate, power)

    power: dict[str, float] = {}
    if done.compute.num_compared:
        power["compute"] = max(done.compute_floor, float(np.exp(least(done.compute.noise))))
    for one in done.lost:
        if one.loss.cause != Cause.LINK:
            power[one.loss.cause.value] = 1.0 + max(least(one.noise), one.floor)
    if done.links is not None:
        power["link"] = max(settings.min_link_slowdown, float(np.exp(least(done.links.noise))))
    return power


def _limits(seen: Observations, compute: ComputeSearch) -> list[str]:
    """What this trace could not have shown, whatever its noise."""
    notes = []
    if not compute.num_compared:
        notes.append(
            "no two ranks do the same work (DP = TP = 1 and no transformer layers traced): compute "
            "cannot be judged; trace at granularity full, or compare with an earlier trace"
        )
    elif int(np.median(compute.residuals.num_peers)) == 1:
        notes.append("each rank has one peer only: a slowdown of both alike cannot be seen")
    if seen.mixes_communication:
        notes.append(
            "communication inside TP groups was not traced (granularity base) and is part of the "
            "CPU time: only large compute faults can be told; trace at granularity full"
        )
    if not seen.gc_traced:
        notes.append("garbage collection was not traced (granularity base)")
    if seen.transfers is None:
        notes.append("no matched communication in the trace: links cannot be judged")
    if seen.starved_share is not None and is_host_bound(seen):
        starved = float(np.nanmedian(seen.starved_share))
        notes.append(
            f"the job is host-bound: {starved:.0%} of operations were launched only just in time, "
            "so device times partly show the hosts' speed"
        )
    if seen.alignment is not None and seen.alignment.num_components > 1:
        notes.append(
            "clocks fall into parts that share no collective; links across them are unseen"
        )
    return notes
