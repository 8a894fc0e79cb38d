"""Spans in memory while a window is open, timers, and the hand-over to the writer's thread."""

from megascan.tracer.budget import Board, Budget, Level
from megascan.tracer.interface import IterationListener, Tracer
from megascan.tracer.recording import RecordingTracer
from megascan.tracer.span import Arguments, Mark, Span
from megascan.tracer.timer import AsyncWork, ClockCheck, CpuTimer, Timer
from megascan.tracer.voice import Voice
from megascan.tracer.writer import TraceWriter

__all__ = [
    "Arguments",
    "AsyncWork",
    "Board",
    "Budget",
    "ClockCheck",
    "CpuTimer",
    "IterationListener",
    "Level",
    "Mark",
    "RecordingTracer",
    "Span",
    "Timer",
    "TraceWriter",
    "Tracer",
    "Voice",
]
