"""A helper that is no help: ``odd_helper.py dies|lies|dawdles --join HOST:PORT``.

It dies in the middle of its second step, hands over wrong numbers from its second step on, or takes
half a second for each forward from then on.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from training import helper

if TYPE_CHECKING:
    import torch

SECOND_STEP = 6
"""Forwards of stages after which the second step has begun: a step has more than so many."""


def main(mischief: str, *arguments: str) -> int:
    """Be an odd helper."""
    honest, count = helper.forward, 0

    def odd(*given: object) -> torch.Tensor:
        nonlocal count
        count += 1
        output = honest(*given)
        if count > SECOND_STEP and mischief == "dies":
            os._exit(9)
        if count > SECOND_STEP and mischief == "dawdles":
            time.sleep(0.5)
        return output * 1.001 if count > SECOND_STEP and mischief == "lies" else output

    helper.forward = odd
    return helper.main(arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
