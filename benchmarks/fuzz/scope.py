"""python -m benchmarks.fuzz.scope --messages 10000: hostile clients and files against MegaScope.

Four campaigns of as many inputs each, all in one process:

- `training page`: the real server over a folder of recordings, on a port of the loopback; three
  clients send questions of odd values, wrong hosts and tokens, damaged and chunked HTTP, any bytes;
- `speaking page`: the same with a real session and model behind it, whose clients also ask for
  runs, changes, maps, the lens and PCA, and hang up amid; now and then the model is asked what it
  says to others, which must stay the same numbers;
- `requests`: a model is trained while hostile files are put where a viewer's request is looked for;
  its losses must be those of a training that nobody looks at, bit for bit;
- `recordings`: damaged files of recordings through what reads them for the page.

Good ends are an answer, a status of 4xx with one sentence, or a sentence of the reader. What else
happens (5xx, a traceback in the log, no answer within 20 s, other numbers) is listed, and the exit
code is 1.
"""

from __future__ import annotations

import argparse
import json
import logging
import queue
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from benchmarks.fuzz.damage import damaged
from benchmarks.fuzz.hostile import NAMES, Message, asked, command, message, question

if TYPE_CHECKING:
    from megascope.session import NextToken

PATIENCE_S = 20.0
_MOST_FAULTS = 20
"""After which a campaign ends."""
TOKEN = "a-token-of-some-length"
_IMPATIENCE_S = 0.05
"""How long the answer to what is no whole request is waited for."""
_NUM_CLIENTS = 3
_CHECKED_EVERY = 100


@dataclass
class Outcome:
    """What came of a campaign."""

    name: str
    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def add(self, number: int, end: str, fault: str) -> None:
        """Count one input's end; `fault` says what was wrong with it, if anything was."""
        self.ends[end] += 1
        if fault:
            self.faults.append(f"{self.name} {number}: {fault}")


class _Log(logging.Handler):
    """Tracebacks that go to the log while inside."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.failures: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.levelno >= logging.ERROR:
            self.failures.append(logging.Formatter().format(record))

    @contextmanager
    def listening(self) -> Iterator[None]:
        logger = logging.getLogger()
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)


@contextmanager
def served(app: Any) -> Iterator[int]:
    """Serve an application as the commands do, in a thread; gives the port."""
    import uvicorn

    from megascan.listening import listen

    listening = listen("127.0.0.1", 0)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", ws="none", server_header=False
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)


def send(port: int, sent: Message) -> bytes | None:
    """Send bytes and read what comes until the server hangs up; None when it does not in time."""
    received = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.settimeout(PATIENCE_S if sent.is_whole else _IMPATIENCE_S)
        try:
            connection.sendall(sent.content)
            if sent.hangs_up:
                return b""
            while part := connection.recv(1 << 16):
                received += part
        except ConnectionError:
            pass  # the server has hung up amid
        except TimeoutError:
            return None
    return bytes(received)


def judge(sent: Message, received: bytes | None) -> tuple[str, str]:
    """How a message ended, and what was wrong with that."""
    if sent.hangs_up:
        return "the client hung up", ""
    if received is None:
        return ("no answer", f"{sent.content[:200]!r}") if sent.is_whole else ("cut short", "")
    if not received:
        return "no answer", f"{sent.content[:200]!r}" if sent.is_whole else ""
    head, _, body = received.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    if status >= 500:
        return str(status), f"{sent.content[:400]!r}"
    is_refused_by_us = status >= 400 and b"application/json" in head and body
    if is_refused_by_us and "\n" in json.loads(body)["error"]:
        return str(status), f"several lines: {body!r}"
    return f"{status // 100}xx", ""


Body = Callable[[Random], tuple[str, bytes]]


def attack(outcome: Outcome, port: int, num_messages: int, seed: int, body: Body) -> bytes:
    """Send messages by several clients at once; gives the newest answer that had a body."""
    own = (f"host: 127.0.0.1:{port}", f"authorization: Bearer {TOKEN}")

    def one(number: int) -> None:
        if len(outcome.faults) >= _MOST_FAULTS:
            return
        sent = message(Random(f"{seed}:{number}"), body, own)
        outcome.add(number, *judge(sent, send(port, sent)))

    with ThreadPoolExecutor(_NUM_CLIENTS) as clients:
        list(clients.map(one, range(num_messages)))
    good = Message(asked("state", b"{}", own), is_whole=True)
    answer = send(port, good) or b""
    if b" 200 OK" not in answer:
        outcome.faults.append(
            f"{outcome.name}: after all it answers a good question {answer[:200]!r}"
        )
    return answer


def of_a_folder(draws: Random) -> tuple[str, bytes]:
    """A question to the page of a training."""
    return draws.choice(NAMES), question(draws)


def training_page(num_messages: int, seed: int) -> Outcome:
    """The page over recordings."""
    from megascope.folder_page import FolderPage
    from megascope.server import build_app

    outcome, log = Outcome("training page"), _Log()
    with TemporaryDirectory() as place, log.listening():
        folder = Path(place)
        record(folder, iterations=3)
        before = {path.name for path in folder.iterdir()}
        with served(build_app(FolderPage(folder, list), token=TOKEN)) as port:
            attack(outcome, port, num_messages, seed, of_a_folder)
        foreign = {path.name for path in folder.iterdir()} - before - {"scope-request.json"}
    outcome.faults += log.failures + [f"{name} was written" for name in foreign]
    return outcome


class Speaking:
    """A session and its page over a small model, computing in a thread as a server does."""

    def __init__(self) -> None:
        from benchmarks.scope_models import model_that_speaks
        from megascope.model_page import ModelPage
        from megascope.session import Session
        from training.data.tokenizers import ByteTokenizer

        tokenizer = ByteTokenizer()
        self._model = model_that_speaks(2, 64, tokenizer.vocab_size, "cpu")
        self._work: queue.SimpleQueue[str | Callable[[], None] | None] = queue.SimpleQueue()
        self.page = ModelPage(
            {"model": "m", "num_layers": 2}, tell=self._work.put, tokenize=tokenizer.tokenize,
            text_of=str, max_length=self._model.max_length, vocab_size=tokenizer.vocab_size,
        )  # fmt: skip
        self._session = Session(self._model, self._deliver, tokenizer.vocab_size, str)
        self.failure: str = ""
        self.newest = 0
        """The newest run that has said something."""

    def _deliver(self, identifier: int, frame: bytes | None) -> None:
        if frame is not None and b'"kind":"step"' in frame[:1000]:
            self.newest = identifier
        self.page.deliver(identifier, frame)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Work on what comes while inside."""
        thread = threading.Thread(target=self._compute)
        thread.start()
        try:
            yield
        finally:
            self._work.put(None)
            thread.join(PATIENCE_S)

    def _compute(self) -> None:
        import torch

        try:
            with torch.inference_mode():
                while (item := self._work.get()) is not None:
                    if isinstance(item, str):
                        self._session.receive(json.loads(item))
                    else:
                        self._session.look_away()
                        item()
                    while self._session.has_work and self._work.empty():
                        self._session.work()
        except Exception as error:
            logging.getLogger(__name__).exception("the thread that computes has ended")
            self.failure = repr(error)

    def says_to_others(self) -> NextToken | None:
        """Return what the model answers to a fixed prompt, between the session's steps, without
        the time of the answer; None where none came.
        """
        found: queue.SimpleQueue[NextToken] = queue.SimpleQueue()

        def ask() -> None:
            following = self._model.compute([5, 6, 7], 0, temperature=0.0, draw=0.0)
            found.put(replace(following, chosen_at_s=0.0))

        self._work.put(ask)
        with suppress(queue.Empty):
            return found.get(timeout=PATIENCE_S)
        return None


