"""Training loops of 2026 for `benchmarks.trainers --set modern`, written as engineers write them.

Each is a function of a `Run`, as in `trainer_loops.py`: a mixture of experts, context parallelism,
FSDP2 with all that goes with it, adapters on data of many lengths, two pipelines of several stages
a rank, DDP with compiled layers and compressed gradients, a vision model, a recommender, HSDP, and
replicas that meet every few iterations only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import cast

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn.functional import cross_entropy, relu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.trainer_loops import Attention, Corpus, Gpt, Mlp, Run, adam, built, loss_of

NOTE = "note: "
"""Begins what a rank says that the campaign is to repeat."""
NUM_CHOSEN = 2
"""Experts that a token goes to."""
EXPERTS_PER_RANK = 2
BALANCE_WEIGHT = 0.01
"""Of the loss that keeps experts equally busy, as in Switch Transformers."""
CONTEXT_RANKS = STAGE_RANKS = SHARD_RANKS = 2
"""Ranks over which a sequence, a pipeline, a model is split; all others are replicas."""
CHUNKS = 2
"""Stages of a pipeline that a rank has."""
ADAPTER_RANK = 16
NUM_BUCKETS, BUCKET_SAMPLES = 240, 4
"""Batches of samples of about one length: as many for each of 2, 4 or 8 ranks."""
TABLES_PER_RANK, LOOKUPS = 4, 4
NUM_DENSE = 13
"""Numbers of a sample of Criteo's data, beside the ids."""
NUM_CLASSES = 1000
MEETING = 4
"""Replicas average their weights in every so manieth iteration."""


def _traced(
    run: Run, model: torch.nn.Module | Sequence[torch.nn.Module], mesh: DeviceMesh | None = None
) -> Iterator[int]:
    """Number the iterations; each is recorded while the loop works on it."""
    torch.manual_seed(1000 + dist.get_rank())  # weights were drawn alike, data are not
    tracer = run.start(model=model, mesh=mesh)  # type: ignore[arg-type]  # chunks come as a list
    for number in run.numbers:
        with tracer.iteration(number):
            yield number
    tracer.close()


@cache
def _mesh(kind: str, **sizes: int) -> DeviceMesh:
    """Return the mesh of such dimensions; all cases of a process share its groups."""
    return init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _backward(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def _replica_but(model: torch.nn.Module, part: str) -> DistributedDataParallel:
    """Wrap a model in DDP that leaves alone the weights whose names hold `part`."""
    own = [name for name, _ in model.named_parameters() if part in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)  # type: ignore[no-untyped-call]
    return DistributedDataParallel(model)


class _Exchange(torch.autograd.Function):
    """Send rows to other ranks, so many to each; gradients take the way back."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, rows: torch.Tensor, sent: list[int], received: list[int]
    ) -> torch.Tensor:
        """Return what came, in the order of the ranks."""
        ctx.sizes = sent, received  # type: ignore[attr-defined]
        return _exchange(rows, sent, received)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradients of what was sent."""
        sent, received = ctx.sizes  # type: ignore[attr-defined]
        return _exchange(gradient, received, sent), None, None


def _exchange(rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    result = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), received, sent)
    return result


