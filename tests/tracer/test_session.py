"""A job of one process, so that what `start` installs can be looked at from inside."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megascan.config import TraceConfig
from megascan.instrument import start
from megascan.instrument.collectives import Collectives, Groups
from megascan.instrument.megatron import (
    BackwardSpans,
    CheckpointSaves,
    Modules,
    Passes,
    PointToPoint,
)
from megascan.instrument.place import Position
from megascan.instrument.starting import find_order
from megascan.instrument.table import places
from megascan.instrument.updates import Updates
from megascan.schema import Granularity
from megascan.topology import Layout
from tests import ranks

ROOT = Path(__file__).parents[2]


@pytest.fixture
def one_rank():
    """A world of one rank, with megatron.core imported as a trainer would have."""
    importlib.import_module("megatron.core.pipeline_parallel.schedules")
    importlib.import_module("megatron.core.models.gpt")
    importlib.import_module("megatron.core.optimizer")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def table(one_rank):
    tracer, position = None, Position()
    spans = BackwardSpans(tracer, position)
    table = places(
        Passes(tracer, position, spans, Updates(tracer)),
        Modules(tracer, position, spans),
        PointToPoint(tracer, position, None),
        Collectives(tracer, position, None),
        saves=CheckpointSaves(tracer),
        updates=Updates(tracer),
    )
    return [place for place in table if not needs_what_is_absent(place)]


def needs_what_is_absent(place):
    """Without Transformer Engine, megatron.core has empty names for what is built on it."""
    extension = place.module.endswith(".transformer_engine")
    return extension and importlib.util.find_spec("transformer_engine") is None


def look_up(place):
    value = importlib.import_module(place.module)
    for name in place.attribute.split("."):
        value = vars(value)[name]
    return value


def test_every_place_exists_in_the_version_that_is_tested(table):
    optional = {"all_gather_single", "reduce_scatter_single"}  # names of torch 2.13 and later
    for place in table:
        if place.attribute not in optional:
            assert callable(look_up(place)), place


@pytest.mark.parametrize("granularity", Granularity)
def test_everything_is_wrapped_while_tracing_and_put_back_by_close(table, tmp_path, granularity):
    before = [look_up(place) for place in table]
    of_base = {(one.module, one.attribute) for one in table if one.granularity is Granularity.BASE}
    config = TraceConfig(enabled=True, directory=tmp_path / "trace", granularity=granularity)
    with start(config) as tracer:
        assert tracer.run_id
        for place, original in zip(table, before, strict=True):
            is_of_base = (place.module, place.attribute) in of_base
            wanted = granularity is Granularity.FULL or is_of_base
            assert (look_up(place) is not original) == wanted, place
    assert [look_up(place) for place in table] == before


def test_a_run_that_is_not_traced_has_nothing_installed(table, tmp_path):
    before = [look_up(place) for place in table]
    start(TraceConfig(enabled=False, directory=tmp_path / "trace"))
    assert [look_up(place) for place in table] == before


def test_a_second_start_ends_the_first(one_rank, tmp_path):
    original = dist.all_reduce
    first = start(TraceConfig(enabled=True, directory=tmp_path / "one"))
    second = start(TraceConfig(enabled=True, directory=tmp_path / "two"))
    assert not first.waiting and second.waiting
    second.close()
    assert dist.all_reduce is original
    assert first.run_id != second.run_id


def test_captured_references_are_traced_too(one_rank, tmp_path):
    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")
    original = mappings.dist_all_gather_func
    with start(TraceConfig(enabled=True, directory=tmp_path / "trace")):
        assert mappings.dist_all_gather_func is dist.all_gather_into_tensor is not original
    assert mappings.dist_all_gather_func is original


def test_a_restart_by_torchrun_appends_under_its_own_run(
    one_rank, tmp_path, monkeypatch, read_rank_file
):
    config = TraceConfig(enabled=True, directory=tmp_path)
    start(config).close()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    start(config).close()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    path = tmp_path / "benchmark-data-0-pipeline-0-tensor-0.json"
    runs = [header["run_id"] for header in read_rank_file(path).headers]
    assert len(set(runs)) == 2
    start(config).close()
    assert len(read_rank_file(path).headers) == 1
    assert (tmp_path / runs[0] / path.name).exists()


def test_the_header_describes_the_job(one_rank, tmp_path, read_rank_file):
    start(TraceConfig(enabled=True, directory=tmp_path, interval=7, window=3)).close()
    (header,) = read_rank_file(tmp_path / "benchmark-data-0-pipeline-0-tensor-0.json").headers
    assert (header["rank"], header["world_size"], header["backend"]) == (0, 1, "gloo")
    assert header["groups"] == {"world@0": [0]}
    assert header["device"]["kind"] == "cpu"
    assert header["trace"] == {
        "granularity": "full",
        "interval": 7,
        "window": 3,
        "compress": False,
        "max_bytes": 0,
        "layer_stride": 4,
        "budget_ratio": 0.0,
    }
    # what pip calls it; the module adds the build ("+cu130")
    assert header["versions"]["torch"] == version("torch")
    assert header["process_id"] == os.getpid()


def test_groups_of_one_member_are_named_but_not_traced(one_rank, tmp_path, read_rank_file):
    with start(TraceConfig(enabled=True, directory=tmp_path)) as tracer, tracer.iteration(1):
        dist.all_reduce(torch.ones(1))
    file = read_rank_file(tmp_path / "benchmark-data-0-pipeline-0-tensor-0.json")
    assert file.named("all_reduce") == []


def test_a_group_made_later_is_named_when_it_is_used(one_rank):
    groups = Groups()
    later = dist.new_group([0])
    name = groups.name(later)
    assert name.endswith("@0") and name != groups.name(None) == "world@0"
    assert groups.name(later) == name and groups.num_members(name) == 1


def test_the_rank_order_is_found_from_the_groups_of_one_rank():
    layout = Layout(tp=2, dp=2, pp=2, order="tp-cp-ep-pp-dp")
    groups = {axis: layout.group(5, axis) for axis in ("tp", "cp", "dp", "pp")}
    found = Layout(tp=2, dp=2, pp=2, order=find_order(Layout(tp=2, dp=2, pp=2), groups, 5))
    assert [found.coordinates(rank) for rank in range(8)] == [
        layout.coordinates(rank) for rank in range(8)
    ]


PLAIN_TORCH = """
import sys
from importlib.metadata import version
from pathlib import Path
import torch, torch.distributed as dist
import megascan

