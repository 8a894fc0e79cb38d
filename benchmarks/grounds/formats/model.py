"""Turn the parts of a transformer into kernels: what each computes, moves and hands to others.

A kernel of products takes its operations over what the chip reaches, one that is bound by memory
its bytes over the memory's. Small kernels take a few µs in any case.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.grounds.formats.hardware import Chip
from benchmarks.grounds.formats.job import Job
from benchmarks.grounds.formats.program import Bound

LEAST_NS = 2_600.0
ATTENTION_SHARE = 0.62  # of the rate of plain products
SMALL_PRODUCT_NS = 4_000.0


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel: its name as a profiler has it, the operator that launches it, and its cost."""

    name: str
    operator: str
    cost_ns: float
    bound: Bound
    expert: bool = False


GEMM = "nvjet_tst_192x192_64x4_2x1_v_bz_TNT"
WGRAD = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_nt_n_tilesize128x256x64_cublas"
DGRAD = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_nn_n_tilesize128x128x64_cublas"
FLASH = "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, bfloat16_t>>"
FLASH_BACK = "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128>>"
NORM = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>"
NORM_BACK = "void at::native::(anonymous namespace)::layer_norm_grad_input_kernel<c10::BFloat16>"
ELEMENT = "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>"
ELEMENT_BACK = "void at::native::vectorized_elementwise_kernel<4, GeluBackwardCUDAKernelImpl>"
ADD = "void at::native::elementwise_kernel<128, 4, at::native::CUDAFunctor_add<c10::BFloat16>>"
EMBED = "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long>"
EMBED_BACK = "void at::native::(anonymous namespace)::embedding_backward_kernel<c10::BFloat16>"
SOFTMAX = "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float>"
ADAM = "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>"
NORM_OF_GRADIENTS = "void at::native::multi_tensor_apply_kernel<LpNormFunctor<float, 2>>"
FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>"


