"""Serve a model over HTTP, as OpenAI's clients expect.

    python -m training.serve --load CHECKPOINTS
    torchrun --nproc-per-node 4 -m training.serve --load CHECKPOINTS
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2

The model's flags, its number format and its tokenizer come from the checkpoint, or from a Hugging
Face folder with --load-hf; any layout reads either. Endpoints: /v1/completions,
/v1/chat/completions where the tokenizer has a chat template, /v1/models, /health, /metrics, and
Megatron-LM's PUT /api. It listens on the loopback; any other --host needs a --token-file.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megascan.errors import ConfigError, MegaScanError, report_errors
from megascan.listening import listen, require_server, token_for
from training.arguments import TrainerParser
from training.data.tokenizers import SubwordTokenizer
from training.distributed import (
    ONLY_RANK,
    Launch,
    carry_out,
    end_later,
    end_on_shared_error,
    read_launch,
)
from training.generation.engine import GenerationCallback
from training.generation.job import GenerationJob, add_job_arguments, read_job

if TYPE_CHECKING:
    import socket

    import uvicorn
    from starlette.types import ASGIApp, Receive, Scope, Send

    from training.generation.engine import Engine
    from training.generation.scope import Looking
    from training.generation.service import Service
    from training.generation.web.bodies import ChatTemplate

_END_S = 3
"""Time that clients have to hear that the server ends."""
_KEEP_ALIVE_S = 75
"""How long an idle connection stays open. Clients must close first (httpx, and so the openai
client, after 5 s): else the server may close a connection that a client is about to use."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where the server listens, what it asks of clients, and the model's name for them."""

    host: str
    port: int
    token: str | None
    name: str
    max_waiting: int
    has_scope: bool


def main(arguments: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code."""
    launch = ONLY_RANK
    try:
        launch = read_launch(os.environ)
        job, address = _parse(arguments, launch)
    except MegaScanError as error:
        return end_on_shared_error(launch, error)

    def serve() -> None:
        # before the model is loaded, so that a port that is taken is reported at once
        listening = listen(address.host, address.port) if launch.rank == 0 else None
        with job.joined():
            if listening is None:
                _compute(job, address)
            else:
                _serve(job, address, listening)

    return carry_out(launch, serve)


def _parse(arguments: Sequence[str], launch: Launch) -> tuple[GenerationJob, Address]:
    parser = TrainerParser(
        prog="python -m training.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_job_arguments(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address (default: 127.0.0.1)")
    group.add_argument(
        "--port", type=int, default=8000, help="port; 0 takes a free one (default: 8000)"
    )
    group.add_argument(
        "--token-file", type=Path, metavar="FILE",
        help="file with the token that clients have to send as Authorization: Bearer",
    )  # fmt: skip
    group.add_argument(
        "--served-model-name", metavar="NAME",
        help="what clients call the model; left out: the folder's name",
    )  # fmt: skip
    group.add_argument(
        "--max-open-rows", type=int, default=1024, metavar="N",
        help="rows in the batch and in its queue; more are refused with 429 (default: 1024)",
    )  # fmt: skip
    group.add_argument(
        "--scope", action="store_true",
        help="serve MegaScope's page beside the endpoints: look into the model while it speaks",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    require_server()
    job = read_job(given, launch)
    if given.max_open_rows < 1:
        raise ConfigError(f"--max-open-rows is {given.max_open_rows}, but must be at least 1")
    token = token_for(given.host, given.token_file)
    name = given.served_model_name or job.source.name
    return job, Address(
        host=given.host, port=given.port, token=token, name=name, max_waiting=given.max_open_rows,
        has_scope=given.scope,
    )  # fmt: skip


def _compute(job: GenerationJob, address: Address) -> None:
    """Run a rank that only computes, until rank 0 ends the job."""
    engine = _build_engine(job, address, GenerationCallback())[0]
    end_later()
    with closing(engine):
        for _ in engine.run():
            pass


def _serve(job: GenerationJob, address: Address, listening: socket.socket) -> None:
    """Run rank 0: the HTTP server in a thread, the engine in this one."""
    from training.generation.service import Metrics, Service

    metrics = Metrics(num_slots=job.limits.num_rows)
    engine, looking = _build_engine(job, address, metrics)
    metrics.note_cache(engine.cache_bytes)
    service = Service(metrics, max_waiting=address.max_waiting)
    token = address.token or secrets.token_urlsafe(24)
    page = None if looking is None else looking.page(service, token, address.name)
    server = _start_server(job, address, service, listening, page)
    end_later(service.stop)
    _announce(address, listening, engine.cache_bytes)
    if looking is not None:
        print(f"looking into it at {looking.address(listening, token)}", flush=True)
    try:
        for answers in engine.run(service.inbox):
            service.deliver(answers)
    finally:
        service.end()
        server.stop()
        engine.close()


def _build_engine(
    job: GenerationJob, address: Address, callback: GenerationCallback
) -> tuple[Engine, Looking | None]:
    """Build the engine and, with --scope, the callback that looks into its model."""
    if not address.has_scope:
        return job.build_engine(callback), None
    from training.generation.scope import Looking

    looking = Looking(job, callback)
    engine = job.build_engine(looking, num_extra_slots=1)
    looking.attach(engine)
    return engine, looking


class _Server:
    """Runs uvicorn in a thread."""

    def __init__(self, server: uvicorn.Server, listening: socket.socket) -> None:
        self._server = server
        self._thread = threading.Thread(
            target=server.run, kwargs={"sockets": [listening]}, name="http", daemon=True
        )
        self._thread.start()
        while self._thread.is_alive() and not server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop: give open requests time to end, then close."""
        self._server.should_exit = True
        self._thread.join(2 * _END_S)


def _start_server(
    job: GenerationJob,
    address: Address,
    service: Service,
    listening: socket.socket,
    page: ASGIApp | None,
) -> _Server:
    import uvicorn

    from megascan.connection import Connection
    from training.generation.web.app import build_app
    from training.generation.web.bodies import ServedModel

    model = ServedModel(
        name=address.name,
        tokenizer=job.tokenizer,
        stop_ids=job.stop_ids,
        limits=job.limits,
        service=service,
        template=_chat_template(job),
    )
    config = uvicorn.Config(
        _beside(build_app(model, token=address.token), page),
        http=Connection,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_END_S,
    )
    return _Server(uvicorn.Server(config), listening)


def _beside(app: ASGIApp, page: ASGIApp | None) -> ASGIApp:
    """Return an application with the endpoints and, under /scope, the page."""
    if page is None:
        return app

    async def choose(scope: Scope, receive: Receive, send: Send) -> None:
        is_page = scope["type"] == "http" and scope["path"].startswith("/scope")
        await (page if is_page else app)(scope, receive, send)

    return choose


def _chat_template(job: GenerationJob) -> ChatTemplate | None:
    from training.generation.web.bodies import read_chat_template

    model = job.tokenizer_settings.tokenizer_model
    if model is None or not isinstance(job.tokenizer, SubwordTokenizer):
        return None
    folder = Path(model)
    return read_chat_template(folder if folder.is_dir() else folder.parent, job.tokenizer)


def _announce(address: Address, listening: socket.socket, cache_bytes: int) -> None:
    host, port = listening.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    print(
        f"serving {address.name} at http://{host}:{port}/v1 (keys and values: "
        f"{cache_bytes / 2**20:.0f} MiB on rank 0)",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(report_errors(lambda: main(sys.argv[1:])))
