"""A name says one thing: two modules share it only where they mean the same."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("megascan", "aggregate", "detect", "megascope", "training")
COMMANDS = ROOT / "megascan" / "cli"
"""A command's file is named as it is typed, and so is the module that does its work."""

MEAN_THE_SAME = {
    "bursts": "slowness shorter than an iteration: its search, the numbers that decide",
    "comparison": "of two traces: the room, the numbers that decide",
    "compute": "slow computing: planted as a fault, found as a cause",
    "hosts": "hosts as units: their search, the numbers that decide",
    "job": "one whole job: simulated, trained, generating",
    "networks": "NICs, rails, switches: their search, the numbers that decide",
    "request": "what somebody asks for, checked: of MegaScope, of the engine",
    "scope": "what MegaScope is lent: by the trainer, by the server",
    "tracer": "the room, and its main module",
}


def shared_names() -> dict[str, list[str]]:
    """Return names of more than one module or room, without commands, and who has them."""
    owners = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            room = path.parent if path.name == "__init__.py" else path.with_suffix("")
            if path.parent != COMMANDS and path.name != "__main__.py":
                owners[room.name].append(str(path.relative_to(ROOT)))
    return {name: paths for name, paths in owners.items() if len(paths) > 1}


def test_modules_of_one_name_mean_the_same() -> None:
    unexplained = {name: at for name, at in shared_names().items() if name not in MEAN_THE_SAME}
    assert not unexplained, "rename one of each, or say in MEAN_THE_SAME what both mean"


def test_what_is_explained_is_still_there() -> None:
    """Nothing is excused in advance."""
    assert MEAN_THE_SAME.keys() <= shared_names().keys(), "take the line out of MEAN_THE_SAME"
