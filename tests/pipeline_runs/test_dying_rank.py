"""A rank that dies in mid-step ends the job soon, and the others do not add to the noise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import ranks

FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 60 --make-vocab-size-divisible-by 16
    --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1
    --lr 5e-3 --train-iters 5 --log-interval 1 --num-workers 0 --eval-iters 0
    --distributed-backend gloo --distributed-timeout-minutes 3 --global-batch-size 4
    --pipeline-model-parallel-size 2 --use-dpp --dpp-choice guided
"""


@pytest.mark.distributed
@pytest.mark.timeout(200)
def test_the_others_end_in_silence() -> None:
    program = Path(__file__).with_name("dying_rank.py")
    done = ranks.run(program, *FLAGS.split(), num_ranks=2, timeout_s=150, python=ranks.warm())
    assert done.returncode != 0
    assert "iteration        1/" in done.stdout
    assert "iteration        3/" not in done.stdout
    assert "exitcode  : 7" in done.stderr
    assert "[rank0]" not in done.stderr  # how torch marks a traceback
