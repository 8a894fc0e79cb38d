"""Turn a Hugging Face folder into a checkpoint, or a checkpoint into a Hugging Face folder.

    python -m training.convert --from-hf DIR --save CHECKPOINTS
    python -m training.convert --load CHECKPOINTS --to-hf DIR

Either is done by one process on the CPU, whatever layout the checkpoint has or will be loaded in.
With --check the model is run by Megatron-Core and by transformers, and the logits are compared.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from megascan.errors import InputError, OutputError, UsageError, report_errors
from megascan.overwriting import check_can_be_made, workplace
from training.arguments import Settings, Sizes, TrainerParser, resolve_sizes
from training.checkpoint_folder import (
    LATEST_FILE,
    SavedSettings,
    checkpoint_folder,
    make_empty,
    model_values,
    publish,
    saved_settings,
    settings_to_use,
    write_saved,
)
from training.distributed import ONLY_RANK, finalize, initialize, seed_everything, silence


def main(arguments: Sequence[str]) -> int:
    """Convert; return the exit code."""
    return report_errors(lambda: _convert(arguments))


def _convert(arguments: Sequence[str]) -> int:
    given = _parse(arguments)
    if given.from_hf is not None:
        _convert_from_hf(given)
    else:
        _convert_to_hf(given)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = TrainerParser(
        prog="python -m training.convert",
        description="Turn a Hugging Face folder into a checkpoint, or a checkpoint into one.",
        allow_abbrev=False,
    )
    parser.add_argument("--from-hf", type=Path, metavar="DIR", help="Hugging Face folder to read")
    parser.add_argument("--save", type=Path, metavar="DIR", help="folder to write checkpoints to")
    parser.add_argument("--load", type=Path, metavar="DIR", help="folder of checkpoints to read")
    parser.add_argument("--to-hf", type=Path, metavar="DIR", help="Hugging Face folder to write")
    parser.add_argument(
        "--check",
        action="store_true",
        help="run both models on the same tokens and compare their logits (needs transformers)",
    )
    parser.add_argument(
        "--max-shard-size-gb",
        type=float,
        default=5.0,
        metavar="GB",
        help="largest safetensors file (default: 5)",
    )
    parser.add_argument(
        "--force", action="store_true", help="write into a folder that already has a model"
    )
    given = parser.parse_args(arguments)
    folders = ("from_hf", "save", "load", "to_hf")
    named = {name for name in folders if getattr(given, name) is not None}
    if named not in ({"from_hf", "save"}, {"load", "to_hf"}):
        raise UsageError("give --from-hf and --save, or --load and --to-hf; see --help")
    if not 0 < given.max_shard_size_gb < math.inf:
        raise UsageError(f"--max-shard-size-gb is {given.max_shard_size_gb}, but must be above 0")
    return given


def _convert_from_hf(given: argparse.Namespace) -> None:
    """Turn a Hugging Face folder into a checkpoint."""
    from training.origin import hugging_face_defaults

    values = hugging_face_defaults(given.from_hf)
    _require_free(given.save, LATEST_FILE, is_forced=given.force)
    source = given.from_hf.resolve()
    if checkpoint_folder(given.save, 0).resolve() in source.parents:
        raise OutputError(
            f"{given.save}: {source} lies in the checkpoint that would be replaced; give another "
            "--save (--force does not allow this)"
        )
    dtype = _dtype_of(given.from_hf)
    settings, sizes = _on_one_rank(values, dtype)
    with alone(settings, sizes):
        saved = _write_checkpoint(given.from_hf, given.save, settings, sizes, dtype)
        if given.check:
            _check(saved, given.from_hf)
    print(
        f"wrote {saved.folder}; next: python -m training.generate --load "
        f"{shlex.quote(str(given.save))} --prompt TEXT"
    )


def _convert_to_hf(given: argparse.Namespace) -> None:
    """Turn a checkpoint into a Hugging Face folder."""
    saved = saved_settings(given.load)
    from training.hf.weights import MODEL_FILES, publish_model

    _require_free(given.to_hf, *MODEL_FILES, is_forced=given.force)
    settings, sizes = _on_one_rank(saved.model, saved.dtype)
    with alone(settings, sizes):
        from training.hf.saving import write_hf

        try:
            with workplace(given.to_hf) as place:
                write_hf(saved, place, round(given.max_shard_size_gb * 10**9))
                publish_model(place, given.to_hf)
        except OSError as error:
            raise OutputError(f"cannot write to {given.to_hf} ({error}); make room") from error
        if given.check:
            _check(saved, given.to_hf)
    print(
        f"wrote {given.to_hf}; next: load it with transformers' "
        f"AutoModelForCausalLM.from_pretrained({str(given.to_hf)!r}), or vllm serve "
        f"{shlex.quote(str(given.to_hf))}"
    )


def _require_free(folder: Path, *marks: str, is_forced: bool) -> None:
    """Raise OutputError for a folder that cannot be written or that already has a model.

    `marks` are patterns of the files that show that a folder has a model.
    """
    check_can_be_made(folder)
    taken = next((file.name for mark in marks for file in folder.glob(mark)), None)
    if taken is not None and not is_forced:
        raise OutputError(f"{folder} already has {taken}; give another folder or --force")


def _dtype_of(folder: Path) -> str:
    """Return the number format of a Hugging Face folder's weights, by torch's name."""
    from training.hf.weights import open_weights

    return open_weights(folder).dtype()


def _on_one_rank(values: Mapping[str, object], dtype: str) -> tuple[Settings, Sizes]:
    settings = settings_to_use(values, dtype, distributed_backend="gloo")
    return settings, resolve_sizes(settings, 1, is_trained=False)


@contextmanager
def alone(settings: Settings, sizes: Sizes) -> Iterator[None]:
    """Join a job of one rank on the CPU, and leave it at the end of the context."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for devices
    silence("cpu")
    try:
        initialize(settings, sizes, ONLY_RANK, "cpu")
        seed_everything(settings.batch.seed)
        yield
    finally:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        finalize()


