"""Loads every model of a folder in many layouts and compares logits: ``layouts.py FOLDER [all]``.

Layouts are made one after the other in one job of four or eight ranks; the ranks left over are data
parallel. Rank 0 prints one line a layout and model, ``tp2-pp2-vpp1-ep1 llama3 9.5e-07``: the
largest difference on any rank, each comparing its own part of the vocabulary. Without ``all`` only
those layouts that combine several axes are tried. A model that a layout does not divide is left
out there, with the sentence that says so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open

from megascan.errors import ConfigError
from training.arguments import Settings, Sizes, resolve_sizes
from training.checkpoint_folder import settings_to_use
from training.distributed import Launch, initialize, read_launch, seed_everything, silence

# tensor, pipeline, chunks on a rank, expert
COMBINED = ((2, 2, 2, 1), (4, 1, 1, 1), (1, 1, 1, 4), (1, 2, 1, 2))
OTHERS = (
    (1, 1, 1, 1),
    (2, 1, 1, 1),
    (1, 2, 1, 1),
    (2, 2, 1, 1),
    (1, 1, 1, 2),
    (4, 2, 1, 1),
    (2, 2, 1, 2),
)


def main(folder: Path, layouts: tuple[tuple[int, int, int, int], ...]) -> None:
    """Try every layout with every model."""
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    silence("cpu")
    launch = read_launch(os.environ)
    models = sorted(path for path in folder.iterdir() if (path / "config.json").is_file())
    for tensor, pipeline, chunks, expert in layouts:
        if tensor * pipeline * expert > launch.world_size:
            continue
        settled = False
        for model in models:
            if expert > 1 and "num_local_experts" not in (model / "config.json").read_text():
                continue
            try:
                settings, sizes, values = _settings(
                    model, launch.world_size, tensor, pipeline, chunks, expert
                )
            except ConfigError as error:
                if launch.rank == 0:
                    print(f"left out: {model.name}: {error}")
                continue
            if not settled:
                _take_places(settings, sizes, launch)
                settled = True
            worst = _difference(model, settings, sizes, values)
            if launch.rank == 0:
                print(f"tp{tensor}-pp{pipeline}-vpp{chunks}-ep{expert} {model.name} {worst:.2e}")
    dist.destroy_process_group()


def _settings(
    model: Path, world_size: int, tensor: int, pipeline: int, chunks: int, expert: int
) -> tuple[Settings, Sizes, dict[str, object]]:
    from training.hf.families import read_family

    values = read_family(model)
    settings = settings_to_use(
        values,
        "float32",
        seq_length=40,
        micro_batch_size=1,
        global_batch_size=16,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        num_virtual_stages_per_pipeline_rank=chunks if chunks > 1 else None,
        expert_model_parallel_size=expert,
    )
    return settings, resolve_sizes(settings, world_size, is_trained=False), values


def _take_places(settings: Settings, sizes: Sizes, launch: Launch) -> None:
    """Join the job, or have its ranks take other places in it."""
    if not dist.is_initialized():
        initialize(settings, sizes, launch, "cpu")
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor_size,
        pipeline_model_parallel_size=sizes.pipeline_size,
        virtual_pipeline_model_parallel_size=sizes.virtual_pipeline_size,
        expert_model_parallel_size=sizes.expert_size,
    )
    seed_everything(settings.batch.seed)


def _difference(folder: Path, settings: Settings, sizes: Sizes, values: dict[str, object]) -> float:
    """Load a model in the present layout, run it, and compare; the largest over all ranks."""
    from training.distributed import allow_without_transformer_engine
    from training.hf.weights import load_hf
    from training.model import build_bare_model

    allow_without_transformer_engine()
    vocab_size = int(str(values["model_vocab_size"]))
    chunks = build_bare_model(settings, sizes, vocab_size, "cpu")
    load_hf(folder, chunks)
    with safe_open(folder / "expected.safetensors", "pt") as expected:
        tokens, logits = expected.get_tensor("tokens"), expected.get_tensor("logits")
    worst = torch.zeros(())
    for text, ours in enumerate(_run(chunks, tokens)):
        worst = torch.maximum(worst, (ours - _own_columns(logits[text], ours)).abs().max())
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def _run(chunks: list[torch.nn.Module], tokens: torch.Tensor) -> Iterator[torch.Tensor]:
    """The logits (token, own part of the vocabulary) of each text, on the last stage only."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    texts = [iter(tokens) for _ in chunks]

    def step(data: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[object, object]:
        text = next(data)[None]
        positions = torch.arange(text.shape[1])[None]
        return model(text, positions, None), lambda output, **_: output

    with torch.no_grad():
        outputs = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=texts if len(chunks) > 1 else texts[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(tokens),
            seq_length=tokens.shape[1],
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    for output in outputs or ():
        yield output[0]


def _own_columns(logits: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """The expected logits of this rank's part of the vocabulary; zeros where it is padded."""
    from megatron.core import parallel_state

    start = parallel_state.get_tensor_model_parallel_rank() * own.shape[-1]
    real = logits[:, start : start + own.shape[-1]]
    return torch.nn.functional.pad(real, (0, own.shape[-1] - real.shape[-1]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), COMBINED + OTHERS if sys.argv[2:] == ["all"] else COMBINED)
