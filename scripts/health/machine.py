"""The host: room on disk and in shared memory, versions of what is installed."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import tempfile
from pathlib import Path

from health.check import Check, Status

_GB = 1e9
# Docker gives 64 MB, with which NCCL and loader processes fail; both together like a gigabyte.
_LEAST_SHARED_BYTES, _GOOD_SHARED_BYTES = 128e6, 1e9
_SHARED_MEMORY = Path("/dev/shm")
_PACKAGES = ("megascan", "torch", "megatron-core", "transformer-engine", "numpy", "pyarrow")


def check_disk(folder: Path, least_gb: float) -> Check:
    """Whether traces and checkpoints can be written to `folder`."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"room")
        free_gb = shutil.disk_usage(folder).free / _GB
    except OSError as error:
        text = f"{folder} cannot be written ({error.strerror}); choose another with --path"
        return Check(name="disk", status=Status.PROBLEM, text=text)
    enough = free_gb >= least_gb
    text = f"{free_gb:.1f} GB free at {folder}" + (
        "" if enough else f", less than {least_gb:g}; free some or choose another with --path"
    )
    return Check(
        name="disk",
        status=Status.OK if enough else Status.PROBLEM,
        text=text,
        values={"free_bytes": int(free_gb * _GB), "folder": str(folder)},
    )


def check_shared_memory(folder: Path = _SHARED_MEMORY) -> Check:
    """Whether processes of this host can pass data to one another."""
    try:
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        text = f"{folder} is not there ({error.strerror}); loaders and NCCL need it"
        return Check(name="shared memory", status=Status.PROBLEM, text=text)
    status, advice = Status.OK, ""
    if free_bytes < _GOOD_SHARED_BYTES:
        status = Status.PROBLEM if free_bytes < _LEAST_SHARED_BYTES else Status.WARNING
        advice = "; in a container raise it: --shm-size 8g, or an emptyDir of medium Memory"
    text = f"{free_bytes / _GB:.2f} GB free at {folder}{advice}"
    return Check(name="shared memory", status=status, text=text, values={"free_bytes": free_bytes})


def check_versions() -> Check:
    """What is installed, without importing it; nothing here can fail."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Check(name="versions", status=Status.OK, text=text, values=dict(versions))
