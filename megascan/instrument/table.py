"""The table of places: everything that is wrapped while a run is traced.

Nothing of megatron.core is copied or replaced; functions and methods are wrapped in place and put
back when tracing ends. A place that the installed version does not have is skipped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from megascan.instrument.collectives import OPERATIONS, Collectives, Groups
from megascan.instrument.megatron import (
    BackwardSpans,
    CheckpointSaves,
    GarbageCollections,
    Modules,
    Passes,
    PointToPoint,
)
from megascan.instrument.place import Function, Installation, Place, Position
from megascan.instrument.updates import Updates
from megascan.schema import Granularity
from megascan.tracer import RecordingTracer
from megascan.vocabulary import (
    ATTENTION,
    CORE_ATTENTION,
    EMBEDDING,
    MLP,
    MOE,
    RECOMPUTED_OUTPUT,
    TRANSFORMER_LAYER,
)

if TYPE_CHECKING:
    import torch

    from megascan.instrument.plain_torch import Batches, Exchanges, WatchedModels


_CORE = "megatron.core"
_SCHEDULES = f"{_CORE}.pipeline_parallel.schedules"
_MESSAGES = f"{_CORE}.pipeline_parallel.p2p_communication"
_MODEL = f"{_CORE}.models.gpt.gpt_model"
_GRADIENTS = f"{_CORE}.distributed.finalize_model_grads"
_OPTIMIZER = f"{_CORE}.optimizer.optimizer"
_TRANSFORMER = f"{_CORE}.transformer"
_DISTRIBUTED = "torch.distributed"
_PLANS = "training.pipeline"
"""Schedules by plan of the reference trainer; skipped if they do not run."""

MODULES = (
    (TRANSFORMER_LAYER, f"{_TRANSFORMER}.transformer_layer", "TransformerLayer.forward"),
    (ATTENTION, f"{_TRANSFORMER}.attention", "Attention.forward"),
    (ATTENTION, f"{_TRANSFORMER}.multi_latent_attention", "MultiLatentAttention.forward"),
    (MLP, f"{_TRANSFORMER}.mlp", "MLP.forward"),
    (MLP, f"{_CORE}.extensions.transformer_engine", "TEFusedMLP.forward"),
    (MOE, f"{_TRANSFORMER}.moe.moe_layer", "MoELayer.forward"),
    (
        EMBEDDING,
        f"{_CORE}.models.common.embeddings.language_model_embedding",
        "LanguageModelEmbedding.forward",
    ),
)
"""Methods of modules that are recorded, with their backward and their repeats (recomputation). Any
method will do that takes an activation and returns one. Layers of Transformer Engine have these
classes, too."""

RECOMPUTED = (
    (CORE_ATTENTION, f"{_TRANSFORMER}.dot_product_attention", "DotProductAttention.forward"),
    (CORE_ATTENTION, f"{_CORE}.extensions.transformer_engine", "TEDotProductAttention.forward"),
    (RECOMPUTED_OUTPUT, f"{_CORE}.tensor_parallel.random", "CheckpointWithoutOutput._recompute"),
)
"""Methods that selective recomputation repeats inside a module; only repeats are recorded."""


def places(
    passes: Passes,
    modules: Modules,
    p2p: PointToPoint,
    collectives: Collectives,
    *,
    saves: CheckpointSaves,
    updates: Updates,
) -> list[Place]:
    """Return the table of a job on megatron.core."""
    return [
        Place(_SCHEDULES, "forward_step", passes.forward_step),
        Place(_SCHEDULES, "forward_step_calc_loss", passes.calculate_loss),
        Place(_SCHEDULES, "backward_step", passes.backward_step),
        Place(_MODEL, "GPTModel.forward", passes.model_forward),
        Place(_MESSAGES, "P2PCommunicator._communicate", p2p.communicate),
        Place(f"{_PLANS}.channels", "start", p2p.transfer),
        Place(f"{_PLANS}.split_backward", "WeightGradients.compute", passes.weight_gradients),
        Place(_OPTIMIZER, "ChainedOptimizer.step", updates.optimizer_step),
        Place(_OPTIMIZER, "MixedPrecisionOptimizer.step", updates.optimizer_step),
        Place(_OPTIMIZER, "FP32Optimizer.step", updates.optimizer_step),
        Place(_GRADIENTS, "finalize_model_grads", updates.grad_sync),
        *(Place(_DISTRIBUTED, one.function, partial(collectives.wrap, one)) for one in OPERATIONS),
        Place(_DISTRIBUTED, "_coalescing_manager", collectives.coalescing_manager),
        *(Place(*place, granularity=Granularity.FULL) for place in _full_places(modules, saves)),
    ]


def _full_places(
    modules: Modules, saves: CheckpointSaves
) -> Iterator[tuple[str, str, Callable[[Function], Function]]]:
    """Yield the places that granularity `full` adds: module, attribute, and wrapper."""
    for span, module, attribute in MODULES:
        yield module, attribute, partial(modules.forward_of, span)
    for span, module, attribute in RECOMPUTED:
        yield module, attribute, partial(modules.recompute_of, span)
    yield _MODEL, "GPTModel.forward", modules.output_layer_of
    yield f"{_CORE}.dist_checkpointing.serialization", "save", saves.save_checkpoint


def plain_places(
    watched: WatchedModels,
    exchanges: Exchanges,
    batches: Batches,
    collectives: Collectives,
    saves: CheckpointSaves,
) -> list[Place]:
    """Return the additional places of jobs whose models of plain PyTorch are watched."""
    fsdp = f"{_DISTRIBUTED}.fsdp._fully_shard._fsdp_state"
    final_wait = Place(fsdp, "FSDPState._root_post_backward_final_callback", watched.final_wait)
    return [
        Place("torch.autograd", "backward", watched.backward),
        Place("torch.utils.data.dataloader", "_BaseDataLoaderIter.__next__", batches.next_batch),
        Place(
            "torch.nn.parallel.distributed",
            "DistributedDataParallel._default_broadcast_coalesced",
            collectives.buffers,
        ),
        Place(_DISTRIBUTED, "batch_isend_irecv", exchanges.batch),
        *([final_wait] if fsdp in sys.modules else ()),  # looking for it would load all of FSDP
        Place(f"{_DISTRIBUTED}.pipelining.schedules", "_batch_p2p", exchanges.batch),
        *(
            Place(module, name, saves.save_checkpoint)
            for module, name in _SAVES
            if module in sys.modules
        ),
    ]


_SAVES = (
    ("torch.distributed.checkpoint", "save"),
    ("safetensors.torch", "save_file"),
    ("torch", "save"),
)
"""Functions by which loops save checkpoints, often on one rank and within an iteration, while the
others wait: not that rank's host's fault."""


def install(
    tracer: RecordingTracer, groups: Groups, models: Sequence[torch.nn.Module] = ()
) -> Installation:
    """Wrap every place that the tracer's granularity asks for; undone by the Installation.

    `models` are those of a job without megatron.core's schedules, one model for each chunk of the
    rank.
    """
    position = Position()
    backward_spans = BackwardSpans(tracer, position)
    modules = Modules(tracer, position, backward_spans)
    updates = Updates(tracer)
    updates.watch_torch()
    for listener in (position, backward_spans, updates):
        tracer.listen(listener)
    if tracer.full:
        tracer.listen(GarbageCollections(tracer))
    installation = Installation()
    installation.undo_full.append(modules.remove)
    saves = CheckpointSaves(tracer)
    collectives = Collectives(tracer, position, groups, knows_experts=not models)
    wanted = places(
        Passes(tracer, position, backward_spans, updates),
        modules,
        PointToPoint(tracer, position, groups),
        collectives,
        saves=saves,
        updates=updates,
    )
    if models:
        from megascan.instrument.functional import FunctionalCollectives
        from megascan.instrument.plain_torch import Batches, Exchanges, WatchedModels

        functional = FunctionalCollectives(tracer, position, collectives)
        tracer.listen(functional)
        watched = WatchedModels(tracer, position, backward_spans, models)
        tracer.listen(watched)
        exchanges, batches = Exchanges(tracer, position, groups), Batches(tracer)
        tracer.listen(batches)
        wanted += [
            *plain_places(watched, exchanges, batches, collectives, saves),
            *functional.places(),
        ]
    if not tracer.full:
        wanted = [place for place in wanted if place.granularity is Granularity.BASE]
    installation.install(wanted)
    return installation
