"""A program ends, speaks and dies under the warm Python as it does under Python itself."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ranks

pytestmark = pytest.mark.distributed  # beside those that have the server anyway

TALKS = """
import atexit, os, sys
atexit.register(print, "at exit")
print(sys.argv, __name__, os.getcwd(), os.environ["MARK"], os.umask(0), sys.stdin.read())
print(sys.path[:2], sys.stdout.write_through, os.sched_getaffinity(0), file=sys.stderr)
"""
PROGRAMS = {
    "success": "pass",
    "a code": "sys.exit(7)",
    "a sentence": "sys.exit('no')",
    "an exception": "{}['key']",
    "an interrupt": "raise KeyboardInterrupt",
    "a signal": "os.kill(os.getpid(), 15)",
    "a crash": "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.abort()",
    "words in C's stream": "import ctypes; ctypes.CDLL(None).printf(b'of C')",
    "words that cannot be written": "sys.stdout = open('/dev/full', 'w'); print('lost')",
    "words that cannot be written at exit": "os.close(1); os.open('/dev/full', os.O_WRONLY)",
    "a thread that stays": "import threading, time\nthreading.Timer(0.2, print, ['late']).start()",
}


def told(python: str, *words: str, cwd: Path, **variables: str) -> tuple[int, str, list[str]]:
    """Exit code, stdout and, of what stderr says beside a traceback's frames, all lines."""
    done = subprocess.run(
        [python, *words], cwd=cwd, env=ranks.environment(MARK="here", **variables), umask=0o27,
        input="asked", capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    errors = [line for line in done.stderr.splitlines() if not line.startswith("  ")]
    return done.returncode, done.stdout, errors


@pytest.mark.parametrize("ending", PROGRAMS)
def test_a_program_ends_as_under_python(ending: str, tmp_path: Path) -> None:
    code = f"import os, sys\n{TALKS}\nsys.stdout.flush()\n{PROGRAMS[ending]}"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "program.py").write_text(code)
    for words in (["folder/program.py", "a"], ["-m", "folder.program", "a"], ["-u", "-c", code]):
        expected = told(sys.executable, *words, cwd=tmp_path)
        assert "here" in expected[1] and str(tmp_path) in expected[1]
        assert told(ranks.warm(), *words, cwd=tmp_path) == expected


def test_the_packages_are_there_unless_they_would_have_read_other_variables(tmp_path: Path) -> None:
    code = "import sys; print('torch' in sys.modules, 'training' in sys.modules)"
    assert told(ranks.warm(), "-c", code, cwd=tmp_path)[1] == "True True\n"
    for early in ({"PYTHONHASHSEED": "1"}, {"OMP_NUM_THREADS": "2"}, {"TORCH_LOGS": "+all"}):
        assert told(ranks.warm(), "-c", code, cwd=tmp_path, **early)[1] == "False False\n"
    assert told(ranks.warm(), "-W", "ignore", "-c", code, cwd=tmp_path)[1] == "False False\n"


def test_a_fork_ends_without_copying_all_that_it_was_forked_with(tmp_path: Path) -> None:
    """To take them apart it copied 54 % of the server's pages; now 6 %, 0.3 s less."""
    program = "import os; print(os.getppid())"
    server = Path("/proc", told(ranks.warm(), "-c", program, cwd=tmp_path)[1].strip())

    def num_copied() -> int:
        """Pages that came with a fault in all children that have ended."""
        return int((server / "stat").read_text().rpartition(")")[2].split()[8])

    before = num_copied()
    told(ranks.warm(), "-c", program, cwd=tmp_path)
    num_resident = int((server / "statm").read_text().split()[1])
    assert num_copied() - before < 0.12 * num_resident


def assert_shared_is_computed(code: str, folder: Path) -> None:
    """Of four orders the last is the first again; each is printed as it is shared, and computed."""
    pytest.importorskip("megatron.core")
    for _ in range(2):  # the second fork reads what the first one has computed
        found = told(ranks.warm(), "-c", code, cwd=folder)[1].splitlines()
        assert len(found) == 8 and found[::2] == found[1::2]
        assert len({*found}) == 3


