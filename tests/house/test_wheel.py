"""What is installed: exactly the five packages, nothing of tests, scripts or the root shim."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_wheel_holds_exactly_the_five_packages(tmp_path: Path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"megascan", "training", "aggregate", "detect", "megascope"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "aggregate.py" not in names
