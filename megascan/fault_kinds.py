"""What can be wrong with a rank: the kinds of fault that the simulator and the trainer plant."""

from __future__ import annotations

from enum import StrEnum


class FaultKind(StrEnum):
    """What a fault slows; how it is planted is the planter's own matter.

    COMPUTE: every computation of the rank. LINK: its communications, or those with one peer. HOST:
    the thread that launches operations, which starves the device. LOADER: the loading of each
    microbatch. GC: pauses of Python's collector. The names are those of the detector's causes.
    """

    COMPUTE = "compute"
    LINK = "link"
    HOST = "host"
    LOADER = "loader"
    GC = "gc"
