"""Jobs over slow NICs: who may be named, what a seed draws, real rates, and a real job."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import pytest

from benchmarks import wire_runs, wires
from benchmarks.trainers import MISSED, OTHER, RIGHT, UNDECIDED, WRONG
from benchmarks.wire_hosts import Network, NoHostsHereError
from benchmarks.wire_jobs import JOBS, Case, Job, cases_of
from benchmarks.wire_ranks import LOOPS
from benchmarks.wire_runs import JobFailedError, running
from benchmarks.wire_troubles import FAULTS, NOBODYS, TROUBLES
from benchmarks.wires import Row, judge_kept, render, score
from megascan.reader import read_trace

TRANSFER = """
import socket, sys, time
if sys.argv[1] == "receive":
    listening = socket.create_server(("", 6000))
    print("ready", flush=True)
    connection, _ = listening.accept()
    begin, size = time.monotonic(), 0
    while data := connection.recv(1 << 18):
        size += len(data)
    print(size * 8 / 1e6 / (time.monotonic() - begin))
else:
    socket.create_connection((sys.argv[2], 6000)).sendall(bytes(4_000_000))
"""
"""Tells at how many Mbit/s it receives."""


def case_of(trouble, **other):
    values = {"job": "ddp of 4 x 2", "num_hosts": 4, "ranks_per_host": 2, "rate_mbit": 300,
              "trouble": trouble, "host": 1, "peer": 3, "ratio": 0.5, "seed": 1}  # fmt: skip
    return Case(**{**values, **other})


def finding(ranks, cause="link", owner="node"):
    return {"ranks": list(ranks), "cause": cause, "owner": owner}


@contextmanager
def hosts_or_skip(making):
    """Skip the test where hosts cannot be made."""
    try:
        with making as made:
            yield made
    except NoHostsHereError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("trouble", "findings", "verdict", "result"),
    [
        ("NIC at half", [finding([2, 3])], "degraded", RIGHT),
        ("NIC at half", [finding([3])], "degraded", RIGHT),
        ("NIC at half", [finding([3], "host")], "degraded", OTHER),
        ("NIC at half", [finding([])], "degraded", WRONG),
        ("NIC at half", [finding([1, 2])], "degraded", WRONG),
        ("NIC at half", [finding([6, 7])], "degraded", WRONG),
        ("NIC at half", [finding([2, 3], owner="undecided")], "undecided", UNDECIDED),
        ("NIC at half", [], "healthy", MISSED),
        ("slow connection", [finding([3, 6])], "degraded", RIGHT),
        ("slow connection", [finding([6, 7])], "degraded", RIGHT),
        ("slow connection", [finding([4])], "degraded", WRONG),
        ("healthy", [], "healthy", RIGHT),
        ("all NICs slow", [finding([2])], "degraded", WRONG),
        ("longer data", [finding([1], "sequence_imbalance", "job")], "job", RIGHT),
    ],
)
def test_only_ranks_of_the_host_at_fault_may_be_named(trouble, findings, verdict, result):
    assert score(case_of(trouble), findings, verdict) == result


def test_two_seeds_try_every_trouble_in_several_jobs():
    tried = Counter(case.trouble for seed in (1, 2) for job in JOBS for case in cases_of(job, seed))
    assert set(tried) == set(TROUBLES)
    assert min(tried.values()) >= 3


def test_a_job_is_tried_healthy_and_with_troubles_of_different_hosts():
    for seed, job in ((seed, job) for seed in range(1, 5) for job in JOBS):
        healthy, *troubled = cases_of(job, seed)
        assert healthy.trouble == "healthy"
        assert not healthy.at_fault
        faults = [case for case in troubled if case.at_fault]
        assert len({case.trouble for case in faults}) == job.num_faults
        assert len({case.host for case in faults}) == min(job.num_hosts, job.num_faults)
        assert all(case.host != case.peer for case in troubled)
        assert all(max(case.at_fault) < job.num_hosts * job.ranks_per_host for case in faults)


def test_draws_can_be_repeated_and_differ_by_seed():
    first, again, other = (cases_of(JOBS[0], seed) for seed in (1, 1, 2))
    assert first == again
    assert {case.trouble for case in first} != {case.trouble for case in other}


def test_what_a_trouble_is_called_and_what_is_left_of_the_rate_are_plain():
    assert all(trouble.causes == ("link",) for trouble in FAULTS)
    assert not any(trouble.causes for trouble in NOBODYS)
    assert all(0 < ratio < 1 for trouble in FAULTS for ratio in trouble.ratios)
    assert all(job.is_engine or job.loop in LOOPS for job in JOBS)
    assert case_of("slow connection").name == (
        "ddp of 4 x 2, slow connection of hosts 1 and 3 x0.50, seed 1"
    )


def test_the_page_tells_what_a_trouble_cost():
    seen = (("healthy", RIGHT, 200.0, 1.0), ("NIC at half", MISSED, 350.0, 0.5))
    rows = [
        Row(case=case_of(trouble, ratio=ratio, mean_ms=mean_ms), result=result, verdict="v",
            named="")
        for trouble, result, mean_ms, ratio in seen
    ]  # fmt: skip
    page = render(rows, ["pipeline"], "a machine", "command")
    assert "| NIC at half | 0 | 0 | 0 | 1 | 0 | 1 |" in page
    assert "Failed: pipeline." in page
    (slow,) = [line for line in page.splitlines() if "NIC at half of host 1 x0.50" in line]
    assert "| 2,3 | v | – | 350 | 1.75 |" in slow


def test_one_sentence_says_that_hosts_cannot_be_made(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["wires"])
    assert wires.main() == 1
    said = capsys.readouterr().err
    assert said.startswith("hosts of their own cannot be made here")
    assert len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def rate_mbit(sender, receiver):
    """Measure what a TCP stream between two hosts reaches."""
    command = [sys.executable, "-c", TRANSFER]
    with subprocess.Popen(
        [*receiver.prefix, *command, "receive"], stdout=subprocess.PIPE, text=True
    ) as receiving:
        assert receiving.stdout.readline() == "ready\n"
        subprocess.run([*sender.prefix, *command, "send", receiver.address], check=True)
        return float(receiving.stdout.read())


@pytest.mark.timeout(60)
@pytest.mark.alone
def test_nics_have_the_rates_that_they_are_given():
    with hosts_or_skip(Network(3, 200)) as network:
        first, second, third = network.hosts
        assert rate_mbit(first, second) == pytest.approx(200, rel=0.2)
        network.shape(first, egress_ratio=0.5)
        assert rate_mbit(first, second) == pytest.approx(100, rel=0.2)
        assert rate_mbit(second, first) == pytest.approx(200, rel=0.2)
        network.shape(first, ingress_ratio=0.5)
        assert rate_mbit(second, first) == pytest.approx(100, rel=0.2)
        network.reset()
        network.slow_connection(first, second, 0.25)
        assert rate_mbit(second, first) == pytest.approx(50, rel=0.2)
        assert rate_mbit(first, third) == pytest.approx(200, rel=0.2)
        network.restore_connection(first, second)
        with network.foreign_traffic(second, 0.5):
            time.sleep(0.5)  # until the stream has found its rate
            assert rate_mbit(first, second) < 150
    assert not of_this_process()


def of_this_process():
    """Return the namespaces that are left of a network that this process has made."""
    listing = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    mine = Network(1, 1).foreign.namespace.partition("-")[0]
    return [line for line in listing.splitlines() if line.startswith(mine)]


SMALL = Job(
    loop="ddp in buckets",
    num_hosts=2,
    ranks_per_host=1,
    rate_mbit=100,
    sizes={"hidden": 96, "heads": 2, "layers": 2, "sequence": 16, "microbatches": 1},
)


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_a_job_on_two_hosts_is_slower_by_the_nic_of_one(monkeypatch, tmp_path):
    monkeypatch.setattr(wire_runs, "NUM_ITERATIONS", 12)
    healthy = case_of("healthy", num_hosts=2, ranks_per_host=1, ratio=1.0, peer=0)
    slow = replace(healthy, trouble="NIC at a third", ratio=1 / 3)
    with hosts_or_skip(running(SMALL, (healthy, slow), tmp_path)) as run:
        done = [run(case) for case in (healthy, slow)]
    assert not of_this_process()
    (healthy, first), (slow, second) = done
    assert slow.mean_ms > 1.5 * healthy.mean_ms
    hosts = [header.host for header in read_trace(second).headers.values()]
    assert hosts == ["host-0", "host-1"]
    row = wires.judge(slow, second, tmp_path / "kept", keeps_right=True)
    (packed,) = (tmp_path / "kept").rglob("*.tar.xz")
    assert judge_kept(packed) == row
    assert first != second


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_a_job_that_fails_says_so_and_leaves_no_host(tmp_path):
    broken = replace(SMALL, sizes={**SMALL.sizes, "heads": 5})  # which do not fit the width
    case = case_of("healthy", num_hosts=2, ranks_per_host=1, peer=0)
    with (
        pytest.raises(JobFailedError, match="Error"),
        hosts_or_skip(running(broken, (case,), tmp_path)) as run,
    ):
        run(case)
    assert not of_this_process()
