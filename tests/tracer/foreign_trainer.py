"""A small trainer on megatron.core that knows MegaScan by five lines (marked below).

torchrun … foreign_trainer.py --losses FILE [--trace DIR] [--tp 2] [--pp 2] [--vpp 2] …
torchrun … foreign_trainer.py --plan FILE
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

import megascan
from training import cpu_backend

SEQUENCE, HIDDEN, LAYERS, VOCABULARY = 16, 32, 4, 64


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name, default in (("tp", 1), ("pp", 1), ("vpp", 1), ("iterations", 4), ("microbatches", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("distributed-optimizer", "overlap", "recompute", "sleep-forever"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--losses", type=Path, required=True)
    megascan.add_trace_arguments(parser)  # 1
    return parser.parse_args(arguments)


def build(options: argparse.Namespace) -> list[DistributedDataParallel]:
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        use_cpu_initialization=True,
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        virtual_pipeline_model_parallel_size=options.vpp if options.vpp > 1 else None,
        pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        overlap_p2p_comm=options.overlap and options.vpp > 1,
        batch_p2p_comm=not (options.overlap and options.vpp > 1),
        recompute_granularity="full" if options.recompute else None,
        recompute_method="uniform" if options.recompute else None,
        recompute_num_layers=1 if options.recompute else None,
    )
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=options.distributed_optimizer,
        overlap_grad_reduce=options.overlap,
        overlap_param_gather=options.overlap and options.distributed_optimizer,
    )
    chunks = []
    for stage in range(options.vpp):
        place = {"vp_stage": stage if options.vpp > 1 else None}
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **place),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **place),
            parallel_output=True,
            **place,
        )
        chunks.append(DistributedDataParallel(config=config, ddp_config=ddp, module=model))
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = [chunk.no_sync for chunk in chunks]
    if options.vpp == 1:
        config.no_sync_func = config.no_sync_func[0]
    return chunks


def batches(seed: int):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(VOCABULARY, (2, SEQUENCE + 1), generator=generator)


def loss_of(labels_loss: torch.Tensor, output: torch.Tensor):
    loss = output.float().mean()
    logged = loss.detach().clone()
    dist.all_reduce(logged, group=parallel_state.get_data_parallel_group())
    return loss, {"loss": logged}


def forward_step(data, model):
    tokens = next(data)
    positions = torch.arange(SEQUENCE).expand(2, -1)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
    output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
    return output, partial(loss_of, tokens)


def train(options: argparse.Namespace) -> None:
    """One job, from its process groups to their end; writes losses and sums of weights."""
    parallel_state.initialize_model_parallel(
        options.tp,
        options.pp,
        virtual_pipeline_model_parallel_size=options.vpp if options.vpp > 1 else None,
        create_gloo_process_groups=True,
    )
    torch.manual_seed(1234 + parallel_state.get_pipeline_model_parallel_rank())
    tensor_parallel.model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    chunks = build(options)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=1e-2, use_distributed_optimizer=options.distributed_optimizer, clip_grad=1.0
        ),
        chunks,
    )
    data = [batches(parallel_state.get_data_parallel_rank()) for _ in chunks]
    tracer = megascan.start(megascan.TraceConfig.from_arguments(options))  # 2
    losses = []
    for iteration in range(1, options.iterations + 1):
        with tracer.iteration(iteration):  # 3
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            results = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=data if len(data) > 1 else data[0],
                model=chunks,
                num_microbatches=options.microbatches,
                seq_length=SEQUENCE,
                micro_batch_size=2,
                forward_only=False,
            )
            _, norm, _ = optimizer.step()
        losses.append([float(result["loss"]) for result in results] + [float(norm)])
        print(f"iteration {iteration}", flush=True)
    weights = [float(p.detach().double().sum()) for chunk in chunks for p in chunk.parameters()]
    path = options.losses.with_suffix(f".{dist.get_rank()}.json")
    path.write_text(json.dumps({"losses": losses, "weights": weights}))
    tracer.close()  # 4
    parallel_state.destroy_model_parallel()


def main() -> None:
    """One job, or the jobs of a plan one after the other: each a line of arguments in a file."""
    cpu_backend.install()
    dist.init_process_group("gloo")
    plan = [parse()] if sys.argv[1] != "--plan" else []
    if not plan:
        lines = Path(sys.argv[2]).read_text().splitlines()
        plan = [parse(line.split()) for line in lines]
    for options in plan:
        train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
