"""Every way of training that the trainer offers, as flags: parallel axes, precision, recomputation.

A family is what one process group can train one after the other: jobs with the same parallel sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.jobs import model

Flags = tuple[str, ...]

SIZES = {
    "cpu": (*model(layers=4, hidden=64, heads=4, sequence=32), "--distributed-backend", "gloo"),
    "gpu": (
        *model(layers=4, hidden=2048, heads=16, sequence=1024),
        "--distributed-backend",
        "nccl",
    ),
}
NO_BIAS: Flags = ("--disable-bias-linear",)
LLAMA: Flags = (
    *("--group-query-attention", "--num-query-groups", "2", "--normalization", "RMSNorm"),
    *("--swiglu", "--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"),
    *("--disable-bias-linear", "--hidden-dropout", "0", "--attention-dropout", "0"),
)
FULL_RECOMPUTE: Flags = ("--recompute-granularity", "full", "--recompute-method")
OVERLAP: Flags = (
    *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
)
OFFLOAD: Flags = ("--use-distributed-optimizer", "--optimizer-cpu-offload", "--bf16")
DYNAMIC_SCALE: Flags = (
    *("--fp16", "--initial-loss-scale", "65536", "--min-loss-scale", "4"),
    *("--loss-scale-window", "4", "--hysteresis", "1"),
)
EXPERTS: Flags = ("--num-experts", "4", *NO_BIAS, "--moe-token-dispatcher-type")


@dataclass(frozen=True, kw_only=True)
class Family:
    """Jobs of the same parallel sizes: flags of all, and what each adds."""

    name: str
    num_ranks: int
    sizes: Flags = ()
    axes: dict[str, Flags]


def families(device: str) -> list[Family]:
    """All families that this kind of device can train."""
    common = [
        Family(
            name="TP2",
            num_ranks=2,
            sizes=("--tensor-model-parallel-size", "2"),
            axes={
                "TP2": (),
                "TP2, sequence parallel": ("--sequence-parallel",),
                "TP2, Llama-style, bf16": (*LLAMA, "--bf16"),
                "TP2, fp16, constant loss scale": ("--fp16", "--loss-scale", "1024"),
                "TP2, full recomputation, uniform": (
                    *FULL_RECOMPUTE,
                    *("uniform", "--recompute-num-layers", "2"),
                ),
                "TP2, selective recomputation": ("--recompute-granularity", "selective"),
                "TP2, selective recomputation of MLPs": (
                    *("--recompute-granularity", "selective", "--recompute-modules", "mlp"),
                    *NO_BIAS,
                ),
            },
        ),
        Family(
            name="PP2",
            num_ranks=2,
            sizes=("--pipeline-model-parallel-size", "2"),
            axes={
                "PP2": (),
                "PP2, full recomputation, block": (
                    *FULL_RECOMPUTE,
                    *("block", "--recompute-num-layers", "1"),
                ),
            },
        ),
        Family(
            name="PP2 VPP2",
            num_ranks=2,
            sizes=(
                *("--pipeline-model-parallel-size", "2"),
                *("--num-layers-per-virtual-pipeline-stage", "1"),
            ),
            axes={"PP2 VPP2": (), "PP2 VPP2, bf16": ("--bf16",)},
        ),
        Family(
            name="DP2",
            num_ranks=2,
            axes={
                "DP2": (),
                "DP2, gradient reduction overlapped": ("--overlap-grad-reduce",),
                "DP2, distributed optimizer": ("--use-distributed-optimizer",),
                "DP2, distributed optimizer, overlapped, bf16": (*OVERLAP, "--bf16"),
                "DP2, distributed optimizer, overlapped, fp16, dynamic loss scale": (
                    *OVERLAP,
                    *DYNAMIC_SCALE,
                ),
            },
        ),
        Family(
            name="EP2",
            num_ranks=2,
            sizes=("--expert-model-parallel-size", "2"),
            axes={
                "EP2, all-to-all": (*EXPERTS, "alltoall", "--moe-aux-loss-coeff", "0.01"),
                "EP2, all-gather": (*EXPERTS, "allgather"),
            },
        ),
    ]
    return [*common, _experts_and_tensors(device), *(_gpu_only() if device == "gpu" else [])]


def _experts_and_tensors(device: str) -> Family:
    """Experts that are tensor parallel inside, too: a grid of ranks of their own."""
    dispatcher = {"gpu": "alltoall", "cpu": "allgather"}[device]  # gloo gathers equal shares only
    return Family(
        name="TP2 EP2",
        num_ranks=4,
        sizes=(
            *("--tensor-model-parallel-size", "2", "--expert-model-parallel-size", "2"),
            "--sequence-parallel",
        ),
        axes={f"TP2 EP2, {dispatcher}, bf16": (*EXPERTS, dispatcher, "--bf16")},
    )


def _gpu_only() -> list[Family]:
    """What Megatron-Core does on GPUs only, and what takes four ranks."""
    return [
        Family(
            name="optimizer on the CPU",
            num_ranks=2,
            axes={
                "DP2, distributed optimizer offloaded": OFFLOAD,
                "DP2, half of the distributed optimizer offloaded": (
                    *OFFLOAD,
                    *("--optimizer-offload-fraction", "0.5"),
                ),
            },
        ),
        Family(
            name="TP2 PP2",
            num_ranks=4,
            sizes=("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"),
            axes={"TP2 PP2, sequence parallel, bf16": ("--sequence-parallel", "--bf16")},
        ),
        Family(
            name="TP2 DP2",
            num_ranks=4,
            sizes=("--tensor-model-parallel-size", "2"),
            axes={"TP2 DP2, distributed optimizer, overlapped, bf16": (*OVERLAP, "--bf16")},
        ),
    ]


GUIDED: Flags = ("--use-dpp", "--dpp-choice", "guided")


def schedule_families() -> list[Family]:
    """Pipelines by Megatron-Core's schedule (the first of each) and by plans of ours."""
    kinds = {
        "fp32": (),
        "bf16": ("--bf16",),
        "fp16": ("--fp16", "--loss-scale", "1024"),
        "bf16, full recomputation": (
            *("--bf16", *FULL_RECOMPUTE, "uniform"),
            *("--recompute-num-layers", "1"),
        ),
        "bf16, experts": ("--bf16", *EXPERTS, "allgather", "--moe-aux-loss-coeff", "0.01"),
    }
    pipeline: Flags = ("--pipeline-model-parallel-size", "2", "--use-distributed-optimizer")
    chunks: Flags = ("--num-virtual-stages-per-pipeline-rank", "2")
    masks: Flags = ("--hidden-dropout", "0", "--attention-dropout", "0")
    split: Flags = ("--pipeline-schedule", "zb-h1")
    return [
        *(
            Family(
                name=f"PP2, {kind}",
                num_ranks=2,
                sizes=(*pipeline, *flags),
                axes={"Megatron-Core": (), "zb-h1": split, "zb-h1, guided": (*split, *GUIDED)},
            )
            for kind, flags in kinds.items()
        ),
        Family(
            name="PP2, two chunks, bf16",
            num_ranks=2,
            sizes=(*pipeline, *chunks, *masks, "--bf16"),
            axes={
                "Megatron-Core": (),
                "dfc": ("--pipeline-schedule", "dfc"),
                "bfc": ("--pipeline-schedule", "bfc"),
                "auto": ("--pipeline-schedule", "auto"),
                "auto, guided": GUIDED,
            },
        ),
    ]
