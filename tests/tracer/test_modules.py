"""Forward and backward spans of modules in a small network of plain torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megascan.instrument.megatron import BackwardSpans, Modules, Passes
from megascan.instrument.place import Position
from megascan.instrument.updates import Updates

NUM_LAYERS = 3


class Linear(torch.nn.Module):
    """Returns its bias beside its output, as megatron.core's modules do."""

    def __init__(self, size=8):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(size, size))
        self.bias = torch.nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return x @ self.weight, self.bias


class Layer(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        self.layer_number = number
        self.inner = Linear()

    def forward(self, x):
        output, bias = self.inner(x.relu())
        return x + output + bias


class Network(torch.nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        torch.manual_seed(7)
        self.layers = torch.nn.ModuleList(Layer(number + 1) for number in range(NUM_LAYERS))
        self.recompute = recompute

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self.recompute else layer(x)
        return x


class Traced:
    """`Layer` and `Linear` wrapped, with the schedule's forward and backward around them."""

    def __init__(self, tracer, monkeypatch):
        position = Position()
        spans = BackwardSpans(tracer, position)
        modules = Modules(tracer, position, spans)
        passes = Passes(tracer, position, spans, Updates(tracer))
        tracer.listen(position)
        tracer.listen(spans)
        for name, owner in (("layer", Layer), ("inner", Linear)):
            monkeypatch.setattr(owner, "forward", modules.forward_of(name, owner.forward))

        class Config:
            finalize_model_grads_func = None

        def forward_step(model, data_iterator, input_tensor, config, current_microbatch=None):
            return model(input_tensor), torch.zeros(())

        def backward_step(output_tensor, output_tensor_grad):
            torch.autograd.backward(output_tensor, output_tensor_grad)

        forward, backward = passes.forward_step(forward_step), passes.backward_step(backward_step)

        def step(model, x, microbatch=0):
            output, _ = forward(model, None, x, Config(), current_microbatch=microbatch)
            backward(output, torch.ones_like(output))

        def evaluate(model, x):
            with torch.no_grad():
                forward(model, None, x, Config(), current_microbatch=0)

        self.step, self.evaluate = step, evaluate


def gradients(model, step):
    x = torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_()
    step(model, x)
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


def plain_step(model, x):
    output = model(x)
    torch.autograd.backward(output, torch.ones_like(output))


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_bit_identical(make_tracer, monkeypatch, recompute):
    expected = gradients(Network(recompute), plain_step)
    tracer, _ = make_tracer()
    traced = Traced(tracer, monkeypatch)
    with tracer.iteration(1):
        found = gradients(Network(recompute), traced.step)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@pytest.mark.parametrize("recompute", [False, True])
def test_each_module_once_per_pass_in_the_right_order(
    make_tracer, monkeypatch, read_rank_file, recompute
):
    tracer, path = make_tracer()
    traced = Traced(tracer, monkeypatch)
    with tracer.iteration(1):
        gradients(Network(recompute), traced.step)
    tracer.close()
    file = read_rank_file(path)
    suffixes = ["", "-backward", *(["-recompute"] if recompute else [])]
    for name in ("layer", "inner"):
        for suffix in suffixes:
            spans = sorted(file.named(name + suffix), key=lambda span: span["ts"])
            forward = list(range(1, NUM_LAYERS + 1))
            expected = forward if suffix == "" else forward[::-1]
            assert [span["args"]["layer"] for span in spans] == expected
    backward = sorted(file.named("layer-backward"), key=lambda span: span["ts"])
    for earlier, later in itertools.pairwise(backward):
        assert earlier["ts"] + earlier["dur"] <= later["ts"] + 0.001  # one layer after the other


def test_no_hook_stays_on_a_weight(make_tracer, monkeypatch):
    tracer, _ = make_tracer()
    traced = Traced(tracer, monkeypatch)
    model = Network(recompute=True)
    with tracer.iteration(1):
        gradients(model, traced.step)
    assert all(not parameter._backward_hooks for parameter in model.parameters())


def test_evaluation_without_gradients_is_traced_forward_only(
    make_tracer, monkeypatch, read_rank_file
):
    tracer, path = make_tracer()
    Traced(tracer, monkeypatch)
    with tracer.iteration(1), torch.no_grad():
        Network()(torch.zeros(4, 8))
    tracer.close()
    file = read_rank_file(path)
    assert len(file.named("layer")) == NUM_LAYERS
    assert file.named("layer-backward") == []


def test_a_module_whose_input_needs_no_gradient_ends_with_the_backward(
    make_tracer, monkeypatch, read_rank_file
):
    tracer, path = make_tracer()
    traced = Traced(tracer, monkeypatch)
    with tracer.iteration(1):
        traced.step(Network(), torch.zeros(4, 8))
    tracer.close()
    file = read_rank_file(path)
    (backward,) = file.named("backward")
    first = next(s for s in file.named("layer-backward") if s["args"]["layer"] == 1)
    ends = {s["args"]["layer"]: s["ts"] + s["dur"] for s in file.named("layer-backward")}
    assert max(ends, key=ends.get) == 1
    assert first["ts"] + first["dur"] <= backward["ts"] + backward["dur"] + 0.001


def test_microbatches_are_kept_apart(make_tracer, monkeypatch, read_rank_file):
    tracer, path = make_tracer()
    traced = Traced(tracer, monkeypatch)
    model = Network()
    with tracer.iteration(1):
        for microbatch in range(3):
            traced.step(model, torch.zeros(4, 8, requires_grad=True), microbatch)
    tracer.close()
    for name in ("forward", "backward", "layer-backward"):
        found = {span["args"]["microbatch"] for span in read_rank_file(path).named(name)}
        assert found == {0, 1, 2}


def test_an_evaluation_within_an_iteration_is_none_of_its_passes(
    make_tracer, monkeypatch, read_rank_file
):
    tracer, path = make_tracer()
    traced = Traced(tracer, monkeypatch)
    model = Network()
    with tracer.iteration(1):
        traced.evaluate(model, torch.zeros(4, 8))
        traced.step(model, torch.zeros(4, 8, requires_grad=True))
        traced.evaluate(model, torch.zeros(4, 8))
    tracer.close()
    file = read_rank_file(path)
    assert len(file.named("forward")) == len(file.named("backward")) == 1
    assert len(file.named("layer")) == len(file.named("layer-backward")) == NUM_LAYERS


def test_modules_that_hand_on_one_tensor_lie_in_each_other(make_tracer, read_rank_file):
    """A wrapper returns what its module returned: one gradient begins both, the outer one first."""
    tracer, path = make_tracer()
    spans = BackwardSpans(tracer, Position())
    with tracer.iteration(1):
        source = torch.ones(3, requires_grad=True)
        result = source * 2
        for name in ("inner", "outer"):
            spans.watch(f"{name}-backward", {}, source, result)
        assert len(result._backward_hooks) == len(source._backward_hooks) == 1
        result.sum().backward()
    tracer.close()
    file = read_rank_file(path)
    (inner,), (outer,) = file.named("inner-backward"), file.named("outer-backward")
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 0.001


def test_an_error_of_ours_in_a_hook_stops_tracing_and_no_backward(
    make_tracer, monkeypatch, warnings_of_megascan
):
    tracer, _ = make_tracer()
    spans = BackwardSpans(tracer, Position())
    source = torch.ones(3, requires_grad=True)
    with tracer.iteration(1):
        result = source * 2
        spans.watch("layer", {}, source, result)
        monkeypatch.setattr(tracer, "mark", lambda: 1 / 0)
        result.sum().backward()
    assert torch.equal(source.grad, torch.full((3,), 2.0))
    (warning,) = warnings_of_megascan()
    assert "tracing stopped" in warning and "ZeroDivisionError" in warning


class Alike(torch.Tensor):
    """A tensor of somebody else's class."""


@pytest.mark.parametrize("kind", [torch.Tensor, Alike, torch.nn.Parameter])
@pytest.mark.parametrize("earlier", [False, True])
def test_hooks_of_others_on_a_tensor_stay_and_count(make_tracer, kind, earlier):
    """Before ours, after ours, on a leaf and on a subclass; the trainer may take its own away."""
    tracer, _ = make_tracer()
    spans = BackwardSpans(tracer, Position())
    leaf = torch.ones(3, requires_grad=True)
    source = (
        torch.nn.Parameter(leaf) if kind is torch.nn.Parameter else (leaf * 1).as_subclass(kind)
    )
    called = []
    with tracer.iteration(1):
        result = source * 2
        if earlier:
            source.register_hook(lambda gradient: called.append("trainer's") or gradient * 10)
        spans.watch("module-backward", {"layer": 3}, source, result)
        if not earlier:
            source.register_hook(lambda gradient: called.append("trainer's") or gradient * 10)
        source.register_hook(lambda gradient: called.append("removed")).remove()
        result.sum().backward()
        recorded = [span.name for span in tracer._spans]
    reached = source.grad if kind is torch.nn.Parameter else leaf.grad
    assert called == ["trainer's"] and reached.tolist() == [20.0] * 3
    assert recorded == ["module-backward"]


def test_a_torch_without_the_short_way_registers_the_long_way(make_tracer, monkeypatch):
    tracer, _ = make_tracer()
    spans = BackwardSpans(tracer, Position())
    registered = []
    monkeypatch.setattr(
        torch.Tensor, "register_hook", lambda tensor, hook: registered.append(tensor)
    )
    source = torch.ones(3, requires_grad=True) * 1
    with tracer.iteration(1):
        spans.watch("module-backward", {}, source, source * 2)
        assert not registered
        monkeypatch.setattr(spans, "_plain_tensor", None)
        other = torch.ones(3, requires_grad=True) * 1
        spans.watch("module-backward", {}, other, other * 2)
    assert len(registered) == 2
