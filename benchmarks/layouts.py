"""Is the right rank named? Real training runs in several layouts, healthy and with each fault.

    python -m benchmarks.layouts [--device cpu|gpu] [--only TEXT] [-o RESULT.md] [--keep DIR]

Every case is one `torchrun -m training.pretrain_gpt … --trace` of four ranks (gloo on the CPU,
NCCL on GPUs), followed by `megascan aggregate -d`. A case is right when the ranks that the
verdict accuses are exactly the injected one, with its cause; a healthy one when nobody is. Accused
are findings whose owner is the node, and garbage collection, which belongs to the job. The injected
fault is never shown to the detector.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
NUM_RANKS = 4
LAYOUTS: dict[str, tuple[str, ...]] = {
    "TP2 DP2": ("--tensor-model-parallel-size", "2"),
    "PP2 DP2": ("--pipeline-model-parallel-size", "2"),
    "TP2 PP2": ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"),
    "PP2 VPP2 DP2": (
        "--pipeline-model-parallel-size",
        "2",
        "--num-layers-per-virtual-pipeline-stage",
        "2",
    ),
    "DP4": (),
}
MODELS: dict[str, tuple[str, ...]] = {
    "cpu": (
        *("--hidden-size", "256", "--seq-length", "128", "--num-layers", "8"),
        *("--num-attention-heads", "4", "--micro-batch-size", "2", "--global-batch-size", "32"),
        *("--distributed-backend", "gloo"),
    ),
    "gpu": (
        *("--hidden-size", "6144", "--seq-length", "2048", "--num-layers", "8"),
        *("--num-attention-heads", "48", "--micro-batch-size", "1", "--global-batch-size", "16"),
        *("--distributed-backend", "nccl", "--bf16"),
    ),
}
FAULTS = {
    "compute": "factor=1.5",
    "link": "factor=3",
    "host": "factor=2",
    "loader": "factor=20",
    "gc": "factor=2",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: a layout and, unless healthy, a fault of one rank."""

    layout: str
    kind: str | None = None
    rank: int = 0

    @property
    def name(self) -> str:
        """Shown in the table."""
        return f"{self.layout} {self.kind or 'healthy'}" + (
            f" rank {self.rank}" if self.kind else ""
        )

    def flags(self) -> list[str]:
        """Of the trainer."""
        if self.kind is None:
            return [*LAYOUTS[self.layout]]
        fault = f"rank={self.rank},kind={self.kind},{FAULTS[self.kind]}"
        return [*LAYOUTS[self.layout], "--inject-fault", fault]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the verdict says of a case."""

    case: Case
    verdict: str
    accused: tuple[tuple[int, ...], ...]
    causes: tuple[str, ...]
    slowdowns: tuple[float, ...]
    alignment_p99_us: float
    seconds: float

    @property
    def right(self) -> bool:
        """Exactly the injected rank with its cause; nobody in a healthy run."""
        if self.case.kind is None:
            return not self.accused
        return self.accused == ((self.case.rank,),) and self.causes == (self.case.kind,)

    def row(self) -> str:
        """As a row of the result table."""
        named = "; ".join(
            f"{','.join(map(str, ranks))} {cause} {slowdown:.2f}x"
            for ranks, cause, slowdown in zip(
                self.accused, self.causes, self.slowdowns, strict=True
            )
        )
        right = "yes" if self.right else "NO"
        return (
            f"| {self.case.name} | {self.verdict} | {named or '–'} | "
            f"{self.alignment_p99_us:,.0f} | {self.seconds:.0f} | {right} |"
        )


def all_cases() -> list[Case]:
    """Healthy and compute faults in every layout, the other kinds in one with peers on two axes."""
    cases = [Case(layout=layout) for layout in LAYOUTS]
    cases += [
        Case(layout=layout, kind="compute", rank=number % NUM_RANKS)
        for number, layout in enumerate(LAYOUTS)
    ]
    cases += [Case(layout="TP2 DP2", kind=kind, rank=2) for kind in FAULTS if kind != "compute"]
    return cases


def run_case(case: Case, device: str, folder: Path, iterations: int) -> Result:
    """Train, aggregate, detect; SystemExit with the output when a command fails."""
    started = time.monotonic()
    trace, verdict = folder / "trace", folder / "verdict.json"
    _run(
        [
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)),
            *("-m", "training.pretrain_gpt", *MODELS[device], *case.flags()),
            *("--max-position-embeddings", "2048", "--train-iters", str(iterations)),
            *("--lr", "1e-4", "--mock-data", "--tokenizer-type", "NullTokenizer"),
            *("--vocab-size", "8192", "--eval-iters", "0", "--num-workers", "0"),
            *("--trace", "--trace-dir", str(trace), "--trace-interval", "5"),
            *("--continuous-trace-iterations", "4"),
        ]
    )
    timeline = folder / "timeline.json.gz"
    _run(["aggregate.py", "-b", str(trace), "-d", "-o", str(timeline), "--json", str(verdict)])
    report = json.loads(verdict.read_text(encoding="utf-8"))["detect"]
    accused = [
        each for each in report["findings"] if each["owner"] == "node" or each["cause"] == "gc"
    ]
    return Result(
        case=case,
        verdict=report["verdict"],
        accused=tuple(tuple(finding["ranks"]) for finding in accused),
        causes=tuple(finding["cause"] for finding in accused),
        slowdowns=tuple(finding["slowdown"] for finding in accused),
        alignment_p99_us=report["alignment"]["residual_p99_ns"] / 1e3,
        seconds=time.monotonic() - started,
    )


def _run(words: Sequence[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\nfailed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def render(results: Sequence[Result], device: str, command: str) -> str:
    """The result page."""
    faulty = [result for result in results if result.case.kind]
    healthy = [result for result in results if not result.case.kind]
    num_silent = sum(result.right for result in healthy)
    num_found = sum(result.right for result in faulty)
    return "\n".join(
        [
            f"# Real runs on four ranks ({device})",
            "",
            f"`{command}` on {_hardware(device)}, Python {platform.python_version()}, "
            f"torch {_torch_version()}.",
            "",
            f"- right rank and cause: {num_found} of {len(faulty)} faulty runs",
            f"- nobody accused: {num_silent} of {len(healthy)} healthy runs",
            "",
            "| case | verdict | accused | clock residual p99, µs | seconds | right |",
            "|---|---|---|---|---|---|",
            *(result.row() for result in results),
            "",
        ]
    )


def _hardware(device: str) -> str:
    if device == "cpu":
        return f"{os.cpu_count()} cores ({platform.machine()})"
    listing = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return f"{len(listing)} × {listing[0]}"


def _torch_version() -> str:
    from importlib.metadata import version

    return version("torch")


def main() -> int:
    """Run the cases, print the page, exit 1 when one was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=sorted(MODELS), default="cpu")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds TEXT")
    parser.add_argument("--iterations", type=int, default=25)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep traces and timelines here")
    parser.add_argument("-o", "--output", type=Path, help="write the result page here")
    arguments = parser.parse_args()
    results = []
    with TemporaryDirectory() as temporary:
        for number, case in enumerate(all_cases()):
            if arguments.only not in case.name:
                continue
            folder = (arguments.keep or Path(temporary)) / f"{number:02}"
            folder.mkdir(parents=True)
            results.append(run_case(case, arguments.device, folder, arguments.iterations))
            print(results[-1].row(), file=sys.stderr, flush=True)
    command = f"python -m benchmarks.layouts --device {arguments.device}"
    page = render(results, arguments.device, command)
    print(page)
    if arguments.output:
        arguments.output.write_text(page, encoding="utf-8")
    return 0 if all(result.right for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
