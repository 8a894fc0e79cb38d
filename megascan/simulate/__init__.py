"""A discrete-event model of a Megatron job that writes ordinary rank files.

Owns a job on paper: what operations cost, who waits for whom, and what was planted. Fed by
`megascan simulate`, tests and benchmarks; hands a span table or a folder to whoever reads traces.

    job.py          what to simulate: sizes, costs, noise, clocks, faults: start reading here
    stage_order.py  in which order a stage computes and exchanges
    program.py      that order as instructions, spans and rows of costs
    execution.py    durations, and the times that follow from them
    folder.py       spans, headers, rank files, ground truth
"""

from megascan.simulate.folder import (
    GROUND_TRUTH_FILE,
    ground_truth,
    simulate_trace,
    write_ground_truth,
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
    "GROUND_TRUTH_FILE",
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
    "write_ground_truth",
    "write_rank_files",
]
