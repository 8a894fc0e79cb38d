"""Run a script of Megatron-LM's on the CPU: `on_cpu.py SCRIPT …`, `on_cpu.py --launch SCRIPT …`.

Such scripts say cuda and nccl everywhere. With `--launch` the script runs under `megascan.launch`.
"""

from __future__ import annotations

import collections
import runpy
import sys
import types

from training import cpu_backend

cpu_backend.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

DEVICE = types.SimpleNamespace(
    major=9, minor=0, name="cpu", total_memory=1 << 34, multi_processor_count=1
)
MEMORY = (
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
    "reset_peak_memory_stats", "mem_get_info", "ipc_collect",
)  # fmt: skip
TYPES = ("Float", "Double", "Int", "Long", "Byte", "BFloat16", "Half")


def pretend_to_have_devices() -> None:
    """Answer what Megatron-LM asks of a GPU before and after it trains."""
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 2
    torch.cuda.get_device_properties = lambda *_: DEVICE
    torch.cuda.get_device_capability = lambda *_: (DEVICE.major, DEVICE.minor)
    torch.cuda.get_device_name = lambda *_: DEVICE.name
    torch.cuda.memory_stats = lambda *_, **__: collections.defaultdict(int)
    for name in MEMORY:
        setattr(torch.cuda, name, lambda *_, **__: 0)
    for name in TYPES:
        setattr(torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    torch.accelerator.is_available = lambda: False
    torch.accelerator.current_device_index = lambda: 0


def communicate_over_gloo() -> None:
    """Start process groups with gloo, whatever the script asks for; pin no memory."""
    start, load = dist.init_process_group, DataLoader.__init__

    def init_process_group(backend: object = None, **options: object) -> None:
        options.pop("device_id", None)
        start("gloo", **options)

    def load_unpinned(loader: DataLoader, *positional: object, **options: object) -> None:
        load(loader, *positional, **{**options, "pin_memory": False})

    dist.init_process_group = init_process_group
    DataLoader.__init__ = load_unpinned


if __name__ == "__main__":
    words = sys.argv[1:]
    communicate_over_gloo()
    if words[0] == "--launch":
        pretend_to_have_devices()
        from megascan.launch import main

        sys.exit(main(words[1:]))
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
