"""Look into a model while it trains, or afterwards: a page over the recordings of `--scope`.

DIR is the folder of a job that trains, or has trained, with --scope; any machine that sees the
folder will do. The printed address carries a token: whoever has it may look, and ask the job for
more.

examples:
  megascan scope trace_output
  megascan scope trace_output --port 8899
"""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path

from megascan.cli.output import check_folder, require, say
from megascan.errors import InputError
from megascan.listening import listen, require_server, token_for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of the job")
    parser.add_argument("--host", default="127.0.0.1", help="address (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="port; 0 takes a free one (default: 0)")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE",
        help="file with the token; needed where --host is not this machine alone",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    require("megascope")
    require_server()
    import uvicorn

    from megascan.connection import Connection
    from megascope.folder_page import FolderPage
    from megascope.server import address_of, build_app

    folder: Path = arguments.folder
    check_folder(folder, "give the --trace-dir of a job with --scope")
    token = token_for(arguments.host, arguments.token_file) or secrets.token_urlsafe(24)
    listening = listen(arguments.host, arguments.port)
    app = build_app(
        FolderPage(folder, lambda: _verdict(folder)), token=token, hosts=[arguments.host]
    )
    say(f"looking into {folder} at {address_of(listening, token)} (Ctrl-C ends)")
    config = uvicorn.Config(
        app, http=Connection, log_level="warning", access_log=False, lifespan="off", ws="none",
        server_header=False,
    )  # fmt: skip
    uvicorn.Server(config).run(sockets=[listening])
    return 0


def _verdict(folder: Path) -> list[str]:
    """Return sentences about what the folder's probes show."""
    require("detect")
    from detect.causes.corruption import findings_of
    from megascan.probes import read_probes

    try:
        probes = read_probes(folder)
    except InputError as error:
        return [str(error)]
    if probes is None:
        return []
    findings, notes = findings_of(probes)
    if findings or notes:
        return [*(finding.headline for finding in findings), *notes]
    return [f"all replicas agreed bit for bit in {len(probes.iterations)} probes"]