def _write_checkpoint(
    source: Path, target: Path, settings: Settings, sizes: Sizes, dtype: str
) -> SavedSettings:
    """Write a Hugging Face model as checkpoint of iteration 0, one tensor in memory at a time."""
    from training.checkpoint import write_weights
    from training.hf.families import read_config
    from training.hf.weights import fillings
    from training.model import build_bare_model
    from training.origin import hugging_face_tokenizer

    vocab_size = settings.model.model_vocab_size or 0
    (model,) = build_bare_model(settings, sizes, vocab_size, "cpu")
    wanted = fillings(source, [model])
    final = checkpoint_folder(target, 0)
    partial = final.with_name(final.name + ".partial")
    saved = SavedSettings(
        folder=partial,
        model=model_values(settings, sizes, vocab_size),
        dtype=dtype,
        tokenizer=hugging_face_tokenizer(source),
        hf_config=read_config(source),
        has_training_state=False,
    )
    make_empty(partial)
    try:
        write_weights(partial, model, wanted)
        write_saved(saved)
        publish(partial, final, 0)
    except OSError as error:
        raise OutputError(f"cannot write the checkpoint {final} ({error}); make room") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return saved_settings(target)


def _check(saved: SavedSettings, folder: Path) -> None:
    """Compare the logits of a checkpoint and a Hugging Face folder; InputError if they differ."""
    from training.hf.saving import compare

    result = compare(saved, folder)
    sentence = (
        f"largest difference of logits {result.largest_difference:.1e} over {result.num_tokens} "
        f"tokens, in float32; largest logit {result.largest_logit:.2f}"
    )
    if not result.agrees:
        raise InputError(
            f"{saved.folder} and {folder} compute different things: {sentence}; do not use it"
        )
    print(f"check passed: {sentence}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
