"""What the benchmark of preprocessing says of its measurements."""

from __future__ import annotations

from pathlib import Path

from benchmarks.preprocess import Case, Inside, Measured, _feeding_table, _scaling


def test_start_up_is_taken_out_of_what_a_megabyte_costs() -> None:
    """1 s and 2 s of start; then 10 ms a MB of the first process and 400 ms of the workers."""
    small = Inside(peak_mib=50, own_cpu_s=1.1, workers_cpu_s=6.0)
    large = Inside(peak_mib=50, own_cpu_s=1.3, workers_cpu_s=14.0)
    assert _feeding_table({".xz": [small, large]}, 20)[-1] == "| .jsonl.xz | 10.0 | 400 | 40 |"


def test_scaling_compares_the_walls_of_one_tool() -> None:
    runs = {
        Case(name=name, num_workers=workers, size_bytes=1, command=(), prefix=Path(name)): Measured(
            wall_s=wall_s, cpu_s=1
        )
        for name, workers, wall_s in (
            ("this project, .jsonl", 1, 9.0),
            ("this project, .jsonl", 4, 3.0),
            ("this project, .jsonl.xz", 4, 1.0),
            ("stand-in for Megatron-LM's, .jsonl", 1, 8.0),
            ("stand-in for Megatron-LM's, .jsonl", 4, 4.0),
        )
    }
    ours, theirs = _scaling(runs)
    assert ours.endswith("4 workers are 3.00 times as fast as one.")
    assert theirs.endswith("4 workers are 2.00 times as fast as one.")
