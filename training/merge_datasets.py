"""Make one data set of several, in the order given: the bytes of preprocessing their texts at once.

Each --input is the name of a .bin/.idx pair without its ending, as preprocess_data prints it. They
must store ids of one type and, as far as their .json tells, come from one tokenizer.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from megascan.errors import InputError, OutputError, report_errors
from megascan.overwriting import check_not_read
from training.data.indexed import (
    INDEX_HEADER,
    DataSize,
    IndexedWriter,
    IndexSummary,
    Meaning,
    output_paths,
    publish,
    published_paths,
    read_description,
    read_index,
    write_description,
)
from training.data.preprocessing import WorkFolder

_CHUNK = 1 << 18  # lengths copied at a time


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    options = _parser().parse_args(arguments)
    inputs = [_without_ending(name) for name in options.input]
    _check_options(inputs, options.output_prefix, force=options.force)
    id_type = _common_id_type(inputs)
    meaning = _common_meaning(inputs)
    size = merge(inputs, options.output_prefix, id_type=id_type, meaning=meaning)
    print(
        f"wrote {options.output_prefix}.bin and .idx ({size.num_documents} documents, "
        f"{size.num_tokens} tokens of {len(inputs)} data sets); next: python -m "
        f"training.pretrain_gpt --data-path {shlex.quote(options.output_prefix)} …"
    )
    return 0


def merge(
    inputs: Sequence[str],
    output_prefix: str,
    *,
    id_type: np.dtype[np.integer],
    meaning: Meaning | None,
) -> DataSize:
    """Write the documents of all inputs, one after the other, as one data set.

    Memory does not grow with the data. The output gets its name only when it is complete. Raises
    OutputError when the output cannot be written, InputError when an input ends early.
    """
    with WorkFolder(Path(f"{output_prefix}.merging")) as folder:
        try:
            folder.clear()
            with IndexedWriter(folder.path, "all", id_type=id_type) as writer:
                for number, prefix in enumerate(inputs, start=1):
                    print(f"{number} of {len(inputs)}: {prefix}", file=sys.stderr)
                    _append(writer, prefix)
                writer.finish()
            if meaning is not None:
                write_description(folder.path / "all.json", meaning, writer.size)
            publish(folder.path, "all", output_prefix)
        finally:
            folder.remove()
    return writer.size


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m training.merge_datasets", description=__doc__)
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="PREFIX", help="data sets, without .bin"
    )
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="name of the new one, without .bin"
    )
    parser.add_argument("--force", action="store_true", help="replace an output that exists")
    return parser


def _without_ending(name: str) -> str:
    return name.removesuffix(".bin").removesuffix(".idx")


def _check_options(inputs: Sequence[str], output_prefix: str, *, force: bool) -> None:
    read = [path for prefix in inputs for path in published_paths(prefix)]
    for path in published_paths(output_prefix):
        check_not_read(path, read)
        if path.exists() and not force:
            raise OutputError(f"{path} exists: pass --force to replace it")


def _common_id_type(inputs: Sequence[str]) -> np.dtype[np.integer]:
    """Check the index of every input; return the id type that all inputs share."""
    indices = [_document_index(prefix) for prefix in inputs]
    first = indices[0]
    for other in indices[1:]:
        if other.id_type != first.id_type:
            raise InputError(
                f"{other.prefix} stores ids as {other.id_type} and {first.prefix} as "
                f"{first.id_type}: they are of different vocabularies, preprocess one of them again"
            )
    return first.id_type


def _document_index(prefix: str) -> IndexSummary:
    index = read_index(prefix)
    idx_path = output_paths(prefix)[1]
    with idx_path.open("rb") as file:
        *_, num_sequences, num_ends = INDEX_HEADER.unpack(file.read(INDEX_HEADER.size))
    if num_ends != num_sequences + 1:
        raise InputError(
            f"{idx_path} has {num_sequences} sequences in {num_ends - 1} documents: only data with "
            "one sequence a document, as GPT's, can be merged"
        )
    return index


def _common_meaning(inputs: Sequence[str]) -> Meaning | None:
    """Return the meaning of ids that all inputs declare; None, with a note, if one lacks it."""
    described = [(prefix, read_description(prefix)) for prefix in inputs]
    known = [(prefix, meaning) for prefix, meaning in described if meaning is not None]
    for prefix, meaning in known[1:]:
        difference = known[0][1].difference(meaning)
        if difference is not None:
            raise InputError(
                f"{known[0][0]} and {prefix} differ in {difference}: their ids do not mean the "
                "same, preprocess one of them again"
            )
    silent = [prefix for prefix, meaning in described if meaning is None]
    if silent:
        print(
            f"{', '.join(silent)}: no .json tells the tokenizer, so it was not compared",
            file=sys.stderr,
        )
        return None
    return known[0][1]


def _append(writer: IndexedWriter, prefix: str) -> None:
    bin_path, idx_path = output_paths(prefix)
    with bin_path.open("rb") as data, idx_path.open("rb") as index:
        writer.add_data(data, _lengths(index))


def _lengths(index: BinaryIO) -> Iterator[npt.NDArray[np.int32]]:
    """Yield the lengths of sequences in an index, in pieces."""
    *_, num_left, _ = INDEX_HEADER.unpack(index.read(INDEX_HEADER.size))
    while num_left:
        piece = np.frombuffer(index.read(4 * min(num_left, _CHUNK)), dtype=np.int32)
        num_left -= len(piece)
        yield piece


if __name__ == "__main__":
    sys.exit(report_errors(main))
