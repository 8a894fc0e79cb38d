"""Flags, their defaults, and every rule between them."""

from __future__ import annotations

from dataclasses import fields

import pytest

from megascan.errors import ConfigError, UsageError
from training.arguments import Sizes, parse_settings, resolve_sizes
from training.distributed import Launch
from training.job import parse_job

MODEL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--train-iters 10 --lr 0.1 "
)


def sizes_of(flags: str, world_size: int = 1) -> Sizes:
    return resolve_sizes(parse_settings((MODEL + flags).split()), world_size)


def test_what_is_left_out_is_derived() -> None:
    sizes = sizes_of("--tensor-model-parallel-size 2", world_size=8)
    assert (sizes.data_size, sizes.global_batch_size, sizes.num_microbatches) == (4, 8, 1)
    assert (sizes.ffn_hidden_size, sizes.kv_channels, sizes.num_query_groups) == (256, 16, 4)
    assert (sizes.max_position_embeddings, sizes.virtual_pipeline_size) == (32, None)


def test_swiglu_mlp_is_two_thirds_as_wide() -> None:
    assert sizes_of("--swiglu --hidden-size 4096").ffn_hidden_size == 10880


def test_chunks_come_from_either_flag() -> None:
    stages = "--pipeline-model-parallel-size 2 --global-batch-size 4 "
    per_chunk = sizes_of(stages + "--num-layers-per-virtual-pipeline-stage 2", 2)
    chunks = sizes_of(stages + "--num-virtual-stages-per-pipeline-rank 2", 2)
    assert per_chunk.virtual_pipeline_size == chunks.virtual_pipeline_size == 2
    one = sizes_of(stages + "--num-layers-per-virtual-pipeline-stage 4", 2)
    assert one.virtual_pipeline_size is None


def test_the_8b_model_of_the_guides_is_accepted() -> None:
    flags = (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        "--group-query-attention --num-query-groups 8 --normalization RMSNorm --swiglu "
        "--position-embedding-type rope --seq-length 2048 --micro-batch-size 1 --train-iters 5 "
        "--lr 1e-4 --bf16 --tensor-model-parallel-size 4"
    )
    sizes = resolve_sizes(parse_settings(flags.split()), 8)
    assert (sizes.num_query_groups, sizes.kv_channels, sizes.data_size) == (8, 128, 2)


