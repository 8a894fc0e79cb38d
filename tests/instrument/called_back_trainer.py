"""Hugging Face's and Lightning's Trainer with our callbacks, both in one job.

python called_back_trainer.py DIR

Each evaluates and saves between its steps, and takes two batches a step. The two ranks are forked
once the packages are imported, which takes longer than all that they do.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from importlib import import_module
from pathlib import Path

os.environ["TORCHELASTIC_RUN_ID"] = "job"  # Lightning then takes the ranks as they are

import torch
import torch.distributed as dist

import megascan
from megascan.callbacks import for_lightning, for_transformers
from tests.launcher import free_port

NUM_RANKS, NUM_STEPS, NUM_BATCHES, NUM_LAYERS, WIDTH = 2, 8, 2, 3, 32
PACKAGES = ("transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "lightning.pytorch")
EVERY = 3
"""Steps between two evaluations."""


class Evaluations:
    """When this rank evaluated, as (begin, end) in unix ns: beside the trace, for the test."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / f"evaluations-{os.environ['RANK']}.json"
        self._times: list[list[int]] = []

    def begin(self) -> None:
        self._times.append([time.time_ns()])

    def end(self) -> None:
        self._times[-1].append(time.time_ns())
        self._path.write_text(json.dumps(self._times))


class Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Lines of words by number."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        words = torch.full((16,), number % 8)
        return {"input_ids": words, "labels": words}


class Lines(torch.utils.data.Dataset[torch.Tensor]):
    """Lines of numbers."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.full((WIDTH,), float(number))


def config_of(directory: Path) -> megascan.TraceConfig:
    return megascan.TraceConfig(enabled=True, directory=directory, interval=NUM_STEPS,
                                window=NUM_STEPS)  # fmt: skip


def train_transformers(directory: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    evaluations = Evaluations(directory)

    class Evaluating(Trainer):
        def evaluate(self, *positional: object, **named: object) -> dict[str, float]:
            evaluations.begin()
            metrics = super().evaluate(*positional, **named)
            evaluations.end()
            return metrics

    shape = {
        "vocab_size": 8,
        "n_positions": 16,
        "n_embd": WIDTH,
        "n_layer": NUM_LAYERS,
        "n_head": 2,
    }
    trainer = Evaluating(
        model=GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0)),
        args=TrainingArguments(
            output_dir=str(directory / "saved"),
            max_steps=NUM_STEPS,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=NUM_BATCHES,
            eval_strategy="steps",
            eval_steps=EVERY,
            save_steps=EVERY,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Words(),
        eval_dataset=Words(),
        callbacks=[for_transformers(config_of(directory))],
    )
    trainer.train()


def train_lightning(directory: Path) -> None:
    import lightning.pytorch as lightning

    evaluations = Evaluations(directory)

    class Network(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            layers = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))
            self.body = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})
            self.head = torch.nn.Linear(WIDTH, 1)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            for layer in self.body["layers"]:
                batch = batch + layer(batch)
            return self.head(batch).square().mean()

        def validation_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.training_step(batch)

        def on_validation_start(self) -> None:
            evaluations.begin()

        def on_validation_epoch_end(self) -> None:
            evaluations.end()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.training_step(batch)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy="ddp",
        max_steps=NUM_STEPS,
        accumulate_grad_batches=NUM_BATCHES,
        val_check_interval=NUM_BATCHES * EVERY,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(directory / "checkpoints"),
        callbacks=[for_lightning(config_of(directory))],
    )
    batches = torch.utils.data.DataLoader(Lines(), batch_size=2)
    trainer.fit(Network(), batches, torch.utils.data.DataLoader(Lines(), batch_size=2))


def train_both(rank: int, port: int, directory: Path) -> None:
    """Be one rank."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
    numbers |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), NUM_RANKS)
    os.environ.update({name: str(number) for name, number in numbers.items()})
    dist.init_process_group("gloo")
    for kind, train in (("transformers", train_transformers), ("lightning", train_lightning)):
        (directory / kind).mkdir(exist_ok=True)
        train(directory / kind)
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> int:
    """Run all ranks; 1 if one of them fails."""
    for name in PACKAGES:
        import_module(name)
    os.environ["MASTER_ADDR"] = "localhost"
    port = free_port()
    processes = multiprocessing.get_context("fork")
    started = [
        processes.Process(target=train_both, args=(rank, port, Path(sys.argv[1])))
        for rank in range(NUM_RANKS)
    ]
    for one in started:
        one.start()
    for one in started:
        one.join()
    return int(any(one.exitcode for one in started))


if __name__ == "__main__":
    sys.exit(main())
