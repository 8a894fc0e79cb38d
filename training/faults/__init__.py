"""Planted faults: what is wrong with which rank, when, and how the fault is brought about.

Owns the meaning of ``--inject-fault``. Fed by the flags; acts on this process only, through
`injection.FaultCallback`, and leaves ground-truth.json to check verdicts by.

    fault.py      reads the flag, writes the ground truth: start reading here
    injection.py  puts this rank's faults in place, turns them on and off by iteration
    compute.py    slow operations, on CPU and GPU
    host.py       a busy host, a pressed garbage collector, a slow loader
    link.py       slow messages and collectives
"""

from megascan.vocabulary import FaultKind
from training.faults.fault import FaultSpec, parse_faults, write_planted_faults
from training.faults.injection import FaultCallback, install_faults

__all__ = [
    "FaultCallback",
    "FaultKind",
    "FaultSpec",
    "install_faults",
    "parse_faults",
    "write_planted_faults",
]
