"""One scenario for every rank must not cost one replay for every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from detect.optable import OpTable, replay_of_op_table
from detect.whatif.slowness import analyze


def processor_time(work: Callable[[], object]) -> float:
    """The best of three, seconds."""
    times = []
    for _ in range(3):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return min(times)


def test_time_is_linear_in_replicas(
    op_table: Callable[[Sequence], OpTable], data_parallel_rows: Callable[..., list]
) -> None:
    """Eight times the replicas in less than 24 times the time; all pairs would take 64."""
    small, large = (
        op_table(data_parallel_rows([1 + 0.001 * (n % 7) for n in range(size)], num_steps=20))
        for size in (128, 1024)
    )
    took = [processor_time(lambda t=t: analyze(replay_of_op_table(t))) for t in (small, large)]
    assert took[1] < 24 * took[0]
