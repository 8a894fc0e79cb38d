"""python -m benchmarks.calibration: are the figures of a verdict true?

A finding says by how much (with a 95 % interval) and at what cost, a silent report says what it
would have seen with 95 % probability. The judges are the simulations of benchmarks.grounds, which
know each chip, and MegaScan's own simulator; none of them is the replay that costs come from.

    intervals   of lasting compute faults that were named: is the rank's true ratio to its peers,
                their chips included, within the interval? (claimed: 95 %)
    costs       of faults of compute, link and host that were named: is the cost within 2 points of
                the step time with the fault over that without it, while it holds?
    power       a sound job, judged; then the same job with one GPU made slower by exactly the power
                that was stated: is it found? (claimed: 95 %) By the one from which on nodes are
                said to be named: is its node named?
    spreads     the same sound job on chips that differ by 0.3 to 5 %: is anybody named?

Development cases, or with --draw SEED those catalogues drawn anew, without the own simulator.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import numpy as np
import orjson
from numpy.typing import NDArray

from aggregate import build_timeline
from benchmarks import calibration_simulator
from benchmarks.detection.figures import Share
from benchmarks.grounds.__main__ import GROUNDS, ground_named
from benchmarks.grounds.ground import Case, Ground, Planted, Variation
from detect import Finding, Report, detect
from megascan.errors import MegaScanError, UsageError, report_errors
from megascan.reader import read_trace

CLOSE = 0.02  # points of the step time that a cost may be off
SPREADS = (0.003, 0.01, 0.02, 0.03, 0.05)
QUESTIONS = ("intervals", "costs", "power", "spreads")
JUDGED_COSTS = ("compute", "link", "host")
SLOW_MEMORY = ("gpu_memory", "hbm")
"""Kinds of faults whose slowdown is stated of what memory bounds, and not of all computing."""
BLIND = 2.0  # a power from here on is stated as none
OWN = "simulator"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Keep one figure beside the truth; `says` in words what the verdict was."""

    question: str
    group: str
    ground: str
    name: str
    right: bool
    stated: float
    true: float
    says: str = ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.calibration",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--draw", type=int, default=0, metavar="SEED", help="cases with other seeds, none unseen"
    )
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th case")
    parser.add_argument("--ask", choices=QUESTIONS, action="append", help="only this; repeatable")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="go on from FILE (JSON lines)")
    parser.add_argument("--wrong", action="store_true", help="list every figure that is not right")
    return parser


def _ground(name: str) -> Ground:
    return cast(Ground, calibration_simulator) if name == OWN else ground_named(name)


def _cases(draw: int, every: int) -> list[Case]:
    found = [case for name in GROUNDS for case in ground_named(name).cases(draw) if not case.unseen]
    own = () if draw else calibration_simulator.cases()
    return [*found, *own][draw % every :: every]


def _judged(folder: Path) -> tuple[Report | None, list[int]]:
    """Return the report on the traced files in a folder, and the stage of each rank."""
    try:
        timeline = build_timeline(read_trace(folder))
        layout = timeline.layout
        stages = [layout.coordinates(rank).pp for rank in range(layout.world_size)]
        return detect(timeline), stages
    except MegaScanError:
        return None, []


def figures_of(case: Case, questions: Sequence[str]) -> list[Figure]:
    """Return all figures of one case that are asked for."""
    faulty = [one for one in case.planted if one.owner == "node" and one.cause in JUDGED_COSTS]
    if faulty and {"intervals", "costs"} & set(questions):
        return [one for one in _of_findings(case) if one.question in questions]
    if not case.planted:
        found = list(_of_power(case)) if "power" in questions else []
        return found + (list(_of_spreads(case)) if "spreads" in questions else [])
    return []


def _of_findings(case: Case) -> Iterator[Figure]:
    ground = _ground(case.ground)
    with tempfile.TemporaryDirectory() as folder:
        planted = ground.write(case, Path(folder))
        report, stages = _judged(Path(folder))
    if report is None:
        return
    at_fault = {rank for one in planted if one.owner == "node" for rank in one.ranks}
    for fault in planted:
        said = _findings_of(report, fault, at_fault)
        if fault.owner != "node" or fault.cause not in JUDGED_COSTS or not said:
            continue
        yield _figure_of_cost(case, fault, said)
        if (
            fault.cause == "compute"
            and fault.kind not in SLOW_MEMORY
            and _lasts(fault)
            and len(fault.ranks) == 1
        ):
            ratio = _true_ratio(ground.slowness(case), stages, fault.ranks[0], at_fault)
            yield from _figure_of_interval(case, fault, said[0], ratio)


