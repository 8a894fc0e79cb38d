"""Writing safetensors files one tensor after the other, so that only one is in memory.

The format is a table of names, number formats, shapes and places, and then the bytes. The table
comes first, so shapes must be known before any tensor is: give `plan` tensors without contents
(torch's device ``meta``), then write the real ones in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from training.hf.weights import INDEX_SUFFIX, SAFETENSORS

CONFIG = "config.json"
_SHARDS = "model-[0-9]*-of-[0-9]*.safetensors"
MODEL_FILES = (CONFIG, SAFETENSORS, f"{SAFETENSORS}{INDEX_SUFFIX}", _SHARDS)
"""Patterns of the files that a folder is read by, the first of them before the others."""
_FORMATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, kw_only=True)
class WeightFile:
    """One file to be written: its name and its tensors without contents, in order."""

    name: str
    tensors: Mapping[str, torch.Tensor]


def plan(tensors: Mapping[str, torch.Tensor], max_file_bytes: int) -> list[WeightFile]:
    """Divide tensors (without contents) over files of at most `max_file_bytes`, in their order.

    A tensor larger than that has a file of its own. One file is named as Hugging Face names one.
    """
    groups: list[dict[str, torch.Tensor]] = [{}]
    size_bytes = 0
    for name, tensor in tensors.items():
        if groups[-1] and size_bytes + tensor.nbytes > max_file_bytes:
            groups.append({})
            size_bytes = 0
        groups[-1][name] = tensor
        size_bytes += tensor.nbytes
    if len(groups) == 1:
        return [WeightFile(name=SAFETENSORS, tensors=groups[0])]
    return [
        WeightFile(name=f"model-{number:05d}-of-{len(groups):05d}.safetensors", tensors=group)
        for number, group in enumerate(groups, start=1)
    ]


class WeightWriter:
    """Takes the tensors of a plan in its order and writes them to the plan's files."""

    def __init__(self, folder: Path, files: list[WeightFile]) -> None:
        self._folder = folder
        self._left = [(file, name) for file in files for name in file.tensors]
        self._left.reverse()
        self._open: BinaryIO | None = None
        self._written: WeightFile | None = None

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the next tensor of the plan."""
        file, expected = self._left.pop()
        planned = file.tensors[expected]
        if (name, tensor.shape, tensor.dtype) != (expected, planned.shape, planned.dtype):
            raise ValueError(
                f"{name} of {tuple(tensor.shape)} comes where {expected} is to be written"
            )
        if file is not self._written or self._open is None:
            self._begin(file)
        assert self._open is not None
        flat = tensor.detach().contiguous().flatten().view(torch.uint8)
        self._open.write(flat.numpy().data)

    def _begin(self, file: WeightFile) -> None:
        self.close()
        self._open = (self._folder / file.name).open("wb")
        self._open.write(_table(file.tensors))
        self._written = file

    def close(self) -> None:
        """Close the file that is being written."""
        if self._open is not None:
            self._open.close()
            self._open = None


@contextmanager
def writing(folder: Path, files: list[WeightFile]) -> Iterator[WeightWriter]:
    """Write planned files into a folder, and their index where there are several."""
    writer = WeightWriter(folder, files)
    try:
        yield writer
    finally:
        writer.close()
    if len(files) > 1:
        index = {
            "metadata": {
                "total_size": sum(
                    tensor.nbytes for file in files for tensor in file.tensors.values()
                )
            },
            "weight_map": {name: file.name for file in files for name in file.tensors},
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / f"{SAFETENSORS}{INDEX_SUFFIX}").write_text(text, encoding="utf-8")


def publish_model(made: Path, folder: Path) -> None:
    """Move a finished model's files to their place; config.json, by which it is known, comes last.

    Weights of an earlier model there are removed first: an index of theirs would be read before the
    new ones.
    """
    for old in [file for pattern in MODEL_FILES for file in folder.glob(pattern)]:
        old.unlink()
    for file in sorted(made.iterdir(), key=lambda one: one.name == CONFIG):
        file.replace(folder / file.name)


def _table(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the head of a file: the size of the table in eight bytes, and the table."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in tensors.items():
        table[name] = {
            "dtype": _FORMATS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.nbytes],
        }
        start += tensor.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers map the bytes behind it
    return len(text).to_bytes(8, "little") + text
