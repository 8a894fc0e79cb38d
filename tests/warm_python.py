"""A Python that has imported the heavy packages already: it forks the ranks that tests start.

A rank spends 5 to 8 CPU seconds on `import torch, megatron.core` before its first line runs, and a
test starts up to nine of them. The server here imports them once and forks a child per program:

    a test ── Popen ──> client -m torch.distributed.run … ──socket: streams──> server
                          │                                                     │ fork
                          │  <── exit code ── signals ──>                       └─> child
                          └─> ends as the child has ended

The client (`CLIENT`) stands for the child: it takes its signals, dies as it dies, and a client that
is killed takes the child along. What the child inherits (words, variables, folder, limits, cores,
ignored signals) the server reads from the client's /proc. In a child, `sys.executable` is the
client, so that what a launcher starts is forked, too. Our own packages are imported before the fork
as well: a program whose path leads to others of these names imports its own. What a fork would run
differently is run anew by the client (`Asked.differs`).

What differs all the same: children of one server have one hash seed, the server is their parent,
/proc/PID/cmdline names it, and what was imported before the fork is not taken apart at the end.
Tests of such things start the real interpreter.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import functools
import gc
import hashlib
import importlib
import importlib.machinery
import io
import os
import pickle
import re
import resource
import runpy
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

COMMANDS = (
    "numpy", "orjson", "pyarrow.compute", "pyarrow.json", "pandas", "pyarrow.pandas_compat",
    "scipy.sparse", "scipy.special", "isal.isal_zlib", "jinja2", "concurrent.futures.process",
    "megascan.cli.aggregate", "megascan.cli.detect", "megascan.cli.diff", "megascan.cli.main",
    "megascan.cli.path", "megascan.cli.plan", "megascan.cli.report", "megascan.cli.simulate",
    "megascan.cli.watch", "megascan.cli.whatif", "megascan.reader", "megascan.watch.watcher",
    "aggregate.merge", "aggregate.summary", "detect.comparison.compare", "detect.detector",
    "detect.page.contents", "detect.text", "detect.whatif.path", "detect.whatif.render",
    "detect.whatif.slowness", "detect.whatif.traced",
)  # fmt: skip
RANKS = (
    *COMMANDS, "psutil", "torch", "torch.distributed.run", "megatron.core",
    "megatron.core.datasets.blended_megatron_dataset_builder", "megatron.core.datasets.gpt_dataset",
    "megatron.core.models.gpt", "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.datasets.helpers", "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader",
    "multiprocessing.queues", "torch.profiler._cupti_monitor",
    "megascan.callbacks", "megascan.instrument.table", "megascan.instrument.starting",
    "megascan.launch", "megascan.probes", "megascope.probe", "megascope.recorder",
    "megascope.server", "megascope.session", "training.checkpoint", "training.convert",
    "training.cpu_backend", "training.data.datasets", "training.generate", "training.helper",
    "training.hf.weights", "training.job", "training.pipeline.dynamic", "training.pipeline.helped",
    "training.pipeline.running", "training.preprocess_data", "training.serve",
)  # fmt: skip
"""Packages to import before the fork, where they are installed: for `megascan …`, and for ranks.

A command spends half of its time on our own modules, those with dataclasses above all, and so does
a rank that trains one iteration.
pandas is none of ours, but where it is installed pyarrow imports it with the first table. Ranks
have what commands have, as whoever follows a guide calls both by one interpreter.
"""

ROOT = Path(__file__).resolve().parents[1]
OURS = ("megascan", "megascope", "aggregate", "detect", "training")
"""Packages of this checkout."""

READ_AT_START = (
    "PYTHON", "LC_", "LANG", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "TORCH_", "PYTORCH_", "NVTE_",
    "MCORE_", "MEGATRON_", "HF_", "TRANSFORMERS_", "LD_", "MALLOC_", "GLIBC_",
)  # fmt: skip
"""Beginnings of variables that the interpreter or a package reads while it starts."""
READ_LATER = (
    "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONWARNINGS", "TORCH_NCCL_",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
)  # fmt: skip
"""Of those, what a child can still be given."""
READ_WITH_A_MODEL = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
"""Those that Megatron-Core writes for the attention of a model that it builds.

