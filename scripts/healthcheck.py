"""Look whether this node is fit for training, and with --sweep which of its GPUs is weak.

Exit code 0: fit (perhaps with warnings); 1: not; 2: asked wrongly.

examples:
  python scripts/healthcheck.py                      everything, about ten seconds
  python scripts/healthcheck.py --num-gpus 8         fewer than eight GPUs are a problem
  python scripts/healthcheck.py --liveness           for probes: no torch, no load, under a second
  python scripts/healthcheck.py --sweep              measure each GPU against the node's median
  python scripts/healthcheck.py --json health.json   for programs; - is standard output
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # a checkout that is not installed

from health.check import Check, Status, as_json, as_text, worst
from health.devices import check_gpus, check_megatron, check_torch, query_gpus
from health.machine import check_clock, check_disk, check_shared_memory, check_versions
from health.sweep import DEFAULT_FLOOR_RATIO, DEFAULT_ROUNDS, Probe, check_bits, check_sweep, sweep

from megascan.errors import MissingError, UsageError, report_errors

_NUM_CPU_RANKS = 2


def main(words: Sequence[str]) -> int:
    """Run the checks; return exit code 1 if any of them found a problem."""
    options = _parser().parse_args(words)
    _check_options(options)
    if options.sweep:  # one thread a core; numpy and torch read this when they are imported
        os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    checks = [
        check_gpus(options.num_gpus),
        check_disk(options.path, options.min_disk_gb),
        check_shared_memory(),
        check_clock(),
        check_versions(),
    ]
    if not options.liveness:
        checks += _checks_of_software(options)
    if options.sweep:
        checks += _sweep(options)
    _report(checks, options.json, force=options.force)
    return 1 if worst(checks) is Status.PROBLEM else 0


def _checks_of_software(options: argparse.Namespace) -> list[Check]:
    """Check what needs torch: importing it, Megatron-Core, and a collective."""
    gpus = query_gpus()
    checks = [check_torch(0 if options.cpu or isinstance(gpus, str) else len(gpus))]
    if checks[0].status is Status.PROBLEM:
        return checks
    from health.collective import check_collective

    num_gpus = 0 if options.cpu else int(str(checks[0].values["num_gpus"]))
    ranks, device = (num_gpus, "cuda") if num_gpus else (_NUM_CPU_RANKS, "cpu")
    return [*checks, check_megatron(), check_collective(ranks, device, options.timeout)]


def _sweep(options: argparse.Namespace) -> list[Check]:
    return [
        *check_sweep(sweep(_choose_probe(options.cpu), options.rounds, options.floor)),
        check_bits(use_cpu=options.cpu, num_rounds=options.rounds),
    ]


def _choose_probe(use_cpu: bool) -> Probe:
    """Choose GPUs if torch sees any, else the cores."""
    if not use_cpu and importlib.util.find_spec("torch"):
        import torch

        if torch.cuda.device_count():
            from health.gpu_probe import GpuProbe

            gpus = query_gpus()
            return GpuProbe([] if isinstance(gpus, str) else gpus)
    if not hasattr(os, "sched_setaffinity"):
        raise MissingError("the sweep of cores needs Linux; run it on the node itself")
    from health.cpu_probe import CpuProbe

    return CpuProbe()


def _check_options(options: argparse.Namespace) -> None:
    if options.liveness and options.sweep:
        raise UsageError(
            "--liveness and --sweep exclude each other; a probe must not load the GPUs"
        )
    for name, lowest in (
        ("rounds", 3), ("timeout", 1), ("floor", 0), ("num_gpus", 0), ("min_disk_gb", 0)
    ):  # fmt: skip
        value = getattr(options, name)
        if value is not None and not lowest <= value < math.inf:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} is {value}, expected a number from {lowest} on")
    if options.json not in (None, "-"):
        from megascan.overwriting import check_free

        check_free(Path(options.json), force=options.force)


def _report(checks: Sequence[Check], place: str | None, *, force: bool) -> None:
    """Print text on stdout, or with `-` JSON; with a file, print text and write JSON."""
    if place is not None:
        record = as_json(checks, socket.gethostname())
        if place == "-":
            print(json.dumps(record, indent=1, ensure_ascii=False))
            return
        from megascan.cli.output import write_json

        write_json(Path(place), record, force=force)
    print(as_text(checks))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="healthcheck.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--num-gpus", type=int, metavar="N", help="fewer GPUs than this are a problem")
    add("--cpu", action="store_true", help="leave the GPUs alone: gloo, and a sweep of the cores")
    add("--path", type=Path, default=Path(), metavar="DIR",
        help="folder that traces go to (default: the current one)")  # fmt: skip
    add("--min-disk-gb", type=float, default=5.0, metavar="GB",
        help="less room there is a problem (default: %(default)g)")  # fmt: skip
    add("--timeout", type=float, default=60.0, metavar="S",
        help="longest wait for the all-reduce (default: %(default)g)")  # fmt: skip
    add("--liveness", action="store_true", help="only what is quick and disturbs nobody")
    add("--sweep", action="store_true",
        help="also measure each GPU (without GPUs: each core) and name a weak one")  # fmt: skip
    add("--rounds", type=int, default=DEFAULT_ROUNDS, metavar="N",
        help="measurements of the sweep (default: %(default)s)")  # fmt: skip
    add("--floor", type=float, default=DEFAULT_FLOOR_RATIO, metavar="SHARE",
        help="a smaller slowdown is never called weak (default: %(default)s)")  # fmt: skip
    add("--json", metavar="FILE", help="write the result as JSON; - for standard output")
    add("--force", action="store_true", help="replace an existing --json file")
    return parser


if __name__ == "__main__":
    sys.exit(report_errors(lambda: main(sys.argv[1:])))
