"""A Hugging Face ``config.json``, read key by key, so that no key is overlooked.

`ConfigReader` remembers which keys were asked for. Whatever is left at the end is either known to
say nothing about the weights or the computation, or ends in an InputError that names it: a key that
is dropped silently is how converted models come to compute something else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn, TypeVar, cast

from megascan.errors import InputError

Value = TypeVar("Value", bound=bool | int | float | str)

# What every configuration may carry without saying anything about the computation.
_SILENT_KEYS = frozenset(
    {
        "architectures", "model_type", "transformers_version", "_name_or_path", "_commit_hash",
        "torch_dtype", "dtype", "use_cache", "initializer_range", "bos_token_id", "eos_token_id",
        "pad_token_id", "sep_token_id", "cls_token_id", "unk_token_id", "id2label", "label2id",
        "num_labels", "task_specific_params", "problem_type", "finetuning_task", "auto_map",
        "output_hidden_states", "output_attentions", "return_dict", "torchscript",
        "return_dict_in_generate", "is_decoder", "use_return_dict", "_attn_implementation",
        "_attn_implementation_autoset", "attn_implementation", "_flash_attn_2_enabled",
        "unsloth_version", "unsloth_fixed", "tokenizer_class", "prefix", "gradient_checkpointing",
        "max_length", "do_sample", "temperature", "top_k", "top_p", "_num_labels",
        "transformers.js_config",
    }
)  # fmt: skip
# Of a kind that changes the computation, with the only values that leave it alone.
_NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "pretraining_tp": (1, 0, None),
    "use_mrope": (False,),
    "rope_interleaved": (False,),
    "is_llama_config": (True,),
}


class ConfigReader:
    """The keys of one configuration, with the defaults of its family, each asked for once."""

    def __init__(self, file: Path, config: Mapping[str, object]) -> None:
        self.file = file
        self._config = config
        self._asked: set[str] = set()

    def get(self, name: str, default: Value) -> Value:
        """Return the value of a key, of the type of `default`, or `default` where it is missing."""
        found = self.optional(name, type(default))
        return default if found is None else found

    def optional(self, name: str, kind: type[Value]) -> Value | None:
        """Return the value of a key; None where it is missing or null."""
        value = self.raw(name)
        if value is None:
            return None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise InputError(
                f"{self.file} has {name} {value!r}, expected a {kind.__name__}; mend the file"
            )
        return value

    def has(self, name: str) -> bool:
        """Say whether the key is there, be it null."""
        return name in self._config

    def raw(self, name: str) -> object:
        """Return the value of a key as it stands there; None where it is missing."""
        self._asked.add(name)
        return self._config.get(name)

    def require(self, name: str, allowed: Iterable[object], default: object) -> None:
        """Raise InputError unless the key, or its default, has one of the `allowed` values."""
        value = self.raw(name) if name in self._config else default
        if value not in tuple(allowed):
            self.refuse(name, value, "which Megatron-Core's GPT cannot compute")

    def refuse(self, name: str, value: object, reason: str) -> NoReturn:
        """Raise the InputError that says why a key cannot be followed."""
        raise InputError(
            f"{self.file} has {name} {json.dumps(value)}, {reason}; this model cannot be taken over"
        )

    def finish(self) -> None:
        """Raise InputError for a key that nobody has asked for and that may mean something."""
        for name, allowed in _NEUTRAL_VALUES.items():
            if name in self._config and name not in self._asked:
                self.require(name, allowed, allowed[0])
        unknown = sorted(set(self._config) - self._asked - _SILENT_KEYS)
        if unknown:
            raise InputError(
                f"{self.file} has keys that this version does not know: {', '.join(unknown)}; "
                "remove those that do not change what the model computes"
            )


def read_config(folder: Path) -> dict[str, object]:
    """Return the ``config.json`` of a folder; InputError when it is missing or no table."""
    return _read_table(folder / "config.json")


def end_ids(folder: Path, config: Mapping[str, object]) -> tuple[int, ...]:
    """Return the tokens at which transformers' ``generate`` ends a text of this model.

    Its ``generation_config.json`` in `folder` says them, where there is one: a chat model has
    several. Without it the model's own configuration does.
    """
    file = folder / "generation_config.json"
    if file.is_file():
        config = _read_table(file)
    declared = config.get("eos_token_id")
    ids = declared if isinstance(declared, list) else [] if declared is None else [declared]
    if not all(type(one) is int for one in ids):
        raise InputError(
            f"{file.name if file.is_file() else 'config.json'} of {folder} has eos_token_id "
            f"{json.dumps(declared)}, expected a whole number or a list of them; mend it"
        )
    return tuple(cast(list[int], ids))


def _read_table(file: Path) -> dict[str, object]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"cannot read {file} ({error.strerror}); give the folder of a Hugging Face model"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not JSON ({error}); copy it anew") from error
    if not isinstance(config, dict):
        raise InputError(f"{file} is not a table of settings; copy it anew")
    return cast(dict[str, object], config)
