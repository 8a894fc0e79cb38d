"""Planted faults: what is wrong with which rank, when, and how it is brought about.

`spec` reads ``--inject-fault``; `compute`, `link`, `host`, `loader` and `garbage` each bring one
kind about; `plan` installs those of this rank; `ground_truth` writes down what was planted.
"""

from megascan.vocabulary import FaultKind
from training.faults.plan import FaultCallback, install_faults
from training.faults.spec import FaultSpec, parse_faults, write_ground_truth

__all__ = [
    "FaultCallback",
    "FaultKind",
    "FaultSpec",
    "install_faults",
    "parse_faults",
    "write_ground_truth",
]
