"""How many floating-point operations an iteration takes."""

from __future__ import annotations

from training.arguments import Settings, Sizes


def iteration_flops(settings: Settings, sizes: Sizes, padded_vocab_size: int) -> float:
    """Operations of the matrix products of one iteration, forward and backward, all ranks.

    A product of (m, k) and (k, n) takes 2mkn operations; the backward pass takes twice the forward
    pass. Per token and layer, with h the hidden size, q = heads x head size, r the ratio of
    key-value groups to heads, s the sequence length and f the MLP's inner size:

        attention  2 h q (1 + r) x 2  (query, output; key, value)  +  2 s q  (scores and their sum
                   over values, of which the causal mask keeps half)
        MLP        2 h f x 2, x 3 with SwiGLU, x top-k with experts

    and 2 h v for the output layer. Recomputed operations are not counted (model FLOPs), as in
    Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters".
    """
    hidden, inner = sizes.hidden_size, sizes.ffn_hidden_size
    query = sizes.num_attention_heads * sizes.kv_channels
    ratio = sizes.num_query_groups / sizes.num_attention_heads
    attention = 4 * hidden * query * (1 + ratio) + 2 * sizes.seq_length * query
    experts = settings.moe.moe_router_topk if settings.moe.num_experts else 1
    mlp = 2 * hidden * inner * (3 if settings.model.swiglu else 2) * experts
    forward = sizes.num_layers * (attention + mlp) + 2 * hidden * padded_vocab_size
    return 3.0 * forward * sizes.seq_length * sizes.global_batch_size
