"""Wrapping functions of other people: everywhere they are known, and back again without a trace."""

from __future__ import annotations

import functools
import importlib
import sys
from types import FunctionType, ModuleType, SimpleNamespace

import pytest

from megascan.instrument.place import _WITHOUT_TORCH, Installation, Place, around
from megascan.tracer import Tracer


class FakeTracer(Tracer):
    def __init__(self, active=True):
        self.active = active
        self.errors = []

    def fail(self, error):
        self.active = False
        self.errors.append(error)


@pytest.fixture
def library(monkeypatch):
    """A module with a function and a class, and a second one that captured the function."""
    home, user, torch_like = ModuleType("library"), ModuleType("user"), ModuleType("torch.user")

    def double(x):
        return 2 * x

    class Engine:
        def run(self, x):
            return x + 1

    home.double, home.Engine = double, Engine
    user.alias = torch_like.alias = double
    for module in (home, user, torch_like):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return SimpleNamespace(home=home, user=user, torch_like=torch_like, double=double)


def wrap(original):
    return lambda *arguments: ("traced", original(*arguments))


def test_a_function_is_wrapped_wherever_it_is_bound_and_put_back(library):
    installation = Installation()
    assert installation.install([Place(module="library", attribute="double", wrap=wrap)])
    assert library.home.double(2) == library.user.alias(2) == ("traced", 4)
    assert library.torch_like.alias(2) == 4  # torch's own calls are not counted twice
    installation.tracing_ends()
    assert library.home.double is library.user.alias is library.double


def test_packages_that_are_not_searched_refer_to_nothing_that_is_replaced():
    """As they are once both are imported, with all that they import themselves."""
    pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    importlib.import_module("torch.distributed")
    modules = {
        name: module
        for name, module in sys.modules.items()
        if name.partition(".")[0] in _WITHOUT_TORCH and isinstance(module, ModuleType)
    }
    assert {"numpy", "sympy"} <= modules.keys()
    for name, module in modules.items():
        kept = [value for value in vars(module).values() if isinstance(value, FunctionType)]
        origins = [str(value.__module__) for value in kept]
        assert not {"torch", "megatron"} & {one.partition(".")[0] for one in origins}, name


def test_two_places_that_name_one_function_are_both_seen_wherever_it_is_bound(library):
    installation = Installation()
    names = (("library", "double"), ("user", "alias"))
    places = [Place(module=module, attribute=name, wrap=wrap) for module, name in names]
    assert installation.install(places) == places
    assert library.home.double(2) == library.user.alias(2) == ("traced", ("traced", 4))
    installation.tracing_ends()
    assert library.home.double is library.user.alias is library.double


def test_a_method_is_wrapped_on_its_class(library):
    original = vars(library.home.Engine)["run"]
    installation = Installation()
    installation.install([Place(module="library", attribute="Engine.run", wrap=wrap)])
    assert library.home.Engine().run(1) == ("traced", 2)
    installation.tracing_ends()
    assert vars(library.home.Engine)["run"] is original


@pytest.mark.parametrize(
    ("module", "attribute"),
    [("library", "absent"), ("library", "Absent.run"), ("no.such.module", "f")],
)
def test_places_that_a_version_lacks_are_passed_over(library, module, attribute):
    installation = Installation()
    assert not installation.install([Place(module=module, attribute=attribute, wrap=wrap)])
    assert installation.undo == []


def test_what_somebody_else_wrapped_since_is_left_alone(library):
    installation = Installation()
    installation.install([Place(module="library", attribute="double", wrap=wrap)])
    library.home.double = somebody = lambda x: x
    installation.tracing_ends()
    assert library.home.double is somebody


def test_an_inactive_tracer_calls_straight_through():
    def never(*_):
        raise AssertionError

    traced = around(FakeTracer(active=False), lambda x: x + 1, never, never)
    assert traced(1) == 2


def test_enter_may_change_arguments_and_leave_the_result():
    def enter(call):
        call.positional = (10,)
        return True

    traced = around(FakeTracer(), lambda x: x + 1, enter, lambda call, result: [result])
    assert traced(1) == [11]


@pytest.mark.parametrize("broken", ["enter", "leave"])
def test_an_error_of_ours_never_reaches_the_caller(broken):
    def fail(*_):
        raise RuntimeError("ours")

    tracer = FakeTracer()
    enter = fail if broken == "enter" else lambda call: True
    leave = fail if broken == "leave" else lambda call, result: result
    calls = []
    traced = around(tracer, lambda x: calls.append(x) or x + 1, enter, leave)
    assert traced(1) == 2 and calls == [1]
    assert [str(error) for error in tracer.errors] == ["ours"]
    assert traced(5) == 6


def test_an_error_of_training_passes_through_unchanged():
    def original():
        raise KeyError("training's")

    tracer = FakeTracer()
    with pytest.raises(KeyError, match="training's"):
        around(tracer, original, lambda call: True, lambda call, result: result)()
    assert tracer.errors == [] and tracer.active


def test_a_cached_function_keeps_what_is_asked_of_its_cache(library):
    """Rotary embeddings of Megatron-Core call `self.forward.cache_clear()`."""

    class Embedding:
        @functools.lru_cache(maxsize=4)  # noqa: B019
        def forward(self, x):
            return x + 1

        def renew(self):
            self.forward.cache_clear()

    def traced(original):
        return around(FakeTracer(), original, lambda call: True, lambda call, result: result)

    library.home.Embedding = Embedding
    installation = Installation()
    installation.install([Place(module="library", attribute="Embedding.forward", wrap=traced)])
    embedding = Embedding()
    assert embedding.forward(1) == embedding.forward(1) == 2
    assert embedding.forward.cache_info().hits == 1
    embedding.renew()
    assert embedding.forward.cache_info().currsize == 0
    installation.tracing_ends()
    assert embedding.forward(1) == 2 and embedding.forward.cache_info().currsize == 1
