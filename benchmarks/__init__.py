"""Benchmarks: each module is run with `python -m benchmarks.<name>` and prints what it measured."""
