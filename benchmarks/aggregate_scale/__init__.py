"""`python -m benchmarks.aggregate_scale`: speed and memory of `megascan aggregate` by job size."""
