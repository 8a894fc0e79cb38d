"""A training loop on megatron.core alone, to hold the trainer's losses against.

Start it with torchrun; all ranks are tensor parallel. Prints loss and gradient norm of every
iteration as the trainer's log does. Sizes are those of `conftest.TINY_MODEL`.
"""

# ruff: noqa: E402 - the CPU takes the place of CUDA before megatron.core is imported

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist

from training import cpu_backend
from training.data.tokenizers import NullTokenizer

cpu_backend.install()

from megatron.core import parallel_state, tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

SEED, ITERATIONS, BATCH, SEQUENCE, LR = 1234, 4, 4, 32, 5e-3
Samples = Iterator[dict[str, torch.Tensor]]


def build_model() -> DistributedDataParallel:
    config = TransformerConfig(
        num_layers=4, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True,
        tensor_model_parallel_size=dist.get_world_size(), pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=True,
    )  # fmt: skip
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


def build_samples() -> Samples:
    config = GPTDatasetConfig(
        random_seed=SEED, sequence_length=SEQUENCE, tokenizer=NullTokenizer(60),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        split="1", path_to_cache=None,
    )  # fmt: skip
    sizes = [ITERATIONS * BATCH, 0, 0]
    builder = BlendedMegatronDatasetBuilder(MockGPTDataset, sizes, lambda: True, config)
    dataset = builder.build()[0]
    for index in range(ITERATIONS * BATCH):
        yield {name: tensor.unsqueeze(0) for name, tensor in dataset[index].items()}


def forward(
    samples: Samples, model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]]:
    sample = next(samples)
    output = model(
        sample["tokens"], sample["position_ids"], sample["attention_mask"], labels=sample["labels"]
    )
    mask = sample["loss_mask"]

    def loss(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = (values * mask).sum() / mask.sum()
        return mean, mean.detach().clone()  # the schedule scales the first in place

    return output, loss


def main() -> None:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(dist.get_world_size(), create_gloo_process_groups=True)
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    tensor_parallel.model_parallel_cuda_manual_seed(SEED)
    model, samples = build_model(), build_samples()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=LR, min_lr=0.0, weight_decay=0.01), [model]
    )
    schedule = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=LR, min_lr=0.0, lr_warmup_steps=0,
        lr_decay_steps=ITERATIONS, lr_decay_style="linear", start_wd=0.01, end_wd=0.01,
        wd_incr_steps=ITERATIONS, wd_incr_style="constant",
    )  # fmt: skip
    for _ in range(ITERATIONS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward, data_iterator=samples, model=model, seq_length=SEQUENCE,
            num_microbatches=BATCH, micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        _, grad_norm, _ = optimizer.step()
        schedule.step(increment=1)
        if dist.get_rank() == 0:
            print(f"lm loss: {float(sum(losses) / BATCH):.6E} grad norm: {grad_norm:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
