"""Families of Hugging Face models: their configurations translated to the trainer's flags and back.

A family has a function from a configuration to the values of flags, and one from values to a
configuration. Values have the names of the trainer's settings (``hidden_size``, ``rotary_base``).
Keys that are unknown, or that ask for what Megatron-Core's GPT cannot compute, are refused:
`ConfigReader` remembers which keys of a ``config.json`` were read. Every other key must be known to
say nothing about weights or computation; if not, an InputError names it. A key that is dropped
silently would make a converted model compute something else.

A model that came from a folder is written with that folder's configuration, as long as it is still
the same model. For other models every family is tried (`config_of`): a configuration is written,
read again like that of any folder, and taken when it describes exactly this model.

GPT-2 has its own functions. Llama, Mistral, Qwen2 (and 2.5), Qwen3 and Mixtral share functions with
a few switches and different defaults.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeGuard, TypeVar, cast

from megascan.errors import InputError
from training.checkpoint_folder import SavedSettings, differences
from training.data.tokenizers import build_tokenizer

Value = TypeVar("Value", bound=bool | int | float | str)

# Keys that a configuration may have and that say nothing about the computation.
_SILENT_KEYS = frozenset(
    {
        "architectures", "model_type", "transformers_version", "_name_or_path", "_commit_hash",
        "torch_dtype", "dtype", "use_cache", "initializer_range", "bos_token_id", "eos_token_id",
        "pad_token_id", "sep_token_id", "cls_token_id", "unk_token_id", "id2label", "label2id",
        "num_labels", "task_specific_params", "problem_type", "finetuning_task", "auto_map",
        "output_hidden_states", "output_attentions", "return_dict", "torchscript",
        "return_dict_in_generate", "is_decoder", "use_return_dict", "_attn_implementation",
        "_attn_implementation_autoset", "attn_implementation", "_flash_attn_2_enabled",
        "unsloth_version", "unsloth_fixed", "tokenizer_class", "prefix", "gradient_checkpointing",
        "max_length", "do_sample", "temperature", "top_k", "top_p", "_num_labels",
        "transformers.js_config",
    }
)  # fmt: skip
# Keys that may change the computation, with the only values that do not.
_NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "pretraining_tp": (1, 0, None),
    "use_mrope": (False,),
    "rope_interleaved": (False,),
    "is_llama_config": (True,),
}


class ConfigReader:
    """Reads the keys of one configuration, and remembers which keys were read."""

    def __init__(self, file: Path, config: Mapping[str, object]) -> None:
        self.file = file
        self._config = config
        self._asked: set[str] = set()

    def get(self, name: str, default: Value) -> Value:
        """Return the value of a key, of the type of `default`; `default` where it is missing."""
        found = self.optional(name, type(default))
        return default if found is None else found

    def optional(self, name: str, kind: type[Value]) -> Value | None:
        """Return the value of a key; None where it is missing or null."""
        value = self.raw(name)
        if value is None:
            return None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise InputError(
                f"{self.file} has {name} {value!r}, expected a {kind.__name__}; mend the file"
            )
        return value

    def has(self, name: str) -> bool:
        """Return whether a key is there, even if its value is null."""
        return name in self._config

    def raw(self, name: str) -> object:
        """Return the unchecked value of a key; None where it is missing."""
        self._asked.add(name)
        return self._config.get(name)

    def require(self, name: str, allowed: Iterable[object], default: object) -> None:
        """Raise InputError unless the key, or its default, has one of the `allowed` values."""
        value = self.raw(name) if name in self._config else default
        if value not in tuple(allowed):
            self.refuse(name, value, "which Megatron-Core's GPT cannot compute")

    def refuse(self, name: str, value: object, reason: str) -> NoReturn:
        """Raise an InputError that says why the value of a key cannot be followed."""
        raise InputError(
            f"{self.file} has {name} {json.dumps(value)}, {reason}; this model cannot be taken over"
        )

    def finish(self) -> None:
        """Raise InputError for a key that was not read and that may change the computation."""
        for name, allowed in _NEUTRAL_VALUES.items():
            if name in self._config and name not in self._asked:
                self.require(name, allowed, allowed[0])
        unknown = sorted(set(self._config) - self._asked - _SILENT_KEYS)
        if unknown:
            raise InputError(
                f"{self.file} has keys that this version does not know: {', '.join(unknown)}; "
                "remove those that do not change what the model computes"
            )


def read_config(folder: Path) -> dict[str, object]:
    """Return the ``config.json`` of a folder; InputError when it is missing or no table."""
    return _read_table(folder / "config.json")


def end_ids(folder: Path, config: Mapping[str, object]) -> tuple[int, ...]:
    """Return the tokens at which transformers' ``generate`` ends a text of this model.

    ``generation_config.json`` in `folder` names them (a chat model has several); where that file is
    missing, the model's configuration `config` does.
    """
    file = folder / "generation_config.json"
    if file.is_file():
        config = _read_table(file)
    declared = config.get("eos_token_id")
    ids: list[object] = []
    if declared is not None:
        ids = declared if isinstance(declared, list) else [declared]
    if not all(type(one) is int for one in ids):
        raise InputError(
            f"{file.name if file.is_file() else 'config.json'} of {folder} has eos_token_id "
            f"{json.dumps(declared)}, expected a whole number or a list of them; mend it"
        )
    return tuple(cast(list[int], ids))


def _read_table(file: Path) -> dict[str, object]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"cannot read {file} ({error.strerror}); give the folder of a Hugging Face model"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not JSON ({error}); copy it anew") from error
    if not isinstance(config, dict):
        raise InputError(f"{file} is not a table of settings; copy it anew")
    return cast(dict[str, object], config)


Values = dict[str, object]
"""Values of the trainer's settings by field name."""

_TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
# Constants that are built into Megatron-Core, so a folder must have the same.
_LLAMA_3_ROTATION = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


# Values of features that a model does not have, unless its family sets them.
_PLAIN: Values = {
    "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False,
    "qk_layernorm": False,
    "swiglu": False,
    "openai_gelu": False,
    "add_qkv_bias": False,
    "num_experts": None,
    "moe_router_pre_softmax": False,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One ``model_type``: how its configuration is read, and values for keys that are missing.

    `defaults` are the defaults of the family's configuration class in transformers.
    """

    name: str
    architecture: str
    read: Callable[[ConfigReader, Family], Values]
    defaults: Mapping[str, int | float]
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    has_experts: bool = False


def read_family(folder: Path) -> Values:
    """Return the model of a Hugging Face folder as values of the trainer's settings.

    Raises InputError for a family or a key that cannot be followed.
    """
    return describe(folder / "config.json", read_config(folder))


def family_of(file: Path, config: Mapping[str, object]) -> Family:
    """Return the family that a configuration names."""
    kind = config.get("model_type")
    for family in FAMILIES:
        if family.name == kind:
            return family
    known = ", ".join(family.name for family in FAMILIES)
    raise InputError(f"{file} has model_type {kind!r}; the families that can be read are {known}")


def describe(file: Path, config: Mapping[str, object]) -> Values:
    """Return a configuration's model as values of the trainer's settings."""
    family = family_of(file, config)
    reader = ConfigReader(file, config)
    values = {**_PLAIN, **family.read(reader, family)}
    reader.finish()
    return values


def sliding_window(file: Path, config: Mapping[str, object]) -> int | None:
    """Return how many positions a token sees where a sliding window limits it; None: no limit."""
    return _window(ConfigReader(file, config), family_of(file, config))


def _read_gpt2(reader: ConfigReader, family: Family) -> Values:
    assumed = family.defaults
    hidden, heads = reader.get("n_embd", 768), reader.get("n_head", 12)
    activation = reader.get("activation_function", "gelu_new")
    if activation not in (*_TANH_GELUS, "gelu"):
        reader.refuse("activation_function", activation, "expected a kind of GELU")
    reader.require("scale_attn_weights", (True,), True)
    reader.require("scale_attn_by_inverse_layer_idx", (False,), False)
    _skip(
        reader, "n_ctx", "reorder_and_upcast_attn", "embd_pdrop", "summary_type",
        "summary_use_proj", "summary_activation", "summary_proj_to_labels",
        "summary_first_dropout",
    )  # fmt: skip
    return {
        "num_layers": reader.get("n_layer", 12),
        "hidden_size": hidden,
        "ffn_hidden_size": reader.optional("n_inner", int) or 4 * hidden,
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "group_query_attention": False,
        "kv_channels": _whole_share(reader, "n_embd", hidden, heads),
        "max_position_embeddings": reader.get("n_positions", int(assumed["n_positions"])),
        "model_vocab_size": reader.get("vocab_size", int(assumed["vocab_size"])),
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "norm_epsilon": reader.get("layer_norm_epsilon", 1e-5),
        "openai_gelu": activation in _TANH_GELUS,
        "add_bias_linear": True,
        "untie_embeddings_and_output_weights": not reader.get("tie_word_embeddings", True),
        "hidden_dropout": reader.get("resid_pdrop", 0.1),
        "attention_dropout": reader.get("attn_pdrop", 0.1),
    }


def _read_llama(reader: ConfigReader, family: Family) -> Values:
    assumed = family.defaults
    hidden = reader.get("hidden_size", 4096)
    heads = reader.get("num_attention_heads", 32)
    groups = reader.optional("num_key_value_heads", int)
    if not reader.has("num_key_value_heads"):
        groups = cast(int | None, assumed.get("num_key_value_heads"))
    groups = groups or heads
    channels = reader.optional("head_dim", int) or cast(int, assumed.get("head_dim", 0))
    reader.require("hidden_act", ("silu", "swish"), "silu")
    return {
        "num_layers": reader.get("num_hidden_layers", 32),
        "hidden_size": hidden,
        "ffn_hidden_size": reader.get("intermediate_size", int(assumed["intermediate_size"])),
        "num_attention_heads": heads,
        "kv_channels": channels or _whole_share(reader, "hidden_size", hidden, heads),
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "max_position_embeddings": _longest(reader, family),
        "model_vocab_size": reader.get("vocab_size", int(assumed["vocab_size"])),
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "norm_epsilon": reader.get("rms_norm_eps", assumed["rms_norm_eps"]),
        "swiglu": True,
        "qk_layernorm": family.has_qk_norm,
        "add_bias_linear": _has_biases(reader, family),
        "add_qkv_bias": family.has_qkv_bias,
        "untie_embeddings_and_output_weights": not reader.get("tie_word_embeddings", False),
        "hidden_dropout": 0.0,
        "attention_dropout": reader.get("attention_dropout", 0.0),
        **_rotation(reader, float(assumed["rope_theta"])),
        **(_experts(reader) if family.has_experts else {}),
    }


def _skip(reader: ConfigReader, *names: str) -> None:
    """Mark keys of a family as read that say nothing about weights or computation."""
    for name in names:
        reader.raw(name)


def _whole_share(reader: ConfigReader, name: str, size: int, heads: int) -> int:
    if heads < 1 or size % heads:
        reader.refuse(name, size, f"which {heads} attention heads do not divide")
    return size // heads


def _has_biases(reader: ConfigReader, family: Family) -> bool:
    """Return whether all linear layers have a bias; Megatron-Core has biases in all or in none."""
    if family.name == "qwen3":
        reader.require("attention_bias", (False,), False)
    if family.name != "llama":
        return False
    attention, mlp = reader.get("attention_bias", False), reader.get("mlp_bias", False)
    if attention != mlp:
        name = "attention_bias" if attention else "mlp_bias"
        reader.refuse(name, True, "but Megatron-Core has a bias in all linear layers or in none")
    return attention


def _longest(reader: ConfigReader, family: Family) -> int:
    """Return the longest sequence, at most the size of a sliding window.

    Megatron-Core's own attention sees all positions, as sliding attention does for sequences up to
    the size of the window.
    """
    longest = reader.get("max_position_embeddings", int(family.defaults["max_position_embeddings"]))
    return min(longest, _window(reader, family) or longest)


def _window(reader: ConfigReader, family: Family) -> int | None:
    window = cast(int | None, family.defaults.get("sliding_window"))
    if reader.has("sliding_window"):
        window = reader.optional("sliding_window", int)
    slides = True
    if family.name in ("qwen2", "qwen3"):
        slides = reader.get("use_sliding_window", False)
        _skip(reader, "max_window_layers")
    kinds = reader.raw("layer_types")
    if isinstance(kinds, list):
        unknown = [one for one in kinds if one not in ("full_attention", "sliding_attention")]
        if unknown:
            reader.refuse("layer_types", unknown[:1], "which Megatron-Core's GPT lacks")
        slides = "sliding_attention" in kinds
    return (window or None) if slides else None


def _rotation(reader: ConfigReader, assumed_base: float) -> Values:
    """Return the values of rotary embedding.

    transformers 5 writes one key ``rope_parameters``, transformers 4 writes ``rope_theta`` and
    ``rope_scaling``.
    """
    old = reader.raw("rope_scaling") or {}
    new = reader.raw("rope_parameters") or {}
    if not isinstance(old, dict) or not isinstance(new, dict):
        reader.refuse("rope_parameters", new or old, "expected a table")
    rotation = {**cast(Values, old), **cast(Values, new)}
    base = rotation.pop("rope_theta", None)
    if base is None:
        base = reader.get("rope_theta", assumed_base)
    else:
        reader.raw("rope_theta")
    older_kind = rotation.pop("type", "default")
    kind = rotation.pop("rope_type", older_kind)
    partial = rotation.pop("partial_rotary_factor", reader.raw("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        reader.refuse("partial_rotary_factor", partial, "expected 1")
    if not _is_positive(base) or base != int(base):
        reader.refuse("rope_theta", base, "expected a whole number above 0")
    scaling = _rotation_scaling(reader, kind, rotation)
    return {"rotary_base": int(base), "rotary_percent": 1.0, **scaling}


def _rotation_scaling(reader: ConfigReader, kind: object, rotation: Values) -> Values:
    """Return the values by which a kind of rotary embedding is scaled to longer texts.

    `rotation` is what is left of the configuration's table; each of its keys must be known.
    """
    values: Values = {}
    if kind == "llama3":
        wrong = {
            name: rotation.get(name)
            for name, constant in _LLAMA_3_ROTATION.items()
            if rotation.get(name) != constant
        }
        if wrong:
            reader.refuse("rope_parameters", wrong, f"only {_LLAMA_3_ROTATION} can be computed")
        factor = _number(rotation, reader)
        values = {"use_rope_scaling": True, "rope_scaling_factor": factor}
    elif kind == "linear":
        factor = _number(rotation, reader)
        if factor != int(factor):
            reader.refuse("rope_parameters", factor, "expected a whole factor")
        values = {"rotary_seq_len_interpolation_factor": int(factor)}
    elif kind != "default":
        reader.refuse("rope_type", kind, "expected default, linear or llama3")
    known = {"default": set(), "linear": {"factor"}, "llama3": {"factor", *_LLAMA_3_ROTATION}}
    unknown = sorted(set(rotation) - known[kind])
    if unknown:
        reader.refuse("rope_parameters", unknown, "which are not known")
    return values


def _number(rotation: Mapping[str, object], reader: ConfigReader) -> float:
    factor = rotation.get("factor")
    if not _is_positive(factor):
        reader.refuse("rope_parameters", dict(rotation), "expected a factor above 0")
    return float(factor)


def _is_positive(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a finite number above 0 (Python reads NaN from JSON, too)."""
    return type(value) in (int, float) and 0 < cast(float, value) < math.inf


def _experts(reader: ConfigReader) -> Values:
    reader.require("router_jitter_noise", (0, 0.0), 0.0)
    _skip(reader, "output_router_logits")
    num_chosen = reader.get("num_experts_per_tok", 2)
    if num_chosen < 2:
        reader.refuse(
            "num_experts_per_tok",
            num_chosen,
            "but Megatron-Core makes the weights of a token's experts add up to 1 for two or more",
        )
    return {
        "num_experts": reader.get("num_local_experts", 8),
        "moe_router_topk": num_chosen,
        "moe_aux_loss_coeff": reader.get("router_aux_loss_coef", 0.001),
    }


FAMILIES = (
    Family(
        name="gpt2",
        architecture="GPT2LMHeadModel",
        read=_read_gpt2,
        defaults={"vocab_size": 50257, "n_positions": 1024},
    ),
    Family(
        name="llama",
        architecture="LlamaForCausalLM",
        read=_read_llama,
        defaults={
            "intermediate_size": 11008,
            "vocab_size": 32000,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
        },
    ),
    Family(
        name="mistral",
        architecture="MistralForCausalLM",
        read=_read_llama,
        defaults={
            "intermediate_size": 14336,
            "vocab_size": 32000,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
        },
    ),
    Family(
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        read=_read_llama,
        has_qkv_bias=True,
        defaults={
            "intermediate_size": 22016,
            "vocab_size": 151936,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
        },
    ),
    Family(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        read=_read_llama,
        has_qk_norm=True,
        defaults={
            "intermediate_size": 22016,
            "vocab_size": 151936,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
        },
    ),
    Family(
        name="mixtral",
        architecture="MixtralForCausalLM",
        read=_read_llama,
        has_experts=True,
        defaults={
            "intermediate_size": 14336,
            "vocab_size": 32000,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
        },
    ),
)


_FILE = Path("config.json")


def config_of(saved: SavedSettings) -> dict[str, object]:
    """Return the configuration of a checkpoint's model; InputError when no family fits."""
    original = dict(saved.hf_config or {})
    if original and _describes(original, saved.model):
        name = "dtype" if "dtype" in original else "torch_dtype"
        return {**original, name: saved.dtype}
    has_experts = saved.model["num_experts"] is not None
    families = [family for family in FAMILIES if family.has_experts == has_experts]
    families.sort(key=lambda family: family.name != original.get("model_type"))
    for family in families:
        config = {
            "architectures": [family.architecture],
            "model_type": family.name,
            "torch_dtype": saved.dtype,
            **_token_ids(saved, original),
            **_write(family, saved.model),
        }
        if _describes(config, saved.model):
            return config
    raise InputError(
        f"no family of Hugging Face models ({', '.join(family.name for family in FAMILIES)}) "
        f"computes what the model of {saved.folder} does: {_character(saved.model)}"
    )


def _describes(config: Mapping[str, object], model: Mapping[str, object]) -> bool:
    """Return whether a configuration stands for exactly this model."""
    try:
        there, window = describe(_FILE, config), sliding_window(_FILE, config)
    except InputError:
        return False
    if window is not None and cast(int, model["max_position_embeddings"]) > window:
        return False  # trained since then on longer texts, whose positions it sees all
    return not list(differences(model, there))


def _token_ids(saved: SavedSettings, original: Mapping[str, object]) -> dict[str, object]:
    """Return the ids of special tokens: the original configuration's, else the tokenizer's end."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    known = {name: original[name] for name in names if name in original}
    if known or saved.tokenizer is None:
        return known
    end = build_tokenizer(saved.tokenizer).eod
    return {"bos_token_id": end, "eos_token_id": end}


def _write(family: Family, model: Mapping[str, object]) -> dict[str, object]:
    return _write_gpt2(model) if family.name == "gpt2" else _write_llama(family, model)


def _write_gpt2(model: Mapping[str, object]) -> dict[str, object]:
    return {
        "n_layer": model["num_layers"],
        "n_embd": model["hidden_size"],
        "n_inner": model["ffn_hidden_size"],
        "n_head": model["num_attention_heads"],
        "n_positions": model["max_position_embeddings"],
        "vocab_size": model["model_vocab_size"],
        "layer_norm_epsilon": model["norm_epsilon"],
        "activation_function": "gelu_new" if model["openai_gelu"] else "gelu",
        "tie_word_embeddings": not model["untie_embeddings_and_output_weights"],
        "resid_pdrop": model["hidden_dropout"],
        "embd_pdrop": model["hidden_dropout"],
        "attn_pdrop": model["attention_dropout"],
    }


def _write_llama(family: Family, model: Mapping[str, object]) -> dict[str, object]:
    config = {
        "num_hidden_layers": model["num_layers"],
        "hidden_size": model["hidden_size"],
        "intermediate_size": model["ffn_hidden_size"],
        "num_attention_heads": model["num_attention_heads"],
        "num_key_value_heads": model["num_query_groups"],
        "head_dim": model["kv_channels"],
        "max_position_embeddings": model["max_position_embeddings"],
        "vocab_size": model["model_vocab_size"],
        "rms_norm_eps": model["norm_epsilon"],
        "hidden_act": "silu",
        "tie_word_embeddings": not model["untie_embeddings_and_output_weights"],
        "attention_dropout": model["attention_dropout"],
        "rope_theta": model["rotary_base"],
        "rope_scaling": _write_rotation(model),
    }
    if family.name == "llama":
        config |= {"attention_bias": model["add_bias_linear"], "mlp_bias": model["add_bias_linear"]}
    if "sliding_window" in family.defaults or family.has_experts:
        config["sliding_window"] = None
    if family.has_experts:
        config |= {
            "num_local_experts": model["num_experts"],
            "num_experts_per_tok": model["moe_router_topk"],
            "router_aux_loss_coef": model["moe_aux_loss_coeff"],
        }
    return config


def _write_rotation(model: Mapping[str, object]) -> dict[str, object] | None:
    factor = model["rotary_seq_len_interpolation_factor"]
    if model["use_rope_scaling"]:
        return {
            "rope_type": "llama3",
            "factor": model["rope_scaling_factor"],
            **_LLAMA_3_ROTATION,
        }
    return None if factor is None else {"rope_type": "linear", "factor": float(str(factor))}


def _character(model: Mapping[str, object]) -> str:
    """Return, for a message, the values that tell families apart."""
    names = (
        "normalization", "position_embedding_type", "swiglu", "openai_gelu", "add_bias_linear",
        "add_qkv_bias", "qk_layernorm", "num_experts", "rotary_percent",
    )  # fmt: skip
    return ", ".join(f"{name.replace('_', ' ')} {model[name]}" for name in names)
