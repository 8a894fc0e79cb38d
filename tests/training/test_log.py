"""The log line, floating-point operations, callbacks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from megascan.errors import OutputError
from training.arguments import parse_settings, resolve_sizes
from training.callback import Callback, Callbacks
from training.log import LogLine, TrainingLog, iteration_flops, memory_line

LOG_LINE = LogLine(
    iteration=100,
    train_iters=500000,
    consumed_samples=25600,
    iteration_ms=1234.56,
    tflops_per_gpu=412.34,
    learning_rate=1.5e-4,
    global_batch_size=256,
    loss=6.54321,
    loss_scale=1.0,
    grad_norm=1.2345,
    num_skipped=0,
    num_nan=0,
)


def test_the_line_is_megatrons(log_line: re.Pattern[str]) -> None:
    assert LOG_LINE.format() == (
        "iteration      100/  500000 | consumed samples:        25600 | "
        "elapsed time per iteration (ms): 1234.6 | throughput per GPU (TFLOP/s/GPU): 412.3 | "
        "learning rate: 1.500000E-04 | global batch size:   256 | lm loss: 6.543210E+00 | "
        "loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 | "
        "number of nan iterations:   0 |"
    )
    assert log_line.fullmatch(LOG_LINE.format())


def test_what_is_not_known_is_left_out() -> None:
    text = replace(LOG_LINE, loss=None, grad_norm=None).format()
    assert "lm loss" not in text
    assert "grad norm" not in text


def test_small_throughput_keeps_its_digits() -> None:
    text = replace(LOG_LINE, tflops_per_gpu=0.00123).format()
    assert re.search(r"GPU\): 0\.001230 ", text)


FLAGS = (
    "--num-layers 2 --hidden-size 8 --ffn-hidden-size 16 --num-attention-heads 2 --seq-length 4 "
    "--micro-batch-size 1 --train-iters 1 --lr 1 "
)


@pytest.mark.parametrize(
    ("flags", "per_token"),
    [
        # A layer: query, key, value, output 4 x 2 x 8 x 8; scores 2 x 4 x 8; MLP 2 x 2 x 8 x 16.
        ("", 2 * (512 + 64 + 512) + 2 * 8 * 10),
        ("--swiglu", 2 * (512 + 64 + 768) + 160),
        ("--group-query-attention --num-query-groups 1", 2 * (384 + 64 + 512) + 160),
        ("--num-experts 4 --moe-router-topk 2 --disable-bias-linear", 2 * (512 + 64 + 1024) + 160),
    ],
)
def test_flops_of_a_small_model_by_hand(flags: str, per_token: float) -> None:
    settings = parse_settings((FLAGS + flags).split())
    sizes = resolve_sizes(settings, 3)
    tokens = 3 * 4
    assert iteration_flops(settings, sizes, padded_vocab_size=10) == 3 * per_token * tokens


def test_a_folder_for_events_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = parse_settings((FLAGS + f"--tensorboard-dir {tmp_path / 'file' / 'x'}").split())
    with pytest.raises(OutputError, match="give another --tensorboard-dir"):
        TrainingLog(settings, resolve_sizes(settings, 1), 10, 0, None)


class Recorder(Callback):
    """Writes down what surrounds what."""

    def __init__(self, name: str, events: list[str]) -> None:
        self._name = name
        self._events = events

    @contextmanager
    def iteration(self, iteration: int) -> Iterator[None]:
        self._events.append(f"{self._name} begins {iteration}")
        try:
            yield
        finally:
            self._events.append(f"{self._name} ends")


def test_the_first_callback_is_the_outermost_also_on_errors() -> None:
    events: list[str] = []
    callbacks = Callbacks([Recorder("a", events), Recorder("b", events)])
    with pytest.raises(ZeroDivisionError), callbacks.iteration(7):
        raise ZeroDivisionError
    assert events == ["a begins 7", "b begins 7", "b ends", "a ends"]


@pytest.mark.parametrize("moment", ["training", "loading", "optimizer"])
def test_moments_nobody_cares_about_pass(moment: str) -> None:
    with getattr(Callbacks([Callback()]), moment)():
        pass


def test_memory_is_said_in_megatrons_words() -> None:
    line = memory_line(3, 10)
    assert re.fullmatch(r"\[Rank 3\] \(after 10 iterations\) memory \(MB\) \| .*: [\d.]+", line)
    assert float(line.rpartition(" ")[2]) > 1
