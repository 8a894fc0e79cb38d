"""A discrete-event model of a Megatron job that writes ordinary rank files.

Owns the model of a job: what operations cost, which ranks wait for which, and the planted faults.
Used by `megascan simulate`, tests and benchmarks; gives a span table or a folder of rank files.

    job.py          what to simulate: sizes, costs, noise, clocks, faults: start reading here
    stage_order.py  the order in which a stage computes and exchanges
    program.py      this order as instructions, spans and rows of costs
    execution.py    durations, and the times that follow from them
    folder.py       spans, headers, rank files, ground truth

Names are loaded when they are first used: the trainer's planner needs the order of a stage's work,
but no tables.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megascan.simulate.folder import (
        ground_truth,
        simulate_trace,
        write_rank_files,
    )
    from megascan.simulate.job import (
        Clocks,
        CostModel,
        Fault,
        Imbalance,
        JobModel,
        Machine,
        ModelSize,
        Noise,
        communication_heavy,
        compute_bound,
        derive_costs,
        parse_fault,
        parse_stage_imbalance,
    )
    from megascan.vocabulary import FaultKind

__all__ = [
    "Clocks",
    "CostModel",
    "Fault",
    "FaultKind",
    "Imbalance",
    "JobModel",
    "Machine",
    "ModelSize",
    "Noise",
    "communication_heavy",
    "compute_bound",
    "derive_costs",
    "ground_truth",
    "parse_fault",
    "parse_stage_imbalance",
    "simulate_trace",
    "write_rank_files",
]

_OF_FOLDER = {"ground_truth", "simulate_trace", "write_rank_files"}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'megascan.simulate' has no attribute {name!r}")
    home = "folder" if name in _OF_FOLDER else "job"
    return getattr(importlib.import_module(f"megascan.simulate.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
