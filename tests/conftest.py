"""Settings for every test, the real command, and what costly tests share."""

import gc
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings

from tests import ranks
from tests.failures import NamedFailures

# Machines that run tests are shared: how long one example takes says nothing.
settings.register_profile("megascan", deadline=None)
settings.load_profile("megascan")

# As scripts/test.sh has it, for `pytest tests/…` as well: threads of torch that share a core spin
# while they wait for one another. It is read when torch or numpy is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).parents[1]


@pytest.hookimpl(trylast=True)  # once the terminal's reporter is there
def pytest_configure(config: pytest.Config) -> None:
    """Name failures at once: here, not in xdist's workers, whose reports all come here.

    Ctrl-C is what it is in a terminal, also of a suite that was started in the background.
    """
    gc.disable()  # until all files are imported
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(NamedFailures(terminal))
    send_at_once(config)


@pytest.fixture(scope="session", autouse=True)
def _temporary_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Have all that processes of tests leave behind, as torchrun does its logs, in pytest's folder,
    which is cleared.
    """
    os.environ["TMPDIR"] = tempfile.tempdir = str(tmp_path_factory.mktemp("tmp"))


def send_at_once(config: pytest.Config) -> None:
    """Have a worker's questions of pytest-rerunfailures leave as they are asked, two for each test.

    The second one waits for word that the first has come, which its receiver holds back for 40 ms:
    933 short tests two at a time took 42 s, not 25.
    """
    counts = getattr(getattr(config, "failures_db", None), "sock", None)
    if counts is not None:
        counts.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start several ranks come first, so that no worker begins a long one last."""
    long = {item.path for item in items if item.get_closest_marker("distributed")}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    """Have no collection of garbage look through all that was imported for thousands of tests."""
    gc.freeze()
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m alone` import only files that can hold such a test: to collect all takes 20 seconds.

    The mark stands in the file itself or, where tests are generated, in the conftest.py beside it;
    of a folder without either, conftest.py is not imported.
    """
    if config.option.markexpr != "alone":
        return None
    if collection_path.is_dir():
        paths = collection_path.rglob("*.py")
    elif collection_path.name.startswith("test_"):
        paths = iter((collection_path, collection_path.with_name("conftest.py")))
    else:
        return None
    sources = (path.read_text("utf-8") for path in paths if path.exists())
    return None if any("mark.alone" in source for source in sources) else True


@pytest.fixture(scope="module", autouse=True)
def environment_as_found() -> Iterator[None]:
    """Take back what a file's tests leave in the environment, as a job of one rank in this process
    does: commands that later tests run in it read `MASTER_PORT` too.
    """
    found = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(found)


@pytest.fixture(scope="session")
def megascan() -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """`megascan(word, …, cwd=…)` as it is typed, in a process of its own without our variables.

    It is forked with numpy and pyarrow imported. Elsewhere many tests start the real interpreter.
    """
    python = ranks.warm_command()

    def run(
        *words: object, cwd: Path = ROOT, timeout_s: float = 200
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, "-m", "megascan", *map(str, words)], cwd=cwd, timeout=timeout_s,
            capture_output=True, text=True, env=ranks.COMMAND,
        )  # fmt: skip

    return run


Made = TypeVar("Made")


@pytest.fixture(scope="module")
def _made() -> dict[Hashable, object]:
    return {}


@pytest.fixture
def once(
    request: pytest.FixtureRequest, _made: dict[Hashable, object]
) -> Callable[[Hashable, Callable[[], Made]], Made]:
    """Makes something costly once for all tests of a module, by a key.

    A test that failed and is run once more makes it anew: a fixture of the module would not.
    """
    if getattr(request.node, "execution_count", 1) > 1:
        _made.clear()

    def get(key: Hashable, make: Callable[[], Made]) -> Made:
        if key not in _made:
            _made[key] = make()
        return _made[key]  # type: ignore[return-value]

    return get


@pytest.fixture
def without_power(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare a test what would have been found, unless it is marked `power`.

    To say so the ranks of a trace are slowed and searched one by one: most of the time of a
    verdict, and no finding rests on it.
    """
    from detect.causes import compute
    from detect.causes.power import Power

    if request.node.get_closest_marker("power") is None:
        monkeypatch.setattr(
            compute, "planted_power", lambda inquiry, first, slow, judged: Power(first, first)
        )


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes that are started heed SIGINT, even where a shell's `&` has us ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window, by playwright; without either of them the tests are skipped.

    Its shell is preferred: the whole browser draws windows that nobody sees, half of the time.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium-headless-shell", "chromium", "google-chrome", "chromium-browser")
    installed = next(filter(None, map(shutil.which, names)), None)
    if installed is None:
        pytest.skip("no Chromium")
    with playwright.sync_playwright() as engine:
        started = engine.chromium.launch(
            executable_path=installed,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield started
        started.close()
