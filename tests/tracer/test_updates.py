"""The optimizer's step: what counts as it where a closure computes the gradients inside it."""

from __future__ import annotations

import time

import pytest
import torch

from megascan.instrument.updates import Updates
from megascan.schema import Kind

CLOSURE_S = 0.05


@pytest.fixture
def traced(make_tracer, read_rank_file):
    """Trace what a function does in an iteration; the spans of the file."""

    def trace(act):
        tracer, path = make_tracer()
        updates = Updates(tracer)
        updates.watch_torch()
        tracer.listen(updates)
        with tracer.iteration(1):
            act(tracer)
        tracer.close()
        return read_rank_file(path)

    return trace


def weight_and(optimizer, **options):
    weight = torch.nn.Parameter(torch.ones(4))
    return weight, optimizer([weight], **options)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(torch.optim.AdamW, {}), (torch.optim.SGD, {"lr": 0.1}), (torch.optim.LBFGS, {"max_iter": 2})],
)
def test_a_step_begins_behind_its_closure(traced, optimizer, options, by_name):
    weight, stepping = weight_and(optimizer, **options)
    losses = []

    def act(tracer):
        def closure():
            with tracer.span("forward", Kind.COMPUTE):
                time.sleep(CLOSURE_S)
            stepping.zero_grad()
            loss = (weight**2).sum()
            loss.backward()
            return loss

        losses.append(stepping.step(closure=closure) if by_name else stepping.step(closure))

    file = traced(act)
    (step,) = file.named("optimizer")
    passes = file.named("forward")
    assert step["dur"] < 0.5e6 * CLOSURE_S
    assert all(one["ts"] + one["dur"] <= step["ts"] for one in passes) and passes
    assert losses == [4.0]
    assert not torch.equal(weight, torch.ones(4))


def test_a_step_without_a_closure_is_whole(traced):
    weight, stepping = weight_and(torch.optim.AdamW)

    def act(tracer):
        weight.grad = torch.ones(4)
        stepping.step()

    assert len(traced(act).named("optimizer")) == 1


def test_an_error_in_a_closure_reaches_its_trainer(traced):
    _, stepping = weight_and(torch.optim.AdamW)

    def closure():
        raise ValueError("of the trainer's own")

    def act(tracer):
        with pytest.raises(ValueError, match="of the trainer's own"):
            stepping.step(closure)

    assert traced(act).named("optimizer") == []
