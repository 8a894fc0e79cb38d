"""Jobs as people profile them: what the host of one rank launches in one iteration.

A program is a flat list of operations in the order of the host: kernels, copies, collectives on a
stream of their own, waits of the compute stream for one of these, host work, marks of annotations.
All ranks of a pipeline stage run the same program.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum

BF16, FP32 = 2, 4
VOCABULARY = 32_000
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


class Kind(IntEnum):
    """What the engine does with an operation."""

    KERNEL, COPY, COLLECTIVE, WAIT, SYNC, HOST, BEGIN, END = range(8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """State one operation of a program.

    `scales` is what its work grows with: "" (nothing: parameters), "tokens", "attention" (tokens
    times length) or "expert" (tokens that the router sends here).
    """

    kind: Kind
    names: tuple[str, ...] = ()  # CPU operators around it, outermost first; an annotation's name
    kernel: str = ""
    flops: float = 0.0
    size_bytes: float = 0.0  # moved by a kernel or copy; of a collective: its message
    scales: str = ""
    axis: str = ""  # of a collective: dp, tp, ep, prev or next
    after_compute: bool = True  # of a collective: it reads what has been computed so far
    ref: int = -1  # of a wait: the collective waited for
    host_us: float = 0.0  # of host work
    backward: bool = False  # launched by autograd's thread


@dataclass(frozen=True, kw_only=True)
class Chip:
    """State what a GPU, its links and its NIC attain: flop, bytes and bytes per microsecond."""

    name: str
    flops: float
    memory: float
    nvlink: float
    nic: float
    gemm: str
    number_of_sms: int


CHIPS = {
    "V100": Chip(
        name="Tesla V100-SXM2-32GB", flops=0.7e8, memory=0.75e6, nvlink=1.1e5, nic=1.1e4,
        gemm="volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_{}", number_of_sms=80,
    ),
    "A100": Chip(
        name="NVIDIA A100-SXM4-80GB", flops=2.1e8, memory=1.5e6, nvlink=2.0e5, nic=2.4e4,
        gemm="ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_{}", number_of_sms=108,
    ),
    "H100": Chip(
        name="NVIDIA H100 80GB HBM3", flops=5.6e8, memory=2.6e6, nvlink=3.0e5, nic=4.5e4,
        gemm="sm90_xmma_gemm_bf16bf16_bf16f32_f32_{}_n_tilesize128x128x64_cublas",
        number_of_sms=132,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Job:
    """Describe one training job and how it was profiled; ranks are ordered tp, dp, pp."""

    style: str = "ddp"  # ddp, fsdp or megatron: how parameters and gradients are shared
    model: str = "transformer"  # transformer, moe or conv
    tp: int = 1
    dp: int = 1
    pp: int = 1
    gpus_per_host: int = 8
    iterations: int = 4  # profiled ones
    layers: int = 4  # of a stage
    hidden: int = 2048
    tokens: int = 8192  # of a microbatch
    length: int = 2048
    num_microbatches: int = 1
    num_buckets: int = 3
    chip: str = "H100"
    era: str = "2.7"  # torch's version, which the files' format goes by
    launch_ratio: float = 0.4  # host time of an iteration's launches over its kernels' time
    sync_each_step: bool = True  # loss.item()
    annotated: bool = True  # ProfilerStep#N
    first_step: int = 10
    contention: float = 0.05  # how much slower a kernel is beside a collective
    chip_spread: float = 0.01  # chips lie between 0 and this
    kernel_noise: float = 0.01  # shape of log-normal
    wander: float = 0.002  # of a chip's clock from iteration to iteration
    host_noise: float = 0.2
    token_noise: float = 0.0  # of a replica's tokens from iteration to iteration
    long_replica: tuple[int, float] = (-1, 1.0)  # which, and how much more tokens
    heavy_stage: tuple[int, int] = (-1, 0)  # which, and how many layers more
    hot_expert: tuple[int, float] = (-1, 1.0)  # rank, and how much more tokens
    log_us: float = 0.0  # rank 0 prints and logs for so long, each iteration
    checkpoint: tuple[int, float] = (-1, 0.0)  # after which iteration, host time of rank 0
    warm_up: tuple[int, float] = (0, 1.0)  # how many iterations are slower, and by how much
    late_start: tuple[int, float] = (-1, 0.0)  # rank that compiles in the first one, and how long

    @property
    def num_ranks(self) -> int:
        """Return how many ranks, one a GPU."""
        return self.tp * self.dp * self.pp

    @property
    def num_stage_ranks(self) -> int:
        """Return how many ranks a pipeline stage has."""
        return self.tp * self.dp

    def stage(self, rank: int) -> int:
        """Return the pipeline stage of a rank."""
        return rank // self.num_stage_ranks

    def replica(self, rank: int) -> int:
        """Return whose data a rank works on."""
        return rank // self.tp % self.dp

    def host(self, rank: int) -> int:
        """Return the host of a rank."""
        return rank // self.gpus_per_host

    def members(self, rank: int, axis: str) -> tuple[int, ...]:
        """Return the ranks of this rank's group along an axis; of a pair, the earlier stage
        first.
        """
        size, base = self.num_stage_ranks, rank // self.num_stage_ranks * self.num_stage_ranks
        if axis == "tp":
            first = rank // self.tp * self.tp
            return tuple(range(first, first + self.tp))
        if axis == "next":
            return (rank, rank + size)
        if axis == "prev":
            return (rank - size, rank)
        if axis == "ep":  # experts are spread over at most one host
            width = min(self.dp, self.gpus_per_host)
            first = rank // width * width
            return tuple(range(first, first + width))
        return tuple(range(base + rank % self.tp, base + size, self.tp))

    def axes(self, rank: int) -> tuple[str, ...]:
        """Return the axes along which a rank communicates."""
        stage = self.stage(rank)
        wanted = {
            "dp": self.dp > 1, "tp": self.tp > 1, "ep": self.model == "moe",
            "prev": stage > 0, "next": stage < self.pp - 1,
        }  # fmt: skip
        return tuple(axis for axis, there in wanted.items() if there)


class _Program:
    """Collect operations in the order of the host."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.ops: list[Op] = []
        self.backward = False

    def add(self, op: Op) -> int:
        self.ops.append(replace(op, backward=self.backward))
        return len(self.ops) - 1

    def kernel(
        self, names: str, kernel: str, *, flops: float = 0.0, moved: float, scales: str = "tokens"
    ) -> None:
        op = Op(
            kind=Kind.KERNEL, names=tuple(names.split(" > ")), kernel=kernel, flops=flops,
            size_bytes=moved, scales=scales,
        )  # fmt: skip
        self.add(op)

    def gemm(self, grad: str, rows: float, inner: float, columns: float, scales: str) -> None:
        """Launch a product of (rows, inner) and (inner, columns); `grad` is "", "dgrad" or
        "wgrad".
        """
        names, shape = "aten::linear > aten::addmm", "tn"
        if grad:
            around = "autograd::engine::evaluate_function: AddmmBackward0 > AddmmBackward0"
            names, shape = f"{around} > aten::mm", "nn" if grad == "dgrad" else "nt"
        self.kernel(
            names, CHIPS[self.job.chip].gemm.format(shape), flops=2 * rows * inner * columns,
            moved=BF16 * (rows * inner + inner * columns + rows * columns), scales=scales,
        )  # fmt: skip

    def pointwise(self, operator: str, functor: str, moved: float, scales: str = "tokens") -> None:
        names = f"aten::{operator}"
        if self.backward:
            around = f"{operator.title().replace('_', '')}Backward0"
            names = f"autograd::engine::evaluate_function: {around} > {around} > {names}"
        kernel = (
            f"void at::native::vectorized_elementwise_kernel<4, at::native::{functor}, "
            "at::detail::Array<char*, 3> >(int, at::native::{0}, at::detail::Array<char*, 3>)"
        ).replace("{0}", functor)
        self.kernel(names, kernel, moved=moved, scales=scales)

    def collective(
        self, axis: str, name: str, size_bytes: float, *, scales: str = "", after: bool = True
    ) -> int:
        op = Op(
            kind=Kind.COLLECTIVE, names=("record_param_comms",), kernel=name, axis=axis,
            size_bytes=size_bytes, scales=scales, after_compute=after,
        )  # fmt: skip
        return self.add(op)

    def wait(self, ref: int) -> None:
        self.add(Op(kind=Kind.WAIT, ref=ref))

    def blocking(self, axis: str, name: str, size_bytes: float, scales: str = "tokens") -> None:
        self.wait(self.collective(axis, name, size_bytes, scales=scales))

    def host(self, name: str, host_us: float) -> None:
        self.add(Op(kind=Kind.HOST, names=(name,), host_us=host_us))

    def copy(self, name: str, size_bytes: float) -> None:
        names = ("aten::to", "aten::_to_copy", "aten::copy_")
        self.add(Op(kind=Kind.COPY, names=names, kernel=name, size_bytes=size_bytes))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        self.add(Op(kind=Kind.BEGIN, names=(name,)))
        yield
        self.add(Op(kind=Kind.END, names=(name,)))

    @contextmanager
    def autograd(self) -> Iterator[None]:
        self.backward = True
        yield
        self.backward = False


