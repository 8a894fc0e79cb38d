"""Frames of several ranks into one table: tensor shares joined, stages put one after the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megascan.errors import ConfigError
from megascope.frames import Array, Frame
from megascope.reductions import join, join_tokens
from megascope.request import BY_EXPERT, BY_HEAD


@dataclass(frozen=True, kw_only=True)
class Part:
    """One rank's frame, and where the rank sits."""

    tp: int
    pp: int
    frame: Frame


_Share = tuple[int, Mapping[str, Any], Array]


def join_table(
    parts: Sequence[Part],
    place: str,
    reduction: str,
    *,
    num_shares: int,
    gradient: bool = False,
) -> tuple[list[int], Array]:
    """Return layers and `(layer, microbatch, token, row, number)` of one data-parallel replica.

    `num_shares` is the tensor-parallel size: a stage of which a share is still missing (a rank that
    has not written yet) is left out. ConfigError when nothing is left.
    """
    stages: dict[int, list[_Share]] = defaultdict(list)
    per_token = False
    for part in parts:
        per_token = bool(part.frame.header["per_token"])
        for number, item in enumerate(part.frame.header["items"]):
            if (
                item["place"] == place
                and item["reduction"] == reduction
                and item["gradient"] == gradient
            ):
                stages[part.pp].append((part.tp, item, part.frame.arrays[str(number)]))
    found = [
        (shares[0][1]["layers"], _joined(shares, reduction, per_token=per_token))
        for shares in stages.values()
        if len(shares) >= num_shares
    ]
    if not found:
        raise ConfigError(f"{reduction} of {place[:40]} was not captured then")
    if len(found) == 1:
        return found[0]
    rows = {layer: row for own, table in found for layer, row in zip(own, table, strict=True)}
    layers = sorted(rows)
    return layers, np.stack([rows[layer] for layer in layers])


def _joined(shares: Sequence[_Share], reduction: str, *, per_token: bool) -> Array:
    """One stage's numbers `(layer, …)` out of its tensor-parallel ranks' partial ones."""
    ordered = sorted(shares, key=lambda one: one[0])
    item = ordered[0][1]
    arrays, widths = [one[2] for one in ordered], [one[1]["width"] for one in ordered]
    if item["place"] == BY_HEAD or item["place"] in BY_EXPERT:  # side by side
        return np.concatenate(arrays, axis=-1)
    if item["share"] == "whole":
        made = join(reduction, arrays[:1], widths[:1])
    elif item["share"] == "tokens":
        made = join_tokens(reduction, arrays, widths, per_token=per_token)
    else:
        made = join(reduction, arrays, widths)
    # The last axis counts numbers, also where there is one number a token.
    return made if made.ndim == arrays[0].ndim else made[..., None]
