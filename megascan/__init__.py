"""MegaScan: finds the slow GPU in a Megatron-Core training job."""

__megascan__ = True
