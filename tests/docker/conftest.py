"""Builds a Dockerfile without an engine: its steps run in scratch copies of this machine's root.

A stage is an overlay over ``/`` that lives in memory and is gone with the test; nothing of this
machine is changed. RUN lines run there as they stand, as root or as the USER, by the SHELL, with
the stage's ARG and ENV. So a base image is replaced by this machine: what a line needs of the base
(apt, a Python with pip) must be here, and what the base would bring beyond that is not tested.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

REPOSITORY = Path(__file__).parents[2]

PREPARE = """set -euo pipefail
scratch=$(mktemp --directory)
mount -t tmpfs tmpfs "$scratch"
stage() { # name: a fresh copy of this machine
    mkdir -p "$scratch/$1/upper" "$scratch/$1/work" "$scratch/$1/root"
    root=$scratch/$1/root
    local layers=lowerdir=/,upperdir=$scratch/$1/upper,workdir=$scratch/$1/work
    mount -t overlay overlay -o "$layers" "$root"
    mount --rbind /proc "$root/proc"
    mount --rbind /dev "$root/dev"
    chmod a+x "$root/root" # the interpreter may live there, and a user must reach it
    chmod 1777 "$root/tmp" # as in every image: apt checks signatures as a user of its own
    rm -rf "$root/workspace" "$root/opt/megascan" "$root/opt/venv" "$root/wheels"
    rm -f "$root/var/lib/man-db/auto-update" # images have no manuals to index
}
"""


@dataclass(kw_only=True)
class Stage:
    """What the instructions so far say about how the next one runs."""

    name: str
    variables: dict[str, str]
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    workdir: str = "/"
    user: str = "0:0"
    commands: dict[str, list[str]] = field(default_factory=dict)


class Builder:
    """Turns a Dockerfile into one script for a mount namespace."""

    def __init__(self, path: Path, arguments: dict[str, str]) -> None:
        self.base = {
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_COMPILE": "0",  # half of what an install takes, and little of it is imported
            **_network(),
        }
        self._arguments = arguments
        self._globals: dict[str, str] = {}
        self.stages: list[Stage] = []
        self.lines: list[str] = []
        parser = DockerfileParser(fileobj=io.BytesIO(path.read_bytes()))
        for step in parser.structure:
            getattr(self, f"_{step['instruction'].lower()}")(step["value"])

    @property
    def stage(self) -> Stage:
        """The stage that is being built."""
        return self.stages[-1]

    def run(self, words: list[str]) -> None:
        """Add a command, run as the image's user in its working directory."""
        self._in_root(words, self.stage)

    def execute(self, timeout_s: int) -> str:
        """Build it; gives what was printed, or fails with it."""
        script = "\n".join([PREPARE, *self.lines])
        done = subprocess.run(
            ["unshare", "--mount", "bash", "-c", script], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-6000:]
        return done.stdout

    def _in_root(self, words: list[str], stage: Stage) -> None:
        variables = [f"{name}={value}" for name, value in stage.variables.items()]
        inner = f"cd {shlex.quote(stage.workdir)} && exec {shlex.join(words)}"
        self.lines.append(
            f'chroot --userspec={stage.user} "$scratch/{stage.name}/root" '
            + shlex.join(["/usr/bin/env", "-i", *variables, "/bin/sh", "-c", inner])
        )

    def _comment(self, value: str) -> None: ...
    def _label(self, value: str) -> None: ...
    def _volume(self, value: str) -> None: ...

    def _arg(self, value: str) -> None:
        name, _, default = value.partition("=")
        chosen = self._arguments.get(name, default)
        (self.stage.variables if self.stages else self._globals)[name] = chosen

    def _from(self, value: str) -> None:
        image, _, name = value.partition(" AS ")
        assert _filled(image, self._globals).count(":") == 1, f"{image} has no version"
        self.stages.append(Stage(name=name, variables=dict(self.base)))
        self.lines.append(f"stage {shlex.quote(name)}")

    def _env(self, value: str) -> None:
        for name, text in (word.split("=", 1) for word in shlex.split(value)):
            self.stage.variables[name] = _filled(text, self.stage.variables)

    def _shell(self, value: str) -> None:
        self.stage.shell = json.loads(value)

    def _user(self, value: str) -> None:
        self.stage.user = _filled(value, self.stage.variables)

    def _workdir(self, value: str) -> None:
        self.stage.workdir = value
        self.lines.append(f'mkdir -p "$scratch/{self.stage.name}/root{value}"')

    def _copy(self, value: str) -> None:
        *flags, rest = re.match(r"(?:--from=(\S+) )?(.+)", value).groups()  # type: ignore[union-attr]
        *sources, target = shlex.split(rest)
        here = f'"$scratch/{self.stage.name}/root"'
        place = str(Path(self.stage.workdir) / target)
        if flags[0] is None:
            assert [source for source in sources if not is_in_context(source)] == []
            froms = [shlex.quote(str(REPOSITORY / source)) for source in sources]
        else:
            froms = [f'"$scratch/{flags[0]}/root"{source}' for source in sources]
        if target.endswith("/"):
            self.lines.append(f"mkdir -p {here}{place}")
            self.lines.append(f"cp -r {' '.join(froms)} {here}{place}/")
        else:
            self.lines.append(
                f"mkdir -p {here}{Path(place).parent}; cp -rT {froms[0]} {here}{place}"
            )

    def _run(self, value: str) -> None:
        mount = re.match(r"--mount=type=bind,from=(\S+),source=(\S+),target=(\S+)\s+(.+)", value)
        if mount:
            origin, source, target, value = mount.groups()
            here = f'"$scratch/{self.stage.name}/root"{target}'
            self.lines.append(
                f'mkdir -p {here}; mount --bind "$scratch/{origin}/root"{source} {here}'
            )
        self._in_root([*self.stage.shell, value], self.stage)

    def _healthcheck(self, value: str) -> None:
        self.stage.commands["healthcheck"] = json.loads(value[value.index("CMD ") + 4 :])

    def _entrypoint(self, value: str) -> None:
        self.stage.commands["entrypoint"] = json.loads(value)

    def _cmd(self, value: str) -> None:
        self.stage.commands["cmd"] = json.loads(value)


def is_in_context(source: str) -> bool:
    """Whether .dockerignore, which names what is let in, lets a path in, and it is there."""
    lines = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    return source.split("/", maxsplit=1)[0] in allowed and (REPOSITORY / source).exists()


def _filled(text: str, variables: dict[str, str]) -> str:
    pattern = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
    return pattern.sub(lambda found: variables[found[1] or found[2]], text)


def _network() -> dict[str, str]:
    """How pip reaches its index from here, which is no part of an image."""
    import os

    return {name: value for name, value in os.environ.items()
            if name.startswith("PIP_") or name.lower().endswith("_proxy")}  # fmt: skip


@pytest.fixture
def build() -> Callable[..., Builder]:
    """Read a Dockerfile; the test is skipped where no scratch root can be made."""
    probe = ["unshare", "--mount", "true"]
    is_there = all(map(shutil.which, ("unshare", "chroot")))
    if not is_there or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("scratch copies of the root need the right to mount (root on Linux)")

    def make(name: str, **arguments: str) -> Builder:
        return Builder(REPOSITORY / "docker" / name, arguments)

    return make
