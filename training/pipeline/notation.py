"""Plans as text: torch's CSV, one line a pipeline rank, one cell an action.

    0F0,0F1,0I0,0W0,0I1,0W1
    1F0,1I0,1F1,1I1,1W0,1W1

The sizes of the pipeline follow from what is in the file: ranks are lines, stages and microbatches
the largest numbers, and the place of the second chunk tells a loop from a V. Empty cells, which
torch writes for idle time, are skipped. A file may name sends and receives or leave them out.
"""

from __future__ import annotations

import re
from pathlib import Path

from megascan.errors import ConfigError, InputError
from training.pipeline.plan import Action, ActionKind, PipelineShape, Placement, Plan

_ACTION = re.compile(r"(\d{1,6})([A-Z_]+)(\d{1,6})")
_KINDS = {kind.value: kind for kind in ActionKind}


def format_plan(plan: Plan) -> str:
    """Return a plan as torch's CSV."""
    return "".join(",".join(map(str, listed)) + "\n" for listed in plan.actions)


def parse_plan(text: str, *, name: str = "plan") -> Plan:
    """Return the plan that a CSV describes; `name` is the file's in messages.

    Raises InputError with line and cell for what is no action, and for lines and stages that do not
    make a pipeline. Whether the plan can be carried out is a matter of `validity.check`.
    """
    lines = text.strip("\n").split("\n")
    rows = tuple(_parse_line(line, name, number) for number, line in enumerate(lines, 1))
    return Plan(name=Path(name).stem, shape=_shape_of(rows, name), actions=rows)


def read_plan(path: Path) -> Plan:
    """Read a plan from a file; InputError as `parse_plan` and for a file that cannot be read."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise InputError(
            f"{path}: no such plan; give a CSV file that megascan plan wrote"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a plan ({error})") from error
    return parse_plan(text, name=str(path))


def _parse_line(line: str, name: str, number: int) -> tuple[Action, ...]:
    cells = [cell.strip() for cell in line.split(",")]
    return tuple(
        _parse_cell(cell, f"{name}, line {number}, cell {position}")
        for position, cell in enumerate(cells, 1)
        if cell
    )


def _parse_cell(cell: str, where: str) -> Action:
    match = _ACTION.fullmatch(cell)
    kind = _KINDS.get(match[2]) if match else None
    if match is None or kind is None:
        raise InputError(
            f"{where}: {cell[:40]!r} is no action; expected stage, kind, microbatch as in 0F3, "
            f"kinds {' '.join(_KINDS)}"
        )
    return Action(kind, int(match[1]), int(match[3]))


def _shape_of(rows: tuple[tuple[Action, ...], ...], name: str) -> PipelineShape:
    """Return sizes of the pipeline that these lists are for."""
    empty = next((number for number, row in enumerate(rows, 1) if not row), None)
    if empty is not None:
        raise InputError(f"{name}, line {empty}: no action; each line is one pipeline rank's list")
    num_ranks = len(rows)
    num_stages = 1 + max(action.stage for row in rows for action in row)
    if num_stages % num_ranks:
        raise InputError(
            f"{name}: {num_stages} stages on {num_ranks} lines; the stages must be a multiple of "
            "the pipeline ranks, one line each"
        )
    try:
        return PipelineShape(
            num_ranks=num_ranks,
            num_chunks=num_stages // num_ranks,
            num_microbatches=1 + max(action.microbatch for row in rows for action in row),
            placement=_placement(rows, num_stages),
        )
    except ConfigError as error:
        raise InputError(f"{name}: {error}") from error


def _placement(rows: tuple[tuple[Action, ...], ...], num_stages: int) -> Placement:
    """Return a V where the first stage of the second chunk lies on the last rank."""
    num_ranks = len(rows)
    turned = num_stages == 2 * num_ranks and any(a.stage == num_ranks for a in rows[-1])
    return Placement.V if turned and num_ranks > 1 else Placement.LOOP
