"""Does every way to split and to compute train and trace? One short run of two ranks for each.

    python -m benchmarks.parallelism [--device cpu|gpu] [--only TEXT] [-o RESULT.md] [--keep DIR]

Each case is one `torchrun -m training.pretrain_gpt … --trace` of a Llama-style model on two ranks
(gloo on the CPU, NCCL on GPUs) and one `megascan aggregate`. Right is a case whose training ended,
whose ranks were all read, and whose communications all found their partners. Cases that need a GPU
or Transformer Engine are left out, by name, where there is none.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.jobs import DATA, DEVICES, environment_line, model, publish, run_python, run_ranks

NUM_RANKS = 2
LLAMA = (
    *("--normalization", "RMSNorm", "--swiglu", "--position-embedding-type", "rope"),
    *("--untie-embeddings-and-output-weights", "--disable-bias-linear"),
    "--group-query-attention",
)
MODELS = {
    "cpu": (
        *model(layers=4, hidden=64, heads=4, sequence=32),
        *("--ffn-hidden-size", "128", "--num-query-groups", "2"),
    ),
    "gpu": (
        *model(layers=8, hidden=4096, heads=32, sequence=2048),
        *("--ffn-hidden-size", "14336", "--num-query-groups", "8"),
    ),
}
EXPERTS = ("--num-experts", "4", "--expert-model-parallel-size", "2", "--num-layers", "4")
TE = ("--transformer-impl", "transformer_engine")
CASES: dict[str, tuple[str, ...]] = {
    "TP2, sequence parallel": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "PP2": ("--pipeline-model-parallel-size", "2"),
    "PP2, two chunks": (
        *("--pipeline-model-parallel-size", "2"),
        *("--num-layers-per-virtual-pipeline-stage", "2", "--num-layers", "8"),
    ),
    "DP2, distributed optimizer, overlap": (
        *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    ),
    "EP2, all-to-all": (*EXPERTS, "--moe-token-dispatcher-type", "alltoall"),
    "EP2, all-gather": (*EXPERTS, "--moe-token-dispatcher-type", "allgather"),
    "fp16, dynamic loss scale": (
        *("--fp16", "--initial-loss-scale", "65536", "--min-loss-scale", "1"),
    ),
    "recomputation, full": (
        *("--recompute-granularity", "full", "--recompute-method", "uniform"),
        *("--recompute-num-layers", "1"),
    ),
    "recomputation, selective": ("--recompute-granularity", "selective"),
    "optimizer on the CPU": ("--use-distributed-optimizer", "--optimizer-cpu-offload"),
    "TE, TP2, sequence parallel": (
        *TE,
        *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    ),
    "TE, CP2": (*TE, "--context-parallel-size", "2"),
    "TE, PP2": (*TE, "--pipeline-model-parallel-size", "2"),
    "TE, EP2, all-to-all": (*TE, *EXPERTS, "--moe-token-dispatcher-type", "alltoall"),
}
_LOSS = re.compile(r"iteration\s+(\d+)/.*?elapsed time[^:]*: (\S+).*?lm loss: (\S+)")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one case printed and traced."""

    name: str
    step_ms: float
    losses: tuple[float, float]
    num_spans: int
    num_matched: int
    num_unmatched: int
    residual_p99_us: float
    complete: bool

    @property
    def right(self) -> bool:
        """Every rank read and every communication matched."""
        return self.complete and not self.num_unmatched

    def row(self) -> str:
        """As a row of the result table."""
        first, last = self.losses
        return (
            f"| {self.name} | {self.step_ms:,.0f} | {first:.3f} → {last:.3f} | {self.num_spans:,} "
            f"| {self.num_matched:,} | {self.num_unmatched} | {self.residual_p99_us:,.0f} "
            f"| {'yes' if self.right else 'NO'} |"
        )


def run_case(name: str, device: str, folder: Path) -> Result:
    """Train and aggregate; SystemExit with the output when a command fails."""
    trace, summary = folder / "trace", folder / "summary.json"
    precision = DEVICES[device]
    if "--fp16" in CASES[name]:
        precision = tuple(flag for flag in precision if flag != "--bf16")
    output = run_ranks(
        NUM_RANKS,
        [
            *("training.pretrain_gpt", *MODELS[device], *LLAMA, *DATA, *precision, *CASES[name]),
            *("--global-batch-size", "4", "--train-iters", "12", "--log-interval", "4"),
            *("--trace", "--trace-dir", str(trace), "--trace-interval", "4"),
        ],
    )
    run_python(
        [
            *("aggregate.py", "-b", str(trace), "--json", str(summary)),
            *("-o", str(folder / "timeline.json.gz")),
        ]
    )
    return _read(name, output, summary)


def _read(name: str, output: str, summary: Path) -> Result:
    lines = _LOSS.findall(output)
    values = json.loads(summary.read_text(encoding="utf-8"))["aggregate"]
    completeness, clocks = values["completeness"], values["alignment"]["clocks"]
    return Result(
        name=name,
        step_ms=float(lines[-1][1]),
        losses=(float(lines[0][2]), float(lines[-1][2])),
        num_spans=completeness["num_spans"],
        num_matched=values["num_matches"],
        num_unmatched=sum(completeness["num_unmatched"].values()),
        residual_p99_us=max(clock["residual_p99_ns"] for clock in clocks) / 1e3,
        complete=len(completeness["ranks"]) == NUM_RANKS,
    )


def render(results: Sequence[Result], left_out: Sequence[str], device: str, command: str) -> str:
    """The result page."""
    missing = [f"Left out for want of a GPU or Transformer Engine: {'; '.join(left_out)}.", ""]
    return "\n".join(
        [
            f"# Parallelism and precision, traced ({device})",
            "",
            f"`{command}` on {environment_line(device)}"
            + (f", Transformer Engine {_te_version()}." if _te_version() else "."),
            "",
            f"{sum(result.right for result in results)} of {len(results)} trained to their end, "
            "were read whole and had every communication matched. Loss: iteration 4 to 12.",
            "",
            "| case | step, ms | loss | spans | matched | unmatched | clock p99, µs | right |",
            "|---|---|---|---|---|---|---|---|",
            *(result.row() for result in results),
            "",
            *(missing if left_out else ()),
        ]
    )


def _can_run(name: str, device: str) -> bool:
    needs_te = "transformer_engine" in CASES[name]
    if device == "cpu":
        return not needs_te and "--optimizer-cpu-offload" not in CASES[name]
    return not needs_te or find_spec("transformer_engine") is not None


def _te_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("transformer_engine")
    except PackageNotFoundError:
        return ""


def main() -> int:
    """Run the cases, print the page, exit 1 when one was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=sorted(MODELS), default="cpu")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds TEXT")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep traces and timelines here")
    parser.add_argument("-o", "--output", type=Path, help="write the result page here")
    arguments = parser.parse_args()
    wanted = [name for name in CASES if arguments.only in name]
    runnable = [name for name in wanted if _can_run(name, arguments.device)]
    results = []
    with TemporaryDirectory() as temporary:
        for number, name in enumerate(runnable):
            folder = (arguments.keep or Path(temporary)) / f"{number:02}"
            folder.mkdir(parents=True)
            results.append(run_case(name, arguments.device, folder))
            print(results[-1].row(), file=sys.stderr, flush=True)
    left_out = [name for name in wanted if name not in runnable]
    command = f"python -m benchmarks.parallelism --device {arguments.device}"
    page = render(results, left_out, arguments.device, command)
    publish(page, arguments.output)
    return 0 if all(result.right for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
