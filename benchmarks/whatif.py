"""How long `megascan whatif` takes on an op table, as a whole process, and how it grows with DP.

    python -m benchmarks.whatif trace-AR.parquet [trace-ST.parquet …] [--replicas 4 16 64 256]

Each line is a process from its start to its exit: the shell's wall clock, and the processor time
it used. On a machine that does other work besides, the latter says more. For the growth, the first
table is tiled: its replicas are repeated until there are as many as asked for, which keeps every
operation and every duration. The detector is left out, as it is by default for op tables.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.jobs import ROOT, machine_line


@dataclass(frozen=True)
class Timing:
    """Seconds of repeated runs, (run,)."""

    wall_s: tuple[float, ...]
    processor_s: tuple[float, ...]

    def row(self, name: str, num_rows: int) -> str:
        """One line of the table."""
        wall, busy = np.array(self.wall_s), np.array(self.processor_s)
        return (
            f"| {name} | {num_rows:,} | {wall.min():.2f} | {np.median(wall):.2f} "
            f"| {busy.min():.2f} | {np.median(busy):.2f} |"
        )


def measure(path: Path, repeat: int) -> Timing:
    """Run the command on a table some times. Raises CalledProcessError when it fails."""
    wall, busy = [], []
    for _ in range(repeat):
        before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "megascan", "whatif", str(path)],
            check=True,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        wall.append(time.perf_counter() - begin)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        busy.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return Timing(tuple(wall), tuple(busy))


def tile(source: Path, replicas: int, folder: Path) -> Path:
    """A table with so many replicas, each a copy of one of `source`'s, and its sizes beside it."""
    table = pq.read_table(source)
    dp_rank, stage, rank = (
        table.column(name).to_numpy().astype(np.int64) for name in ("dp_rank", "stage", "rank")
    )
    own = int(dp_rank.max()) + 1
    step = int(np.unique(rank)[1]) if len(np.unique(rank)) > 1 else 1
    parts = []
    for copy in range(-(-replicas // own)):
        lane = dp_rank + copy * own
        rows = np.flatnonzero(lane < replicas)
        part = table.take(rows)
        for name, values in (
            ("dp_rank", lane[rows].astype(np.int16)),
            ("rank", ((stage[rows] * replicas + lane[rows]) * step).astype(np.int32)),
        ):
            part = part.set_column(part.column_names.index(name), name, pa.array(values))
        parts.append(part)
    path = folder / f"trace-dp{replicas}.parquet"
    pq.write_table(pa.concat_tables(parts).combine_chunks(), path)
    meta = f"dp_size: {replicas}\npp_size: {int(stage.max()) + 1}\ntp_size: {step}\n"
    path.with_name(f"meta-dp{replicas}.yaml").write_text(meta, encoding="utf-8")
    return path


def report(tables: list[Path], replicas: list[int], repeat: int) -> str:
    """The results as a page."""
    lines = [
        f"{machine_line()}, load average {os.getloadavg()[0]:.1f} at the start; "
        f"{repeat} runs each.",
        "",
        "| table | rows | wall, least, s | wall, median, s | processor, least, s "
        "| processor, median, s |",
        "|---|---|---|---|---|---|",
    ]
    least = {}
    for path in tables:
        lines.append(measure(path, repeat).row(path.stem, pq.read_metadata(path).num_rows))
    with tempfile.TemporaryDirectory() as folder:
        for number in replicas:
            path = tile(tables[0], number, Path(folder))
            timing = measure(path, repeat)
            least[number] = min(timing.processor_s)
            name = f"{tables[0].stem} tiled to DP {number}"
            lines.append(timing.row(name, pq.read_metadata(path).num_rows))
    return "\n".join([*lines, "", *_growth(least)])


def _growth(least: dict[int, float]) -> list[str]:
    """A straight line through the processor times, and how far they lie from it."""
    if len(least) < 3:
        return []
    x, y = np.array(list(least)), np.array(list(least.values()))
    slope, start = np.polyfit(x, y, 1)
    off = float(np.max(np.abs(y / (start + slope * x) - 1.0)))
    return [
        f"Processor time is {start:.2f} s + {1e3 * slope:.1f} ms a replica; the measured times lie "
        f"within {100 * off:.0f} % of that line."
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", type=Path, nargs="+", metavar="TABLE", help="op tables, Parquet")
    parser.add_argument("--replicas", type=int, nargs="*", default=[4, 16, 64, 256], metavar="DP")
    parser.add_argument("--repeat", type=int, default=7, help="(default: %(default)s)")
    arguments = parser.parse_args()
    print(report(arguments.tables, arguments.replicas, arguments.repeat))


if __name__ == "__main__":
    main()
