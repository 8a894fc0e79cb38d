"""python -m benchmarks.detection.laws: is the detector right under noise that nobody simulated?

Windows of `benchmarks.detection.draws` from laws of noise on fifteen layouts: in healthy
ones no rank may be named, in others one rank computes slowly.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.detection.draws import FORWARD_NS, Generator, Law, TableJob, draw
from detect import DetectorSettings, Owner, Report
from detect.detector import judge
from megascan.arrays import Floats
from megascan.errors import report_errors
from megascan.topology import Layout

HEADING = """# Noise that nobody simulated

`python -m benchmarks.detection.laws --repetitions {repetitions}`: windows of 4 to 40 iterations
(most 20) on 15 layouts, drawn by `benchmarks/detection/draws.py`. Healthy windows: all layouts,
also single ranks and pairs. Slow ranks: layouts in which three ranks and more do the same work.
A name accuses a node; *undecided* findings give a rank and why it need not be at fault.

Where chips differ by 1 %, a rank of a small job may truly be 2.4 % slower than its few peers; a TP
rank 0 that is 5 % slower cannot be told from a slow one where no second replica or stage shows it:
both are undecided. Data that vary by 30 % hide a slow rank where no other rank works on the same
data (DP alone).
"""


def _normal(ratio: float) -> Callable[[Generator, tuple[int, ...]], Floats]:
    return lambda random, shape: np.asarray(ratio * random.standard_normal(shape))


def _student(random: Generator, shape: tuple[int, ...]) -> Floats:
    return np.asarray(0.02 * random.standard_t(3, shape) / np.sqrt(3.0))


def _one_sided(random: Generator, shape: tuple[int, ...]) -> Floats:
    return random.exponential(0.02, shape)


def _gamma(random: Generator, shape: tuple[int, ...]) -> Floats:
    """Skewed: coefficient of variation 4 %, never below a sharp least time."""
    return np.asarray(np.log1p(0.02 * random.gamma(0.5, 2.0, shape)))


def _contaminated(random: Generator, shape: tuple[int, ...]) -> Floats:
    odd = random.random(shape) < 0.05
    return 0.02 * random.standard_normal(shape) + odd * random.uniform(0.2, 1.0, shape)


def _coarse(random: Generator, shape: tuple[int, ...]) -> Floats:
    """A timer of half a millisecond."""
    exact = FORWARD_NS * np.exp(0.02 * random.standard_normal(shape))
    return np.asarray(np.log(np.maximum(np.round(exact / 5e5), 1.0) * 5e5 / FORWARD_NS))


TWO_PERCENT = _normal(0.02)
LAWS: Mapping[str, Law] = {
    "normal 2 %": Law(operation=TWO_PERCENT),
    "normal 5 %": Law(operation=_normal(0.05)),
    "silent": Law(operation=_normal(0.0005), level_ratio=0.001),
    "one-sided": Law(operation=_one_sided),
    "gamma": Law(operation=_gamma),
    "heavy tails": Law(operation=_student),
    "contaminated": Law(operation=_contaminated),
    "coarse timer": Law(operation=_coarse),
    "chips differ by 1 %": Law(operation=TWO_PERCENT, level_ratio=0.01),
    "ranks vary 2 % by iteration": Law(operation=TWO_PERCENT, wander_ratio=0.02),
    "ranks wander 1 %": Law(operation=TWO_PERCENT, wander_ratio=0.01, wander_memory=0.8),
    "ranks wander 1 % for long": Law(operation=TWO_PERCENT, wander_ratio=0.01, wander_memory=0.95),
    "iterations vary 10 %": Law(operation=TWO_PERCENT, iteration_ratio=0.1),
    "data vary 10 %": Law(operation=TWO_PERCENT, data_ratio=0.1),
    "data vary 30 %": Law(operation=TWO_PERCENT, data_ratio=0.3),
    "data vary 50 %": Law(operation=TWO_PERCENT, data_ratio=0.5),
    "untraced pauses": Law(operation=TWO_PERCENT, pause_probability=0.15),
    "odd iterations": Law(operation=TWO_PERCENT, outlier_probability=0.08),
    "a tenth missing": Law(operation=TWO_PERCENT, missing_probability=0.1),
    "first iterations": Law(operation=TWO_PERCENT, warmup=1.0),
    "heavy last stage": Law(operation=TWO_PERCENT, heavy_stage=1.6),
    "uneven positions": Law(operation=TWO_PERCENT, position_ratio=0.05),
}
LAYOUTS: Mapping[str, Layout] = {
    "1": Layout(),
    "dp2": Layout(dp=2),
    "dp3": Layout(dp=3),
    "dp4": Layout(dp=4),
    "dp16": Layout(dp=16),
    "tp2": Layout(tp=2),
    "tp8": Layout(tp=8),
    "pp4": Layout(pp=4),
    "tp2-pp2": Layout(tp=2, pp=2),
    "tp2-dp2": Layout(tp=2, dp=2),
    "pp2-dp2": Layout(pp=2, dp=2),
    "pp4-dp2": Layout(pp=4, dp=2),
    "pp2-dp4": Layout(pp=2, dp=4),
    "tp2-pp2-dp2": Layout(tp=2, pp=2, dp=2),
    "tp4-pp2-dp8": Layout(tp=4, pp=2, dp=8),
}


@dataclass(frozen=True)
class Tally:
    """Of so many windows: false names, and of the faults planted those found.

    `undecided`: healthy windows with such a finding and no name; of faults, those that are not
    named but have one.
    """

    windows: int
    alarms: int
    undecided: int = 0
    planted: int = 0
    found: int = 0

    @property
    def unsure(self) -> str:
        """The undecided ones in words; nothing where there are none."""
        return f", {self.undecided} undecided" if self.undecided else ""


def named(report: Report, owner: Owner = Owner.NODE) -> list[tuple[int, ...]]:
    """Ranks of the findings whose owner is a node."""
    return [finding.ranks for finding in report.findings if finding.owner is owner]


def healthy_windows(law: str, repetitions: int) -> Iterator[TableJob]:
    """Every layout at several lengths."""
    for number, layout in enumerate(LAYOUTS.values()):
        for again in range(repetitions):
            length = (20, 8, 40, 4, 20)[again % 5]
            seed = zlib.crc32(law.encode()) + 1000 * number + again
            yield TableJob(layout=layout, law=LAWS[law], seed=seed, num_iterations=length)


def slow_windows(law: str, factor: float, repetitions: int) -> Iterator[TableJob]:
    """Layouts with three ranks and more that do the same work."""
    for number, layout in enumerate(LAYOUTS.values()):
        if layout.dp * layout.tp < 3:
            continue
        for again in range(repetitions):
            seed = zlib.crc32(law.encode()) + 1000 * number + again
            rank = int(np.random.default_rng(seed).integers(layout.world_size))
            yield TableJob(layout=layout, law=LAWS[law], seed=seed, slow={rank: factor})


def tally(jobs: Iterator[TableJob], settings: DetectorSettings) -> Tally:
    """Judge windows, and count."""
    windows = alarms = undecided = planted = found = 0
    for job in jobs:
        report = judge(draw(job), settings)
        names, unsure = named(report), named(report, Owner.UNDECIDED)
        windows += 1
        planted += len(job.slow)
        found += sum((rank,) in names for rank in job.slow)
        alarms += any(set(ranks) - set(job.slow) for ranks in names)
        if job.slow:
            undecided += sum((rank,) in unsure for rank in job.slow)
        else:
            undecided += bool(unsure) and not names
    return Tally(windows, alarms, undecided, planted, found)


def main() -> int:
    """A table: each law, false names in healthy windows, and slow ranks found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.detection.laws")
    parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="of each layout")
    parser.add_argument("--only", metavar="LAW", help="one law")
    arguments = parser.parse_args()
    settings = DetectorSettings()
    print(HEADING.format(repetitions=arguments.repetitions))
    print("| noise | healthy windows with a name | 3 % found | 5 % found | 10 % found |")
    print("|---|---|---|---|---|")
    for law in LAWS:
        if arguments.only and law != arguments.only:
            continue
        healthy = tally(healthy_windows(law, arguments.repetitions), settings)
        cells = [f"{healthy.alarms} of {healthy.windows}{healthy.unsure}"]
        for factor in (1.03, 1.05, 1.10):
            slow = tally(slow_windows(law, factor, arguments.repetitions), settings)
            wrong = f", {slow.alarms} wrong" if slow.alarms else ""
            cells.append(f"{slow.found} of {slow.planted}{slow.unsure}{wrong}")
        print(f"| {law} | " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(report_errors(main))
