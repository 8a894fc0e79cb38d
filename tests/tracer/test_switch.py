"""Tracing on and off while the job runs: by the file, by the signal, all ranks together."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from megascan.config import TraceConfig
from megascan.errors import ConfigError
from megascan.instrument import start
from megascan.schema import Kind
from megascan.tracer.switch import SWITCH_FILE, Switch, TracingSwitched


class Notes(dict[int, str]):
    """A board in this process."""

    publish = dict.__setitem__
    read = dict.get


@pytest.fixture
def rank_switch(tmp_path: Path) -> Iterator[Callable[..., tuple[Switch, list[TracingSwitched]]]]:
    made: list[Switch] = []

    def make(board: Notes, *, decides: bool) -> tuple[Switch, list[TracingSwitched]]:
        heard: list[TracingSwitched] = []
        one = Switch(tmp_path, board, decides=decides, interval=5, announce=heard.append)  # type: ignore[arg-type]
        made.append(one)
        return one, heard

    yield make
    for one in made:
        one.close()


def pass_interval(switch: Switch, iteration: int) -> None:
    """Training has come to an iteration, and the switch has looked, as its thread would."""
    switch._iteration = iteration
    time.sleep(0.01)
    switch.look()


def test_ranks_change_at_the_same_iteration(rank_switch, tmp_path: Path) -> None:
    board = Notes()
    (first, on_first), (other, on_other) = (
        rank_switch(board, decides=one) for one in (True, False)
    )
    pass_interval(first, 1)
    pass_interval(first, 6)
    assert on_first == []
    (tmp_path / SWITCH_FILE).touch()
    pass_interval(first, 11)
    pass_interval(other, 16)
    assert on_first == on_other
    assert on_first[0].on and on_first[0].from_iteration % 5 == 1
    assert on_first[0].from_iteration > 11 + 2 * 5
    (tmp_path / SWITCH_FILE).unlink()
    pass_interval(first, 16)
    pass_interval(other, 16)
    assert [one.on for one in on_other] == [True, False] == [one.on for one in on_first]
    assert on_first[1].from_iteration >= on_first[0].from_iteration


def test_the_signal_makes_and_removes_the_file(rank_switch, tmp_path: Path) -> None:
    earlier = signal.getsignal(signal.SIGUSR2)
    switch, _ = rank_switch(Notes(), decides=True)
    switch.obey_signal()
    os.kill(os.getpid(), signal.SIGUSR2)
    assert (tmp_path / SWITCH_FILE).exists()
    os.kill(os.getpid(), signal.SIGUSR2)
    assert not (tmp_path / SWITCH_FILE).exists()
    switch.close()
    assert signal.getsignal(signal.SIGUSR2) == earlier


def test_a_tracer_records_only_while_it_is_on(make_tracer, read_rank_file) -> None:
    tracer, path = make_tracer(interval=2, window=2)
    tracer._on = False
    tracer.announce(TracingSwitched(True, 5))
    tracer.announce(TracingSwitched(False, 9))
    tracer.switch_with(SilentSwitch())
    for number in range(1, 13):
        with tracer.iteration(number), tracer.span("forward", Kind.COMPUTE):
            pass
    tracer.close()
    windows = read_rank_file(path).windows
    assert [(w["first_iteration"], w["last_iteration"]) for w in windows] == [(5, 6), (7, 8)]


class SilentSwitch(Switch):
    """One that never looks."""

    def __init__(self) -> None:
        pass

    def interval_begins(self, iteration: int) -> None:
        del iteration

    def close(self) -> None:
        pass


def test_an_armed_job_is_switched_on_while_it_runs(tmp_path: Path, read_rank_file) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = TraceConfig(enabled=True, directory=tmp_path, interval=2, window=2, armed=True)
    try:
        tracer = start(config)
        number, deadline = 0, time.monotonic() + 60
        while time.monotonic() < deadline:
            number += 1
            with tracer.iteration(number):
                time.sleep(0.02)
            if number == 10:
                (tmp_path / SWITCH_FILE).touch()
            if tracer.num_writer_steps:  # a window has been written
                break
        tracer.close()
        (path,) = tmp_path.glob("benchmark-data-*.json")
        first = read_rank_file(path).windows[0]["first_iteration"]
        assert first > 10 and first % 2 == 1
    finally:
        dist.destroy_process_group()


def test_armed_without_trace_is_refused() -> None:
    with pytest.raises(ConfigError, match="pass --trace, too"):
        TraceConfig(armed=True)
