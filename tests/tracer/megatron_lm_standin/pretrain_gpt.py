"""As Megatron-LM's script of this name: defines its forward step and hands over to `pretrain`."""

from foreign_trainer import forward_step
from megatron.training import pretrain

if __name__ == "__main__":
    pretrain(forward_step)
