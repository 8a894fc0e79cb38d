"""A discrete-event model of a Megatron job that writes ordinary rank files."""

from megascan.fault_kinds import FaultKind
from megascan.simulate.costs import (
    CostModel,
    Machine,
    ModelSize,
    communication_heavy,
    compute_bound,
    derive_costs,
)
from megascan.simulate.faults import Fault, parse_fault
from megascan.simulate.folder import (
    GROUND_TRUTH_FILE,
    ground_truth,
    write_ground_truth,
    write_rank_files,
)
from megascan.simulate.job import Clocks, Imbalance, JobModel, Noise, parse_stage_imbalance
from megascan.simulate.simulation import simulate_trace

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
