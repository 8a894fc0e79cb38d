"""Read what a traced pipeline costs and say what would make its step faster, by how much.

PATH is a folder of rank files or a merged timeline; its verdict names the slow ranks. Tried are
other schedules, one planned for the measured costs, other shares of microbatches for the replicas,
other layers for the stages, another order of microbatches, new hardware; with --fbd also helpers
that run forwards. The model is first compared with the trace itself.

PATH may also be a plan in torch's CSV, one line a pipeline rank: it is checked and drawn.

examples:
  megascan plan trace_output
  megascan plan trace_output --memory-limit 5 --write faster
  megascan plan trace_after --compare faster/prediction.json
  megascan plan faster/plan.csv
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from megascan.cli.options import add_run_arguments, load_timeline
from megascan.cli.output import check_outputs, require, say, stage, write_bytes, write_json
from megascan.errors import UsageError
from megascan.overwriting import check_can_be_made

if TYPE_CHECKING:
    from megascan.timeline import Timeline
    from training.pipeline.measured import Predictor
    from training.pipeline.remedies import Advice


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("path", type=Path, metavar="PATH", help="trace folder, timeline, plan.csv")
    parser.add_argument(
        "--memory-limit", type=float, metavar="X",
        help="activations a rank may hold, in microbatches of the traced job (default: as traced)",
    )  # fmt: skip
    parser.add_argument(
        "--num-layers", type=int, metavar="N",
        help="layers of the model, evenly over the stages, where the trace does not say",
    )  # fmt: skip
    parser.add_argument("--fbd", action="store_true", help="also try helpers that run forwards")
    parser.add_argument("--helpers", type=int, default=1, metavar="N", help="(default: 1)")
    parser.add_argument(
        "--helper-speed", type=float, default=1.0, metavar="X",
        help="of a helper over that of a pipeline rank (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--write", type=Path, metavar="DIR", help="write the plan, its flags and its prediction"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument(
        "--compare", type=Path, metavar="FILE", help="set a prediction.json beside this trace"
    )
    parser.add_argument("--force", action="store_true", help="replace existing output files")
    add_run_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, predict, print, and write the files that flags name."""
    require("training")
    _check(arguments)
    if arguments.path.suffix == ".csv":
        return _show(arguments.path, arguments.memory_limit)
    timeline = load_timeline(arguments.path, arguments)
    from training.pipeline.measured import measure, with_layers

    job = measure(timeline)
    if arguments.num_layers is not None:
        job = with_layers(job, arguments.num_layers)
    if arguments.compare:
        from training.pipeline.drawing import compare

        say(compare(arguments.compare, job))
        return 0
    from training.pipeline.drawing import render_text, to_json
    from training.pipeline.measured import Predictor
    from training.pipeline.remedies import HelperOffer, advise

    model = Predictor(job, _slowdowns(timeline))
    offer = HelperOffer(num_helpers=arguments.helpers, speed_ratio=arguments.helper_speed)
    with stage("planning"):
        advice = advise(
            model, memory_limit=arguments.memory_limit, helpers=offer if arguments.fbd else None
        )
    say(render_text(advice, model))
    if arguments.json:
        write_json(arguments.json, to_json(advice, model), force=arguments.force)
        say(f"wrote {arguments.json}")
    if arguments.write:
        _write(arguments.write, advice, model, force=arguments.force)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raise UsageError for flags that contradict each other."""
    limit = arguments.memory_limit
    if limit is not None and not (limit > 0 and math.isfinite(limit)):
        raise UsageError(f"--memory-limit is {limit:g}, expected a number of microbatches above 0")
    speed = arguments.helper_speed
    if arguments.helpers < 1 or not (speed > 0 and math.isfinite(speed)):
        raise UsageError(
            f"{arguments.helpers} helper(s) of speed {speed:g}; "
            "expected at least one, and a speed above 0"
        )
    if not arguments.fbd and (arguments.helpers, arguments.helper_speed) != (1, 1.0):
        raise UsageError("--helpers and --helper-speed say what --fbd tries; add --fbd")
    if arguments.compare and (arguments.json or arguments.write):
        raise UsageError("--compare only prints; leave out --json and --write")
    if arguments.path.suffix == ".csv":
        _check_alone(arguments)
    check_outputs(_outputs(arguments), read=[arguments.path], force=arguments.force)


def _check_alone(arguments: argparse.Namespace) -> None:
    """Raise UsageError for flags that need a trace if PATH is a plan."""
    beside = ("num_layers", "fbd", "write", "json", "compare")
    values = {f"--{name.replace('_', '-')}": getattr(arguments, name) for name in beside}
    given = [flag for flag, value in values.items() if value is not None and value is not False]
    if given:
        raise UsageError(
            f"{arguments.path} is a plan, which is checked and drawn; {', '.join(given)} "
            "would need a trace: leave out, or give a trace"
        )


def _outputs(arguments: argparse.Namespace) -> list[Path]:
    outputs = [arguments.json] if arguments.json else []
    if arguments.write:
        check_can_be_made(arguments.write)
    if arguments.write and arguments.write.exists():
        names = ("plan.csv", "flags.txt", "prediction.json", "timeline.json.gz")
        outputs += [arguments.write / name for name in names]
    return outputs


def _slowdowns(timeline: Timeline) -> dict[int, float]:
    """Return the slowdowns of computing that the verdict finds, by global rank."""
    require("detect")
    from detect import detect
    from detect.report import Cause, Owner

    with stage(f"comparing {len(timeline.headers)} ranks with their peers"):
        findings = detect(timeline).findings
    return {
        rank: finding.slowdown
        for finding in findings
        if finding.owner is Owner.NODE and finding.cause is Cause.COMPUTE
        for rank in finding.ranks
    }


def _show(path: Path, memory_limit: float | None) -> int:
    """Check a plan and draw it with even costs."""
    from training.pipeline.drawing import describe
    from training.pipeline.plan import read_plan
    from training.pipeline.simulator import check

    plan = read_plan(path)
    check(plan, memory_limit=memory_limit)
    say(describe(plan))
    return 0


def _write(folder: Path, advice: Advice, model: Predictor, *, force: bool) -> None:
    """Write the flags and the prediction of the best remedy, and its plan if it has one."""
    from training.pipeline.drawing import flags_text, to_json
    from training.pipeline.plan import format_plan

    folder.mkdir(parents=True, exist_ok=True)
    best = advice.best
    written = [folder / "flags.txt", folder / "prediction.json"]
    if best.plan is not None:
        written.insert(0, folder / "plan.csv")
        write_bytes(written[0], format_plan(best.plan).encode(), force=force)
        written.append(_write_timeline(folder, advice, model, force=force))
    flags = flags_text(best, folder / "plan.csv")
    write_bytes(folder / "flags.txt", f"{flags}\n".encode(), force=force)
    write_json(folder / "prediction.json", to_json(advice, model), force=force)
    say(f"wrote {', '.join(map(str, written))}")
    if best is not advice.now:
        say(f"next: train with these flags and --trace, then megascan plan TRACE --compare "
            f"{folder / 'prediction.json'}")  # fmt: skip


def _write_timeline(folder: Path, advice: Advice, model: Predictor, *, force: bool) -> Path:
    """Draw the predicted step for a viewer."""
    from megascan.export import write_timeline
    from training.pipeline.drawing import draw_timeline
    from training.pipeline.remedies import predicted_best

    path = folder / "timeline.json.gz"
    prediction = predicted_best(advice, model)
    plan = advice.best.plan
    assert plan is not None
    write_timeline(draw_timeline(prediction, plan.shape, name="predicted"), path, force=force)
    return path