def _findings_of(report: Report, fault: Planted, at_fault: set[int]) -> list[Finding]:
    """Return what blames the ranks of a fault, and no others, for its cause."""
    return [
        one
        for one in report.findings
        if one.owner.value == "node"
        and one.cause.value == fault.cause
        and set(one.ranks) & set(fault.ranks)
        and not set(one.ranks) - at_fault
    ]


def _lasts(fault: Planted) -> bool:
    return fault.share_of_time >= 1 and fault.first_iteration <= 1 and not fault.last_iteration


def _true_ratio(
    slowness: NDArray[np.float64], stages: list[int], rank: int, at_fault: set[int]
) -> float:
    """Return the rank's slowness over the median of its sound peers', median over iterations."""
    peers = [one for one, stage in enumerate(stages)
             if stage == stages[rank] and one not in at_fault]  # fmt: skip
    if not peers:
        return float("nan")
    return float(np.median(slowness[rank] / np.median(slowness[peers], axis=0)))


def _figure_of_cost(case: Case, fault: Planted, said: list[Finding]) -> Figure:
    """Judge what the report says that a fault costs: of several findings, their joint cost."""
    cost = max(one.step_time_cost_ratio for one in said)
    if len(said) > 1 and set(said[0].joint_ranks) <= set(fault.ranks):
        cost = max(cost, *(one.joint_cost_ratio for one in said))
    how = "replayed" if said[0].cost_is_replayed else "estimated"
    return Figure(
        question="costs", group=fault.cause, ground=case.ground, name=case.name,
        right=abs(cost - fault.held_cost_ratio) <= CLOSE, stated=cost, true=fault.held_cost_ratio,
        says=f"{fault.kind} {fault.factor:g}x, {len(said)} findings, {how}",
    )  # fmt: skip


def _figure_of_interval(
    case: Case, fault: Planted, finding: Finding, ratio: float
) -> Iterator[Figure]:
    """Judge the interval of a factor that is no bound; yield nothing where there are no peers."""
    if finding.slowdown_is_bound or not np.isfinite(ratio):
        return
    low, high = finding.slowdown_interval
    yield Figure(
        question="intervals", group="compute", ground=case.ground, name=case.name,
        right=low <= ratio <= high, stated=finding.slowdown, true=ratio,
        says=f"[{low:.3f}, {high:.3f}], planted {fault.factor:g}x, {finding.num_peers} peers",
    )  # fmt: skip


def _of_power(case: Case) -> Iterator[Figure]:
    """Plant slow GPUs of exactly the stated power into a sound job, and look what is said of them.

    The rank is drawn by the case's seed. What is planted is what its passes take longer, whatever
    its clock must be for that.
    """
    with tempfile.TemporaryDirectory() as folder:
        _ground(case.ground).write(case, Path(folder))
        report, _ = _judged(Path(folder))
    if report is None or report.findings:
        return
    found, named = report.minimum_detectable_slowdown, report.minimum_named_slowdown
    for group, power in (("found", found), ("its node named", named)):
        if power is None or power >= BLIND:
            continue
        said = _said_of_a_slow_gpu(case, power)
        if said is not None:
            yield Figure(
                question="power", group=group, ground=case.ground, name=case.name,
                right=any(group == "found" or one.owner.value == "node" for one in said),
                stated=power, true=power,
                says="; ".join(f"{one.owner}: {one.evidence[-1]}" for one in said) or "not found",
            )  # fmt: skip


