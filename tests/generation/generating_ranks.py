"""Started on four ranks: generate for several models in four layouts.

python generating_ranks.py FOLDER…

The ranks are divided into jobs of their own, one after the other: rank 0 alone, then ranks 0 and 1
with tensor parallelism, beside them ranks 2 and 3 with two stages, then all four with both. The
first rank of each job writes JSON to a file of its own in the folder RESULTS (lines on stdout may
stand in the middle of other ranks' lines): by layout and model the rows of all cases together and,
on one rank, of each case alone, of all with replayed steps (and how many were), of the first while
somebody looks at the last layer (with the number of tokens seen there), and of its
prompt scored in bfloat16.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from training.distributed import Launch, finalize
from training.generation.engine import Engine
from training.generation.job import open_job
from training.generation.request import Request, Sampling

CASES = json.loads(os.environ["CASES"])
PORTS = json.loads(os.environ["PORTS"])
RESULTS = Path(os.environ["RESULTS"])
JOBS = ((1, 1, (0,)), (1, 2, (2, 3)), (2, 1, (0, 1)), (2, 2, (0, 1, 2, 3)))


def main(folders: Sequence[str]) -> None:
    """Take part in each job that this rank belongs to."""
    rank = int(os.environ["RANK"])
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # each job meets at a place of its own
    for (tensor, pipeline, ranks), port in zip(JOBS, PORTS, strict=True):
        if rank not in ranks:
            continue
        os.environ["MASTER_PORT"] = str(port)
        own, size = ranks.index(rank), len(ranks)
        launch = Launch(rank=own, local_rank=own, world_size=size, local_world_size=size)
        found = generate(launch, tensor, pipeline, folders)
        if own == 0:
            layout = f"{tensor}x{pipeline}"
            (RESULTS / f"{layout}.json").write_text(json.dumps({layout: found}), encoding="utf-8")


def generate(
    launch: Launch, tensor: int, pipeline: int, folders: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Be a rank of one job; gives the rows of each model."""
    from megatron.core import parallel_state

    flags = ["--tensor-model-parallel-size", str(tensor)]
    flags += ["--pipeline-model-parallel-size", str(pipeline)]
    flags += ["--distributed-backend", "gloo", "--tokenizer-type", "NullTokenizer"]
    flags += ["--vocab-size", "50", "--inference-max-requests", "3"]
    flags += ["--inference-dynamic-batching-max-tokens", "7", "--inference-max-seq-length", "64"]
    found = {}
    parallel_state.destroy_model_parallel()
    for number, folder in enumerate(folders):
        job = open_job([*flags, "--load-hf", folder], launch)
        if number == 0:
            job.join()
        engine = job.build_engine()
        rows: dict[str, Any] = {"together": answered(engine, CASES)}
        if launch.world_size == 1:
            rows["alone"] = [answered(engine, [case])[0] for case in CASES]
            again = Again()
            replaying = job.build_engine(recorder=again)
            rows["replayed"] = answered(replaying, CASES)
            rows["num_recorded"], rows["num_replayed"] = again.num_recorded, again.num_replayed
            rows["watched"], rows["seen"] = watched(replaying, CASES[:1])
            scored = {**CASES[0], "max_tokens": 0, "num_logprobs": 0}
            rounded = open_job([*flags, "--load-hf", folder, "--bf16"], launch).build_engine()
            rows["bf16"] = answered(rounded, [scored])
        found[Path(folder).name] = rows
    finalize()
    return found


class Again:
    """In place of CUDA graphs: computes again, into the memory of the first result."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0

    def record(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Keep a computation and the memory of its result."""
        self.num_recorded += 1
        result = compute()

        def replay() -> torch.Tensor:
            self.num_replayed += 1
            return result.copy_(compute())

        return replay


def watched(engine: Engine, cases: Sequence[dict[str, Any]]) -> tuple[Any, int]:
    """What the engine makes of cases while a hook counts the tokens behind the last layer."""
    seen = 0

    def count(module: torch.nn.Module, inputs: object, output: tuple[torch.Tensor, None]) -> None:
        nonlocal seen
        seen += output[0].shape[0]

    handle = engine.stage.model.decoder.layers[-1].register_forward_hook(count)
    rows = answered(engine, cases)
    handle.remove()
    return rows, seen


def answered(engine: Engine, cases: Sequence[dict[str, Any]]) -> list[dict[str, list[Any]]]:
    """What the engine makes of some cases that it gets at once."""
    rows: list[dict[str, list[Any]]] = [{"tokens": [], "logprobs": []} for _ in cases]
    requests = [
        Request(
            identifier=row,
            prompt=tuple(case["prompt"]),
            max_tokens=case["max_tokens"],
            sampling=Sampling(**case["sampling"]),
            num_logprobs=case.get("num_logprobs"),
            scores_prompt=case.get("num_logprobs") is not None,
        )
        for row, case in enumerate(cases)
    ]
    for answers in engine.generate(requests):
        for answer in answers:
            row = rows[answer.identifier]
            row["logprobs"] += [score.logprob for score in answer.prompt_scores]
            if answer.token is not None:
                row["tokens"].append(answer.token.token)
                row["logprobs"].append(answer.token.logprob)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
