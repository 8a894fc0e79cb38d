"""Training loops as other people write them, for `benchmarks.trainers`.

Each is a function that builds its model and trains, traced as docs/other-trainers.md tells it to
be: Megatron-Core's quickstart, a GPT with DDP and gradient accumulation, FSDP2, 1F1B of
torch.distributed.pipelining, tensor parallelism by DTensor, and a hybrid model whose loop stops for
evaluations and checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention, silu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.trainer_faults import HEAVY, Disturbance

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel as MegatronReplica

HEAVIER = 12
"""Times the vocabulary, whose head stands on the last stage alone."""


class Recorder(Protocol):
    """What a loop does with its tracer, or with torch's profiler in its place."""

    def iteration(self, number: int) -> AbstractContextManager[object]:
        """Enclose a step."""

    def close(self) -> None:
        """End it."""


class Start(Protocol):
    """What begins the recording: `megascan.start` with its settings given."""

    def __call__(
        self, *, model: torch.nn.Module | tuple[()] = (), mesh: DeviceMesh | None = None
    ) -> Recorder:
        """Record from now on."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a loop is given."""

    device: torch.device
    hidden: int
    heads: int
    layers: int
    sequence: int
    microbatches: int
    iterations: int
    disturbance: Disturbance
    start: Start
    scratch: Path
    """For checkpoints."""
    directory: Path
    """Of the trace."""

    @property
    def numbers(self) -> range:
        """Of the iterations."""
        return range(1, self.iterations + 1)

    @property
    def vocabulary(self) -> int:
        """Of the model; larger where the last stage is to be heavy."""
        return 512 * (HEAVIER if self.disturbance.fault == HEAVY else 1)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def batch(self, samples: int, dp_rank: int) -> torch.Tensor:
        """Fetch tokens `(sample, token + 1)`; nothing that the tracer sees."""
        self.disturbance.load()
        length = self.disturbance.tokens(self.sequence, dp_rank) + 1
        return torch.randint(512, (samples, length), device=self.device)


