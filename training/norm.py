"""The normalization of local layers."""

from __future__ import annotations

import torch


class ParallelNorm:
    """Makes torch's LayerNorm or RMSNorm, ready for sequence parallelism.

    Megatron-Core's own wrapper refuses sequence parallelism, because torch's norms do not carry
    the mark by which their gradients are summed over the tensor-parallel ranks. This one sets it.
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
