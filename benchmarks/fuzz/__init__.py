"""Damaged files by the hundred thousand, through every reader."""
