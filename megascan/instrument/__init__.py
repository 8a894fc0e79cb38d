"""Instrument a job from outside: wrap places in other people's code while a run is traced, and put
them back afterwards.

Owns what becomes a span, and the span's name, group, microbatch and running number. Called by the
running job (megatron.core, torch.distributed, torch.nn); hands spans to `megascan.tracer`. Names
come from `megascan.vocabulary`.

    table.py        the table of places: start here, add a line to trace something new
    place.py        how a place is wrapped (`in_span`, `around`, `before`, `beside`) and put back;
                    where a rank is within an iteration
    megatron.py     passes, modules, messages, checkpoints of Megatron-Core; garbage collections
    collectives.py  process groups by id, layout of a device mesh; torch.distributed's collectives;
                    the gradient reduction of DDP
    functional.py   torch's functional collectives, which DTensor uses
    layers.py       which layers of a model are alike
    plain_torch.py  models of plain PyTorch, through hooks
    updates.py      finished gradients and the optimizer's step, with any trainer
    starting.py     `start`, the one call a trainer makes; what all ranks agree on first
"""

from megascan.instrument.collectives import Groups
from megascan.instrument.place import Installation, Place
from megascan.instrument.starting import start
from megascan.instrument.table import install

__all__ = ["Groups", "Installation", "Place", "install", "start"]
