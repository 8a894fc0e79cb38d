"""Heat map of ranks by stage and DP rank: a small SVG writer and a smaller PNG writer.

Rows are pipeline stages (and the TP and CP ranks in them), columns DP ranks; the colour of a cell
is the rank's exact S_w, white at 1.0 to red at 1.5 and above.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from html import escape

import numpy as np
import numpy.typing as npt

from detect.whatif.graph import Floats
from detect.whatif.metrics import WhatIf

RED_FROM, RED_TO = 1.0, 1.5
_MOST_LABELLED_COLUMNS = 40
_CELL_WIDTH, _CELL_HEIGHT = 56, 26
_SMALL_CELL = 12
_LEFT, _TOP = 110, 64


@dataclass(frozen=True, kw_only=True)
class HeatGrid:
    """Cells as (row, column), NaN where there is no rank; `ranks` alike, -1 where none."""

    values: Floats
    ranks: npt.NDArray[np.int64]
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]

    @property
    def shows_values(self) -> bool:
        """Whether there is room for numbers."""
        return len(self.column_labels) <= _MOST_LABELLED_COLUMNS


def heat_grid(result: WhatIf) -> HeatGrid:
    """Arrange the ranks of a result."""
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
    """0 at S_w 1.0 and below to 1 at 1.5 and above; 0 where there is no rank."""
    return np.clip((np.nan_to_num(values, nan=RED_FROM) - RED_FROM) / (RED_TO - RED_FROM), 0, 1)


def colours(values: Floats) -> npt.NDArray[np.uint8]:
    """RGB of each cell, (row, column, 3): white to a dark red; grey where there is no rank."""
    share = redness(values)[..., None]
    white, red = np.array([255.0, 255.0, 255.0]), np.array([178.0, 24.0, 43.0])
    mixed: npt.NDArray[np.uint8] = np.rint(white + (red - white) * share).astype(np.uint8)
    mixed[np.isnan(values)] = (224, 224, 224)
    return mixed


def heat_map_svg(result: WhatIf) -> str:
    """The heat map as an SVG document; every cell says its rank and value when pointed at."""
    grid = heat_grid(result)
    width, height = _cell_size(grid)
    num_rows, num_columns = grid.values.shape
    size = (_LEFT + max(num_columns * width, 360) + 20, _TOP + num_rows * height + 34)
    title = "Step time were all other ranks ideal, relative to all ideal (S_w)"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" '
        f'viewBox="0 0 {size[0]} {size[1]}" font-family="sans-serif" font-size="12">',
        f'<rect width="{size[0]}" height="{size[1]}" fill="#ffffff"/>',
        f'<text x="10" y="20" font-size="14">{escape(title)}</text>',
        f'<text x="10" y="38" fill="#555555">{escape(_subtitle(result))}</text>',
    ]
    parts += _axis_labels(grid, width, height)
    rgb = colours(grid.values)
    for row, column in np.ndindex(grid.values.shape):
        if grid.ranks[row, column] >= 0:
            parts.append(_cell(result, grid, (row, column), rgb[row, column].tolist()))
    parts.append(_legend(_TOP + num_rows * height + 12))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _cell_size(grid: HeatGrid) -> tuple[int, int]:
    return (_CELL_WIDTH, _CELL_HEIGHT) if grid.shows_values else (_SMALL_CELL, _SMALL_CELL)


def _subtitle(result: WhatIf) -> str:
    return (
        f"{result.replay.layout_text}; S = {result.slowdown:.3f}, "
        f"{100 * result.waste_ratio:.1f} % of the GPU time lost"
    )


def _axis_labels(grid: HeatGrid, width: int, height: int) -> list[str]:
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
    width, height = _cell_size(grid)
    x, y = _LEFT + column * width, _TOP + row * height
    value, rank = float(grid.values[place]), int(grid.ranks[place])
    name = escape(f"rank {rank} ({result.replay.labels.get(rank, '')}): {value:.4f}")
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
    """The cells of the heat map as a PNG, without text: a thumbnail for where SVG is not shown."""
    cells = colours(heat_grid(result).values)
    pixels = cells.repeat(cell_pixels, axis=0).repeat(cell_pixels, axis=1)
    pixels[cell_pixels - 1 :: cell_pixels] = 204
    pixels[:, cell_pixels - 1 :: cell_pixels] = 204
    return _png(pixels)


def _png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """An 8-bit RGB image, (row, column, 3), after the PNG specification (RFC 2083)."""
    height, width, _ = pixels.shape
    lines = np.zeros((height, 1 + 3 * width), dtype=np.uint8)  # filter type 0 before each line
    lines[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_png_chunk(name, data) for name, data in chunks)


def _png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
