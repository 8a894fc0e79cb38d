"""What is installed: exactly the five packages, nothing of tests, scripts or the root shim."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = "megascan/reader/liblines.so"


def built(folder: Path, compiler: str) -> tuple[str, list[str], str]:
    """Build a wheel; return its name, what it holds, and what was said."""
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        env={**os.environ, "CC": compiler},
        check=True,
        capture_output=True,
        text=True,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel.name, zipfile.ZipFile(wheel).namelist(), done.stdout + done.stderr


def test_wheel_holds_exactly_the_five_packages(tmp_path: Path):
    """Here without a compiler: then it fits any platform, and one note says why."""
    wheel, names, said = built(tmp_path, "no-such-compiler")
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"megascan", "training", "aggregate", "detect", "megascope"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "aggregate.py" not in names
    assert wheel.endswith("-py3-none-any.whl") and LIBRARY not in names
    assert said.count("without the compiled part") == 1 and "no-such-compiler" in said


def test_wheel_holds_the_compiled_part_where_there_is_a_compiler(tmp_path: Path):
    compiler = os.environ.get("CC") or "cc"
    if shutil.which(compiler.split()[0]) is None:
        pytest.skip(f"there is no {compiler}")
    wheel, names, said = built(tmp_path, compiler)
    assert names.count(LIBRARY) == 1 and "megascan/reader/lines.c" in names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {
        *("megascan", "training", "aggregate", "detect", "megascope")
    }
    assert "-py3-none-" in wheel and not wheel.endswith("-any.whl")
    assert "without the compiled part" not in said