def speaking_page(num_messages: int, seed: int) -> Outcome:
    """The page over a model that speaks."""
    from megascope.server import build_app

    outcome, log, speaking = Outcome("speaking page"), _Log(), Speaking()

    def body(draws: Random) -> tuple[str, bytes]:
        if draws.random() < 0.3:
            return of_a_folder(draws)
        return "ask", json.dumps(command(draws, speaking.newest)).encode()

    with log.listening(), speaking.computing():
        before = speaking.says_to_others()
        with served(build_app(speaking.page, token=TOKEN)) as port:
            for first in range(0, num_messages, _CHECKED_EVERY):
                size = min(_CHECKED_EVERY, num_messages - first)
                attack(outcome, port, size, seed * 1_000_003 + first, body)
                if speaking.says_to_others() != before:
                    outcome.faults.append(
                        f"after {first + size} messages others are told otherwise"
                    )
                if speaking.failure:
                    break
    outcome.faults += log.failures
    return outcome


def record(folder: Path, iterations: int) -> list[float]:
    """Train a small model that is looked at, and leave the recordings; its losses."""
    every_iteration = 100.0
    return list(_losses(folder, iterations, lambda number: None, every_iteration))


def _losses(
    folder: Path | None, iterations: int, before_each: Callable[[int], None], budget: float = 0.05
) -> Iterator[float]:
    import torch

    from benchmarks.scope_models import model_to_train

    model = model_to_train(2, 64, 200)
    tokens = torch.arange(16)[None] * 7 % 200
    positions = torch.arange(16)[None]
    recorder = None if folder is None else _recorder(model, folder, budget)
    for iteration in range(1, iterations + 1):
        before_each(iteration)
        if recorder is not None:
            recorder.begin(iteration)
        loss = model(tokens, positions, None, labels=tokens).mean()
        loss.backward()
        if recorder is not None:
            recorder.before_step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=1e-4)
                parameter.grad = None
        if recorder is not None:
            recorder.after_step()
            recorder.end()
        yield float(loss)


