"""The trainer's flags, their groups, and the check that they fit together."""

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
