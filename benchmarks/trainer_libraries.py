"""Training loops of libraries, for `benchmarks.trainers`: where they are installed.

The Trainers of Hugging Face and Lightning with our callbacks, a loop of Accelerate that shards by
FSDP2, and DeepSpeed's engine at each stage of ZeRO, all on the model of `trainer_loops.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from benchmarks.trainer_loops import Block, Gpt, Run, adam, built, loss_of
from megascan.callbacks import for_lightning, for_transformers
from megascan.config import TraceConfig

NUM_SAMPLES = 10_000
"""More than any run takes."""


class Model(torch.nn.Module):
    """A model that computes its loss, as Hugging Face's do."""

    def __init__(self, gpt: Gpt) -> None:
        super().__init__()
        self.model = gpt

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss of a batch of tokens."""
        return {"loss": loss_of(self.model(tokens), labels)}


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Tokens by number."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = self._run.batch(1, dist.get_rank())[0].cpu()
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


def transformers(run: Run) -> None:
    """Train by Hugging Face's Trainer, which wraps the model in DDP and clips gradients."""
    from transformers import Trainer, TrainingArguments

    model = Model(built(run))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(run.scratch / "transformers"),
            max_steps=run.iterations,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=run.microbatches,
            use_cpu=run.device.type == "cpu",
            bf16=run.device.type == "cuda",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            ddp_find_unused_parameters=False,
        ),
        train_dataset=Samples(run),
        optimizers=(adam(run, model), None),
        callbacks=[for_transformers(TraceConfig(enabled=True, directory=run.directory))],
    )
    trainer.train()


def lightning(run: Run) -> None:
    """Train by Lightning's Trainer, which wraps the model in DDP."""
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        """The model, as Lightning wants it."""

        def __init__(self) -> None:
            super().__init__()
            self.model = Model(built(run))

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            """Return the loss of a batch."""
            loss: torch.Tensor = self.model(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            """Return the optimizer of all other trainers here."""
            return adam(run, self.model)

    trainer = Trainer(
        max_steps=run.iterations,
        accelerator="cpu" if run.device.type == "cpu" else "gpu",
        devices=dist.get_world_size(),
        strategy="ddp",
        accumulate_grad_batches=run.microbatches,
        use_distributed_sampler=False,
        default_root_dir=run.scratch,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        callbacks=[for_lightning(TraceConfig(enabled=True, directory=run.directory))],
    )
    trainer.fit(Module(), DataLoader(Samples(run), batch_size=1))


def accelerate(run: Run) -> None:
    """Accumulate gradients by Accelerate, on a model that it shards by FSDP2."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[Block.__name__],
    )
    accelerator = Accelerator(
        cpu=run.device.type == "cpu",
        fsdp_plugin=plugin,
        gradient_accumulation_steps=run.microbatches,
    )
    model = Model(built(run))
    loader = DataLoader(Samples(run), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, adam(run, model), loader)
    batches = iter(loader)
    tracer = run.start(model=model)
    for number in run.numbers:
        with tracer.iteration(number):
            for _ in range(run.microbatches):
                batch = next(batches)
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch)["loss"])
                    optimizer.step()
                    optimizer.zero_grad()
    tracer.close()


def deepspeed(run: Run, *, stage: int) -> None:
    """Train by DeepSpeed's engine; what ZeRO splits over ranks is up to its stage."""
    import deepspeed as library

    model = Model(built(run))
    engine, _, _, _ = library.initialize(
        model=model,
        optimizer=adam(run, model),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": run.microbatches,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": run.device.type == "cuda"},
        },
    )
    batches = iter(DataLoader(Samples(run), batch_size=1))
    tracer = run.start(model=engine)
    for number in run.numbers:
        with tracer.iteration(number):
            for _ in range(run.microbatches):
                batch = {name: part.to(run.device) for name, part in next(batches).items()}
                engine.backward(engine(**batch)["loss"])
                engine.step()
    tracer.close()
    engine.destroy()


_NEEDS = {
    "transformers": ("transformers", "accelerate"),
    "lightning": ("lightning",),
    "accelerate": ("accelerate",),
    "deepspeed": ("deepspeed",),
}


def is_installed(loop: str) -> bool:
    """Tell whether the packages of a loop are there; true for loops that need none."""
    needed = _NEEDS.get(loop.partition(" ")[0], ())
    return all(find_spec(package) is not None for package in needed)


def versions() -> str:
    """Return what is installed of them: ``, accelerate 1.15.0``."""
    packages = sorted({package for needed in _NEEDS.values() for package in needed})
    return "".join(f", {name} {version(name)}" for name in packages if find_spec(name))


LOOPS: dict[str, Callable[[Run], None]] = {
    "transformers": transformers,
    "lightning": lightning,
    "accelerate": accelerate,
    **{f"deepspeed zero {stage}": partial(deepspeed, stage=stage) for stage in (1, 2, 3)},
}
