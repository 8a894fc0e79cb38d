"""The `--trace` flags: what is traced, where it goes.

Names and defaults are the original MegaScan's.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from megascan.errors import ConfigError
from megascan.schema import Granularity


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """Settings of the tracer; raises ConfigError when a window cannot fit its interval."""

    enabled: bool = False
    directory: Path = Path("trace_output")
    interval: int = 5
    window: int = 2
    granularity: Granularity = Granularity.FULL

    def __post_init__(self) -> None:
        if self.interval < 1 or self.window < 1:
            raise ConfigError(
                f"--trace-interval is {self.interval} and --continuous-trace-iterations is "
                f"{self.window}, "
                "expected 1 or more for both"
            )
        if self.window > self.interval:
            raise ConfigError(
                f"--continuous-trace-iterations {self.window} is longer than --trace-interval "
                f"{self.interval}; "
                "make them equal to trace every iteration"
            )

    def traces(self, iteration: int) -> bool:
        """Whether an iteration (from 1) lies in a window: (iteration - 1) mod interval < window."""
        return self.enabled and (iteration - 1) % self.interval < self.window

    def ends_window(self, iteration: int) -> bool:
        """Whether a traced iteration is the last of its window, so that the window can be written.

        With window = interval every iteration is traced; the window then still ends with each
        interval.
        """
        return self.traces(iteration) and (iteration - 1) % self.interval == self.window - 1

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> TraceConfig:
        """From the flags that `add_trace_arguments` declares."""
        return cls(
            enabled=arguments.trace,
            directory=arguments.trace_dir,
            interval=arguments.trace_interval,
            window=arguments.continuous_trace_iterations,
            granularity=Granularity(arguments.trace_granularity),
        )


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the trace flags on a trainer's parser."""
    defaults = TraceConfig()
    group = parser.add_argument_group("tracing")
    group.add_argument("--trace", action="store_true", help="trace this run with MegaScan")
    group.add_argument(
        "--trace-dir",
        type=Path,
        default=defaults.directory,
        metavar="DIR",
        help="folder of the rank files, one a rank (default: %(default)s)",
    )
    group.add_argument(
        "--trace-interval",
        type=int,
        default=defaults.interval,
        metavar="N",
        help="a window of traced iterations begins every N iterations (default: %(default)s)",
    )
    group.add_argument(
        "--continuous-trace-iterations",
        type=int,
        default=defaults.window,
        metavar="K",
        help="iterations traced in each window (default: %(default)s)",
    )
    group.add_argument(
        "--trace-granularity",
        choices=[str(choice) for choice in Granularity],
        default=str(defaults.granularity),
        help="base: passes, p2p, gradient sync, optimizer, loss, data; "
        "full: also layers, modules, every collective, gc, checkpoints (default: %(default)s)",
    )
