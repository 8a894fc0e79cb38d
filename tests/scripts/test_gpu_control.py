"""scripts/gpu_control.sh against a stand-in nvidia-smi that records how it was called."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_control.sh"
STAND_IN = """#!/usr/bin/env bash
echo "$@" >> "$CALLS"
case "$*" in
  *query-gpu=index,name*) echo "0, Stand-in, ${CLOCK:-1980} MHz, 1980 MHz" ;;
  *query-gpu=index*) printf '0\\n1\\n' ;;
  *query-gpu=clocks.max*) echo "${HIGHEST:-1980}" ;;
  *gpu-clocks*) [ -z "$REFUSE" ] || { echo "Insufficient Permissions"; exit 4; } ;;
  *loop*) echo "index, clock" ;;
esac
"""


@pytest.fixture
def run(tmp_path: Path):
    stand_in = tmp_path / "nvidia-smi"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    calls = tmp_path / "calls"
    calls.touch()

    def run_script(*words: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], str]:
        environment = {
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "CALLS": str(calls),
            "REFUSE": "",
            **variables,
        }
        done = subprocess.run(
            ["bash", SCRIPT, *words], capture_output=True, text=True, env=environment, timeout=30
        )
        return done, calls.read_text()

    return run_script


def test_limit_locks_the_clock_of_that_gpu_and_shows_its_effect(run):
    done, calls = run("limit", "1", "900", CLOCK="900")
    assert done.returncode == 0
    assert "-i 1 --lock-gpu-clocks=0,900" in calls
    assert "900 MHz" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("gpu_control.sh reset 1")


def test_reset_of_one_gpu(run):
    done, calls = run("reset", "0")
    assert done.returncode == 0
    assert "-i 0 --reset-gpu-clocks" in calls


def test_reset_of_all_names_no_gpu(run):
    done, calls = run("reset")
    assert done.returncode == 0
    assert "--reset-gpu-clocks" in calls.splitlines()[0].split()[0]
    assert "every GPU" in done.stdout


def test_monitor_asks_for_clocks_and_throttle_reasons(run):
    done, calls = run("monitor")
    assert done.returncode == 0
    assert "clocks_event_reasons.active" in calls


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["limit", "0"], 2, "limit takes a GPU id and a clock"),
        (["limit", "x", "900"], 2, "GPU id is 'x'"),
        (["limit", "0", "fast"], 2, "clock limit is 'fast'"),
        (["limit", "7", "900"], 1, "there is no GPU 7"),
        (["limit", "0", "0"], 1, "expected 1 to 1980"),
        (["limit", "0", "99999"], 1, "expected 1 to 1980"),
        (["reset", "0", "1"], 2, "at most one GPU id"),
        (["reset", "9"], 1, "there is no GPU 9"),
        (["monitor", "0"], 2, "monitor takes no arguments"),
        (["halt"], 2, "unknown command 'halt'"),
        ([], 2, "no command, expected limit, reset or monitor"),
    ],
)
def test_bad_arguments_change_nothing_and_say_why(run, words, code, says):
    done, calls = run(*words)
    assert done.returncode == code
    assert says in done.stderr
    assert "gpu-clocks" not in calls


def test_unknown_highest_clock_is_said_and_does_not_forbid(run):
    done, calls = run("limit", "0", "900", HIGHEST="[N/A]")
    assert done.returncode == 0
    assert "is not checked" in done.stderr
    assert "lock-gpu-clocks" in calls


def test_refusal_is_an_error_with_the_reason(run):
    done, _ = run("limit", "0", "900", REFUSE="yes")
    assert done.returncode == 1
    assert "needs root" in done.stderr


def test_without_nvidia_smi(tmp_path: Path):
    done = subprocess.run(
        ["/bin/bash", SCRIPT, "reset"],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin"} if not Path("/usr/bin/nvidia-smi").exists() else {"PATH": ""},
        timeout=30,
    )
    assert done.returncode == 1
    assert "nvidia-smi is not on the PATH" in done.stderr
