"""Several hosts of one machine whose NICs are slow in truth, for `benchmarks.wires`.

A host is a network namespace with a host name of its own. Its NIC is one end of a veth; the other
end is a port of a bridge that has a namespace of its own. What a host sends is shaped in its own
namespace, what it receives where the bridge sends it, so that both directions have their rates.
A namespace more, which no rank runs in, is for traffic that is not the job's.

    host 1 ── NIC ──┐
    host 2 ── NIC ──┤ bridge        needs root, ip, tc, and the kernel's tbf, htb and u32
    foreign ─ NIC ──┘

Everything is gone once the network is left, the processes in it as well.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType

from benchmarks.jobs import ROOT

NIC, BRIDGE = "eth0", "bridge"
BURST_BYTES, QUEUE_BYTES = 128 << 10, 4 << 20
"""Of a shaped NIC: what it may send at once (two packets as large as the kernel joins them), and
what may wait, which is more than the ranks of a job ever have on their way."""
STREAM_PORT = 5201
END_S = 10.0
"""For processes of a host to end by themselves once they are told to."""


class NoHostsHereError(Exception):
    """This machine does not let us make hosts; the text is one sentence."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """One of the hosts, counted from 0."""

    number: int
    name: str
    namespace: str
    address: str

    @property
    def port(self) -> str:
        """Name the bridge's end of its NIC's wire."""
        return f"port{self.number}"

    @property
    def prefix(self) -> tuple[str, ...]:
        """Return the words before a command that is to run on this host."""
        named = f'hostname {self.name} && exec "$@"'
        return (
            *("ip", "netns", "exec", self.namespace, "unshare", "--uts"),
            *("bash", "-c", named, "bash"),
        )


class Network:
    """Hosts on a bridge; make them by `with`."""

    def __init__(self, num_hosts: int, rate_mbit: float) -> None:
        tag = f"wires{os.getpid()}"
        self._switch = f"{tag}-switch"
        self.rate_mbit = rate_mbit
        every = [
            Host(
                number=number,
                name=f"host-{number}" if number < num_hosts else "foreign",
                namespace=f"{tag}-{number}",
                address=f"10.78.0.{number + 1}",
            )
            for number in range(num_hosts + 1)
        ]
        self.hosts, self.foreign = tuple(every[:-1]), every[-1]

    def __enter__(self) -> Network:
        """Make the hosts, all at full rate; raise NoHostsHereError where that cannot be."""
        try:
            self._make()
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
            raise NoHostsHereError(
                "hosts of their own cannot be made here (it takes root, ip and tc, network "
                f"namespaces, veth, a bridge and tbf): {said}"
            ) from error
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove everything."""
        self.close()

    def _make(self) -> None:
        for tool in ("ip", "tc", "unshare"):
            if shutil.which(tool) is None:
                raise FileNotFoundError(f"there is no {tool}")
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", BRIDGE, "type", "bridge")
        _ip("-n", self._switch, "link", "set", BRIDGE, "up")
        for host in (*self.hosts, self.foreign):
            self._add(host)
            _run(*host.prefix, "true")
        self.reset()

    def _add(self, host: Host) -> None:
        _ip("netns", "add", host.namespace)
        _ip(
            *("link", "add", NIC, "netns", host.namespace, "type", "veth"),
            *("peer", "name", host.port, "netns", self._switch),
        )
        _ip("-n", self._switch, "link", "set", host.port, "master", BRIDGE, "up")
        _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", NIC)
        for device in (NIC, "lo"):
            _ip("-n", host.namespace, "link", "set", device, "up")

    def close(self) -> None:
        """End what still runs on the hosts and remove them."""
        if shutil.which("ip") is None:
            return
        for namespace in (
            *(host.namespace for host in (*self.hosts, self.foreign)),
            self._switch,
        ):
            pids = subprocess.run(
                ["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False
            )
            for pid in pids.stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)

    def reset(self) -> None:
        """Give every NIC the full rate again."""
        for host in (*self.hosts, self.foreign):
            self.shape(host)

    def shape(self, host: Host, *, egress_ratio: float = 1.0, ingress_ratio: float = 1.0) -> None:
        """Set the rates of a NIC, as shares of the full rate."""
        self._limit(host.namespace, NIC, egress_ratio)
        self._limit(self._switch, host.port, ingress_ratio)

    def _limit(self, namespace: str, device: str, ratio: float) -> None:
        _tc(
            *(namespace, "replace", "dev", device, "root", "handle", "1:", "tbf"),
            *("rate", f"{self.rate_mbit * ratio:.3f}mbit"),
            *("burst", str(BURST_BYTES), "limit", str(QUEUE_BYTES)),
        )

    def slow_connection(self, one: Host, other: Host, ratio: float) -> None:
        """Give what two hosts send each other a share of the rate, and the rest what it had."""
        for host, peer in ((one, other), (other, one)):
            self._slow_way(host, peer, ratio)

    def _slow_way(self, host: Host, peer: Host, ratio: float) -> None:
        where, device = host.namespace, ("dev", NIC)
        full, slow = (f"{self.rate_mbit * share:.3f}mbit" for share in (1.0, ratio))
        burst = ("burst", str(BURST_BYTES), "cburst", str(BURST_BYTES))
        _tc(where, "del", *device, "root")
        _tc(where, "add", *device, "root", "handle", "1:", "htb", "default", "10")
        for kind, rate in (("10", full), ("20", slow)):
            _tc(
                *(where, "add", *device, "parent", "1:", "classid", f"1:{kind}"),
                *("htb", "rate", rate, *burst, "quantum", "65536"),
                kind="class",
            )
            _tc(
                *(where, "add", *device, "parent", f"1:{kind}", "handle", f"{kind}:"),
                *("bfifo", "limit", str(QUEUE_BYTES)),
            )
        _tc(
            *(where, "add", *device, "parent", "1:", "protocol", "ip", "prio", "1", "u32"),
            *("match", "ip", "dst", f"{peer.address}/32", "flowid", "1:20"),
            kind="filter",
        )

    def restore_connection(self, *hosts: Host) -> None:
        """Undo `slow_connection`."""
        for host in hosts:
            _tc(host.namespace, "del", "dev", NIC, "root")
            self.shape(host)

    @contextmanager
    def foreign_traffic(self, host: Host, ratio: float) -> Iterator[None]:
        """Have a TCP stream each way between a host and the foreign one, of a share of the rate."""
        self.shape(self.foreign, egress_ratio=ratio, ingress_ratio=ratio)
        with (
            _process(self.foreign, "listen", self.foreign.address),
            _process(host, "connect", self.foreign.address),
        ):
            yield


@contextmanager
def _process(host: Host, *words: str) -> Iterator[None]:
    """Run an end of a stream on a host."""
    process = subprocess.Popen(
        [*host.prefix, sys.executable, "-m", "benchmarks.wire_stream", *words, str(STREAM_PORT)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        if process.stdout is None or process.stdout.readline() != "ready\n":
            raise SystemExit(f"the stream's {words[0]}ing end did not start")
        yield
    finally:
        end((process,))


def end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Tell processes to end, and kill those that do not."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ip(*words: str) -> None:
    _run("ip", *words)


def _tc(namespace: str, action: str, *words: str, kind: str = "qdisc") -> None:
    _run("tc", "-n", namespace, kind, action, *words)


def _run(*words: str) -> None:
    subprocess.run(words, capture_output=True, check=True, text=True)
