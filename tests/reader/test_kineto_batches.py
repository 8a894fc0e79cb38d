"""Batches of messages in profiles: a kernel carries out what its own thread noted down."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascan.reader import read_trace

SENDRECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
TRAINER, OTHER = 5, 6
"""Threads."""


def event(category: str, name: str, ts: float, dur: float, tid: int, **told: object) -> dict:
    times = {"ph": "X", "pid": 0, "tid": tid, "ts": ts, "dur": dur}
    return {"cat": category, "name": name, **times, "args": told}


def note(op: str, peer: int, ts: float, tid: int) -> dict:
    """What a thread notes down of a message."""
    side = "Dst Rank" if op == "send" else "Src Rank"
    told = {
        "Collective name": op, "In msg nelems": 1 << 10, "dtype": "Float", side: peer,
        "Process Group Name": "5", "Process Group Description": "mesh_pp",
        "Process Group Ranks": "[0, 1, 2, 3]",
    }  # fmt: skip
    return event("cpu_op", "record_param_comms", ts, 0.1, tid, **told)


def launch(ts: float, tid: int) -> Iterator[dict]:
    """A batch's annotation, the launch in it and the kernel."""
    yield event("user_annotation", "nccl:coalesced", ts, 4, tid)
    yield event("cuda_runtime", "cudaLaunchKernel", ts + 1, 0.5, tid, correlation=int(ts))
    place = {"correlation": int(ts), "stream": 17}
    yield event("kernel", SENDRECV, ts + 50, 20, 17, **place)


def messages(folder: Path, events: list[dict]) -> list[list[object]]:
    """Return (operation, peer) of each message of rank 0, ordered by its kernel's start."""
    document = {"distributedInfo": {"rank": 0, "world_size": 4}, "traceEvents": events}
    path = folder / "rank0.json"
    path.write_text(json.dumps(document))
    table = read_trace(path).spans.to_pandas()
    table = table[table["kind"] == "p2p"].astype({"op": str})
    table = table.sort_values(["start_ns", "op"])
    return table[["op", "peer"]].values.tolist()


OWN = [note("send", 1, 100, TRAINER), note("recv", 1, 105, TRAINER), *launch(110, TRAINER)]


@pytest.mark.parametrize(
    "beside",
    [
        pytest.param([], id="nothing else"),
        pytest.param([note("send", 3, 107, OTHER)], id="a note of another thread"),
        pytest.param(
            [event("user_annotation", "nccl:coalesced", 102, 1, OTHER)], id="a mark of it"
        ),
    ],
)
def test_a_batch_is_what_its_own_thread_noted_down(tmp_path: Path, beside: list[dict]) -> None:
    assert messages(tmp_path, [*OWN, *beside]) == [["recv", 1], ["send", 1]]


def test_batches_of_two_threads_that_take_turns(tmp_path: Path) -> None:
    other = [note("send", 2, 101, OTHER), note("recv", 3, 106, OTHER), *launch(120, OTHER)]
    first, second = [["recv", 1], ["send", 1]], [["recv", 3], ["send", 2]]
    assert messages(tmp_path, [*OWN, *other]) == [*first, *second]


def test_a_batch_begins_where_the_one_before_ended(tmp_path: Path) -> None:
    later = [note("recv", 2, 130, TRAINER), *launch(140, TRAINER)]
    assert messages(tmp_path, [*OWN, *later]) == [["recv", 1], ["send", 1], ["recv", 2]]
