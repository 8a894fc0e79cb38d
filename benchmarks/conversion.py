"""Hugging Face models drawn at random, in and out and in every layout, beside transformers.

    python -m benchmarks.conversion [--first 100] [--models 40] [--ranks 4] [-o RESULT.md]

`tests/hf/models.py` draws family, sizes, heads and groups, rotation, biases, ties, number format
and files. Each model is converted, compared with transformers, converted back (the same bits, the
same configuration), once more out of a checkpoint as Transformer Engine writes it, and read
straight into every layout that its sizes allow.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.jobs import environment_line, publish, run_python, run_ranks

_TOLERANCE = 1e-5


def main() -> int:
    """Try all models; exit 1 when one of them came out otherwise than it went in."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--first", type=int, default=100, help="the first seed")
    parser.add_argument("--models", type=int, default=40)
    parser.add_argument("--ranks", type=int, choices=(4, 8), default=4)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    names = [f"random-{given.first + index}" for index in range(given.models)]
    with TemporaryDirectory() as folder:
        models = Path(folder) / "models"
        run_python(["-m", "tests.hf.models", str(models), *names])
        families = Counter(
            str(json.loads((models / name / "config.json").read_text())["model_type"])
            for name in names
        )
        trips = run_python(
            ["-m", "tests.hf.round_trips", str(models), str(Path(folder) / "output")]
        ).stdout
        layouts = run_ranks(given.ranks, ["tests.hf.layouts", str(models), "all"])
    results = [line.split()[1:] for line in trips.splitlines() if line.startswith("result")]
    wrong = [name for name, *same in results if same != ["True"] * 3]
    rows = [line.split() for line in layouts.splitlines() if line.startswith("tp")]
    publish(page(given, families, len(results), wrong, rows), given.output)
    is_right = not wrong and len(results) == len(names)
    return 0 if is_right and all(float(row[2]) < _TOLERANCE for row in rows) else 1


def page(
    given: argparse.Namespace,
    families: Counter[str],
    num_converted: int,
    wrong: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> str:
    """The result as a page."""
    lines = [
        "# Models drawn at random", "", environment_line("cpu"), "",
        f"`python -m benchmarks.conversion --first {given.first} --models {given.models} "
        f"--ranks {given.ranks}`", "",
        ", ".join(f"{count} {family}" for family, count in sorted(families.items())) + ".", "",
        f"Converted in and out: {num_converted}; not bit-equal or with another configuration: "
        f"{', '.join(wrong) or 'none'}.", "",
        "| layout | models that it divides | largest difference of a logit, float32 |",
        "|---|---|---|",
    ]  # fmt: skip
    for layout in dict.fromkeys(row[0] for row in rows):
        found = [float(row[2]) for row in rows if row[0] == layout]
        lines.append(f"| {layout} | {len(found)} | {max(found):.1e} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
