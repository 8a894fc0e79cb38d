"""Writing down which faults were planted, for whoever checks a verdict; no analysis reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from megascan.errors import OutputError
from training.faults.spec import FaultSpec

FILE_NAME = "ground-truth.json"


def write_ground_truth(
    folder: Path, run_id: str | None, world_size: int, faults: Sequence[FaultSpec]
) -> Path:
    """Write ``ground-truth.json`` beside the rank files; an earlier run's is set aside.

    Without faults it says so, so that no earlier run's file is taken for this one's. Raises
    OutputError when the folder cannot be written.
    """
    path = folder / FILE_NAME
    truth = {
        "schema": 1,
        "run_id": run_id,
        "world_size": world_size,
        "faults": [_record(fault) for fault in faults],
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _set_aside(path)
        path.write_text(json.dumps(truth, indent=2) + "\n")
    except OSError as error:
        raise OutputError(f"cannot write {path} ({error}); give another --trace-dir") from error
    return path


def _record(fault: FaultSpec) -> dict[str, object]:
    """One fault; what does not apply is left out."""
    values: dict[str, object | None] = {
        "rank": fault.rank,
        "kind": str(fault.kind),
        "factor": fault.factor,
        "delay_ms": fault.delay_ms,
        "peer": fault.peer,
        "first_iteration": fault.first_iteration,
        "last_iteration": fault.last_iteration,
    }
    return {name: value for name, value in values.items() if value is not None}


def _set_aside(path: Path) -> None:
    """Move an earlier run's file into a folder named by its run id, as rank files are."""
    if not path.exists():
        return
    try:
        run_id = str(json.loads(path.read_text())["run_id"])
    except (ValueError, KeyError, TypeError):
        run_id = "unknown-run"
    target = path.parent / run_id / FILE_NAME
    target.parent.mkdir(exist_ok=True)
    number = 1
    while target.exists():
        number += 1
        target = target.with_name(f"ground-truth.{number}.json")
    path.rename(target)
