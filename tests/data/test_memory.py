"""Memory does not grow with the input, whose documents are many and short."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.preprocess import NOTING

ROOT = Path(__file__).resolve().parents[2]
FEW, MANY = 20_000, 400_000


def peak_mib(folder: Path, *arguments: str) -> float:
    """Run a command to its good end; gives the largest that it ever was."""
    done = subprocess.run(
        [sys.executable, "-c", NOTING, str(folder / "peak"), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return int((folder / "peak").read_text().split()[0]) / 1024


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, float]]:
    """Few and many documents preprocessed: the output, and how large the process was."""
    folder = tmp_path_factory.mktemp("memory")
    done = {}
    for number in (FEW, MANY):
        source = folder / f"{number}.jsonl"
        source.write_text("".join(f'{{"text": "{i:08}"}}\n' for i in range(number)))
        prefix = folder / str(number)
        size = peak_mib(
            folder, "training.preprocess_data", "--input", str(source), "--output-prefix",
            str(prefix), "--tokenizer-type", "ByteTokenizer",
        )  # fmt: skip
        done[number] = (Path(f"{prefix}_text_document"), size)
    return done


def test_preprocessing_twenty_times_as_much_takes_no_more(
    prefixes: dict[int, tuple[Path, float]],
) -> None:
    """A Python int a document alone would be 20 MiB more."""
    assert prefixes[MANY][1] < prefixes[FEW][1] + 8


def test_merging_twenty_times_as_much_takes_little_more(
    prefixes: dict[int, tuple[Path, float]], tmp_path: Path
) -> None:
    """Checking an index reads its lengths: 4 bytes a document, one data set at a time."""
    sizes = {
        number: peak_mib(
            tmp_path, "training.merge_datasets", "--input", *[str(prefix)] * 3,
            "--output-prefix", str(tmp_path / str(number)),
        )
        for number, (prefix, _) in prefixes.items()
    }  # fmt: skip
    assert sizes[MANY] < sizes[FEW] + 12
