"""Write a small random Llama as Hugging Face keeps one: ``python random_llama.py FOLDER IDS``."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INNER, LAYERS, HEADS, GROUPS = 64, 176, 4, 8, 4


def main(folder: Path, num_ids: int) -> None:
    """Write config.json and model.safetensors into a new folder."""
    torch.manual_seed(1)
    keys = GROUPS * HIDDEN // HEADS
    shapes = {"model.embed_tokens.weight": (num_ids, HIDDEN), "lm_head.weight": (num_ids, HIDDEN)}
    for layer in range(LAYERS):
        where = f"model.layers.{layer}."
        shapes |= {
            f"{where}self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{where}self_attn.k_proj.weight": (keys, HIDDEN),
            f"{where}self_attn.v_proj.weight": (keys, HIDDEN),
            f"{where}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{where}mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{where}mlp.up_proj.weight": (INNER, HIDDEN),
            f"{where}mlp.down_proj.weight": (HIDDEN, INNER),
        }
    tensors = {name: torch.randn(shape) * 0.02 for name, shape in shapes.items()}
    norms = ["model.norm.weight"]
    norms += [
        f"model.layers.{layer}.{name}_layernorm.weight"
        for layer in range(LAYERS)
        for name in ("input", "post_attention")
    ]
    tensors |= {name: torch.ones(HIDDEN) for name in norms}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "max_position_embeddings": 128,
        "vocab_size": num_ids,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
