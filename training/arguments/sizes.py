"""From flags and a number of ranks to sizes that are known to fit, every value filled in.

Rules over the flags alone are in `rules`, those between the finished sizes in `fit`; here are the
divisions that make the sizes. Each rule that is broken is a ConfigError of one sentence.
"""

from __future__ import annotations

from dataclasses import dataclass

from megascan.errors import ConfigError
from training.arguments.fit import check_fit
from training.arguments.rules import check_flags
from training.arguments.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of model, batch and parallel axes, complete and consistent.

    `virtual_pipeline_size` is None without interleaving, else chunks on a rank (2 or more).
    """

    world_size: int
    tensor_size: int
    pipeline_size: int
    virtual_pipeline_size: int | None
    context_size: int
    expert_size: int
    data_size: int
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    seq_length: int
    max_position_embeddings: int
    micro_batch_size: int
    global_batch_size: int
    num_microbatches: int
    train_iters: int
    lr: float

    @property
    def model_chunks(self) -> int:
        """Chunks of the model on one rank."""
        return self.virtual_pipeline_size or 1


def resolve_sizes(settings: Settings, world_size: int) -> Sizes:
    """Check all settings for a job of `world_size` ranks.

    Raises ConfigError for the first rule that is broken.
    """
    check_flags(settings)
    model, parallel = settings.model, settings.parallel
    hidden, heads = _given(model.hidden_size), _given(model.num_attention_heads)
    layers, seq_length = _given(model.num_layers), _given(model.seq_length)
    data_size = _data_size(settings, world_size)
    groups = model.num_query_groups if model.group_query_attention else heads
    micro_batch = _given(settings.batch.micro_batch_size)
    global_batch = settings.batch.global_batch_size or micro_batch * data_size
    sizes = Sizes(
        world_size=world_size,
        tensor_size=parallel.tensor_model_parallel_size,
        pipeline_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_size=_virtual_pipeline_size(settings, layers),
        context_size=parallel.context_parallel_size,
        expert_size=parallel.expert_model_parallel_size,
        data_size=data_size,
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=model.ffn_hidden_size or _default_ffn_size(hidden, model.swiglu),
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=model.kv_channels or hidden // heads,
        seq_length=seq_length,
        max_position_embeddings=model.max_position_embeddings or seq_length,
        micro_batch_size=micro_batch,
        global_batch_size=global_batch,
        num_microbatches=_num_microbatches(global_batch, micro_batch, data_size),
        train_iters=_given(settings.batch.train_iters),
        lr=settings.optimizer.lr or 0.0,
    )
    check_fit(settings, sizes)
    return sizes


def _given(value: int | None) -> int:
    if value is None:
        raise ConfigError("a required size is missing")  # check_flags has named it already
    return value


def _data_size(settings: Settings, world_size: int) -> int:
    parallel = settings.parallel
    axes = (
        ("tensor", parallel.tensor_model_parallel_size),
        ("pipeline", parallel.pipeline_model_parallel_size),
        ("context", parallel.context_parallel_size),
    )
    product = 1
    for _, size in axes:
        product *= size
    if world_size % product:
        spelled = " x ".join(f"{name} {size}" for name, size in axes if size > 1)
        raise ConfigError(
            f"the world size {world_size} is not divisible by the model-parallel size {product} "
            f"({spelled}); start a multiple of {product} ranks or change the parallel sizes"
        )
    return world_size // product


def _default_ffn_size(hidden_size: int, swiglu: bool) -> int:
    """Megatron's rule: 4 h, or with SwiGLU 8/3 h, as a multiple of 64."""
    return int(4 * hidden_size * 2 / 3 / 64) * 64 or 64 if swiglu else 4 * hidden_size


def _virtual_pipeline_size(settings: Settings, num_layers: int) -> int | None:
    parallel = settings.parallel
    stages = parallel.pipeline_model_parallel_size
    per_chunk = parallel.num_layers_per_virtual_pipeline_stage
    chunks = parallel.num_virtual_stages_per_pipeline_rank
    if per_chunk is not None and chunks is not None:
        raise ConfigError(
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank "
            "exclude each other; keep one"
        )
    if num_layers % stages:
        raise ConfigError(
            f"--num-layers {num_layers} is not divisible by --pipeline-model-parallel-size "
            f"{stages}; change one of them"
        )
    if per_chunk is None and chunks is None:
        return None
    if stages == 1:
        raise ConfigError("the interleaved schedule needs --pipeline-model-parallel-size 2 or more")
    on_rank = num_layers // stages
    if per_chunk is not None and on_rank % per_chunk:
        raise ConfigError(
            f"the {on_rank} layers of a pipeline stage are not divisible by "
            f"--num-layers-per-virtual-pipeline-stage {per_chunk}; change one of them"
        )
    if chunks is not None and on_rank % chunks:
        raise ConfigError(
            f"the {on_rank} layers of a pipeline stage are not divisible by "
            f"--num-virtual-stages-per-pipeline-rank {chunks}; change one of them"
        )
    size = chunks or on_rank // (per_chunk or 1)
    if size > 1 and stages == 2 and not parallel.overlap_p2p_comm:
        # Both neighbours are then the same rank, and one batch of messages would mix them up.
        raise ConfigError(
            "--no-overlap-p2p-communication with the interleaved schedule needs "
            "--pipeline-model-parallel-size 3 or more; leave it out"
        )
    return size if size > 1 else None


def _num_microbatches(global_batch: int, micro_batch: int, data_size: int) -> int:
    if global_batch % (micro_batch * data_size):
        raise ConfigError(
            f"--global-batch-size {global_batch} is not divisible by --micro-batch-size "
            f"{micro_batch} x data-parallel size {data_size}; change one of them"
        )
    return global_batch // (micro_batch * data_size)
