"""Arguments as Megatron-LM keeps them: parsed once, strict, asked for anywhere."""

from __future__ import annotations

import argparse
from pathlib import Path

_ARGUMENTS: list[argparse.Namespace] = []


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-iters", type=int, required=True)
    parser.add_argument("--resume-from", type=int, default=0)
    parser.add_argument("--losses", type=Path, required=True)
    arguments = parser.parse_args()
    for name, value in {"tp": 1, "pp": 1, "vpp": 1, "overlap": False, "recompute": False}.items():
        setattr(arguments, name, value)
    arguments.distributed_optimizer = False
    arguments.iteration = arguments.resume_from
    _ARGUMENTS.append(arguments)
    return arguments


def get_args() -> argparse.Namespace:
    return _ARGUMENTS[-1]