dist.init_process_group("gloo")
with megascan.start(megascan.TraceConfig(enabled=True, directory=Path(sys.argv[1]))) as tracer:
    with tracer.iteration(1):
        with tracer.span("forward", "compute", microbatch=0):
            ones = torch.ones(8)
        work = dist.all_reduce(ones, async_op=True)
        assert work.wait() and work.is_completed()
        out = torch.empty(16)
        dist.all_gather_into_tensor(out, ones)
        dist.all_gather_object([None, None], {"rank": dist.get_rank()})
assert ones.tolist() == [2.0] * 8
assert "megatron.core" not in sys.modules
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_a_trainer_without_megatron_core(tmp_path):
    script = tmp_path / "plain.py"
    script.write_text(PLAIN_TORCH)
    folder = tmp_path / "trace"
    command = [sys.executable, "-IS", str(ranks.LAUNCHER), sys.executable, "2"]  # nothing forked
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [*command, str(script), str(folder)],
        env=environment,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    for rank in (0, 1):
        path = folder / f"benchmark-data-{rank}-pipeline-0-tensor-0.json"
        spans = {
            event["name"]: event for event in json.loads(path.read_text()) if event["ph"] == "X"
        }
        assert set(spans) == {
            *("forward", "all_reduce", "all_gather", "all_gather_object", "iteration")
        }
        assert spans["all_reduce"]["tid"] == 4 and spans["all_gather"]["tid"] == 2
        assert spans["all_reduce"]["args"]["size_bytes"] == 32
        assert spans["all_gather"]["args"]["group"] == "world@0"
