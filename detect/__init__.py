"""Turns a timeline into findings: which rank, of what, how sure, at what cost, whose fault."""

__megascan__ = True
