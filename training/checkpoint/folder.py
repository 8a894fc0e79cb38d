"""Checkpoints on the disk: their names, which is the newest, and how one gets its name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from megascan.errors import InputError, OutputError

LATEST_FILE = "latest_checkpointed_iteration.txt"


def checkpoint_folder(folder: Path, iteration: int) -> Path:
    """The folder of an iteration's checkpoint."""
    return folder / f"iter_{iteration:07d}"


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of a folder; None when there is none yet."""
    latest = folder / LATEST_FILE
    try:
        iteration = int(latest.read_text().strip())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read an iteration from {latest} ({error}); mend it") from error
    found = checkpoint_folder(folder, iteration)
    if not found.is_dir():
        raise InputError(f"{latest} names {found.name}, which is not there; mend it")
    return found


def make_empty(folder: Path) -> None:
    """Make an empty folder, in place of what an interrupted run left; raises OutputError."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise OutputError(f"cannot write a checkpoint to {folder} ({error})") from error


def publish(partial: Path, final: Path, iteration: int) -> None:
    """Give the complete checkpoint its name, then point to it."""
    if final.exists():
        replaced = final.with_name(final.name + ".replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
        partial.rename(final)
        shutil.rmtree(replaced)
    else:
        partial.rename(final)
    latest = final.parent / LATEST_FILE
    temporary = latest.with_name(latest.name + ".partial")
    with temporary.open("w") as file:
        file.write(f"{iteration}\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(latest)