def _exchanged(rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    result: torch.Tensor = _Exchange.apply(rows, sent, received)  # type: ignore[no-untyped-call]
    return result


class Experts(torch.nn.Module):
    """Experts of which each rank holds some; a token goes to the two that its router prefers."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.num_ranks = dist.get_world_size()
        self.router = torch.nn.Linear(hidden, EXPERTS_PER_RANK * self.num_ranks, bias=False)
        self.experts = torch.nn.ModuleList(Mlp(hidden) for _ in range(EXPERTS_PER_RANK))
        self.imbalance = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(sample, token, hidden)` in and out."""
        rows = x.flatten(0, 1)
        chances = self.router(rows).float().softmax(-1)
        weights, chosen = chances.topk(NUM_CHOSEN)
        counts = chosen.flatten().bincount(minlength=chances.shape[1])
        shares = counts / counts.sum()
        self.imbalance = chances.shape[1] * (shares * chances.mean(0)).sum()
        order = chosen.flatten().argsort(stable=True)
        worked = self._by_experts(rows[order // NUM_CHOSEN], counts)
        weighted = worked * weights.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(rows).index_add(0, order // NUM_CHOSEN, weighted).view_as(x)

    def _by_experts(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Have rows, sorted by expert, so many each, worked on by the ranks that hold these."""
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        arriving = arriving.view(self.num_ranks, EXPERTS_PER_RANK)
        sent = counts.view(self.num_ranks, EXPERTS_PER_RANK).sum(1).tolist()
        received = arriving.sum(1).tolist()
        arrived = _exchanged(rows, sent, received)
        expert = torch.arange(EXPERTS_PER_RANK, device=rows.device).repeat(self.num_ranks)
        order = expert.repeat_interleave(arriving.flatten()).argsort(stable=True)
        parts = torch.split(arrived[order], arriving.sum(0).tolist())
        worked = torch.cat([mlp(part) for mlp, part in zip(self.experts, parts, strict=True)])
        return _exchanged(worked[order.argsort()], received, sent)


def moe(run: Run) -> None:
    """Train a mixture of experts: attention by DDP, experts spread over all ranks."""
    model = built(run)
    with run.device:
        mixtures = [Experts(run.hidden).to(run.dtype) for _ in model.blocks]
    for block, mixture in zip(model.blocks, mixtures, strict=True):
        block.mlp = mixture
    replica = _replica_but(model, ".experts.")
    optimizer = adam(run, replica)
    for _ in _traced(run, replica):
        for microbatch in range(run.microbatches):
            tokens = run.batch(1, dist.get_rank())
            replica.require_backward_grad_sync = microbatch == run.microbatches - 1
            loss = loss_of(replica(tokens[:, :-1]), tokens[:, 1:])
            balance = torch.stack([mixture.imbalance for mixture in mixtures]).sum()
            _backward((loss + BALANCE_WEIGHT * balance) / run.microbatches)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


class _Gathered(torch.autograd.Function):
    """Gather the rows of a group's ranks; sum the gradients that these have for each row."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Return all rows, in the order of the ranks."""
        ctx.group = group  # type: ignore[attr-defined]
        whole = rows.new_empty(group.size() * rows.shape[0], *rows.shape[1:])
        dist.all_gather_into_tensor(whole, rows.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradients of this rank's rows."""
        group: dist.ProcessGroup = ctx.group  # type: ignore[attr-defined]
        own = gradient.new_empty(gradient.shape[0] // group.size(), *gradient.shape[1:])
        dist.reduce_scatter_tensor(own, gradient.contiguous(), group=group)
        return own, None


def _places(length: int, rank: int, num_ranks: int, device: torch.device) -> torch.Tensor:
    """Return which tokens of a sequence a rank has: an early part and a late one, so that the
    causal mask leaves each as much to do. Of 8 tokens, rank 0 of 2 has 0, 1, 6, 7.
    """
    part = length // (2 * num_ranks)
    early = torch.arange(part, device=device)
    return torch.cat((early + rank * part, early + (2 * num_ranks - 1 - rank) * part))


class SplitAttention(Attention):
    """Causal attention of this rank's tokens to all tokens of the sequence."""

    def __init__(self, hidden: int, heads: int, group: dist.ProcessGroup) -> None:
        super().__init__(hidden, heads)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(sample, token, hidden)` in and out, of this rank's tokens."""
        own = torch.cat((self.k(x), self.v(x)), -1).transpose(0, 1)
        whole: torch.Tensor = _Gathered.apply(own, self.group)  # type: ignore[no-untyped-call]
        q, k, v = (
            part.unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.q(x), *whole.transpose(0, 1).chunk(2, -1))
        )
        num_ranks, length = self.group.size(), whole.shape[0]
        each = [_places(length, rank, num_ranks, x.device) for rank in range(num_ranks)]
        is_seen = each[self.group.rank()][:, None] >= torch.cat(each)
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=is_seen)
        result: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


def context(run: Run) -> None:
    """Split sequences over pairs of ranks that gather keys and values, and sum all gradients."""
    num_replicas = dist.get_world_size() // CONTEXT_RANKS
    mesh = _mesh(run.device.type, dp=num_replicas, cp=CONTEXT_RANKS)
    model = built(run)
    with run.device:
        for block in model.blocks:
            mixer = SplitAttention(run.hidden, run.heads, mesh.get_group("cp"))
            block.mixer = mixer.to(run.dtype)
    optimizer, weights = adam(run, model), list(model.parameters())
    for _ in _traced(run, model, mesh):
        for _ in range(run.microbatches):
            tokens = run.batch(CONTEXT_RANKS, mesh.get_local_rank("dp"))
            length = CONTEXT_RANKS * (tokens.shape[1] - 1)  # all samples as one long sequence
            own = _places(length, mesh.get_local_rank("cp"), CONTEXT_RANKS, run.device)
            inputs, labels = tokens[:, :-1].reshape(1, -1), tokens[:, 1:].reshape(1, -1)
            _backward(loss_of(model(inputs[:, own]), labels[:, own]))
        _sum(weights)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def full_fsdp(run: Run) -> None:
    """Train by FSDP2 with recomputed layers, accumulation, bf16 on GPUs, clipping, a schedule."""
    low = torch.bfloat16 if run.device.type == "cuda" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    model = built(run).float()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block)
        fully_shard(model.blocks[number], mp_policy=policy)
    sharded = fully_shard(model, mp_policy=policy)
    optimizer, batches = adam(run, model), iter(DataLoader(Corpus(run), batch_size=1))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=run.iterations)
    for _ in _traced(run, model):
        for microbatch in range(run.microbatches):
            tokens = next(batches)
            sharded.set_requires_gradient_sync(microbatch == run.microbatches - 1)
            _backward(loss_of(model(tokens[:, :-1]), tokens[:, 1:]) / run.microbatches)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


class Adapted(torch.nn.Module):
    """A frozen linear map and a trained one of low rank beside it."""

    def __init__(self, frozen: torch.nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = torch.nn.Linear(frozen.in_features, ADAPTER_RANK, bias=False)
        self.up = torch.nn.Linear(ADAPTER_RANK, frozen.out_features, bias=False)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(…, in)` to `(…, out)`."""
        result: torch.Tensor = self.frozen(x) + self.up(self.down(x))
        return result


class Bucketed(IterableDataset[torch.Tensor]):
    """Batches of samples of similar lengths, padded to the longest; all ranks know the order."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield this rank's batches, whose lengths are those of instructions: most are short."""
        draw, rank = random.Random(7), dist.get_rank()
        samples = (draw.lognormvariate(-0.9, 0.5) for _ in range(NUM_BUCKETS * BUCKET_SAMPLES))
        shares = sorted(min(1.0, share) for share in samples)[BUCKET_SAMPLES - 1 :: BUCKET_SAMPLES]
        while True:
            draw.shuffle(shares)
            for share in shares[rank :: dist.get_world_size()]:
                tokens = self._run.batch(BUCKET_SAMPLES, rank)
                yield tokens[:, : max(8, int(share * tokens.shape[1]))]


def lora(run: Run) -> None:
    """Tune adapters of frozen weights under DDP, on batches of many lengths."""
    model = built(run).requires_grad_(False)
    with run.device:
        for block in model.blocks:
            for name in ("mixer.q", "mixer.v", "mlp.up", "mlp.down"):
                frozen = cast("torch.nn.Linear", block.get_submodule(name))
                block.set_submodule(name, Adapted(frozen))
    replica = DistributedDataParallel(model.to(run.dtype))
    optimizer, batches = adam(run, replica), iter(DataLoader(Bucketed(run), batch_size=None))
    for _ in _traced(run, replica):
        for microbatch in range(run.microbatches):
            tokens = next(batches)
            replica.require_backward_grad_sync = microbatch == run.microbatches - 1
            loss = loss_of(replica(tokens[:, :-1]), tokens[:, 1:])
            _backward(loss / run.microbatches)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _stages_of(place: int) -> range:
    """Return which stages a rank of a pipeline has."""
    return range(place, STAGE_RANKS * CHUNKS, STAGE_RANKS)


def _chunk(run: Run, number: int) -> Gpt:
    """Return a stage of a pipeline; the ends hold fewer layers than those between."""
    is_first, is_last = number == 0, number == STAGE_RANKS * CHUNKS - 1
    num_layers = max(1, run.layers // 4) * (1 if is_first or is_last else 2)
    torch.manual_seed(number)
    with run.device:
        return Gpt(run, num_layers, first=is_first, last=is_last).to(run.dtype)


def interleaved(
    run: Run, *, kind: type[ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble]
) -> None:
    """Train by a pipeline of two stages a rank, with tied embeddings, and replicas of it."""
    num_replicas = dist.get_world_size() // STAGE_RANKS
    mesh = _mesh(run.device.type, pp=STAGE_RANKS, dp=num_replicas)
    place, stages, replicas = mesh.get_local_rank("pp"), mesh.get_group("pp"), mesh.get_group("dp")
    chunks = [_chunk(run, number) for number in _stages_of(place)]
    optimizers = [adam(run, chunk) for chunk in chunks]
    parts = [
        PipelineStage(chunk, number, STAGE_RANKS * CHUNKS, run.device, group=stages)
        for number, chunk in zip(_stages_of(place), chunks, strict=True)
    ]
    schedule = kind(parts, 2 * run.microbatches, loss_fn=loss_of)  # type: ignore[arg-type]
    tied = next((chunks[0].embedding or chunks[-1].head).parameters())  # type: ignore[union-attr]
    dist.broadcast(tied.detach(), group=stages, group_src=0)
    weights = [weight for chunk in chunks for weight in chunk.parameters()]
    for _ in _traced(run, chunks, mesh):
        tokens = run.batch(2 * run.microbatches, mesh.get_local_rank("dp"))
        if place == 0:
            schedule.step(tokens[:, :-1])
        else:
            schedule.step(target=tokens[:, 1:], losses=[])
        _sum([tied], stages)
        _sum(weights, replicas)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _sum(weights: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Sum gradients over a group or all ranks; Adam does not mind by how much all are larger."""
    if dist.get_world_size(group) > 1:
        for weight in weights:
            dist.all_reduce(weight.grad, group=group)


def compiled(run: Run) -> None:
    """Train by DDP with compiled layers, a static graph, and gradients sent in half precision."""
    model = built(run).float()
    if _can_compile(run.device):
        torch._dynamo.reset()  # what earlier cases have compiled counts against a limit
        torch._dynamo.config.optimize_ddp = False  # it would cut each layer by DDP's buckets
        for block in model.blocks:
            block.compile()
    replica = DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True)
    is_mixed = run.device.type == "cuda"
    replica.register_comm_hook(None, bf16_compress_hook if is_mixed else fp16_compress_hook)
    optimizer, batches = adam(run, replica), _batches(run)
    for _ in _traced(run, replica):
        tokens = next(batches)
        with torch.autocast(run.device.type, torch.bfloat16, enabled=is_mixed):
            logits = replica(tokens[:, :-1])
        _backward(loss_of(logits, tokens[:, 1:]))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _batches(run: Run) -> Iterator[torch.Tensor]:
    """Yield an iteration's tokens at once, by no loader of torch's."""
    while True:
        yield run.batch(run.microbatches, dist.get_rank())


def _can_compile(device: torch.device) -> bool:
    """Tell whether torch's compiler works on a GPU here; says so in the job's notes if not."""
    if device.type != "cuda":
        return False
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
    except Exception as error:  # a compiler, headers, or Triton may be missing
        reason = str(error).strip().partition("\n")[0]
        print(f"{NOTE}'compiled ddp' runs eagerly: {type(error).__name__}: {reason}", flush=True)
        return False
    return True


class Residual(torch.nn.Module):
    """Two convolutions with norms of the batch, beside a residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (
            torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norm1, self.norm2 = (torch.nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(image, channel, row, column)` in and out."""
        inner = relu(self.norm1(self.first(x)))
        return relu(x + self.norm2(self.second(inner)))


class Vision(torch.nn.Module):
    """A residual net of one resolution."""

    def __init__(self, channels: int, blocks: int) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = torch.nn.ModuleList(Residual(channels) for _ in range(blocks))
        self.head = torch.nn.Linear(channels, NUM_CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """From images to logits."""
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x.mean((2, 3)))
        return result


class Images(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Endless batches of images and their classes."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield batches."""
        run, side = self._run, math.isqrt(self._run.sequence)
        while True:
            run.disturbance.load()
            number = run.disturbance.tokens(32 * run.microbatches, dist.get_rank())
            images = torch.randn(number, 3, side, side, device=run.device)
            yield images, torch.randint(NUM_CLASSES, (number,), device=run.device)


def vision(run: Run) -> None:
    """Train a residual net by DDP; on GPUs all replicas share the norms of their batches."""
    torch.manual_seed(0)
    with run.device:
        model: torch.nn.Module = Vision(run.hidden // 16, 4 * run.layers)
    is_mixed = run.device.type == "cuda"
    if is_mixed:  # torch has these norms for GPUs only
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    replica = DistributedDataParallel(model)
    optimizer, batches = adam(run, replica), iter(DataLoader(Images(run), batch_size=None))
    for _ in _traced(run, replica):
        images, classes = next(batches)
        with torch.autocast(run.device.type, torch.bfloat16, enabled=is_mixed):
            logits = replica(images)
        _backward(cross_entropy(logits.float(), classes))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


class Recommender(torch.nn.Module):
    """A DLRM: each rank holds some tables for everybody's samples; dense layers are replicated."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.num_ranks, self.dtype = dist.get_world_size(), run.dtype
        hidden, width = run.hidden, max(1, run.hidden // 32)
        rows, joined = 64 * run.sequence, width * (1 + TABLES_PER_RANK * self.num_ranks)
        self.tables = torch.nn.ModuleList(
            torch.nn.EmbeddingBag(rows, width, mode="sum") for _ in range(TABLES_PER_RANK)
        )
        self.bottom = _dense(NUM_DENSE, hidden, hidden, width).to(run.dtype)
        self.top = _dense(joined, hidden, hidden, hidden, 1).to(run.dtype)

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """`(sample, table, lookup)` and `(sample, number)` to logits."""
        sizes = torch.empty(self.num_ranks, dtype=torch.int64, device=ids.device)
        own = torch.tensor([ids.shape[0]], device=ids.device)
        dist.all_gather_into_tensor(sizes, own)
        received, sent = sizes.tolist(), [ids.shape[0]] * self.num_ranks
        by_owner = torch.stack(ids.chunk(self.num_ranks, 1))
        asked = _exchange(by_owner.flatten(0, 1), sent, received)
        pooled = torch.stack([table(asked[:, n]) for n, table in enumerate(self.tables)], 1)
        answers = _exchanged(pooled.to(self.dtype), received, sent)
        features = torch.cat(answers.flatten(1).chunk(self.num_ranks), 1)
        dense = self.bottom(numbers.to(self.dtype))
        result: torch.Tensor = self.top(torch.cat((dense, features), 1)).flatten()
        return result


def _dense(*widths: int) -> torch.nn.Sequential:
    layers = [
        part for a, b in pairwise(widths) for part in (torch.nn.Linear(a, b), torch.nn.ReLU())
    ]
    return torch.nn.Sequential(*layers[:-1])


def recommender(run: Run) -> None:
    """Train a DLRM: tables exchange what they look up, dense layers are averaged by DDP."""
    torch.manual_seed(0)
    with run.device:
        model = Recommender(run)
    replica = _replica_but(model, "tables.")
    optimizer, rank = adam(run, replica), dist.get_rank()
    shape = (TABLES_PER_RANK * model.num_ranks, LOOKUPS)
    for _ in _traced(run, replica):
        run.disturbance.load()
        samples = run.disturbance.tokens(16 * run.sequence, rank)
        ids = torch.randint(64 * run.sequence, (samples, *shape), device=run.device)
        numbers = torch.randn(samples, NUM_DENSE, device=run.device)
        clicks = torch.randint(2, (samples,), device=run.device).float()
        logits = replica(ids, numbers).float()
        _backward(torch.nn.functional.binary_cross_entropy_with_logits(logits, clicks))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def hsdp(run: Run) -> None:
    """Train by FSDP2 on a mesh: shards within pairs, which are averaged with the other pairs."""
    num_replicas = dist.get_world_size() // SHARD_RANKS
    mesh = _mesh(run.device.type, dp_replicate=num_replicas, dp_shard=SHARD_RANKS)
    model = built(run)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    sharded = fully_shard(model, mesh=mesh)
    optimizer, batches = adam(run, model), iter(DataLoader(Corpus(run), batch_size=1))
    for _ in _traced(run, model, mesh):
        for microbatch in range(run.microbatches):
            tokens = next(batches)
            sharded.set_requires_all_reduce(microbatch == run.microbatches - 1)
            _backward(loss_of(model(tokens[:, :-1]), tokens[:, 1:]) / run.microbatches)
        optimizer.step()
        optimizer.zero_grad()


def local_sgd(run: Run) -> None:
    """Train replicas by themselves; they meet every few iterations, as DiLoCo's do."""
    model = built(run)
    optimizer, weights = adam(run, model), list(model.parameters())
    agreed = [weight.detach().clone() for weight in weights]
    outer = torch.optim.SGD(agreed, lr=0.7, momentum=0.9, nesterov=True)
    for number in _traced(run, model):
        for _ in range(run.microbatches):
            tokens = run.batch(1, dist.get_rank())
            _backward(loss_of(model(tokens[:, :-1]), tokens[:, 1:]) / run.microbatches)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if number % MEETING == 0:
            _meet(weights, agreed, outer)


@torch.no_grad()
def _meet(
    weights: Sequence[torch.Tensor], agreed: Sequence[torch.Tensor], outer: torch.optim.Optimizer
) -> None:
    """Step from the weights agreed on towards the mean of those that replicas have come to."""
    for weight, before in zip(weights, agreed, strict=True):
        before.grad = (before - weight) / dist.get_world_size()
        dist.all_reduce(before.grad)
    outer.step()
    for weight, after in zip(weights, agreed, strict=True):
        weight.copy_(after)


LOOPS: dict[str, Callable[[Run], None]] = {
    "moe": moe,
    "context": context,
    "full fsdp": full_fsdp,
    "lora": lora,
    "interleaved": partial(interleaved, kind=ScheduleInterleaved1F1B),
    "zero bubble": partial(interleaved, kind=ScheduleInterleavedZeroBubble),
    "vision": vision,
    "recommender": recommender,
    "hsdp": hsdp,
    "local sgd": local_sgd,
    "compiled ddp": compiled,
}
HAS_FIXED_SHAPES = ("interleaved", "zero bubble")
"""Messages between stages have one shape for the whole run."""
SPLITS_PAIRS = (*HAS_FIXED_SHAPES, "context")
"""Of two ranks there is one replica only."""
