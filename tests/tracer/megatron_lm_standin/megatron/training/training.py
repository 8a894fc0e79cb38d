"""The parts of Megatron-LM's training loop by which `megascan.launch` knows it."""

from __future__ import annotations

import json

import foreign_trainer
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.training.arguments import get_args, parse_args

from training import cpu_backend


def pretrain(forward_step_func) -> None:
    arguments = parse_args()
    cpu_backend.install()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(create_gloo_process_groups=True)
    torch.manual_seed(1234)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    model = foreign_trainer.build(arguments)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2), model)
    data = foreign_trainer.batches(dist.get_rank())
    losses = train(forward_step_func, model, optimizer, data)
    path = arguments.losses.with_suffix(f".{dist.get_rank()}.json")
    path.write_text(json.dumps(losses))
    dist.destroy_process_group()


def train(forward_step_func, model, optimizer, data) -> list[float]:
    arguments = get_args()
    iteration, losses = arguments.iteration, []
    forward_backward_func = get_forward_backward_func()
    while iteration < arguments.train_iters:
        losses.append(train_step(forward_step_func, data, model, optimizer, forward_backward_func))
        iteration += 1
        arguments.iteration = iteration
    return losses


def train_step(forward_step_func, data, model, optimizer, forward_backward_func) -> float:
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    results = forward_backward_func(
        forward_step_func=forward_step_func,
        data_iterator=data,
        model=model,
        num_microbatches=2,
        seq_length=foreign_trainer.SEQUENCE,
        micro_batch_size=2,
        forward_only=False,
    )
    optimizer.step()
    return sum(float(result["loss"]) for result in results)
