"""What `full` installs goes when a budget lowers the granularity; the rest stays."""

from __future__ import annotations

import gc
import importlib
import json

import pytest
import torch
import torch.distributed as dist

from megascan.config import TraceConfig
from megascan.instrument import start
from megascan.instrument.starting import StoreBoard
from megascan.schema import Granularity
from megascan.tracer.budget import Level

LAYER = "megatron.core.transformer.transformer_layer"
SCHEDULES = "megatron.core.pipeline_parallel.schedules"


@pytest.fixture
def one_rank():
    importlib.import_module(SCHEDULES)
    importlib.import_module("megatron.core.models.gpt")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapped():
    """Whether (a module of the model, a step of the schedule) are wrapped."""
    layer = vars(importlib.import_module(LAYER).TransformerLayer)["forward"]
    step = importlib.import_module(SCHEDULES).forward_step
    return hasattr(layer, "__wrapped__"), hasattr(step, "__wrapped__")


def test_lowering_takes_away_what_only_full_records(one_rank, tmp_path):
    before = wrapped()
    listeners = len(gc.callbacks)
    tracer = start(TraceConfig(enabled=True, directory=tmp_path, interval=2, window=1))
    assert wrapped() == (True, True) and len(gc.callbacks) == listeners + 1
    with tracer.iteration(1):
        gc.collect()
    tracer.lower(Level(granularity=Granularity.BASE, interval=2, from_iteration=3))
    with tracer.iteration(2):
        assert wrapped() == (True, True)
    with tracer.iteration(3):
        gc.collect()
        assert wrapped() == (False, True) and len(gc.callbacks) == listeners
        with tracer.span("own", "compute"):
            torch.ones(1)
    tracer.close()
    assert wrapped() == before == (False, False)
    (path,) = tmp_path.iterdir()
    spans = [event for event in json.loads(path.read_text()) if event["ph"] == "X"]
    collections = {s["args"]["iteration"] for s in spans if s["cat"] == "gc"}
    assert collections == {1}
    assert {s["args"]["iteration"] for s in spans if s["name"] == "own"} == {3}


def test_an_announcement_is_there_for_whoever_looks_and_never_waited_for():
    store = dist.HashStore()
    mine, theirs = StoreBoard(store, "run/1"), StoreBoard(store, "run/1")
    assert theirs.read(0) is None
    mine.publish(0, "base 5 31")
    assert theirs.read(0) == "base 5 31" and theirs.read(1) is None
    assert StoreBoard(store, "run/2").read(0) is None


def test_one_rank_is_the_first_with_a_topic():
    store = dist.HashStore()
    ranks = [StoreBoard(store, "run/1") for _ in range(4)]
    assert [rank.claim("disk full") for rank in ranks] == [True, False, False, False]
    assert ranks[2].claim("another topic")


class GoneStore:
    """The store of a job whose rank 0 has died."""

    def __getattr__(self, name):
        def fail(*arguments):
            raise dist.DistNetworkError("connection reset")

        return fail


def test_a_store_that_is_gone_holds_nothing_and_silences_nobody():
    board = StoreBoard(GoneStore(), "run/1")
    board.publish(0, "base 5 31")
    assert board.read(0) is None and board.claim("disk full")
