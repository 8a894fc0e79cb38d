"""One rank whose job is as if bound to a GPU: says how often it splits NCCL's communicator.

    torchrun … tests/pipeline_runs/bound_ranks.py OUT

Makes all that a pipeline over all ranks talks with, and writes OUT.<rank>.json. Groups of NCCL are
not made: all ranks take part in the splits for those.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from shared_memory import SharedMemory
from torch.distributed import distributed_c10d

from training.pipeline import channels, copies
from training.pipeline.plan import PipelineShape


class Communicator:
    """In place of NCCL's of the whole job."""

    supports_splitting = True

    def __init__(self) -> None:
        self.num_splits = 0

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Count; NCCL's waits for all ranks."""
        del device
        self.num_splits += 1


def main(out: str) -> None:
    """Make the channels of one pipeline, and a group beside them."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    communicator = Communicator()
    distributed_c10d._get_split_source = lambda _: communicator
    channels._new_group = lambda *_: None
    copies.device_for = lambda _: SharedMemory
    distributed_c10d._get_default_group().bound_device_id = torch.device("cuda", 0)
    pipeline = list(range(dist.get_world_size()))
    shape = PipelineShape(num_ranks=len(pipeline), num_microbatches=4, num_chunks=2)
    made = channels.Channels(shape, pipeline, "cpu", timeout=timedelta(seconds=60), announces=True)
    channels.cpu_group_of([dist.get_rank()], timedelta(seconds=60))
    found = {"splits": communicator.num_splits, "channels": len(made.own)}
    Path(f"{out}.{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
