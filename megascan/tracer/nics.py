"""What Linux says of a host's network ports: rate, bytes sent, errors, and lost links.

A cable or a transceiver that is worn, or sits loosely, makes a port run on one lane of four, at a
lower rate, or with errors that are sent again. No log of the job says so; the kernel's files do
(`/sys/class/infiniband/<device>/ports/<number>`, `/sys/class/net/<device>`; kernel documentation,
ABI/stable/sysfs-class-infiniband and ABI/testing/sysfs-class-net):

    nic.mlx5_3/1.gbps          its rate, Gbit/s; 0 where it is not active
    nic.mlx5_3/1.sent_gbytes   what it sent since the last reading: whether the job uses it
    nic.mlx5_3/1.errors        bits and packets that were damaged on the wire since then
    nic.mlx5_3/1.lost_links    how often its link went down since then

Read by the writer's thread after a window, every two seconds at most: of a port's files most ask
its firmware. What the network's congestion, or the other end of a connection, makes a port send
again (`out_of_sequence`, `packet_seq_err`, `local_ack_timeout_err`, `rnr_nak_retry_err`) is not
read: it says nothing of this port's wire. Ports of RDMA are counted together with the network
device of the same function; bonds, bridges and virtual devices have no wire of their own. Any file
that is not there, or cannot be read, is left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from megascan.tracer.timer import Spacing, Step, no_step

_INFINIBAND = Path("/sys/class/infiniband")
_NETWORK = Path("/sys/class/net")
_LEAST_NS_BETWEEN_READINGS = 2_000_000_000
_MOST_PORTS = 32
"""Of a host: eight for its GPUs, some for storage and logins. More are virtual functions."""
_MOST_BYTES = 128
"""Of a file: a number, or a few words."""
_BYTES_A_WORD = 4
"""InfiniBand counts what a port sends in words of four bytes."""
_PORT_ERRORS = (
    "symbol_error",
    "link_error_recovery",
    "port_rcv_errors",
    "local_link_integrity_errors",
)
_DEVICE_ERRORS = ("rx_errors", "tx_errors")
"""All kinds of damaged packets, those with wrong check sums among them."""


@dataclass(frozen=True, kw_only=True)
class _Port:
    """A port and its files: of InfiniBand's (or RoCE's), of a network device's, or of both."""

    name: str
    rdma: Path | None = None
    network: Path | None = None

    def gbps(self) -> float | None:
        """Return the rate, 0 where the port is not active; None where nobody knows."""
        if self.rdma is not None:
            if "ACTIVE" not in _text(self.rdma / "state"):
                return 0.0
            return float(_text(self.rdma / "rate").split()[0])
        assert self.network is not None
        if _text(self.network / "operstate").strip() != "up":
            return 0.0
        speed_mbps = _number(self.network / "speed")
        return speed_mbps / 1000 if speed_mbps is not None and speed_mbps > 0 else None

    def totals(self) -> dict[str, float]:
        """Return what has been counted so far, by the reading's name, as far as it is counted."""
        sent, errors, lost = [], [], []
        if self.rdma is not None:
            words, sent_bytes = (
                _number(self.rdma / name)
                for name in ("counters/port_xmit_data", "hw_counters/tx_bytes")
            )
            sent.append(sent_bytes if words is None else _BYTES_A_WORD * words)
            errors += [_number(self.rdma / "counters" / name) for name in _PORT_ERRORS]
            lost.append(_number(self.rdma / "counters/link_downed"))
        if self.network is not None:
            sent.append(_number(self.network / "statistics/tx_bytes"))
            errors += [_number(self.network / "statistics" / name) for name in _DEVICE_ERRORS]
            if lost in ([], [None]):
                lost = [_number(self.network / "carrier_down_count")]
        counted = {"sent_gbytes": sent, "errors": errors, "lost_links": lost}
        return {
            name: sum(value for value in values if value is not None)
            for name, values in counted.items()
            if any(value is not None for value in values)
        }


class Nics:
    """The ports of this host, which are looked for once; none where the kernel names none."""

    def __init__(self) -> None:
        self._ports: list[_Port] = []
        self._totals: dict[str, dict[str, float]] = {}
        self._spacing = Spacing(_LEAST_NS_BETWEEN_READINGS)
        with suppress(OSError, ValueError):
            self._ports = list(islice(_ports(), _MOST_PORTS))
        for port in self._ports:
            self._totals[port.name] = port.totals()

    def read(self, step: Step = no_step) -> dict[str, float]:
        """Read all ports; return nothing if they were read within the last two seconds. Calls
        `step` after each of them.
        """
        if self._spacing.passed_ns() is None:
            return {}
        values: dict[str, float] = {}
        for port in self._ports:
            with suppress(OSError, ValueError, IndexError):  # a port that is gone, odd words
                values |= self._read_port(port)
            step()
        return values

    def _read_port(self, port: _Port) -> dict[str, float]:
        """Return a port's readings by their names; none where its rate is not known."""
        gbps = port.gbps()
        if gbps is None:
            return {}
        before, now = self._totals[port.name], port.totals()
        self._totals[port.name] = now
        since = {name: max(now[name] - before[name], 0.0) for name in now if name in before}
        if "sent_gbytes" in since:
            since["sent_gbytes"] = round(since["sent_gbytes"] / 1e9, 3)
        return {f"nic.{port.name}.{name}": value for name, value in {"gbps": gbps, **since}.items()}


def _ports() -> Iterator[_Port]:
    """Yield the ports of RDMA, each with the network device of its function, then the others."""
    devices, networks = _functions(_INFINIBAND), _functions(_NETWORK)
    functions = {*devices.values(), *networks.values()}
    for name, function in devices.items():
        if _is_part_of(function, functions):
            continue
        ports = _INFINIBAND / name / "ports"
        for number in sorted(path.name for path in ports.iterdir()) if ports.is_dir() else ():
            own = _of_function(networks, function, number)
            if own:
                del networks[own]
            network = _NETWORK / own if own else None
            yield _Port(name=f"{name}/{number}", rdma=ports / number, network=network)
    for name, function in networks.items():
        if not _is_part_of(function, functions):
            yield _Port(name=name, network=_NETWORK / name)


def _functions(folder: Path) -> dict[str, str]:
    """Return the devices in a folder with the function of a bus that each is; virtual ones are
    none, and left out.
    """
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return {
        name: os.path.realpath(folder / name / "device")
        for name in names
        if (folder / name / "device").exists()
    }


def _is_part_of(function: str, functions: set[str]) -> bool:
    """Return whether it is a virtual function of one of the others, whose port it shares."""
    return os.path.realpath(Path(function, "physfn")) in functions


def _of_function(networks: dict[str, str], function: str, number: str) -> str:
    """Return the network device of a function's port, which the kernel counts from 0; "" if there
    is none.
    """
    for name, own in networks.items():
        if own == function and _number(_NETWORK / name / "dev_port") == int(number) - 1:
            return name
    return ""


def _text(path: Path) -> str:
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, _MOST_BYTES).decode("ascii", "replace")
    finally:
        os.close(file)


def _number(path: Path) -> float | None:
    """Return the number in a file; None where it holds none, or cannot be read."""
    try:
        return float(int(_text(path)))
    except (OSError, ValueError):
        return None