Nothing that is imported before the fork has read them, so that what such a rank starts, a helper
for one, can be forked, too.
"""
TAKEN_APART = frozenset({
    "__main__", "builtins", "sys", "megatron.core.parallel_state",
    "torch.distributed.distributed_c10d",
})  # fmt: skip
"""Modules that Python clears at the end of a child even though they were preloaded: those that hold
what a program makes, process groups above all, and those that it needs to the end."""
JOINED = ("net", "uts", "mnt")
"""Namespaces that root's child takes over from its client: those of a machine in a test."""
MANY_SAMPLES, MANY_DOCUMENTS = 100_000, 50_000
"""From here on an order is rather read than computed again."""
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
ANEW = 1 << 16
"""The answer to a client that has to run the program itself."""

CLIENT = """#!{python} -IS
import os, resource, select, signal, socket, struct, sys
names = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTERM", "SIGCONT")
numbers = [getattr(signal, name) for name in names]
numbers = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
code, got = {anew}, []
mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
with socket.socket(socket.AF_UNIX) as server:
    try:
        server.connect({place!r})
        socket.send_fds(server, [b"?"], [0, 1, 2])
        server.setblocking(False)
        signal.set_wakeup_fd(server.fileno())
        for number in numbers:
            signal.signal(number, lambda number, _: got.append(number))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        select.select([server], [], [])
        answer = server.recv(4)
        code = struct.unpack("!i", answer)[0] if len(answer) == 4 else -signal.SIGKILL
    except OSError:
        pass
    signal.set_wakeup_fd(-1)
for number in numbers:
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, mask)
if code == {anew}:
    for number in got:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
if code < 0:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""
"""The client, which stands for the child once it has asked for it.

A signal that comes earlier is blocked until then. A later one writes its number to the server by
itself (`set_wakeup_fd`): a handler in Python would run only after the wait for the answer, where
the signal comes between the last line before that wait and the wait. A client that has to run the
program itself takes what has come until then as an interpreter that starts does.
"""


def surroundings(pid: int | str) -> list[str]:
    """Return the control group of a process, and its namespaces but those that a child can join."""
    spaces = sorted(Path(f"/proc/{pid}/ns").iterdir())
    if os.geteuid() == 0:
        spaces = [space for space in spaces if space.name not in JOINED]
    return [*map(os.readlink, spaces), Path(f"/proc/{pid}/cgroup").read_text()]


def join(pid: int) -> None:
    """Move this process to the mounts, the network and the host name of another one."""
    for name in JOINED:
        theirs, ours = (Path("/proc", of, "ns", name) for of in (str(pid), "self"))
        if theirs.readlink() != ours.readlink():
            with theirs.open() as space:
                if ctypes.CDLL(None).setns(space.fileno(), 0):
                    raise OSError(f"cannot join the namespace {theirs}")


def strings(pid: int | str, name: str) -> list[str]:
    """Return the words or the variables that a process was started with."""
    return os.fsdecode(Path(f"/proc/{pid}/{name}").read_bytes()).split("\0")[:-1]


def variables_of(pid: int | str) -> dict[str, str]:
    """Return the variables that a process was given, without what it has changed since."""
    return dict(line.split("=", 1) for line in strings(pid, "environ"))


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A program that a client wants to be run as if in its own process."""

    words: list[str]
    """After the interpreter's name."""
    variables: dict[str, str]
    folder: str
    pid: int
    streams: list[int]
    num_files: int
    """That the client has open."""

    @classmethod
    def by(cls, client: socket.socket) -> Asked:
        """Return what a client asks for; it stands in its /proc, but for the streams."""
        _, streams, _, _ = socket.recv_fds(client, 1, 3)
        peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, _, _ = struct.unpack("3i", peer)
        of_process = Path(f"/proc/{pid}")
        return cls(
            words=strings(pid, "cmdline")[3:], variables=variables_of(pid), pid=pid,
            folder=str((of_process / "cwd").readlink()), streams=streams,
            num_files=len([*(of_process / "fd").iterdir()]),
        )  # fmt: skip

    def differs(self) -> bool:
        """Whether a fork of this process would run the program differently from a new one."""
        first = next((word for word in self.words if word != "-u"), "-")
        return (
            (first.startswith("-") and first not in ("-m", "-c"))
            or not (first.startswith("-") or Path(self.folder, first).is_file())
            or before_a_model(self.variables) != before_a_model(variables_of("self"))
            or surroundings(self.pid) != surroundings("self")
            or any(map(os.isatty, self.streams))
            or self.num_files != len(self.streams) + 1  # more are inherited, by a new process alone
        )

    def inherit(self) -> None:
        """Give this process, a fresh child, what it would have as the client's program."""
        os.setsid()
        for stream, number in zip(self.streams, (0, 1, 2), strict=True):
            os.dup2(stream, number)
            os.close(stream)
        status = Path(f"/proc/{self.pid}/status").read_text()
        os.umask(int(re.search(r"Umask:\s*(\d+)", status)[1], 8))
        join(self.pid)
        ignored = int(re.search(r"SigIgn:\s*(\w+)", status)[1], 16)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            is_ignored = ignored >> (number - 1) & 1
            signal.signal(number, signal.SIG_IGN if is_ignored else usual)
        for limit in LIMITS:
            resource.setrlimit(limit, resource.prlimit(self.pid, limit))
        os.sched_setaffinity(0, os.sched_getaffinity(self.pid))
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, self.pid))
        os.chdir(self.folder)
        locale = {"LC_CTYPE": os.environ["LC_CTYPE"]} if "LC_CTYPE" in os.environ else {}
        os.environ.clear()
        os.environ.update(locale | self.variables)  # Python sets it where the locale is C


