"""Asynchronous messages that hold up the device are waiting, not the host's time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from detect.whatif import replay_of_timeline
from detect.whatif.marks import BEGIN, COMMUNICATION, END, Marks, messages_hold_up
from megascan.timeline import Timeline
from megascan.topology import Layout

MS = 1_000_000


def marks(*rows: tuple[int, int, int]) -> Marks:
    """One rank's marks from (edge, start, end) in ms; communication is asynchronous."""
    edge, start, end = (np.array(column) for column in zip(*rows, strict=True))
    nothing = np.zeros(len(rows), dtype=np.int64)
    return Marks(
        row=np.arange(len(rows)),
        edge=edge,
        time_ns=start * MS,
        end_ns=end * MS,
        key=nothing,
        beside=edge == COMMUNICATION,
        segment=nothing,
        ranks=np.zeros(1, dtype=np.int64),
        iterations=np.ones(1, dtype=np.int64),
        bounds=np.zeros((1, 1, 2), dtype=np.int64),
    )


@pytest.mark.parametrize(
    ("next_begin", "expected"),
    [(40, True), (41, True), (20, False), (35, False), (60, False)],
    ids=["at once", "nearly", "beside it", "before its end", "long after"],
)
def test_a_message_holds_up_what_begins_with_its_end(next_begin: int, expected: bool) -> None:
    found = marks(
        (BEGIN, 0, 0), (END, 20, 20), (COMMUNICATION, 20, 40), (BEGIN, next_begin, next_begin)
    )
    assert messages_hold_up(found, np.array([False, False, True, False])) is expected


def test_messages_that_never_wait_tell_nothing() -> None:
    found = marks((BEGIN, 0, 0), (END, 20, 20), (COMMUNICATION, 20, 20), (BEGIN, 20, 20))
    assert messages_hold_up(found, np.array([False, False, True, False])) is False


def test_waiting_in_one_hardware_queue_is_not_the_hosts(
    timeline: Callable[..., Timeline],
) -> None:
    """Stage 0 waits 18 ms for the gradient of stage 1 before it may go on with a forward."""
    shared = {"kind": "p2p", "direction": "backward", "microbatch": 0, "chunk": 0}
    spans: list[dict[str, object]] = []
    for iteration in (3, 4):
        base = {"iteration": iteration}
        at = 1000 * iteration
        spans += [
            base | one
            for one in (
                work(0, at, 100, "iteration", kind="iteration"),
                work(0, at, 10, "forward"),
                shared | {"rank": 0, "name": "recv_backward", "op": "recv", "peer": 1, "track": 4,
                          "start_ns": at + 10, "duration_ns": 20, "wait_ns": 18, "transfer_ns": 2,
                          "match": iteration},
                work(0, at + 30, 10, "forward", microbatch=1),
                work(0, at + 40, 60, "backward"),
                work(1, at, 100, "iteration", kind="iteration"),
                work(1, at, 28, "backward"),
                shared | {"rank": 1, "name": "send_backward", "op": "send", "peer": 0, "track": 4,
                          "start_ns": at + 28, "duration_ns": 2, "wait_ns": 0, "transfer_ns": 2,
                          "match": iteration},
                work(1, at + 30, 70, "forward"),
            )
        ]  # fmt: skip
    spans.sort(key=lambda one: (one["rank"], one["start_ns"], -int(str(one["duration_ns"]))))
    replay = replay_of_timeline(timeline(Layout(pp=2), spans, {}))
    host = [n for n, node in enumerate(replay.graph.nodes) if node.optype == "host"]
    assert replay.weights[host].max(initial=0.0) < 1e-6
    assert replay.traced_s == pytest.approx(0.1)


def work(
    rank: int, start: int, length: int, name: str, kind: str = "compute", microbatch: int = 0
) -> dict[str, object]:
    return {
        "rank": rank,
        "kind": kind,
        "name": name,
        "track": 1,
        "start_ns": start,
        "duration_ns": length,
        "self_ns": length,
        "microbatch": microbatch,
        "chunk": 0,
    }
