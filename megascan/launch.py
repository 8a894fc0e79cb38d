"""Trace an unchanged Megatron-LM training script.

    torchrun … -m megascan.launch pretrain_gpt.py --trace [trace flags] [the script's own flags]

The trace flags are used here, all other flags are handed to the script. Iterations are recognised
by `megatron.training.training.train_step`, which Megatron-LM's loop calls once an iteration;
tracing starts with the first call. Without `--trace` the script runs as if started directly.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import logging
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

from megascan.config import TraceConfig, add_trace_arguments
from megascan.errors import MissingError, UsageError, report_errors
from megascan.tracer import Tracer

logger = logging.getLogger("megascan")

_TRAINING = "megatron.training.training"
_STEP = "train_step"

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def split_arguments(arguments: Sequence[str]) -> tuple[TraceConfig, Path, list[str]]:
    """Return the trace settings, the script, and the script's own arguments in their order.

    Raises UsageError without a script, ConfigError for a window that does not fit.
    """
    parser = argparse.ArgumentParser(
        prog="python -m megascan.launch",
        description="Trace an unchanged Megatron-LM training script.",
        usage="%(prog)s SCRIPT [--trace] [trace flags] [the script's own flags]",
        allow_abbrev=False,
    )
    add_trace_arguments(parser)
    namespace, rest = parser.parse_known_args(arguments)
    if not rest or rest[0].startswith("-"):
        raise UsageError(
            "no script given; the first argument that is no trace flag must be the script, "
            "for example: torchrun … -m megascan.launch pretrain_gpt.py --trace"
        )
    script = Path(rest[0])
    if not script.is_file():
        raise UsageError(f"there is no script {script}; give its path as the first argument")
    return TraceConfig.from_arguments(namespace), script, rest[1:]


class TrainSteps:
    """Makes each call of a `train_step` an iteration of the tracer; the first call starts it."""

    def __init__(self, config: TraceConfig, next_iteration: Callable[[int | None], int]) -> None:
        """Take `next_iteration`, which numbers a step, given the last step's number (or None)."""
        self._config = config
        self._next_iteration = next_iteration
        self._tracer: Tracer | None = None
        self._number: int | None = None

    def wrap(self, original: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        """Put an iteration around every call."""

        @functools.wraps(original)
        def train_step(*positional: Parameters.args, **named: Parameters.kwargs) -> Result:
            number = self._next_iteration(self._number)
            if self._tracer is None:
                from megascan.instrument import start

                self._tracer = start(self._config, resumed=number > 1)
            self._number = number
            with self._tracer.iteration(number):
                return original(*positional, **named)

        return train_step

    def close(self) -> None:
        """Write the last window, or warn that no step was recognised."""
        if self._tracer is not None:
            self._tracer.close()
        elif os.environ.get("RANK", "0") == "0":
            logger.warning(
                "nothing was traced: the script never called %s.%s, by which its iterations are "
                "recognised; use the lines of docs/tracing-your-job.md",
                _TRAINING,
                _STEP,
            )


def install(config: TraceConfig) -> TrainSteps:
    """Wrap Megatron-LM's `train_step`. Raises MissingError if Megatron-LM is not installed."""
    try:
        training = importlib.import_module(_TRAINING)
    except ModuleNotFoundError as error:
        raise MissingError(
            f"cannot trace an unchanged script: {error}, and iterations are recognised by "
            "Megatron-LM's megatron.training; put its folder on PYTHONPATH, or use the lines of "
            "docs/tracing-your-job.md"
        ) from error
    steps = TrainSteps(config, _next_iteration)
    setattr(training, _STEP, steps.wrap(getattr(training, _STEP)))
    return steps


def _next_iteration(last: int | None) -> int:
    """Return the number of the iteration that begins, by Megatron-LM's own count, which includes
    skipped iterations.

    Versions without that count tell only the iteration from which they resumed.
    """
    from megatron.training import get_args

    arguments = get_args()
    done = getattr(arguments, "curr_iteration", None)
    if done is None:
        done = getattr(arguments, "iteration", 0) if last is None else last
    return int(done) + 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a script under the tracer."""
    config, script, own = split_arguments(sys.argv[1:] if arguments is None else arguments)
    sys.argv = [str(script), *own]
    sys.path.insert(0, str(script.resolve().parent))
    steps = install(config) if config.enabled else None
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        if steps:
            steps.close()
    return 0


if __name__ == "__main__":
    sys.exit(report_errors(main))
