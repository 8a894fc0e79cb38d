"""What may be asked of a tensor: a fixed table, so that nothing a client sends is ever evaluated.

A rank reduces its own share to a few partial numbers; the viewer, which has the shares of all
tensor-parallel ranks, joins (`join`) and finishes them. So ranks exchange nothing for a picture.
Example: for the rms of 4 features, rank 0 has (1, 3) and sends 1 + 9 = 10, rank 1 has (1, 5) and
sends 26; the viewer adds both and takes the root of the mean: √(36 / 4) = 3. `join_table` puts the
joined shares of all stages, one after the other, into one table.

`finish` and `join_table` use numpy alone: the viewer needs no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megascan.errors import ConfigError
from megascope.frames import Array, Frame
from megascope.request import BY_EXPERT, BY_HEAD

if TYPE_CHECKING:
    import torch


Numbers = npt.NDArray[np.floating[Any]]

NUM_PIXELS = 64
NUM_TOP = 8
LOWEST_BIN, NUM_BINS = -20, 32
"""Histograms count powers of two: bin 0 holds what is below 2^-19, bin 31 what is from 2^11 on."""
_TINY = 1e-30


class Join(StrEnum):
    """How the partial numbers of tensor-parallel ranks are joined."""

    SUM = "sum"
    MAX = "max"
    APPEND = "append"
    TOP = "top"


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """One row of the table.

    `begin` reduces (…, feature), in the model's own number format, to partial numbers, each (…,).
    `finish` takes joined partial numbers and the number of all features, and returns (…,) or
    (…, number).
    """

    name: str
    meaning: str
    begin: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    finish: Callable[[Numbers, int], Numbers]
    join: Join = Join.SUM


def _energy(x: torch.Tensor) -> torch.Tensor:
    """Return sums of squares, added up in float32 in one pass without a converted copy."""
    import torch

    found: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
    return found.square()


def _largest(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor's largest magnitude by one kernel on a GPU, on a CPU by two faster ones."""
    least, most = x.aminmax() if x.is_cuda else (x.amin(), x.amax())
    return (-least).maximum(most)


def _entropy_parts(x: torch.Tensor) -> Sequence[torch.Tensor]:
    energy = x.float().square()
    return energy.sum(-1), (energy * energy.clamp(min=_TINY).log()).sum(-1)


def _finish_entropy(parts: Numbers, width: int) -> Numbers:
    """Return the entropy of p = x²/Σx²: log Σ − Σ x² log x² / Σ."""
    del width
    total = np.maximum(parts[..., 0], _TINY)
    return np.asarray(np.maximum(np.log(total) - parts[..., 1] / total, 0.0))


def _bins(x: torch.Tensor) -> Sequence[torch.Tensor]:
    powers = x.float().abs().clamp(min=_TINY).log2().floor().nan_to_num(nan=float(NUM_BINS))
    numbers = (powers - LOWEST_BIN).clamp(0, NUM_BINS - 1)
    return [(numbers == one).sum(-1) for one in range(NUM_BINS)]


