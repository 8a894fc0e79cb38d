"""The model of this rank, its optimizer and learning-rate schedule, built from the flags.

A model is chunks of Megatron-Core's GPT, wrapped for data parallelism; `ParallelNorm` is the norm
of local layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from megascan.errors import MissingError
from training.arguments import Settings, Sizes

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


class ParallelNorm:
    """Makes torch's LayerNorm or RMSNorm, ready for sequence parallelism.

    Megatron-Core's own wrapper refuses sequence parallelism, because torch's norms do not carry
    the mark by which their gradients are summed over the tensor-parallel ranks. `ParallelNorm` sets
    this mark.
    """

    def __new__(  # type: ignore[misc]  # a factory in place of a class, as layer specs expect
        cls, config: object, hidden_size: int, eps: float = 1e-5, **options: object
    ) -> torch.nn.Module:
        """Build the norm that ``config.normalization`` names for `hidden_size` features."""
        del options
        named = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        kind = named[getattr(config, "normalization")]  # noqa: B009 - config is untyped here
        norm: torch.nn.Module = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            mark = getattr(config, "sequence_parallel")  # noqa: B009
            setattr(parameter, "sequence_parallel", mark)  # noqa: B010 - torch's class lacks it
        return norm


def parameter_dtype(settings: Settings) -> torch.dtype:
    """Return the number format of the weights."""
    if settings.precision.bf16:
        return torch.bfloat16
    return torch.float16 if settings.precision.fp16 else torch.float32


def build_model(
    settings: Settings,
    sizes: Sizes,
    vocab_size: int,
    device: str,
    *,
    split: Callable[[torch.nn.Module], None] | None = None,
) -> list[DistributedDataParallel]:
    """Build the chunks that this rank holds, in the order of the interleaved schedule.

    `vocab_size` is the model's, before padding. `split` is called with each chunk before it is
    wrapped, where weight gradients are computed apart from the backward pass.
    """
    from megatron.core.transformer.module import Float16Module

    config = transformer_config(settings, sizes, device)
    chunks: list[torch.nn.Module] = list(_build_chunks(settings, sizes, config, vocab_size, device))
    if split is not None:
        for chunk in chunks:
            split(chunk)
    if settings.precision.bf16 or settings.precision.fp16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    return _wrap_for_data_parallelism(settings, config, chunks, is_split=split is not None)


def build_bare_model(
    settings: Settings, sizes: Sizes, vocab_size: int, device: str
) -> list[GPTModel]:
    """Build the chunks of this rank for a model that is used, not trained.

    All weights have the number format of the settings; their contents are undefined.
    """
    config = transformer_config(settings, sizes, device)
    config.perform_initialization = False
    chunks = _build_chunks(settings, sizes, config, vocab_size, device)
    return [chunk.to(parameter_dtype(settings)).eval() for chunk in chunks]


def build_stage(
    settings: Settings, sizes: Sizes, vocab_size: int, device: str, *, layers: int, is_first: bool
) -> GPTModel:
    """Build a pipeline stage other than the last, in a process that is no rank of the pipeline.

    The stage has `layers` layers and, if it is the first, the embedding; weights are undefined.
    """
    own_model = replace(settings.model, untie_embeddings_and_output_weights=True)
    own_pipeline = replace(
        settings.pipeline,
        pipeline_model_parallel_layout=None,
        microbatch_group_size_per_vp_stage=None,
    )
    settings = replace(settings, model=own_model, pipeline=own_pipeline)
    sizes = replace(sizes, num_layers=layers, pipeline_size=1, virtual_pipeline_size=None)
    config = transformer_config(settings, sizes, device)
    config.perform_initialization = False
    padded_size = padded_vocab_size(settings, sizes, vocab_size)
    stage = _build_chunk(
        settings, sizes, config, padded_size, is_first=is_first, is_last=False, virtual_stage=None
    )
    return stage.to(device).to(parameter_dtype(settings)).eval()


def _build_chunks(
    settings: Settings, sizes: Sizes, config: TransformerConfig, vocab_size: int, device: str
) -> list[GPTModel]:
    from megatron.core import parallel_state

    padded_size = padded_vocab_size(settings, sizes, vocab_size)
    pipeline_rank = parallel_state.get_pipeline_model_parallel_rank()
    chunks: list[GPTModel] = []
    for chunk in range(sizes.model_chunks):
        stage = chunk if sizes.virtual_pipeline_size else None
        model = _build_chunk(
            settings,
            sizes,
            config,
            padded_size,
            is_first=pipeline_rank == 0 and chunk == 0,
            is_last=pipeline_rank == sizes.pipeline_size - 1 and chunk == sizes.model_chunks - 1,
            virtual_stage=stage,
        ).to(device)
        chunks.append(model)
    return chunks


def padded_vocab_size(settings: Settings, sizes: Sizes, vocab_size: int) -> int:
    """Round the vocabulary up, so that every tensor-parallel rank holds an equal share."""
    multiple = settings.model.make_vocab_size_divisible_by * sizes.tensor_size
    return math.ceil(vocab_size / multiple) * multiple


def transformer_config(settings: Settings, sizes: Sizes, device: str) -> TransformerConfig:
    """Translate the flags into Megatron-Core's configuration."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        **_network(settings, sizes),
        **_experts(settings),
        **_recomputation(settings),
        **_parallelism(settings, sizes, device),
        **_number_formats(settings),
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )


