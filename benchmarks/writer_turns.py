"""What does a thread that writes a window cost one that launches kernels? By the length of turns.

    python -m benchmarks.writer_turns [-o RESULT.md]

Both threads need Python's interpreter. One launches a step's kernels and waits for the device, as a
pipeline's schedule does at each message; the other computes in turns and rests (`Pace` of
`megascan/tracer/writer.py`), as it does while it writes a window. Steps beside it and steps without
it alternate. What the steps of a round take longer, over what the writer has computed in it, is the
share of the writer's time that training pays. Prints a result page.
"""

from __future__ import annotations

import argparse
import gc
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.jobs import environment_line, publish
from megascan.tracer.writer import REST_S, SLICE_NS, Pace

TURNS_MS = ((1.0, 0.1), (0.5, 0.1), (0.2, 0.1), (0.2, 0.4), (SLICE_NS / 1e6, REST_S * 1e3))
"""Turns and rests that are compared; the last are the writer's own."""
PIECE_S, WINDOW_S, BREAK_S = 50e-6, 12e-3, 50e-3
"""A piece of work between two looks at the clock, the work of a window, and the time between."""
ROUND_S, NUM_ROUNDS = 1.0, 4
DEVICE_BOUND = (2048, 300)
HOST_BOUND = (64, 800)
"""Size of a square matrix, and products of it in a step."""

Step = Callable[[], None]


@dataclass
class Writer:
    """Writes windows in a thread of its own while it is entered; knows how long it computed."""

    pace: Pace
    computed_s: float = 0.0

    def __enter__(self) -> Writer:
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends.is_set():
            for _ in range(round(WINDOW_S / PIECE_S)):
                begin_s = time.perf_counter()
                while time.perf_counter() - begin_s < PIECE_S:
                    pass
                self.computed_s += PIECE_S
                self.pace.step()
            time.sleep(BREAK_S)


def products(size: int, number: int) -> Step:
    """Return a step of so many matrix products, which waits for the device at its end."""
    matrix = torch.zeros(size, size, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        for _ in range(number):
            matrix @ matrix
        torch.cuda.synchronize()

    step()
    return step


def steps_s(step: Step) -> np.ndarray:
    """Return the time of each step of a round."""
    lengths, ends_s = [], time.perf_counter() + ROUND_S
    while (begin_s := time.perf_counter()) < ends_s:
        step()
        lengths.append(time.perf_counter() - begin_s)
    return np.array(lengths)


def share_paid(step: Step, turn_ms: float, rest_ms: float) -> float:
    """Return the share of the writer's time that steps pay: one round beside one without it."""
    usual = steps_s(step)
    pace = Pace(
        hurried=lambda: False,
        pause=time.sleep,
        slice_ns=round(turn_ms * 1e6),
        rest_s=rest_ms / 1e3,
    )
    with Writer(pace) as writer:
        beside = steps_s(step)
    return float((beside - np.median(usual)).sum() / writer.computed_s)


def rows() -> list[str]:
    """Measure every kind of turn on both kinds of step; the lines of the table."""
    gc.disable()
    lines = []
    for name, (size, number) in {"device": DEVICE_BOUND, "host": HOST_BOUND}.items():
        step = products(size, number)
        shares = np.array(
            [[share_paid(step, *turns) for turns in TURNS_MS] for _ in range(NUM_ROUNDS)]
        )
        step_ms = float(np.median(steps_s(step))) * 1e3
        for (turn_ms, rest_ms), found in zip(TURNS_MS, shares.T, strict=True):
            each = ", ".join(f"{share:.2f}" for share in sorted(found))
            lines.append(
                f"| {name}, {step_ms:.1f} ms | {turn_ms:g} | {rest_ms:g} "
                f"| **{np.median(found):.2f}** | {each} |"
            )
        print("\n".join(lines[-len(TURNS_MS) :]), file=sys.stderr, flush=True)
    return lines


def main() -> int:
    """Measure and print the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, help="write the result page here, too")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU: on a CPU there is no device to get ahead of")
    page = [
        "# What the writer's turns cost training",
        "",
        f"`python -m benchmarks.writer_turns` on {environment_line('gpu')}.",
        "",
        f"The writer computes {WINDOW_S * 1e3:g} ms for a window, in turns with rests between.",
        "",
        "| step bound by | turn, ms | rest, ms | share of the writer's time that steps pay "
        f"| {NUM_ROUNDS} rounds |",
        "|---|---|---|---|---|",
        *rows(),
        "",
    ]
    publish("\n".join(page), arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
