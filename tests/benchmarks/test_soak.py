"""The soak in short: a few hundred iterations, all traced, within the limit all the time."""

from __future__ import annotations

import pytest

from benchmarks.soak import NUM_RANKS, Sample, Soak, _growth, soak
from tests import ranks

LIMIT = 1_000_000
LAUNCHER = ("-IS", str(ranks.LAUNCHER), ranks.PYTHON, str(NUM_RANKS))
TRACE = (
    *("--trace", "--trace-dir", "FOLDER", "--trace-interval", "10"),
    *("--continuous-trace-iterations", "10", "--trace-max-bytes", str(LIMIT)),
)


@pytest.mark.distributed
def test_disk_stays_within_the_limit_and_memory_does_not_run_away(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # as in `ranks.environment`
    run = soak("short", TRACE, 240, LIMIT, launcher=LAUNCHER)  # too short for a slope of the memory
    assert 0 < run.most_disk_bytes <= 2 * LIMIT
    assert 0 < run.num_windows < 24  # the oldest have gone
    assert run.memory_at(0.95) - run.memory_at(0.5) < 12_000_000


def samples(slope_bytes, disk_bytes=0):
    return tuple(
        Sample(iteration, 400_000_000 + slope_bytes * iteration, disk_bytes)
        for iteration in range(1, 2001, 5)
    )


def made(slope_bytes, disk_bytes):
    watched = samples(slope_bytes, disk_bytes)
    memory = [sample.memory_bytes for sample in watched]
    return Soak(
        name="made",
        samples=watched,
        memory_growth=_growth(watched, memory),
        disk_growth=(0.0, 0.0, 0.0),
        limit_bytes=LIMIT,
        num_windows=1,
    )


def test_a_leak_and_a_full_folder_are_faults():
    assert made(0, 1_900_000).fault == ""
    assert "above the limit" in made(0, 2_100_000).fault
    leaking = made(2_000, 0)  # 2 kB an iteration
    assert leaking.memory_growth[0] == pytest.approx(2_000_000)
    assert "memory grows by" in leaking.fault
