"""Hosts that wait for memory or a disk: what their ranks do, and that the kernel makes them wait.

Where a machine allows no control groups, the tests that need them are left out with its reason.
"""

from __future__ import annotations

import io
import os
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks import trainer_storage
from benchmarks.control_groups import (
    Controller,
    Group,
    Hierarchy,
    RefusedError,
    _first_allowed,
    _passed_on,
    disk_of,
    hierarchy_of,
)
from benchmarks.jobs import ROOT
from benchmarks.trainer_storage import (
    EASED_BYTES,
    LIMITED_AFTER,
    LOG_BYTES,
    READ_BPS,
    READ_BYTES,
    SPARED_BYTES,
    _change_limit,
    _kept,
    main,
    refusal,
)
from benchmarks.trainer_troubles import TROUBLES, Site
from benchmarks.trainers import Campaign, Case, render

MIB = 1 << 20
FIRST_MOUNTS = """tmpfs /sys/fs/cgroup tmpfs rw 0 0
cgroup {top}/cpu cgroup rw,cpu,cpuacct 0 0
cgroup {top}/memory cgroup rw,memory 0 0
cgroup2 {top}/unified cgroup2 rw 0 0
"""
SECOND_MOUNTS = "cgroup2 {top} cgroup2 rw,nosuid 0 0\n"


def site_of(folder, *, is_here=True):
    device = torch.device("cpu")
    return Site(device=device, is_here=is_here, scratch=folder, iterations=6)


def waits_of(name, folder, *, is_here, num=8):
    """Go through iterations of a training that does nothing else; how long each took, ms."""
    site, times = site_of(folder, is_here=is_here), []
    with TROUBLES[name].during(site):
        for site.iteration in range(1, num + 1):
            site.num_fetched, site.began_s = 1, time.perf_counter()
            time.sleep(0.2)  # so that a throttled disk owes nothing from the iteration before
            for act in (*site.at_fetch, *site.at_end):
                act()
            times.append(1e3 * (time.perf_counter() - site.began_s - 0.2))
    return times[LIMITED_AFTER:]


# Where groups are made


def test_a_group_of_the_first_version_is_made_below_that_of_the_process(tmp_path):
    (tmp_path / "memory/jobs/one").mkdir(parents=True)
    mounts, memberships = FIRST_MOUNTS.format(top=tmp_path), "4:memory:/jobs/one\n1:cpu:/\n0::/x\n"
    found = hierarchy_of(Controller.MEMORY, mounts, memberships)
    assert found.version == 1
    assert found.own == tmp_path / "memory/jobs/one"
    assert found.parents == (found.own, tmp_path / "memory")


def test_a_group_of_the_second_version_is_made_beside_that_of_the_process(tmp_path):
    (tmp_path / "user/session").mkdir(parents=True)
    mounts = SECOND_MOUNTS.format(top=tmp_path)
    found = hierarchy_of(Controller.DISK, mounts, "0::/user/session\n")
    assert (found.version, found.own) == (2, tmp_path / "user/session")
    assert found.parents == (tmp_path / "user", tmp_path)
    at_top = hierarchy_of(Controller.DISK, mounts, "0::/\n")
    assert at_top.parents == (tmp_path,)


def test_a_group_that_a_container_does_not_show_is_its_top_one(tmp_path):
    mounts = SECOND_MOUNTS.format(top=tmp_path)
    assert hierarchy_of(Controller.MEMORY, mounts, "0::/../other\n").own == tmp_path


def test_a_controller_that_the_first_version_does_not_mount_is_of_the_second(tmp_path):
    (tmp_path / "unified/x").mkdir(parents=True)
    mounts = FIRST_MOUNTS.format(top=tmp_path)
    assert hierarchy_of(Controller.DISK, mounts, "4:memory:/\n0::/x\n").version == 2
    with pytest.raises(RefusedError, match="no control groups are mounted"):
        hierarchy_of(Controller.DISK, "tmpfs /tmp tmpfs rw 0 0\n", "0::/\n")


