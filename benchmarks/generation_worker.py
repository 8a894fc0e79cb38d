"""One engine of `benchmarks.generation` in a process of its own.

    python -m benchmarks.generation_worker make FOLDER cpu|gpu CONFIG DTYPE
    python -m benchmarks.generation_worker ours|transformers|… FOLDER cpu|gpu

`make` writes the model. The others read one order a line and answer each with a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.generation.engine import Engine
    from training.generation.request import Request

Prompts = Sequence[Sequence[int]]
Generate = Callable[[Prompts, int], list[list[int]]]

LONGEST = 1024
MOST_ROWS = 32


def main() -> int:
    """Make a model, or follow orders until stdin ends."""
    name, folder, device = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    if name == "make":
        make(folder, device, json.loads(sys.argv[4]), sys.argv[5])
        return 0
    build = {
        "ours": ours,
        "ours-eager": ours_eager,
        "transformers": of_transformers,
        "megatron-core": of_megatron_core,
    }
    generate = build[name](folder, device)
    for line in sys.stdin:
        order = json.loads(line)
        prompts, num_tokens = order["prompts"], order["num_tokens"]
        first_s, first_cpu_s, _ = timed(generate, prompts, 1)
        total_s, total_cpu_s, tokens = timed(generate, prompts, num_tokens)
        answer = {
            "first_token_s": first_s, "first_token_cpu_s": first_cpu_s,
            "total_s": total_s, "total_cpu_s": total_cpu_s, "tokens": tokens,
        }  # fmt: skip
        print(json.dumps(answer), flush=True)
    return 0


def timed(
    generate: Generate, prompts: Prompts, num_tokens: int
) -> tuple[float, float, list[list[int]]]:
    """Seconds of one generation, seconds of the processor, and what it gave."""
    began, began_cpu = time.perf_counter(), time.process_time()
    tokens = generate(prompts, num_tokens)
    return time.perf_counter() - began, time.process_time() - began_cpu, tokens


def make(folder: Path, device: str, sizes: dict[str, int], dtype: str) -> None:
    """Write a Hugging Face folder with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    # A wider start than the default: near-equal logits would make a choice of rounding errors.
    config = LlamaConfig(**sizes, initializer_range=0.08, eos_token_id=None, bos_token_id=None)
    with torch.device("cpu" if device == "cpu" else "cuda"):
        model = LlamaForCausalLM(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def ours_eager(folder: Path, device: str) -> Generate:
    """This project's engine without CUDA graphs."""
    return ours(folder, device, "--cuda-graph-impl", "none")


def ours(folder: Path, device: str, *more: str) -> Generate:
    """This project's engine."""
    from training.distributed import read_launch
    from training.generation.job import open_job
    from training.generation.request import Request, Sampling

    job = open_job([*flags(folder, device), *more], read_launch(os.environ))
    job.join()
    engine = job.build_engine()

    def generate(prompts: Prompts, num_tokens: int) -> list[list[int]]:
        return tokens_of(
            engine,
            [
                Request(
                    identifier=row, prompt=tuple(ids), max_tokens=num_tokens, sampling=Sampling()
                )
                for row, ids in enumerate(prompts)
            ],
        )

    return generate


def tokens_of(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """Answer requests that are numbered from 0; gives the tokens of each."""
    rows: list[list[int]] = [[] for _ in requests]
    for answers in engine.generate(requests):
        for answer in answers:
            if answer.token is not None:
                rows[answer.identifier].append(answer.token.token)
    return rows


def flags(
    folder: Path, device: str, *, num_rows: int = MOST_ROWS, longest: int = LONGEST
) -> list[str]:
    """Of a job that reads the folder."""
    return [
        *("--load-hf", str(folder), "--tokenizer-type", "NullTokenizer", "--vocab-size", "1"),
        *("--inference-max-seq-length", str(longest), "--inference-max-requests", str(num_rows)),
        *("--distributed-backend", "gloo" if device == "cpu" else "nccl"),
    ]


def of_transformers(folder: Path, device: str) -> Generate:
    """Hugging Face's `generate` with its defaults."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model = model.to("cpu" if device == "cpu" else "cuda").eval()

    def generate(prompts: Prompts, num_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts, device=model.device)
        with torch.inference_mode():
            answer = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens,
                min_new_tokens=num_tokens, do_sample=False, pad_token_id=0,
            )  # fmt: skip
        rows: list[list[int]] = answer[:, ids.shape[1] :].tolist()
        return rows

    return generate


class Numbers:
    """A tokenizer for texts that are numbers, as Megatron-Core's controller wants one."""

    bos = eod = -1

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def tokenize(self, text: str) -> list[int]:
        """Read the numbers."""
        return [int(word) for word in text.split()]

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Write the numbers."""
        del skip_special_tokens
        return " ".join(map(str, ids))


def of_megatron_core(folder: Path, device: str) -> Generate:
    """Megatron-Core's static engine over a model of ours that was built without an optimizer."""
    from training.distributed import read_launch, seed_everything
    from training.generation.job import open_job

    job = open_job(flags(folder, device), read_launch(os.environ))
    job.join()
    seed_everything(0)  # it enters the random state of dropout, also where nothing is dropped
    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.inference.engines import StaticInferenceEngine
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
        GPTInferenceWrapper,
    )
    from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import (
        InferenceWrapperConfig,
    )
    from megatron.core.inference.sampling_params import SamplingParams
    from megatron.core.inference.text_generation_controllers import text_generation_controller

    from training.model import build_bare_model

    (model,) = build_bare_model(job.settings, job.sizes, job.vocab_size, job.device)
    job.source.load([model])
    config = InferenceWrapperConfig(
        hidden_size=job.sizes.hidden_size,
        params_dtype=model.config.params_dtype,
        inference_batch_times_seqlen_threshold=-1,
        padded_vocab_size=job.vocab_size,
        inference_max_requests=MOST_ROWS,
        inference_max_seq_length=LONGEST,
    )
    wrapper = GPTInferenceWrapper(model, config, StaticInferenceContext.from_config(config))
    controller = text_generation_controller.TextGenerationController(
        wrapper, Numbers(job.vocab_size)
    )
    engine: Any = StaticInferenceEngine(controller, legacy=True, max_batch_size=MOST_ROWS)

    def generate(prompts: Prompts, num_tokens: int) -> list[list[int]]:
        sampling = SamplingParams(top_k=1, num_tokens_to_generate=num_tokens)
        sampling.add_attributes({"no_early_termination": True})
        texts = [" ".join(map(str, ids)) for ids in prompts]
        answers = engine.generate(prompts=texts, sampling_params=sampling)
        return [list(map(int, answer.generated_tokens)) for answer in answers]

    return generate


if __name__ == "__main__":
    sys.exit(main())
