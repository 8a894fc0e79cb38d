"""Functional collectives: what is recorded of them, and what compiled code and callers see."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as funcol  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from megascan.instrument.collectives import Collectives  # noqa: E402
from megascan.instrument.functional import FunctionalCollectives, process_group  # noqa: E402
from megascan.instrument.place import Installation, Position  # noqa: E402
from megascan.instrument.plain_torch import num_tokens  # noqa: E402
from megascan.schema import Phase, Track  # noqa: E402

ROOT = Path(__file__).parents[2]


def _all_gather(*arguments):
    """By the name that this version of torch has for it."""
    return getattr(funcol, "all_gather_single", funcol.all_gather_tensor)(*arguments)


def _reduce_scatter(*arguments):
    return getattr(funcol, "reduce_scatter_single", funcol.reduce_scatter_tensor)(*arguments)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A job of one rank."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group(
        "gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


class PairGroups:
    """The only rank's group counts as one of two, or nothing would be recorded of it."""

    def name(self, group):
        return "tp@0"

    def num_members(self, name):
        return 2

    def is_data_parallel(self, name):
        return False


@pytest.fixture
def traced(make_tracer, read_rank_file):
    """Trace what a function does; its collectives, as (name, phase, track, bound)."""

    def trace(act):
        tracer, path = make_tracer()
        position = Position()
        functional = FunctionalCollectives(
            tracer, position, Collectives(tracer, position, PairGroups())
        )
        tracer.listen(functional)
        installation = Installation()
        installation.install(functional.places())
        try:
            with tracer.iteration(1):
                act(position)
        finally:
            installation.tracing_ends()
        tracer.close()
        assert tracer._failed is False
        spans = [one for one in read_rank_file(path).spans if one["cat"] == "collective"]
        return [
            (one["name"], one["args"].get("phase", ""), Track(one["tid"]),
             one["args"].get("end_is_bound", 0))
            for one in spans
        ]  # fmt: skip

    return trace


def test_a_result_ends_its_span_when_it_is_first_used(world, traced):
    def act(position):
        position.phase = Phase.FORWARD
        result = funcol.all_reduce(torch.ones(4), "sum", world)
        assert torch.equal(result + 1, torch.full((4,), 2.0))
        assert torch.equal(result + 2, torch.full((4,), 3.0))  # waited for once

    assert traced(act) == [("all_reduce", "forward", Track.COMMUNICATION, 0)]


def test_what_waits_in_its_own_call_is_complete_when_it_returns(world, traced):
    """A gather along another dimension than the first is put together before it returns."""

    def act(position):
        assert torch.equal(_all_gather(torch.ones(2, 3), 1, world) + 0, torch.ones(2, 3))

    assert [one[0] for one in traced(act)] == ["all_gather"]


def test_a_result_that_another_pass_waits_for_overlaps_it(world, traced):
    def act(position):
        position.phase = Phase.FORWARD
        result = _reduce_scatter(torch.ones(4), "sum", 0, world)
        position.phase = Phase.BACKWARD
        result + 1

    assert [one[0::2] for one in traced(act)] == [("reduce_scatter", Track.OVERLAPPED)]


def test_a_result_that_nobody_uses_in_its_iteration_is_not_recorded(world, traced):
    kept = []
    assert traced(lambda _: kept.append(funcol.all_reduce(torch.ones(4), "sum", world))) == []
    assert torch.equal(kept[0] + 1, torch.full((4,), 2.0))


def test_a_call_that_fails_leaves_nothing_behind(world, traced):
    def act(position):
        with pytest.raises(Exception, match="nonsense"):
            funcol.all_reduce(torch.ones(4), "nonsense", world)
        funcol.all_reduce(torch.ones(4), "sum", world) + 1

    assert [one[0] for one in traced(act)] == ["all_reduce"]


COMPILED = """
import sys
import torch, torch.distributed as dist, torch.distributed._functional_collectives as funcol
from megascan.instrument.functional import FunctionalCollectives
from megascan.instrument.place import Installation, Position

class Everything:  # a tracer and its collectives
    active = True
    def note_exchange(self, operation): pass
    def described(self, operation, group, size_bytes): return {"group": "tp@0"}
    def mark_before(self, tensor): return 0
    mark_after = mark_before
    def add_collective(self, operation, *_, **__): print("recorded", operation)
    def fail(self, error): raise error

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
everything = Everything()
Installation().install(FunctionalCollectives(everything, Position(), everything).places())

def doubled(x):
    return funcol.all_reduce(x, "sum", dist.group.WORLD) * 2

compiled = torch.compile(doubled, backend="eager", fullgraph=True)
print("compiled", compiled(torch.ones(2)).tolist())
print("eager", doubled(torch.ones(2)).tolist())
dist.destroy_process_group()
"""


def test_compiled_code_is_left_whole(tmp_path):
    """In a process of its own: other tests may have told torch not to compile."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    variables.pop("TORCHDYNAMO_DISABLE", None)
    done = subprocess.run(
        [sys.executable, "-c", COMPILED, tmp_path / "store"],
        env=variables, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "compiled [2.0, 2.0]",
        "recorded all_reduce",
        "eager [2.0, 2.0]",
    ]


def test_groups_as_callers_give_them(world):
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    assert process_group(world) is world
    assert process_group(mesh) is mesh.get_group()
    assert process_group((mesh, 0)) is mesh.get_group(0)
    assert process_group(world.group_name) is world
    assert process_group([0]) is None
    assert process_group(None) is None


def test_functions_are_put_back(world, traced):
    before = funcol.all_reduce, funcol.wait_tensor
    traced(lambda position: None)
    assert (funcol.all_reduce, funcol.wait_tensor) == before
    assert sys.modules["torch.distributed._functional_collectives"] is funcol


@pytest.mark.parametrize(("knows_experts", "is_known"), [(True, True), (False, False)])
def test_an_exchange_of_all_with_all_may_hold_more_for_some(
    world, make_tracer, read_rank_file, knows_experts, is_known
):
    """Where nobody says which ranks share experts, equal tokens are no equal work."""
    tracer, path = make_tracer()
    collectives = Collectives(tracer, Position(), PairGroups(), knows_experts=knows_experts)
    with tracer.iteration(1):
        tracer.note_tokens(2048)
        collectives.note_exchange("all_reduce")
        collectives.note_exchange("all_to_all")
    tracer.close()
    assert read_rank_file(path).windows[0]["tokens"] == ([2048, 2048] if is_known else [])


IDS, HIDDEN = torch.ones(2, 8, dtype=torch.int64), torch.ones(2, 8, 16)


@pytest.mark.parametrize(
    ("positional", "named", "count"),
    [
        ((IDS,), {}, 16),
        ((HIDDEN,), {}, 16),
        ((), {"input_ids": IDS, "labels": IDS, "position_ids": IDS, "use_cache": False}, 16),
        ((IDS,), {"attention_mask": IDS}, 0),  # of padded documents, maybe
        ((IDS, torch.tensor([0, 3, 8])), {}, 0),  # where documents end
        (({"input_ids": IDS, "labels": IDS}, 3), {}, 16),  # a batch and its number: Lightning's
        (({"input_ids": IDS, "attention_mask": IDS},), {}, 0),
        ((torch.ones(7),), {}, 7),
        ((), {}, 0),
    ],
)
def test_tokens_of_a_call(positional, named, count):
    assert num_tokens(positional, named) == count
