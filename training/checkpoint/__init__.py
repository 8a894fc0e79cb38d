"""Checkpoints in torch's distributed format, through Megatron-Core.

A folder ``iter_0000010`` per checkpoint, and ``latest_checkpointed_iteration.txt`` beside them,
as in Megatron-LM. A checkpoint is written under another name, renamed when every rank is done, and
named in the text file last: whatever happens in between, the file names a complete checkpoint.

A run that is resumed with the same flags on as many ranks continues exactly: weights, optimizer,
learning-rate schedule, loss scale, random states and the place in the data are restored.

Rooms: `folder` (names on the disk), `contents` (what a checkpoint holds), `optimizer_state` and
`random_state` (parts that need more than a dictionary), `fit` (does it belong to this run),
`damage` (what reading and writing raise), `saving` and `loading`.
"""

from training.checkpoint.loading import load_checkpoint
from training.checkpoint.saving import save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
