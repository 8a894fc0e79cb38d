"""A mixture of experts without Transformer Engine."""

from __future__ import annotations


def allow_without_transformer_engine() -> None:
    """Let the router of megatron.core multiply with torch where Transformer Engine is missing.

    megatron.core 0.16.1 asks whether `te_general_gemm` is None, yet defines the name only together
    with Transformer Engine: without it every router ends in a NameError.
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
