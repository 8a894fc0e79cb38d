"""Rows of a query, printed as a table."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

Cell = bool | int | float | str | bytes | None


@dataclass(frozen=True)
class Rows:
    """Result of a query: names of the columns, and one tuple a row."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def to_pandas(self) -> pd.DataFrame:
        """The same as a table."""
        return pd.DataFrame(list(self.rows), columns=list(self.columns))

    def __str__(self) -> str:
        """Aligned text: numbers to the right, texts to the left, then the number of rows."""
        texts = [[_text(cell) for cell in row] for row in self.rows]
        right = [_all_numbers(column) for column in zip(*self.rows, strict=True)]
        right = right or [False] * len(self.columns)
        lines = [list(self.columns), *texts]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        printed = ["  ".join(_cells(line, widths, right)).rstrip() for line in lines]
        count = len(self.rows)
        return "\n".join([*printed, f"({count} row{'' if count == 1 else 's'})"])


def _cells(line: list[str], widths: list[int], right: list[bool]) -> list[str]:
    return [
        text.rjust(width) if to_right else text.ljust(width)
        for text, width, to_right in zip(line, widths, right, strict=True)
    ]


def _all_numbers(column: tuple[Cell, ...]) -> bool:
    return all(cell is None or isinstance(cell, int | float) for cell in column)


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.6g}"
    if isinstance(cell, bytes):
        return cell.hex()
    return str(cell).replace("\n", " ")
