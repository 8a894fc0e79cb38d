"""Turn JSON Lines into Megatron's indexed data: PREFIX_KEY_document.bin and .idx.

Each line of the input is one document, a JSON object whose texts stand under --json-keys. Plain,
gzip, xz and bzip2 files are told apart by their first bytes. The output does not depend on
--workers, and appears under its name only when it is complete.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from megascan.errors import InputError, OutputError, UsageError, report_errors
from training.data.documents import open_plain, read_line_batches
from training.data.encoding import EncodedBatch, EncodingSettings, encode_batches
from training.data.indexed import IndexedWriter, output_paths
from training.data.tokenizers import TokenizerSettings, add_tokenizer_arguments, build_tokenizer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    options = _parser().parse_args(arguments)
    _check_options(options)
    # One process a core is what --workers says; the library would start as many threads in each.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    settings = EncodingSettings(
        tokenizer=TokenizerSettings.from_arguments(options),
        json_keys=tuple(options.json_keys),
        append_eod=options.append_eod,
    )
    vocab_size = build_tokenizer(settings.tokenizer).vocab_size
    paths = [Path(name) for name in options.input]
    for path in paths:  # a wrong second path must not cost the time of the first
        open_plain(path).close()
    prefixes = [f"{options.output_prefix}_{key}_document" for key in options.json_keys]
    _prepare_outputs(prefixes, force=options.force)
    batches = encode_batches(settings, read_line_batches(paths), num_workers=options.workers)
    with contextlib.ExitStack() as stack, contextlib.closing(batches):
        writers = [stack.enter_context(IndexedWriter(p, vocab_size=vocab_size)) for p in prefixes]
        progress = Progress(stream=sys.stderr, interval_documents=options.log_interval)
        num_invalid = _write(batches, writers, progress, skip_invalid=options.skip_invalid)
        _check_result(writers, paths)
        for writer in writers:
            writer.commit()
    progress.finish()
    print(_result(writers, num_invalid, settings.tokenizer))
    return 0


@dataclass(kw_only=True)
class Progress:
    """Documents and bytes per second, on a stream, each ``interval_documents`` documents."""

    stream: TextIO
    interval_documents: int
    num_documents: int = 0
    size_bytes: int = 0
    _start_s: float = 0.0
    _next_at: int = 0

    def __post_init__(self) -> None:
        self._start_s = time.monotonic()
        self._next_at = self.interval_documents

    def add(self, batch: EncodedBatch) -> None:
        """Count a batch; print when an interval is over."""
        self.num_documents += len(batch.by_key[0].lengths)
        self.size_bytes += batch.size_bytes
        if self.num_documents >= self._next_at:
            self._next_at = self.num_documents + self.interval_documents
            self._print("\r" if self.stream.isatty() else "\n")

    def finish(self) -> None:
        """Print the rates of the whole run."""
        self._print("\n")

    def _print(self, end: str) -> None:
        elapsed_s = max(time.monotonic() - self._start_s, 1e-9)
        print(
            f"{self.num_documents} documents, {self.num_documents / elapsed_s:.0f} documents/s, "
            f"{self.size_bytes / 1e6 / elapsed_s:.2f} MB/s",
            end=end,
            file=self.stream,
            flush=True,
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m training.preprocess_data", description=__doc__)
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="FILE", help="JSON Lines, packed or plain"
    )
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="default: text"
    )
    parser.add_argument(
        "--output-prefix", required=True, metavar="PATH", help="output name without _KEY_document"
    )
    parser.add_argument(
        "--append-eod", action="store_true", help="end each document with the tokenizer's end id"
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes, default 1")
    parser.add_argument(
        "--log-interval",
        type=int,
        default=1000,
        metavar="N",
        help="documents between progress lines",
    )
    parser.add_argument(
        "--skip-invalid", action="store_true", help="leave out and count lines that cannot be used"
    )
    parser.add_argument("--force", action="store_true", help="replace an output that exists")
    add_tokenizer_arguments(parser)
    return parser


def _check_options(options: argparse.Namespace) -> None:
    if options.workers < 1:
        raise UsageError(f"--workers is {options.workers}, expected at least 1")
    if options.log_interval < 1:
        raise UsageError(f"--log-interval is {options.log_interval}, expected at least 1")
    if len(set(options.json_keys)) < len(options.json_keys):
        raise UsageError(f"--json-keys names a key twice: {' '.join(options.json_keys)}")
    if any("/" in key for key in options.json_keys):
        raise UsageError("a key of --json-keys with a slash cannot be part of a file name")


def _prepare_outputs(prefixes: Iterable[str], *, force: bool) -> None:
    for path in (path for prefix in prefixes for path in output_paths(prefix)):
        if path.exists() and not force:
            raise OutputError(f"{path} exists: pass --force to replace it")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot make the folder {path.parent} ({error.strerror})") from error


def _write(
    batches: Iterable[EncodedBatch],
    writers: Sequence[IndexedWriter],
    progress: Progress,
    *,
    skip_invalid: bool,
) -> int:
    """Write all batches; returns the number of lines left out."""
    num_invalid = 0
    for batch in batches:
        if batch.invalid and not skip_invalid:
            raise InputError(f"{batch.invalid[0]}; mend the line, or pass --skip-invalid")
        num_invalid += len(batch.invalid)
        for writer, texts in zip(writers, batch.by_key, strict=True):
            if len(texts.lengths):
                writer.add(texts)
        progress.add(batch)
    return num_invalid


def _check_result(writers: Sequence[IndexedWriter], paths: Sequence[Path]) -> None:
    for writer in writers:
        if writer.num_documents == 0:
            names = ", ".join(str(path) for path in paths)
            raise InputError(f"{names}: no document for {writer.prefix}, nothing was written")


def _result(
    writers: Sequence[IndexedWriter], num_invalid: int, tokenizer: TokenizerSettings
) -> str:
    wrote = ", ".join(
        f"{writer.prefix}.bin and .idx "
        f"({writer.num_documents} documents, {writer.num_tokens} tokens)"
        for writer in writers
    )
    skipped = f", left out {num_invalid} invalid lines" if num_invalid else ""
    flags = shlex.join(["--data-path", writers[0].prefix, *tokenizer.flags()])
    return (
        f"wrote {wrote}{skipped}; next: torchrun --nproc-per-node 4 -m training.pretrain_gpt "
        f"{flags} --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 "
        "--max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 8 "
        "--train-iters 100 --lr 1e-3 --log-interval 10 --trace"
    )


if __name__ == "__main__":
    sys.exit(report_errors(main))
