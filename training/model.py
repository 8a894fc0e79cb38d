"""The GPT model of this rank, as Megatron-Core's chunks wrapped for data parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megascan.errors import MissingError
from training.arguments import Settings, Sizes

if TYPE_CHECKING:
    import torch
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


def parameter_dtype(settings: Settings) -> torch.dtype:
    """The number format of the weights."""
    import torch

    if settings.precision.bf16:
        return torch.bfloat16
    return torch.float16 if settings.precision.fp16 else torch.float32


def build_model(
    settings: Settings, sizes: Sizes, vocab_size: int, device: str
) -> list[DistributedDataParallel]:
    """Build the chunks that this rank holds, in the order of the interleaved schedule.

    `vocab_size` is the tokenizer's; the embedding pads it.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.module import Float16Module

    config = transformer_config(settings, sizes, device)
    padded_size = padded_vocab_size(settings, sizes, vocab_size)
    pipeline_rank = parallel_state.get_pipeline_model_parallel_rank()
    chunks: list[torch.nn.Module] = []
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
    if settings.precision.bf16 or settings.precision.fp16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    return _wrap_for_data_parallelism(settings, config, chunks)


def padded_vocab_size(settings: Settings, sizes: Sizes, vocab_size: int) -> int:
    """Round the vocabulary up, so that every tensor-parallel rank holds an equal share."""
    multiple = settings.model.make_vocab_size_divisible_by * sizes.tensor_size
    return -(-vocab_size // multiple) * multiple


def transformer_config(settings: Settings, sizes: Sizes, device: str) -> TransformerConfig:
    """Translate the flags into Megatron-Core's configuration."""
    from megatron.core.transformer import TransformerConfig
    from torch.nn import functional

    model, parallel, moe = settings.model, settings.parallel, settings.moe
    recompute = settings.recompute
    interleaved = sizes.virtual_pipeline_size is not None
    dtype = parameter_dtype(settings)
    return TransformerConfig(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        ffn_hidden_size=sizes.ffn_hidden_size,
        num_attention_heads=sizes.num_attention_heads,
        num_query_groups=sizes.num_query_groups,
        kv_channels=sizes.kv_channels,
        normalization=model.normalization,
        layernorm_epsilon=model.norm_epsilon,
        qk_layernorm=model.qk_layernorm,
        gated_linear_unit=model.swiglu,
        activation_func=functional.silu if model.swiglu else functional.gelu,
        add_bias_linear=model.add_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        init_method_std=model.init_method_std,
        transformer_impl=model.transformer_impl,
        num_moe_experts=moe.num_experts,
        moe_router_topk=moe.moe_router_topk,
        moe_router_pre_softmax=moe.moe_router_pre_softmax,
        moe_router_load_balancing_type=moe.moe_router_load_balancing_type,
        moe_aux_loss_coeff=moe.moe_aux_loss_coeff,
        moe_token_dispatcher_type=moe.moe_token_dispatcher_type,
        moe_grouped_gemm=moe.moe_grouped_gemm,
        recompute_granularity=recompute.recompute_granularity,
        recompute_method=recompute.recompute_method,
        recompute_num_layers=recompute.recompute_num_layers,
        recompute_modules=list(recompute.recompute_modules or ("core_attn",)),
        tensor_model_parallel_size=sizes.tensor_size,
        pipeline_model_parallel_size=sizes.pipeline_size,
        virtual_pipeline_model_parallel_size=sizes.virtual_pipeline_size,
        context_parallel_size=sizes.context_size,
        expert_model_parallel_size=sizes.expert_size,
        sequence_parallel=parallel.sequence_parallel,
        use_cpu_initialization=device == "cpu" or parallel.use_cpu_initialization,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=settings.precision.bf16,
        fp16=settings.precision.fp16,
        overlap_p2p_comm=interleaved and parallel.overlap_p2p_comm,
        batch_p2p_comm=not (interleaved and parallel.overlap_p2p_comm),
        # Gloo may still be sending an output when the schedule would free it.
        deallocate_pipeline_outputs=device != "cpu",
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )


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
        vp_stage=virtual_stage,
    )


def _layer_spec(
    settings: Settings, config: TransformerConfig, virtual_stage: int | None
) -> TransformerBlockSubmodules:
    """The layers of one chunk: Megatron-Core's own, or Transformer Engine's."""
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
    from training.norm import ParallelNorm

    block.layer_norm = ParallelNorm
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = ParallelNorm
        layer.submodules.pre_mlp_layernorm = ParallelNorm
        attention = layer.submodules.self_attention.submodules
        for name in ("q_layernorm", "k_layernorm"):
            if getattr(attention, name).__name__ == "WrappedTorchNorm":
                setattr(attention, name, ParallelNorm)


def _wrap_for_data_parallelism(
    settings: Settings, config: TransformerConfig, chunks: list[torch.nn.Module]
) -> list[DistributedDataParallel]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    parallel, precision = settings.parallel, settings.precision
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=precision.bf16 or precision.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        bucket_size=parallel.ddp_bucket_size,
    )
    wrapped = [
        DistributedDataParallel(
            config=config,
            ddp_config=ddp_config,
            module=chunk,
            # Later chunks finish their backward pass first; only the first one is worth splitting.
            disable_bucketing=index > 0,
        )
        for index, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        chunk.broadcast_params()
    return wrapped
