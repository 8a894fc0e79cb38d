"""Python objects from one process to another, their large buffers through memory and no pipe.

A parcel is a file in memory (memfd) whose descriptor goes through a socket:

    number of buffers, their sizes │ the pickled object │ buffer │ buffer │ …

Columns of a table are such buffers. They are copied once into that file and once out of it, each
into memory of its own, so that a column which is replaced later goes without the others.
"""

from __future__ import annotations

import gc
import os
import pickle
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

_LARGE_BYTES = 16 << 10
"""Smaller buffers are pickled with the object."""
_PROTOCOL = 5
_NOTE = b"parcel"
_INTEGER = np.dtype(np.int64)

Bytes = npt.NDArray[np.uint8]


def send_parcel(connection: socket.socket, value: object) -> None:
    """Hand over anything that can be pickled. OSError when the other side is gone."""
    large: list[memoryview] = []

    def stays_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _LARGE_BYTES:
            return True
        large.append(raw)
        return False

    pickled = pickle.dumps(value, _PROTOCOL, buffer_callback=stays_inside)
    parts = [memoryview(pickled), *large]
    sizes = np.array([len(parts), *(part.nbytes for part in parts)], dtype=_INTEGER)
    file = os.memfd_create("parcel")
    try:
        for part in (sizes.data.cast("B"), *parts):
            _write(file, part)
        socket.send_fds(connection, [_NOTE], [file])
    finally:
        os.close(file)


def receive_parcel(connection: socket.socket) -> object:
    """What the other side has sent. EOFError when it is gone."""
    try:
        note, files, _, _ = socket.recv_fds(connection, len(_NOTE), 1)
    except ConnectionError as error:
        raise EOFError from error
    if not note:
        raise EOFError
    (file,) = files
    try:
        os.lseek(file, 0, os.SEEK_SET)
        (count,) = _integers(file, 1)
        pickled, *large = [_read(file, size) for size in _integers(file, count)]
    finally:
        os.close(file)
    with _no_collection():
        return pickle.loads(pickled.data, buffers=large)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Objects that are just being made are no garbage, and looking at all of them takes long."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _write(file: int, part: memoryview) -> None:
    while part.nbytes:  # one call writes 2 GB at most
        part = part[os.write(file, part) :]


def _integers(file: int, count: int) -> list[int]:
    values: list[int] = _read(file, count * _INTEGER.itemsize).view(_INTEGER).tolist()
    return values


def _read(file: int, num_bytes: int) -> Bytes:
    content = np.empty(num_bytes, dtype=np.uint8)
    rest = content.data
    while rest.nbytes:
        rest = rest[os.readv(file, [rest]) :]
    return content
