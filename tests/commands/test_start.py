"""What a command does not need is not loaded, and pandas need not be installed."""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megascan.cli import options
from megascan.cli.options import load_timeline
from megascan.parallel import Workers, workers_here
from megascan.simulate import CostModel, JobModel, simulate_trace, write_rank_files
from megascan.topology import Layout

ROOT = Path(__file__).parents[2]
LOADED = """
import sys

class WithoutPandas:
    def find_spec(self, name, *_):
        if name == "pandas":
            raise ModuleNotFoundError(name=name)


sys.meta_path.insert(0, WithoutPandas())
from megascan.cli.main import main

code = main(sys.argv[1:])
print("loaded:", *sorted({"torch", "dask", "perfetto"} & set(sys.modules)))
sys.exit(code)
"""


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


def test_garbage_is_left_while_a_trace_is_worked_on_and_only_then(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    @contextmanager
    def asked(*, worth_processes: bool) -> Iterator[Workers]:
        with workers_here(worth_processes=worth_processes) as workers:
            seen.append(gc.isenabled())
            yield workers

    monkeypatch.setattr(options, "workers_here", asked)
    assert load_timeline(folder, argparse.Namespace(run=None, allow_missing_ranks=False))
    assert seen == [False] and gc.isenabled()
