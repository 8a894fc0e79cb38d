"""Name the slow rank while the job runs, on the channels where you listen.

DIR is a folder that a traced job is writing its rank files into; several are the folders of one
job's hosts. Every finished window is judged together with those before it, as `megascan detect`
would. A finding is raised once, holds under one id, and is cleared when it is gone.

The watch goes on until it is interrupted. With --once it judges what is there and ends, with
--exit-when-done it ends with the job; the exit code is then 3 while a finding whose owner is a node
holds (with --dry-run-policy: while a rule would drain something), 4 when the job stands still, else
0.

examples:
  megascan watch trace_output
  megascan watch trace_output --tui
  megascan watch trace_output --prometheus 9464 --webhook @slack-url.txt --exec ./on-finding.sh
  megascan watch trace_output --once --json
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascan.cli.options import add_detector_arguments, settings_from
from megascan.cli.output import check_folder, require, say
from megascan.errors import InputError, MissingError, UsageError

if TYPE_CHECKING:
    from rich.live import Live

    from megascan.watch.screen import Screen
    from megascan.watch.watcher import Watcher

_SHAPES = ("json", "slack", "pagerduty", "otlp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "folders", type=Path, nargs="+", metavar="DIR", help="where rank files are written"
    )
    parser.add_argument("--tui", action="store_true", help="one screen instead of log lines")
    parser.add_argument("--json", action="store_true", help="print every event as a line of JSON")
    parser.add_argument("--once", action="store_true", help="judge what is there, and end")
    parser.add_argument("--exit-when-done", action="store_true", help="end when the job has ended")
    _add_looking_arguments(parser.add_argument_group("looking"))
    _add_telling_arguments(parser.add_argument_group("telling"))
    add_detector_arguments(parser)


def _add_looking_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS",
        help="time between two looks at the files (default: %(default)g)",
    )  # fmt: skip
    group.add_argument(
        "--keep", type=int, default=20, metavar="N",
        help="traced iterations that are judged together, 8 or more (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--cpu-share", type=float, default=0.02, metavar="RATIO",
        help="share of a core above which windows that look as usual are judged together, two "
        "minutes' at most; 1: each by itself (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--hang-after", type=float, metavar="SECONDS",
        help="silence that is a hang (default: three times the usual gap, 10 at least)",
    )  # fmt: skip
    group.add_argument(
        "--state", type=Path, metavar="FILE",
        help="what survives a restart (default: megascan-watch.json in the first DIR)",
    )  # fmt: skip
    group.add_argument("--no-state", action="store_true", help="remember nothing")


def _add_telling_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--prometheus", type=int, metavar="PORT", help="serve /metrics and /healthz")
    group.add_argument(
        "--prometheus-host", default="127.0.0.1", metavar="ADDRESS",
        help="address to serve on; 0.0.0.0 for all (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--webhook", action="append", default=[], metavar="URL",
        help="POST events there; @FILE reads the URL from a file; repeatable",
    )  # fmt: skip
    group.add_argument(
        "--webhook-format", choices=_SHAPES,
        help="shape of what is posted (default: by the host's name, else json)",
    )  # fmt: skip
    group.add_argument(
        "--exec", action="append", default=[], metavar="CMD",
        help="run this with the event as JSON on its standard input; repeatable",
    )  # fmt: skip
    group.add_argument(
        "--notify", choices=("node", "all"), default="node",
        help="whose findings --webhook and --exec hear of (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--history", type=Path, metavar="FILE",
        help="quote earlier jobs' findings from this file, and add this job's",
    )  # fmt: skip
    group.add_argument(
        "--dry-run-policy", type=Path, metavar="FILE",
        help="say what these rules (TOML) would drain; nothing is drained",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Watch until the watch ends for any reason."""
    _check(arguments)
    require("aggregate")
    with _view(arguments) as view:
        watcher = _watcher(arguments, view[0] if view else None)
        try:
            with _endpoint(arguments, watcher):
                _loop(arguments, watcher, view)
        finally:
            watcher.close()
    return watcher.exit_code if arguments.once or arguments.exit_when_done else 0


def _check(arguments: argparse.Namespace) -> None:
    if not 0.01 <= arguments.interval <= 3600:
        raise UsageError(f"--interval is {arguments.interval}, expected 0.01 to 3600 seconds")
    if not 8 <= arguments.keep <= 1000:
        raise UsageError(f"--keep is {arguments.keep}, expected 8 to 1000 iterations")
    if not 0 < arguments.cpu_share <= 1:
        raise UsageError(f"--cpu-share is {arguments.cpu_share}, expected above 0 and at most 1")
    if arguments.hang_after is not None and not arguments.hang_after > 0:
        raise UsageError(f"--hang-after is {arguments.hang_after}, expected seconds above 0")
    if arguments.tui and (arguments.json or arguments.once):
        raise UsageError("--tui shows a running job; leave out --json and --once")
    if arguments.webhook_format and not arguments.webhook:
        raise UsageError("--webhook-format says how to post and there is no --webhook")
    for folder in arguments.folders:
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is a file, expected a folder of rank files")
        if arguments.once and not folder.exists():
            raise InputError(f"{folder}: no such folder; name one that a job traces into")
        if folder.exists():
            check_folder(folder, "check its permissions")


