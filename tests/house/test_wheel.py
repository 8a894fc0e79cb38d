"""What is installed: exactly the five packages, nothing of tests, scripts or the root shim."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def built(folder: Path, compiler: str) -> tuple[Path, list[str], str]:
    """Build a wheel: its path, what it holds, and what was said."""
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        env={**os.environ, "CC": compiler},
        check=True,
        capture_output=True,
        text=True,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel, zipfile.ZipFile(wheel).namelist(), done.stdout + done.stderr


def libraries(names: list[str]) -> list[str]:
    return [name for name in names if name.startswith("megascan/libmegascan.")]


def test_wheel_holds_exactly_the_five_packages(tmp_path: Path):
    wheel, names, said = built(tmp_path, "no-such-compiler")
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"megascan", "training", "aggregate", "detect", "megascope"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "aggregate.py" not in names
    assert not libraries(names) and wheel.name.endswith("-py3-none-any.whl")
    assert said.count("without its compiled part") == 1 and "no-such-compiler" in said


def test_wheel_holds_the_compiled_part_where_a_compiler_is(tmp_path: Path):
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    if shutil.which(compiler.split()[0]) is None:
        pytest.skip(f"no {compiler} here")
    wheel, names, said = built(tmp_path, compiler)
    assert len(libraries(names)) == 1 and "megascan/native.c" in names
    assert wheel.name.endswith(".whl") and "-py3-none-any" not in wheel.name
    assert "compiled part" not in said
