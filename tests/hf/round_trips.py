"""Converts every model of a folder in and out, in one process: ``round_trips.py MODELS OUTPUT``.

Prints one line a model: its name, whether tensors have the same names and bits, and whether the
configuration is the same. What `--check` prints stands before it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from training.convert import main as convert
from training.hf.weights import open_weights


def main(models: Path, output: Path) -> int:
    """Convert all; returns 1 when a conversion fails."""
    for model in sorted(path for path in models.iterdir() if (path / "config.json").is_file()):
        checkpoint, back = output / model.name / "checkpoint", output / model.name / "back"
        code = convert(["--from-hf", str(model), "--save", str(checkpoint), "--check"])
        code = code or convert(["--load", str(checkpoint), "--to-hf", str(back)])
        if code:
            return code
        same = [json.loads((folder / "config.json").read_text()) for folder in (model, back)]
        print(f"result {model.name} {_same_bits(model, back)} {same[0] == same[1]}", flush=True)
    return 0


def _same_bits(one: Path, other: Path) -> bool:
    here, there = open_weights(one), open_weights(other)
    return set(here.file_of) == set(there.file_of) and all(
        torch.equal(here.read([name])[0], there.read([name])[0]) for name in here.file_of
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
