"""The table of places: everything that is wrapped while a run is traced.

Nothing of megatron.core is copied or replaced; functions and methods are wrapped in place and put
back when tracing ends. A place that the installed version does not have is passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megascan.instrument.collectives import Collectives
from megascan.instrument.exchanges import Exchanges
from megascan.instrument.groups import Groups
from megascan.instrument.host import GarbageCollections, Host
from megascan.instrument.modules import BackwardSpans, Modules
from megascan.instrument.operations import OPERATIONS
from megascan.instrument.p2p import PointToPoint
from megascan.instrument.passes import Passes
from megascan.instrument.place import Installation, Place
from megascan.instrument.position import Position
from megascan.instrument.steps import Steps
from megascan.instrument.watched import WatchedModels
from megascan.schema import Granularity
from megascan.tracer import RecordingTracer

if TYPE_CHECKING:
    import torch

_CORE = "megatron.core"
_SCHEDULES = f"{_CORE}.pipeline_parallel.schedules"
_OPTIMIZER = f"{_CORE}.optimizer.optimizer"
_TRANSFORMER = f"{_CORE}.transformer"

_MODULES = (
    ("transformer_layer", f"{_TRANSFORMER}.transformer_layer", "TransformerLayer"),
    ("attention", f"{_TRANSFORMER}.attention", "Attention"),
    ("attention", f"{_TRANSFORMER}.multi_latent_attention", "MultiLatentAttention"),
    ("mlp", f"{_TRANSFORMER}.mlp", "MLP"),
    ("mlp", f"{_CORE}.extensions.transformer_engine", "TEFusedMLP"),
    ("moe", f"{_TRANSFORMER}.moe.moe_layer", "MoELayer"),
    (
        "embedding",
        f"{_CORE}.models.common.embeddings.language_model_embedding",
        "LanguageModelEmbedding",
    ),
)
"""Classes whose `forward` is recorded; layers of Transformer Engine are of the same classes."""

_RECOMPUTED = (
    ("core_attention", f"{_TRANSFORMER}.dot_product_attention", "DotProductAttention.forward"),
    (
        "core_attention",
        f"{_CORE}.extensions.transformer_engine",
        "TEDotProductAttention.forward",
    ),
    ("output", f"{_CORE}.tensor_parallel.random", "CheckpointWithoutOutput._recompute"),
)
"""What selective recomputation repeats inside a module; recorded when it does."""


def places(
    passes: Passes, modules: Modules, p2p: PointToPoint, collectives: Collectives, host: Host
) -> list[Place]:
    """The table."""
    full = Granularity.FULL
    return [
        Place(module=_SCHEDULES, attribute="forward_step", wrap=passes.forward_step),
        Place(module=_SCHEDULES, attribute="forward_step_calc_loss", wrap=passes.calculate_loss),
        Place(module=_SCHEDULES, attribute="backward_step", wrap=passes.backward_step),
        Place(
            module=f"{_CORE}.pipeline_parallel.p2p_communication",
            attribute="P2PCommunicator._communicate",
            wrap=p2p.communicate,
        ),
        *(
            Place(module=_OPTIMIZER, attribute=f"{name}.step", wrap=host.optimizer_step)
            for name in ("ChainedOptimizer", "MixedPrecisionOptimizer", "FP32Optimizer")
        ),
        *(
            Place(
                module="torch.distributed",
                attribute=operation.function,
                wrap=collectives.wrap(operation),
            )
            for operation in OPERATIONS
        ),
        Place(
            module="torch.distributed",
            attribute="_coalescing_manager",
            wrap=collectives.coalescing_manager,
        ),
        *(
            Place(
                module=module,
                attribute=f"{name}.forward",
                wrap=modules.forward_of(span),
                granularity=full,
            )
            for span, module, name in _MODULES
        ),
        *(
            Place(
                module=module,
                attribute=attribute,
                wrap=modules.recompute_of(span),
                granularity=full,
            )
            for span, module, attribute in _RECOMPUTED
        ),
        Place(
            module=f"{_CORE}.models.gpt.gpt_model",
            attribute="GPTModel.forward",
            wrap=modules.output_layer_of,
            granularity=full,
        ),
        Place(
            module=f"{_CORE}.dist_checkpointing.serialization",
            attribute="save",
            wrap=host.save_checkpoint,
            granularity=full,
        ),
    ]


def plain_places(watched: WatchedModels, exchanges: Exchanges, steps: Steps) -> list[Place]:
    """What is wrapped besides where models of plain PyTorch are watched."""
    distributed = "torch.distributed"
    return [
        Place(module="torch.autograd", attribute="backward", wrap=watched.backward),
        Place(
            module="torch.utils.data.dataloader",
            attribute="_BaseDataLoaderIter.__next__",
            wrap=steps.next_batch,
        ),
        Place(module=distributed, attribute="batch_isend_irecv", wrap=exchanges.batch),
        Place(
            module=f"{distributed}.pipelining.schedules",
            attribute="_batch_p2p",
            wrap=exchanges.batch,
        ),
    ]


def install(
    tracer: RecordingTracer, groups: Groups, models: Sequence[torch.nn.Module] = ()
) -> Installation:
    """Wrap every place that the tracer's granularity asks for; undone by `Installation.remove`.

    `models` are those of a job without megatron.core's schedules, one a chunk of its rank.
    """
    position = Position()
    backward_spans = BackwardSpans(tracer, position)
    modules = Modules(tracer, position, backward_spans)
    host = Host(tracer)
    for listener in (position, backward_spans, host):
        tracer.listen(listener)
    if tracer.full:
        tracer.listen(GarbageCollections(tracer))
    installation = Installation()
    installation.undo_full.append(modules.remove)
    wanted = places(
        Passes(tracer, position, backward_spans),
        modules,
        PointToPoint(tracer, position, groups),
        Collectives(tracer, position, groups),
        host,
    )
    if models:
        watched = WatchedModels(tracer, position, backward_spans, models)
        steps = Steps(tracer)
        tracer.listen(watched)
        tracer.listen(steps)
        wanted += plain_places(watched, Exchanges(tracer, position, groups), steps)
    for place in wanted:
        if tracer.full or place.granularity is Granularity.BASE:
            installation.install(place)
    return installation
