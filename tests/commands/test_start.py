"""What a command does not need is not loaded: people wait for it at every call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megascan.simulate import CostModel, JobModel, simulate_trace, write_rank_files
from megascan.topology import Layout

ROOT = Path(__file__).parents[2]
LOADED = (
    "import sys; from megascan.cli import main; code = main(sys.argv[1:], own_process=True); "
    "print('loaded:', *sorted({'pandas', 'torch', 'dask', 'perfetto'} & set(sys.modules))); "
    "sys.exit(code)"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start") / "trace"
    write_rank_files(simulate_trace(JobModel(layout=Layout(dp=2), costs=CostModel())), folder)
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ("aggregate", "-o", "timeline.json.gz", "-d", "-b"),
        ("detect",),
        ("report", "-o", "report.html"),
        ("whatif",),
    ],
    ids=lambda words: words[0],
)
def test_nothing_large_is_loaded(words: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *words, str(folder)],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].strip() == "loaded:"


def test_arrow_still_makes_frames_where_a_program_uses_the_commands(folder: Path) -> None:
    """`main(words)` from another program leaves Arrow as it is."""
    program = (
        "import sys, pyarrow as pa; from megascan.cli import main; main(sys.argv[1:]); "
        "print(len(pa.table({'a': [1, 2]}).to_pandas()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "detect", str(folder)],
        cwd=folder, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "2", done.stderr
