"""What makes a model the same model: the values that go with its weights wherever they go.

A checkpoint stores them, a Hugging Face folder stands for them, and a run that loads either is
compared with them. They are named as the trainer's settings are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict

from training.arguments.settings import Settings, build_parser, read_settings
from training.arguments.sizes import Sizes

ModelValues = dict[str, object]

_SIZES = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "kv_channels", "max_position_embeddings",
)  # fmt: skip
# Choices of a run, not of a model.
_OF_RUN = ("seq_length", "transformer_impl", "init_method_std")
_MOE = (
    "num_experts", "moe_router_topk", "moe_router_pre_softmax", "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
)  # fmt: skip
# May differ between two runs of one model: they do not change what it computes when it is used.
_MAY_DIFFER = frozenset(
    {
        "hidden_dropout", "attention_dropout", "make_vocab_size_divisible_by",
        "group_query_attention",  # said by num_query_groups
        "moe_router_load_balancing_type", "moe_aux_loss_coeff",
    }
)  # fmt: skip


def model_values(settings: Settings, sizes: Sizes, vocab_size: int) -> ModelValues:
    """Return the values of this run's model, derived sizes filled in."""
    values = asdict(settings.model)
    for name in _OF_RUN:
        del values[name]
    values |= {name: getattr(sizes, name) for name in _SIZES}
    values["group_query_attention"] = sizes.num_query_groups != sizes.num_attention_heads
    values["model_vocab_size"] = vocab_size
    return values | {name: getattr(settings.moe, name) for name in _MOE}


def differences(
    there: Mapping[str, object], here: Mapping[str, object]
) -> Iterator[tuple[str, object, object]]:
    """Yield name and both values of whatever makes two descriptions two models.

    A value that one of them does not have says nothing. Values without a use (the base of a
    rotation that does not take place) are not compared.
    """
    for name, value in there.items():
        if name in _MAY_DIFFER or name not in here or not _is_used(name, there):
            continue
        if value != here[name]:
            yield name, value, here[name]


def _is_used(name: str, values: Mapping[str, object]) -> bool:
    rotates = values.get("position_embedding_type") == "rope"
    if name == "add_qkv_bias":
        return not values.get("add_bias_linear")
    if name == "rope_scaling_factor":
        return rotates and bool(values.get("use_rope_scaling"))
    if name.startswith("rotary_") or name == "use_rope_scaling":
        return rotates
    if name == "max_position_embeddings":  # rotations know no longest sequence
        return values.get("position_embedding_type") == "learned_absolute"
    if name.startswith("moe_"):
        return values.get("num_experts") is not None
    return True


def settings_to_use(values: Mapping[str, object], dtype: str, **choices: object) -> Settings:
    """Return settings of a model that is used, not trained: its values, and more fields by name.

    `dtype` is torch's name of the weights' number format. Whatever only a training needs (batches,
    learning rate) is set to the smallest that is valid; `resolve_sizes` must be told.
    """
    parser = build_parser("model", "a model's settings")
    longest = values["max_position_embeddings"]
    parser.set_defaults(seq_length=longest, micro_batch_size=1, train_iters=1, lr=1.0)
    parser.set_defaults(bf16=dtype == "bfloat16", fp16=dtype == "float16")
    parser.set_defaults(**values)
    parser.set_defaults(**choices)
    return read_settings(parser.parse_args([]))