def test_memory_is_limited_and_eased_in_the_files_of_each_version(tmp_path):
    for version, limit, stat in (
        (1, "memory.limit_in_bytes", "cache 7\nrss 300\nswap 20\n"),
        (2, "memory.high", "anon 300\nfile 7\n"),
    ):
        group = Group(path=tmp_path, home=tmp_path, version=version)
        (tmp_path / "memory.stat").write_text(stat)
        (tmp_path / "memory.swap.current").write_text("20\n")
        assert group.allocated_bytes() == 320
        group.limit_memory(200)
        group.ease_memory(50)
        assert (tmp_path / limit).read_text() == "250"
    (tmp_path / limit).write_text("max\n")
    group.ease_memory(50)
    assert (tmp_path / limit).read_text() == "max\n"


def test_cpu_time_is_limited_in_the_files_of_each_version(tmp_path):
    for version, name, text in (
        (1, "cpu.cfs_quota_us", "60000"),
        (1, "cpu.cfs_period_us", "100000"),
        (2, "cpu.max", "60000 100000"),
    ):
        Group(path=tmp_path, home=tmp_path, version=version).limit_cpu(60_000, 100_000)
        assert (tmp_path / name).read_text() == text


def test_who_finds_no_room_waits_where_the_first_version_would_kill_it(tmp_path):
    first, second = (Group(path=tmp_path, home=tmp_path, version=version) for version in (1, 2))
    first.wait_for_room()
    assert (tmp_path / "memory.oom_control").read_text() == "1"
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 1\nunder_oom 1\n")
    assert first.lacks_room
    assert not second.lacks_room


def test_a_disk_is_throttled_in_the_files_of_each_version(tmp_path):
    for version, name, text in (
        (1, "blkio.throttle.read_bps_device", "8:0 100"),
        (2, "io.max", "8:0 rbps=100"),
    ):
        Group(path=tmp_path, home=tmp_path, version=version).throttle("8:0", read_bps=100)
        assert (tmp_path / name).read_text() == text
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("before", ["cpu memory", "cpu"])
def test_a_controller_is_passed_on_below_a_group_of_the_second_version_as_long_as_needed(
    before, tmp_path
):
    passed = tmp_path / "cgroup.subtree_control"
    passed.write_text(before)
    with _passed_on(Controller.MEMORY, tmp_path):
        assert passed.read_text() == {"cpu": "+memory"}.get(before, before)
    assert passed.read_text() == {"cpu": "-memory"}.get(before, before)


def test_places_that_allow_no_group_are_all_told(tmp_path):
    where = Hierarchy(version=2, top=tmp_path, own=tmp_path / "user/session")
    with ExitStack() as stack, pytest.raises(RefusedError) as refused:
        _first_allowed(Controller.DISK, where, "of-1", stack)
    assert str(refused.value).startswith("no control group of blkio can be made: [Errno 2]")
    assert "user/cgroup.subtree_control" in str(refused.value)


def test_a_group_is_removed_with_what_it_was_made_for(tmp_path):
    where = Hierarchy(version=1, top=tmp_path, own=tmp_path)
    with ExitStack() as stack:
        group = _first_allowed(Controller.DISK, where, "of-1", stack)
        assert group.path.is_dir()
        stack.callback((group.path / "cgroup.procs").unlink)  # these are gone with it elsewhere
        (group.path / "cgroup.procs").write_text("4711")
    assert not group.path.exists()


def test_a_folder_on_no_disk_is_refused_with_what_to_do():
    with pytest.raises(RefusedError, match="/proc lies on no disk here: give TMPDIR a folder"):
        disk_of(Path("/proc"))


def test_what_a_machine_does_not_allow_is_one_line():
    reason = refusal("reads", Path("/proc"))
    assert reason
    assert "\n" not in reason


def test_a_keeper_is_not_started_without_its_words(capsys):
    assert main(["memory", "here", "/tmp"]) == 2
    assert main(["nothing", "1", "/tmp"]) == 2
    assert "python -m benchmarks.trainer_storage memory" in capsys.readouterr().err


# What ranks do


class Keepers:
    """Stand-ins for the processes of a rank; hold what these were told."""

    def __init__(self):
        self.kinds, self.told = [], io.StringIO()

    @contextmanager
    def __call__(self, kind, process, folder):
        assert process == os.getpid()
        self.kinds.append(kind)
        yield self.told


