"""NVIDIA's own scripts, from a checkout of Megatron-LM: MEGATRON_LM=DIR; skipped without one.

scripts/megatron_matrix.sh runs this beside the releases. They train on the CPU, two ranks each.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from megascan.reader import read_trace
from tests import ranks

CHECKOUT = Path(os.environ.get("MEGATRON_LM", ""))
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no checkout"),
]
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SMALL_GPT = """
    --tensor-model-parallel-size 2 --num-layers 2 --hidden-size 32 --num-attention-heads 4
    --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 2
    --train-iters 6 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 100
    --transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-bias-dropout-fusion --no-bias-gelu-fusion --no-persist-layer-norm --no-rope-fusion
    --distributed-backend gloo --eval-iters 1 --eval-interval 3 --log-interval 1
    --use-cpu-initialization --attention-backend unfused
"""


def train(folder: Path, *words: object) -> Path:
    """Run a script with two ranks in `folder`; returns where its trace is."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{CHECKOUT}:{ROOT}",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # make asks python3
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    done = subprocess.run(
        ranks.command_of(2, (HERE / "on_cpu.py", *words), ranks.PYTHON),
        cwd=folder, env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "trace"


def names_of(folder: Path) -> Counter[str]:
    trace = read_trace(folder)
    assert not [note for note in trace.completeness.notes if "was seen" in note]
    return Counter(trace.spans.column("name").to_pylist())


def with_five_lines(example: str) -> str:
    """Return the example with what docs/other-trainers.md asks for."""
    loop, end = "    for iteration in range(5):\n", '        print(f"Iteration'
    before, body = example.split(loop)
    step, after = body.split(end)
    settings = "enabled=True, directory=Path('trace'), interval=5, window=5"
    traced = "".join(f"    {line}" if line.strip() else line for line in step.splitlines(True))
    return (
        f"import megascan\n{before}"
        f"    tracer = megascan.start(megascan.TraceConfig({settings}))\n{loop}"
        f"        with tracer.iteration(iteration + 1):\n{traced}{end}"
        + after.replace("    # Saving the model\n", "    tracer.close()\n    # Saving the model\n")
    )


def test_the_simple_loop_is_seen_whole(tmp_path: Path) -> None:
    example = (CHECKOUT / "examples" / "run_simple_mcore_train_loop.py").read_text()
    (tmp_path / "loop.py").write_text(with_five_lines(example))
    names = names_of(train(tmp_path, "loop.py"))
    for name in ("iteration", "forward", "backward", "grad-sync", "optimizer"):
        assert names[name] == 10, name  # 2 ranks, 5 iterations, 1 microbatch


def test_pretrain_gpt_is_traced_without_a_line(tmp_path: Path) -> None:
    flags = ["--trace", "--trace-dir", "trace", "--trace-interval", 2]
    script = CHECKOUT / "pretrain_gpt.py"
    names = names_of(train(tmp_path, "--launch", script, *flags, *SMALL_GPT.split()))
    for name, number in {"iteration": 12, "optimizer": 12, "grad-sync": 12, "forward": 24}.items():
        assert names[name] == number, name  # 2 ranks, 6 iterations, 2 microbatches; no evaluation
