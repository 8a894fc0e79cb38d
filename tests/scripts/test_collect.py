"""collect_traces.sh: several nodes' rank files into one folder, nothing lost; and shellcheck."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Run

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def nodes(tmp_path: Path) -> tuple[Path, Path]:
    """Trace folders of two nodes; both hold the place 0-0-0, of different attempts."""
    first, second = tmp_path / "a b", tmp_path / "b"
    for folder, ranks in ((first, (0, 1)), (second, (0, 2))):
        folder.mkdir()
        for rank in ranks:
            name = f"benchmark-data-{rank}-pipeline-0-tensor-0.json"
            (folder / name).write_text(f"{folder.name} {rank}")
    (first / "ground-truth.json").write_text("{}")
    return first, second


def test_files_of_one_name_are_kept_side_by_side(
    run: Run, nodes: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for _ in range(2):  # the second time nothing is new
        done = run("collect_traces.sh", "-o", str(out), *map(str, nodes))
        assert done.returncode == 0, done.stderr
    contents = sorted(path.read_text() for path in out.iterdir())
    assert contents == ["a b 0", "a b 1", "b 0", "b 2"]
    assert done.stdout.endswith(f"holds 4 rank files; next: python aggregate.py -b {out} -d\n")
    assert len(list(nodes[0].iterdir())) == 3


def test_other_hosts_are_read_by_rsync_or_scp(
    run: Run, programs: Callable[[str, str], Path], tmp_path: Path
) -> None:
    copier = '#!/bin/bash\necho "$0 $*" >> "$RECORD"\nto=${@: -1}; [[ $to == */ ]] || to=$3\n'
    copier += 'echo far > "${@: -1}/benchmark-data-9-pipeline-0-tensor-0.json"\n'
    programs("rsync", copier)
    record = tmp_path / "record"
    done = run("collect_traces.sh", "-o", str(tmp_path / "out"), "node-2:/t x", RECORD=str(record))
    assert done.returncode == 0, done.stderr
    assert (
        "rsync -a node-2:/t x/ --include=benchmark-data-*.json* --exclude=*" in record.read_text()
    )


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], 2, "no folder to gather in"),
        (["-o", "out"], 2, "no source"),
        (["-o", "out", "gone"], 1, "gone holds no rank files"),
        (["-o", "out", "--bogus"], 2, "unknown option '--bogus'"),
        (["-o"], 2, "-o needs a value"),
        (["-o", "out", ""], 2, "a source is empty"),
        (["-o", "/dev/null", "gone"], 1, "--output is /dev/null, and /dev/null is no folder"),
        (["-o", "/dev/null/x", "gone"], 1, "and /dev/null is no folder; give another"),
        (["--output=out", "gone"], 1, "gone holds no rank files"),
    ],
)
def test_wrong_words(run: Run, words: list[str], code: int, says: str) -> None:
    done = run("collect_traces.sh", *words)
    assert (done.returncode, says in done.stderr) == (code, True), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_packed_rank_files_and_folders_with_blanks(run: Run, tmp_path: Path) -> None:
    """What --trace-compress writes is gathered too; the next command can be pasted."""
    sources = [tmp_path / "a b", tmp_path / "c"]
    for source in sources:
        source.mkdir()
        (source / "benchmark-data-0-pipeline-0-tensor-0.json.gz").write_text(source.name)
    out = tmp_path / "g h"
    done = run("collect_traces.sh", "-o", str(out), *map(str, sources))
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in out.iterdir())
    assert names == ["benchmark-data-0-pipeline-0-tensor-0.2.json.gz",
                     "benchmark-data-0-pipeline-0-tensor-0.json.gz"]  # fmt: skip
    words = shlex.split(done.stdout.split("next: ")[1])
    assert words == ["python", "aggregate.py", "-b", str(out), "-d"]


def test_the_shell_scripts_are_clean() -> None:
    checker = shutil.which("shellcheck") or shutil.which(
        "shellcheck", path=str(Path(sys.executable).parent)
    )
    if checker is None:
        pytest.skip("shellcheck is not installed")
    files = [*SCRIPTS.glob("*.sh"), *SCRIPTS.glob("lib/*.sh"), *SCRIPTS.glob("slurm/*"),
             *SCRIPTS.glob("k8s/*.sh")]  # fmt: skip
    command = [checker, "-x", "-P", "SCRIPTDIR", "-P", str(SCRIPTS.parent), *map(str, files)]
    done = subprocess.run(command, cwd=SCRIPTS.parent, capture_output=True, text=True)
    assert done.stdout == ""
