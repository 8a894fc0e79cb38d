"""Lines to token ids, in this process or in several, in the order of the input.

Results come back in order and only a few batches are under way at any time, so memory stays
flat whatever the size of the input, and the number of workers never changes the output.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megascan.errors import ConfigError, InputError
from training.data.documents import LineBatch, Position, texts_of_line
from training.data.tokenizers import Tokenizer, TokenizerSettings, build_tokenizer

_BATCHES_PER_WORKER = 4  # enough that no worker waits while the results are written in order


@dataclass(frozen=True, kw_only=True)
class EncodingSettings:
    """How a line becomes ids: which texts of it, by which tokenizer, with an end or without."""

    tokenizer: TokenizerSettings
    json_keys: tuple[str, ...]
    append_eod: bool


@dataclass(frozen=True, kw_only=True)
class EncodedTexts:
    """Ids of consecutive documents: ``ids`` (all tokens,), ``lengths`` (documents,)."""

    ids: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class EncodedBatch:
    """What became of one `LineBatch`: texts by key, and what could not be used.

    ``invalid`` has one sentence, ``file:line: what is wrong``, for each line left out; ``end`` is
    where the batch ends in the input.
    """

    by_key: tuple[EncodedTexts, ...]
    num_lines: int
    size_bytes: int
    invalid: tuple[str, ...]
    end: Position


def encode_batch(settings: EncodingSettings, batch: LineBatch) -> EncodedBatch:
    """Parse and tokenize the lines of a batch; blank lines and empty texts give no document."""
    tokenizer = _tokenizer(settings.tokenizer)
    documents: list[list[list[int]]] = [[] for _ in settings.json_keys]
    invalid: list[str] = []
    for number, line in enumerate(batch.lines, start=batch.first_line):
        if not line.strip():
            continue
        try:
            for ids_of_key, ids in zip(
                documents, _encode_line(settings, tokenizer, line), strict=True
            ):
                if ids:
                    ids_of_key.append(ids)
        except InputError as error:
            invalid.append(f"{batch.path}:{number}: {error}")
    return EncodedBatch(
        by_key=tuple(_packed(ids) for ids in documents),
        num_lines=len(batch.lines),
        size_bytes=sum(len(line) for line in batch.lines),
        invalid=tuple(invalid),
        end=batch.end,
    )


def encode_batches(
    settings: EncodingSettings, batches: Iterable[LineBatch], *, num_workers: int
) -> Generator[EncodedBatch, None, None]:
    """Encode batches with ``num_workers`` processes; results in the order of the input.

    Raises ConfigError when a worker is killed from outside.
    """
    encode = functools.partial(encode_batch, settings)
    if num_workers == 1:
        yield from map(encode, batches)
        return
    # Spawned, not forked: the parent may have torch's threads by then.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_follow_parent)
    pending: deque[Future[EncodedBatch]] = deque()
    try:
        for batch in batches:
            pending.append(pool.submit(encode, batch))
            if len(pending) >= num_workers * _BATCHES_PER_WORKER:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise ConfigError(
            f"one of {num_workers} worker processes was killed, most likely for want of memory: "
            "pass fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _follow_parent() -> None:
    """Leave Ctrl-C to the parent, and end with it: a pool's workers outlive a killed parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent.sentinel,), daemon=True).start()


def _exit_after(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


@functools.cache
def _tokenizer(settings: TokenizerSettings) -> Tokenizer:
    """One tokenizer a process: loading it takes longer than a batch."""
    return build_tokenizer(settings)


def _encode_line(settings: EncodingSettings, tokenizer: Tokenizer, line: bytes) -> list[list[int]]:
    """Ids by key; all keys of a line are good or none is used."""
    encoded = [tokenizer.tokenize(text) for text in texts_of_line(line, settings.json_keys)]
    if settings.append_eod:
        return [[*ids, tokenizer.eod] if ids else ids for ids in encoded]
    return encoded


def _packed(documents: list[list[int]]) -> EncodedTexts:
    lengths = np.fromiter((len(ids) for ids in documents), dtype=np.int32, count=len(documents))
    ids = np.fromiter(itertools.chain.from_iterable(documents), dtype=np.int32)
    return EncodedTexts(ids=ids, lengths=lengths)
