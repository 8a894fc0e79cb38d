from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from megascan.instrument.starting import agree, new_run_id
from megascan.tracer.timer import HostClock, host_domain, measure_offset_ns, now_ns


def agree_all(store, resumed):
    """What each of several ranks, all of which wait for the others, comes to."""
    with ThreadPoolExecutor(len(resumed)) as ranks:
        waiting = [
            ranks.submit(agree, store, rank, len(resumed), resumed=each)
            for rank, each in enumerate(resumed)
        ]
        return [each.result(timeout=20) for each in waiting]


def test_monotonic_and_unix_time_are_tied_to_microseconds():
    offset_ns = measure_offset_ns()
    assert abs(time.time_ns() - (now_ns() + offset_ns)) < 1_000_000
    assert abs(measure_offset_ns() - offset_ns) < 1_000_000


def test_the_origin_in_unix_time():
    clock = HostClock(domain="d", offset_ns=100, origin_ns=23)
    assert clock.origin_unix_ns == 123


def test_one_domain_a_host():
    assert host_domain() == host_domain() != ""


def test_ranks_agree_on_the_run_and_on_their_host_s_tie():
    first, second = agree_all(HashStore(), [False, False])
    assert first.run_id == second.run_id
    assert first.clock.domain == second.clock.domain
    assert first.clock.offset_ns == second.clock.offset_ns
    assert first.clock.origin_ns != second.clock.origin_ns


def test_a_second_start_of_the_same_job_is_another_run(monkeypatch):
    ids = iter(["one", "two"])
    monkeypatch.setattr("megascan.instrument.starting.new_run_id", lambda: next(ids))
    store = HashStore()
    runs = [[rank.run_id for rank in agree_all(store, [False, False])] for _ in range(2)]
    assert runs == [["one"] * 2, ["two"] * 2]


@pytest.mark.parametrize("resumed", [*itertools.product([False, True], repeat=3)])
def test_one_rank_that_goes_on_is_enough_for_all(resumed):
    """A new host takes a lost one's place: its launcher has never restarted anything."""
    assert {rank.resumed for rank in agree_all(HashStore(), resumed)} == {any(resumed)}


def test_a_second_start_does_not_remember_that_the_first_went_on():
    store = HashStore()
    assert {rank.resumed for rank in agree_all(store, [True, False])} == {True}
    assert {rank.resumed for rank in agree_all(store, [False, False])} == {False}


def test_a_rank_that_never_starts_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr("megascan.instrument.starting._TIMEOUT", timedelta(milliseconds=50))
    with pytest.raises(RuntimeError, match="not all 2 ranks started tracing"):
        agree(HashStore(), 0, 2, resumed=False)


def test_run_ids_sort_by_time_and_differ():
    one, other = new_run_id(), new_run_id()
    assert one != other
    assert len(one) == len("20261121-084512-3f9a")
