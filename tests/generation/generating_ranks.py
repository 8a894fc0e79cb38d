"""Started on several ranks: generate for several models in one layout; rank 0 prints JSON.

python generating_ranks.py TP PP FOLDER…
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from training.distributed import finalize, read_launch
from training.generation.job import open_job
from training.generation.request import Request, Sampling

CASES = json.loads(os.environ["CASES"])


def main() -> None:
    tensor, pipeline, *folders = sys.argv[1:]
    launch = read_launch(os.environ)
    flags = ["--tensor-model-parallel-size", tensor, "--pipeline-model-parallel-size", pipeline]
    flags += ["--distributed-backend", "gloo", "--tokenizer-type", "NullTokenizer"]
    flags += ["--vocab-size", "100", "--inference-max-requests", "3"]
    flags += ["--inference-dynamic-batching-max-tokens", "7", "--inference-max-seq-length", "64"]
    found = {}
    for number, folder in enumerate(folders):
        job = open_job([*flags, "--load-hf", folder], launch)
        if number == 0:
            job.join()
        engine = job.build_engine()
        rows: dict[int, dict[str, list[object]]] = {}
        requests = [
            Request(
                identifier=row,
                prompt=tuple(case["prompt"]),
                max_tokens=case["max_tokens"],
                sampling=Sampling(**case["sampling"]),
                num_logprobs=case.get("num_logprobs"),
                scores_prompt=case.get("num_logprobs") is not None,
            )
            for row, case in enumerate(CASES)
        ]
        for answers in engine.generate(requests):
            for answer in answers:
                row = rows.setdefault(answer.identifier, {"tokens": [], "logprobs": []})
                row["logprobs"] += [score.logprob for score in answer.prompt_scores]
                if answer.token is not None:
                    row["tokens"].append(answer.token.token)
                    row["logprobs"].append(answer.token.logprob)
        found[Path(folder).name] = [rows[row] for row in range(len(CASES))]
    if launch.rank == 0:
        print("RESULT " + json.dumps(found), flush=True)
    finalize()


if __name__ == "__main__":
    main()
