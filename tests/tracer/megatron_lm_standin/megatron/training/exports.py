from megatron.training.arguments import get_args
from megatron.training.training import pretrain

__all__ = ["get_args", "pretrain"]
