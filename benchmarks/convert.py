"""Time and memory of a conversion: ``python -m benchmarks.convert FOLDER``.

Makes a random Llama of 1.1 B parameters in bfloat16 (the shape of TinyLlama) in FOLDER, turns it
into a checkpoint and back by the real command, and compares the bits. Reported of each way: wall
time, CPU time of all its processes, and their largest memory against the size of the model. Memory
is the sum over the command's processes of the kernel's proportional set size, in which a page that
several processes share (Megatron-Core's checkpoint writers are forks) counts once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from training.hf.weights import open_weights, plan, writing

_HIDDEN, _INNER, _KEYS, _VOCAB, _LAYERS = 2048, 5632, 256, 32000, 22
_SAMPLE_S = 0.05
_CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16",
    "hidden_size": _HIDDEN, "intermediate_size": _INNER, "num_hidden_layers": _LAYERS,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": _VOCAB,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one conversion took."""

    wall_s: float
    cpu_s: float
    peak_bytes: int


def main(folder: Path) -> int:
    """Measure both ways; returns 1 when the bits differ."""
    source, checkpoint, back = folder / "model", folder / "checkpoint", folder / "back"
    size_bytes = _make_model(source)
    print(f"model: {size_bytes / 2e9:.2f} B parameters, {size_bytes / 1e9:.2f} GB in bfloat16")
    inwards = _convert("--from-hf", source, "--save", checkpoint, "--force")
    _print("from Hugging Face", inwards, size_bytes)
    outwards = _convert("--load", checkpoint, "--to-hf", back, "--force")
    _print("to Hugging Face", outwards, size_bytes)
    is_equal = _same_bits(source, back)
    print(f"bit-equal after both: {is_equal}")
    return 0 if is_equal else 1


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (_VOCAB, _HIDDEN)
    for layer in range(_LAYERS):
        where = f"model.layers.{layer}."
        yield f"{where}input_layernorm.weight", (_HIDDEN,)
        yield f"{where}post_attention_layernorm.weight", (_HIDDEN,)
        yield f"{where}self_attn.q_proj.weight", (_HIDDEN, _HIDDEN)
        yield f"{where}self_attn.k_proj.weight", (_KEYS, _HIDDEN)
        yield f"{where}self_attn.v_proj.weight", (_KEYS, _HIDDEN)
        yield f"{where}self_attn.o_proj.weight", (_HIDDEN, _HIDDEN)
        yield f"{where}mlp.gate_proj.weight", (_INNER, _HIDDEN)
        yield f"{where}mlp.up_proj.weight", (_INNER, _HIDDEN)
        yield f"{where}mlp.down_proj.weight", (_HIDDEN, _INNER)
    yield "model.norm.weight", (_HIDDEN,)
    yield "lm_head.weight", (_VOCAB, _HIDDEN)


def _make_model(folder: Path) -> int:
    """Write random weights, bit patterns included that no training makes; gives their bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    blank = {
        name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in _shapes()
    }
    generator = torch.Generator().manual_seed(0)
    with writing(folder, plan(blank, 10**12)) as writer:
        for name, shape in _shapes():
            bits = torch.randint(-3000, 3000, shape, generator=generator, dtype=torch.int16)
            writer.write(name, bits.view(torch.bfloat16))
    (folder / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
    return sum(tensor.nbytes for tensor in blank.values())


def _convert(*flags: object) -> Cost:
    """Run the command; children of children are counted once they are over."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "training.convert", *map(str, flags)]
    process = psutil.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    peak_bytes = 0
    while process.poll() is None:
        peak_bytes = max(peak_bytes, _memory_bytes(process))
        time.sleep(_SAMPLE_S)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    wall_s = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(wall_s=wall_s, cpu_s=cpu_s, peak_bytes=peak_bytes)


def _memory_bytes(process: psutil.Process) -> int:
    total = 0
    with contextlib.suppress(psutil.Error):
        for member in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += member.memory_full_info().pss
    return total


def _print(name: str, cost: Cost, size_bytes: int) -> None:
    memory = f"{cost.peak_bytes / 1e9:.2f} GB = {cost.peak_bytes / size_bytes:.2f} x the model"
    print(f"{name}: {cost.wall_s:.1f} s wall, {cost.cpu_s:.1f} s CPU, peak {memory}", flush=True)


def _same_bits(one: Path, other: Path) -> bool:
    here, there = open_weights(one), open_weights(other)
    if set(here.file_of) != set(there.file_of):
        return False
    for name in here.file_of:
        left, right = here.read([name])[0], there.read([name])[0]
        if left.dtype != right.dtype or not torch.equal(
            left.view(torch.int16), right.view(torch.int16)
        ):
            return False
    return True


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="an empty folder with room for 7 GB")
    raise SystemExit(main(parser.parse_args().folder))
