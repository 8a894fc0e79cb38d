"""scripts/healthcheck.py: what it finds, what it says, how it ends; and the sweep's rule."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from tests import ranks

if TYPE_CHECKING:
    from conftest import Run

SCRIPTS = Path(__file__).parents[2] / "scripts"
SMI = """#!/usr/bin/env bash
[[ -z ${HANG:-} ]] || sleep 60
[[ -z ${FAIL:-} ]] || { echo "Unable to determine the device handle for GPU0"; exit 15; }
[[ $* != *ecc.errors* || -z ${OLD:-} ]] || { echo 'Field "ecc" is not a valid field'; exit 2; }
for i in 0 1 2 3; do
    printf '%s, NVIDIA H100, GPU-%s, 81559 MiB, 41, 1980 MHz' "$i" "$i"
    [[ $* != *ecc.errors* ]] || printf ', %s, %s, Not Active' "${ERRORS:-0}" "${SLOWED:-Not Active}"
    echo
done
"""


@pytest.fixture
def health() -> Iterator[None]:
    """The package health can be imported, as for the script."""
    sys.path.insert(0, str(SCRIPTS))
    yield
    sys.path.remove(str(SCRIPTS))


class PlantedProbe:
    """Devices whose rates are known, with noise; `speed` is that of each device."""

    def __init__(
        self, speed: list[float], noise_ratio: float, link: list[float] | None = None
    ) -> None:
        self.devices = [f"GPU {i}" for i in range(len(speed))]
        self._speed, self._noise_ratio = speed, noise_ratio
        self._link = link or [1.0] * len(speed)
        self._random = random.Random(7)

    def matrix_product(self) -> list[float]:
        return [600 * speed * self._noise() for speed in self._speed]

    def memory_copy(self) -> list[float]:
        return [2500 * self._noise() for _ in self._speed]

    def pair_bandwidth(self, source: int, target: int) -> float:
        return 300 * min(self._link[source], self._link[target]) * self._noise()

    def _noise(self) -> float:
        return self._random.gauss(1, self._noise_ratio)


@pytest.mark.parametrize(
    ("speed", "noise", "link", "weak"),
    [
        ([1, 1, 1, 1], 0.01, None, []),
        ([1, 1, 0.85, 1], 0.01, None, [("GPU 2", "matrix product")]),
        ([0.9, 1, 1, 1, 1, 1, 1, 1], 0.01, None, [("GPU 0", "matrix product")]),
        ([1, 1, 1, 0.97], 0.002, None, []),  # below the floor
        ([1, 1, 1, 0.92], 0.20, None, []),  # drowns in noise
        ([1, 0.7], 0.01, None, [("GPU 1", "matrix product")]),
        ([0.5], 0.01, None, []),  # nothing to compare with
        ([1, 1, 1, 1], 0.01, [1, 0.5, 1, 1], [("GPU 1", "pair bandwidth")]),
        ([1, 1, 1, 0.8], 0.01, [0.6, 1, 1, 1],
         [("GPU 3", "matrix product"), ("GPU 0", "pair bandwidth")]),
    ],
)  # fmt: skip
def test_the_rule_names_the_weak_device_and_nobody_else(
    health: None, speed: list[float], noise: float, link: list[float] | None, weak: list[object]
) -> None:
    from health.sweep import sweep

    figures = sweep(PlantedProbe(speed, noise, link), num_rounds=12, floor_ratio=0.05)
    assert [(figure.device, figure.kind) for figure in figures if figure.weak] == weak


def test_one_bad_round_is_no_weak_device(health: None) -> None:
    from health.sweep import judge

    rounds = [[100.0, 100.5, 99.5, 100.0] for _ in range(10)] + [[100.0, 20.0, 100.0, 100.0]] * 2
    assert not any(figure.weak for figure in judge(rounds, list("abcd"), "x", "GB/s", 0.05))


def test_nodes_without_any_fault_are_rarely_accused(health: None) -> None:
    from health.sweep import judge

    generator = random.Random(3)
    accused = 0
    for _ in range(300):
        rounds = [[generator.gauss(100, 4) for _ in range(8)] for _ in range(12)]
        accused += any(figure.weak for figure in judge(rounds, list("abcdefgh"), "x", "", 0.05))
    assert accused <= 3


class StandInMachine:
    """Four cores and a clock that only their work moves; a shared core gets a part of the time."""

    def __init__(self, share_of_core: dict[int, float]) -> None:
        self.now_s = 0.0
        self.cores = {0, 1, 2, 3}
        self._share = share_of_core
        self._random = random.Random(3)

    def work(self) -> None:
        """Take a millisecond of a core's time, however many matrices or bytes that may be."""
        (core,) = self.cores
        self.now_s += 1e-3 / self._share.get(core, 1.0) * self._random.uniform(0.98, 1.02)

    def set_affinity(self, _process: int, cores: set[int]) -> None:
        self.cores = cores


