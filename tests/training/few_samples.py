"""One rank of `benchmarks.losses_ranks` whose made-up data are few documents.

Megatron-Core's hundred thousand are shuffled anew by every rank of every run.
"""

from __future__ import annotations

import sys

from benchmarks.losses_ranks import main
from megascan.errors import report_errors

NUM_DOCUMENTS = 300


def run() -> int:
    """Train the runs of the plan."""
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    MockGPTLowLevelDataset.size = NUM_DOCUMENTS
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(report_errors(run))