class Attention(torch.nn.Module):
    """Causal attention of some heads."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.size = hidden // heads
        self.q, self.k, self.v, self.out = (torch.nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(sample, token, hidden)` in and out; each rank has the heads that its weights hold."""
        q, k, v = (
            part(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Convolution(torch.nn.Module):
    """A gated causal convolution, the cheap layer of a hybrid model."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(hidden, 2 * hidden)
        self.mix = torch.nn.Conv1d(hidden, hidden, 4, padding=3, groups=hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(sample, token, hidden)` in and out."""
        values, gates = self.gate(x).chunk(2, dim=-1)
        mixed = self.mix(values.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        result: torch.Tensor = mixed * silu(gates)
        return result


class Mlp(torch.nn.Module):
    """Two linear maps with a GELU between them."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = (
            torch.nn.Linear(hidden, 4 * hidden),
            torch.nn.Linear(4 * hidden, hidden),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(…, hidden)` in and out."""
        result: torch.Tensor = self.down(gelu(self.up(x)))
        return result


class Block(torch.nn.Module):
    """A mixer and an MLP, each on the residual stream."""

    def __init__(self, mixer: torch.nn.Module, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(hidden), torch.nn.LayerNorm(hidden)
        self.mixer, self.mlp = mixer, Mlp(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(sample, token, hidden)` in and out."""
        x = x + self.mixer(self.norm1(x))
        result: torch.Tensor = x + self.mlp(self.norm2(x))
        return result


class Gpt(torch.nn.Module):
    """Embedding, blocks, head; a pipeline's stage has some of them."""

    def __init__(
        self, run: Run, layers: int, *, first: bool = True, last: bool = True, hybrid: bool = False
    ) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(run.vocabulary, run.hidden) if first else None
        self.blocks = torch.nn.ModuleList(
            Block(
                Convolution(run.hidden)
                if hybrid and number % 4 != 3
                else Attention(run.hidden, run.heads),
                run.hidden,
            )
            for number in range(layers)
        )
        self.head = torch.nn.Linear(run.hidden, run.vocabulary) if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From tokens or activations to logits or activations."""
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy over all tokens."""
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def adam(run: Run, model: torch.nn.Module, *, foreach: bool | None = None) -> torch.optim.Optimizer:
    """Return torch's AdamW for a model that is burdened as the fault wants it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=foreach)
    run.disturbance.burden(model, optimizer)
    return optimizer


def built(run: Run, **parts: bool) -> Gpt:
    """Return the model, the same on every rank."""
    torch.manual_seed(0)
    with run.device:
        return Gpt(run, run.layers, **parts).to(run.dtype)


def ddp(run: Run, *, bucket_mb: float | None = None) -> None:
    """DDP with gradient accumulation; batches by a function of the loop's own."""
    model = DistributedDataParallel(built(run), bucket_cap_mb=bucket_mb)
    optimizer = adam(run, model)
    tracer = run.start(model=model)
    for number in run.numbers:
        with tracer.iteration(number):
            for microbatch in range(run.microbatches):
                tokens = run.batch(1, dist.get_rank())
                model.require_backward_grad_sync = microbatch == run.microbatches - 1
                loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:]) / run.microbatches
                loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    tracer.close()


class Corpus(IterableDataset[torch.Tensor]):
    """Endless tokens for a data loader."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield samples."""
        while True:
            yield self._run.batch(1, dist.get_rank())[0]


def fsdp(run: Run) -> None:
    """FSDP2 with a data loader."""
    model = built(run)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer, batches = adam(run, model), iter(DataLoader(Corpus(run), batch_size=1))
    tracer = run.start(model=model)
    for number in run.numbers:
        with tracer.iteration(number):
            for _ in range(run.microbatches):
                tokens = next(batches)
                loss_of(model(tokens[:, :-1]), tokens[:, 1:]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    tracer.close()


def hybrid(run: Run) -> None:
    """DDP of a hybrid model; the loop evaluates, saves on the first rank, and logs its loss."""
    model = DistributedDataParallel(built(run, hybrid=True))
    optimizer, batches = adam(run, model), iter(DataLoader(Corpus(run), batch_size=1))
    tracer = run.start(model=model)
    for number in run.numbers:
        with tracer.iteration(number):
            for microbatch in range(run.microbatches):
                tokens = next(batches)
                last = microbatch == run.microbatches - 1
                with nullcontext() if last else model.no_sync():
                    loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
                    loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if number % 6 == 0:
                _evaluate(run, model)
            if number % 10 == 1 and dist.get_rank() == 0:
                torch.save(model.module.state_dict(), run.scratch / "checkpoint.pt")
            dist.all_reduce(loss.detach())
    tracer.close()


def _evaluate(run: Run, model: torch.nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            tokens = torch.randint(512, (1, run.sequence + 1), device=run.device)
            total = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
            dist.all_reduce(total)
    model.train()


def pipeline(run: Run) -> None:
    """1F1B of torch.distributed.pipelining, one stage a rank."""
    place, stages = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(run.device.type, (stages,), mesh_dim_names=("pp",))
    model = built(run, first=place == 0, last=place == stages - 1)
    optimizer = adam(run, model)
    stage = PipelineStage(model, place, stages, run.device, group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, 2 * run.microbatches, loss_fn=loss_of)
    tracer = run.start(model=model, mesh=mesh)
    for number in run.numbers:
        with tracer.iteration(number):
            tokens = run.batch(2 * run.microbatches, 0)
            if place == 0:
                schedule.step(tokens[:, :-1])
            elif place == stages - 1:
                schedule.step(target=tokens[:, 1:], losses=[])
            else:
                schedule.step()
            optimizer.step()
            optimizer.zero_grad()
    tracer.close()


def tensor(run: Run) -> None:
    """Tensor parallelism of pairs by DTensor, replicas averaged by a loop over the gradients."""
    shape = (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh(run.device.type, shape, mesh_dim_names=("dp", "tp"))
    model = built(run)
    for block in model.blocks:
        plan = {
            **dict.fromkeys(("mixer.q", "mixer.k", "mixer.v", "mlp.up"), ColwiseParallel()),
            **dict.fromkeys(("mixer.out", "mlp.down"), RowwiseParallel()),
        }
        parallelize_module(block, mesh["tp"], plan)
    optimizer = adam(run, model, foreach=False)  # which cannot mix sharded and whole weights
    replicas = mesh.get_group("dp")
    tracer = run.start(model=model, mesh=mesh)
    for number in run.numbers:
        with tracer.iteration(number):
            for _ in range(run.microbatches):
                tokens = run.batch(1, mesh.get_local_rank("dp"))
                dist.broadcast(tokens, group=mesh.get_group("tp"), group_src=0)
                loss_of(model(tokens[:, :-1]), tokens[:, 1:]).backward()  # type: ignore[no-untyped-call]
            _average(model, replicas)
            optimizer.step()
            optimizer.zero_grad()
    tracer.close()


def _average(model: torch.nn.Module, replicas: dist.ProcessGroup) -> None:
    if replicas.size() == 1:
        return
    for weight in model.parameters():
        if (gradient := weight.grad) is not None:
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            dist.all_reduce(local, group=replicas)
            local.div_(replicas.size())


def megatron(run: Run, *, tp: int = 1, pp: int = 1) -> None:
    """Megatron-Core's quickstart: its GPT, its schedule, torch's Adam."""
    from megatron.core import parallel_state
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from training import cpu_backend

    if not parallel_state.model_parallel_is_initialized():
        if run.device.type == "cpu":
            cpu_backend.install()
        parallel_state.initialize_model_parallel(tp, pp, create_gloo_process_groups=True)
    model_parallel_cuda_manual_seed(123, force_reset_rng=True)
    model, step = _megatron_model(run, tp, pp), get_forward_backward_func()
    optimizer, batches = adam(run, model), _batches(run, parallel_state.get_data_parallel_rank())
    length = run.disturbance.tokens(run.sequence, parallel_state.get_data_parallel_rank())
    tracer = run.start()
    for number in run.numbers:
        with tracer.iteration(number):
            optimizer.zero_grad()
            model.zero_grad_buffer()
            step(
                forward_step_func=_forward_step, data_iterator=batches, model=model,
                num_microbatches=2 * run.microbatches, seq_length=length, micro_batch_size=1,
                decoder_seq_length=length, forward_only=False,
            )  # fmt: skip
            finalize_model_grads([model])
            for weight in model.parameters():
                weight.grad = weight.main_grad.to(weight.dtype)
            optimizer.step()
    tracer.close()


def _megatron_model(run: Run, tp: int, pp: int) -> MegatronReplica:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel as Replica
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=run.layers, hidden_size=run.hidden, num_attention_heads=run.heads,
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        use_cpu_initialization=True, pipeline_dtype=run.dtype, params_dtype=run.dtype,
        bf16=run.device.type == "cuda", gradient_accumulation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False,
    )  # fmt: skip
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=run.vocabulary,
        max_sequence_length=2 * run.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    ).to(run.device, run.dtype)
    settings = DistributedDataParallelConfig(use_distributed_optimizer=False)
    return Replica(config=config, ddp_config=settings, module=gpt)


def _batches(run: Run, dp_rank: int) -> Iterator[torch.Tensor]:
    while True:
        yield run.batch(1, dp_rank)


def _forward_step(
    data: Iterator[torch.Tensor], model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]]:
    tokens = next(data)
    length = tokens.shape[1] - 1
    positions = torch.arange(length, device=tokens.device).expand(1, -1)
    mask = torch.ones(1, 1, length, length, device=tokens.device).triu(1).bool()
    return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]), _megatron_loss


def _megatron_loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach()}


LOOPS: dict[str, Callable[[Run], None]] = {
    "megatron TP": partial(megatron, tp=2),
    "megatron PP": partial(megatron, pp=2),
    "ddp": ddp,
    "fsdp": fsdp,
    "pipeline": pipeline,
    "tensor": tensor,
    "hybrid": hybrid,
}
