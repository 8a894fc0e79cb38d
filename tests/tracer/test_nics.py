"""A host's network ports: read from the kernel's files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from detect.causes.degraded import ERRORS, LOST, SENT
from detect.observe.machines import PORT_PREFIX, RATE_NAME
from megascan.reader import read_trace
from megascan.schema import Kind
from megascan.tracer import nics, timer
from megascan.tracer.nics import Nics


class Sys:
    """Folders as the kernel has them: devices of buses, and the names that lead to them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.infiniband, self.network = root / "infiniband", root / "net"
        self.infiniband.mkdir()
        self.network.mkdir()

    def function(self, address: str, *, of: str = "") -> Path:
        """A function of a bus, perhaps a virtual one of another."""
        folder = self.root / "pci" / address
        folder.mkdir(parents=True, exist_ok=True)
        if of:
            (folder / "physfn").symlink_to(self.root / "pci" / of)
        return folder

    def port(
        self, device: str = "mlx5_0", number: int = 1, address: str = "", **files: str
    ) -> Path:
        """A port of InfiniBand; files by name, `counters__symbol_error` for those in folders."""
        folder = self.infiniband / device
        if not folder.exists():
            folder.mkdir()
            (folder / "device").symlink_to(self.function(address or f"of-{device}"))
        usual = {
            "state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "counters__symbol_error": "7",
            "counters__link_error_recovery": "0", "counters__link_downed": "2",
            "counters__port_rcv_errors": "1", "counters__local_link_integrity_errors": "0",
            "counters__port_xmit_data": "1000000000000",
        }  # fmt: skip
        return self._write(folder / "ports" / str(number), usual | files)

    def device(self, name: str, address: str = "", dev_port: int = 0, **files: str) -> Path:
        """A network device; a virtual one where its address is "none"."""
        folder = self.network / name
        folder.mkdir()
        if address != "none":
            (folder / "device").symlink_to(self.function(address or f"of-{name}"))
        usual = {
            "operstate": "up", "speed": "25000", "dev_port": str(dev_port),
            "carrier_down_count": "1", "statistics__rx_errors": "3",
            "statistics__tx_errors": "0", "statistics__tx_bytes": "5000000000",
        }  # fmt: skip
        return self._write(folder, usual | files)

    @staticmethod
    def _write(folder: Path, files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = folder.joinpath(*name.split("__"))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return folder


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sys:
    found = Sys(tmp_path)
    monkeypatch.setattr(nics, "_INFINIBAND", found.infiniband)
    monkeypatch.setattr(nics, "_NETWORK", found.network)
    return found


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let some seconds pass."""
    now_s = [100.0]
    monkeypatch.setattr(timer, "now_ns", lambda: round(now_s[0] * 1e3) * 10**6)

    def wait(seconds: float) -> None:
        now_s[0] += seconds

    return wait


def test_rate_and_what_was_counted_since_the_last_reading(system, later):
    port = system.port()
    ports = Nics()
    (port / "counters/symbol_error").write_text("12\n")
    (port / "counters/port_xmit_data").write_text("1000500000000\n")  # words of four bytes
    assert ports.read() == {
        "nic.mlx5_0/1.gbps": 400.0,
        "nic.mlx5_0/1.sent_gbytes": 2.0,
        "nic.mlx5_0/1.errors": 5.0,
        "nic.mlx5_0/1.lost_links": 0.0,
    }
    (port / "counters/link_downed").write_text("3\n")
    (port / "rate").write_text("100 Gb/sec (1X NDR)\n")
    later(2.0)
    assert ports.read() == {
        "nic.mlx5_0/1.gbps": 100.0,
        "nic.mlx5_0/1.sent_gbytes": 0.0,
        "nic.mlx5_0/1.errors": 0.0,
        "nic.mlx5_0/1.lost_links": 1.0,
    }


def test_the_detector_knows_these_names(system):
    system.port()
    readings = {f"{PORT_PREFIX}mlx5_0/1.{name}" for name in (RATE_NAME, SENT, ERRORS, LOST)}
    assert set(Nics().read()) == readings


@pytest.mark.parametrize("state", ["1: DOWN", "2: INIT", "3: ARMED"])
def test_a_port_that_is_not_active_has_no_rate(system, state):
    system.port(state=state, rate="10 Gb/sec (4X)")
    assert Nics().read()["nic.mlx5_0/1.gbps"] == 0.0


@pytest.mark.parametrize(
    ("files", "gbps"),
    [
        ({}, 25.0),
        ({"speed": "100000"}, 100.0),
        ({"operstate": "down", "speed": ""}, 0.0),
        ({"speed": "-1"}, None),
        ({"speed": "4294967295x"}, None),
    ],
    ids=["25G", "100G", "down", "unknown", "damaged"],
)
def test_a_network_device(system, files, gbps):
    system.device("eth0", **files)
    readings = Nics().read()
    assert readings.get("nic.eth0.gbps") == gbps
    assert (readings == {}) == (gbps is None)  # a rate that nobody knows is that of no wire


def test_devices_without_a_wire_are_not_read(system):
    for name in ("lo", "bond0", "docker0", "vxlan.calico"):
        system.device(name, "none")
    assert Nics().read() == {}


def test_a_port_of_rdma_is_counted_with_the_network_device_of_its_function(system):
    port = system.port(address="1b:00.0")
    device = system.device("ens1f0np0", "1b:00.0")
    system.device("eno1", "04:00.0")
    ports = Nics()
    (port / "counters/symbol_error").write_text("8\n")
    (device / "statistics/rx_errors").write_text("10\n")
    (device / "statistics/tx_bytes").write_text("8000000000\n")
    (device / "carrier_down_count").write_text("9\n")  # counted by the port itself
    readings = ports.read()
    assert {name.removeprefix("nic.").rpartition(".")[0] for name in readings} == {
        "mlx5_0/1",
        "eno1",
    }
    assert readings["nic.mlx5_0/1.errors"] == 8.0
    assert readings["nic.mlx5_0/1.sent_gbytes"] == 3.0
    assert readings["nic.mlx5_0/1.lost_links"] == 0.0


def test_two_ports_of_one_function_have_a_network_device_each(system):
    for number in (1, 2):
        system.port("mlx4_0", number, "1b:00.0")
        system.device(f"ens{number}", "1b:00.0", dev_port=number - 1)
    ports = Nics()
    (system.network / "ens2/statistics/rx_errors").write_text("103\n")
    readings = ports.read()
    assert readings["nic.mlx4_0/1.errors"] == 0.0
    assert readings["nic.mlx4_0/2.errors"] == 100.0
    assert not any("ens" in name for name in readings)


def test_virtual_functions_share_a_wire(system):
    system.port("mlx5_0", address="1b:00.0")
    system.function("1b:00.1", of="1b:00.0")
    system.port("mlx5_1", address="1b:00.1")
    system.device("ens1v0", "1b:00.1")
    assert {name.split(".")[1] for name in Nics().read()} == {"mlx5_0/1"}


def test_a_virtual_function_whose_device_is_not_to_be_seen_is_the_port(system):
    system.function("1b:00.1", of="elsewhere")
    system.port("mlx5_1", address="1b:00.1")
    assert Nics().read()["nic.mlx5_1/1.gbps"] == 400.0


def test_an_adapter_that_counts_otherwise(system):
    """Of EFA there are `hw_counters` only."""
    none = (*nics._PORT_ERRORS, "link_downed", "port_xmit_data")
    files = {f"counters__{name}": "N/A" for name in none}
    port = system.port("rdmap16s27", hw_counters__tx_bytes="1000000000", **files)
    ports = Nics()
    (port / "hw_counters/tx_bytes").write_text("4000000000\n")
    assert ports.read() == {"nic.rdmap16s27/1.gbps": 400.0, "nic.rdmap16s27/1.sent_gbytes": 3.0}


def test_a_counter_that_begins_anew_counts_nothing(system):
    port = system.port()
    ports = Nics()
    (port / "counters/symbol_error").write_text("0\n")
    assert ports.read()["nic.mlx5_0/1.errors"] == 0.0


def test_a_counter_that_could_not_be_read_before_counts_nothing(system, later):
    port = system.port()
    for name in nics._PORT_ERRORS:
        (port / "counters" / name).write_text("")
    ports = Nics()
    (port / "counters/symbol_error").write_text("5000\n")
    assert "nic.mlx5_0/1.errors" not in ports.read()
    (port / "counters/symbol_error").write_text("5001\n")
    later(10.0)
    assert ports.read()["nic.mlx5_0/1.errors"] == 1.0


@pytest.mark.parametrize("rate", ["", "fast", "\x00\xff"])
def test_words_that_are_no_rate_are_no_error(system, rate):
    system.port(rate=rate)
    system.port("mlx5_1")
    assert {name.split(".")[1] for name in Nics().read()} == {"mlx5_1/1"}


def test_a_port_that_goes_away_is_no_error(system, later):
    port = system.port()
    ports = Nics()
    for path in sorted(port.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert ports.read() == {}
    system.port()
    later(10.0)
    assert ports.read()["nic.mlx5_0/1.gbps"] == 400.0


def test_a_system_without_these_files_is_no_error(system, monkeypatch):
    monkeypatch.setattr(nics, "_INFINIBAND", system.root / "nowhere")
    monkeypatch.setattr(nics, "_NETWORK", system.root / "nowhere")
    assert Nics().read() == {}


def test_a_device_without_ports_hides_none(system):
    (system.infiniband / "siw0").mkdir()
    (system.infiniband / "siw0/device").symlink_to(system.function("of-siw0"))
    system.port()
    assert Nics().read()["nic.mlx5_0/1.gbps"] == 400.0


def test_readings_are_two_seconds_apart(system, later):
    system.port()
    ports, found = Nics(), []
    for seconds in (0.0, 0.1, 1.8, 0.1, 1.9, 0.2):
        later(seconds)
        found.append(bool(ports.read()))
    assert found == [True, False, False, True, False, True]


def test_no_more_than_some_ports_are_read(system):
    for number in range(nics._MOST_PORTS + 8):
        system.device(f"eth{number}")
    assert len({name.split(".")[1] for name in Nics().read()}) == nics._MOST_PORTS


def test_others_get_their_turn_after_each_port(system):
    system.port()
    system.port("mlx5_1")
    turns = []
    Nics().read(lambda: turns.append(1))
    assert len(turns) == 2


def test_windows_of_a_rank_file_hold_the_readings(system, make_tracer, read_rank_file):
    system.port()
    tracer, path = make_tracer(interval=1, window=1)
    for iteration in (1, 2):
        with tracer.iteration(iteration), tracer.span("forward", Kind.COMPUTE, microbatch=0):
            pass
    tracer.close()
    first, second = read_rank_file(path).windows
    assert first["counters"] == {
        "nic.mlx5_0/1.gbps": 400.0,
        "nic.mlx5_0/1.sent_gbytes": 0.0,
        "nic.mlx5_0/1.errors": 0.0,
        "nic.mlx5_0/1.lost_links": 0.0,
    }
    assert second["counters"] == {}  # sooner than two seconds
    windows = read_trace(path, allow_missing_ranks=True).windows
    assert [one.counters for one in windows[0]] == [first["counters"], {}]