BROKEN = [
    ("--tensor-model-parallel-size 3", 4, "world size 4 is not divisible by the model-parallel"),
    ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4", 12, "(tensor 2 x pipeline"),
    ("--tensor-model-parallel-size 8", 8, "--num-attention-heads 4 is not divisible"),
    ("--pipeline-model-parallel-size 3", 3, "--num-layers 8 is not divisible"),
    ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3", 2,
     "4 layers of a pipeline stage are not divisible"),
    ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3", 2,
     "4 layers of a pipeline stage are not divisible"),
    ("--num-layers-per-virtual-pipeline-stage 2", 1, "needs --pipeline-model-parallel-size 2"),
    ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
     "--num-virtual-stages-per-pipeline-rank 2", 2, "exclude each other"),
    ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
     "--global-batch-size 6", 2, "the 3 microbatches"),
    ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
     "--global-batch-size 4 --no-overlap-p2p-communication", 2, "3 or more"),
    ("--global-batch-size 6", 2, "--global-batch-size 6 is not divisible by --micro-batch-size 2"),
    ("--num-attention-heads 5", 1, "--hidden-size 64 is not divisible"),
    ("--group-query-attention --num-query-groups 3", 1, "--num-query-groups 3 must divide"),
    ("--group-query-attention --num-query-groups 2 --num-attention-heads 6 --kv-channels 8 "
     "--tensor-model-parallel-size 3", 3, "multiple or a divisor of --tensor-model-parallel-size"),
    ("--group-query-attention --num-query-groups 1 --num-attention-heads 4 --kv-channels 3 "
     "--tensor-model-parallel-size 4", 4, "make 18 rows, which"),
    ("--ffn-hidden-size 33 --tensor-model-parallel-size 2", 2, "--ffn-hidden-size 33"),
    ("--max-position-embeddings 16", 1, "less than --seq-length 32"),
    ("--sequence-parallel", 1, "--sequence-parallel needs"),
    ("--sequence-parallel --tensor-model-parallel-size 2 --seq-length 31", 2, "--seq-length 31"),
    ("--bf16 --fp16", 1, "exclude each other"),
    ("--loss-scale 8", 1, "--loss-scale has a meaning with --fp16 only"),
    ("--overlap-param-gather", 1, "needs --use-distributed-optimizer"),
    ("--overlap-param-gather --use-distributed-optimizer", 1, "needs --overlap-grad-reduce"),
    ("--context-parallel-size 2", 2, "--transformer-impl transformer_engine"),
    (
        "--context-parallel-size 2 --transformer-impl transformer_engine --seq-length 30",
        2,
        "2 x --context-parallel-size 2",
    ),
    ("--expert-model-parallel-size 2", 2, "needs --num-experts"),
    ("--num-experts 3 --expert-model-parallel-size 2", 2, "--num-experts 3 is not divisible"),
    ("--num-experts 2 --moe-router-topk 3", 1, "--moe-router-topk 3 is more"),
    ("--num-experts 4 --expert-model-parallel-size 4", 2, "2 ranks of a pipeline stage"),
    ("--num-experts 4 --tensor-model-parallel-size 2", 2, "needs --sequence-parallel"),
    ("--num-experts 4 --moe-router-topk 1", 1, "needs --moe-router-pre-softmax"),
    ("--num-experts 4 --tensor-model-parallel-size 2 --sequence-parallel", 2,
     "needs --disable-bias-linear"),
    ("--lr nan", 1, "--lr is nan, but must be a finite number"),
    ("--seed 4294967296", 1, "--seed is 4294967296, but must be at most"),
    ("--hidden-dropout 1", 1, "--hidden-dropout is 1.0"),
    ("--num-layers 0", 1, "--num-layers is 0, but must be more than 0"),
    ("--weight-decay -1", 1, "--weight-decay is -1.0, but must be 0 or more"),
    ("--min-lr 1", 1, "--min-lr 1.0 is above --lr 0.1"),
    ("--lr-warmup-init 1", 1, "--lr-warmup-init 1.0 is above"),
    ("--lr-warmup-fraction 0.1 --lr-warmup-iters 1", 1, "exclude each other"),
    ("--lr-warmup-fraction 1", 1, "--lr-warmup-fraction is 1.0"),
    ("--lr-warmup-iters 10", 1, "--lr-warmup-iters 10 is not less"),
    ("--lr-decay-style WSD", 1, "--lr-wsd-decay-iters"),
    ("--adam-beta2 1", 1, "--adam-beta2 is 1.0"),
    ("--optimizer-offload-fraction 2", 1, "--optimizer-offload-fraction is 2.0"),
    ("--optimizer-cpu-offload --bf16", 1, "offload needs --use-distributed-optimizer"),
    ("--save-interval 5", 1, "--save-interval needs --save"),
    ("--finetune", 1, "need --load"),
    ("--recompute-granularity full", 1, "--recompute-method"),
    ("--recompute-num-layers 1", 1, "need --recompute-granularity full"),
    ("--recompute-granularity selective --recompute-modules layernorm", 1,
     "layernorm cannot be recomputed with --transformer-impl local; choose from core_attn"),
    ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 3", 1,
     "8 layers of a model chunk are not divisible by --recompute-num-layers 3"),
    ("--recompute-granularity full --recompute-method block --recompute-num-layers 3 "
     "--pipeline-model-parallel-size 4", 4, "--recompute-num-layers 3 is more than the 2 layers"),
    ("--position-embedding-type rope --kv-channels 7", 1, "1.0 of 7 channels"),
    ("--position-embedding-type rope --rotary-percent 3", 1, "--rotary-percent is 3.0"),
    ("--num-experts 2 --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 1", 1,
     "has no meaning with --moe-router-load-balancing-type sinkhorn"),
    ("--recompute-modules mlp", 1, "--recompute-granularity selective"),
    ("--recompute-granularity selective --recompute-modules mlp", 1, "needs --disable-bias-linear"),
    ("--num-experts 4", 1, "needs --disable-bias-linear"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "world_size", "message"), BROKEN)
def test_what_does_not_fit_is_one_sentence(flags: str, world_size: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sizes_of(flags, world_size)
    text = str(caught.value)
    assert message in text
    assert "\n" not in text


LLAMA_8B = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --normalization RMSNorm --swiglu "
    "--position-embedding-type rope --seq-length 2048 --tensor-model-parallel-size 8 "
    "--untie-embeddings-and-output-weights --disable-bias-linear --bf16 "
    "--micro-batch-size 1 --global-batch-size 16 --train-iters 10 --lr 1e-4"
)