def _network(settings: Settings, sizes: Sizes) -> dict[str, object]:
    model = settings.model
    return {
        "num_layers": sizes.num_layers,
        "hidden_size": sizes.hidden_size,
        "ffn_hidden_size": sizes.ffn_hidden_size,
        "num_attention_heads": sizes.num_attention_heads,
        "num_query_groups": sizes.num_query_groups,
        "kv_channels": sizes.kv_channels,
        "normalization": model.normalization,
        "layernorm_epsilon": model.norm_epsilon,
        "qk_layernorm": model.qk_layernorm,
        "gated_linear_unit": model.swiglu,
        "activation_func": _activation(settings),
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_qkv_bias,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "init_method_std": model.init_method_std,
        "transformer_impl": model.transformer_impl,
    }


def _experts(settings: Settings) -> dict[str, object]:
    moe = settings.moe
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.moe_router_topk,
        "moe_router_pre_softmax": moe.moe_router_pre_softmax,
        "moe_router_load_balancing_type": moe.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": moe.moe_aux_loss_coeff,
        "moe_token_dispatcher_type": moe.moe_token_dispatcher_type,
        "moe_grouped_gemm": moe.moe_grouped_gemm,
    }


def _recomputation(settings: Settings) -> dict[str, object]:
    recompute = settings.recompute
    return {
        "recompute_granularity": recompute.recompute_granularity,
        "recompute_method": recompute.recompute_method,
        "recompute_num_layers": recompute.recompute_num_layers,
        "recompute_modules": list(recompute.recompute_modules or ("core_attn",)),
    }


def _parallelism(settings: Settings, sizes: Sizes, device: str) -> dict[str, object]:
    parallel, pipeline = settings.parallel, settings.pipeline
    overlaps = sizes.virtual_pipeline_size is not None and parallel.overlap_p2p_comm
    return {
        "tensor_model_parallel_size": sizes.tensor_size,
        "pipeline_model_parallel_size": sizes.pipeline_size,
        "virtual_pipeline_model_parallel_size": sizes.virtual_pipeline_size,
        "context_parallel_size": sizes.context_size,
        "expert_model_parallel_size": sizes.expert_size,
        "sequence_parallel": parallel.sequence_parallel,
        "use_cpu_initialization": device == "cpu" or parallel.use_cpu_initialization,
        "overlap_p2p_comm": overlaps,
        "batch_p2p_comm": not overlaps,
        # On the CPU gloo may still be sending an output when the schedule would free it.
        "deallocate_pipeline_outputs": device != "cpu",
        "pipeline_model_parallel_layout": pipeline.pipeline_model_parallel_layout,
        "microbatch_group_size_per_vp_stage": pipeline.microbatch_group_size_per_vp_stage,
    }


def _number_formats(settings: Settings) -> dict[str, object]:
    dtype = parameter_dtype(settings)
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": settings.precision.bf16,
        "fp16": settings.precision.fp16,
    }


def _activation(settings: Settings) -> Callable[[torch.Tensor], torch.Tensor]:
    from megatron.core.transformer.utils import openai_gelu
    from torch.nn import functional

    if settings.model.swiglu:
        return functional.silu
    gelu: Callable[[torch.Tensor], torch.Tensor] = openai_gelu
    return gelu if settings.model.openai_gelu else functional.gelu


def _build_chunk(
    settings: Settings,
    sizes: Sizes,
    config: TransformerConfig,
    padded_size: int,
    *,
    is_first: bool,
    is_last: bool,
    virtual_stage: int | None,
) -> GPTModel:
    from megatron.core.models.gpt import GPTModel

    model = settings.model
    return GPTModel(
        config=config,
        transformer_layer_spec=_layer_spec(settings, config, virtual_stage),
        vocab_size=padded_size,
        max_sequence_length=sizes.max_position_embeddings,
        pre_process=is_first,
        post_process=is_last,
        fp16_lm_cross_entropy=False,
        parallel_output=True,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        rope_scaling=model.use_rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
        seq_len_interpolation_factor=model.rotary_seq_len_interpolation_factor,
        vp_stage=virtual_stage,
    )


