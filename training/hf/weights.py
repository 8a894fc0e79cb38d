"""The weights of a Hugging Face folder: safetensors or torch's own format, in one file or several.

Files are mapped into memory, not read: a tensor costs what is used of it, and nothing any more when
it is let go, so that the pages of earlier layers do not add up.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from megascan.errors import InputError, MissingError

SAFETENSORS = "model.safetensors"
TORCH = "pytorch_model.bin"
INDEX_SUFFIX = ".index.json"
_DTYPES = ("float32", "bfloat16", "float16")
_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
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
        wanted = [self.name_here(name) for name in names]
        for name in wanted:
            if name not in self.file_of:
                raise InputError(
                    f"{self.folder} has no tensor {name}, which its config.json asks for; "
                    "copy the folder anew"
                )
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
    except (OSError, ValueError, KeyError, TypeError) as error:
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
        if not isinstance(loaded, dict):
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
