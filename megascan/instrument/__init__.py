"""Instrumentation of megatron.core and torch.distributed from outside: a table of places."""

from megascan.instrument.groups import Groups
from megascan.instrument.place import Installation, Place
from megascan.instrument.session import start
from megascan.instrument.table import install

__all__ = ["Groups", "Installation", "Place", "install", "start"]
