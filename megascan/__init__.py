"""MegaScan: finds the slow GPU in a Megatron-Core training job.

A trainer needs `start` and `TraceConfig`; `add_trace_arguments` declares the `--trace` flags;
`read` gives a finished trace as tables. Names are loaded when they are first used, so that
importing megascan costs nothing.

    vocabulary.py schema.py        every name, kind and column of a trace: start reading here
    tracer/ instrument/            record spans in a training job; rankfile.py writes them
    launch.py callbacks.py         for scripts and trainers that own their loop
    reader/ timeline.py            read them back; aggregate/ and detect/ take it from there
    export/ viewer.py              timelines for Perfetto
    simulate/                      a job on paper
    cli/ api.py                    what a user calls; docs/architecture.md draws the whole
"""

import importlib

__megascan__ = True

__all__ = ["Kind", "TraceConfig", "Tracer", "add_trace_arguments", "read", "start"]

_HOMES = {
    "Kind": "megascan.schema",
    "TraceConfig": "megascan.config",
    "Tracer": "megascan.tracer",
    "add_trace_arguments": "megascan.config",
    "read": "megascan.api",
    "start": "megascan.instrument.starting",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'megascan' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
