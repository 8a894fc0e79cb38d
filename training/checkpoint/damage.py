"""What Megatron-Core and torch raise when a checkpoint cannot be read or written."""

from __future__ import annotations

import pickle

from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

# torch gathers what went wrong on any rank into a CheckpointException, which is no Exception;
# a file that is cut off or overwritten ends in any of the others.
DAMAGES: tuple[type[BaseException], ...] = (
    CheckpointException,
    CheckpointingException,
    pickle.UnpicklingError,
    EOFError,
    KeyError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


def reason_of(error: BaseException) -> str:
    """The reason in one line: of a gathered exception that of its first rank."""
    if isinstance(error, CheckpointException) and error.failures:
        _, (error, _) = min(error.failures.items())
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]
