"""The weights of a Hugging Face folder: its files, and a rank's model chunks filled from them.

**Reading**: safetensors or torch's own format, in one file or several, mapped into memory. A tensor
takes memory only for the pages that are used, and none after it is dropped, so that earlier layers
do not add up.

**Filling** (`load_hf`): layer by layer, each rank its own share, whatever the layout: tensor,
pipeline, interleaved and expert parallelism, layers of Megatron-Core or of Transformer Engine.

**Writing**: safetensors files, one tensor after the other, so that only one is in memory. The
format is a table of names, number formats, shapes and places, and then the bytes. The table comes
first, so shapes must be known before any tensor is made: give `plan` tensors without contents
(torch's device ``meta``), then write the real tensors in the same order.
"""

from __future__ import annotations

import json
import pickle
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import torch

from megascan.errors import InputError, MissingError
from training.hf.families import describe, read_config
from training.hf.rules import (
    Attention,
    Form,
    ModelPart,
    Rule,
    TensorRank,
    join_norms,
    rules_of,
    share,
)

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_layer import TransformerLayer

SAFETENSORS = "model.safetensors"
TORCH = "pytorch_model.bin"
INDEX_SUFFIX = ".index.json"
CONFIG = "config.json"
_SHARDS = "model-[0-9]*-of-[0-9]*.safetensors"
MODEL_FILES = (CONFIG, SAFETENSORS, f"{SAFETENSORS}{INDEX_SUFFIX}", _SHARDS)
"""Patterns of the files by which a model's folder is known and read; config.json is read first."""
_DTYPES = ("float32", "bfloat16", "float16")
_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_FORMATS = {getattr(torch, dtype): name for name, dtype in _SAFETENSORS_DTYPES.items()}
_NO_WEIGHTS = {"BOOL", "U8", "I8", "I32", "I64"}


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The tensors of a folder: `file_of` is the file of each tensor, by name."""

    folder: Path
    file_of: Mapping[str, str]

    def name_here(self, name: str) -> str:
        """Return a tensor's name in this folder, without prefix if it was saved without a head."""
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
        """Return torch's name of a number format that holds all weights exactly."""
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
        """Return some tensors, mapped as long as they are kept; InputError for a missing tensor."""
        by_file: dict[str, list[str]] = {}
        wanted = [self.require(name) for name in names]
        for name in wanted:
            by_file.setdefault(self.file_of[name], []).append(name)
        found: dict[str, torch.Tensor] = {}
        for file, there in by_file.items():
            found |= _read(self.folder / file, there)
        return [found[name] for name in wanted]


def open_weights(folder: Path) -> Weights:
    """Find the weights of a folder; prefer safetensors when it also has torch's format."""
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
    """Return the number formats of a file's weights, leaving out constants such as masks."""
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
    """A file to write: its name, and its tensors without contents, in order."""

    name: str
    tensors: Mapping[str, torch.Tensor]


def plan(tensors: Mapping[str, torch.Tensor], max_file_bytes: int) -> list[WeightFile]:
    """Divide tensors (without contents) over files of at most `max_file_bytes`, in their order.

    A tensor larger than that gets its own file. A single file is named ``model.safetensors``,
    several as Hugging Face numbers them.
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
        self._left = deque((file, name) for file in files for name in file.tensors)
        self._open: BinaryIO | None = None
        self._written: WeightFile | None = None

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the next tensor of the plan."""
        file, expected = self._left.popleft()
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
    """Move a finished model's files to `folder`; config.json, by which it is known, comes last.

    Weights of an earlier model in `folder` are removed first: an old index would be read instead of
    the new weights.
    """
    for old in [file for pattern in MODEL_FILES for file in folder.glob(pattern)]:
        old.unlink()
    for file in sorted(made.iterdir(), key=lambda one: one.name == CONFIG):
        file.replace(folder / file.name)


