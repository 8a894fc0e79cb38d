"""What single events of a profile become: communication, iterations, phases, the layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest

from megascan.errors import InputError
from megascan.header import Trainer
from megascan.reader import read_trace
from megascan.reader.kineto.communication import peer_rank
from megascan.reader.kineto.document import ProcessGroup
from megascan.reader.kineto.steps import _repetitions
from megascan.schema import NOT_APPLICABLE
from megascan.topology import Layout
from megascan.vocabulary import is_bound_by_memory, multiplies_matrices

if TYPE_CHECKING:
    from benchmarks.profile_jobs import Job

SENDRECV = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)"


def written(
    folder: Path, events: list[dict[str, Any]], rank: int = 0, world_size: int = 4
) -> pd.DataFrame:
    document = {
        "distributedInfo": {"rank": rank, "world_size": world_size},
        "traceEvents": [{"ph": "X", "pid": 0, **event} for event in events],
    }
    path = folder / f"rank{rank}.json"
    path.write_text(json.dumps(document))
    return read_trace(path).spans.to_pandas()


def host(name: str, start: float, length: float, category: str = "user_annotation", **args: Any):
    return {"cat": category, "name": name, "tid": 5, "ts": start, "dur": length, "args": args}


def launched(name: str, at: float, start: float, length: float, stream: int, **args: Any):
    """Return a launch and its kernel; the time of the launch is its correlation id."""
    place = {"stream": stream, "correlation": int(at)}
    kernel = {"cat": "kernel", "name": name, "tid": stream, "ts": start, "dur": length}
    call = host("cudaLaunchKernel", at, 1, "cuda_runtime", correlation=int(at))
    return [call, {**kernel, "args": {**place, **args}}]


def test_a_sendrecv_of_an_all_to_all_is_one(tmp_path):
    table = written(
        tmp_path,
        [
            host("nccl:all_to_all", 10, 5),
            *launched(SENDRECV, 12, 100, 50, 20),
            host("nccl:send 0->2", 20, 5),
            *launched(SENDRECV, 22, 200, 50, 24),
            *launched(SENDRECV, 32, 300, 50, 24),
        ],
    )
    kept = table[["kind", "name", "op", "group", "peer"]].values.tolist()
    assert kept[0][:3] == ["collective", "all_to_all", "all_to_all"]
    assert kept[1] == ["p2p", "send", "send", "", 2]
    assert kept[2][:3] == ["p2p", "send_recv", ""]


@pytest.mark.parametrize(
    ("value", "rank", "expected"),
    [
        pytest.param(1, 1, 5, id="by its place in the group"),
        pytest.param(5, 1, 5, id="by its rank, which is no place"),
        pytest.param(1, 5, 1, id="by its rank: at that place is who says it"),
        pytest.param(5, 5, NOT_APPLICABLE, id="nobody is his own partner"),
        pytest.param(-1, 1, NOT_APPLICABLE, id="not said"),
    ],
)
def test_a_partner_is_given_by_its_place_or_by_its_rank(value, rank, expected):
    assert peer_rank(value, ProcessGroup("pp@1", (1, 5)), rank) == expected


@pytest.mark.parametrize(
    ("stated", "peers"),
    [
        pytest.param((2, 10), [2, 10], id="by their ranks: there is no place 10"),
        pytest.param((0, 2), [2, 10], id="by their places"),
        pytest.param((2,), [10], id="either: taken for a place"),
    ],
)
def test_partners_of_one_group_are_all_given_in_one_way(tmp_path, stated, peers):
    """Rank 6 of the stages {2, 6, 10, 14}: a stage before it and one behind it."""
    said = {"Process Group Name": "17", "Process Group Ranks": "[2, 6, 10, 14]",
            "Process Group Description": "PIPELINE_MODEL_PARALLEL_GROUP"}  # fmt: skip
    events = [
        event
        for at, (collective, key, value) in enumerate(
            zip(("recv", "send"), ("Src Rank", "Dst Rank"), stated, strict=False)
        )
        for event in launched(
            SENDRECV, 10 + at, 100 + 50 * at, 40, 20,
            **{**said, "Collective name": collective, key: value},
        )
    ]  # fmt: skip
    table = written(tmp_path, events, rank=6, world_size=16)
    assert table["peer"].tolist() == peers


def test_collectives_without_a_group_on_one_stream_are_of_all_ranks(tmp_path):
    kernel = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)"
    alone = written(tmp_path, launched(kernel, 10, 100, 50, 20))
    assert alone["group"].tolist() == ["world@0"]
    several = written(
        tmp_path, [*launched(kernel, 10, 100, 50, 20), *launched(kernel, 11, 200, 50, 24)]
    )
    assert several["group"].tolist() == ["", ""]


@pytest.mark.parametrize("is_of_profile", [True, False])
def test_kernels_that_were_queued_before_the_profile_say_nothing_of_it(tmp_path, is_of_profile):
    """Of these nothing but the name is recorded; all others say their group."""
    kernel = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    said = {"Collective name": "_reduce_scatter_base", "Process Group Name": "0",
            "Process Group Ranks": "[0, 1, 2, 3]", "Process Group Description": "default_pg",
            "Group size": 4}  # fmt: skip
    queued = launched(kernel, 8, 50, 40, 22)
    events = [
        *launched(kernel, 10, 100, 50, 22, **said),
        *launched(kernel, 11, 200, 50, 24, **said),
    ]
    document = {
        "distributedInfo": {"rank": 0, "world_size": 4},
        "traceEvents": [
            {"ph": "X", "pid": 0, **event}
            for event in (*(queued if is_of_profile else queued[1:]), *events)
        ],
    }
    (tmp_path / "rank0.json").write_text(json.dumps(document))
    trace = read_trace(tmp_path / "rank0.json")
    assert sorted(trace.spans.to_pandas()["group"]) == ["", "world@0", "world@0"]
    notes = [note for note in trace.completeness.notes if "does not say its process group" in note]
    assert len(notes) == is_of_profile


def test_the_operator_around_a_kernel_describes_it(tmp_path):
    said = {
        "Collective name": "all_to_allv", "In msg nelems": 512, "dtype": "BFloat16", "Seq": 9,
        "Process Group Name": "7", "Process Group Ranks": "[0, 2]",
        "Process Group Description": "mesh_ep",
    }  # fmt: skip
    table = written(
        tmp_path,
        [
            host("record_param_comms", 10, 5, "cpu_op", **said),
            *launched(SENDRECV, 12, 100, 50, 20),
        ],
    )
    row = table.iloc[0]
    assert (row["op"], row["group"], row["size_bytes"], row["sequence"]) == (
        "all_to_all", "mesh_ep@0", 1024, 9,
    )  # fmt: skip


@pytest.mark.parametrize(
    "kernel", ["void deep_ep::internode::dispatch<8>(int)", "userbuffers_fp16_sum_inplace_gpu_rr4"]
)
def test_kernels_that_write_into_other_ranks_memory_are_no_compute(tmp_path, kernel):
    table = written(tmp_path, launched(kernel, 10, 100, 50, 20))
    assert table[["kind", "op"]].values.tolist() == [["p2p", ""]]


def test_kernels_know_their_pass_and_the_optimizer(tmp_path):
    engine = host("autograd::engine::evaluate_function: AddmmBackward0", 20, 8, "cpu_op")
    table = written(
        tmp_path,
        [
            engine,
            host("Optimizer.step#AdamW.step", 40, 8),
            *launched("void gemm<float>(P)", 10, 100, 50, 7, grid=[4, 2, 1], block=[128, 1, 1]),
            *launched("void gemm<float>(P)", 22, 200, 50, 7, grid=[4, 1, 1], block=[32, 4, 1]),
            *launched("void adam(P)", 42, 300, 50, 7, grid=[9, 1, 1], block=[64, 1, 1]),
            {
                "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "tid": 7, "ts": 400,
                "dur": 5, "args": {"stream": 7},
            },
        ],
    )  # fmt: skip
    assert table[["kind", "name", "phase"]].values.tolist() == [
        ["compute", "gemm<<<4x2, 128>>>", "forward"],
        ["compute", "gemm<<<4, 32x4>>>", "backward"],
        ["optimizer", "adam<<<9, 64>>>", ""],
        ["compute", "Memcpy HtoD", ""],
    ]


def test_loading_is_on_the_hosts_track(tmp_path):
    name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    table = written(tmp_path, [host(name, 5, 20), *launched("gemm", 30, 100, 50, 7)])
    row = table[table["kind"] == "data"].iloc[0]
    assert (row["name"], row["track"]) == ("_MultiProcessingDataLoaderIter.__next__", 3)
    assert row["duration_ns"] == 20_000


def test_an_operator_of_the_host_belongs_to_the_iteration_in_which_it_begins(tmp_path):
    steps = [host("ProfilerStep#4", 0, 50), host("ProfilerStep#5", 50, 50)]
    table = written(tmp_path, [*steps, host("aten::mm", 45, 10, "cpu_op")])
    row = table[table["name"] == "aten::mm"].iloc[0]
    assert (row["iteration"], row["launch_ns"]) == (5, -1)


def test_iterations_on_the_device_follow_each_other(tmp_path):
    table = written(
        tmp_path,
        [
            host("ProfilerStep#4", 0, 50),
            *launched("gemm", 10, 20, 70, 7),
            host("ProfilerStep#5", 51, 50),
            *launched("gemm", 60, 95, 25, 7),
            host("ProfilerStep#6", 150, 50),
            *launched("gemm", 160, 170, 10, 7),
        ],
    )
    steps = table[table["kind"] == "iteration"]
    begins = (steps["start_ns"] // 1000).tolist()
    assert begins == [20, 90, 150]
    assert (steps["duration_ns"] // 1000).tolist() == [70, 60, 50]
    assert table[table["name"] == "gemm"]["iteration"].tolist() == [5, 6, 7]


def test_repetitions_are_found_by_their_kernels():
    once = [1, 2, 1, 2, 3, 3, 1, 2, 1, 2, 4, 4]
    assert _repetitions(np.tile(once, 5)).tolist() == [0, 12, 24, 36, 48]
    assert _repetitions(np.r_[np.tile(once, 5), [1, 2, 1]]).tolist() == [0, 12, 24, 36, 48]
    assert _repetitions(np.arange(100)).tolist() == []


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("ddp", Layout(dp=4)),
        ("fsdp", Layout(dp=4)),
        ("tp", Layout(tp=2, dp=4)),
        ("pp", Layout(pp=2, dp=4)),
    ],
)
def test_the_layout_comes_from_the_groups(job: Callable[..., Job], tmp_path, kind, layout):
    folder = job(kind, num_iterations=1, num_layers=2).write(tmp_path / "profiles")
    trace = read_trace(folder)
    assert trace.layout == layout
    assert not [note for note in trace.completeness.notes if "process group" in note]


def test_a_schedule_that_repeats_leaves_several_files_a_rank(job, tmp_path):
    ranks = job("ddp", num_ranks=2, num_iterations=2, num_layers=2).run()
    for rank in ranks:
        text = json.dumps(rank.document())
        for cycle, number in enumerate((3, 13)):
            later = text.replace("ProfilerStep#3", f"ProfilerStep#{number}")
            later = later.replace("ProfilerStep#4", f"ProfilerStep#{number + 1}")
            (tmp_path / f"w{rank.number}.{cycle}.pt.trace.json").write_text(later)
    trace = read_trace(tmp_path)
    assert [one.window for one in trace.windows[1]] == [0, 1]
    kept = trace.spans.to_pandas()
    iterations = kept[(kept["rank"] == 1) & (kept["kind"] == "iteration")]["iteration"]
    assert sorted(iterations) == [4, 5, 14, 15]


def test_two_runs_in_one_folder_are_one_sentence(job, tmp_path):
    for name in ("one", "two"):
        document = job("ddp", num_ranks=2, num_iterations=1, num_layers=2).run()[0].document()
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"both hold rank 0 .* move one of them"):
        read_trace(tmp_path)


def test_the_device_that_the_kernels_ran_on(tmp_path):
    events = launched("gemm", 10, 100, 50, 7, device=3)
    properties = [{"id": 0, "name": "other"}, {"id": 3, "name": "NVIDIA H200"}]
    document = {"deviceProperties": properties, "distributedInfo": {"rank": 0, "world_size": 1}}
    events = [{"ph": "X", "pid": 3, **event} for event in events]
    (tmp_path / "profile.json").write_text(json.dumps(document | {"traceEvents": events}))
    device = read_trace(tmp_path).headers[0].device
    assert (device.index, device.name) == (3, "NVIDIA H200")


@pytest.mark.parametrize(
    "name",
    [
        "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>()",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>()",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernel_layer_norm<float>()",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdam>()",
        "triton_red_fused_native_layer_norm_0",
        "void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 512, true, 1>()",
    ],
)
def test_kernels_that_move_bytes(name: str) -> None:
    assert is_bound_by_memory(name)
    assert not multiplies_matrices(name)


@pytest.mark.parametrize(
    "name",
    [
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas",
        "nvjet_tst_128x256_64x4_2x1_v_bz_TNT",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4>>()",
        "Cijk_Alik_Bljk_BBS_BH_MT128x128x32_MI32x32x8x1",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn>()",
        "triton_tem_fused_mm_3",
    ],
)
def test_kernels_that_multiply_matrices(name: str) -> None:
    assert multiplies_matrices(name)
    assert not is_bound_by_memory(name)


@pytest.mark.parametrize(
    ("names", "trainer"),
    [
        (["DistributedDataParallel.forward"], Trainer.TORCH),
        (["FSDP::all_gather_copy_out (blocks.3)"], Trainer.TORCH),
        (["LinearWithGradAccumulationAndAsyncCommunication"], Trainer.MEGATRON),
        (["FSDP::pre_forward", "_ReduceFromModelParallelRegion"], Trainer.MEGATRON),
        (["forward"], Trainer.UNKNOWN),
    ],
)
def test_whose_loop_trains_is_told_by_its_libraries(tmp_path, names, trainer):
    """A loop on plain PyTorch never calls Megatron-Core, whose parameters torch may shard."""
    events = [*launched("gemm", 10, 20, 5, 7)]
    events += [host(name, 8, 10, "cpu_op" if name[0] in "_L" else "user_annotation")
               for name in names]  # fmt: skip
    written(tmp_path, events, world_size=1)
    assert read_trace(tmp_path / "rank0.json").headers[0].trainer is trainer


@pytest.mark.parametrize(("host_ends", "ends"), [(400, 400), (220, 260)])
def test_the_last_iteration_lasts_until_its_device_and_its_host_are_done(tmp_path, host_ends, ends):
    """The host writes to a slow disk at the end of each; behind the last one no other begins."""
    events = [
        host("ProfilerStep#0", 0, 100), *launched("gemm", 10, 20, 40, 7),
        host("ProfilerStep#1", 100, host_ends - 100), *launched("gemm", 110, 120, 140, 7),
    ]  # fmt: skip
    table = written(tmp_path, events, world_size=1)
    rows = table[table["kind"] == "iteration"]
    until = rows["start_ns"] + rows["duration_ns"] - rows["start_ns"].iloc[0] + 20_000
    assert until.tolist() == [100_000, ends * 1_000]
