"""Scripts for developers say what they do before they do anything."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("name", ["test.sh", "megatron_matrix.sh", "oldest_versions.sh"])
def test_help_helps_and_installs_nothing(name: str, flag: str, tmp_path: Path) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    for source in (name, "environment.sh"):
        shutil.copy(SCRIPTS / source, folder)
    done = subprocess.run(
        ["bash", str(folder / name), flag],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"bash scripts/{name}" in done.stdout
    assert not (tmp_path / ".venv").exists()