def _recorder(model: Any, folder: Path, budget: float) -> Any:
    from megascan.topology import Layout
    from megascope.frames import encode
    from megascope.interventions import TensorShares
    from megascope.recorder import DataFile, Limits, Recorder
    from megascope.request import RequestFile

    header: dict[str, object] = {
        "kind": "run", "schema": 1, "rank": 0, "layout": Layout().to_json(),
        "model": {"num_layers": 2}, "first_iteration": 1, "is_continued": False,
    }  # fmt: skip
    file = DataFile(folder, 0, max_bytes=1 << 24)
    file.open(encode(header), continued=encode({**header, "is_continued": True}))
    return Recorder(
        [model],
        file,
        RequestFile(folder),
        shares=TensorShares(rank=0, size=1),
        limits=Limits(budget_ratio=budget),
    )


def requests(num_files: int, seed: int) -> Outcome:
    """Files where a training looks for requests."""
    from megascope.request import FILE_NAME, Request

    outcome, log = Outcome("requests"), _Log()
    good = Request(gradients=True, reductions=("rms", "top", "histogram")).to_json().encode()

    with TemporaryDirectory() as place, log.listening():
        folder = Path(place)

        def put(number: int) -> None:
            draws = Random(f"{seed}:{number}")
            content = _request(draws, good)
            with suppress(FileNotFoundError):
                (folder / FILE_NAME).unlink()
            (folder / FILE_NAME).write_bytes(content)
            outcome.ends["heeded or said"] += 1

        seen = list(_losses(folder, num_files, put))
        alone = list(_losses(None, num_files, lambda number: None))
    if seen != alone:
        at = next(
            at for at, (one, other) in enumerate(zip(seen, alone, strict=True)) if one != other
        )
        outcome.faults.append(f"requests: from iteration {at + 1} on losses differ")
    outcome.faults += log.failures
    return outcome


def _request(draws: Random, good: bytes) -> bytes:
    kind = draws.random()
    if kind < 0.5:
        return damaged(good, False, draws)
    if kind < 0.8:
        return question(draws)
    fields: Mapping[str, Sequence[object]] = {
        "places": (["residual"], ["attention", "logits"], ["query", "fc1", "loss"], []),
        "reductions": (["rms"], ["pixels"], ["top", "histogram", "entropy"], []),
        "per_token": (True, False), "gradients": (True, False), "every": (1, 3, 1_000_000),
        "layers": ([], [1], [4096]), "num_microbatches": (1, 4096), "first": (0, 2**31),
        "last": (0, 2**31),
        "interventions": ([], [{"place": "fc1", "kind": "scale", "amount": 1e6}],
                          [{"place": "fc1", "kind": "flip", "amount": 4096}]),
    }  # fmt: skip
    chosen = {name: draws.choice(values) for name, values in fields.items() if draws.random() < 0.5}
    return json.dumps({"schema": 1, **chosen}).encode()


def recordings(num_files: int, seed: int) -> Outcome:
    """Damaged recordings, as the page reads them."""
    from megascan.errors import MegaScanError
    from megascope.folder_page import Recordings
    from megascope.recorder import data_file_name

    outcome = Outcome("recordings")
    with TemporaryDirectory() as place:
        folder = Path(place)
        record(folder, iterations=8)
        path = folder / data_file_name(0)
        content = path.read_bytes()
        for number in range(num_files):
            path.write_bytes(damaged(content, False, Random(f"{seed}:{number}")))
            try:
                found = Recordings(folder)
                found.refresh()
                json.dumps(found.describe())
                found.series("residual", "rms")
                found.table(found.iterations[-1], "residual", "max")
                found.weights()
                outcome.add(number, "read, or in part", "")
            except MegaScanError as error:
                outcome.add(number, "refused", "" if "\n" not in str(error) else str(error))
            except Exception as error:
                outcome.add(number, "failed", repr(error))
    return outcome


CAMPAIGNS = (training_page, speaking_page, requests, recordings)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaigns; 1 when anything ended otherwise than it should."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fuzz.scope",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--messages", type=int, default=10_000, metavar="N", help="each (10000)")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--only", choices=[one.__name__ for one in CAMPAIGNS])
    given = parser.parse_args(arguments)
    import torch

    from benchmarks.scope_models import join

    torch.set_num_threads(1)
    join("cpu")
    faults = 0
    for campaign in CAMPAIGNS:
        if given.only not in (None, campaign.__name__):
            continue
        began = time.perf_counter()
        outcome = campaign(given.messages, given.seed)
        ends = ", ".join(f"{count:,} {end}" for end, count in outcome.ends.most_common())
        spent_s = time.perf_counter() - began
        print(
            f"{outcome.name}: {sum(outcome.ends.values()):,} in {spent_s:.0f} s ({ends}), "
            f"{len(outcome.faults)} ended otherwise",
            flush=True,
        )
        for fault in outcome.faults[:_MOST_FAULTS]:
            print(fault[:3000], file=sys.stderr)
        faults += len(outcome.faults)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