def _layer_spec(
    settings: Settings, config: TransformerConfig, virtual_stage: int | None
) -> TransformerBlockSubmodules:
    """Return the layers of one chunk: Megatron-Core's own, or Transformer Engine's."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    use_engine = settings.model.transformer_impl == "transformer_engine"
    if use_engine:
        _require_transformer_engine()
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=use_engine,
        normalization=settings.model.normalization,
        vp_stage=virtual_stage,
    )
    if not use_engine:
        _use_parallel_norm(block)
    return block


def _require_transformer_engine() -> None:
    try:
        import transformer_engine  # noqa: F401
    except ImportError:
        raise MissingError(
            "--transformer-impl transformer_engine needs the package transformer-engine; "
            "install the extra 'te', or use --transformer-impl local"
        ) from None


def _use_parallel_norm(block: TransformerBlockSubmodules) -> None:
    """Put our norm where the local layers have Megatron-Core's wrapper."""

    block.layer_norm = ParallelNorm
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = ParallelNorm
        layer.submodules.pre_mlp_layernorm = ParallelNorm
        attention = layer.submodules.self_attention.submodules
        for name in ("q_layernorm", "k_layernorm"):
            if getattr(attention, name).__name__ == "WrappedTorchNorm":
                setattr(attention, name, ParallelNorm)


def _wrap_for_data_parallelism(
    settings: Settings,
    config: TransformerConfig,
    chunks: list[torch.nn.Module],
    *,
    is_split: bool,
) -> list[DistributedDataParallel]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    parallel, precision = settings.parallel, settings.precision
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=precision.bf16 or precision.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        bucket_size=parallel.ddp_bucket_size,
        delay_wgrad_compute=is_split,
    )
    wrapped = [
        DistributedDataParallel(
            config=config,
            ddp_config=ddp_config,
            module=chunk,
            # Later chunks finish their backward pass first; only the first chunk needs buckets.
            disable_bucketing=index > 0,
        )
        for index, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        chunk.broadcast_params()
    return wrapped


def build_optimizer(
    settings: Settings, sizes: Sizes, chunks: list[DistributedDataParallel]
) -> MegatronOptimizer:
    """Make Megatron-Core's optimizer over the chunks of this rank."""
    from megatron.core.optimizer import get_megatron_optimizer

    return get_megatron_optimizer(_optimizer_config(settings, sizes), chunks)


def _optimizer_config(settings: Settings, sizes: Sizes) -> OptimizerConfig:
    from megatron.core.optimizer import OptimizerConfig

    wanted, precision, parallel = settings.optimizer, settings.precision, settings.parallel
    return OptimizerConfig(
        optimizer=wanted.optimizer,
        lr=sizes.lr,
        min_lr=wanted.min_lr,
        weight_decay=wanted.weight_decay,
        clip_grad=wanted.clip_grad,
        adam_beta1=wanted.adam_beta1,
        adam_beta2=wanted.adam_beta2,
        adam_eps=wanted.adam_eps,
        sgd_momentum=wanted.sgd_momentum,
        bf16=precision.bf16,
        fp16=precision.fp16,
        params_dtype=parameter_dtype(settings),
        loss_scale=precision.loss_scale,
        initial_loss_scale=precision.initial_loss_scale,
        min_loss_scale=precision.min_loss_scale,
        loss_scale_window=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        overlap_param_gather=parallel.overlap_param_gather,
        optimizer_cpu_offload=wanted.optimizer_cpu_offload,
        optimizer_offload_fraction=wanted.optimizer_offload_fraction,
    )


def build_schedule(
    settings: Settings, sizes: Sizes, optimizer: MegatronOptimizer
) -> OptimizerParamScheduler:
    """Make the schedule of learning rate and weight decay, which counts in samples."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    wanted, batch = settings.optimizer, sizes.global_batch_size
    decay_samples = (wanted.lr_decay_iters or sizes.train_iters) * batch
    warmup_samples = wanted.lr_warmup_iters * batch
    if wanted.lr_warmup_fraction is not None:
        warmup_samples = int(wanted.lr_warmup_fraction * decay_samples)
    wsd_iters = wanted.lr_wsd_decay_iters
    return OptimizerParamScheduler(
        optimizer,
        init_lr=wanted.lr_warmup_init,
        max_lr=sizes.lr,
        min_lr=wanted.min_lr,
        lr_warmup_steps=warmup_samples,
        lr_decay_steps=decay_samples,
        lr_decay_style=wanted.lr_decay_style,
        start_wd=wanted.weight_decay,
        end_wd=wanted.weight_decay,
        wd_incr_steps=sizes.train_iters * batch,
        wd_incr_style="constant",
        # The flags of the present run decide, not those a checkpoint was written with.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=None if wsd_iters is None else wsd_iters * batch,
        lr_wsd_decay_style=wanted.lr_wsd_decay_style,
    )
