"""The trainer's flags, their groups, and the check that they fit together.

Owns every flag of the trainer itself, and the sizes that follow. Fed by a command line; hands
`Settings` (what was asked for) and `Sizes` (complete, checked) to all other rooms.

    settings.py       the groups of flags, and how a dataclass becomes flags: start reading here,
                      add a flag to its group
    sizes.py          the rules between flags; sizes that are derived from flags
"""

from training.arguments.settings import (
    Settings,
    TrainerParser,
    build_parser,
    parse_settings,
    read_settings,
)
from training.arguments.sizes import Sizes, idle_flags, resolve_sizes

__all__ = [
    "Settings",
    "Sizes",
    "TrainerParser",
    "build_parser",
    "idle_flags",
    "parse_settings",
    "read_settings",
    "resolve_sizes",
]
