"""Write a what-if result as text, JSON and heat map (SVG, PNG), a critical path as text and JSON.

The text answers first, then says where time is lost and how far the replay can be trusted. The
JSON has the names of the definitions. In the heat map rows are pipeline stages (and the TP and CP
ranks in them), columns DP ranks; the colour of a cell is the rank's exact S_w, white at 1.0 to red
at 1.5 and above.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import islice

import numpy as np
import numpy.typing as npt

from detect.text import HIDES, milliseconds, ranks_text
from detect.whatif.graph import NS_PER_S, Replay
from detect.whatif.path import CriticalPath, Link, Makeup, Share, StepPath, pieces
from detect.whatif.savings import PEERS, Saving
from detect.whatif.slowness import Explained, WhatIf
from megascan.arrays import Floats
from megascan.errors import listed
from megascan.header import Json

WHATIF_SCHEMA = 1
_NUM_RANKS_SHOWN = 5
_NUM_MENDED_NAMED, _NUM_IDEAL_NAMED = 4, 8
_NUM_TYPES_SHOWN = 6
_WORTH_SAYING = 1.005
_HIGH_MODEL_ERROR = 0.05


def render_text(result: WhatIf, savings: Sequence[Saving] = ()) -> str:
    """Return the answer, then where time is lost, then how far the replay can be trusted."""
    lines = [
        f"A step takes {_seconds(result.traced_s)} and would take {_seconds(result.ideal_s)} were "
        f"all ranks, stages and microbatches alike: {100 * max(result.waste_ratio, 0.0):.1f} % of "
        f"the GPU time is lost (S = {result.slowdown:.3f}, {result.replay.layout_text}, "
        f"{result.replay.num_gpus} GPUs).",
        "",
        *_where(result),
    ]
    if savings:
        lines += ["", "If it ran like its peers"]
        lines += [f"  {_saving_line(result, saving)}" for saving in savings]
    lines += ["", "Step time were all ideal but …", *_ranks(result)]
    worst = islice(result.type_ratio.items(), _NUM_TYPES_SHOWN)
    lines += [f"  type    {ratio:.3f}  {name}" for name, ratio in worst]
    if len(result.stage_ratio) > 1:
        stages = "  ".join(f"PP{n} {ratio:.3f}" for n, ratio in enumerate(result.stage_ratio))
        lines.append(f"  stage   {stages}")
    lines += ["", *_explained(result), "", *_trust(result)]
    return "\n".join(lines) + "\n"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.2f} ms"


def _where(result: WhatIf) -> list[str]:
    factors = result.factors
    parts = {
        "single ranks": factors.worker,
        "uneven stages": factors.stage,
        "scatter from step to step and microbatch to microbatch": factors.random,
    }
    product = (
        f"S = random {factors.random:.3f} x worker {factors.worker:.3f} x stage {factors.stage:.3f}"
    )
    name, value = max(parts.items(), key=lambda part: part[1])
    if value < _WORTH_SAYING:
        return [f"Nothing stands out: {product}."]
    return [f"Most of it lies with {name}: {product}."]


def _saving_line(result: WhatIf, saving: Saving) -> str:
    names = ", ".join(_rank(result.replay, rank) for rank in saving.ranks[:_NUM_MENDED_NAMED])
    why = f" [{', '.join(saving.causes)}]" if saving.causes else ""
    num_left_out = len(saving.ranks) - _NUM_MENDED_NAMED
    more = (f" and {num_left_out} more" if num_left_out > 0 else "") + why
    if saving.compared_with == "nobody":
        return f"{names}: there is no other rank to compare with"
    against = "" if saving.compared_with == PEERS else " (judged by the other stages)"
    if saving.speedup < _WORTH_SAYING:
        why_not = HIDES if saving.causes else "it runs like its peers"
        return f"{names}{more}: nothing gained, {why_not}{against}"
    return (
        f"{names}{more}: step {_seconds(saving.fixed_step_s)}, the job {saving.speedup:.3f}x as "
        f"fast; saves {_hours(saving.gpu_hours_per_hour)} GPU-hours an hour of training, "
        f"{_hours(saving.gpu_hours_per_day)} a day{against}"
    )


def _hours(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ranks(result: WhatIf) -> list[str]:
    """Return lines on the ranks that cost most beyond their peers, not those of a heavy stage."""
    ratios, peers = result.rank_ratio.ravel(), result.peer_ratio.ravel()
    ranks = result.replay.ranks.ravel()
    order = np.lexsort((ranks, -ratios / peers))[:_NUM_RANKS_SHOWN]
    return [
        f"  rank    {ratio:.3f}  {_rank(result.replay, rank)}, its peers {peer:.3f}"
        for ratio, peer, rank in zip(
            ratios[order], peers[order], ranks[order].tolist(), strict=True
        )
    ]


def _explained(result: WhatIf) -> list[str]:
    if not math.isfinite(result.top_ranks.removal):
        return ["There is no slowness to explain."]
    names = ", ".join(str(rank) for rank in result.top_ranks.ranks[:_NUM_IDEAL_NAMED])
    return [
        f"Making rank {names} ideal removes {round(100 * result.top_ranks.removal)} % of the "
        f"slowness, making the last stage ideal {round(100 * result.last_stage.removal)} % "
        "(above 100 % and below 0 % can happen: the ideal is a mean that includes the slow)."
    ]


def _trust(result: WhatIf) -> list[str]:
    error = result.error_ratio
    lines = [
        f"Replayed and measured step times differ by {100 * error:.2f} % (median of "
        f"{len(result.replay.steps)} steps; measured {_seconds(result.measured_s)})."
    ]
    if error > _HIGH_MODEL_ERROR:
        lines.append(
            f"More than {100 * _HIGH_MODEL_ERROR:.0f} % is much: dependencies are missing from "
            "the trace, so take the figures above as rough."
        )
    return lines + [f"Note: {note}." for note in result.replay.notes]


def to_json(result: WhatIf, savings: Sequence[Saving] = ()) -> dict[str, Json]:
    """Return everything under the names of the definitions; times in seconds."""
    replay = result.replay
    ranks = [str(rank) for rank in replay.ranks.ravel()]
    approximate = result.approximate_rank_ratio.ravel().tolist()
    is_replica = len(np.unique(replay.columns)) == len(replay.columns)
    return {
        "schema": WHATIF_SCHEMA,
        "layout": replay.layout_text,
        "num_gpus": replay.num_gpus,
        "iterations": replay.steps.tolist(),
        "T_base": result.measured_s,
        "T_ori": result.traced_s,
        "T_ideal": result.ideal_s,
        "S": result.slowdown,
        "waste": result.waste_ratio,
        "S_step": result.step_slowdown.tolist(),
        "S_t": dict(result.type_ratio),
        "S_stage": list(result.stage_ratio),
        # of DP ranks: a lane is one unless TP or CP make several of them
        "S_dp": list(result.lane_ratio) if is_replica else None,
        "S_w": dict(zip(ranks, result.rank_ratio.ravel().tolist(), strict=True)),
        "S_w_approximate": dict(zip(ranks, approximate, strict=True)),
        "M_W": _share_json(result.top_ranks),
        "M_S": _share_json(result.last_stage),
        "factors": dict(asdict(result.factors)),
        "launch_slowdown": result.launch_slowdown,
        "model_error_median_ratio": result.error_ratio,
        "savings": [saving.to_json() for saving in savings],
        "notes": list(replay.notes),
    }


def _share_json(share: Explained) -> dict[str, Json]:
    return {
        "removal": share.removal if math.isfinite(share.removal) else None,
        "addition": share.addition if math.isfinite(share.addition) else None,
        "removal_step_time_s": share.removed_s,
        "addition_step_time_s": share.added_s,
        "ranks": list(share.ranks),
    }


RED_FROM, RED_TO = 1.0, 1.5
_MOST_LABELLED_COLUMNS = 40
_CELL_WIDTH, _CELL_HEIGHT = 56, 26
_SMALL_CELL = 12
_LEFT, _TOP = 110, 64


@dataclass(frozen=True, kw_only=True)
class HeatGrid:
    """Cells (row, column): `values` are NaN and `ranks` are -1 where there is no rank."""

    values: Floats
    ranks: npt.NDArray[np.int64]
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]

    @property
    def shows_values(self) -> bool:
        """Return whether there is room for numbers."""
        return len(self.column_labels) <= _MOST_LABELLED_COLUMNS

    @property
    def cell_size(self) -> tuple[int, int]:
        """Return width and height of a cell, pixels."""
        return (_CELL_WIDTH, _CELL_HEIGHT) if self.shows_values else (_SMALL_CELL, _SMALL_CELL)


def heat_grid(result: WhatIf) -> HeatGrid:
    """Return the ranks of a result as rows of stages and columns of DP ranks."""
    replay = result.replay
    inner = tuple(dict.fromkeys(replay.row_labels))
    num_columns = int(replay.columns.max()) + 1
    num_stages = replay.graph.num_stages
    values = np.full((num_stages * len(inner), num_columns), np.nan)
    ranks = np.full(values.shape, -1, dtype=np.int64)
    rows = np.array([inner.index(label) for label in replay.row_labels])
    for stage in range(num_stages):
        place = (stage * len(inner) + rows, replay.columns)
        values[place] = result.rank_ratio[stage]
        ranks[place] = replay.ranks[stage]
    return HeatGrid(
        values=values,
        ranks=ranks,
        row_labels=tuple(f"PP{s} {name}".strip() for s in range(num_stages) for name in inner),
        column_labels=tuple(f"DP{column}" for column in range(num_columns)),
    )


def redness(values: Floats) -> Floats:
    """Return 0 at S_w 1.0 and below to 1 at 1.5 and above; 0 where there is no rank."""
    return np.clip((np.nan_to_num(values, nan=RED_FROM) - RED_FROM) / (RED_TO - RED_FROM), 0, 1)


def colours(values: Floats) -> npt.NDArray[np.uint8]:
    """Return RGB, (row, column, 3), from white to a dark red; grey where there is no rank."""
    share = redness(values)[..., None]
    white, red = np.array([255.0, 255.0, 255.0]), np.array([178.0, 24.0, 43.0])
    mixed: npt.NDArray[np.uint8] = np.rint(white + (red - white) * share).astype(np.uint8)
    mixed[np.isnan(values)] = (224, 224, 224)
    return mixed


def heat_map_svg(result: WhatIf) -> str:
    """Return the heat map as an SVG document whose cells show rank and value on hover."""
    grid = heat_grid(result)
    width, height = grid.cell_size
    num_rows, num_columns = grid.values.shape
    size = (_LEFT + max(num_columns * width, 360) + 20, _TOP + num_rows * height + 34)
    title = "Step time were all other ranks ideal, relative to all ideal (S_w)"
    subtitle = (
        f"{result.replay.layout_text}; S = {result.slowdown:.3f}, "
        f"{100 * result.waste_ratio:.1f} % of the GPU time lost"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" '
        f'viewBox="0 0 {size[0]} {size[1]}" font-family="sans-serif" font-size="12">',
        f'<rect width="{size[0]}" height="{size[1]}" fill="#ffffff"/>',
        f'<text x="10" y="20" font-size="14">{escape(title)}</text>',
        f'<text x="10" y="38" fill="#555555">{escape(subtitle)}</text>',
    ]
    parts += _axis_labels(grid)
    rgb = colours(grid.values)
    for row, column in np.argwhere(grid.ranks >= 0).tolist():
        parts.append(_cell(result, grid, (row, column), rgb[row, column].tolist()))
    parts += [_legend(_TOP + num_rows * height + 12), "</svg>"]
    return "\n".join(parts) + "\n"


def _axis_labels(grid: HeatGrid) -> list[str]:
    width, height = grid.cell_size
    every = 1 if grid.shows_values else 8
    labels = [
        f'<text x="{_LEFT + column * width + width // 2}" y="{_TOP - 6}" text-anchor="middle">'
        f"{label}</text>"
        for column, label in enumerate(grid.column_labels)
        if column % every == 0
    ]
    return labels + [
        f'<text x="{_LEFT - 8}" y="{_TOP + row * height + height // 2 + 4}" text-anchor="end">'
        f"{escape(label)}</text>"
        for row, label in enumerate(grid.row_labels)
    ]


def _cell(result: WhatIf, grid: HeatGrid, place: tuple[int, int], rgb: tuple[int, int, int]) -> str:
    row, column = place
    width, height = grid.cell_size
    x, y = _LEFT + column * width, _TOP + row * height
    value, rank = float(grid.values[place]), int(grid.ranks[place])
    name = escape(f"{_rank(result.replay, rank)}: {value:.4f}")
    rectangle = (
        f'<g><title>{name}</title><rect x="{x}" y="{y}" width="{width - 1}" '
        f'height="{height - 1}" fill="rgb{tuple(rgb)}" stroke="#cccccc"/>'
    )
    if not grid.shows_values:
        return rectangle + "</g>"
    ink = "#ffffff" if value > 1.3 else "#222222"
    return (
        f'{rectangle}<text x="{x + width // 2}" y="{y + height // 2 + 4}" text-anchor="middle" '
        f'fill="{ink}">{value:.2f}</text></g>'
    )


def _legend(y: int) -> str:
    steps = np.linspace(RED_FROM, RED_TO, 6)
    rgb = colours(steps[None, :])[0]
    boxes = [
        f'<rect x="{_LEFT + 44 * number}" y="{y}" width="43" height="12" fill="rgb{tuple(c)}" '
        f'stroke="#cccccc"/><text x="{_LEFT + 44 * number + 21}" y="{y + 10}" font-size="9" '
        f'text-anchor="middle">{value:.1f}</text>'
        for number, (value, c) in enumerate(zip(steps, rgb.tolist(), strict=True))
    ]
    return "".join(boxes)


def heat_map_png(result: WhatIf, cell_pixels: int = 24) -> bytes:
    """Return the cells of the heat map as a PNG without text: a thumbnail."""
    cells = colours(heat_grid(result).values)
    pixels = cells.repeat(cell_pixels, axis=0).repeat(cell_pixels, axis=1)
    pixels[cell_pixels - 1 :: cell_pixels] = 204
    pixels[:, cell_pixels - 1 :: cell_pixels] = 204
    return _png(pixels)


def _png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Return an 8-bit RGB image, (row, column, 3), after the PNG specification (RFC 2083)."""
    height, width, _ = pixels.shape
    lines = np.zeros((height, 1 + 3 * width), dtype=np.uint8)  # filter type 0 before each line
    lines[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    image = b"\x89PNG\r\n\x1a\n"
    data = zlib.compress(lines.tobytes(), 9)
    for chunk in (b"IHDR" + header, b"IDAT" + data, b"IEND"):
        image += struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return image


PATH_SCHEMA = 1
_MOST_WHO = 5
_MOST_STEPS = 20
_LEAST_SHOWN = 0.001


def render_path(path: CriticalPath) -> str:
    """Return what the mean step is made of, then each step, then how far to trust it."""
    mean, first, last = path.mean, path.steps[0].iteration, path.steps[-1].iteration
    lines = [
        f"An iteration takes {milliseconds(mean.length_ns)} along its critical path (mean of "
        f"{len(path.steps)}, {first} to {last}; {path.replay.layout_text}).",
        "",
        *_mean(path),
        "",
        *_steps(path),
        "",
        *_trust_in_path(path),
    ]
    return "\n".join(lines) + "\n"


def _mean(path: CriticalPath) -> Iterator[str]:
    mean, replay = path.mean, path.replay
    by_who = {
        Share.COMPUTE: {_rank(replay, rank): value for rank, value in mean.compute.items()},
        Share.TRANSFER: {link_text(link): value for link, value in mean.transfer.items()},
        Share.HOST: {_rank(replay, rank): value for rank, value in mean.host.items()},
    }
    for share, ratio in mean.shares.items():
        yield f"  {share:<9} {_percent(ratio)}  {milliseconds(ratio * mean.length_ns)}"
        yield from _who(by_who.get(share, {}))
    if mean.main_stage >= 0:
        yield (
            f"  bubble    {_percent(mean.bubble)}  of this, passes and messages of other stages "
            f"than PP{mean.main_stage}, which has most of the path and waits meanwhile"
        )


def _who(by_who: Mapping[str, float]) -> Iterator[str]:
    worth = [(who, value) for who, value in by_who.items() if value >= _LEAST_SHOWN]
    for who, value in worth[:_MOST_WHO]:
        yield f"    {_percent(value)}  {who}"
    rest = sum(by_who.values()) - sum(value for _, value in worth[:_MOST_WHO])
    if rest >= _LEAST_SHOWN:
        yield f"    {_percent(rest)}  others"


def _steps(path: CriticalPath) -> Iterator[str]:
    yield "  iteration    length  compute  transfer    host    idle  most of it"
    for step, one in list(zip(path.steps, path.makeups, strict=True))[:_MOST_STEPS]:
        shares = [_percent(one.shares[share]) for share in Share]
        yield (
            f"  {step.iteration:>9}  {milliseconds(one.length_ns):>8}  {shares[0]:>7}  "
            f"{shares[1]:>8}  {shares[2]:>6}  {shares[3]:>6}  {_largest_part(path, one)}"
        )
    if len(path.steps) > _MOST_STEPS:
        yield f"  … and {len(path.steps) - _MOST_STEPS} more (--json has all of them)"


def _largest_part(path: CriticalPath, one: Makeup) -> str:
    candidates = [(value, _rank(path.replay, rank)) for rank, value in one.compute.items()]
    candidates += [(value, link_text(link)) for link, value in one.transfer.items()]
    candidates += [(value, f"{_rank(path.replay, r)}, host") for r, value in one.host.items()]
    return max(candidates, default=(0.0, "idle"))[1]


def made_of(path: CriticalPath, step: StepPath) -> str:
    """Return what one step is made of, in a sentence."""
    one = path.makeups[path.steps.index(step)]
    parts = [f"{_percent(ratio)} {share}" for share, ratio in one.shares.items()]
    bubble = f"; {_percent(one.bubble)} is pipeline bubble" if one.main_stage >= 0 else ""
    return f"Critical path: {listed(parts)}, most of it {_largest_part(path, one)}{bubble}."


def _trust_in_path(path: CriticalPath) -> Iterator[str]:
    error = float(
        path.replay.traced_s.sum() * NS_PER_S / max(sum(s.length_ns for s in path.steps), 1)
    )
    how = "longer" if error >= 1 else "less"
    yield f"The replayed steps (megascan whatif) take {abs(error - 1):.1%} {how}."
    if abs(error - 1) > _HIGH_MODEL_ERROR:
        yield "That is much: idle time on the path is time that the trace does not explain."
    yield from (f"note: {note}" for note in path.replay.notes)


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"


def _rank(replay: Replay, rank: int) -> str:
    label = replay.labels.get(rank, "")
    return f"rank {rank} ({label})" if label else f"rank {rank}"


def link_text(link: Link) -> str:
    """Return `forward, rank 0 to rank 4` or `dp-all_reduce of ranks 0, 4 and 8`."""
    if link.is_message and len(link.ranks) == 2:
        return f"{link.op}, rank {link.ranks[0]} to rank {link.ranks[1]}"
    return f"{link.op} of {ranks_text(link.ranks)}"


def path_to_json(path: CriticalPath) -> dict[str, Json]:
    """Return everything about the paths; shares are ratios of a path's length."""
    steps = zip(path.steps, path.makeups, path.replay.traced_s.tolist(), strict=True)
    return {
        "schema": PATH_SCHEMA,
        "mean": _makeup_to_json(path.mean),
        "iterations": [
            {
                "iteration": step.iteration,
                "replayed_ns": round(replayed_s * NS_PER_S),
                **_makeup_to_json(one),
                "chain": _chain(path, step),
            }
            for step, one, replayed_s in steps
        ],
        "notes": list(path.replay.notes),
    }


def _makeup_to_json(one: Makeup) -> dict[str, Json]:
    return {
        "length_ns": round(one.length_ns),
        "shares": {str(share): value for share, value in one.shares.items()},
        "compute": {str(rank): value for rank, value in one.compute.items()},
        "transfer": [
            {
                "op": link.op,
                "ranks": list(link.ranks),
                "is_message": link.is_message,
                "ratio": ratio,
            }
            for link, ratio in one.transfer.items()
        ],
        "host": {str(rank): value for rank, value in one.host.items()},
        "bubble": one.bubble,
        "main_stage": one.main_stage,
    }


def _chain(path: CriticalPath, step: StepPath) -> Json:
    """Return the path in the order of time; times from its begin."""
    return [
        {
            "rank": piece.rank,
            "share": str(piece.share),
            "name": piece.name,
            "start_ns": piece.start_ns - step.begin_ns,
            "duration_ns": piece.end_ns - piece.start_ns,
        }
        for piece in pieces(path, step)
    ]