def early(variables: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """Return those variables that are read before the fork."""
    return {
        name: value
        for name, value in variables.items()
        if name.startswith(READ_AT_START) and not name.startswith(READ_LATER)
    }


def before_a_model(variables: dict[str, str]) -> dict[str, str]:
    """Return those of them that the fork of a rank needs to have been given."""
    return {
        name: value for name, value in early(variables).items() if name not in READ_WITH_A_MODEL
    }


class Server:
    """Forks children for clients and tells each client how its child has ended."""

    def __init__(self, listening: socket.socket, folder: str) -> None:
        self._listening, self._folder = listening, folder
        self._ready = selectors.DefaultSelector()
        self._ready.register(self._listening, selectors.EVENT_READ, self._accept)
        self._ready.register(0, selectors.EVENT_READ, self._end)
        self._children: dict[int, int] = {}
        """The children's process ids by their descriptors."""
        self.asked: Asked | None = None
        """In a child: what it has to run."""

    def serve(self) -> Asked:
        """Fork a child for each client; return only in a child."""
        while self.asked is None:
            for key, _ in self._ready.select():
                key.data(key.fileobj)
                if self.asked is not None:
                    break
        return self.asked

    def _accept(self, listening: socket.socket) -> None:
        client, _ = listening.accept()
        try:
            asked = Asked.by(client)
            differs = asked.differs()
        except (OSError, ValueError):  # a client that was killed meanwhile
            client.close()
            return
        pid = -1 if differs else os.fork()
        if pid == 0:
            self._ready.close()
            for other in (listening, client):
                other.close()
            for descriptor in self._children:
                os.close(descriptor)
            self.asked = asked
            return
        for stream in asked.streams:
            os.close(stream)
        if differs:
            self._answer(client, ANEW)
            return
        descriptor = os.pidfd_open(pid)
        self._children[descriptor] = pid
        self._ready.register(
            descriptor, selectors.EVENT_READ, lambda _: self._ended(descriptor, client)
        )
        self._ready.register(
            client, selectors.EVENT_READ, lambda _: self._forward(client, descriptor)
        )

    def _forward(self, client: socket.socket, descriptor: int) -> None:
        """Send a child the signals that its client got; a client that is gone was killed."""
        numbers = client.recv(64)
        for number in numbers or (signal.SIGKILL,):
            signal.pidfd_send_signal(descriptor, number)
        if not numbers:
            self._ready.unregister(client)

    def _ended(self, descriptor: int, client: socket.socket) -> None:
        _, status = os.waitpid(self._children.pop(descriptor), 0)
        self._ready.unregister(descriptor)
        os.close(descriptor)
        with contextlib.suppress(KeyError):
            self._ready.unregister(client)
        self._answer(client, os.waitstatus_to_exitcode(status))

    def _answer(self, client: socket.socket, code: int) -> None:
        with contextlib.suppress(OSError), client:
            client.sendall(struct.pack("!i", code))

    def _end(self, _: int) -> None:
        """Whoever started this server is gone: so are the children."""
        for descriptor in self._children:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)


