"""The trainer on a rank that dies in the middle of its second step: ``dying_rank.py FLAGS``."""

from __future__ import annotations

import os
import sys

from training import pretrain_gpt
from training.pipeline import executor

ACTIONS_OF_A_LIFE = 20
"""A step of four microbatches has twelve, where backward passes are split."""


def main() -> int:
    """Train; rank 1 ends without a word."""
    do, count = executor.Step.do, 0

    def mortal(step: executor.Step, action: executor.Action) -> None:
        nonlocal count
        count += 1
        if count == ACTIONS_OF_A_LIFE and os.environ["RANK"] == "1":
            os._exit(7)
        do(step, action)

    executor.Step.do = mortal
    return pretrain_gpt.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
