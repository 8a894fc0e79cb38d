"""A thousand steps chosen at run time under random disturbances, digit by digit with static ones.

    python -m benchmarks.pipeline_disturbed [--steps 1000]

Two ranks with two chunks each; in the guided run a fifth of the messages leave late, by other draws
in every step. Compared are the losses and gradient norms of all steps and the parameters after the
last, in exact digits, with Megatron-Core's own schedule. The comparing program is the tests'.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.jobs import ROOT, environment_line, publish, run_python, torchrun

MODEL = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 60 --make-vocab-size-divisible-by 16
    --num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1
    --lr 1e-3 --log-interval 1000 --num-workers 0 --eval-iters 0 --hidden-dropout 0
    --attention-dropout 0 --distributed-backend gloo --distributed-timeout-minutes 3
    --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 8
""".split()  # noqa: SIM905
RUNS = {"Megatron-Core": [], "guided, late": ["--use-dpp", "--dpp-choice", "guided"]}
NUM_RANKS = 2


def main(arguments: Sequence[str]) -> int:
    """Train both and say whether they differ anywhere; exit code 1 if so."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline_disturbed", description=__doc__
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args(arguments)
    steps = ["--train-iters", str(given.steps)]
    with TemporaryDirectory() as folder:
        runs, out = Path(folder) / "runs.json", Path(folder) / "found"
        named = {name: [*MODEL, *steps, *flags] for name, flags in RUNS.items()}
        runs.write_text(json.dumps(named), encoding="utf-8")
        program = ROOT / "tests" / "pipeline_runs" / "compare_ranks.py"
        begin_s = time.monotonic()
        run_python([*torchrun(NUM_RANKS), str(program), str(runs), str(out)])
        taken_s = time.monotonic() - begin_s
        of_rank = [
            json.loads(Path(f"{out}.{rank}.json").read_text(encoding="utf-8"))
            for rank in range(NUM_RANKS)
        ]
    one, other = ([found[name] for found in of_rank] for name in RUNS)
    steps_equal = sum(a == b for a, b in zip(one[-1]["losses"], other[-1]["losses"], strict=True))
    lines = [
        "# Steps chosen at run time under disturbances\n",
        f"{environment_line('cpu')}; PP2, 2 chunks, 8 microbatches, a fifth of the messages late "
        f"by 30 ms. `python -m benchmarks.pipeline_disturbed --steps {given.steps}`\n",
        f"Both runs took {taken_s:.0f} s together; {steps_equal} of {given.steps} losses are equal "
        f"in every digit; norms, losses and parameters of all ranks are "
        f"{'the same' if one == other else 'NOT the same'}.\n",
    ]
    publish("\n".join(lines), given.output)
    return 0 if one == other else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
