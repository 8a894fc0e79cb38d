"""What the network looks like."""

from __future__ import annotations

from dataclasses import dataclass

from training.arguments.flags import flag


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Sizes and options of the GPT model; sizes that are None must be given or are derived."""

    num_layers: int | None = flag(None, "transformer layers")
    hidden_size: int | None = flag(None, "size of the hidden states")
    ffn_hidden_size: int | None = flag(
        None, "inner size of the MLP; left out: 4 x hidden size, with --swiglu 8/3 of it"
    )
    num_attention_heads: int | None = flag(None, "attention heads")
    kv_channels: int | None = flag(None, "size of one head; left out: hidden size / heads")
    group_query_attention: bool = flag(False, "grouped-query attention")
    num_query_groups: int = flag(1, "key-value groups with --group-query-attention")
    seq_length: int | None = flag(None, "tokens in one sample")
    max_position_embeddings: int | None = flag(
        None, "longest sequence the position embedding knows; left out: --seq-length"
    )
    make_vocab_size_divisible_by: int = flag(
        128, "the vocabulary is padded to a multiple of this times the tensor-parallel size"
    )
    position_embedding_type: str = flag(
        "learned_absolute", "position embedding", choices=("learned_absolute", "rope", "none")
    )
    rotary_base: int = flag(10000, "base period of the rotary embedding")
    rotary_percent: float = flag(1.0, "share of a head that is rotated")
    normalization: str = flag("LayerNorm", "normalization", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = flag(1e-5, "epsilon of the normalization")
    qk_layernorm: bool = flag(False, "normalize queries and keys")
    swiglu: bool = flag(False, "gated linear units with SiLU instead of GELU")
    add_bias_linear: bool = flag(
        True, "leave the bias of linear layers away", option="--disable-bias-linear"
    )
    add_qkv_bias: bool = flag(False, "bias of the query-key-value projection only")
    untie_embeddings_and_output_weights: bool = flag(
        False, "give the output layer weights of its own"
    )
    hidden_dropout: float = flag(0.1, "dropout of hidden states")
    attention_dropout: float = flag(0.1, "dropout of attention weights")
    init_method_std: float = flag(0.02, "standard deviation of the initial weights")
    transformer_impl: str = flag(
        "local",
        "layers of Megatron-Core itself, or those of Transformer Engine (GPU only)",
        choices=("local", "transformer_engine"),
    )


@dataclass(frozen=True, kw_only=True)
class MoeSettings:
    """Mixture of experts; without ``--num-experts`` the model is dense."""

    num_experts: int | None = flag(None, "experts of a mixture-of-experts layer")
    moe_router_topk: int = flag(2, "experts that each token is sent to")
    moe_router_pre_softmax: bool = flag(
        False, "softmax before the choice of experts; needed with --moe-router-topk 1"
    )
    moe_router_load_balancing_type: str = flag(
        "aux_loss",
        "how the router balances its load",
        choices=("aux_loss", "seq_aux_loss", "sinkhorn", "none"),
    )
    moe_aux_loss_coeff: float = flag(0.0, "weight of the balancing loss")
    moe_token_dispatcher_type: str = flag(
        "allgather", "how tokens reach their experts", choices=("allgather", "alltoall")
    )
    moe_grouped_gemm: bool = flag(False, "one grouped matrix product for all local experts")


@dataclass(frozen=True, kw_only=True)
class RecomputeSettings:
    """Activations that are computed again in the backward pass instead of kept."""

    recompute_granularity: str | None = flag(
        None, "what is computed again", choices=("full", "selective")
    )
    recompute_method: str | None = flag(
        None, "which layers, with granularity full", choices=("uniform", "block")
    )
    recompute_num_layers: int | None = flag(None, "layers of one recomputed unit, or how many")
    recompute_modules: tuple[str, ...] | None = flag(
        None, "modules that selective recomputes; left out: core_attn"
    )
