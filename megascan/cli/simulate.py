"""Write the rank files of a simulated Megatron job, with planted faults and their ground truth.

The files are ordinary rank files: aggregate and detect read them as they do a real job. What was
planted goes to ground-truth.json, which they never read.

examples:
  megascan simulate --tp 2 --pp 4 --dp 8 --fault rank=13,kind=compute,factor=1.1 -o simulated
  megascan simulate --pp 4 --dp 4 --stage-imbalance last=1.4 --seed 7 -o heavy_last_stage
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from megascan.cli.output import say, stage
from megascan.errors import ConfigError, OutputError, UsageError
from megascan.header import MOST_RANKS
from megascan.overwriting import check_can_be_made
from megascan.rankfile import write_ground_truth
from megascan.schema import Granularity
from megascan.simulate import (
    Clocks,
    Fault,
    Imbalance,
    JobModel,
    ModelSize,
    Noise,
    communication_heavy,
    compute_bound,
    ground_truth,
    parse_fault,
    parse_stage_imbalance,
    simulate_trace,
    write_rank_files,
)
from megascan.topology import Layout

_COST_MODELS = {"compute": compute_bound, "communication": communication_heavy}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags; defaults are those of the dataclasses in `megascan.simulate.job`."""
    _add_job_arguments(parser.add_argument_group("job"))
    _add_noise_arguments(parser.add_argument_group("noise and clocks"))
    _add_trouble_arguments(parser.add_argument_group("faults and imbalances"))
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="folder of the rank files"
    )
    parser.add_argument("--force", action="store_true", help="write into a folder that has files")
    parser.add_argument("--seed", type=int, default=0, help="of all random draws (default: 0)")


def _add_job_arguments(group: argparse._ArgumentGroup) -> None:
    for axis in ("tp", "cp", "ep", "dp", "pp", "vpp"):
        group.add_argument(
            f"--{axis}", type=int, default=1, metavar="N", help=f"{axis.upper()} size"
        )
    group.add_argument("--iterations", type=int, default=20, help="(default: %(default)s)")
    group.add_argument("--microbatches", type=int, default=8, help="(default: %(default)s)")
    group.add_argument("--layers", type=int, default=16, help="(default: %(default)s)")
    group.add_argument(
        "--costs", choices=sorted(_COST_MODELS), default="compute",
        help="what dominates a step (default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    group.add_argument("--granularity", choices=[str(each) for each in Granularity], default="full")
    group.add_argument(
        "--layer-stride", type=int, default=1, metavar="N",
        help="as --trace-layer-stride (default: 1)",
    )  # fmt: skip
    group.add_argument("--interval", type=int, default=5, help="as --trace-interval (default: 5)")
    group.add_argument(
        "--window", type=int, default=5, help="traced iterations of an interval (default: 5, all)"
    )
    group.add_argument("--ranks-per-host", type=int, default=8, help="(default: %(default)s)")
    group.add_argument(
        "--missing-rank", type=int, action="append", default=[], metavar="R", help="repeatable"
    )


def _add_noise_arguments(group: argparse._ArgumentGroup) -> None:
    noise, clocks = Noise(), Clocks()
    for flag, default, meaning in (
        ("--compute-noise", noise.compute_ratio, "log-standard deviation of a computation"),
        ("--transfer-noise", noise.transfer_ratio, "log-standard deviation of a transfer"),
        ("--device-spread", noise.device_ratio, "fixed difference between chips, likewise"),
        ("--clock-offset-ms", clocks.offset_ms, "host clocks are off by up to ±this"),
        ("--clock-drift-ppm", clocks.drift_ppm, "and drift by up to ±this"),
    ):
        group.add_argument(
            flag, type=float, default=default, metavar="X", help=f"{meaning} (default: {default:g})"
        )


def _add_trouble_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--fault", type=str, action="append", default=[], metavar="SPEC",
        help="rank=R,kind=compute|link|host|loader|gc,factor=F[,from=I][,to=J][,peer=R]"
        "[,period=N], repeatable",
    )  # fmt: skip
    group.add_argument(
        "--stage-imbalance", action="append", default=[], metavar="STAGE=RATIO",
        help="first, last or a number: its forward takes RATIO times its layers; repeatable",
    )  # fmt: skip
    group.add_argument(
        "--sequence-imbalance", type=float, default=0.0, metavar="X", help="spread of lengths"
    )
    group.add_argument(
        "--warmup", type=float, default=0.0, metavar="X", help="slower first iterations"
    )
    group.add_argument(
        "--checkpoint-interval", type=int, default=0, metavar="N", help="save every N iterations"
    )
    group.add_argument(
        "--gc-interval", type=int, default=0, metavar="N", help="collector pauses on every rank"
    )