def program_of(job: Job, stage: int, *, logs: bool = False, saves: bool = False) -> list[Op]:
    """Return the program of a stage's ranks; of rank 0, with what it logs or saves."""
    program = _Program(job)
    with program.span("ProfilerStep"):
        program.host(LOADER, 180.0)
        for _ in range(2):
            program.copy("Memcpy HtoD (Pinned -> Device)", 8.0 * job.tokens)
        with program.span("Optimizer.zero_grad#AdamW.zero_grad"):
            program.host("aten::zero_", 40.0)
        if job.pp > 1:
            _pipeline(program, stage)
        else:
            _passes(program)
        with program.span("Optimizer.step#AdamW.step"):
            _optimizer(program, stage)
        if job.sync_each_step:
            program.copy("Memcpy DtoH (Device -> Pageable)", 4.0)
            program.add(Op(kind=Kind.SYNC, names=("aten::item", "aten::_local_scalar_dense")))
        if logs:
            program.copy("Memcpy DtoH (Device -> Pageable)", 64.0)
            program.host("logging", job.log_us)
        if saves:
            for _ in range(job.layers):
                size = BF16 * _parameters(job) / job.tp
                program.copy("Memcpy DtoH (Device -> Pageable)", size)
            program.add(Op(kind=Kind.SYNC, names=("aten::copy_",)))
            program.host("torch.save", job.checkpoint[1])
        program.host("python", 120.0)
    return program.ops