@contextlib.contextmanager
def _view(arguments: argparse.Namespace) -> Iterator[tuple[Screen, Live] | None]:
    """Hold the terminal's screen, if --tui asks for it."""
    if not arguments.tui:
        yield None
        return
    try:
        from megascan.watch.screen import open_screen
    except ModuleNotFoundError as error:
        raise MissingError(
            "--tui needs rich, which is not installed; install MegaScan with its extra `watch` "
            "(pip install 'megascan[watch]')"
        ) from error
    with open_screen() as view:
        yield view


def _watcher(arguments: argparse.Namespace, screen: Screen | None) -> Watcher:
    """Make the watcher that the flags ask for."""
    from megascan.watch.delivery import Command, Outbox, Receiver, Webhook
    from megascan.watch.history import History
    from megascan.watch.policy import read_policy
    from megascan.watch.watcher import STATE_FILE, StateFile, Watcher, WatchSettings

    channels: list[Receiver] = [
        Webhook.of(url, arguments.webhook_format) for url in arguments.webhook
    ]
    channels += [Command.of(words) for words in arguments.exec]
    policy = arguments.dry_run_policy
    settings = WatchSettings(
        folders=tuple(arguments.folders),
        detector=settings_from(arguments),
        kept_iterations=arguments.keep,
        cpu_share=1.0 if arguments.once else arguments.cpu_share,  # there is no next look
        hang_after_s=arguments.hang_after,
        notify=arguments.notify,
        rules=read_policy(policy) if policy else (),
    )
    history = History(arguments.history) if arguments.history else None
    state = None if arguments.no_state else _state_path(arguments, STATE_FILE)

    def warn(problem: str) -> None:
        if screen is not None:
            screen.note(f"warning: {problem}")
        else:
            print(f"warning: {problem}", file=sys.stderr)

    return Watcher(
        settings=settings,
        state_file=StateFile(state),
        outbox=Outbox(channels, warn),
        say=_printer(arguments, screen),
        warn=warn,
        history=history,
    )


def _state_path(arguments: argparse.Namespace, name: str) -> Path:
    """Return the path of the state; make the watched folder if the job has not made it yet."""
    if arguments.state is None:
        arguments.folders[0].mkdir(parents=True, exist_ok=True)
        return Path(arguments.folders[0] / name)
    if not arguments.state.parent.is_dir():
        raise InputError(
            f"{arguments.state.parent}: no such folder; make it or name another with --state"
        )
    return Path(arguments.state)


def _printer(
    arguments: argparse.Namespace, screen: Screen | None
) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that prints an event: as JSON, as a line of the log, or on the screen."""
    import orjson

    from megascan.watch.delivery import line_of

    def tell(record: Mapping[str, Any]) -> None:
        now = time.time()
        if arguments.json:
            say(orjson.dumps({"time": round(now, 3), **record}).decode())
        elif screen is None:
            moment = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d %H:%M:%S")
            say(f"{moment}  {line_of(record)}")
        elif record["event"] != "verdict":
            screen.note(line_of(record))

    return tell


@contextlib.contextmanager
def _endpoint(arguments: argparse.Namespace, watcher: Watcher) -> Iterator[None]:
    if arguments.prometheus is None:
        yield
        return
    from megascan.watch.metrics import Endpoint

    endpoint = Endpoint(
        arguments.prometheus_host, arguments.prometheus, watcher.gauges, watcher.pulse
    )
    if not arguments.tui:
        where = f"http://{arguments.prometheus_host}:{endpoint.port}"
        print(f"metrics on {where}/metrics, health on {where}/healthz", file=sys.stderr)
    try:
        yield
    finally:
        endpoint.close()


def _loop(
    arguments: argparse.Namespace, watcher: Watcher, view: tuple[Screen, Live] | None
) -> None:
    """Look once, or again and again, until there is nothing more to look at."""
    from megascan.watch.watcher import watch

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    with contextlib.suppress(KeyboardInterrupt):
        if arguments.once:
            watcher.look()
            if not watcher.files.headers:
                raise InputError(
                    f"{arguments.folders[0]} holds no finished window; let the job run longer"
                )
        else:
            for _ in watch(
                watcher, poll_s=arguments.interval, until_closed=arguments.exit_when_done
            ):
                if view is not None:
                    screen, live = view
                    live.update(screen.draw(watcher), refresh=True)
        watcher.end()
