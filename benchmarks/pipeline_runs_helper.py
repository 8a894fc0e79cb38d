"""A helper of `benchmarks.pipeline_runs`, whose forwards are slept like those of its ranks.

python -m benchmarks.pipeline_runs_helper FORWARD_S DIES_AFTER --join HOST:PORT
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megascan.errors import report_errors
from training import helper

if TYPE_CHECKING:
    import torch


def main(forward_s: float, dies_after: int, arguments: Sequence[str]) -> int:
    """Help a job; every forward of a stage takes `forward_s`."""
    original, count = helper.forward, 0

    def slept(*given: object) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == dies_after:
            os._exit(9)
        begin_s = time.perf_counter()
        output = original(*given)  # type: ignore[arg-type]
        time.sleep(max(0.0, forward_s - (time.perf_counter() - begin_s)))
        return output

    helper.forward = slept  # type: ignore[assignment]
    return helper.main(arguments)


if __name__ == "__main__":
    own, died = float(sys.argv[1]), int(sys.argv[2])
    sys.exit(report_errors(lambda: main(own, died, sys.argv[3:])))
