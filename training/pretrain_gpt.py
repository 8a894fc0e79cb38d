"""Train a GPT on Megatron-Core.

    torchrun --nproc-per-node 4 -m training.pretrain_gpt --mock-data
        --tokenizer-type NullTokenizer --vocab-size 1000
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
        --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64
        --micro-batch-size 1 --global-batch-size 8 --train-iters 20 --lr 1e-3

Flags have Megatron-LM's names and defaults. Without GPUs it trains on the CPU over gloo.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megascan.errors import MegaScanError
from training.distributed import (
    ONLY_RANK,
    Launch,
    carry_out,
    end_on_interrupt,
    end_on_shared_error,
    read_launch,
)


def main(arguments: Sequence[str]) -> int:
    """Train; return the exit code."""
    launch = ONLY_RANK
    try:
        launch = read_launch(os.environ)
        return _train(arguments, launch)
    except MegaScanError as error:
        return end_on_shared_error(launch, error)
    except KeyboardInterrupt:
        return end_on_interrupt(launch)


def _train(arguments: Sequence[str], launch: Launch) -> int:
    from training.job import parse_job  # heavy; Ctrl-C is heard by then

    job = parse_job(arguments, launch)
    return carry_out(launch, job.run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
