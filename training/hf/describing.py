"""The ``config.json`` of a model that was trained here.

A model that came from a Hugging Face folder goes back with that folder's configuration, as long as
it is still the same model. For any other, and for one that has changed, every family is tried: its
configuration is written, read again as any folder's would be, and taken when it describes exactly
this model. What no family can say is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from megascan.errors import InputError
from training.arguments.model_values import differences
from training.checkpoint_folder import SavedSettings
from training.data.tokenizers import build_tokenizer
from training.hf.families import FAMILIES, Family, describe, sliding_window

_FILE = Path("config.json")


def config_of(saved: SavedSettings) -> dict[str, object]:
    """Return the configuration of a checkpoint's model; InputError when no family has one."""
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
        return False  # trained on since then, on longer texts, all of which it sees
    return not list(differences(model, there))


def _token_ids(saved: SavedSettings, original: Mapping[str, object]) -> dict[str, object]:
    """Return ids of special tokens: the original's, else the tokenizer's end."""
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
        "rope_scaling": _rotation(model),
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


def _rotation(model: Mapping[str, object]) -> dict[str, object] | None:
    factor = model["rotary_seq_len_interpolation_factor"]
    if model["use_rope_scaling"]:
        return {
            "rope_type": "llama3",
            "factor": model["rope_scaling_factor"],
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    return None if factor is None else {"rope_type": "linear", "factor": float(str(factor))}


def _character(model: Mapping[str, object]) -> str:
    """Return the choices that tell families apart, for a message."""
    names = (
        "normalization", "position_embedding_type", "swiglu", "openai_gelu", "add_bias_linear",
        "add_qkv_bias", "qk_layernorm", "num_experts", "rotary_percent",
    )  # fmt: skip
    return ", ".join(f"{name.replace('_', ' ')} {model[name]}" for name in names)