def test_the_order_of_made_up_data_is_that_of_megatron_core(tmp_path: Path) -> None:
    """Also when an earlier fork has shuffled as many with the same seed, and with another one."""
    code = "import numpy; from megatron.core.datasets.gpt_dataset import _build_shuffle_index\n"
    code += "for size, seed in ((200_000, 1), (150_000, 1), (200_000, 2), (200_000, 1)):\n"
    code += "    for shuffle in (_build_shuffle_index, _build_shuffle_index.__wrapped__):\n"
    code += "        state = numpy.random.RandomState(seed)\n"
    code += "        order = shuffle(size, 200_000, state)\n"
    code += "        print(hash(order.tobytes()), order.dtype, state.random())"
    assert_shared_is_computed(code, tmp_path)


def test_where_made_up_samples_begin_is_what_megatron_core_computes(tmp_path: Path) -> None:
    """Also when an earlier fork has computed as many of other documents."""
    code = "import numpy; from megatron.core.datasets.helpers import build_sample_idx\n"
    code += "for seed, length in ((1, 32), (2, 32), (1, 64), (1, 32)):\n"
    code += "    documents = numpy.arange(60_000, dtype=numpy.int32)\n"
    code += "    sizes = numpy.random.RandomState(seed).randint(1, 99, 60_000, numpy.int32)\n"
    code += "    for build in (build_sample_idx, build_sample_idx.__wrapped__):\n"
    code += "        found = build(sizes, documents, length, 1, int(sizes.sum()))\n"
    code += "        print(hash(found.tobytes()), found.dtype, found.shape, found.flags.writeable)"
    assert_shared_is_computed(code, tmp_path)


def test_a_fork_joins_the_network_and_the_host_name_of_its_client(tmp_path: Path) -> None:
    code = "import os, socket, sys; print('torch' in sys.modules, socket.gethostname(), "
    code += "*map(os.readlink, ('/proc/self/ns/net', '/proc/self/ns/mnt', '/proc/self/cwd')))"
    apart = ["unshare", "--net", "--uts", "--mount"]
    probe = [*apart, "hostname", "elsewhere"]
    if not shutil.which("unshare") or subprocess.run(probe, check=False).returncode:
        pytest.skip("no namespaces here")
    script = f"hostname elsewhere; '{sys.executable}' -c \"{code}\"; '{ranks.warm()}' -c \"{code}\""
    new, forked = told(*apart, "bash", "-c", script, cwd=tmp_path)[1].splitlines()
    assert new.startswith("False elsewhere net:")
    assert forked == new.replace("False", "True")


def test_what_a_package_leaves_in_our_environment_does_not_make_later_ranks_start_cold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of Megatron-Core in this process does so."""
    monkeypatch.setenv("NVTE_FLASH_ATTN", "1")
    code = "import os, sys; print('torch' in sys.modules, 'NVTE_FLASH_ATTN' in os.environ)"
    assert told(ranks.warm(), "-c", code, cwd=tmp_path)[1] == "True False\n"


def test_what_a_rank_with_a_model_starts_is_forked(tmp_path: Path) -> None:
    """A helper, to whom Megatron-Core's variables are handed on."""
    code = "import os, sys; print('torch' in sys.modules, os.environ.get('NVTE_FUSED_ATTN'))"
    starts = "import os, subprocess, sys; os.environ['NVTE_FUSED_ATTN'] = '1'; "
    starts += f"subprocess.run([sys.executable, '-c', {code!r}])"
    assert told(ranks.warm(), "-c", starts, cwd=tmp_path)[1] == "True 1\n"


def test_a_command_is_forked_without_any_of_our_variables(tmp_path: Path) -> None:
    code = "import os, sys; print('pyarrow' in sys.modules, sorted(os.environ.items()))"
    forked, new = (
        subprocess.run([python, "-c", code], env=ranks.COMMAND, capture_output=True, text=True)
        for python in (ranks.warm_command(), sys.executable)
    )
    assert forked.stdout == new.stdout.replace("False", "True", 1)
    assert forked.stdout.startswith("True ")


