"""What goes with a model's weights: values that describe the model, and the checkpoint's folder.

`ModelValues` are what two models must share to be the same model. A checkpoint stores them, a
Hugging Face folder stands for them, and a run that loads either is compared with them. They have
the names of the trainer's settings.

Next to the weights a checkpoint's folder has ``settings.json`` (the model's values with the size of
its vocabulary, the number format of the weights, the tokenizer's flags) and a folder ``tokenizer``
with the tokenizer's files. So a resumed run, a server or an export needs no flags but the folder's
name, and the folder can be moved. Reading a folder's settings needs neither torch nor
megatron.core.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

from megascan.errors import InputError, OutputError
from training.arguments.settings import Settings, build_parser, read_settings
from training.arguments.sizes import Sizes
from training.data.tokenizers import TokenizerSettings, TokenizerType

ModelValues = dict[str, object]

_SIZES_OF_MODEL = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "kv_channels", "max_position_embeddings",
)  # fmt: skip
# Settings of a run, not of a model.
_OF_RUN = ("seq_length", "transformer_impl", "init_method_std")
_MOE = (
    "num_experts", "moe_router_topk", "moe_router_pre_softmax", "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
)  # fmt: skip
# May differ between two runs of one model: these do not change what the model computes in use.
_MAY_DIFFER = frozenset(
    {
        "hidden_dropout", "attention_dropout", "make_vocab_size_divisible_by",
        "group_query_attention",  # said by num_query_groups
        "moe_router_load_balancing_type", "moe_aux_loss_coeff",
    }
)  # fmt: skip


def model_values(settings: Settings, sizes: Sizes, vocab_size: int) -> ModelValues:
    """Return the values of this run's model, with derived sizes filled in."""
    values = asdict(settings.model)
    for name in _OF_RUN:
        del values[name]
    values |= {name: getattr(sizes, name) for name in _SIZES_OF_MODEL}
    values["group_query_attention"] = sizes.num_query_groups != sizes.num_attention_heads
    values["model_vocab_size"] = vocab_size
    return values | {name: getattr(settings.moe, name) for name in _MOE}


def differences(
    there: Mapping[str, object], here: Mapping[str, object]
) -> Iterator[tuple[str, object, object]]:
    """Yield the name and both values of each difference that makes two descriptions two models.

    A value that only one description has is not compared, nor is a value without a use (the base of
    a rotation that does not take place).
    """
    for name, value in there.items():
        if name in _MAY_DIFFER or name not in here or not _is_used(name, there):
            continue
        if value != here[name]:
            yield name, value, here[name]


def _is_used(name: str, values: Mapping[str, object]) -> bool:
    rotates = values.get("position_embedding_type") == "rope"
    if name == "add_qkv_bias":
        return not values.get("add_bias_linear")
    if name == "rope_scaling_factor":
        return rotates and bool(values.get("use_rope_scaling"))
    if name.startswith("rotary_") or name == "use_rope_scaling":
        return rotates
    if name == "max_position_embeddings":  # rotations have no longest sequence
        return values.get("position_embedding_type") == "learned_absolute"
    if name.startswith("moe_"):
        return values.get("num_experts") is not None
    return True


def settings_to_use(values: Mapping[str, object], dtype: str, **choices: object) -> Settings:
    """Return settings of a model that is used, not trained: its `values`, then `choices` by name.

    `dtype` is torch's name of the weights' number format. Settings that only a training needs
    (batches, learning rate) get small valid values; call `resolve_sizes` with `is_trained=False`.
    """
    parser = build_parser("model", "a model's settings")
    longest = values["max_position_embeddings"]
    parser.set_defaults(seq_length=longest, micro_batch_size=1, train_iters=1, lr=1.0)
    parser.set_defaults(bf16=dtype == "bfloat16", fp16=dtype == "float16")
    parser.set_defaults(**values)
    parser.set_defaults(**choices)
    return read_settings(parser.parse_args([]))


