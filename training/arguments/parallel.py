"""How the job is spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass

from training.arguments.flags import flag


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """Sizes of the parallel axes; data parallelism is what remains of the world size."""

    tensor_model_parallel_size: int = flag(1, "ranks that share each layer")
    pipeline_model_parallel_size: int = flag(1, "pipeline stages")
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "layers of one chunk of the interleaved pipeline schedule"
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "chunks on one rank; another way to ask for the interleaved schedule"
    )
    context_parallel_size: int = flag(1, "ranks that share each sequence")
    expert_model_parallel_size: int = flag(1, "ranks that share the experts")
    sequence_parallel: bool = flag(
        False, "split norms and dropout along the sequence over the tensor-parallel ranks"
    )
    use_distributed_optimizer: bool = flag(
        False, "split the optimizer state over the data-parallel ranks"
    )
    overlap_grad_reduce: bool = flag(False, "reduce gradients while the backward pass goes on")
    overlap_param_gather: bool = flag(
        False, "gather parameters while the forward pass goes on (distributed optimizer)"
    )
    ddp_bucket_size: int | None = flag(None, "parameters in one gradient bucket")
    overlap_p2p_comm: bool = flag(
        True,
        "interleaved schedule: do not overlap pipeline communication with compute",
        option="--no-overlap-p2p-communication",
    )
    distributed_backend: str | None = flag(
        None,
        "nccl trains on GPUs, gloo on the CPU; left out: nccl where there are GPUs",
        choices=("nccl", "gloo"),
    )
    distributed_timeout_minutes: int = flag(10, "longest wait for a collective")
    use_cpu_initialization: bool = flag(
        False, "make the initial weights on the CPU; then they do not depend on the TP size"
    )
