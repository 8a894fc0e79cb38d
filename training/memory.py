"""How much memory a rank takes, said once after the first log line, as Megatron-LM does."""

from __future__ import annotations

import resource

import torch

_BYTES_PER_MB = 1024 * 1024


def memory_line(rank: int, iteration: int) -> str:
    """Allocated and reserved memory of the GPU; on the CPU what is resident of the process."""
    if torch.cuda.is_available():
        values = {
            "allocated": torch.cuda.memory_allocated(),
            "max allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "max reserved": torch.cuda.max_memory_reserved(),
        }
    else:
        peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        values = {"max resident": peak_kb * 1024}
    parts = [f"{name}: {size / _BYTES_PER_MB:.1f}" for name, size in values.items()]
    return f"[Rank {rank}] (after {iteration} iterations) memory (MB) | {' | '.join(parts)}"
