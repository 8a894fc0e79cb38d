"""Build what an install can do without: `megascan/native.c`, where a C compiler is.

hatchling calls `NativeBuild` for a wheel, which then holds the library and is of this platform, and
for an editable install, for which the library is put beside its source. Where there is no compiler,
or it fails, both go on without, and one line says so. In a checkout that is used as it is,
`python hatch_build.py` builds the library in place (from hatchling nothing is needed then).
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # a checkout whose Python does not have it
    BuildHookInterface = object

ROOT = Path(__file__).resolve().parent
SOURCE = ROOT / "megascan" / "native.c"
SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
LIBRARY = f"libmegascan{SUFFIX}"
FLAGS = ("-std=c11", "-O3", "-shared", "-fPIC", "-fvisibility=hidden")
_PATIENCE_S = 120


def compiler() -> list[str]:
    """Return the words that start the C compiler: CC, or the one that Python was built with."""
    said = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    return shlex.split(str(said))


def build(folder: Path, words: list[str] | None = None, flags: tuple[str, ...] = FLAGS) -> str:
    """Compile the library into a folder; return why not, nothing when it is there."""
    number = zlib.crc32(SOURCE.read_bytes())
    target = folder / LIBRARY
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    command = [*(words or compiler()), *flags, f"-DSOURCE={number}u", "-o", str(unfinished)]
    try:
        done = subprocess.run(
            [*command, str(SOURCE)],
            check=False,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
        )
        if done.returncode:
            return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        unfinished.replace(target)  # whoever has the former one loaded keeps it
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        unfinished.unlink(missing_ok=True)
    return ""


class NativeBuild(BuildHookInterface):
    """hatchling's hook for wheels."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and have the wheel take the library along."""
        self._folder = tempfile.TemporaryDirectory()
        folder = SOURCE.parent if version == "editable" else Path(self._folder.name)
        reason = build(folder)
        if reason:
            self.app.display_warning(
                "megascan is installed without its compiled part, and reads and writes traces more "
                f"slowly: {reason}"
            )
        elif version != "editable":
            build_data["force_include"][str(folder / LIBRARY)] = f"megascan/{LIBRARY}"
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Forget the library that the wheel holds."""
        self._folder.cleanup()


if __name__ == "__main__":
    failure = build(SOURCE.parent)
    sys.exit(f"error: {failure}" if failure else None)
