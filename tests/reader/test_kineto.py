"""PyTorch profiler files: kernels of a GPU job, and a real profile of two gloo processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from megascan.errors import InputError
from megascan.reader import Format, read_trace, sniff
from megascan.topology import Layout
from tests import ranks

if TYPE_CHECKING:
    from conftest import Profiles

ORIGIN_NS = 1_700_000_000_123_456_789


def test_kernels_in_our_words(profiles: Profiles) -> None:
    trace = read_trace(profiles.write())
    table = trace.spans.to_pandas()
    columns = ["kind", "name", "iteration", "op", "group", "sequence", "size_bytes", "peer"]
    assert table[table["rank"] == 1][columns].astype(object).values.tolist() == [
        ["iteration", "iteration", 5, "", "", -1, -1, -1],
        ["collective", "all_reduce", 5, "all_reduce", "tp@0", 70, 2048, -1],
        ["p2p", "recv", 5, "recv", "tp@0", 0, 1024, 0],
        ["compute", "gemm", 5, "", "", -1, -1, -1],
        ["iteration", "iteration", 6, "", "", -1, -1, -1],
        ["collective", "all_reduce", 6, "all_reduce", "tp@0", 71, 2048, -1],
        ["p2p", "recv", 6, "recv", "tp@0", 0, 1024, 0],
        ["compute", "gemm", 6, "", "", -1, -1, -1],
    ]
    assert table["track"].tolist()[:4] == [1, 2, 2, 1]


def test_times_and_launches(profiles: Profiles) -> None:
    table = read_trace(profiles.write_rank(0)).spans.to_pandas()
    kernel = table[table["name"] == "gemm"].iloc[0]
    assert kernel["start_ns"] == ORIGIN_NS + 995_125
    assert kernel["duration_ns"] == 20_250
    assert kernel["launch_ns"] == 110_000 - 995_125


def test_header(profiles: Profiles) -> None:
    trace = read_trace(profiles.write())
    assert trace.layout == Layout(tp=2)
    header = trace.headers[1]
    assert header.groups == {"tp@0": (0, 1)}
    assert (header.host, header.device.name, header.backend) == ("node7", "NVIDIA H100", "nccl")
    assert "ranks 0 and 1: 2 host events are not shown" in trace.completeness.notes


def test_missing_rank(profiles: Profiles) -> None:
    profiles.write_rank(1)
    with pytest.raises(InputError, match="rank 0 is missing"):
        read_trace(profiles.path)


def test_a_profile_that_does_not_say_its_rank(profiles: Profiles) -> None:
    path = profiles.write_rank(0)
    path.write_text(path.read_text().replace('"distributedInfo"', '"other"'))
    unnamed = path.rename(path.with_name("profile.json"))
    trace = read_trace(unnamed)
    assert trace.headers[0].world_size == 1
    assert "profile.json does not say its rank: it is taken for a job of one process" in (
        trace.completeness.notes
    )
    profiles.write_rank(1)
    with pytest.raises(InputError, match=r"does not say its rank .* as in rank3\.json"):
        read_trace(profiles.path)


def say(profiles: Profiles, of: int, **told: object) -> Path:
    """Write a rank's profile, named for no rank, whose distributedInfo is what is told."""
    path = profiles.write_rank(of)
    document = json.loads(path.read_text()) | {"distributedInfo": told}
    path.write_text(json.dumps(document))
    return path.rename(path.with_name(f"profile-{of}.json"))


def test_a_rank_as_text_is_a_number(profiles: Profiles) -> None:
    for rank in range(2):
        say(profiles, rank, rank=str(rank), world_size="2")
    trace = read_trace(profiles.path)
    assert {rank: header.world_size for rank, header in trace.headers.items()} == {0: 2, 1: 2}


@pytest.mark.parametrize("rank", ["", "three", "-1", "1.0", "٣", "9" * 30])
def test_a_text_that_is_no_rank_is_refused(profiles: Profiles, rank: str) -> None:
    with pytest.raises(InputError, match="its header says rank"):
        read_trace(say(profiles, 0, rank=rank, world_size=2))


def test_a_profile_of_a_larger_job_that_does_not_say_its_rank(profiles: Profiles) -> None:
    path = say(profiles, 0, world_size=4)
    taken = "profile-0.json does not say its rank: it is taken for rank 0 of 4"
    assert taken in read_trace(path).completeness.notes
    say(profiles, 1, world_size=4)
    with pytest.raises(
        InputError, match=r"only says that there are 4\); put it into the file's name"
    ):
        read_trace(profiles.path)
    assert list(read_trace(path.rename(path.with_name("rank3.json"))).headers) == [3]


def test_a_job_of_one_process_needs_no_rank(profiles: Profiles) -> None:
    assert list(read_trace(say(profiles, 0, world_size=1)).headers) == [0]


def test_cut_off(profiles: Profiles) -> None:
    path = profiles.write_rank(0)
    text = path.read_bytes()
    path.write_bytes(text[: text.rindex(b'"ph"') + 40])
    trace = read_trace(path)
    assert trace.spans.num_rows == 7
    assert trace.completeness.notes[-2:] == (
        "rank 0: worker_0.pt.trace.json is cut off",
        "rank 0: 2 host events are not shown",
    )


def test_negative_duration(profiles: Profiles) -> None:
    path = profiles.write_rank(0)
    path.write_text(path.read_text().replace('"dur": 50', '"dur": -50', 1))
    with pytest.raises(InputError, match="1 events have a negative duration"):
        read_trace(path)


PROGRAM = """
import sys, torch, torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

rank = int(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/store", rank=rank, world_size=2)
x = torch.ones(64, 64)
with profile(
    activities=[ProfilerActivity.CPU],
    schedule=schedule(wait=0, warmup=1, active=2),
    record_shapes=True,
    on_trace_ready=lambda p: p.export_chrome_trace(f"{sys.argv[2]}/worker{rank}.json"),
) as profiler:
    for _ in range(3):
        y = x @ x
        dist.all_reduce(y)
        dist.send(y, 1) if rank == 0 else dist.recv(y, 0)
        profiler.step()
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_a_real_profile_of_two_gloo_processes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    workers = [ranks.start("-c", PROGRAM, rank, tmp_path) for rank in range(2)]
    for worker in workers:
        said, _ = worker.communicate(timeout=120)
        assert worker.returncode == 0, said
    assert sniff(tmp_path) is Format.KINETO
    trace = read_trace(tmp_path)
    table = trace.spans.to_pandas()
    assert trace.completeness.ranks == (0, 1)
    for rank, op in ((0, "send"), (1, "recv")):
        own = table[table["rank"] == rank]
        assert own[own["kind"] == "iteration"]["iteration"].tolist() == [2, 3]
        reduced = own[own["op"] == "all_reduce"]
        assert reduced[["iteration", "group", "sequence"]].values.tolist() == [
            [2, "world@0", 0],
            [3, "world@0", 0],
        ]
        assert reduced["size_bytes"].tolist() == [64 * 64 * 4] * 2
        assert own[own["kind"] == "p2p"][["op", "peer"]].values.tolist() == [[op, 1 - rank]] * 2
        assert (own["name"] == "aten::matmul").sum() == 2
    ends = (table["start_ns"] + table["duration_ns"])[table["op"] == "all_reduce"]
    assert abs(ends.iloc[0] - ends.iloc[2]) < 1e9
