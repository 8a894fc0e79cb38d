"""Shapes of pipelines in few words."""

from __future__ import annotations

from training.pipeline.plan import PipelineShape


def shape(ranks: int, microbatches: int, chunks: int = 1) -> PipelineShape:
    """Return a pipeline of so many ranks, and microbatches, and chunks on each rank."""
    return PipelineShape(num_ranks=ranks, num_microbatches=microbatches, num_chunks=chunks)
