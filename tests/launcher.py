"""Starts a program on some ranks of this host: ``launcher.py PYTHON NUM_RANKS WORDS…``.

It gives ranks the variables that torchrun gives them, and when one fails it ends the others.
torchrun itself takes half a CPU second more for each job, and waits for one or two in which nothing
runs. It is started where a test is about what it does (see `ranks.run`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

POLL_S, PATIENCE_S = 0.05, 30.0
PR_SET_PDEATHSIG = 1


def free_port() -> int:
    """Return a port that nobody listens on just now."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return so many ports that nobody listens on just now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("localhost", 0))
        return [probe.getsockname()[1] for probe in probes]


def die_with_launcher() -> None:
    """In a rank to be: a launcher that is killed takes its ranks along."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def begin(python: str, num_ranks: int, words: list[str]) -> list[subprocess.Popen[bytes]]:
    """Start all ranks."""
    of_job = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    of_job |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_ranks))
    return [
        subprocess.Popen(
            [python, *words],
            env={**os.environ, **of_job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            preexec_fn=die_with_launcher,  # noqa: PLW1509 - there are no threads
        )
        for rank in range(num_ranks)
    ]


def end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """End what still runs, gently first."""
    for one in ranks:
        if one.poll() is None:
            one.terminate()
    until = time.monotonic() + PATIENCE_S
    for one in ranks:
        try:
            one.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait()


def main(python: str, num_ranks: str, *words: str) -> int:
    """Return 0 when all ranks have ended well, 1 as soon as one has not."""
    ranks = begin(python, int(num_ranks), list(words))
    while True:
        codes = [one.poll() for one in ranks]
        if any(codes):
            end(ranks)
            return 1
        if None not in codes:
            return 0
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
