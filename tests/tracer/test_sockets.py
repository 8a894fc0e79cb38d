"""What TCP connections carry, by the kernel's account: of real sockets between two addresses."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascan.tracer import sockets, timer
from megascan.tracer.sockets import Carried, Sockets

FILES = Path("/proc/self/fd")
pytestmark = pytest.mark.skipif(not FILES.is_dir(), reason="not Linux")
FROM, TO = "127.0.0.2", "127.0.0.3"
BYTES = 4 << 20


class Pair:
    """A connection whose other end takes what comes."""

    def __init__(self, pause_s: float = 0.0) -> None:
        listening = socket.socket()
        listening.bind((TO, 0))
        listening.listen()
        self.sending = socket.create_connection(listening.getsockname(), source_address=(FROM, 0))
        self.receiving, _ = listening.accept()
        listening.close()
        self.num_received, self._pause_s = 0, pause_s
        self._thread = threading.Thread(target=self._take)
        self._thread.start()

    def _take(self) -> None:
        while data := self.receiving.recv(1 << 16):
            self.num_received += len(data)
            time.sleep(self._pause_s)

    def send(self, num_bytes: int = BYTES) -> None:
        """Send, and wait until all has come."""
        before = self.num_received
        self.sending.sendall(bytes(num_bytes))
        while self.num_received < before + num_bytes:
            time.sleep(0.001)

    def close(self) -> None:
        self.sending.close()
        self._thread.join()
        self.receiving.close()


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses of this host are two hosts, and readings may follow each other at once."""
    monkeypatch.setattr(sockets, "_are_two_hosts", lambda own, other: own != other)
    monkeypatch.setattr(sockets, "_LEAST_NS_BETWEEN_READINGS", 0)


@pytest.fixture
def pair(apart) -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_what_was_sent_since_the_last_reading_counts(pair):
    reading = Sockets()
    pair.send()
    (one,) = reading.read()
    assert (one.own, one.other, one.num_bytes) == (FROM, TO, pytest.approx(BYTES, abs=64))
    assert 0 <= one.busy_us < 2_000_000
    assert reading.read() == ()
    pair.send(2 * BYTES)
    (one,) = reading.read()
    assert one.num_bytes == pytest.approx(2 * BYTES, abs=64)


def test_a_connection_that_carries_much_is_busy(pair):
    begin = time.monotonic()
    pair.send(256 << 20)
    taken_us = (time.monotonic() - begin) * 1e6
    (one,) = Sockets().read()
    assert 0 < one.busy_us < 1.1 * taken_us


def test_connections_between_two_addresses_are_one(pair):
    second = Pair()
    for each in (pair, second):
        each.send()
    (one,) = Sockets().read()
    second.close()
    assert one.num_bytes == pytest.approx(2 * BYTES, abs=128)


def test_waiting_for_the_other_end_is_not_transfer(apart):
    """The other end takes 64 kB every 10 ms: 640 ms of 4 MB, of which little is transfer."""
    slow = Pair(pause_s=0.01)
    begin = time.monotonic()
    slow.send()
    taken_us = (time.monotonic() - begin) * 1e6
    (one,) = Sockets().read()
    slow.close()
    assert one.busy_us < 0.5 * taken_us


def test_few_bytes_say_nothing_of_a_speed(pair):
    pair.send(1000)
    assert Sockets().read() == ()


def test_connections_within_a_host_are_not_read():
    pair = Pair()
    pair.send()
    assert Sockets().read() == ()
    pair.close()


def test_other_sockets_are_no_error_and_stay_open(pair):
    left, right = socket.socketpair()
    listening = socket.create_server(("127.0.0.1", 0))
    datagrams = socket.socket(type=socket.SOCK_DGRAM)
    before = set(FILES.iterdir())
    pair.send()
    assert len(Sockets().read()) == 1
    assert set(FILES.iterdir()) == before
    left.sendall(b"x")
    assert right.recv(1) == b"x"
    pair.send()
    for one in (left, right, listening, datagrams):
        one.close()


def test_readings_are_half_a_second_apart(monkeypatch, pair):
    monkeypatch.setattr(sockets, "_LEAST_NS_BETWEEN_READINGS", 500_000_000)
    now_ms = [7000]
    monkeypatch.setattr(timer, "now_ns", lambda: now_ms[0] * 1_000_000)
    reading, found = Sockets(), []
    pair.send()
    reading.begin()
    for now_ms[0] in (7499, 7500, 7999, 8010):
        pair.send()
        found.append([(one.num_bytes // BYTES, one.of_us) for one in reading.read()])
    assert found == [[], [(2, 500_000)], [], [(2, 510_000)]]


def test_each_socket_is_a_step(pair):
    steps = []
    Sockets().read(lambda: steps.append(1))
    assert len(steps) >= 2


@pytest.mark.parametrize(
    ("address", "plain"),
    [
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("10.0.0.7", "10.0.0.7"),
        ("fe80::1%eth0", "fe80::1"),
        ("2001:db8:0:0::5", "2001:db8::5"),
    ],
)
def test_addresses_are_written_in_one_way(address, plain):
    assert sockets._plain(address) == plain


@pytest.mark.parametrize(
    ("own", "other", "are"),
    [
        ("10.0.0.1", "10.0.0.2", True),
        ("10.0.0.1", "10.0.0.1", False),
        ("127.0.0.1", "127.0.1.1", False),
        ("::1", "::1", False),
        ("2001:db8::5", "2001:db8::6", True),
    ],
)
def test_which_addresses_are_two_hosts(own, other, are):
    assert sockets._are_two_hosts(own, other) is are


def test_a_system_without_proc_is_no_error(monkeypatch, apart):
    monkeypatch.setattr(sockets, "_FILES", "/nowhere")
    assert Sockets().read() == ()


def test_a_record_keeps_the_connections_with_most_bytes(monkeypatch, apart):
    counts = [
        (f"socket:[{number}]", ("10.0.0.1", f"10.0.1.{number}"), (number << 20, 5, 0))
        for number in range(1, 41)
    ]
    monkeypatch.setattr(
        sockets,
        "_connections",
        lambda step: ((name, ends, sockets._Counts(*each)) for name, ends, each in counts),
    )
    found = Sockets().read()
    assert len(found) == 32
    assert found[0] == Carried("10.0.0.1", "10.0.1.40", 40 << 20, 5, 0, found[0].of_us)
