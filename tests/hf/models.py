"""Writes small random Hugging Face models and their logits: ``python models.py FOLDER [NAME …]``.

It runs in a process of its own, without the trainer's CPU stand-ins, so that what it writes is what
transformers computes. Weights are three times the usual, biases and norms random, so that a swap
shows; the vocabulary is odd; query groups have three heads, which four ranks divide by groups only.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 203
_GPT2 = {"n_embd": 48, "n_layer": 4, "n_head": 12, "vocab_size": VOCAB_SIZE, "n_positions": 64}
_LLAMA = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 12,
    "num_key_value_heads": 4, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 64,
}  # fmt: skip
_LLAMA_3_ROTATION = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip

CONFIGS: dict[str, PretrainedConfig] = {
    "gpt2": GPT2Config(**_GPT2),
    "gpt2-erf-untied": GPT2Config(
        **_GPT2, activation_function="gelu", tie_word_embeddings=False, n_inner=112
    ),
    "llama2": LlamaConfig(**_LLAMA | {"num_key_value_heads": 12}, rms_norm_eps=1e-5),
    "llama3": LlamaConfig(**_LLAMA, rope_theta=500000.0, head_dim=16),
    "llama31-tied": LlamaConfig(
        **_LLAMA | {"max_position_embeddings": 131072}, rope_theta=500000.0,
        rope_scaling=_LLAMA_3_ROTATION, tie_word_embeddings=True,
    ),
    "llama-linear": LlamaConfig(**_LLAMA, rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "llama-biases": LlamaConfig(**_LLAMA, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**_LLAMA, sliding_window=None, head_dim=8),
    "qwen2-tied": Qwen2Config(**_LLAMA, tie_word_embeddings=True, rope_theta=1000000.0),
    "qwen2": Qwen2Config(**_LLAMA),
    "qwen3": Qwen3Config(**_LLAMA, head_dim=16),
    "mixtral": MixtralConfig(**_LLAMA, num_local_experts=4, num_experts_per_tok=2),
}  # fmt: skip


def write(folder: Path, config: PretrainedConfig) -> None:
    """Write a random model, and two texts with its logits as expected.safetensors."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(3)
    model.save_pretrained(folder)
    tokens = torch.randint(0, VOCAB_SIZE, (2, 40))
    with torch.no_grad():
        logits = model(tokens).logits
    save_file({"tokens": tokens, "logits": logits}, folder / "expected.safetensors")


def main(folder: Path, names: list[str]) -> None:
    """Write the named models, or all."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name in names or CONFIGS:
        write(folder / name, CONFIGS[name])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