def leave_libraries_be() -> None:
    """Let this process end without taking apart the libraries that it was forked with.

    Their destructors, those of torch's operators above all, copy pages and last a quarter of a
    second. Handlers of the C library's exit run last in, first out: what Python and what is loaded
    from here on leave behind is ended as ever, then C's streams are written out, then comes _exit.
    """
    c_library = ctypes.CDLL(None)
    for handler in (c_library._exit, c_library.fcloseall):
        c_library.on_exit(handler, None)


class End:
    """Ends this process once Python has cleared the modules of a program, when it is let go.

    Python would then look at every string and class that it was forked with, and copy their pages.
    """

    def __init__(self) -> None:
        self.code: int | None = None  # until it is known
        # keeps the interpreter's lock: what torch's libraries leave behind holds Python objects
        self._sys, self._exit = sys, ctypes.PyDLL(None).exit

    def __del__(self) -> None:
        """Leave it to Python where the code is not known, or what was printed cannot be written."""
        if self.code is not None and self._is_written_out():
            self._exit(self.code)

    def comes_with(self, code: object) -> None:
        """Know the exit code by what `sys.exit` was called with."""
        if self._is_written_out():
            self.code = code if isinstance(code, int) else int(code is not None)

    def _is_written_out(self) -> bool:
        try:
            for stream in (self._sys.stdout, self._sys.stderr):
                if stream is not None and not stream.closed:
                    stream.flush()
        except (OSError, ValueError):
            return False
        return True


def run_to_end(words: list[str], client: str, found_here: list[str]) -> None:
    """Become a program, and end as it does."""
    sys._end = End()  # Python clears this module after all others, and such a name first
    try:
        become(words, client, found_here)
    except KeyboardInterrupt:
        raise  # the process dies of the signal
    except SystemExit as stop:
        sys._end.comes_with(stop.code)
        raise
    except BaseException:
        sys._end.comes_with(1)
        raise
    sys._end.comes_with(0)


def become(words: list[str], client: str, found_here: list[str]) -> None:
    """Run a program in this process, a fresh child, as Python does with these words."""
    sys.executable, sys.orig_argv = client, [client, *words]
    if os.environ.get("PYTHONUNBUFFERED") or words[0] == "-u":
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(
                io.FileIO(number, "w"), stream.encoding, stream.errors, write_through=True
            )
            for number, stream in ((1, sys.stdout), (2, sys.stderr))
        )
    kind, *rest = words[1:] if words[0] == "-u" else words
    named = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = builtins
    for action in filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")):
        warnings.simplefilter(action)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if kind == "-m":
        sys.argv = ["-m", *rest[1:]]
        sys.path[:] = [str(Path.cwd()), *named, *found_here]
        forget_those_of_elsewhere()
        if not hasattr(sys.modules.get(rest[0]), "__path__"):
            sys.modules.pop(rest[0], None)
        runpy._run_module_as_main(rest[0])
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path[:] = ["", *named, *found_here]
        forget_those_of_elsewhere()
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        sys.argv = [kind, *rest]
        sys.path[:] = [str(Path(kind).resolve().parent), *named, *found_here]
        forget_those_of_elsewhere()
        main.__file__ = kind
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", kind)
        exec(compile(Path(kind).read_bytes(), kind, "exec"), vars(main))


def forget_those_of_elsewhere() -> None:
    """Have a program import our packages itself, unless its path leads to those that are here: also
    by links, as from the checkouts that guides are followed in.
    """
    here = {name: sys.modules[name].__file__ for name in OURS if name in sys.modules}
    found = {name: importlib.machinery.PathFinder.find_spec(name) for name in here}
    if any(
        spec is None or spec.origin is None or os.path.realpath(spec.origin) != here[name]
        for name, spec in found.items()
    ):
        for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
            del sys.modules[name]


def preload(packages: Sequence[str]) -> None:
    """Import the packages; nothing of them may run in a thread of its own.

    A child does not clear their modules when it ends, which would copy all their pages: Python
    clears what stands in `sys.modules`, and collects no frozen objects. The callback that takes
    them out is registered first, so that it is called last. Nor does it take torch's operators out
    of their table, which finalizers of the packages do one by one.
    """
    gc.disable()  # a fifth of the time that it takes
    spared: dict[str, object] = {}
    atexit.register(lambda: [sys.modules.pop(name, None) for name in spared])
    sys.path.insert(0, str(ROOT))
    for name in packages:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    sys.path.remove(str(ROOT))
    for name, module in sys.modules.items():
        if name not in TAKEN_APART and name.partition(".")[0] not in OURS:
            spared[name] = module
    spared[""] = spared  # so that it outlives the callback
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False
    gc.collect()
    gc.freeze()  # else a child copies and collects all these objects when it ends: one second
    gc.enable()


