from __future__ import annotations

import time

from megascan.clock import HostClock, host_domain, measure_offset_ns, now_ns
from megascan.instrument.agreement import agree, new_run_id


class FakeStore:
    """The four calls that are made of torch's store."""

    def __init__(self):
        self.values = {}

    def add(self, key, amount):
        self.values[key] = self.values.get(key, 0) + amount
        return self.values[key]

    def set(self, key, value):
        self.values[key] = value

    def wait(self, keys, timeout):
        assert all(key in self.values for key in keys)

    def get(self, key):
        return self.values[key].encode()

    def compare_set(self, key, expected, value):
        if self.values.get(key, "") == expected:
            self.values[key] = value
        return self.values[key].encode()


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
    store = FakeStore()
    first, second = (agree(store, rank) for rank in (0, 1))
    assert first.run_id == second.run_id
    assert first.clock.domain == second.clock.domain
    assert first.clock.offset_ns == second.clock.offset_ns
    assert first.clock.origin_ns <= second.clock.origin_ns


def test_a_second_start_of_the_same_job_is_another_run(monkeypatch):
    ids = iter(["one", "two"])
    monkeypatch.setattr("megascan.instrument.agreement.new_run_id", lambda: next(ids))
    store = FakeStore()
    runs = [[agree(store, rank).run_id for rank in (0, 1)] for _ in range(2)]
    assert runs == [["one"] * 2, ["two"] * 2]


def test_run_ids_sort_by_time_and_differ():
    one, other = new_run_id(), new_run_id()
    assert one != other
    assert len(one) == len("20261121-084512-3f9a")