LATEST_FILE = "latest_checkpointed_iteration.txt"
SETTINGS_FILE = "settings.json"
TOKENIZER_FOLDER = "tokenizer"
_FORMAT = 1
_DTYPES = ("float32", "bfloat16", "float16")
_SIZES = (
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "max_position_embeddings", "model_vocab_size",
)  # fmt: skip
_CHOICES = ("num_experts", "untie_embeddings_and_output_weights")
"""Values that must be there, because they decide which tensors a checkpoint has."""


def checkpoint_folder(folder: Path, iteration: int) -> Path:
    """Return the folder of an iteration's checkpoint."""
    return folder / f"iter_{iteration:07d}"


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in a folder; None when there is none yet."""
    latest = folder / LATEST_FILE
    try:
        iteration = int(latest.read_text().strip())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read an iteration from {latest} ({error}); mend it") from error
    found = checkpoint_folder(folder, iteration)
    if not found.is_dir():
        raise InputError(f"{latest} names {found.name}, which is not there; mend it")
    return found


def make_empty(folder: Path) -> None:
    """Make an empty folder in place of what an interrupted run left; OutputError on failure."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise OutputError(f"cannot write a checkpoint to {folder} ({error})") from error


def publish(partial: Path, final: Path, iteration: int) -> None:
    """Rename the complete checkpoint `partial` to `final`, then name it as the newest."""
    if final.exists():
        replaced = final.with_name(final.name + ".replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
        partial.rename(final)
        shutil.rmtree(replaced)
    else:
        partial.rename(final)
    latest = final.parent / LATEST_FILE
    temporary = latest.with_name(latest.name + ".partial")
    with temporary.open("w") as file:
        file.write(f"{iteration}\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(latest)


@dataclass(frozen=True, kw_only=True)
class SavedSettings:
    """What a checkpoint says of itself.

    `folder` is the checkpoint; `model` holds the values of the trainer's settings by field name;
    `dtype` is torch's name of the weights' number format. `hf_config` is the configuration of the
    Hugging Face folder that the model comes from. A converted model has no training state: no
    optimizer and no place in the data.
    """

    folder: Path
    model: Mapping[str, object]
    dtype: str
    tokenizer: TokenizerSettings | None
    hf_config: Mapping[str, object] | None = None
    has_training_state: bool = True

    @property
    def vocab_size(self) -> int:
        """Return the number of ids that the model knows, before padding."""
        return cast(int, self.model["model_vocab_size"])

    def defaults(self) -> dict[str, object]:
        """Return model and tokenizer as defaults of flags, by name in argparse's namespace."""
        flags: dict[str, object] = dict(self.model)
        if self.tokenizer is not None:
            flags |= asdict(self.tokenizer)
        return flags


def saved_settings(load: Path) -> SavedSettings:
    """Return what the newest checkpoint in a folder says of itself.

    Raises InputError when there is no checkpoint, or when it is so old that it says nothing.
    """
    folder = latest_checkpoint(load)
    if folder is None:
        raise InputError(f"{load} has no {LATEST_FILE}; give the folder that --save wrote to")
    found = read_saved(folder)
    if found is None:
        raise InputError(
            f"{folder} has no {SETTINGS_FILE}: it was written before checkpoints said what model "
            "they hold; resume it once with its flags and --save, which writes it"
        )
    return found


def read_saved(folder: Path) -> SavedSettings | None:
    """Return what a checkpoint says of itself; None when it is so old that it says nothing."""
    file = folder / SETTINGS_FILE
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read {file} ({error}); take another checkpoint") from error
    try:
        if found["format"] != _FORMAT:
            raise InputError(
                f"{file} has format {found['format']}, expected {_FORMAT}; read it with the "
                "version that wrote it"
            )
        flags, config = found["tokenizer"], found["hf_config"]
        if not isinstance(config, dict | None):
            raise TypeError(f"hf_config is {config!r}, but must be a table")
        return SavedSettings(
            folder=folder,
            model=_checked_model(found["model"]),
            dtype=_DTYPES[_DTYPES.index(found["dtype"])],
            tokenizer=None if flags is None else _from_checkpoint(flags, folder),
            hf_config=config,
            has_training_state=bool(found["has_training_state"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{file} is not as it was written ({error!r}); take another checkpoint"
        ) from error


def _checked_model(values: Mapping[str, object]) -> dict[str, object]:
    """Return a model's values; KeyError or TypeError where they cannot be those of a model."""
    for name in _SIZES:
        if type(values[name]) is not int:
            raise TypeError(f"{name} is {values[name]!r}, but must be a whole number")
    for name in _CHOICES:
        values[name]
    for name, value in values.items():
        if not isinstance(value, int | float | str | None):
            raise TypeError(f"{name} is no single value")
    return dict(values)


def write_saved(saved: SavedSettings) -> None:
    """Write what a checkpoint says of itself, and its tokenizer's files, into ``saved.folder``."""
    tokenizer = saved.tokenizer
    if tokenizer is not None:
        tokenizer = _into_checkpoint(tokenizer, saved.folder / TOKENIZER_FOLDER)
    contents = {
        "format": _FORMAT,
        "model": dict(saved.model),
        "dtype": saved.dtype,
        "tokenizer": None if tokenizer is None else asdict(tokenizer),
        "has_training_state": saved.has_training_state,
        "hf_config": None if saved.hf_config is None else dict(saved.hf_config),
    }
    text = json.dumps(contents, indent=2, sort_keys=True) + "\n"
    (saved.folder / SETTINGS_FILE).write_text(text, encoding="utf-8")


# Names in a checkpoint of the files that --vocab-file and --merge-file name.
_VOCAB_FILE, _MERGE_FILE = "vocab.json", "merges.txt"
# What Hugging Face keeps next to a tokenizer.json, for chats and for generating text.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "generation_config.json", _VOCAB_FILE, _MERGE_FILE, "tokenizer.model",
)  # fmt: skip


def copy_tokenizer_files(source: Path, target: Path) -> list[str]:
    """Copy a tokenizer's files from one folder to another; return the names of those found."""
    names = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    if names:
        target.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copyfile(source / name, target / name)
    return names


def _into_checkpoint(tokenizer: TokenizerSettings, target: Path) -> TokenizerSettings:
    """Copy the files that tokenizer flags name; return the flags with names in the checkpoint."""
    if tokenizer.tokenizer_model is not None:
        model = Path(tokenizer.tokenizer_model)
        copy_tokenizer_files(model if model.is_dir() else model.parent, target)
        if model.is_file():
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(model, target / "tokenizer.json")
        return replace(tokenizer, tokenizer_model=TOKENIZER_FOLDER)
    if tokenizer.vocab_file is not None and tokenizer.merge_file is not None:
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(tokenizer.vocab_file, target / _VOCAB_FILE)
        shutil.copyfile(tokenizer.merge_file, target / _MERGE_FILE)
        return replace(
            tokenizer,
            vocab_file=f"{TOKENIZER_FOLDER}/{_VOCAB_FILE}",
            merge_file=f"{TOKENIZER_FOLDER}/{_MERGE_FILE}",
        )
    return tokenizer


def _from_checkpoint(flags: Mapping[str, object], folder: Path) -> TokenizerSettings:
    """Return a checkpoint's tokenizer flags, with the paths of its files in `folder`."""

    def file(name: str) -> str | None:
        return None if flags[name] is None else str(folder / cast(str, flags[name]))

    return TokenizerSettings(
        tokenizer_type=TokenizerType(str(flags["tokenizer_type"])),
        vocab_file=file("vocab_file"),
        merge_file=file("merge_file"),
        tokenizer_model=file("tokenizer_model"),
        vocab_size=cast(int | None, flags["vocab_size"]),
    )
