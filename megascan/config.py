"""Declare the `--trace` flags: what is traced, and where the trace goes.

Names and defaults of the flags are those of the original MegaScan.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from megascan.errors import ConfigError
from megascan.schema import Granularity

MIN_MAX_BYTES = 1_000_000
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?", re.IGNORECASE)
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*(%?)")


def parse_size(text: str) -> int:
    """Return the bytes of ``500MB`` (decimal), ``2GiB`` (binary) or a number; raise ConfigError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ConfigError(
            f"--trace-max-bytes is {text!r}, expected a size; write it like 500MB, 2GiB or 1000000"
        )
    number, unit, binary = match.groups()
    exponent = "_KMGT".index(unit.upper()) if unit else 0
    return int(float(number) * (1024 if binary else 1000) ** exponent)


def parse_share(text: str) -> float:
    """Return the ratio of ``1%`` or ``0.01``; raise ConfigError unless it is between 0 and 1."""
    match = _SHARE.fullmatch(text.strip())
    ratio = float(match[1]) / (100 if match[2] else 1) if match else math.nan
    if not 0 < ratio < 1:
        raise ConfigError(
            f"--trace-budget is {text!r}, expected a share of the run's time; "
            "write it like 1% or 0.01"
        )
    return ratio


DEFAULT_LAYER_STRIDE = 4
"""Most of what `full` costs are modules. Verdicts are as good on those of one layer in four, which
take less than half of that (`benchmarks/results/overhead_h200.md`)."""
LAYERS_BUDGET_RATIO = 0.02
"""Share of the run's time above which fewer layers are recorded even without a budget. With the
default of two traced iterations in five, it means that a traced iteration takes 5 % longer."""
WINDOWS_BUDGET_RATIO = 0.05
"""Share of the run's time above which windows become fewer even without a budget, where no fewer
layers can be recorded. Only jobs that are bound by their hosts come near."""
LEAST_LAYERS = 2
"""Least layers of a chunk in each traced iteration; their modules say what is typical of a pass.
Only a budget that two layers exceed leaves one."""
LEAST_LAYERS_OF_PLAIN_MODELS = 4
"""The same for plain PyTorch models: each layer is one span, so this many tell what is typical."""


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """Settings of the tracer; raises ConfigError if they do not fit together.

    At granularity full the modules of every `layer_stride`-th layer of a chunk are recorded, in
    each traced iteration of other layers. `max_bytes` bounds the size of a rank's file on disk, 0
    is no bound. `budget_ratio` is the share of the run's time that tracing may cost; 0 is no
    budget, but above `LAYERS_BUDGET_RATIO` the modules of fewer layers are recorded, and above
    `WINDOWS_BUDGET_RATIO` windows become fewer. An `armed` run records nothing until it is switched
    on (`megascan.tracer.switch`).
    """

    enabled: bool = False
    directory: Path = Path("trace_output")
    interval: int = 5
    window: int = 2
    granularity: Granularity = Granularity.FULL
    layer_stride: int = DEFAULT_LAYER_STRIDE
    compress: bool = False
    max_bytes: int = 0
    budget_ratio: float = 0.0
    armed: bool = False

    def __post_init__(self) -> None:
        self._check_windows()
        if self.armed and not self.enabled:
            raise ConfigError("--trace-armed says how --trace begins; pass --trace, too")
        if self.layer_stride < 1:
            raise ConfigError(
                f"--trace-layer-stride is {self.layer_stride}, expected 1 (modules of all layers) "
                "or more"
            )
        if 0 < self.max_bytes < MIN_MAX_BYTES or self.max_bytes < 0:
            raise ConfigError(
                f"--trace-max-bytes is {self.max_bytes}, expected {MIN_MAX_BYTES} or more: a few "
                "windows and the header must fit"
            )
        if self.budget_ratio and self.window == self.interval:
            raise ConfigError(
                f"--trace-budget compares traced with untraced iterations, but "
                f"--continuous-trace-iterations {self.window} of --trace-interval {self.interval} "
                "leaves none; make the interval longer"
            )

    def _check_windows(self) -> None:
        if self.interval < 1 or self.window < 1:
            raise ConfigError(
                f"--trace-interval is {self.interval} and --continuous-trace-iterations is "
                f"{self.window}, expected 1 or more for both"
            )
        if self.window > self.interval:
            raise ConfigError(
                f"--continuous-trace-iterations {self.window} is longer than --trace-interval "
                f"{self.interval}; make them equal to trace every iteration"
            )

    def traces(self, iteration: int) -> bool:
        """Return whether iteration i (from 1) lies in a window: (i - 1) mod interval < window."""
        return self.enabled and (iteration - 1) % self.interval < self.window

    def sampled_layers(
        self,
        iteration: int,
        layers_of_chunk: Mapping[int, Collection[int]],
        least: int = LEAST_LAYERS,
    ) -> frozenset[int]:
        """Return the layers whose modules are recorded in a traced iteration.

        These are every `layer_stride`-th layer of each chunk, but at least `least` layers,
        beginning one place later in each traced iteration: with layers 1 to 8, stride 4 and every
        iteration traced, layers 1 and 5, then 2 and 6, 3 and 7, 4 and 8, 1 and 5. Ranks with the
        same layers get the same choice.
        """
        cycle, place = divmod(iteration - 1, self.interval)
        turn = cycle * self.window + place
        chosen: set[int] = set()
        for layers in layers_of_chunk.values():
            stride = max(1, min(self.layer_stride, len(layers) // least))
            chosen.update(sorted(layers)[turn % stride :: stride])
        return frozenset(chosen)

    def layers_in_turn(
        self,
        iteration: int,
        layers_of_chunk: Mapping[int, Collection[int]],
        least: int = LEAST_LAYERS,
    ) -> frozenset[int] | None:
        """Return `sampled_layers`; None where these are all layers, so that none takes turns."""
        if self.layer_stride == 1:
            return None
        chosen = self.sampled_layers(iteration, layers_of_chunk, least)
        return None if chosen == set().union(*layers_of_chunk.values()) else chosen

    def ends_window(self, iteration: int) -> bool:
        """Return whether a traced iteration is the last of its window, which can then be written.

        With window = interval every iteration is traced; a window still ends with each interval.
        """
        return self.traces(iteration) and (iteration - 1) % self.interval == self.window - 1

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> TraceConfig:
        """Take the settings from the flags that `add_trace_arguments` declares."""
        return cls(
            enabled=arguments.trace,
            directory=arguments.trace_dir,
            interval=arguments.trace_interval,
            window=arguments.continuous_trace_iterations,
            granularity=Granularity(arguments.trace_granularity),
            layer_stride=arguments.trace_layer_stride,
            compress=arguments.trace_compress,
            max_bytes=parse_size(arguments.trace_max_bytes) if arguments.trace_max_bytes else 0,
            budget_ratio=parse_share(arguments.trace_budget) if arguments.trace_budget else 0.0,
            armed=arguments.trace_armed,
        )


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the trace flags on a trainer's parser."""
    defaults = TraceConfig()
    group = parser.add_argument_group("tracing")
    group.add_argument("--trace", action="store_true", help="trace this run with MegaScan")
    group.add_argument(
        "--trace-armed", action="store_true",
        help="with --trace: record nothing until the file trace-on is made in the trace folder, "
        "stop when it is removed; SIGUSR2 does either",
    )  # fmt: skip
    group.add_argument(
        "--trace-dir", type=Path, default=defaults.directory, metavar="DIR",
        help="folder of the rank files, one a rank (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--trace-interval", type=int, default=defaults.interval, metavar="N",
        help="a window of traced iterations begins every N iterations (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--continuous-trace-iterations", type=int, default=defaults.window, metavar="K",
        help="iterations traced in each window (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--trace-granularity", choices=[str(choice) for choice in Granularity],
        default=str(defaults.granularity),
        help="base: passes, p2p, gradient sync, optimizer, loss, data; "
        "full: also layers, modules, every collective, gc, checkpoints (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--trace-layer-stride", type=int, default=defaults.layer_stride, metavar="N",
        help="full records the modules of every N-th layer, of two at least, others in each "
        "traced iteration; 1 is all of them, for the fullest picture (default: %(default)s)",
    )  # fmt: skip
    _add_limits(group)


def _add_limits(group: argparse._ArgumentGroup) -> None:
    """Declare the flags that bound the disk space and the time of tracing."""
    group.add_argument(
        "--trace-compress", action="store_true",
        help="write .json.gz, one gzip member a window, as durable as plain files",
    )  # fmt: skip
    group.add_argument(
        "--trace-max-bytes", metavar="SIZE",
        help="what a rank's file takes on disk at most, for example 500MB or 2GiB; the oldest "
        "windows are dropped (default: no bound)",
    )  # fmt: skip
    group.add_argument(
        "--trace-budget", metavar="SHARE",
        help="share of the run's time that tracing may cost, for example 1%%; above it, modules of "
        "fewer layers are recorded, then none, and then windows become fewer (default: above "
        f"{LAYERS_BUDGET_RATIO * 100:g}%% modules of fewer layers, above "
        f"{WINDOWS_BUDGET_RATIO * 100:g}%% fewer windows; 99%%: never)",
    )  # fmt: skip
