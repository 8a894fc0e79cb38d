"""Starting the real trainer in real processes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import ranks

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
Start = Callable[[int, Sequence[str]], "subprocess.Popen[str]"]


@pytest.fixture
def launch() -> Launch:
    """Run the trainer on some ranks; one rank needs no launcher."""

    def start(num_ranks: int, flags: Sequence[str], *, timeout_s: int = 200) -> Finished:
        words = ("-m", "training.pretrain_gpt", *flags)
        done = ranks.run(*words, num_ranks=num_ranks, timeout_s=timeout_s)
        return Finished(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)

    return start


@pytest.fixture
def under_way() -> Iterator[Start]:
    """Start the trainer; return its launcher, the ranks' parent. What is left of it is ended."""
    started: list[subprocess.Popen[str]] = []

    def start(num_ranks: int, flags: Sequence[str]) -> subprocess.Popen[str]:
        words = ("-m", "training.pretrain_gpt", *flags)
        process = ranks.start(*words, num_ranks=num_ranks, own_launcher=True)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()  # the launcher ends its ranks
            process.wait(60)
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture
def plain_loop() -> Callable[[], list[str]]:
    """Run the plain loop of `plain_loop.py` on two ranks; gives loss and norm of each iteration."""

    def start() -> list[str]:
        done = ranks.run(Path(__file__).with_name("plain_loop.py"), num_ranks=2, check=True)
        return re.findall(r"lm loss: (\S+) grad norm: (\S+)", done.stdout)

    return start


@pytest.fixture
def tiny() -> list[str]:
    """Flags of a model of four small layers."""
    return TINY_MODEL.split()


@pytest.fixture
def log_line() -> re.Pattern[str]:
    """The pattern of a log line."""
    return LINE