def test_the_8b_model_of_the_guides_is_one_command() -> None:
    sizes = resolve_sizes(parse_settings(LLAMA_8B.split()), 16)
    assert (sizes.data_size, sizes.num_microbatches, sizes.kv_channels) == (2, 8, 128)
    assert (sizes.num_query_groups, sizes.ffn_hidden_size) == (8, 14336)


def test_required_flags_are_named_all_at_once() -> None:
    with pytest.raises(ConfigError, match=r"--num-layers --hidden-size .* --train-iters --lr"):
        resolve_sizes(parse_settings([]), 1)


def test_unknown_flags_and_values_are_usage_errors() -> None:
    for flags in ("--no-such-flag", "--num-layers two", "--normalization BatchNorm"):
        with pytest.raises(UsageError, match="see --help"):
            parse_settings(flags.split())


def test_every_flag_has_a_help_text_and_megatrons_default() -> None:
    settings = parse_settings([])
    for part in fields(settings):
        for entry in fields(getattr(settings, part.name)):
            assert entry.metadata["flag"].text
            assert getattr(getattr(settings, part.name), entry.name) == entry.default
    assert settings.precision.initial_loss_scale == 2**32
    assert (settings.log.log_interval, settings.batch.eval_iters) == (100, 100)
    assert settings.model.transformer_impl == "local"


IDLE = [
    ("--num-query-groups 2", "--num-query-groups has no effect without --group-query-attention"),
    ("--rotary-base 500", "--rotary-base has no effect without --position-embedding-type rope"),
    ("--moe-aux-loss-coeff 0.1", "--moe-aux-loss-coeff has no effect without --num-experts"),
    ("--bf16 --min-loss-scale 2", "--min-loss-scale has no effect without --fp16"),
    ("--fp16 --loss-scale 8 --hysteresis 3", "--hysteresis has no effect without a dynamic loss"),
    ("--ddp-bucket-size 9", "--ddp-bucket-size has no effect without --overlap-grad-reduce"),
    ("--no-overlap-p2p-communication", "communication has no effect without an interleaved"),
    ("--lr-wsd-decay-iters 2", "--lr-wsd-decay-iters has no effect without --lr-decay-style WSD"),
    ("--lr-decay-style constant --min-lr 0.01", "--min-lr has no effect without a learning rate"),
    ("--sgd-momentum 0.5", "--sgd-momentum has no effect without --optimizer sgd"),
    ("--optimizer sgd --adam-eps 1e-6", "--adam-eps has no effect without --optimizer adam"),
    ("--optimizer-offload-fraction 0.5", "fraction has no effect without --optimizer-cpu-offload"),
    ("--no-load-rng", "--no-load-rng has no effect without --load"),
    ("--tensorboard-log-interval 2", "interval has no effect without --tensorboard-dir"),
    ("--eval-iters 0 --eval-interval 5", "--eval-interval has no effect without --eval-iters of"),
    ("--split 9,1,0", "--split has no effect without --data-path"),
    ("--data-cache-path x", "--data-cache-path has no effect without --data-path"),
    ("--trace-budget 1%", "--trace-budget has no effect without --trace"),
]


def idle_of(flags: str) -> tuple[str, ...]:
    data = "--mock-data --tokenizer-type NullTokenizer --vocab-size 60 --distributed-backend gloo "
    launch = Launch(rank=0, local_rank=0, world_size=1, local_world_size=1)
    return parse_job((MODEL + data + flags).split(), launch).notes


@pytest.mark.parametrize(("flags", "expected"), IDLE)
def test_a_flag_that_does_nothing_is_said(flags: str, expected: str) -> None:
    (sentence,) = idle_of(flags)
    assert expected in sentence


def test_flags_that_are_used_or_as_by_default_are_not_said() -> None:
    used = "--group-query-attention --num-query-groups 2 --position-embedding-type rope "
    used += "--rotary-base 500 --num-experts 2 --moe-router-topk 2 --fp16 --hysteresis 3 "
    used += "--disable-bias-linear --trace --trace-budget 1% --sgd-momentum 0.9"
    assert idle_of(used) == ()