def job_from(arguments: argparse.Namespace) -> JobModel:
    """Return the job of the flags; raise ConfigError for sizes that do not fit together."""
    layout = Layout(
        **{axis: getattr(arguments, axis) for axis in ("tp", "cp", "ep", "dp", "pp", "vpp")}
    )
    if arguments.layers < 1:
        raise ConfigError(f"--layers is {arguments.layers}, expected 1 or more")
    model = ModelSize(num_layers=arguments.layers)
    return JobModel(
        layout=layout,
        costs=_COST_MODELS[arguments.costs](layout, model),
        iterations=arguments.iterations,
        num_microbatches=arguments.microbatches,
        num_layers=arguments.layers,
        noise=Noise(
            compute_ratio=arguments.compute_noise,
            transfer_ratio=arguments.transfer_noise,
            device_ratio=arguments.device_spread,
        ),
        clocks=Clocks(offset_ms=arguments.clock_offset_ms, drift_ppm=arguments.clock_drift_ppm),
        imbalance=Imbalance(
            stage_ratio=dict(
                parse_stage_imbalance(text, layout.pp) for text in arguments.stage_imbalance
            ),
            sequence_ratio=arguments.sequence_imbalance,
            warmup_ratio=arguments.warmup,
            checkpoint_interval=arguments.checkpoint_interval,
            gc_interval=arguments.gc_interval,
        ),
        device=arguments.device,
        ranks_per_host=arguments.ranks_per_host,
        granularity=Granularity(arguments.granularity),
        layer_stride=arguments.layer_stride,
        interval=arguments.interval,
        window=arguments.window,
        missing_ranks=tuple(arguments.missing_rank),
    )


def run(arguments: argparse.Namespace) -> int:
    """Simulate a job and write its rank files."""
    job = job_from(arguments)
    faults: list[Fault] = [parse_fault(text) for text in arguments.fault]
    if not 0 <= arguments.seed < 1 << 63:
        raise UsageError(f"--seed is {arguments.seed}, expected 0 to {(1 << 63) - 1}")
    if job.layout.world_size > MOST_RANKS:
        raise UsageError(f"{job.layout.world_size} ranks, expected {MOST_RANKS} or fewer")
    if set(job.missing_ranks) >= set(range(job.layout.world_size)):
        raise UsageError("--missing-rank leaves no rank to be written; leave one out")
    folder: Path = arguments.output
    check_can_be_made(folder)
    if folder.is_dir() and any(folder.iterdir()) and not arguments.force:
        raise OutputError(f"{folder} is not empty; name another folder or pass --force")
    with stage(f"simulating {job.layout.world_size} ranks, {job.iterations} iterations"):
        trace = simulate_trace(job, faults, seed=arguments.seed)
    with stage(f"writing {trace.spans.num_rows:,} spans"):
        paths = write_rank_files(trace, folder)
        write_ground_truth(ground_truth(trace, job, faults, arguments.seed), folder)
    say(
        f"wrote {len(paths)} rank files and ground-truth.json to {folder}; next: megascan detect "
        f"{shlex.quote(str(folder))}{' --allow-missing-ranks' if job.missing_ranks else ''}"
    )
    return 0
