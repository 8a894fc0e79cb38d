"""MegaScope: look into a Megatron-Core model while it trains and while it speaks.

Nothing is imported here: the page over a folder of recordings needs no torch.
"""

__megascan__ = True