@pytest.mark.parametrize(
    ("share_of_core", "named"),
    [({}, set()), ({2: 0.3}, {"core 2"}), ({0: 0.96}, set())],
    ids=["a quiet machine", "one core is shared", "one core is a little slow"],
)
def test_a_core_that_something_else_keeps_busy_is_named(
    health: None,
    monkeypatch: pytest.MonkeyPatch,
    share_of_core: dict[int, float],
    named: set[str],
) -> None:
    from health import cpu_probe
    from health.sweep import check_sweep, sweep

    machine = StandInMachine(share_of_core)
    monkeypatch.setattr(cpu_probe, "time", SimpleNamespace(perf_counter=lambda: machine.now_s))
    affinity = SimpleNamespace(
        sched_getaffinity=lambda _: machine.cores, sched_setaffinity=machine.set_affinity
    )
    monkeypatch.setattr(cpu_probe, "os", affinity)
    for kind in ("_multiply", "_copy"):
        monkeypatch.setattr(cpu_probe.CpuProbe, kind, lambda _: machine.work())

    checks = check_sweep(sweep(cpu_probe.CpuProbe(), 6, 0.05))
    assert [check.name for check in checks] == [f"core {core}" for core in range(4)]
    assert {check.name for check in checks if "WEAK: " in check.text} == named
    assert machine.cores == {0, 1, 2, 3}, "the probe left its thread tied to a core"


@pytest.mark.distributed
def test_everything_on_a_machine_without_gpus(tmp_path: Path) -> None:
    words = ("--cpu", "--min-disk-gb", "0.001", "--json", tmp_path / "h.json")
    done = ranks.run(SCRIPTS / "healthcheck.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads((tmp_path / "h.json").read_text())
    checks = {check["name"]: check for check in answer["checks"]}
    assert list(checks) == ["GPUs", "disk", "shared memory", "clock", "versions", "torch",
                            "megatron.core", "gloo all-reduce"]  # fmt: skip
    assert checks["gloo all-reduce"]["values"]["num_ranks"] == 2
    assert checks["versions"]["values"]["python"] == sys.version.split()[0]
    assert [line.split()[1] for line in done.stdout.splitlines()[:2]] == ["GPUs", "disk"]
    assert done.stdout.splitlines()[-1].startswith(("healthy: 8 checks", "usable: "))


def test_liveness_asks_neither_torch_nor_the_gpus_to_work(run: Run) -> None:
    done = run("healthcheck.py", "--liveness", "--min-disk-gb", "0", "--json", "-")
    assert done.returncode == 0
    names = [check["name"] for check in json.loads(done.stdout)["checks"]]
    assert names == ["GPUs", "disk", "shared memory", "clock", "versions"]
    listed = subprocess.run(
        [sys.executable, "-X", "importtime", str(SCRIPTS / "healthcheck.py"), "--liveness"],
        capture_output=True, text=True, timeout=60,
    ).stderr  # fmt: skip
    assert not [line for line in listed.splitlines() if line.endswith((" torch", " numpy"))]


@pytest.mark.parametrize(
    ("words", "variables", "code", "says"),
    [
        ([], {}, 0, "ok       GPUs           4 × NVIDIA H100, 81559 MiB each"),
        (["--num-gpus", "8"], {}, 1, "4 found, expected 8; see nvidia-smi and dmesg"),
        ([], {"ERRORS": "3"}, 1, "GPU 0 (GPU-0) has 3 uncorrected memory errors; reset"),
        (
            [],
            {"SLOWED": "Active"},
            0,
            "warning  GPUs           GPU 0 (GPU-0) is held down by hardware",
        ),
        ([], {"FAIL": "1"}, 1, "nvidia-smi failed: Unable to determine the device handle"),
        ([], {"OLD": "1"}, 0, "4 × NVIDIA H100"),
    ],
)
def test_what_the_driver_says(
    run: Run, programs: Callable[[str, str], Path], words: list[str],
    variables: dict[str, str | None], code: int, says: str,
) -> None:  # fmt: skip
    programs("nvidia-smi", SMI)
    done = run("healthcheck.py", "--liveness", "--min-disk-gb", "0", *words, **variables)
    assert says in done.stdout
    assert done.returncode == code


def test_a_torch_that_sees_no_gpu_where_there_are_some(health: None) -> None:
    import torch
    from health.devices import check_torch

    if torch.cuda.device_count():
        pytest.skip("this machine has GPUs")
    check = check_torch(4)
    assert (check.status, "sees none of the driver's 4 GPUs" in check.text) == ("problem", True)


@pytest.mark.parametrize(
    ("program", "text", "status", "says"),
    [
        ("chronyc", "A29FC87B,1.2.3.4,3,1,-0.000012,0,0,0,0,0,0,0,0,Normal", "ok", "-0.012 ms off"),
        ("chronyc", "0,,0,0,0.0,0,0,0,0,0,0,0,0,Not synchronised", "warning", "start chronyd"),
        ("chronyc", "A,1,3,1,0.000012,0,0,0,0,0,0,0,0,Normal", "ok", "synchronised by chrony"),
        ("chronyc", "A,1,3,1,2.5,0,0,0,0,0,0,0,0,Normal", "warning", "more than 100 ms"),
        ("timedatectl", "yes", "ok", "synchronised by timedatectl"),
        ("timedatectl", "no", "warning", "not synchronised, says timedatectl"),
    ],
)
def test_the_clock(
    run: Run, programs: Callable[[str, str], Path], program: str, text: str, status: str, says: str
) -> None:
    for name in ("chronyc", "timedatectl"):
        programs(name, "#!/bin/sh\nexit 1\n")
    programs(program, f"#!/bin/sh\necho '{text}'\n")
    done = run("healthcheck.py", "--liveness", "--min-disk-gb", "0", "--json", "-")
    (clock,) = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "clock"]
    assert (clock["status"], says in clock["text"]) == (status, True), clock
    assert done.returncode == 0