def _said_of_a_slow_gpu(case: Case, power: float) -> list[Finding] | None:
    """Return what names the GPU that was made slower by `power`; None where no clock does that."""
    ground, rank = _ground(case.ground), case.seed % case.num_ranks
    sound = ground.write_varied(case, Variation(), None)
    factor, ratio = power, 1.0
    for _ in range(4):  # of lower clocks only a part of the kernels becomes slower
        varied = Variation(slow_rank=rank, factor=factor)
        ratio = float(np.median(ground.write_varied(case, varied, None)[rank] / sound[rank]))
        factor = 1 + (factor - 1) * (power - 1) / max(ratio - 1, 1e-3)
    if abs(ratio - power) > 0.1 * (power - 1):
        return None  # a host that launches too slowly hides its device's clock
    with tempfile.TemporaryDirectory() as folder:
        ground.write_varied(case, Variation(slow_rank=rank, factor=factor), Path(folder))
        report, _ = _judged(Path(folder))
    if report is None:
        return None
    return [one for one in report.findings if rank in one.ranks and one.cause.value == "compute"]


def _of_spreads(case: Case) -> Iterator[Figure]:
    for spread in SPREADS:
        with tempfile.TemporaryDirectory() as folder:
            _ground(case.ground).write_varied(
                case, Variation(chip_spread_ratio=spread), Path(folder)
            )
            report, _ = _judged(Path(folder))
        if report is None:
            continue
        named = [one for one in report.findings if one.owner.value == "node"]
        yield Figure(
            question="spreads", group=f"{spread:.1%}", ground=case.ground, name=case.name,
            right=not named, stated=len(named), true=0.0,
            says="; ".join(one.headline for one in named),
        )  # fmt: skip


def _all_figures(
    cases: list[Case], questions: Sequence[str], workers: int, kept: Path | None
) -> Iterator[Figure]:
    """Yield the figures of all cases; those of cases that stand in `kept` are read from it."""
    done: dict[str, list[Figure]] = {}
    if kept and kept.exists():
        for line in kept.read_bytes().splitlines():
            record = orjson.loads(line)
            done[record["case"]] = [Figure(**one) for one in record["figures"]]
    left = [case for case in cases if f"{case.ground}/{case.name}" not in done]
    with ProcessPoolExecutor(workers) as pool:
        fresh = pool.map(figures_of, left, [questions] * len(left))
        for case in cases:
            key = f"{case.ground}/{case.name}"
            if key not in done:
                done[key] = next(fresh)
                if kept:
                    record = {"case": key, "figures": [asdict(one) for one in done[key]]}
                    with kept.open("ab") as file:
                        file.write(orjson.dumps(record) + b"\n")
            yield from done[key]


def table_of(figures: Sequence[Figure]) -> str:
    """Return one Markdown row a question and group: right ones, by ground."""
    grounds = (*GROUNDS, OWN)
    lines = [f"| figure | of | right | {' | '.join(grounds)} |", "|---" * (3 + len(grounds)) + "|"]
    groups: dict[tuple[str, str], list[Figure]] = defaultdict(list)
    for one in figures:
        groups[one.question, one.group].append(one)
    for (question, group), members in sorted(
        groups.items(), key=lambda item: (QUESTIONS.index(item[0][0]), item[0][1])
    ):
        cells = [_share(members).text()]
        for ground in grounds:
            own = [one for one in members if one.ground == ground]
            cells.append(f"{_share(own).hits} of {len(own)}" if own else "-")
        lines.append(f"| {question} | {group} | {' | '.join(cells)} |")
    for group in ("found", "its node named"):
        stated = [one.stated for one in groups.get(("power", group), [])]
        if stated:
            lines.append("")
            lines.append(f"Stated power, {group}: median {np.median(stated):.3f}.")
    return "\n".join(lines)


def _share(figures: Sequence[Figure]) -> Share:
    return Share(sum(one.right for one in figures), len(figures))


def main() -> int:
    """Judge and print the table."""
    arguments = _parser().parse_args()
    if arguments.draw < 0 or arguments.every < 1:
        raise UsageError(
            f"--draw {arguments.draw} --every {arguments.every}: want 0 or more, 1 or more"
        )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cases = _cases(arguments.draw, arguments.every)
    asked = arguments.ask or QUESTIONS
    figures = list(_all_figures(cases, asked, arguments.workers, arguments.keep))
    if arguments.wrong:
        for one in figures:
            if not one.right:
                print(f"{one.question} {one.ground} {one.name}: stated {one.stated:.3f}, "
                      f"true {one.true:.3f}; {one.says}")  # fmt: skip
    print(table_of(figures))
    return 0


if __name__ == "__main__":
    sys.exit(report_errors(main))
