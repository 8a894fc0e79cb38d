"""Weights of small random models with which a swap shows."""

from __future__ import annotations

import torch


@torch.no_grad()
def exaggerate(model: torch.nn.Module) -> None:
    """Make matrices three times as large, and move biases and norms from where they begin."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * 0.1)
        else:
            parameter.mul_(3)