@pytest.fixture
def keepers(monkeypatch):
    found = Keepers()
    monkeypatch.setattr(trainer_storage, "_kept", found)
    return found


@pytest.mark.parametrize(
    ("name", "kind", "there"),
    [
        ("memory limit", "memory", []),
        ("slow reads", "reads", []),
        ("slow reads everywhere", "reads", ["reads"]),
        ("disk shared", "disk", []),
    ],
)
def test_the_faulty_ranks_host_alone_is_short_unless_all_are(
    name, kind, there, keepers, tmp_path, monkeypatch
):
    monkeypatch.setattr(trainer_storage.fcntl, "fcntl", lambda *_: 0)  # a disk may know no O_DIRECT
    assert TROUBLES[name].everywhere
    assert TROUBLES[name].needs == kind
    waits_of(name, tmp_path, is_here=False, num=1)
    assert keepers.kinds == there
    waits_of(name, tmp_path, is_here=True, num=1)
    assert keepers.kinds == [*there, kind]
    assert not list(tmp_path.iterdir())


def test_nobody_is_at_fault_where_nothing_is_slower():
    for name in ("cold memory out", "reads beside", "slow reads everywhere"):
        assert TROUBLES[name].causes == ()


def test_memory_is_limited_once_all_is_allocated_and_eased_while_it_takes_too_long(
    keepers, tmp_path, monkeypatch
):
    took_s = iter([9.0, 9.0, 9.0, 0.0, 9.0, 0.0])
    monkeypatch.setattr(trainer_storage.States, "change", lambda _: next(took_s))
    monkeypatch.setattr(trainer_storage, "STATES_BYTES", MIB)
    site = site_of(tmp_path)
    with TROUBLES["memory limit"].during(site):
        for site.iteration in range(1, 7):
            site.began_s = time.perf_counter() - 10.0
            site.at_end[0]()
    assert keepers.told.getvalue().split() == [
        str(SPARED_BYTES), f"+{EASED_BYTES}", f"+{EASED_BYTES}",
    ]  # fmt: skip


def test_the_training_draws_the_same_beside_states():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    trainer_storage.States(MIB).change(8)
    assert torch.equal(torch.rand(4), expected)