def num_layers(job: Job, stage: int) -> int:
    """Return the layers of a stage."""
    heavy, more = job.heavy_stage
    return job.layers + (more if stage == heavy else 0)


def _parameters(job: Job) -> float:
    """Return the parameters of one layer, experts included."""
    return (9 if job.model == "conv" else 12) * job.hidden**2


def _passes(program: _Program) -> None:
    """Lay out forward and backward of a job without pipeline."""
    job = program.job
    ddp = "DistributedDataParallel.forward" if job.style == "ddp" else "forward"
    gathered: dict[int, int] = {}
    size = BF16 * _parameters(job) / job.tp
    with program.span(ddp):
        _embedding(program)
        if job.style == "fsdp":
            gathered[0] = program.collective("dp", "all_gather", size, after=False)
        for layer in range(job.layers):
            if job.style == "fsdp":
                if layer + 1 < job.layers:
                    gathered[layer + 1] = program.collective("dp", "all_gather", size)
                program.wait(gathered[layer])
            _layer_forward(program)
        _head(program)
    with program.autograd():
        _backward(program, size)


def _backward(program: _Program, size_bytes: float) -> None:
    """Lay out backward, and gradients shared while it runs: buckets, shards or at its end."""
    job = program.job
    _head(program)
    pending: list[int] = []
    last = job.layers - 1
    ahead = -1
    if job.style == "fsdp":
        ahead = program.collective("dp", "all_gather", size_bytes, after=False)
    every = max(1, job.layers // job.num_buckets)
    for layer in range(last, -1, -1):
        if job.style == "fsdp":
            ready = ahead
            if layer:
                ahead = program.collective("dp", "all_gather", size_bytes)
            program.wait(ready)
        _layer_backward(program)
        if job.style == "fsdp":
            pending.append(program.collective("dp", "reduce_scatter", size_bytes))
        elif job.style == "ddp" and job.dp > 1 and ((last - layer + 1) % every == 0 or not layer):
            pending.append(program.collective("dp", "all_reduce", size_bytes * every))
    if job.style == "megatron" and job.dp > 1:
        pending.append(program.collective("dp", "all_reduce", size_bytes * job.layers))
    for each in pending:
        program.wait(each)


def _pipeline(program: _Program, stage: int) -> None:
    """Lay out one forward, one backward: warm-up, steady state, cool-down; then gradients."""
    job = program.job
    first, last = stage == 0, stage == job.pp - 1
    message = BF16 * job.tokens * job.hidden
    warm_up = min(job.pp - 1 - stage, job.num_microbatches)
    steady = job.num_microbatches - warm_up

    def exchange(axis: str, missing: bool, num: int = 1) -> None:
        if not missing:
            program.blocking(axis, "send_recv", num * message)

    for _ in range(warm_up):
        exchange("prev", first)
        _stage_forward(program, stage)
        exchange("next", last)
    if steady:
        exchange("prev", first)
    for number in range(steady):
        _stage_forward(program, stage)
        exchange("next", last, 2)
        _stage_backward(program, stage)
        exchange("prev", first, 2 if number < steady - 1 else 1)
    for _ in range(warm_up):
        exchange("next", last)
        _stage_backward(program, stage)
        exchange("prev", first)
    if job.dp > 1:
        size = FP32 * num_layers(job, stage) * _parameters(job) / job.tp
        program.blocking("dp", "all_reduce", size, scales="")


def _stage_forward(program: _Program, stage: int) -> None:
    with program.span("forward_step"):
        if not stage:
            _embedding(program)
        for _ in range(num_layers(program.job, stage)):
            _layer_forward(program)
        if stage == program.job.pp - 1:
            _head(program)


def _stage_backward(program: _Program, stage: int) -> None:
    with program.autograd():
        if stage == program.job.pp - 1:
            _head(program)
        for _ in range(num_layers(program.job, stage)):
            _layer_backward(program)


def _embedding(program: _Program) -> None:
    job = program.job
    moved = 2.0 * BF16 * job.tokens * job.hidden
    if job.model == "conv":
        program.pointwise("convolution", "stem_conv", moved)
    else:
        kernel = "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16>()"
        program.kernel("aten::embedding > aten::index_select", kernel, moved=moved)


def _head(program: _Program) -> None:
    """Lay out what comes after the last layer, forward or backward: it is small here."""
    job = program.job
    columns = 1000 if job.model == "conv" else VOCABULARY / 16 / job.tp
    if program.backward:
        program.pointwise("nll_loss", "nll_loss_backward", BF16 * job.tokens * columns)
        program.gemm("dgrad", job.tokens, columns, job.hidden, "tokens")
        program.gemm("wgrad", job.hidden, job.tokens, columns, "tokens")
    else:
        program.gemm("", job.tokens, job.hidden, columns, "tokens")
        program.pointwise("log_softmax", "cunn_SoftMaxForward", 2 * BF16 * job.tokens * columns)


def _layer_forward(program: _Program) -> None:
    job = program.job
    if job.model == "conv":
        _conv_block(program)
        return
    rows, wide, part = job.tokens, job.hidden, job.hidden / job.tp
    moved = BF16 * rows * wide
    _norm(program)
    program.gemm("", rows, wide, 3 * part, "tokens")
    kernel = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4> >()"
    program.kernel(
        "aten::scaled_dot_product_attention > aten::_flash_attention_forward", kernel,
        flops=2.0 * rows * job.length * part, moved=4 * BF16 * rows * part, scales="attention",
    )  # fmt: skip
    program.gemm("", rows, part, wide, "tokens")
    if job.tp > 1:
        program.blocking("tp", "all_reduce", moved)
    program.pointwise("add", "CUDAFunctor_add<c10::BFloat16>", 3 * moved)
    _norm(program)
    _mlp_forward(program)
    program.pointwise("add", "CUDAFunctor_add<c10::BFloat16>", 3 * moved)


def _mlp_forward(program: _Program) -> None:
    job = program.job
    rows, wide, part = job.tokens, job.hidden, 4 * job.hidden / job.tp
    moved, scales = BF16 * rows * wide, "tokens"
    if job.model == "moe":
        program.pointwise("topk", "sbtopk::gatherTopK", moved)
        program.blocking("ep", "all_to_all", moved)
        scales = "expert"
    program.gemm("", rows, wide, part, scales)
    program.pointwise("gelu", "GeluCUDAKernelImpl", 2 * BF16 * rows * part, scales)
    program.gemm("", rows, part, wide, scales)
    if job.model == "moe":
        program.blocking("ep", "all_to_all", moved)
    elif job.tp > 1:
        program.blocking("tp", "all_reduce", moved)


def _layer_backward(program: _Program) -> None:
    job = program.job
    if job.model == "conv":
        _conv_block(program)
        return
    rows, wide, part = job.tokens, job.hidden, job.hidden / job.tp
    moved = BF16 * rows * wide
    _mlp_backward(program)
    _norm(program)
    program.pointwise("add", "CUDAFunctor_add<c10::BFloat16>", 3 * moved)
    _gemms_backward(program, rows, part, wide, "tokens")
    kernel = "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd<128> >()"
    around = "ScaledDotProductFlashAttentionBackward0"
    program.kernel(
        f"autograd::engine::evaluate_function: {around} > aten::_flash_attention_backward", kernel,
        flops=5.0 * rows * job.length * part, moved=8 * BF16 * rows * part, scales="attention",
    )  # fmt: skip
    _gemms_backward(program, rows, wide, 3 * part, "tokens")
    if job.tp > 1:
        program.blocking("tp", "all_reduce", moved)
    _norm(program)


def _mlp_backward(program: _Program) -> None:
    job = program.job
    rows, wide, part = job.tokens, job.hidden, 4 * job.hidden / job.tp
    moved, scales = BF16 * rows * wide, "tokens"
    if job.model == "moe":
        program.blocking("ep", "all_to_all", moved)
        scales = "expert"
    _gemms_backward(program, rows, part, wide, scales)
    program.pointwise("gelu_backward", "GeluBackwardCUDAKernel", 3 * BF16 * rows * part, scales)
    _gemms_backward(program, rows, wide, part, scales)
    if job.model == "moe":
        program.blocking("ep", "all_to_all", moved)
    elif job.tp > 1:
        program.blocking("tp", "all_reduce", moved)


def _gemms_backward(
    program: _Program, rows: float, inner: float, columns: float, scales: str
) -> None:
    program.gemm("dgrad", rows, columns, inner, scales)
    program.gemm("wgrad", inner, rows, columns, scales)


def _norm(program: _Program) -> None:
    moved = 2.0 * BF16 * program.job.tokens * program.job.hidden
    way = "layer_norm_grad_input" if program.backward else "vectorized_layer_norm"
    kernel = f"void at::native::(anonymous namespace)::{way}_kernel<c10::BFloat16, float>()"
    names = "aten::layer_norm > aten::native_layer_norm"
    if program.backward:
        names = "NativeLayerNormBackward0 > aten::native_layer_norm_backward"
    program.kernel(names, kernel, moved=moved * (2 if program.backward else 1))


def _conv_block(program: _Program) -> None:
    """Lay out convolution, batch norm and ReLU: large maps, few channels, bound by memory."""
    job = program.job
    moved = 2.0 * BF16 * job.tokens * job.hidden
    flops = 2.0 * job.tokens * 9 * job.hidden**2
    if program.backward:
        ways = (("dgrad", "cudnn::convolve_dgrad"), ("wgrad", "cudnn::convolve_wgrad"))
        names = "autograd::engine::evaluate_function: ConvolutionBackward0 > "
        for _, kernel in ways:
            operator = f"{names}ConvolutionBackward0 > aten::convolution_backward"
            program.kernel(operator, f"void {kernel}_sm80<16, 128>()", flops=flops, moved=moved)
        program.pointwise("threshold_backward", "threshold_kernel_impl", 1.5 * moved)
        program.kernel(
            "aten::cudnn_batch_norm_backward", "void cudnn::bn_bw_1C11_kernel_new<float, 512>()",
            moved=2 * moved,
        )  # fmt: skip
        return
    names = "aten::conv2d > aten::convolution > aten::cudnn_convolution"
    program.kernel(names, "sm80_xmma_fprop_implicit_gemm_bf16", flops=flops, moved=moved)
    names = "aten::batch_norm > aten::cudnn_batch_norm"
    program.kernel(names, "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, 512>()", moved=1.5 * moved)
    program.pointwise("clamp_min_", "launch_clamp_scalar", moved)


def _optimizer(program: _Program, stage: int) -> None:
    """Lay out a fused AdamW over what this rank holds: bound by memory, whatever the data."""
    job = program.job
    share = job.tp * (job.dp if job.style == "fsdp" else 1)
    parameters = num_layers(job, stage) * _parameters(job) / share
    name = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<{}>()"
    program.kernel(
        "aten::_foreach_norm", name.format("LpNormFunctor<float, 2>"),
        moved=BF16 * parameters, scales="",
    )  # fmt: skip
    for _ in range(4):
        program.kernel(
            "aten::_fused_adamw_", name.format("FusedAdamMathFunctor<float, 4>"),
            moved=28 * parameters / 4, scales="",
        )  # fmt: skip
