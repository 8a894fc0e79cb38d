"""Which layers a pipeline stage holds, in Megatron's notation.

A letter a layer, `|` between stages: E embedding, t transformer layer, L loss; ``x*4`` and
``(tt|)*3`` repeat, commas are for the eye. Stages are in the order in which a microbatch passes
them, so with V chunks on each of P ranks there are P·V.

    Ettt|ttt|t|tL    four stages of 3, 3, 1, 1 layers
"""

from __future__ import annotations

import re

from megascan.errors import ConfigError

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
