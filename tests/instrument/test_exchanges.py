"""Batches of messages in models of plain PyTorch: each message once, whatever calls do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megascan.instrument.place import Position
from megascan.instrument.plain_torch import Exchanges


class FakeTracer:
    """Keeps the names of messages."""

    def __init__(self):
        self.active = True
        self.names = []

    def mark(self):
        return 0

    def fail(self, error):
        raise error


@pytest.fixture
def tracer(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    return FakeTracer()


@pytest.fixture
def exchanges(tracer):
    def follow(tracer, work, name, begin, arguments, *, lane, keep):
        tracer.names.append(name)
        return work

    groups = SimpleNamespace(name=lambda group: "pp@0", follow=follow)
    return Exchanges(tracer, Position(), groups)


def message(op=dist.isend, peer=1):
    return SimpleNamespace(op=op, peer=peer, group=None, tensor=torch.zeros(4))


def works_of(batch):
    return [SimpleNamespace(wait=lambda: True) for _ in batch]


def test_each_message_is_recorded(exchanges, tracer):
    exchange = exchanges.batch(works_of)
    assert len(exchange([message(), message(dist.irecv)])) == 2
    assert tracer.names == ["send_forward", "recv_backward"]


def test_a_batch_within_a_batch_is_the_same(exchanges, tracer):
    inner = exchanges.batch(works_of)
    outer = exchanges.batch(inner)
    outer([message()])
    assert tracer.names == ["send_forward"]


@pytest.mark.parametrize("times", [1, 3])
def test_messages_are_recorded_after_a_batch_that_raised(exchanges, tracer, times):
    def fail(batch):
        raise RuntimeError("connection reset")

    for _ in range(times):
        with pytest.raises(RuntimeError, match="connection reset"):
            exchanges.batch(fail)([message()])
    assert tracer.names == []
    exchanges.batch(works_of)([message()])
    assert tracer.names == ["send_forward"]
