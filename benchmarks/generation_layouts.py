"""Generating text in several layouts: the same tokens as on one rank, with and without CUDA graphs?

    python -m benchmarks.generation_layouts [--device cpu|gpu] [-o RESULT.md]

Two ranks generate for eight requests of unlike lengths, six rows at a time, greedy ones and sampled
ones beside each other, in float32: one rank alone, tensor size 2, pipeline size 2. Each job answers
twice; the second time is taken. On the CPU nothing is recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.generation import SIZES
from benchmarks.jobs import environment_line, publish, torchrun

Rows = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A job on the first `tensor` × `pipeline` ranks."""

    tensor: int
    pipeline: int
    graphs: str
    """Of --cuda-graph-impl."""


# One rank without graphs comes first: the others are compared with it.
LAYOUTS = tuple(
    Layout(tensor=tensor, pipeline=pipeline, graphs=graphs)
    for tensor, pipeline in ((1, 1), (2, 1), (1, 2))
    for graphs in ("none", "local")
    if graphs == "none" or pipeline == 1
)
HEAD = "| TP | PP | graphs | tokens | as on one rank | sizes recorded | all answers (ms) |\n" + (
    "|---|---|---|---|---|---|---|"
)


def main() -> int:
    """Start the ranks and write the table; exit 1 when tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        make = [sys.executable, "-m", "benchmarks.generation_worker", "make", folder, given.device]
        config = json.dumps(SIZES["small"].config)
        subprocess.run([*make, config, "float32"], check=True)
        start = [sys.executable, *torchrun(2), "-m", "benchmarks.generation_layouts"]
        lines = []
        with subprocess.Popen(
            [*start, folder, given.device], stdout=subprocess.PIPE, text=True
        ) as ranks:
            assert ranks.stdout is not None
            for line in ranks.stdout:
                if line.startswith("| "):
                    lines.append(line.rstrip())
                    print(lines[-1], file=sys.stderr, flush=True)
    head = ["# Generating text in layouts", "", environment_line(given.device), ""]
    publish("\n".join([*head, HEAD, *lines, ""]), given.output)
    return 0 if len(lines) == len(LAYOUTS) and all(" yes |" in line for line in lines) else 1


def work(folder: str, device: str) -> int:
    """Be a rank of every layout that it belongs to, one after the other."""
    from megatron.core import parallel_state

    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # each job meets at a place of its own
    expected: Rows | None = None
    for number, layout in enumerate(LAYOUTS):
        if rank >= layout.tensor * layout.pipeline:
            continue
        os.environ["MASTER_PORT"] = str(port + 1 + number)
        parallel_state.destroy_model_parallel()
        rows, num_recorded, seconds = generate(layout, rank, folder, device)
        if rank:
            continue
        expected = expected or rows
        same = "yes" if rows == expected else "NO"
        print(
            f"| {layout.tensor} | {layout.pipeline} | {layout.graphs} | {sum(map(len, rows))} "
            f"| {same} | {num_recorded} | {1e3 * seconds:.0f} |",
            flush=True,
        )
    return 0


def generate(layout: Layout, rank: int, folder: str, device: str) -> tuple[Rows, int, float]:
    """Answer twice; gives the tokens, the number of recordings, and the second time's seconds."""
    from benchmarks.generation_worker import flags, tokens_of
    from training.distributed import Launch
    from training.generation.job import open_job
    from training.generation.request import Request, Sampling

    size = layout.tensor * layout.pipeline
    launch = Launch(rank=rank, local_rank=rank, world_size=size, local_world_size=size)
    own = ("--tensor-model-parallel-size", layout.tensor, "--pipeline-model-parallel-size",
           layout.pipeline, "--cuda-graph-impl", layout.graphs)  # fmt: skip
    common = flags(Path(folder), device, num_rows=6, longest=256)
    job = open_job([*common, *map(str, own)], launch)
    requests = [
        Request(
            identifier=row,
            prompt=tuple((7 * row + 3 * place) % 2000 for place in range(20 + 9 * row)),
            max_tokens=60 - 3 * row,
            sampling=Sampling() if row < 4 else Sampling(temperature=1.0, top_p=0.9, seed=row),
        )
        for row in range(8)
    ]
    with job.joined(), closing(job.build_engine()) as engine:
        tokens_of(engine, requests)
        began = time.perf_counter()
        rows = tokens_of(engine, requests)
        return rows, engine.num_recorded, time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(work(*sys.argv[1:]) if "RANK" in os.environ else main())
