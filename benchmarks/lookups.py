"""By how much do more tokens lengthen each part of a model? What the verdict on data rests on.

    python -m benchmarks.lookups [--device cpu|gpu] [--only "6 x"] [-o RESULT.md]

Products of matrices (MLPs, the output layer) and lookups (embedding, loss) are to take time in
proportion to the tokens, both alike; a lower clock lengthens the first alone. That is how a slow
device is told from longer data (`detect.causes.device.spares_lookups`). The trainer runs with
several sequence lengths, one rank, traced at granularity full; of each module the median of its
own times counts. *Follows* is the log ratio of its times over that of the tokens: 1.0 is in
proportion, 0 as long whatever the tokens. Prints a result page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from aggregate import build_timeline
from benchmarks.jobs import DEVICES, environment_line, model, publish, run_ranks
from detect.observe.facts import LOOKUPS
from detect.thresholds.devices import DEVICE
from megascan.reader import read_trace
from megascan.timeline import equals, numbers
from megascan.vocabulary import ATTENTION, MLP, OUTPUT_LAYER, backward_of

PRODUCTS = (MLP, backward_of(MLP), OUTPUT_LAYER, backward_of(OUTPUT_LAYER))
PARTS = (*PRODUCTS, ATTENTION, backward_of(ATTENTION), *LOOKUPS)
SIZES = {
    "gpu": {
        "12 x 1024": {"layers": 12, "hidden": 1024, "heads": 16},
        "6 x 2560": {"layers": 6, "hidden": 2560, "heads": 20},
        "3 x 6144": {"layers": 3, "hidden": 6144, "heads": 48},
    },
    "cpu": {"small": {"layers": 2, "hidden": 64, "heads": 4}},
}
LENGTHS = {"gpu": (2048, 2560), "cpu": (64, 96)}
"""Tokens of a microbatch; the first is what the others are compared with."""
VOCABULARIES = {"gpu": (8192, 50304), "cpu": (512,)}
NUM_ITERATIONS = {"gpu": 16, "cpu": 6}
NUM_WARMING_UP = 4


def times_of(folder: Path) -> dict[str, float]:
    """Return each part's own time, ns: the median over the trace without its first iterations."""
    spans = build_timeline(read_trace(folder)).spans
    settled = numbers(spans, "iteration") > NUM_WARMING_UP
    own_ns = numbers(spans, "self_ns")
    rows = {part: np.asarray(equals(spans, "name", part)) & settled for part in PARTS}
    return {part: float(np.median(own_ns[row])) for part, row in rows.items() if row.any()}


def trained(
    device: str, sizes: Mapping[str, int], vocabulary: int, length: int
) -> dict[str, float]:
    """Return the times of one traced run."""
    with TemporaryDirectory() as folder:
        flags = (
            *model(**sizes, sequence=length),
            *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocabulary)),
            *("--eval-iters", "0", "--num-workers", "0", "--lr", "1e-4"),
            *("--global-batch-size", "4", "--train-iters", str(NUM_ITERATIONS[device])),
            *("--trace", "--trace-dir", folder, "--trace-interval", "1"),
            *("--continuous-trace-iterations", "1", "--trace-granularity", "full"),
            *("--trace-layer-stride", "1"),
        )
        run_ranks(1, ("training.pretrain_gpt", *flags, *DEVICES[device]))
        return times_of(Path(folder))


def follows(times: Mapping[int, Mapping[str, float]], part: str) -> dict[int, float]:
    """Return by how much a part follows the tokens, by length: 1.0 is in proportion."""
    first, *others = sorted(times)
    return {
        length: float(np.log(times[length][part] / times[first][part]) / np.log(length / first))
        for length in others
    }


def rows_of(device: str, only: str) -> Iterator[str]:
    """Yield the rows of the table, one a part of each model whose name holds `only`."""
    for name, sizes in SIZES[device].items():
        if only not in name:
            continue
        for vocabulary in VOCABULARIES[device]:
            times = {
                length: trained(device, sizes, vocabulary, length) for length in LENGTHS[device]
            }
            shortest = times[min(times)]
            for part in PARTS:
                if part in shortest:
                    cells = " | ".join(f"{one:.2f}" for one in follows(times, part).values())
                    short = part in LOOKUPS and shortest[part] < DEVICE.least_lookup_ns
                    told = "too short to tell" if short else ""
                    yield (
                        f"| {name} | {vocabulary} | {part} | {shortest[part] / 1e3:,.0f} | {cells} "
                        f"| {told} |"
                    )


def page(device: str, only: str) -> str:
    """Return the result page."""
    first, *others = LENGTHS[device]
    heads = " | ".join(f"follows {length}" for length in others)
    return "\n".join(
        [
            f"# What more tokens lengthen ({device})",
            "",
            f"`python -m benchmarks.lookups --device {device}` on {environment_line(device)}.",
            "",
            f"| model | vocabulary | part | µs at {first} tokens | {heads} | |",
            "|---" * (5 + len(others)) + "|",
            *rows_of(device, only),
            "",
        ]
    )


def main() -> int:
    """Train, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--only", default="", metavar="TEXT", help="models whose name holds it")
    parser.add_argument("-o", "--output", type=Path, metavar="RESULT.md")
    arguments = parser.parse_args()
    publish(page(arguments.device, arguments.only), arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