@pytest.mark.parametrize("other", ["detect", "training"])
def test_a_fork_has_our_packages_where_it_would_import_them_from(
    other: str, tmp_path: Path
) -> None:
    """A command has those that read traces, a rank has the trainer.

    Another checkout's are another checkout's, alone or together with a part of this one's.
    """
    code = "import sys; print('megascan.schema' in sys.modules); "
    code += f"import megascan, {other}; "
    code += f"print(megascan.__file__, {other}.__file__, 'megascan.errors' in sys.modules)"
    python = ranks.warm_command() if other == "detect" else ranks.warm()
    variables = ranks.COMMAND if other == "detect" else ranks.environment()

    def told_in(folder: Path, path: Path) -> list[str]:
        done = subprocess.run(
            [python, "-c", code], env={**variables, "PYTHONPATH": str(path)}, cwd=folder,
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout.split()

    ours = [str(ranks.ROOT / name / "__init__.py") for name in ("megascan", other)]
    assert told_in(tmp_path, ranks.ROOT) == ["True", *ours, "True"]
    assert told_in(ranks.ROOT, tmp_path) == ["True", *ours, "True"]
    theirs = tmp_path / "megascan" / "__init__.py"
    theirs.parent.mkdir()
    theirs.touch()
    assert told_in(tmp_path, ranks.ROOT) == ["False", str(theirs), ours[1], "False"]
    assert told_in(ranks.ROOT.parent, tmp_path) == ["False", str(theirs), ours[1], "False"], (
        "is another checkout installed in this environment? pip install -e . installs this one"
    )


def test_a_fork_has_one_thread_and_random_numbers_of_its_own(tmp_path: Path) -> None:
    code = "import os, random, numpy; print(len(os.listdir('/proc/self/task')));"
    code += "print(random.random(), numpy.random.random())"
    first, second = (told(ranks.warm(), "-c", code, cwd=tmp_path)[1].split() for _ in range(2))
    assert first[0] == second[0] == "1"
    assert not {*first[1:]} & {*second[1:]}


WAITS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print(os.getpid(), signal.getsignal(signal.SIGINT) == signal.SIG_IGN, flush=True)
for _ in range(600):
    time.sleep(0.1)  # one long sleep would miss a signal that comes just before it
"""


@contextlib.contextmanager
def waiting() -> Iterator[tuple[subprocess.Popen[str], int, bool]]:
    """Start a program that waits; yield its client, its id, and whether it ignores SIGINT."""
    with subprocess.Popen(
        [ranks.warm(), "-c", WAITS], env=ranks.environment(), stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    ) as client:  # fmt: skip
        try:
            assert client.stdout is not None
            pid, ignores = client.stdout.readline().split()
            yield client, int(pid), ignores == "True"
        finally:
            client.kill()


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signals_reach_the_program_and_it_ends_with_the_client(number: signal.Signals) -> None:
    with waiting() as (client, pid, ignores):
        assert pid != client.pid and not ignores
        client.send_signal(number)
        assert client.wait(30) == (5 if number == signal.SIGTERM else -number)
        assert client.stdout is not None
        assert client.stdout.read() == ""  # which the program has held until it ended
        end = time.monotonic() + 30
        while Path(f"/proc/{pid}").exists():  # the server collects it
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.mark.usefixtures("interruptible")  # puts back what is set here
def test_a_signal_that_is_ignored_here_is_ignored_there() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with waiting() as (client, _, ignores):
        assert ignores
        client.send_signal(signal.SIGINT)
        time.sleep(0.1)
        client.send_signal(signal.SIGTERM)
        assert client.wait(30) == 5


def test_a_signal_just_before_the_client_waits_is_sent_on(tmp_path: Path) -> None:
    """Between the signal and the wait not a single line of Python runs."""
    signalled = "[*map(operator.call, (functools.partial(kill, os.getpid(), 15), "
    signalled += "functools.partial(select.select, [server], [], [])))]"
    done = subprocess.run(
        [client_with(tmp_path, signalled), "-c", "import time; time.sleep(600)"],
        env=ranks.environment(), timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGTERM


def test_a_signal_before_the_client_runs_the_program_itself_is_not_lost(tmp_path: Path) -> None:
    done = subprocess.run(
        [client_with(tmp_path, "kill(os.getpid(), 15); select.select([server], [], [])"),
         "-W", "ignore", "-c", "import time; time.sleep(600)"],
        env=ranks.environment(), timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGTERM


def client_with(folder: Path, waiting: str) -> Path:
    """The client with another line in place of its wait; `kill` has no handler run at once.

    What the line needs is imported first: the server counts the files that a client has open.
    """
    early, found, late = Path(ranks.warm()).read_text().partition("select.select([server], [], [])")
    assert found
    first, imports, rest = early.partition("import os, ")
    program = folder / "python"
    needs = "import ctypes, functools, operator; kill = ctypes.CDLL(None).kill\n"
    program.write_text(first + needs + imports + rest + waiting + late)
    program.chmod(0o755)
    return program
