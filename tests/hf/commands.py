"""Runs trainings and conversions in the same ranks, one after the other.

python commands.py PORTS COMMANDS

Both are JSON: of each command the port where its ranks meet, and the name of a module of `training`
with its words. Importing torch and Megatron-Core costs more than any of them. After each, rank 0
writes ``CODE`` and the exit code to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module


def main() -> None:
    """Run all; exits with 0 whatever they have come to."""
    ports, commands = map(json.loads, sys.argv[1:])
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # each job meets at a place of its own
    for (name, *words), port in zip(commands, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        os.environ.setdefault("MASTER_ADDR", "localhost")
        code = import_module(f"training.{name}").main(words)
        _leave()
        if os.environ.get("RANK", "0") == "0":
            print(f"CODE {code}", file=sys.stderr, flush=True)


def _leave() -> None:
    """Forget the job that is over."""
    from megatron.core import parallel_state

    from training.distributed import finalize

    parallel_state.destroy_model_parallel()
    finalize()


if __name__ == "__main__":
    main()
