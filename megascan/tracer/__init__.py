"""Spans in memory while a window is open, timers, and the hand-over to the writer's thread."""

from megascan.tracer.interface import IterationListener, Tracer
from megascan.tracer.recording import RecordingTracer
from megascan.tracer.span import Arguments, Mark, Span
from megascan.tracer.timer import AsyncWork, CpuTimer, Timer
from megascan.tracer.writer import TraceWriter

__all__ = [
    "Arguments",
    "AsyncWork",
    "CpuTimer",
    "IterationListener",
    "Mark",
    "RecordingTracer",
    "Span",
    "Timer",
    "TraceWriter",
    "Tracer",
]