def test_a_limit_is_higher_where_pages_cannot_go_out():
    limits = []

    class Stiff:
        def allocated_bytes(self):
            return 100 * MIB

        def limit_memory(self, size_bytes):
            limits.append(size_bytes // MIB)
            if size_bytes < 70 * MIB:
                raise OSError("busy")

    _change_limit(Stiff(), str(64 * MIB))
    assert limits == [36, 68, 84]


def test_a_batch_is_read_once_an_iteration_at_another_place(keepers, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_storage.fcntl, "fcntl", lambda *_: 0)
    read = []
    monkeypatch.setattr(os, "preadv", lambda _, rooms, place: read.append((len(rooms[0]), place)))
    site = site_of(tmp_path, is_here=False)
    with TROUBLES["slow reads"].during(site):
        for site.iteration in (1, 2):
            for site.num_fetched in (1, 2):
                site.at_fetch[0]()
    assert read == [(READ_BYTES, READ_BYTES), (READ_BYTES, 2 * READ_BYTES)]


def test_a_log_is_on_the_disk_at_the_end_of_an_iteration(keepers, tmp_path, monkeypatch):
    done = []
    site = site_of(tmp_path, is_here=False)
    with TROUBLES["disk shared"].during(site):
        monkeypatch.setattr(os, "pwrite", lambda _, data, place: done.append((len(data), place)))
        monkeypatch.setattr(os, "fsync", lambda _: done.append("fsync"))
        site.at_end[0]()
    assert done == [(LOG_BYTES, 0), "fsync"]


def test_a_campaign_leaves_out_what_the_machine_refuses_and_says_it_once(
    tmp_path, monkeypatch, capsys
):
    tried = []

    def refused(kind, folder):
        tried.append((kind, folder))
        return "no control group of memory can be made: read-only" if kind == "memory" else ""

    monkeypatch.setattr(trainer_storage, "refusal", refused)
    options = {"device": "cpu", "ranks": 2, "seconds": 60, "troubles": 99, "profiles": False}
    given = Namespace(set="modern", first_seed=1, seeds=1, only=["of 2"], **options)
    campaign = Campaign(given, tmp_path)
    faults = {case.fault for cases in campaign._jobs() for case in cases}
    assert "slow reads" in faults
    assert not faults & {"memory limit", "cold memory out"}
    reasons = [why for why in campaign.refusals.values() if why]
    assert len(reasons) == 2
    said = capsys.readouterr().err.splitlines()
    assert sorted(said) == [f"left out: {name}: {reasons[0]}" for name in (
        "cold memory out", "memory limit",
    )]  # fmt: skip
    assert {folder for _, folder in tried} == {tmp_path}
    assert "This machine does not allow slow reads (x)." in render(
        [], [], "a machine", "command", ["slow reads (x)"]
    )


def test_a_fault_of_the_classic_set_needs_nothing(tmp_path):
    options = {"device": "cpu", "ranks": 2, "seconds": 60, "troubles": None}
    campaign = Campaign(Namespace(set="classic", **options), tmp_path)
    case = Case(loop="ddp", num_ranks=2, fault="slow x1.3", rank=0, seed=1)
    assert campaign._is_makeable(case)
    assert not campaign.refusals


# That the kernel makes them wait


def allowed(kind, folder):
    if reason := refusal(kind, folder):
        pytest.skip(reason)


def groups():
    return set(Path("/sys/fs/cgroup").rglob(f"of-{os.getpid()}-*"))


@pytest.mark.parametrize(
    ("name", "kind", "least_ms"),
    [
        ("memory limit", "memory", 3.0),
        ("slow reads", "reads", 500 * READ_BYTES / READ_BPS),
        ("disk shared", "disk", 15.0),
    ],
)
def test_a_host_makes_its_rank_wait_and_another_does_not(name, kind, least_ms, tmp_path):
    allowed(kind, tmp_path)
    free = statistics.median(waits_of(name, tmp_path, is_here=False))
    short = statistics.median(waits_of(name, tmp_path, is_here=True))
    assert short > free + least_ms, (short, free)
    assert not groups()
    assert not list(tmp_path.iterdir())


def test_pages_go_out_and_come_back_only_where_they_are_needed(tmp_path):
    allowed("memory", tmp_path)

    def faults_of(name):
        before = major_faults()
        num_waits = len(waits_of(name, tmp_path, is_here=True))
        return (major_faults() - before) / num_waits

    needed, cold = faults_of("memory limit"), faults_of("cold memory out")
    assert needed > 200
    assert cold < needed / 4


def major_faults():
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[9])


@pytest.mark.parametrize("kind", ["memory", "reads", "disk", "beside"])
def test_everything_is_undone_also_when_the_rank_is_killed(kind, tmp_path):
    allowed(kind, tmp_path)
    program = (
        "import os, pathlib, sys, time\n"
        "from benchmarks.trainer_storage import _kept\n"
        "with _kept(sys.argv[1], os.getpid(), pathlib.Path(sys.argv[2])):\n"
        "    print('trains', flush=True)\n"
        "    time.sleep(60)\n"
    )
    words = [sys.executable, "-c", program, kind, str(tmp_path)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout.readline() == "trains\n"
        (keeper,) = psutil.Process(rank.pid).children()
        pattern = f"of-{rank.pid}-{keeper.pid}"
        assert kind == "beside" or list(Path("/sys/fs/cgroup").rglob(pattern))
        rank.kill()
    psutil.wait_procs([keeper], timeout=20)
    assert not keeper.is_running() or keeper.status() == psutil.STATUS_ZOMBIE
    assert not list(Path("/sys/fs/cgroup").rglob(pattern))
    assert not list(tmp_path.iterdir())


def test_a_process_comes_back_to_its_groups(tmp_path):
    allowed("memory", tmp_path)
    before = Path("/proc/self/cgroup").read_text()
    with _kept("memory", os.getpid(), tmp_path):
        assert Path("/proc/self/cgroup").read_text() != before
    assert Path("/proc/self/cgroup").read_text() == before
