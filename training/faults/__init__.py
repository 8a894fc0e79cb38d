"""Planted faults: what is wrong with which rank, when, and how it is brought about.

`spec` reads ``--inject-fault``; `compute`, `link`, `host`, `loader` and `garbage` each bring one
kind about; `plan` installs those of this rank; `ground_truth` writes down what was planted.
"""

from megascan.fault_kinds import FaultKind
from training.faults.ground_truth import write_ground_truth
from training.faults.plan import FaultCallback, install_faults
from training.faults.spec import FaultSpec, parse_faults

__all__ = [
    "FaultCallback",
    "FaultKind",
    "FaultSpec",
    "install_faults",
    "parse_faults",
    "write_ground_truth",
]
