"""Read PyTorch profiler (Kineto) JSON, one file a rank: kernels, or operators without a GPU.

document.py        the header, wherever its keys stand, process groups, the events as columns
host_side.py       when each event was launched, by which thread, inside which operator
steps.py           iterations, marked by the profiler or found
communication.py   which events are communication, between whom, how many bytes
conversion.py      events as spans
run.py             the profiles of a job as segments of one run; its layout
"""

from megascan.reader.kineto.run import read_kineto

__all__ = ["read_kineto"]