def test_the_kernel_tells_where_no_daemon_does(health: None) -> None:
    from health.machine import ask_kernel, check_clock

    state = ask_kernel()
    assert state is not None
    assert state.source == "the kernel"
    check = check_clock((lambda: None, ask_kernel))
    assert check.values["synchronised"] == state.synchronised
    assert check_clock((lambda: None,)).status == "warning"


def test_room(health: None, tmp_path: Path) -> None:
    from health.machine import check_disk, check_shared_memory

    assert check_disk(tmp_path, 0).status == "ok"
    assert "less than 1e+09; free some" in check_disk(tmp_path, 1e9).text
    gone = check_disk(tmp_path / "gone", 0)
    assert (gone.status, "cannot be written" in gone.text) == ("problem", True)
    assert check_shared_memory(tmp_path / "gone").status == "problem"


def test_an_all_reduce_that_cannot_work_is_a_problem_with_its_reason(health: None) -> None:
    import torch
    from health.collective import check_collective

    if torch.cuda.device_count():
        pytest.skip("this machine has GPUs")
    with ranks.forked():
        check = check_collective(1, "cuda", 30)
    assert check.name == "nccl all-reduce"
    assert (check.status, check.text.startswith("rank 0 of 1 failed: ")) == ("problem", True)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--liveness", "--sweep"], 2, "exclude each other"),
        (["--rounds", "1"], 2, "--rounds is 1, expected a number from 3 on"),
        (["--floor", "nan"], 2, "--floor is nan, expected a number from 0 on"),
        (["--timeout", "inf"], 2, "--timeout is inf, expected a number from 1 on"),
        (["--min-disk-gb", "-5"], 2, "--min-disk-gb is -5.0, expected a number from 0 on"),
        (["--floor", "-1"], 2, "--floor is -1.0"),
        (["--num-gpus", "-1"], 2, "--num-gpus is -1"),
        (["--num-gpus", "x"], 2, "invalid int value"),
        (["--liveness", "--json", "/nowhere/h.json"], 1, "the folder /nowhere does not exist"),
        (["--liveness", "--json", __file__], 1, "exists already; pass --force to replace it"),
        (["--liveness", "--json", "/dev/null", "--force"], 1, "is a device or a pipe"),
        (["--liveness", "--path", "/nowhere"], 1, "/nowhere cannot be written"),
    ],
)
def test_wrong_words(run: Run, words: list[str], code: int, says: str) -> None:
    done = run("healthcheck.py", *words)
    assert done.returncode == code
    assert says in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
