"""Compile megascan/reader/lines.c, without which an install reads traces more slowly.

hatchling calls `CompiledPart` for a wheel, which then holds the library and is of this platform,
and for an editable install, where the library is put next to its source. Without a C compiler (`cc`
or what CC names), or if it fails, both go on without the library, and one note says so. In a
checkout that is used as it is, `python hatch_build.py` builds the library in place.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

SOURCE = Path(__file__).resolve().parent / "megascan" / "reader" / "lines.c"
LIBRARY = "liblines.so"
FLAGS = ("-std=c11", "-O3", "-shared", "-fPIC", "-fvisibility=hidden")
_PATIENCE_S = 120

if TYPE_CHECKING:
    _Hook = object
else:
    try:
        from hatchling.builders.hooks.plugin.interface import BuildHookInterface as _Hook
    except ImportError:  # a checkout that is used as it is
        _Hook = object


def build(folder: Path, flags: tuple[str, ...] = FLAGS) -> str:
    """Compile the library into a folder; return why that failed, "" if it did not.

    The library says the checksum of its source, by which `megascan.reader.lines` knows it.
    """
    target = folder / LIBRARY
    unfinished = target.with_name(f".{LIBRARY}.{os.getpid()}")
    words = [*shlex.split(os.environ.get("CC") or "cc"), *flags]
    words += [f"-DSOURCE={zlib.crc32(SOURCE.read_bytes())}u", "-o", str(unfinished), str(SOURCE)]
    try:
        done = subprocess.run(
            words, check=False, capture_output=True, text=True, timeout=_PATIENCE_S
        )
        if done.returncode:
            said = done.stderr.strip().splitlines()
            return f"{words[0]}: {said[-1] if said else f'exit code {done.returncode}'}"
        unfinished.replace(target)  # whoever has loaded the former library keeps it
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        unfinished.unlink(missing_ok=True)
    return ""


class CompiledPart(_Hook):
    """Hook of hatchling for wheels and editable installs."""

    app: Any
    _folder: TemporaryDirectory[str]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the library, and have the wheel hold it."""
        self._folder = TemporaryDirectory()
        is_editable = version == "editable"
        folder = SOURCE.parent if is_editable else Path(self._folder.name)
        reason = build(folder)
        if reason:
            self.app.display_warning(
                "note: installed without the compiled part, so traces are read more slowly "
                f"({reason})"
            )
        elif not is_editable:
            build_data["force_include"][str(folder / LIBRARY)] = f"megascan/reader/{LIBRARY}"
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the folder of the library that the wheel holds now."""
        self._folder.cleanup()


if __name__ == "__main__":
    failure = build(SOURCE.parent)
    sys.exit(f"error: {failure}" if failure else None)
