"""The reference trainer: GPT on Megatron-Core, started by torchrun."""

__megascan__ = True
