"""The weights of a Hugging Face folder: safetensors or torch's own format, in one file or several.

Reading: files are mapped into memory. A tensor costs what is used of it, and nothing any more when
it is let go, so that the pages of earlier layers do not add up.

Writing: safetensors files, one tensor after the other, so that only one is in memory. The format is
a table of names, number formats, shapes and places, and then the bytes. The table comes first, so
shapes must be known before any tensor is: give `plan` tensors without contents (torch's device
``meta``), then write the real ones in the same order.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import torch

from megascan.errors import InputError, MissingError

SAFETENSORS = "model.safetensors"
TORCH = "pytorch_model.bin"
INDEX_SUFFIX = ".index.json"
CONFIG = "config.json"
_SHARDS = "model-[0-9]*-of-[0-9]*.safetensors"
MODEL_FILES = (CONFIG, SAFETENSORS, f"{SAFETENSORS}{INDEX_SUFFIX}", _SHARDS)
"""Patterns of the files that a folder is read by, the first of them before the others."""
_DTYPES = ("float32", "bfloat16", "float16")
_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_FORMATS = {getattr(torch, dtype): name for name, dtype in _SAFETENSORS_DTYPES.items()}
_NO_WEIGHTS = {"BOOL", "U8", "I8", "I32", "I64"}


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Which file of a folder has which tensor."""

    folder: Path
    file_of: Mapping[str, str]

    def name_here(self, name: str) -> str:
        """Return a tensor's name in this folder: a model saved without its head has no prefix."""
        bare = name.partition(".")[2]
        return bare if name not in self.file_of and bare in self.file_of else name

    def require(self, name: str) -> str:
        """Return a tensor's name in this folder; InputError where it is missing."""
        here = self.name_here(name)
        if here not in self.file_of:
            raise InputError(
                f"{self.folder} has no tensor {here}, which its config.json asks for; "
                "copy the folder anew"
            )
        return here

    def dtype(self) -> str:
        """Return the one number format that holds all weights as they are, by torch's name."""
        found: set[str] = set()
        for file in sorted(set(self.file_of.values())):
            found |= _dtypes(self.folder / file)
        unknown = sorted(found - set(_DTYPES))
        if unknown:
            raise InputError(
                f"{self.folder} has weights in {', '.join(unknown)}; expected one of "
                f"{', '.join(_DTYPES)}"
            )
        return found.pop() if len(found) == 1 else "float32"

    def read(self, names: Iterable[str]) -> list[torch.Tensor]:
        """Return some tensors, mapped as long as they are kept; InputError for a missing one."""
        by_file: dict[str, list[str]] = {}
        wanted = [self.require(name) for name in names]
        for name in wanted:
            by_file.setdefault(self.file_of[name], []).append(name)
        found: dict[str, torch.Tensor] = {}
        for file, there in by_file.items():
            found |= _read(self.folder / file, there)
        return [found[name] for name in wanted]


def open_weights(folder: Path) -> Weights:
    """Find the weights of a folder; safetensors before torch's format when it has both."""
    for name in (SAFETENSORS, TORCH):
        index = folder / f"{name}{INDEX_SUFFIX}"
        if index.is_file():
            return Weights(folder=folder, file_of=_read_index(index))
        if (folder / name).is_file():
            return Weights(folder=folder, file_of=dict.fromkeys(_names(folder / name), name))
    raise InputError(
        f"{folder} has no weights (looked for {SAFETENSORS} and {TORCH}, each also with "
        f"{INDEX_SUFFIX}); give the folder of a Hugging Face model"
    )


def _read_index(index: Path) -> dict[str, str]:
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{index} is no index of weights ({error!r}); copy it anew") from error
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise InputError(f"{index} has no table from tensors to files; copy it anew")
    for name in sorted(set(files.values())):
        if Path(name).name != name:
            raise InputError(f"{index} names {name}, which is outside of its folder; copy it anew")
        if not (index.parent / name).is_file():
            raise InputError(f"{index} names {name}, which is not there; copy it anew")
    return cast(dict[str, str], files)


def _names(file: Path) -> list[str]:
    if file.suffix == ".bin":
        return list(_load_torch(file))
    safe_open, _ = _safetensors()
    with _damages_of(file), safe_open(file, "pt") as handle:
        return list(handle.keys())


def _dtypes(file: Path) -> set[str]:
    """Return the number formats of a file's weights; constants (masks) are of no interest."""
    if file.suffix == ".bin":
        tensors = _load_torch(file).values()
        return {str(one.dtype).removeprefix("torch.") for one in tensors if one.is_floating_point()}
    safe_open, _ = _safetensors()
    with _damages_of(file), safe_open(file, "pt") as handle:
        found = {handle.get_slice(name).get_dtype() for name in handle.keys()}  # noqa: SIM118
    return {_SAFETENSORS_DTYPES.get(name, name) for name in found - _NO_WEIGHTS}


def _read(file: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    if file.suffix == ".bin":
        loaded = _load_torch(file)
        return {name: loaded[name] for name in names}
    safe_open, _ = _safetensors()
    with _damages_of(file), safe_open(file, "pt") as handle:
        return {name: handle.get_tensor(name) for name in names}


def _load_torch(file: Path) -> dict[str, torch.Tensor]:
    with _damages_of(file):
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(loaded, dict) or not all(
            isinstance(name, str) and isinstance(one, torch.Tensor) for name, one in loaded.items()
        ):
            raise ValueError("it holds no table of tensors")
        return cast(dict[str, torch.Tensor], loaded)


def _safetensors() -> tuple[type, type[Exception]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise MissingError(
            'the package safetensors is not installed: pip install "megascan[train]"'
        ) from error
    return safe_open, SafetensorError


@contextmanager
def _damages_of(file: Path) -> Iterator[None]:
    damages: tuple[type[Exception], ...] = (
        OSError, ValueError, KeyError, RuntimeError, pickle.UnpicklingError, EOFError,
    )  # fmt: skip
    if file.suffix != ".bin":
        damages = (*damages, _safetensors()[1])
    try:
        yield
    except damages as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(
            f"cannot read weights from {file} ({reason[0][:200]}); copy it anew"
        ) from error


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
