"""Starting the real trainer in real processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

TINY_MODEL = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 60 --make-vocab-size-divisible-by 16
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1
    --global-batch-size 4 --lr 5e-3 --log-interval 1 --num-workers 0 --distributed-backend gloo
"""

LINE = re.compile(
    r"iteration +(?P<iteration>\d+)/ +\d+ \| consumed samples: +(?P<samples>\d+) \| "
    r"elapsed time per iteration \(ms\): (?P<ms>[\d.]+) \| "
    r"throughput per GPU \(TFLOP/s/GPU\): (?P<tflops>[\d.]+) \| "
    r"learning rate: (?P<lr>\d\.\d{6}E[+-]\d\d) \| global batch size: +(?P<batch>\d+) \| "
    r"lm loss: (?P<loss>\d\.\d{6}E[+-]\d\d) \| loss scale: (?P<scale>[\d.]+) \| "
    r"grad norm: (?P<norm>[\d.]+) \| number of skipped iterations: +(?P<skipped>\d+) \| "
    r"number of nan iterations: +(?P<nan>\d+) \|"
)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A run that is over."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def losses(self) -> dict[int, float]:
        """Loss of each logged iteration."""
        lines = LINE.finditer(self.stdout)
        return {int(line["iteration"]): float(line["loss"]) for line in lines}


Launch = Callable[..., Finished]


@pytest.fixture
def launch() -> Launch:
    """Run the trainer on some ranks; one rank needs no launcher."""

    def start(num_ranks: int, flags: Sequence[str], *, timeout_s: int = 200) -> Finished:
        command = [sys.executable]
        if num_ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(num_ranks)]
        command += ["-m", "training.pretrain_gpt", *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip
        return Finished(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)

    return start


@pytest.fixture
def tiny() -> list[str]:
    """Flags of a model of four small layers."""
    return TINY_MODEL.split()


@pytest.fixture
def log_line() -> re.Pattern[str]:
    """The pattern of a log line."""
    return LINE
