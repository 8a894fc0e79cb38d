"""Configurations become flags and configurations again; what is not understood is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megascan.errors import InputError
from training.checkpoint_folder import SavedSettings, differences
from training.hf.families import FAMILIES, config_of, describe, end_ids, read_family

CLASSES = {
    "gpt2": "GPT2Config",
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "mixtral": "MixtralConfig",
}
FILE = Path("config.json")


def class_of(kind: str) -> type[Any]:
    import transformers  # here, since each process that collects tests would import it

    made: type[Any] = getattr(transformers, CLASSES[kind])
    return made


def of(kind: str, **keys: object) -> dict[str, object]:
    return describe(FILE, {"model_type": kind, **keys})


def test_every_family_is_compared_with_transformers() -> None:
    assert {family.name for family in FAMILIES} == set(CLASSES)


@pytest.mark.parametrize("kind", CLASSES)
def test_a_missing_key_means_what_transformers_takes_it_for(kind: str) -> None:
    full = json.loads(class_of(kind)().to_json_string(use_diff=False))
    assert describe(FILE, full) == of(kind)


@pytest.mark.parametrize("kind", CLASSES)
def test_an_unknown_key_is_refused_by_name(kind: str) -> None:
    with pytest.raises(InputError, match="does not know: attention_flavour"):
        of(kind, attention_flavour="new")


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("gpt2", "activation_function", "relu"),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("gpt2", "add_cross_attention", True),
        ("gpt2", "n_embd", 50),
        ("gpt2", "n_layer", "twelve"),
        ("llama", "hidden_act", "gelu"),
        ("llama", "attention_bias", True),
        ("llama", "mlp_bias", True),
        ("llama", "pretraining_tp", 2),
        ("llama", "quantization_config", {"quant_method": "gptq"}),
        ("llama", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("llama", "rope_scaling", {"rope_type": "linear", "factor": 1.5}),
        ("llama", "rope_scaling", {"type": "linear", "factor": 2, "new": 1}),
        ("llama", "rope_scaling", {"rope_type": "linear", "factor": float("nan")}),
        ("llama", "rope_theta", 10000.5),
        ("llama", "rope_theta", float("inf")),
        ("llama", "rope_theta", -10000.0),
        ("llama", "rope_theta", True),
        ("llama", "partial_rotary_factor", 0.5),
        ("mixtral", "router_jitter_noise", 0.1),
        ("mixtral", "num_experts_per_tok", 1),
        ("qwen2", "layer_types", ["linear_attention"]),
        ("qwen2", "layer_types", [["full_attention"]]),
        ("qwen3", "attention_bias", True),
        ("qwen2", "use_mrope", True),
        ("llama", "rope_interleaved", True),
        ("mamba", "hidden_size", 64),
    ],
)
def test_what_cannot_be_computed_is_refused(kind: str, key: str, value: object) -> None:
    with pytest.raises(
        InputError, match=key.removesuffix("scaling") if kind != "mamba" else "model_type 'mamba'"
    ):
        of(kind, **{key: value})


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("qwen2", {"use_mrope": False, "max_window_layers": 28}),  # Qwen2.5
        ("llama", {"rope_interleaved": False, "is_llama_config": True}),  # SmolLM
        ("llama", {"pretraining_tp": 1, "rope_scaling": None, "mlp_bias": False}),  # Llama 2
        ("gpt2", {"n_ctx": 1024, "_num_labels": 1, "task_specific_params": {}}),  # distilled GPT-2
    ],
)
def test_keys_of_published_models_that_change_nothing_are_taken(
    kind: str, keys: dict[str, object]
) -> None:
    assert of(kind, **keys) == of(kind)


def test_a_file_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' + "[" * 100_000)
    with pytest.raises(InputError, match=r"config\.json is not JSON"):
        read_family(tmp_path)


def test_llama_3_rotation_with_other_constants_is_refused() -> None:
    rotation = {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert of("llama", rope_scaling=rotation)["rope_scaling_factor"] == 32.0
    with pytest.raises(InputError, match="original_max_position_embeddings"):
        of("llama", rope_scaling={**rotation, "original_max_position_embeddings": 4096})


def test_transformers_4_and_5_write_the_same_rotation_in_two_ways() -> None:
    old = of("llama", rope_theta=500000.0, rope_scaling={"type": "linear", "factor": 2.0})
    new = of(
        "llama", rope_parameters={"rope_theta": 500000.0, "rope_type": "linear", "factor": 2.0}
    )
    assert old == new
    assert old["rotary_base"] == 500000
    assert old["rotary_seq_len_interpolation_factor"] == 2


@pytest.mark.parametrize(
    ("kind", "keys", "longest"),
    [
        ("mistral", {"sliding_window": 4096}, 4096),
        ("mistral", {"sliding_window": None}, 131072),
        ("mistral", {}, 4096),
        ("mixtral", {}, 131072),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 512}, 512),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 512}, 32768),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"],
                   "sliding_window": 256}, 256),
    ],
)  # fmt: skip
def test_a_sliding_window_limits_the_longest_sequence(
    kind: str, keys: dict[str, object], longest: int
) -> None:
    assert of(kind, **keys)["max_position_embeddings"] == longest


def test_a_file_that_is_no_configuration_is_an_error_of_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        read_family(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        read_family(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match="not a table"):
        read_family(tmp_path)


def saved(model: dict[str, Any], hf_config: dict[str, object] | None = None) -> SavedSettings:
    """What a checkpoint of that model says of itself."""
    full = {"rotary_base": 10000, "rope_scaling_factor": 8.0, "position_embedding_type": "rope"}
    return SavedSettings(
        folder=Path("iter_0000001"), model={**full, **model}, dtype="bfloat16", tokenizer=None,
        hf_config=hf_config,
    )  # fmt: skip


@pytest.mark.parametrize("kind", CLASSES)
def test_a_model_without_a_folder_behind_it_gets_a_configuration_that_describes_it(
    kind: str,
) -> None:
    keys: dict[str, object] = {"vocab_size": 203}
    if kind == "llama":
        keys |= {"attention_bias": True, "mlp_bias": True, "rope_theta": 500000}
    model = of(kind, **keys)
    config = config_of(saved(model))
    assert config["vocab_size"] == 203
    assert not list(differences(model, describe(FILE, config)))
    made = class_of(str(config["model_type"]))
    made(**{k: v for k, v in config.items() if k != "model_type"})


def test_the_original_configuration_goes_back_as_it_came() -> None:
    original = {"model_type": "mistral", "sliding_window": 4096, "bos_token_id": 1, "dtype": "x"}
    config = config_of(saved(of("mistral"), original))
    assert config == {**original, "dtype": "bfloat16"}


def test_a_changed_model_keeps_its_family_and_its_special_tokens() -> None:
    original = {"model_type": "mistral", "bos_token_id": 5, "eos_token_id": 6}
    config = config_of(saved({**of("mistral"), "rotary_base": 70000}, original))
    assert config["model_type"] == "mistral"
    assert config["rope_theta"] == 70000
    assert config["eos_token_id"] == 6


def test_a_model_trained_beyond_its_window_goes_back_without_one() -> None:
    original = {"model_type": "mistral", "sliding_window": 4096}
    config = config_of(saved({**of("mistral"), "max_position_embeddings": 8192}, original))
    assert (config["sliding_window"], config["max_position_embeddings"]) == (None, 8192)


def test_a_model_of_no_family_is_refused() -> None:
    with pytest.raises(InputError, match=r"no family of Hugging Face models .* swiglu True"):
        config_of(saved({**of("llama"), "normalization": "LayerNorm"}))


def test_ends_are_those_of_the_generation_config_else_of_the_model(tmp_path: Path) -> None:
    assert end_ids(tmp_path, {}) == ()
    assert end_ids(tmp_path, {"eos_token_id": 7}) == (7,)
    declared = tmp_path / "generation_config.json"
    declared.write_text('{"eos_token_id": [128001, 128009]}')
    assert end_ids(tmp_path, {"eos_token_id": 7}) == (128001, 128009)
    declared.write_text('{"eos_token_id": "no"}')
    with pytest.raises(InputError, match='eos_token_id "no", expected a whole number or a list'):
        end_ids(tmp_path, {})
