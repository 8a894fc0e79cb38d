"""Turns the rank files of a traced job into one aligned timeline."""

__megascan__ = True
