"""The tracer: spans in memory while a window is open, their times, the writer's thread.

Owns what happens between the call `tracer.add(...)` and the bytes of the rank file. Called by
`megascan.instrument` (and by a trainer's own `with tracer.span(...)`); hands finished windows to
`megascan.rankfile`. Does not use megatron.core, and uses torch only in `cuda`.

    tracer.py      which iterations are traced, the spans of the open window: start reading here
    timer.py       marks and spans; the timer of work on the CPU
    cuda.py        the timer of work on a GPU: events, and their way onto the host's clock
    nvml.py        what a GPU says of itself: clock, power, links, who else computes on it
    nics.py        what Linux says of the host's network ports: rate, errors, lost links
    writer.py      the background thread: from a finished window to lines of the file
    threads.py     for how long a rank's threads had no core, and others of it ran
    pressure.py    for how long it stood still for memory and disks, and what it had moved
    sockets.py     how fast its TCP connections are while they carry something
    lookout.py     where this rank stands when training stands still
    budget.py      with --trace-budget: fewer layers, then base, then fewer windows
    switch.py      with --trace-armed: on and off while the job runs, by a file or a signal
"""

from megascan.tracer.lookout import Lookout
from megascan.tracer.timer import Arguments, AsyncWork, ClockCheck, CpuTimer, Mark, Span, Timer
from megascan.tracer.tracer import IterationListener, RecordingTracer, Tracer
from megascan.tracer.writer import TraceWriter, Voice

__all__ = [
    "Arguments",
    "AsyncWork",
    "ClockCheck",
    "CpuTimer",
    "IterationListener",
    "Lookout",
    "Mark",
    "RecordingTracer",
    "Span",
    "Timer",
    "TraceWriter",
    "Tracer",
    "Voice",
]
