"""Programs that tests start in processes of their own: one, or several ranks."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import warm_python

ROOT = Path(__file__).parents[1]
LAUNCHER = Path(__file__).with_name("launcher.py")
PYTHON = sys.executable
"""For what a new process alone can show: what is imported, the installation, memory."""
COMMAND = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
"""All variables of a command that tests run as a user types it: none of ours."""
_EARLY = warm_python.early(os.environ)


@functools.cache
def warm() -> str:
    """A program that is called as Python is, and spares a rank the seconds of its imports.

    Its server (see warm_python.py) is started by the first test that asks.
    """
    return _served(warm_python.RANKS, environment())


@functools.cache
def warm_command() -> str:
    """The same for a command with the variables `COMMAND`."""
    return _served(warm_python.COMMANDS, COMMAND)


def _served(packages: tuple[str, ...], variables: dict[str, str]) -> str:
    server, program = warm_python.start(packages, variables)

    def end() -> None:
        server.communicate()

    atexit.register(end)
    return program


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Have what this process starts by `sys.executable` forked, too."""
    forget_early_variables()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", warm())
        yield


def forget_early_variables() -> None:
    """Take from our environment what packages have put there for an interpreter's start.

    A model of Megatron-Core that a test builds in this process leaves NVTE_FLASH_ATTN and others:
    no program that inherits them can be forked, and all ranks of all later tests start cold.
    """
    for name in warm_python.early(os.environ).keys() - _EARLY.keys():
        del os.environ[name]


def environment(**variables: str) -> dict[str, str]:
    """Return the variables of a job: one thread a rank, this checkout, and nothing compiled.

    Megatron-Core hands functions as small as a GELU to torch.compile, which takes each rank of a
    test longer than all that it computes. Commands as users type them (`COMMAND`) compile.
    """
    forget_early_variables()
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCHDYNAMO_DISABLE": "1"}
    return {**os.environ, **own, **variables}


def command_of(num_ranks: int, words: tuple[object, ...], python: str = "") -> list[str]:
    """The command that starts a program on some ranks; one rank needs no launcher.

    Several are started by `launcher.py`, or with `python` by that interpreter's torchrun.
    """
    if num_ranks == 1:
        return [python or warm(), *map(str, words)]
    if not python:
        return [PYTHON, "-IS", str(LAUNCHER), warm(), str(num_ranks), *map(str, words)]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks)
    return [python, *map(str, (*launcher, *words))]


def run(
    *words: object, num_ranks: int = 1, cwd: Path = ROOT, timeout_s: float = 280, python: str = "",
    check: bool = False, stdin: str = "", **variables: str,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run Python with some words on so many ranks; with `check` it has to succeed.

    With `python` that interpreter runs them, by torchrun where they are several.
    """
    done = subprocess.run(
        command_of(num_ranks, words, python), cwd=cwd, env=environment(**variables),
        input=stdin, capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip
    assert not (check and done.returncode), done.stdout[-2000:] + done.stderr[-6000:]
    return done


def start(
    *words: object, num_ranks: int = 1, cwd: Path = ROOT, own_launcher: bool = False,
    **variables: str,
) -> subprocess.Popen[str]:  # fmt: skip
    """Start the same; stdout and stderr come by one pipe.

    With `own_launcher` the process is torchrun itself, and its children stand for the ranks: they
    die when a rank does, and the rank when they do.
    """
    if own_launcher:
        command = command_of(num_ranks, ("--no-python", warm(), *words), PYTHON)
    else:
        command = command_of(num_ranks, words, warm())
    return subprocess.Popen(
        command, cwd=cwd, env=environment(**variables), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
