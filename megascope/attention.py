"""Attention probabilities out of captured queries and keys: any head, any rows, any backend.

Fused kernels do not return their probabilities. They are computed again here from the queries and
keys that a hook has seen, for the heads and rows that were asked for. A head of a group-query model
reads the keys of its group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def probabilities(
    queries: torch.Tensor,
    keys: torch.Tensor,
    *,
    heads: Sequence[int] = (),
    rows: Sequence[int] = (),
    scale: float | None = None,
) -> torch.Tensor:
    """Return the causal attention `(head, query, key)` of one row of a batch, in float32.

    `queries` are `(query, head, channel)`, `keys` `(key, group, channel)`; the queries are the last
    ones of the keys' positions. `heads` and `rows` (positions among the queries) choose some, none
    means all. `scale` is that of the products, by default one over the root of the channels.
    """
    num_queries, num_heads, num_channels = queries.shape
    chosen = torch.tensor(list(heads) or range(num_heads), device=queries.device)
    at = torch.tensor(list(rows) or range(num_queries), device=queries.device)
    heads_of_group = num_heads // keys.shape[1]
    queries = queries[at][:, chosen].float()
    keys = keys[:, chosen // heads_of_group].float()
    scores = torch.einsum("qhc,khc->hqk", queries, keys)
    scores = scores * (num_channels**-0.5 if scale is None else scale)
    positions = at + keys.shape[0] - num_queries
    hidden = torch.arange(keys.shape[0], device=keys.device) > positions[:, None]
    weights: torch.Tensor = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return weights


def entropy(weights: torch.Tensor) -> torch.Tensor:
    """Return the entropy over the last axis in nats: 0 looks at one token, log n at n alike."""
    found: torch.Tensor = torch.special.entr(weights).sum(-1)
    return found