class Costing:
    """Prices the kernels of a job on one kind of chip."""

    def __init__(self, job: Job, chip: Chip) -> None:
        self.job, self._chip = job, chip
        self.tokens = job.tokens
        self.activation_bytes = self.tokens * job.hidden * 2

    def _product(self, operations: float, share: float = 1.0) -> float:
        return SMALL_PRODUCT_NS + operations / (self._chip.flops * share) * 1e9

    def _memory(self, size_bytes: float) -> float:
        return LEAST_NS + size_bytes / self._chip.memory * 1e9

    def _attention(self) -> float:
        job = self.job
        return self._product(
            2.0 * self.tokens * job.sequence * job.hidden / job.shape.tp, ATTENTION_SHARE
        )

    @property
    def attention_forward(self) -> list[Kernel]:
        """Return the kernels of an attention block, without its reduction."""
        job = self.job
        square = 2.0 * self.tokens * job.hidden * job.hidden / job.shape.tp
        return [
            Kernel(NORM, "aten::native_layer_norm", self._memory(2 * self.activation_bytes),
                   Bound.MEMORY),
            Kernel(GEMM, "aten::linear", self._product(3 * square), Bound.PRODUCT),
            Kernel(FLASH, "FlashAttnFunc", self._attention(), Bound.ATTENTION),
            Kernel(GEMM, "aten::linear", self._product(square), Bound.PRODUCT),
        ]  # fmt: skip

    @property
    def mlp_forward(self) -> list[Kernel]:
        """Return the kernels of a dense feed-forward block, without its reduction."""
        job = self.job
        wide = 8.0 * self.tokens * job.hidden * job.hidden / job.shape.tp
        return [
            Kernel(ADD, "aten::add", self._memory(4 * self.activation_bytes), Bound.MEMORY),
            Kernel(GEMM, "aten::linear", self._product(wide), Bound.PRODUCT),
            Kernel(ELEMENT, "aten::gelu", self._memory(8 * self.activation_bytes / job.shape.tp),
                   Bound.MEMORY),
            Kernel(GEMM, "aten::linear", self._product(wide), Bound.PRODUCT),
        ]  # fmt: skip

    @property
    def router(self) -> list[Kernel]:
        """Return what decides which experts a token goes to."""
        return [
            Kernel(ADD, "aten::add", self._memory(4 * self.activation_bytes), Bound.MEMORY),
            Kernel(SOFTMAX, "aten::softmax", self._memory(self.tokens * 512), Bound.MEMORY),
        ]

    def experts(self, scale: float) -> list[Kernel]:
        """Return the products of the experts; `scale` 2 for a backward pass."""
        job = self.job
        wide = 8.0 * self.tokens * job.hidden * job.hidden / job.shape.tp
        name = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_grouped>"
        return [
            Kernel(name, "GroupedGemm", self._product(scale * wide), Bound.PRODUCT, expert=True),
            Kernel(ELEMENT if scale == 1 else ELEMENT_BACK, "aten::silu",
                   self._memory(scale * 6 * self.activation_bytes / job.shape.tp), Bound.MEMORY,
                   expert=True),
            Kernel(name, "GroupedGemm", self._product(scale * wide), Bound.PRODUCT, expert=True),
        ]  # fmt: skip

    @property
    def mlp_backward(self) -> tuple[list[Kernel], list[Kernel]]:
        """Return what comes before the reduction of the input's gradient, and what beside it."""
        job = self.job
        wide = 8.0 * self.tokens * job.hidden * job.hidden / job.shape.tp
        first = [
            Kernel(DGRAD, "LinearBackward", self._product(wide), Bound.PRODUCT),
            Kernel(WGRAD, "LinearBackward", self._product(wide), Bound.PRODUCT),
            Kernel(ELEMENT_BACK, "GeluBackward0",
                   self._memory(10 * self.activation_bytes / job.shape.tp), Bound.MEMORY),
            Kernel(DGRAD, "LinearBackward", self._product(wide), Bound.PRODUCT),
        ]  # fmt: skip
        return first, [Kernel(WGRAD, "LinearBackward", self._product(wide), Bound.PRODUCT)]

    @property
    def attention_backward(self) -> tuple[list[Kernel], list[Kernel]]:
        """Return what comes before the reduction of the input's gradient, and what beside it."""
        job = self.job
        square = 2.0 * self.tokens * job.hidden * job.hidden / job.shape.tp
        first = [
            Kernel(DGRAD, "LinearBackward", self._product(square), Bound.PRODUCT),
            Kernel(WGRAD, "LinearBackward", self._product(square), Bound.PRODUCT),
            Kernel(FLASH_BACK, "FlashAttnFuncBackward", 2.4 * self._attention(), Bound.ATTENTION),
            Kernel(DGRAD, "LinearBackward", self._product(3 * square), Bound.PRODUCT),
        ]
        return first, [Kernel(WGRAD, "LinearBackward", self._product(3 * square), Bound.PRODUCT)]

    @property
    def norm_backward(self) -> list[Kernel]:
        """Return the end of a block's backward."""
        cost = self._memory(3 * self.activation_bytes)
        return [Kernel(NORM_BACK, "NativeLayerNormBackward0", cost, Bound.MEMORY)]

    def embedding(self, *, backward: bool) -> list[Kernel]:
        """Return the look-up of tokens, or its gradient."""
        if backward:
            cost = self._memory(4 * self.activation_bytes)
            return [Kernel(EMBED_BACK, "EmbeddingBackward0", cost, Bound.MEMORY)]
        cost = self._memory(2 * self.activation_bytes)
        return [Kernel(EMBED, "aten::embedding", cost, Bound.MEMORY)]

    def output(self, *, backward: bool) -> list[Kernel]:
        """Return the products with the vocabulary."""
        job = self.job
        cost = self._product(2.0 * self.tokens * job.hidden * job.vocabulary / job.shape.tp)
        if not backward:
            return [Kernel(GEMM, "aten::linear", cost, Bound.PRODUCT)]
        return [
            Kernel(DGRAD, "LinearBackward", cost, Bound.PRODUCT),
            Kernel(WGRAD, "LinearBackward", cost, Bound.PRODUCT),
        ]

    def loss(self, *, backward: bool) -> list[Kernel]:
        """Return the cross entropy over the vocabulary."""
        job = self.job
        size = self.tokens * job.vocabulary / job.shape.tp * (6 if backward else 8)
        name = "SoftmaxBackward" if backward else "aten::cross_entropy_loss"
        return [Kernel(SOFTMAX, name, self._memory(size), Bound.MEMORY)]

    def parameters(self, stage: int, chunk: int) -> float:
        """Return how many parameters a rank holds of a chunk."""
        job = self.job
        layer = 12.0 * job.hidden**2 / job.shape.tp
        ends = job.is_first(stage, chunk) + job.is_last(stage, chunk)
        table = job.vocabulary * job.hidden / job.shape.tp
        return len(job.layers_of(stage, chunk)) * layer + ends * table

    def update(self, stage: int) -> list[Kernel]:
        """Return the kernels of the optimizer's step, the gradients' norm first."""
        job = self.job
        total = sum(self.parameters(stage, chunk) for chunk in range(job.shape.vpp))
        held = total / (job.shape.dp * job.shape.cp) if job.distributed_optimizer else total
        return [
            Kernel(NORM_OF_GRADIENTS, "aten::_foreach_norm", self._memory(4 * held), Bound.STATE),
            Kernel(ADAM, "Optimizer.step#FusedAdam.step", self._memory(16 * held), Bound.STATE),
            Kernel(ADAM, "Optimizer.step#FusedAdam.step", self._memory(16 * held), Bound.STATE),
        ]

    def zeroing(self, stage: int) -> Kernel:
        """Return the kernel that clears the gradients."""
        total = sum(self.parameters(stage, chunk) for chunk in range(self.job.shape.vpp))
        return Kernel(FILL, "aten::zero_", self._memory(4 * total), Bound.STATE)
