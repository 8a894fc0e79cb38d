"""One rank of a comparison: jobs trained one after the other, what each computed in exact digits.

    torchrun … tests/pipeline_runs/compare_ranks.py RUNS.json OUT

RUNS.json maps names to flags; all have the same parallel sizes but for chunks. Every rank writes
OUT.<rank>.json: losses and gradient norms in hex, SHA-256 of all parameters, and how many processes
of `multiprocessing` are left, of each run. In runs whose name ends in "late" a fifth of the
messages leave late; in those whose name begins with "uneven" samples end in padding; those whose
name has "copied" in it send by copies, as GPUs of one host do (`shared_memory`), and "separate"
ones try to and cannot. Where a job takes helpers, OUT.helped has the share of the microbatches that
they ran, by run and step; runs whose name ends in a mischief of `odd_helper` are helped by one that
commits it.
"""

from __future__ import annotations

import gc
import hashlib
import json
import multiprocessing
import os
import queue
import random
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from shared_memory import Separate, SharedMemory

from training.distributed import read_launch
from training.job import parse_job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from training.log import IterationResult
    from training.loop import Progress, Trainer

Batch = dict[str, "torch.Tensor"]
_FOUND: dict[str, object] = {}
LONGEST_WAIT_S = 60.0
NUM_DOCUMENTS = 300
MISCHIEF = ("dies", "lies", "dawdles")


def _watch() -> None:
    """Keep what trainers compute."""
    from training.log import TrainingLog
    from training.loop import Trainer

    add, run = TrainingLog.add, Trainer.run

    def note(log: TrainingLog, result: IterationResult, consumed: int) -> None:
        _FOUND["losses"].append(None if result.loss is None else float(result.loss).hex())
        _FOUND["norms"].append(None if result.grad_norm is None else result.grad_norm.hex())
        add(log, result, consumed)

    def run_and_hash(trainer: Trainer, progress: Progress) -> Progress:
        done = run(trainer, progress)
        digest = hashlib.sha256()
        for chunk in trainer._state.chunks:
            for parameter in chunk.parameters():
                digest.update(parameter.detach().float().cpu().numpy().tobytes())
        _FOUND["parameters"] = digest.hexdigest()
        return done

    TrainingLog.add, Trainer.run = note, run_and_hash


def _watch_helpers(shares: list[float]) -> None:
    """Keep which share of the microbatches helpers run in each step.

    Steps here are shorter than a helper takes: unless it dawdles on purpose the next step waits
    until it is done, and its speed is not taken up.
    """
    from training.pipeline import helped, running
    from training.pipeline.helped import HelpedDriver

    helped._Known.learn = lambda *_: None

    plan_of_step = HelpedDriver.plan_of_step

    def is_awaited(driver: HelpedDriver) -> bool:
        present = {number for number, _ in driver._present()}
        return present < set(driver._reception.open_numbers())

    def note(driver: HelpedDriver, num_microbatches: int) -> object:
        end_s = time.monotonic() + LONGEST_WAIT_S
        while (
            driver._rank == 0
            and running.HELPER[-1] != "dawdles"
            and is_awaited(driver)
            and time.monotonic() < end_s
        ):
            time.sleep(0.01)
        plan = plan_of_step(driver, num_microbatches)
        shares.append(driver._current.share if driver._current else 0.0)
        return plan

    HelpedDriver.plan_of_step = note


def _pad_samples(build: Callable[..., Iterator[Batch]]) -> Callable[..., Iterator[Batch]]:
    """Make a part of each sample padding, alike on all ranks."""

    def padded(*positional: object, **named: object) -> Iterator[Batch]:
        for batch in build(*positional, **named):
            for tokens, mask in zip(batch["tokens"], batch["loss_mask"], strict=True):
                mask[8 + int(tokens.sum()) % 24 :] = 0
            yield batch

    return padded


class _LateSends:
    """Lets messages wait before they leave, each channel's in order."""

    def __init__(self, rank: int) -> None:
        from training.pipeline import channels

        self.acts = False
        self._send = channels.SendQueue.send
        self._draw = random.Random(rank)
        self._queues: dict[object, queue.Queue[tuple[object, ...]]] = {}
        late = self

        def send(outbox: object, *message: object) -> None:
            late.put(outbox, message) if late.acts else late._send(outbox, *message)

        def drain(outbox: object, original: object = channels.SendQueue.drain) -> None:
            if outbox in late._queues:
                late._queues[outbox].join()
            original(outbox)

        channels.SendQueue.send, channels.SendQueue.drain = send, drain

    def put(self, outbox: object, message: tuple[object, ...]) -> None:
        """Have a thread of the channel send it."""
        if outbox not in self._queues:
            self._queues[outbox] = queue.Queue()
            threading.Thread(target=self._run, args=(outbox,), daemon=True).start()
        wait_s = 0.03 if self._draw.random() < 0.2 else 0.0
        self._queues[outbox].put((wait_s, message))

    def _run(self, outbox: object) -> None:
        while True:
            wait_s, message = self._queues[outbox].get()
            time.sleep(wait_s)
            self._send(outbox, *message)
            self._queues[outbox].task_done()


def main(runs_path: str, out: str) -> None:
    """Train all runs in one process group."""
    launch = read_launch(os.environ)
    runs = json.loads(Path(runs_path).read_text(encoding="utf-8"))
    jobs = {name: parse_job(flags, launch) for name, flags in runs.items()}
    results = {}
    with next(iter(jobs.values())).joined():
        from megatron.core import parallel_state
        from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

        from training.data import datasets
        from training.pipeline import copies, running

        device_for = copies.device_for
        even, dealt = datasets.build_data_iterator, datasets.build_dealt_iterator
        # Made-up data of the least documents that are enough: Megatron-Core's hundred thousand are
        # shuffled anew by every rank of every run, a third of what such a run takes.
        MockGPTLowLevelDataset.size = NUM_DOCUMENTS
        # A trainer freezes all objects there are: the next run would keep this one's. To unfreeze
        # them would let loose those that this process was forked with, too: half a second a run.
        # What a run leaves behind, modules above all, is frozen once its own objects are gone.
        freeze, gc.freeze = gc.freeze, lambda: None
        _watch()
        shares: list[float] = []
        helped: dict[str, list[float]] = {}
        _watch_helpers(shares)
        late = _LateSends(launch.rank)
        for name, job in jobs.items():
            late.acts = name.endswith("late")
            pads = _pad_samples if name.startswith("uneven") else (lambda build: build)
            datasets.build_data_iterator = pads(even)
            datasets.build_dealt_iterator = pads(dealt)
            memory = Separate if "separate" in name else SharedMemory
            copied = "copied" in name
            copies.device_for = (lambda _, memory=memory: memory) if copied else device_for
            odd = name.rpartition(" ")[2]
            if odd in MISCHIEF:
                running.HELPER = (str(Path(__file__).with_name("odd_helper.py")), odd)
            else:
                running.HELPER = ("-m", "training.helper")
            shares.clear()
            chunks = job.sizes.virtual_pipeline_size
            parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks)
            _FOUND.update(losses=[], norms=[], parameters="")
            job.train()
            results[name] = _FOUND | {"children": len(multiprocessing.active_children())}
            helped[name] = list(shares)
            gc.collect()
            freeze()
    if launch.rank == 0:
        Path(f"{out}.helped").write_text(json.dumps(helped), encoding="utf-8")
    Path(f"{out}.{launch.rank}.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
