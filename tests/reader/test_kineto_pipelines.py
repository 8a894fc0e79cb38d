"""Profiles of pipelines: batches of messages that one kernel carries out, and the layout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from aggregate import build_timeline
from megascan.reader import read_trace
from megascan.schema import Track

NUM_STEPS, STEP_US = 3, 1000.0
ACTIVATION = 1 << 20
"""Elements of a message."""


@dataclass
class Pipelines:
    """Profiles of a job as torch.distributed.pipelining has it: neighbours exchange messages in
    batches, `reducers` (rank -> members) reduce gradients; of `reduced` elements each.
    """

    path: Path
    world_size: int = 4
    length: int = 2
    """Ranks of a pipeline, which are next to each other."""
    reduced: int = ACTIVATION
    across: bool = False
    """Whether gradients are reduced between the stages of a pipeline instead of its replicas."""
    is_named: bool = False
    """Whether a device mesh has given the groups of the pipelines a name."""
    sends: bool = True
    extra: list[dict[str, object]] = field(default_factory=list)

    def write(self) -> Path:
        self.path.mkdir()
        for rank in range(self.world_size):
            info: dict[str, object] = {"rank": rank, "world_size": self.world_size}
            if self.is_named:
                info["pg_config"] = [
                    {"pg_name": "5", "pg_desc": "mesh_pp", "ranks": self.pipeline_of(rank)}
                ]
            document = {"distributedInfo": info, "traceEvents": list(self.events(rank))}
            (self.path / f"rank{rank}.json").write_text(json.dumps(document))
        return self.path

    def pipeline_of(self, rank: int) -> list[int]:
        first = rank - rank % self.length
        return list(range(first, first + self.length))

    def replicas_of(self, rank: int) -> list[int]:
        return list(range(rank % self.length, self.world_size, self.length))

    def events(self, rank: int) -> Iterator[dict[str, object]]:
        pipeline = self.pipeline_of(rank)
        place = pipeline.index(rank)
        for step in range(NUM_STEPS):
            start = STEP_US * step
            yield event("user_annotation", f"ProfilerStep#{step}", start, STEP_US - 1)
            yield from kernel("gemm(Params)", start + 5, 100, step * 100 + 90, stream=7)
            # the second batch sends and receives: its halves are noted down before it is launched
            if self.sends and place + 1 < self.length:
                yield from self.batch(rank, start + 10, step * 100 + 1, send=pipeline[place + 1])
                yield from self.batch(
                    rank, start + 300, step * 100 + 2,
                    send=pipeline[place + 1], recv=pipeline[place + 1],
                )  # fmt: skip
            if self.sends and place:
                yield from self.batch(rank, start + 110, step * 100 + 3, recv=pipeline[place - 1])
                yield from self.batch(
                    rank, start + 300, step * 100 + 4,
                    recv=pipeline[place - 1], send=pipeline[place - 1],
                )  # fmt: skip
            members = pipeline if self.across else self.replicas_of(rank)
            yield from self.reduction(members, start + 600, step * 100 + 50)

    def batch(
        self, rank: int, ts: float, correlation: int, **peers: int
    ) -> Iterator[dict[str, object]]:
        """Notes of messages, then the annotation in which their kernel is launched."""
        members = self.pipeline_of(rank)
        for number, (op, peer) in enumerate(peers.items()):
            side = "Dst Rank" if op == "send" else "Src Rank"
            told = {
                "Collective name": op, "In msg nelems": ACTIVATION, "dtype": "BFloat16",
                "Process Group Name": "5", "Process Group Description": "default_pg",
                "Process Group Ranks": str(members), side: members.index(peer),
            }  # fmt: skip
            yield event("cpu_op", "record_param_comms", ts + number, 0.5, **told)
        yield event("user_annotation", "nccl:coalesced", ts + 3, 4)
        name = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
        yield from kernel(name, ts + 4, 80, correlation, stream=17)

    def reduction(
        self, members: list[int], ts: float, correlation: int
    ) -> Iterator[dict[str, object]]:
        told = {
            "Collective name": "allreduce", "In msg nelems": self.reduced, "dtype": "Float",
            "Process Group Name": f"9{members[0]}", "Process Group Description": "undefined",
            "Process Group Ranks": str(members),
        }  # fmt: skip
        name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        yield from kernel(name, ts, 50, correlation, stream=20, **told)


def event(
    category: str, name: str, ts: float, dur: float, tid: int = 4711, **arguments: object
) -> dict[str, object]:
    times = {"ts": ts, "dur": dur, "args": arguments}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": tid, **times}


def kernel(
    name: str, ts: float, dur: float, correlation: int, stream: int, **told: object
) -> Iterator[dict[str, object]]:
    """A launch and what it launched."""
    yield event("cuda_runtime", "cudaLaunchKernel", ts, 0.5, correlation=correlation)
    yield event(
        "kernel", name, ts + 10, dur, stream, correlation=correlation, stream=stream, **told
    )


@pytest.fixture
def pipelines(tmp_path):
    return lambda **options: Pipelines(tmp_path / "profiles", **options)


def test_a_batch_is_its_messages(pipelines):
    table = read_trace(pipelines().write()).spans.to_pandas()
    messages = table[(table["kind"] == "p2p") & (table["iteration"] == 2)]
    own = messages[messages["rank"] == 2].astype({"op": str}).sort_values(["start_ns", "op"])
    assert own[["op", "peer", "size_bytes"]].values.tolist() == [
        ["send", 3, 2 * ACTIVATION],
        ["recv", 3, 2 * ACTIVATION],
        ["send", 3, 2 * ACTIVATION],
    ]
    together = own[["start_ns", "duration_ns"]].values.tolist()
    assert together[1] == together[2]
    assert set(own["track"][1:]) == {Track.COMMUNICATION}  # one event runs next to nothing


def test_messages_of_batches_meet_their_counterparts(pipelines):
    timeline = build_timeline(read_trace(pipelines().write()))
    table = timeline.spans.to_pandas()
    assert (table[table["kind"] == "p2p"]["match"] >= 0).all()


def test_who_sends_to_whom_tells_the_pipelines(pipelines):
    headers = read_trace(pipelines().write()).headers
    assert (headers[0].layout.pp, headers[0].layout.dp) == (2, 2)
    places = [(headers[rank].coordinates.pp, headers[rank].coordinates.dp) for rank in range(4)]
    assert places == [(0, 0), (1, 0), (0, 1), (1, 1)]


@pytest.mark.parametrize(("sends", "pp"), [(True, 2), (False, 1)])
def test_pipelines_that_have_a_name_and_no_messages_are_not_used(pipelines, sends, pp):
    """A process may have made the groups of a pipeline, and train without one (HSDP)."""
    layout = read_trace(pipelines(is_named=True, sends=sends).write()).layout
    assert (layout.pp, layout.dp) == (pp, 4 // pp)


def test_a_pipeline_of_all_ranks(pipelines):
    layout = read_trace(pipelines(length=4).write()).headers[0].layout
    assert (layout.pp, layout.dp) == (4, 1)


@pytest.mark.parametrize(
    ("options", "pp"),
    [
        ({"across": True}, 1),  # a ring over parts of a sequence reduces gradients as well
        ({"across": True, "reduced": 16}, 2),  # a loss, a norm
        ({"is_named": True}, 2),
    ],
)
def test_what_is_reduced_between_stages_tells_rings_from_pipelines(pipelines, options, pp):
    layout = read_trace(pipelines(**options).write()).headers[0].layout
    assert (layout.pp, layout.dp) == (pp, 4 // pp)
