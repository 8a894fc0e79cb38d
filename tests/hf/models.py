"""Writes small random Hugging Face models and their logits: ``models.py FOLDER [NAME …]``.

It runs in a process of its own, without the trainer's CPU stand-ins, so that what it writes is what
transformers computes. Weights are three times the usual, biases and norms random, so that a swap
shows; the vocabulary is odd; query groups have three heads, which four ranks divide by groups only.
A name ``random-17`` draws everything: family, sizes, rotation, biases, ties, number format, files.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
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

from tests.weights import exaggerate

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
    "one-group": MistralConfig(**_LLAMA | {"num_key_value_heads": 1}, head_dim=12),
    "qwen2-tied": Qwen2Config(**_LLAMA, tie_word_embeddings=True, rope_theta=1000000.0),
    "qwen2": Qwen2Config(**_LLAMA),
    "qwen3": Qwen3Config(**_LLAMA, head_dim=16),
    "mixtral": MixtralConfig(**_LLAMA, num_local_experts=4, num_experts_per_tok=2),
}  # fmt: skip

# In the suite; benchmarks.conversion tries many more.
RANDOM = ("random-3", "random-4", "random-11")
_TEXT_SIZE = 40


def random_config(seed: int) -> PretrainedConfig:
    """Draw a model of any family that two ranks divide, of sizes that no published one has."""
    draw = random.Random(seed)
    heads = 2 * draw.randint(1, 6)
    channels = 4 * draw.randint(1, 6)
    common: dict[str, Any] = {
        "vocab_size": draw.randint(60, 400),
        "tie_word_embeddings": draw.random() < 0.5,
    }
    num_layers = draw.choice((2, 4))
    if draw.random() < 0.15:
        return GPT2Config(
            **common, n_layer=num_layers, n_head=heads, n_embd=heads * channels,
            n_inner=draw.choice((None, 4 * draw.randint(5, 50))),
            n_positions=draw.randint(_TEXT_SIZE, 200),
            activation_function=draw.choice(("gelu", "gelu_new", "gelu_pytorch_tanh")),
            layer_norm_epsilon=draw.choice((1e-5, 1e-3)),
        )  # fmt: skip
    longest = draw.randint(_TEXT_SIZE, 300)
    common |= {
        "hidden_size": 2 * heads * draw.randint(2, 12), "head_dim": channels,
        "num_attention_heads": heads, "num_hidden_layers": num_layers,
        "intermediate_size": 4 * draw.randint(5, 60),
        "num_key_value_heads": draw.choice([n for n in range(1, heads + 1) if not heads % n]),
        "max_position_embeddings": longest, "rms_norm_eps": draw.choice((1e-6, 1e-5, 1e-3)),
        "rope_parameters": random_rotation(draw),
    }  # fmt: skip
    window = draw.choice((None, draw.randint(_TEXT_SIZE, longest)))
    match draw.choice(("llama", "mistral", "qwen2", "qwen3", "mixtral")):
        case "llama":
            has_biases = draw.random() < 0.5
            return LlamaConfig(**common, attention_bias=has_biases, mlp_bias=has_biases)
        case "mistral":
            return MistralConfig(**common, sliding_window=window)
        case "qwen2":
            return Qwen2Config(**common, use_sliding_window=window is not None,
                               sliding_window=window, max_window_layers=0)  # fmt: skip
        case "qwen3":
            return Qwen3Config(**common)
        case _:
            experts = 2 * draw.randint(1, 4)
            return MixtralConfig(**common, num_local_experts=experts,
                                 num_experts_per_tok=draw.randint(2, experts))  # fmt: skip


def random_rotation(draw: random.Random) -> dict[str, Any]:
    """Draw a rotary embedding that Megatron-Core can compute."""
    base = {"rope_theta": draw.choice((10000.0, 500000.0, 1000000.0, 31337.0))}
    return base | draw.choice(
        (
            {"rope_type": "default"},
            {"rope_type": "linear", "factor": float(draw.randint(2, 8))},
            _LLAMA_3_ROTATION | {"factor": draw.choice((4.0, 32.0))},
        )
    )


def divide(folder: Path, draw: random.Random) -> None:
    """Write a folder's weights anew: as they are, in torch's format, or over several files."""
    kind = draw.choice(("as they are", "bin", "several bins", "several"))
    whole = folder / "model.safetensors"
    if kind == "as they are":
        return
    tensors = load_file(whole)
    whole.unlink()
    if kind == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
        return
    stem, end = ("pytorch_model", "bin") if kind == "several bins" else ("model", "safetensors")
    files = {name: f"{stem}-{draw.randint(1, 3):05d}-of-00003.{end}" for name in tensors}
    for file in set(files.values()):
        own = {name: tensor for name, tensor in tensors.items() if files[name] == file}
        if end == "bin":
            torch.save(own, folder / file)
        else:
            save_file(own, folder / file, metadata={"format": "pt"})
    (folder / f"{stem}.{end}.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": files})
    )


def add_tokenizer(folder: Path) -> None:
    """Write a tokenizer of two words that has a chat template."""
    tokenizer = Tokenizer(WordLevel({"hello": 0, "</s>": 1}, "hello"))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write(folder: Path, config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> None:
    """Write a random model, and two texts with its logits and continuation beside it."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    exaggerate(model)
    model.to(dtype).save_pretrained(folder)
    # As read: `to` has rounded the rotation's frequencies, too, which no file holds.
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = torch.randint(0, config.vocab_size, (2, _TEXT_SIZE))
    prompt = tokens[:, :10]
    with torch.no_grad():
        logits = model(tokens).logits
        greedy = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0,
            eos_token_id=-1, max_new_tokens=20,
        )  # fmt: skip
    expected = {"tokens": tokens, "logits": logits, "greedy": greedy[:, 10:].contiguous()}
    save_file(expected, folder / "expected.safetensors")


def main(folder: Path, names: list[str]) -> None:
    """Write the named models, or all."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name in names or (*CONFIGS, *RANDOM):
        if name in CONFIGS:
            write(folder / name, CONFIGS[name])
            if name == "llama2":
                add_tokenizer(folder / name)
            continue
        seed = int(name.removeprefix("random-"))
        draw = random.Random(seed)
        dtype = draw.choice((torch.float32, torch.bfloat16, torch.float16))
        write(folder / name, random_config(seed), dtype)
        divide(folder / name, draw)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
