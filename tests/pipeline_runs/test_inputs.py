"""What helpers bring, in one process: frames, strangers at the door, and inputs that come twice."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import torch

from megascan.errors import InputError
from training.pipeline.helped import Inputs
from training.pipeline.reception import (
    Connection,
    Frame,
    FrameKind,
    Reception,
    bytes_of,
    read_frame,
    tensor_of,
    write_frame,
)

PATIENCE_S = 20.0
"""Longer than a loaded machine needs; nothing waits for so long unless it is broken."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_keeps_its_bits_on_the_way(dtype: torch.dtype) -> None:
    sent = torch.randn(3, 1, 4).to(dtype).transpose(0, 2)
    one, other = socket.socketpair()
    write_frame(one, Frame(FrameKind.INPUT, bytes_of(sent), 7, 2))
    frame = read_frame(other)
    assert (frame.kind, frame.step, frame.microbatch) == (FrameKind.INPUT, 7, 2)
    assert torch.equal(tensor_of(frame.body, (4, 1, 3), dtype), sent)
    with pytest.raises(InputError, match=r"bytes where .* were expected"):
        tensor_of(frame.body, (5, 1, 3), dtype)


def test_a_broken_connection_says_so_once_and_takes_what_is_sent() -> None:
    pair = _tcp_pair()
    lost = threading.Event()
    calls: list[int] = []
    connection = Connection(pair[0])
    connection.start(lambda frame: None, lambda: (calls.append(1), lost.set())[1])
    pair[1].close()
    assert lost.wait(PATIENCE_S)
    for _ in range(100):
        connection.send(Frame(FrameKind.BATCH, b"x" * 100_000))
    assert not connection.is_open
    assert calls == [1]


def test_strangers_at_the_door_harm_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    heard: list[tuple[int, FrameKind]] = []
    arrived = threading.Event()

    def receive(number: int, frame: Frame) -> None:
        heard.append((number, frame.kind))
        arrived.set()

    door = Reception({"num_layers": 2, "shapes": []}, receive)
    door.describe = lambda number: {"number": number}
    for nonsense in (b"", b"GET / HTTP/1.1\r\n\r\n" * 3, b"\x63" * 40):
        with socket.create_connection(door.address) as end:
            end.sendall(nonsense)
    with socket.create_connection(door.address) as end:
        write_frame(end, Frame(FrameKind.JOIN))
        assert read_frame(end).said() == {"number": 0}
    with socket.create_connection(door.address) as end:
        write_frame(end, Frame.of(FrameKind.HELLO, {"number": 0}))
        assert read_frame(end).said() == {"num_layers": 2, "shapes": []}
        write_frame(end, Frame(FrameKind.READY))
        assert arrived.wait(PATIENCE_S)
        assert heard == [(0, FrameKind.READY)]
        assert list(door.open_numbers()) == [0]
        door.close()
        with pytest.raises((EOFError, OSError)):
            read_frame(end)
    assert list(door.open_numbers()) == []


def test_the_first_copy_of_an_input_is_used_and_the_second_compared() -> None:
    liars: list[tuple[int, int]] = []
    inputs = Inputs("cpu", lambda helper, microbatch: liars.append((helper, microbatch)))
    inputs.begin(1)
    one = torch.arange(4.0)
    inputs.bring(1, 0, one, 5)
    assert torch.equal(inputs.take(0), one)
    inputs.bring(1, 0, one.clone(), None)
    inputs.bring(1, 1, one, None)
    inputs.bring(1, 1, one.clone(), 5)
    assert torch.equal(inputs.take(1), one)
    assert not liars
    inputs.bring(1, 2, one, 5)
    inputs.bring(1, 2, torch.nextafter(one, one + 1), None)
    assert liars == [(5, 2)]


def test_what_belongs_to_another_step_is_kept_or_forgotten() -> None:
    inputs = Inputs("cpu", lambda helper, microbatch: None)
    inputs.begin(3)
    inputs.bring(2, 0, torch.zeros(1), 0)
    inputs.bring(4, 0, torch.ones(1), 0)
    inputs.begin(4)
    assert inputs.take(0).item() == 1.0
    assert str(inputs) == "inputs there: none"


def test_who_waits_is_told_when_the_stage_before_is_gone() -> None:
    inputs = Inputs("cpu", lambda helper, microbatch: None)
    inputs.begin(1)
    threading.Timer(0.1, inputs.fail, [RuntimeError("Connection closed by peer")]).start()
    began_s = time.monotonic()
    with pytest.raises(RuntimeError, match="closed by peer"):
        inputs.take(0)
    assert time.monotonic() - began_s < PATIENCE_S


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]
