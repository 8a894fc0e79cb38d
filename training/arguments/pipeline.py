"""The pipeline's flags: its schedule, and which layers a stage holds.

`--pipeline-model-parallel-layout` has Megatron's notation. A letter a layer, `|` between stages: E
embedding, t transformer layer, L loss; ``x*4`` and ``(tt|)*3`` repeat, commas are for the eye.
Stages are in the order in which a microbatch passes them, so with V chunks on each of P ranks there
are P·V.

    Ettt|ttt|t|tL    four stages of 3, 3, 1, 1 layers
"""

# ruff: noqa: RUF009 - `flag` makes an immutable field, as dataclasses.field does

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megascan.errors import ConfigError
from training.arguments.flags import flag


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """The pipeline's schedule; without these flags it is Megatron-Core's own."""

    pipeline_schedule: str | None = flag(
        None,
        "order of the pipeline's work: 1f1b, dfc (depth-first, interleaved), bfc (breadth-first), "
        "zb-h1 (weight gradients on their own), auto (the fastest plan found within "
        "--dpp-memory-limit), or a file that holds a plan; left out: Megatron-Core's schedule",
    )
    pipeline_model_parallel_layout: str | None = flag(
        None,
        "layers of each stage, as in 'Ettt|ttt|t|tL': E embedding, t layer, L loss, | between "
        "stages, x*4 and (tt|)*3 repeat; left out: the same number on each",
    )
    microbatch_group_size_per_vp_stage: int | None = flag(
        None,
        "interleaved schedule: microbatches that pass one chunk before the next; left out: the "
        "pipeline size",
        option="--microbatch-group-size-per-virtual-pipeline-stage",
    )
    recompute_ahead: bool = flag(
        False,
        "keep no activations but a chunk's input, and repeat its forward before the gradient "
        "comes; with --pipeline-schedule or --use-dpp, in place of --recompute-granularity",
    )
    plan_from: Path | None = flag(
        None,
        "a timeline of this job (aggregate.py -o), whose measured costs --pipeline-schedule auto "
        "or --use-dpp plans for; left out: even stages",
    )
    dpp_microbatches: str | None = flag(
        None,
        "microbatches of a step by replica, as in 18,14; auto: moved between replicas while the "
        "job runs, from what each replica takes; left out: equal shares",
    )
    dpp_memory_limit: float | None = flag(
        None,
        "microbatches whose activations a rank may hold at most: plans that hold more are refused, "
        "auto and guided use what is allowed; left out: as many as with Megatron-Core's schedule",
    )
    order_microbatches: str | None = flag(
        None,
        "order of a step's microbatches by their tokens before padding: hill runs short ones first "
        "and last, long ones in the middle; left out: as the data has them",
        choices=("hill",),
    )
    use_dpp: bool = flag(
        False, "plan the pipeline's work: --pipeline-schedule auto where none is given"
    )
    forward_backward_disaggregating: bool = flag(
        False,
        "let helpers come (python -m training.helper), which run forwards beside the pipeline; "
        "forwards are repeated before their backward, by plans of --pipeline-schedule 1f1b "
        "(default), zb-h1 or auto",
    )
    fbd_port: int = flag(
        0, "where rank 0 waits for helpers; 0: any free port; the address is printed"
    )
    fbd_helpers: int = flag(
        0, "helpers that rank 0 starts on its host and waits for; others may come at any time"
    )
    dpp_choice: str = flag(
        "static",
        "with --use-dpp: follow the plan (static), or leave it while the job runs where its next "
        "input is neither there nor about to come (guided)",
        choices=("static", "guided"),
    )


_OF_THE_ORIGINAL = {
    "node_ips": "torchrun brings the nodes together",
    "workload": "messages have the size of the model's activations",
    "num_gpus": "torchrun starts the ranks",
    "multi_node": "torchrun knows how many nodes there are",
}
"""Flags of the first MegaDPP, which brought its own transport, and what stands in their place."""

_REFUSED = "ignore_forward_tensor_parallel"
"""Flag of the first MegaFBD: forward ranks of another tensor-parallel size than backward ranks."""


def add_original_arguments(parser: argparse.ArgumentParser) -> None:
    """Take the flags of the first MegaDPP, so that its command lines run."""
    group = parser.add_argument_group("flags of the first MegaDPP, without effect")
    for name in _OF_THE_ORIGINAL:
        group.add_argument(
            "--" + name.replace("_", "-"),
            nargs="?",
            const="",
            help="without effect",
        )
    group.add_argument(
        "--" + _REFUSED.replace("_", "-"), action="store_true", help="refused: see docs/helpers.md"
    )


def notes_on_original(given: argparse.Namespace) -> Iterator[str]:
    """Yield a sentence for each of these flags; raise ConfigError for what would change sums."""
    if getattr(given, _REFUSED):
        raise ConfigError(
            "--ignore-forward-tensor-parallel is refused: forwards with another tensor-parallel "
            "size add up in another order than those that backward passes repeat; leave it out, "
            "helpers run whole stages"
        )
    for name, reason in _OF_THE_ORIGINAL.items():
        if getattr(given, name) is not None:
            yield f"--{name.replace('_', '-')} has no effect: {reason}"


_REPEATED = re.compile(r"\(([^()]+)\)\*(\d{1,4})|([EtmL|])\*(\d{1,4})")
_OPTION = "--pipeline-model-parallel-layout"
_MOST_LETTERS = 100_000


def stages_of(layout: str) -> list[str]:
    """Return the letters of each stage; ConfigError for what is no layout."""
    text = layout.replace(",", "").replace(" ", "")
    while (found := _REPEATED.search(text)) is not None:
        letters = found[1] or found[3]
        text = text[: found.start()] + letters * int(found[2] or found[4]) + text[found.end() :]
        if len(text) > _MOST_LETTERS:
            raise ConfigError(f"{_OPTION} {layout} is too long; give fewer layers")
    if not re.fullmatch(r"[EtL|]+", text):
        raise ConfigError(
            f"{_OPTION} {layout} is no layout; write E for the embedding, t for each layer, L for "
            "the loss and | between stages, as in 'Ett|ttL'"
        )
    return text.split("|")


def check_layout(layout: str, num_layers: int, pipeline_size: int) -> list[str]:
    """Return the letters of each stage of a layout that fits the job; ConfigError otherwise."""
    stages = stages_of(layout)
    whole = "".join(stages)
    if whole != f"E{'t' * num_layers}L":
        raise ConfigError(
            f"{_OPTION} {layout} has {whole.count('t')} layers, and it must be E, the "
            f"--num-layers {num_layers} layers as t, then L"
        )
    if len(stages) % pipeline_size:
        raise ConfigError(
            f"{_OPTION} {layout} has {len(stages)} stages, expected a multiple of "
            f"--pipeline-model-parallel-size {pipeline_size}"
        )
    return stages
