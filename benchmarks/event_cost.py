"""What does one CUDA event cost the GPU? Kernels in a row, with and without an event between them.

    python -m benchmarks.event_cost [-o RESULT.md]

Every span of a traced GPU job is two events on the stream that computes, so this is the floor under
the cost of tracing. Matrix products of several sizes follow one another on one stream, launched
far ahead of their execution; rounds with and without events alternate. Prints a result page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.jobs import environment_line, publish

SIZES = (512, 1024, 2048, 4096)
NUM_KERNELS, NUM_ROUNDS = 200, 40
HEAD_START_CYCLES = 60_000_000
"""Some 30 ms of an idle kernel, in which the host launches all others."""


@dataclass(frozen=True)
class Cost:
    """Of kernels of one size: how long one takes, and what an event behind each adds to it, µs.

    `low` and `high` are the 95 % interval of the median over rounds.
    """

    size: int
    kernel_us: float
    event_us: float
    low: float
    high: float


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def round_us(matrix: torch.Tensor, events: Sequence[torch.cuda.Event]) -> float:
    """Time of all kernels on the device, an event behind each if there are any."""
    begin, end = _event(), _event()
    out = torch.empty_like(matrix)
    torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
    begin.record()
    for number in range(NUM_KERNELS):
        torch.mm(matrix, matrix, out=out)
        if events:
            events[number].record()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def cost_of(size: int) -> Cost:
    """Alternate rounds with and without events, each compared with its neighbour."""
    matrix = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    events = [_event() for _ in range(NUM_KERNELS)]
    for _ in range(3):
        round_us(matrix, events)
    pairs = [(round_us(matrix, ()), round_us(matrix, events)) for _ in range(NUM_ROUNDS)]
    added = np.array([with_events - bare for bare, with_events in pairs]) / NUM_KERNELS
    drawn = np.random.default_rng(0).integers(NUM_ROUNDS, size=(2000, NUM_ROUNDS))
    low, high = np.percentile(np.median(added[drawn], axis=1), [2.5, 97.5])
    return Cost(
        size=size,
        kernel_us=float(np.median([bare for bare, _ in pairs])) / NUM_KERNELS,
        event_us=float(np.median(added)),
        low=float(low),
        high=float(high),
    )


def render(costs: Sequence[Cost], environment: str) -> str:
    """The result page."""
    return "\n".join(
        [
            "# What a CUDA event costs the GPU",
            "",
            f"`python -m benchmarks.event_cost` on {environment}. bf16 matrix products, "
            f"{NUM_KERNELS} in a row, {NUM_ROUNDS} pairs of rounds.",
            "",
            "| size | a kernel, µs | an event behind it adds, µs | 95 % interval |",
            "|---|---|---|---|",
            *(
                f"| {cost.size} | {cost.kernel_us:.1f} | {cost.event_us:.2f} "
                f"| {cost.low:.2f} to {cost.high:.2f} |"
                for cost in costs
            ),
            "",
        ]
    )


def main() -> int:
    """Measure all sizes and print the page; exit 1 without a GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, help="write the result page here, too")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: there is no GPU to measure", file=sys.stderr)
        return 1
    publish(render([cost_of(size) for size in SIZES], environment_line("gpu")), arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
