"""A helper that is no help: ``odd_helper.py dies|lies|dawdles --join HOST:PORT``.

After a few forwards it dies in the middle of a step, or hands over wrong numbers, or takes seconds
for each.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from training import helper

if TYPE_CHECKING:
    import torch

GOOD_FORWARDS = 3
"""Of stages; a step of one microbatch on two stages has two."""
DAWDLE_S = 3.0


def main(mischief: str, *arguments: str) -> int:
    """Be an odd helper."""
    honest, count = helper.forward, 0

    def odd(*given: object) -> torch.Tensor:
        nonlocal count
        count += 1
        output = honest(*given)
        if count <= GOOD_FORWARDS:
            return output
        if mischief == "dies":
            os._exit(9)
        if mischief == "dawdles":
            time.sleep(DAWDLE_S)
        return output * 1.001 if mischief == "lies" else output

    helper.forward = odd
    return helper.main(arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