def _table(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the beginning of a file: the size of the table in eight bytes, and the table."""
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
    text += b" " * (-len(text) % 8)  # align the tensors behind it, which readers map
    return len(text).to_bytes(8, "little") + text


# Constants that older versions of transformers saved next to the weights.
_CONSTANTS = re.compile(r"\.(attn\.(masked_)?bias|rotary_emb\.inv_freq)$")


def load_hf(folder: Path, chunks: Sequence[torch.nn.Module]) -> None:
    """Fill the chunks of this rank's model in place; each rank calls this by itself.

    Raises InputError when the folder is damaged or holds another model than was built.
    """
    for fill in fillings(folder, chunks).values():
        fill()


def fillings(
    folder: Path, chunks: Sequence[torch.nn.Module]
) -> dict[torch.Tensor, Callable[[], None]]:
    """Return, by parameter of this rank, a callable that fills it in place; layer by layer.

    Raises InputError when the folder holds another model than was built. A callable raises
    InputError when a tensor is damaged.
    """
    from megatron.core.utils import unwrap_model

    weights, rules, values = check_folder(folder)
    found: dict[torch.Tensor, Callable[[], None]] = {}
    for chunk in unwrap_model(list(chunks)):
        found |= dict(_fillings_of(chunk, weights, rules, cast(int, values["model_vocab_size"])))
    return found


def check_folder(folder: Path) -> tuple[Weights, tuple[Rule, ...], Mapping[str, object]]:
    """Return a folder's weights, the rules of its family and the values of its configuration.

    Raises InputError where the folder's tensors are not those of the model in its config.json. Call
    this before the model is built: a wrong number of layers could take all memory.
    """
    config = read_config(folder)
    values = describe(folder / "config.json", config)
    rules = rules_of(str(config["model_type"]), values)
    weights = open_weights(folder)
    check_names(weights, rules, values)
    (source,) = next(rule for rule in rules if rule.form is Form.VOCABULARY).sources
    shape = weights.read([source])[0].shape
    if shape[1:] != (values["hidden_size"],):
        raise InputError(
            f"{folder} has {source} of {tuple(shape)}, and its config.json says hidden size "
            f"{values['hidden_size']}; mend the one that is wrong"
        )
    return weights, rules, values


def check_names(weights: Weights, rules: Sequence[Rule], values: Mapping[str, object]) -> None:
    """Raise InputError for a missing tensor, and for a tensor that no rule reads: without it the
    model would be another one.
    """
    known = {
        weights.require(source)
        for rule in rules
        for layer, expert in _places(rule, values)
        for source in rule.sources_of(layer, expert)
    }
    extra = {name for name in weights.file_of if not _CONSTANTS.search("." + name)} - known
    if "lm_head.weight" in extra:  # tied to the embedding, but saved a second time
        embedding = next(rule for rule in rules if rule.name == "output_layer.weight").sources
        head, tied = weights.read(["lm_head.weight", *embedding])
        if not torch.equal(head, tied):
            raise InputError(
                f"{weights.folder} ties its output layer to the embedding (tie_word_embeddings), "
                "but has another lm_head.weight; say in config.json which is right"
            )
        extra.remove("lm_head.weight")
    if extra:
        raise InputError(
            f"{weights.folder} has tensors that its config.json does not ask for: "
            f"{', '.join(sorted(extra)[:5])}; this model cannot be taken over"
        )


def _places(rule: Rule, values: Mapping[str, object]) -> Iterator[tuple[int, int]]:
    layers = range(cast(int, values["num_layers"]))
    experts = range(cast(int, values.get("num_experts") or 0))
    match rule.place:
        case ModelPart.LAYER:
            yield from ((layer, 0) for layer in layers)
        case ModelPart.EXPERT:
            yield from ((layer, expert) for layer in layers for expert in experts)
        case _:
            yield 0, 0


def read_sources(
    weights: Weights, rule: Rule, sources: Sequence[str], vocab_size: int
) -> list[torch.Tensor]:
    """Read the tensors that a parameter is made of; InputError for another vocabulary size."""
    tensors = weights.read(sources)
    num_rows = tensors[0].shape[0] if tensors[0].dim() else 0
    if rule.form is Form.VOCABULARY and num_rows != vocab_size:
        raise InputError(
            f"{weights.folder} has {sources[0]} for {num_rows} ids, and its config.json says "
            f"vocab_size {vocab_size}; mend the one that is wrong"
        )
    return tensors


@dataclass(frozen=True, kw_only=True)
class _Filling:
    """Fills one parameter of this rank from the folder's tensors."""

    weights: Weights
    rule: Rule
    sources: Sequence[str]
    name: str
    parameter: torch.Tensor
    attention: Attention
    own: TensorRank
    vocab_size: int

    @torch.no_grad()
    def __call__(self) -> None:
        """Fill the parameter in place; InputError where the folder has another shape or type."""
        folder, parameter = self.weights.folder, self.parameter
        tensors = read_sources(self.weights, self.rule, self.sources, self.vocab_size)
        try:
            made = share(self.rule, tensors, self.attention, self.own, parameter.shape[0])
        except (RuntimeError, IndexError) as error:  # a shape that the model cannot divide
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise InputError(
                f"{folder} has {', '.join(self.sources)} of {shapes}, which its config.json "
                "does not describe; copy the folder anew"
            ) from error
        if not made.is_floating_point():
            raise InputError(
                f"{folder} has {self.sources[0]} in {str(made.dtype).removeprefix('torch.')}, "
                "expected a floating-point format; copy the folder anew"
            )
        if made.shape != parameter.shape:
            raise InputError(
                f"{folder} makes {self.name} of {tuple(made.shape)} and this run's model has it "
                f"of {tuple(parameter.shape)}; leave the model's flags away"
            )
        parameter.copy_(made)


def _fillings_of(
    chunk: GPTModel, weights: Weights, rules: Sequence[Rule], vocab_size: int
) -> Iterator[tuple[torch.Tensor, _Filling]]:
    """Yield each parameter of a chunk with what fills it; exactly one rule must make each."""
    from megatron.core import parallel_state

    dense = TensorRank(
        rank=parallel_state.get_tensor_model_parallel_rank(),
        size=parallel_state.get_tensor_model_parallel_world_size(),
    )
    of_expert = TensorRank(
        rank=parallel_state.get_expert_tensor_parallel_rank(),
        size=parallel_state.get_expert_tensor_parallel_world_size(),
    )
    attention = Attention(
        num_heads=chunk.config.num_attention_heads,
        num_groups=chunk.config.num_query_groups,
        num_channels=chunk.config.kv_channels,
    )
    left = dict(chunk.named_parameters())
    for rule, name, sources in _targets(chunk, rules):
        parameter = left.pop(name_in_memory(name, left), None)
        if parameter is None:
            if rule.name == "output_layer.weight":  # tied to the embedding on the same rank
                continue
            raise InputError(
                f"this run's model has no {name}, which {weights.folder} has weights for"
            )
        yield (
            parameter,
            _Filling(
                weights=weights,
                rule=rule,
                sources=sources,
                name=name,
                parameter=parameter,
                attention=attention,
                own=of_expert if rule.place is ModelPart.EXPERT else dense,
                vocab_size=vocab_size,
            ),
        )
    if left:
        raise InputError(
            f"{weights.folder} has nothing for {', '.join(sorted(left)[:3])}, which this run's "
            "model has; leave the model's flags away"
        )


def _targets(chunk: GPTModel, rules: Sequence[Rule]) -> Iterator[tuple[Rule, str, Sequence[str]]]:
    """Yield rule, name and the folder's tensor names for each parameter of a chunk, by layer."""
    for rule in rules:
        is_here = (rule.place is ModelPart.FIRST and chunk.pre_process) or (
            rule.place is ModelPart.LAST and chunk.post_process
        )
        if is_here:
            yield rule, rule.name, rule.sources_of()
    for index, module in enumerate(chunk.decoder.layers):
        layer = module.layer_number - 1
        for rule in rules:
            if rule.place is ModelPart.LAYER:
                yield rule, f"decoder.layers.{index}.{rule.name}", rule.sources_of(layer)
            elif rule.place is ModelPart.EXPERT:
                for local, expert in enumerate(_experts_of(module)):
                    name = f"decoder.layers.{index}.mlp.experts.local_experts.{local}.{rule.name}"
                    yield rule, name, rule.sources_of(layer, expert)


def _experts_of(layer: TransformerLayer) -> Iterable[int]:
    """Return the numbers, over all ranks, of the experts of a layer that this rank has."""
    return cast(Iterable[int], layer.mlp.local_expert_indices)


def name_in_memory(name: str, parameters: Mapping[str, object]) -> str:
    """Return `name` if `parameters` have it, else its name in Transformer Engine's layers."""
    if name in parameters:
        return name
    # All experts of a rank in one module: experts.local_experts.3.linear_fc1.weight
    return re.sub(
        r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$",
        r"experts.\2.weight\1",
        join_norms(name),
    )
