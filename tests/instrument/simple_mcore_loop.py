"""A loop as NVIDIA's first example of megatron.core has it: everything bound early, torch's Adam.

`finalize_model_grads` is imported by its name, called by the loop itself, and never told to the
model's configuration; the optimizer is torch's own. The tracer is started after all of that.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

import megascan
from training import cpu_backend

SEQUENCE, VOCABULARY = 16, 64


def model_on_cpu() -> DistributedDataParallel:
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, use_cpu_initialization=True,
        pipeline_dtype=torch.float32, gradient_accumulation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False,
    )  # fmt: skip
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
    )
    settings = DistributedDataParallelConfig(use_distributed_optimizer=False)
    return DistributedDataParallel(config=config, ddp_config=settings, module=gpt)


def batches():
    while True:
        yield torch.randint(VOCABULARY, (2, SEQUENCE + 1))


def forward_step(data, model):
    tokens = next(data)
    positions = torch.arange(SEQUENCE).expand(2, -1)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
    output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
    return output, partial(loss_of, tokens)


def loss_of(tokens: torch.Tensor, output: torch.Tensor):
    loss = output.float().mean()
    return loss, {"loss": loss.detach()}


def train(folder: Path, *, updates: bool) -> None:
    """Four traced iterations; without updates the loop only computes gradients."""
    model = model_on_cpu()
    optimizer = torch.optim.Adam(model.parameters())
    run_schedule, data = get_forward_backward_func(), batches()
    config = megascan.TraceConfig(enabled=True, directory=folder, interval=2, window=2)
    with megascan.start(config) as tracer:
        for number in range(1, 5):
            with tracer.iteration(number):
                optimizer.zero_grad()
                run_schedule(
                    forward_step_func=forward_step, data_iterator=data, model=model,
                    num_microbatches=2, seq_length=SEQUENCE, micro_batch_size=2,
                    decoder_seq_length=SEQUENCE, forward_only=False,
                )  # fmt: skip
                if updates:
                    finalize_model_grads([model])
                    optimizer.step()


def main(folder: Path) -> None:
    """Train with and without updates, into two folders."""
    cpu_backend.install()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(create_gloo_process_groups=True)
    model_parallel_cuda_manual_seed(123, force_reset_rng=True)
    train(folder / "updated", updates=True)
    train(folder / "not-updated", updates=False)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