def _pixels(x: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return means over `NUM_PIXELS` (or fewer) runs of neighbouring features."""
    return [part.mean(-1) for part in x.float().tensor_split(min(NUM_PIXELS, x.shape[-1]), dim=-1)]


def _finish_pixels(parts: Numbers, width: int) -> Numbers:
    """Return `NUM_PIXELS` pixels, or fewer, from the appended pixels of all shares."""
    del width
    if parts.shape[-1] <= NUM_PIXELS:
        return parts
    split = np.array_split(parts, NUM_PIXELS, axis=-1)
    return np.stack([one.mean(-1) for one in split], axis=-1)


def _top(x: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the numbers of largest magnitude, then the features they belong to."""
    size = min(NUM_TOP, x.shape[-1])
    indices = x.abs().nan_to_num(nan=float("inf")).topk(size, dim=-1).indices
    return [*x.gather(-1, indices).unbind(-1), *indices.unbind(-1)]


REDUCTIONS: tuple[Reduction, ...] = (
    Reduction(
        name="rms", meaning="root of the mean square",
        begin=lambda x: (_energy(x),),
        finish=lambda parts, width: np.sqrt(parts[..., 0] / width),
    ),
    Reduction(
        name="max", meaning="largest magnitude",
        begin=lambda x: (x.abs().amax(-1),),
        finish=lambda parts, width: parts[..., 0], join=Join.MAX,
    ),
    Reduction(
        name="mean", meaning="mean",
        begin=lambda x: (x.float().sum(-1),),
        finish=lambda parts, width: parts[..., 0] / width,
    ),
    Reduction(
        name="zeros", meaning="share of exact zeros",
        begin=lambda x: ((x == 0).sum(-1),),
        finish=lambda parts, width: parts[..., 0] / width,
    ),
    Reduction(
        name="finite", meaning="share of numbers that are neither infinite nor NaN",
        begin=lambda x: (x.isfinite().sum(-1),),
        finish=lambda parts, width: parts[..., 0] / width,
    ),
    Reduction(
        name="entropy", meaning="entropy of the squares' shares: 0 for one feature that has all",
        begin=_entropy_parts, finish=_finish_entropy,
    ),
    Reduction(
        name="histogram", meaning="share of magnitudes by powers of two",
        begin=_bins, finish=lambda parts, width: parts / width,
    ),
    Reduction(
        name="top", meaning="the largest numbers and their features", begin=_top,
        finish=lambda parts, width: parts, join=Join.TOP,
    ),
    Reduction(
        name="pixels", meaning="means of neighbouring features", begin=_pixels,
        finish=_finish_pixels, join=Join.APPEND,
    ),
)  # fmt: skip
BY_NAME = {reduction.name: reduction for reduction in REDUCTIONS}


_BY_FEATURE = frozenset({"top", "pixels"})
"""Reductions that name features: all tokens are first reduced to one, by the largest magnitude
(top) or the mean magnitude (pixels), so that shares of the tokens can be joined exactly."""


def reduce(name: str, tensor: torch.Tensor, *, per_token: bool = True) -> torch.Tensor:
    """Reduce (token, row, …) of one rank to partial numbers `(token, row, partial)` in float32.

    Without `per_token` all tokens and rows are reduced to one: (1, 1, partial).
    """
    flat = tensor.flatten(2)
    if not per_token and name == "max":
        return _largest(flat).float().view(1, 1, 1)
    if not per_token and name == "rms":
        return _energy(flat.flatten()).view(1, 1, 1)
    if not per_token and name in _BY_FEATURE:
        magnitudes = flat.float().abs()
        along = magnitudes.amax if name == "top" else magnitudes.mean
        flat = along((0, 1), keepdim=True)
    parts = BY_NAME[name].begin(flat)
    if len(parts) == 1:
        made = parts[0].float().unsqueeze(-1)
    else:
        made = flat.new_empty((*flat.shape[:2], len(parts)), dtype=parts[0].float().dtype)
        for number, part in enumerate(parts):
            made[..., number] = part
    is_summed = not per_token and name not in _BY_FEATURE
    return made.sum((0, 1), keepdim=True) if is_summed else made


def rms_by_expert(tensor: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the root mean square of what each expert returns, `(1, 1, expert)`.

    `tensor` is (token, row, feature), with the tokens sorted by expert; `counts` says how many each
    expert has. For an expert without tokens return 0.
    """
    energies = _energy(tensor).sum(1).double()
    sums = energies.new_zeros(len(energies) + 1)
    sums[1:] = energies.cumsum(0)
    counts = counts.to(sums.device)
    ends = counts.cumsum(0)
    energy = sums[ends] - sums[ends - counts]
    mean = energy / (counts * tensor.shape[1:].numel()).clamp(min=1)
    return mean.clamp(min=0).sqrt().float().view(1, 1, -1)


def width_of(name: str, tensor: torch.Tensor, *, per_token: bool) -> int:
    """Return how many numbers of `tensor` a partial number of `reduce` stands for."""
    width = tensor.shape[2:].numel()
    return width if per_token or name in _BY_FEATURE else tensor.numel()


def join(name: str, shares: Sequence[Numbers], widths: Sequence[int]) -> Numbers:
    """Join and finish the partial numbers of all shares of the features, given by rank.

    `widths` are the numbers of features of the shares.
    """
    reduction = BY_NAME[name]
    joined = shares[0] if len(shares) == 1 else _join_parts(reduction.join, shares, widths)
    with np.errstate(invalid="ignore", over="ignore"):
        return reduction.finish(joined, sum(widths))


def _join_parts(how: Join, shares: Sequence[Numbers], widths: Sequence[int]) -> Numbers:
    match how:
        case Join.SUM:
            exact = [np.asarray(share, dtype=np.float64) for share in shares]
            return np.asarray(np.sum(exact, axis=0))
        case Join.MAX:
            return np.asarray(np.max(shares, axis=0))
        case Join.APPEND:
            return np.concatenate(shares, axis=-1)
        case Join.TOP:
            return _join_top(shares, widths)


def join_tokens(
    name: str, shares: Sequence[Numbers], widths: Sequence[int], *, per_token: bool
) -> Numbers:
    """Join and finish partial numbers of shares of the tokens (sequence parallelism), by rank.

    With `per_token` axis -3 counts the tokens.
    """
    if per_token:
        return join(name, [np.concatenate(shares, axis=-3)], widths[:1])
    if name == "pixels":  # means over equally many tokens
        return join(name, [np.mean(shares, axis=0)], widths[:1])
    if name == "top":
        return _top_of_all(shares)
    return join(name, shares, widths)


def _top_of_all(shares: Sequence[Numbers]) -> Numbers:
    """Return the largest features of all tokens, each once, from the largest of each share.

    This is exact: a feature among the largest of all tokens is also among the largest of the share
    in which it is largest.
    """
    rows = np.stack(shares).reshape(len(shares), -1, shares[0].shape[-1])
    made = np.zeros((rows.shape[1], rows.shape[2]))
    size = rows.shape[2] // 2
    for number in range(rows.shape[1]):
        best: dict[float, float] = {}
        for row in rows[:, number]:
            for value, feature in zip(row[:size], row[size:], strict=True):
                if abs(value) >= abs(best.get(feature, 0.0)):
                    best[feature] = value
        order = sorted(best, key=lambda feature: -abs(best[feature]))[:size]
        made[number] = [*(best[feature] for feature in order), *order]
    return made.reshape(shares[0].shape)


def _join_top(shares: Sequence[Numbers], widths: Sequence[int]) -> Numbers:
    """Return the largest numbers over all shares of the features, and their features.

    Features are counted over all shares.
    """
    starts = np.cumsum([0, *widths[:-1]])
    halves = [np.split(share, 2, axis=-1) for share in shares]
    values = np.concatenate([half[0] for half in halves], axis=-1)
    features = [half[1] + start for half, start in zip(halves, starts, strict=True)]
    indices = np.concatenate(features, axis=-1)
    sizes = np.nan_to_num(np.abs(values), nan=np.inf)
    order = np.argsort(-sizes, axis=-1, kind="stable")[..., :NUM_TOP]
    taken = [np.take_along_axis(one, order, axis=-1) for one in (values, indices)]
    return np.concatenate(taken, axis=-1)


def join_shares(shares: Sequence[Numbers], share: str) -> Numbers:
    """Join whole tensors (token, row, …, feature) of the tensor-parallel ranks, by rank.

    `share` is the value of a `megascope.capture.Share`. Features, or heads, are axis 2.
    """
    if share == "whole" or len(shares) == 1:
        return shares[0]
    if share == "tokens":
        return np.concatenate(shares, axis=0)
    if share == "gated":
        halves = [np.split(one, 2, axis=2) for one in shares]
        return np.concatenate([half[side] for side in (0, 1) for half in halves], axis=2)
    return np.concatenate(shares, axis=2)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One rank's frame, and the rank's coordinates."""

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

    `num_shares` is the number of shares of a stage. A stage whose shares are not all there (a rank
    has not written yet) is left out. ConfigError when no stage is left.
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
    """Join the partial numbers of a stage's tensor-parallel ranks into the stage's `(layer, …)`."""
    ordered = sorted(shares, key=lambda share: share[0])
    item = ordered[0][1]
    widths = [described["width"] for _, described, _ in ordered]
    arrays = [array for _, _, array in ordered]
    if item["place"] == BY_HEAD or item["place"] in BY_EXPERT:  # a number a head or expert: append
        return np.concatenate(arrays, axis=-1)
    if item["share"] == "whole":
        made = join(reduction, arrays[:1], widths[:1])
    elif item["share"] == "tokens":
        made = join_tokens(reduction, arrays, widths, per_token=per_token)
    else:
        made = join(reduction, arrays, widths)
    # The last axis counts numbers, even where there is only one.
    return made if made.ndim == arrays[0].ndim else made[..., None]