def share_orders(folder: Path) -> None:
    """Have the order of made-up data, once computed, read by all other ranks from a folder.

    Megatron-Core's hundred thousand documents are two million short samples. Every rank of every
    job finds where they begin and shuffles them, a third of a CPU second, and most of them alike.
    """
    datasets = sys.modules.get("megatron.core.datasets.gpt_dataset")
    helpers = sys.modules.get("megatron.core.datasets.helpers")
    if datasets is None or helpers is None:
        return
    shuffle, cut = datasets._build_shuffle_index, helpers.build_sample_idx

    @functools.wraps(shuffle)
    def shuffled(first: int, whole: int, state: object) -> object:
        if whole < MANY_SAMPLES:
            return shuffle(first, whole, state)

        def anew() -> tuple[object, object]:
            order = shuffle(first, whole, state)
            return order, state.get_state()

        order, after = shared(folder, ("shuffle", first, whole, state.get_state()), anew)
        state.set_state(after)
        return order

    @functools.wraps(cut)
    def samples(sizes: object, documents: object, *counts: object) -> object:
        if len(documents) < MANY_DOCUMENTS:
            return cut(sizes, documents, *counts)
        given = ("samples", sizes.tobytes(), documents.tobytes(), counts)
        return shared(folder, given, lambda: (cut(sizes, documents, *counts), None))[0]

    datasets._build_shuffle_index, helpers.build_sample_idx = shuffled, samples


def shared(
    folder: Path, given: object, anew: Callable[[], tuple[object, object]]
) -> tuple[object, object]:
    """Return an array and what goes with it: those that follow from what is given, or made anew.

    The array is that of a file, whose pages all ranks share until one writes into its own.
    """
    numpy = sys.modules["numpy"]
    place = folder / hashlib.sha256(pickle.dumps(given, protocol=5)).hexdigest()
    of_array, of_others = place.with_suffix(".npy"), place.with_suffix(".pickle")
    if of_array.exists():
        array = numpy.asarray(numpy.load(of_array, mmap_mode="c"))
        return array, pickle.loads(of_others.read_bytes())
    array, others = anew()
    part = place.with_suffix(f".{os.getpid()}.npy")
    part.write_bytes(pickle.dumps(others))
    part.rename(of_others)
    numpy.save(part, array)
    part.rename(of_array)
    return array, others


def start(
    packages: Sequence[str], variables: dict[str, str]
) -> tuple[subprocess.Popen[bytes], str]:
    """Start a server; return it, and the client as a program that is called as Python is.

    It can fork what is asked for with the same early variables (`READ_AT_START`) as these. It ends,
    with what it runs, when its stdin is closed: at the latest with this process.
    """
    folder = Path(tempfile.mkdtemp(prefix="warm-python-"))
    place, program = folder / "socket", folder / "python"
    program.write_text(CLIENT.format(python=sys.executable, place=str(place), anew=ANEW))
    program.chmod(0o755)
    variables = {name: value for name, value in variables.items() if name != "PYTHONPATH"}
    with socket.socket(socket.AF_UNIX) as listening, (folder / "log").open("w") as log:
        listening.bind(str(place))
        listening.listen(64)
        server = subprocess.Popen(
            [sys.executable, __file__, str(listening.fileno()), program, *packages],
            pass_fds=[listening.fileno()], env=variables, cwd="/", start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log,
        )  # fmt: skip
    return server, str(program)


def main(number: str, client: str, *packages: str) -> None:
    """Be the server, and then each of its children."""
    found_here = sys.path[1:]  # without this file's folder
    preload(packages)
    share_orders(Path(client).parent)
    asked = Server(socket.socket(fileno=int(number)), str(Path(client).parent)).serve()
    asked.inherit()
    leave_libraries_be()
    run_to_end(asked.words, client, found_here)


if __name__ == "__main__":
    main(*sys.argv[1:])
