"""Turn JSON Lines into Megatron's indexed data: PREFIX_KEY_document.bin and .idx.

Each line of the input is one document, a JSON object whose texts stand under --json-keys. Plain,
gzip, xz and bzip2 files are told apart by their first bytes. The output does not depend on
--workers, and appears under its name only when it is complete. A run that was ended early, in
whatever way, leaves what it has done in PREFIX.partial: the same command goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from megascan.errors import InputError, MegaScanError, UsageError, report_errors
from training.data.documents import EncodedBatch, EncodingSettings, open_plain
from training.data.indexed import Meaning
from training.data.preprocessing import (
    Checkpoint,
    DataRequest,
    MadeData,
    RunSettings,
    inputs_of,
    preprocess,
    read_checkpoint,
)
from training.data.tokenizers import TokenizerSettings, add_tokenizer_arguments, build_tokenizer

_WORKERS_PER_CORE = 64  # more than 1 is of no use, but up to this does no harm


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    options = _parser().parse_args(arguments)
    _check_options(options)
    # --workers sets the number of processes; the library would start a thread a core in each.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    request = _request(options)
    progress = ProgressPrinter(stream=sys.stderr, interval_documents=options.log_interval)
    with _told_what_is_kept(request):
        outcome = preprocess(request, progress)
    progress.finish()
    print(_result(request, outcome))
    return 0


@contextlib.contextmanager
def _told_what_is_kept(request: DataRequest) -> Iterator[None]:
    try:
        yield
    except (MegaScanError, KeyboardInterrupt):
        with contextlib.suppress(InputError):  # the folder's run belongs to another command
            if read_checkpoint(request.folder, request.run):
                kept = f"what was done is kept in {request.folder}"
                print(f"{kept}: the same command goes on from there", file=sys.stderr)
        raise


def _request(options: argparse.Namespace) -> DataRequest:
    """Check what can be checked early, and return what the options ask for."""
    encoding = EncodingSettings(
        tokenizer=TokenizerSettings.from_arguments(options),
        json_keys=tuple(options.json_keys),
        append_eod=options.append_eod,
    )
    tokenizer = build_tokenizer(encoding.tokenizer)
    paths = [Path(name) for name in options.input]
    for path in paths:  # a wrong second path must not cost the time of the first
        open_plain(path).close()
    return DataRequest(
        run=RunSettings(
            inputs=inputs_of(paths),
            json_keys=encoding.json_keys,
            meaning=Meaning.of(encoding.tokenizer, tokenizer, append_eod=options.append_eod),
        ),
        encoding=encoding,
        output_prefix=options.output_prefix,
        num_workers=options.workers,
        skip_invalid=options.skip_invalid,
        force=options.force,
    )


@dataclass(kw_only=True)
class ProgressPrinter:
    """Prints documents and bytes per second to a stream, every ``interval_documents`` documents."""

    stream: TextIO
    interval_documents: int
    num_documents: int = 0
    size_bytes: int = 0
    _start_s: float = 0.0
    _next_at: int = 0

    def __post_init__(self) -> None:
        self._start_s = time.monotonic()
        self._next_at = self.interval_documents

    def resume(self, checkpoint: Checkpoint) -> None:
        """Print where an interrupted run continues; rates count only what follows."""
        num_documents = checkpoint.sizes[0].num_documents
        print(
            f"going on after the {num_documents} documents of an interrupted run", file=self.stream
        )

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
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace an output that exists, and drop an interrupted run with other settings",
    )
    add_tokenizer_arguments(parser)
    return parser


def _check_options(options: argparse.Namespace) -> None:
    if options.workers < 1:
        raise UsageError(f"--workers is {options.workers}, expected at least 1")
    most = _WORKERS_PER_CORE * (os.cpu_count() or 1)
    if options.workers > most:
        raise UsageError(
            f"--workers is {options.workers}, expected one a core of this machine and at most "
            f"{most}: each is a process with its own tokenizer"
        )
    if not options.output_prefix:
        raise UsageError("--output-prefix is empty, expected the output's name")
    if options.log_interval < 1:
        raise UsageError(f"--log-interval is {options.log_interval}, expected at least 1")
    if len(set(options.json_keys)) < len(options.json_keys):
        raise UsageError(f"--json-keys names a key twice: {' '.join(options.json_keys)}")
    if any("/" in key for key in options.json_keys):
        raise UsageError("a key of --json-keys with a slash cannot be part of a file name")


def _result(request: DataRequest, outcome: MadeData) -> str:
    wrote = ", ".join(
        f"{prefix}.bin and .idx ({size.num_documents} documents, {size.num_tokens} tokens)"
        for prefix, size in zip(request.prefixes, outcome.sizes, strict=True)
    )
    num_invalid = outcome.num_invalid
    skipped = f", left out {num_invalid} invalid lines" if num_invalid else ""
    flags = shlex.join(["--data-path", request.prefixes[0], *request.encoding.tokenizer.flags()])
    return (
        f"wrote {wrote}{skipped}; next: torchrun --nproc-per-node 4 -m training.pretrain_gpt "
        f"{flags} --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 "
        "--max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 8 "
        "--train-iters 100 --lr 1e-3 --log-interval 10 --trace"
    )


if __name__ == "__main__":
    sys.exit(report_errors(main))
