"""The recipes of docs/other-trainers.md do what they say: they are taken from the page and run."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests import ranks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "other-trainers.md").read_text(encoding="utf-8")
RECIPES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)

MEGATRON = """
import argparse, sys
import foreign_trainer as trainer, torch, torch.distributed as dist
from training import cpu_backend
cpu_backend.install()
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
parser, num_iterations = argparse.ArgumentParser(), 2
def prepare():
    global arguments, model, data
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(create_gloo_process_groups=True)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    model = trainer.build(argparse.Namespace(tp=1, pp=1, vpp=1, overlap=False, recompute=False,
                                             distributed_optimizer=False))
    data = trainer.batches(0)
def train_step():
    get_forward_backward_func()(
        forward_step_func=trainer.forward_step, data_iterator=data, model=model,
        num_microbatches=2, seq_length=trainer.SEQUENCE, micro_batch_size=2, forward_only=False)
"""
PLAIN = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
import megascan
dist.init_process_group("gloo")
config = megascan.TraceConfig(enabled=True, directory=Path(sys.argv[-1]))
num_iterations = 2
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
optimizer, loss_of = torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.cross_entropy
microbatches = [(torch.ones(3, 4), torch.zeros(3, dtype=torch.int64))] * 2
"""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("recipe", "before"), [(0, MEGATRON), (1, PLAIN)], ids=["megatron-core", "plain"]
)
def test_a_recipe_traces_a_job(recipe, before, tmp_path):
    assert (
        len(RECIPES) == 4
    )  # callbacks: test_wrapped.py; Accelerate, DeepSpeed: benchmarks.trainers
    text = RECIPES[recipe].replace("...\n", "prepare()\n")
    script = tmp_path / "job.py"
    script.write_text(f"{before}\n{text}", encoding="utf-8")
    trace = tmp_path / "trace"
    flags = [] if recipe else ["--trace", "--trace-dir"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "tracer")])
    rendezvous = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = ranks.run(script, *flags, trace, check=True, PYTHONPATH=paths, **rendezvous)
    assert "tracing stopped" not in done.stderr
    written = (trace / "benchmark-data-0-pipeline-0-tensor-0.json").read_text(encoding="utf-8")
    assert written.count('"name":"forward"') == written.count('"name":"backward"') == 4
    assert written.count('"name":"iteration"') == 2


def test_the_five_lines_are_five():
    assert re.findall(r"# (\d)", RECIPES[0]) == ["1", "2", "3", "4", "5"]
