"""What does tracing cost? Every other iteration of one run is traced; neighbours are compared.

    python -m benchmarks.overhead [--device cpu|gpu] [--layout "TP2 DP2"] [--granularity full]

One `torchrun -m training.pretrain_gpt` of four ranks with a window of one iteration in every two.
Each traced iteration is divided by the mean of the untraced ones before and after it, so that
drift of the machine cancels. Prints the median ratio, its range, and both medians in ms.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.layouts import LAYOUTS, MODELS, NUM_RANKS, ROOT

NUM_WARMUP = 4
_LOG_LINE = re.compile(r"iteration\s+(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+)")


def iteration_times(
    device: str, layout: str, granularity: str, iterations: int
) -> dict[int, float]:
    """Milliseconds by iteration; odd ones were traced. SystemExit when the run fails."""
    with TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(NUM_RANKS), "-m", "training.pretrain_gpt"),
                *MODELS[device],
                *LAYOUTS[layout],
                *("--max-position-embeddings", "2048", "--train-iters", str(iterations)),
                *("--lr", "1e-4", "--mock-data", "--tokenizer-type", "NullTokenizer"),
                *("--vocab-size", "8192", "--eval-iters", "0", "--num-workers", "0"),
                *("--log-interval", "1", "--trace", "--trace-dir", str(Path(folder) / "trace")),
                *("--trace-interval", "2", "--continuous-trace-iterations", "1"),
                *("--trace-granularity", granularity),
            ],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"the run failed:\n{done.stderr[-4000:]}")
    return {int(number): float(ms) for number, ms in _LOG_LINE.findall(done.stdout)}


def paired_ratios(times: dict[int, float]) -> list[float]:
    """Traced iterations over the mean of their untraced neighbours, warm-up left out."""
    return [
        times[number] / statistics.mean((times[number - 1], times[number + 1]))
        for number in times
        if number % 2 and number > NUM_WARMUP and number + 1 in times
    ]


def main() -> int:
    """Run and print one line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=sorted(MODELS), default="cpu")
    parser.add_argument("--layout", choices=sorted(LAYOUTS), default="TP2 DP2")
    parser.add_argument("--granularity", choices=["base", "full"], default="full")
    parser.add_argument("--iterations", type=int, default=31)
    arguments = parser.parse_args()
    times = iteration_times(
        arguments.device, arguments.layout, arguments.granularity, arguments.iterations
    )
    ratios = paired_ratios(times)
    if not ratios:
        raise SystemExit(f"too few iterations, give more than {NUM_WARMUP + 2}")
    traced = [ms for number, ms in times.items() if number > NUM_WARMUP and number % 2]
    untraced = [ms for number, ms in times.items() if number > NUM_WARMUP and not number % 2]
    print(
        f"{arguments.layout} {arguments.granularity} ({arguments.device}): traced / untraced "
        f"{statistics.median(ratios):.4f} (median of {len(ratios)} pairs, {min(ratios):.4f} to "
        f"{max(ratios):.4f}); {statistics.median(traced):.1f} against "
        f"{statistics.median(untraced):.1f} ms"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
