"""Converts every model of a folder in and out, in one process: ``round_trips.py MODELS OUTPUT``.

Prints one line a model, ``result NAME True True True``: whether tensors have the same names and
bits after both ways, whether the configuration is the same, and the bits again after the way out of
the checkpoint as Transformer Engine would have written it. What `--check` prints stands before it.
"""

from __future__ import annotations

import gc
import io
import json
import shutil
import sys
from itertools import product
from pathlib import Path

import torch

from training.arguments import resolve_sizes
from training.checkpoint_folder import SavedSettings, saved_settings, settings_to_use
from training.convert import alone
from training.convert import main as convert
from training.hf.weights import open_weights

# The modules of a layer to which Transformer Engine attaches a state of its own.
_WITH_STATE = (
    "self_attention.linear_qkv", "self_attention.core_attention", "self_attention.linear_proj",
    "mlp.linear_fc1", "mlp.linear_fc2",
)  # fmt: skip


def main(models: Path, output: Path) -> int:
    """Convert all; returns 1 when a conversion fails.

    `--check` collects garbage each time: what the models before have imported is left out of that.
    """
    for model in sorted(path for path in models.iterdir() if (path / "config.json").is_file()):
        checkpoint, back, again = (
            output / model.name / name for name in ("checkpoint", "back", "again")
        )
        code = convert(["--from-hf", str(model), "--save", str(checkpoint), "--check"])
        code = code or convert(["--load", str(checkpoint), "--to-hf", str(back)])
        if code:
            return code
        write_as_transformer_engine(checkpoint)
        if convert(["--load", str(checkpoint), "--to-hf", str(again), "--check"]):
            return 1
        same = [json.loads((folder / "config.json").read_text()) for folder in (model, back)]
        bits = same_bits(model, back), same[0] == same[1], same_bits(model, again)
        print("result", model.name, *bits, flush=True)
        gc.freeze()
    return 0


def write_as_transformer_engine(checkpoint: Path) -> None:
    """Write a checkpoint anew with what Transformer Engine's layers add to it.

    Megatron-Core gives the tensors of local layers the names that Transformer Engine's have.
    """
    saved = saved_settings(checkpoint)
    settings = settings_to_use(saved.model, saved.dtype, distributed_backend="gloo")
    with alone(settings, resolve_sizes(settings, 1, is_trained=False)):
        _add_states(saved)


def _add_states(saved: SavedSettings) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    loaded = dist_checkpointing.load_plain_tensors(str(saved.folder))
    tensors = {name: one for name, one in loaded.items() if isinstance(one, torch.Tensor)}
    names = {name.removeprefix("decoder.layers.") for name in tensors}
    assert "self_attention.linear_qkv.layer_norm_weight" in names
    assert "mlp.linear_fc1.layer_norm_weight" in names or saved.model["num_experts"]
    contents: dict[str, object] = {
        name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in tensors.items()
    }
    num_layers = int(str(saved.model["num_layers"]))
    for module in _WITH_STATE:
        key = f"decoder.layers.{module}._extra_state"
        for layer in range(num_layers):
            contents[f"{key}{layer}"] = ShardedObject(key, io.BytesIO(), (num_layers,), (layer,))
    num_experts = int(str(saved.model["num_experts"] or 0))
    for module in ("linear_fc1", "linear_fc2"):
        key = f"decoder.layers.mlp.experts.experts.{module}._extra_state"
        for place in product(range(num_layers), range(num_experts)):
            contents[f"{key}{place}"] = ShardedObject(
                key, io.BytesIO(), (num_layers, num_experts), place
            )
    key = "decoder.final_layernorm._extra_state"
    contents[key] = ShardedObject(key, io.BytesIO(), (1,), (0,))
    kept = saved.folder.with_name("kept")
    saved.folder.rename(kept)
    saved.folder.mkdir()
    dist_checkpointing.save(contents, str(saved.folder))
    assert any("_extra_state" in file for file in _keys(saved.folder))
    for name in ("settings.json", "tokenizer"):
        if (kept / name).exists():
            (kept / name).rename(saved.folder / name)
    shutil.rmtree(kept)


def _keys(folder: Path) -> list[str]:
    """The names of everything in a checkpoint."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    return list(FileSystemReader(folder).read_metadata().state_dict_metadata)


def same_bits(one: Path, other: Path) -> bool:
    """Tell whether two folders hold the same tensors by the same names."""
    here, there = open_weights(one), open_weights(other)
    return set(here.file_of) == set(there.file_of) and all(
        torch.equal(here.read([name])[0], there.read([name])[0]) for name in here.file_of
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
