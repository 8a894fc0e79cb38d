"""Say what a transformer's parts cost: floating-point operations, bytes of memory, kernels.

Times are roofline times on a sound chip: operations over the rate of its products, plus bytes over
the bandwidth of its memory for what is bound by it (norms, rotary embeddings, residuals, losses,
optimizer). Formulas are those of Megatron-LM's papers (Narayanan et al. 2021, Korthikanti et al.
2022): a layer takes 24 b s h² + 4 b s² h operations forward, with causal attention half of the last
term, and twice as many backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.grounds.incidents.hardware import (
    ATTENTION_EFFICIENCY,
    GEMM_EFFICIENCY,
    MEMORY_EFFICIENCY,
    Chip,
)

BYTES = 2  # bf16


@dataclass(frozen=True)
class Kernel:
    """One kernel: its name, and seconds that its products and its memory traffic take."""

    name: str
    flop_s: float
    memory_s: float
    grid: int = 132
    block: int = 128


Work = tuple[Kernel, ...]


@dataclass(frozen=True, kw_only=True)
class Model:
    """State the sizes of a model, of one rank's part of its layers, and of a microbatch.

    `sequence` and `batch` are tokens of a sequence and sequences of a microbatch. `experts` is 0
    for a dense model; `top_k` experts get each token. `gated`: three products instead of two.
    """

    hidden: int
    ffn: int
    heads: int
    kv_share: float
    vocabulary: int
    layers: int
    sequence: int
    batch: int
    experts: int = 0
    top_k: int = 2
    gated: bool = True
    encoder_layers: int = 0  # of a multi-modal job, all on the first stage
    teacher_share: float = 0.0  # distillation: work of the teacher's forward, by the student's

    @property
    def layer_parameters(self) -> float:
        """Return the parameters of one dense layer, or of the dense part of a layer of experts."""
        attention = self.hidden * self.hidden * (2 + 2 * self.kv_share)
        return attention + (0 if self.experts else self.mlp_parameters)

    @property
    def mlp_parameters(self) -> float:
        """Return the parameters of one MLP or of one expert."""
        return self.hidden * self.ffn * (3 if self.gated else 2)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Price the parts of a model on a chip; `tp` and `cp` split its work."""

    model: Model
    chip: Chip
    tp: int
    cp: int
    sequence_parallel: bool

    def _product(self, flops: float) -> float:
        return flops / (self.chip.peak_tflops * 1e12 * GEMM_EFFICIENCY)

    def _moved(self, num_bytes: float) -> float:
        return num_bytes / (self.chip.memory_gbps * 1e9 * MEMORY_EFFICIENCY)

    @property
    def tokens(self) -> int:
        """Return the tokens that a rank works on in a microbatch."""
        return self.model.sequence * self.model.batch // self.cp

    @property
    def activation_bytes(self) -> int:
        """Return the bytes of a layer's input on all TP ranks together."""
        return self.tokens * self.model.hidden * BYTES

    def _streamed(self, tensors: float, *, split: bool = True) -> float:
        """Return seconds to read or write so many activations; parallel sequences split them."""
        share = self.tp if split and self.sequence_parallel else 1
        return self._moved(tensors * self.activation_bytes / share)

    def attention(self, factor: float = 1.0) -> Work:
        """Return a layer's attention, `factor` times (2: backward)."""
        model, tokens = self.model, self.tokens
        projections = 2 * tokens * model.hidden**2 / self.tp * factor
        core = 2 * tokens * model.sequence * model.hidden / self.tp * factor
        efficiency = ATTENTION_EFFICIENCY / GEMM_EFFICIENCY
        back = "dgrad" if factor > 1 else "fprop"
        gemm = f"nvjet_hsh_128x256_64x4_2x1_v_bz_{back}"
        flash = "flash_bwd_kernel" if factor > 1 else "flash_fwd_kernel"
        return (
            Kernel("rms_norm_kernel", 0.0, self._streamed(3) * factor, 2048),
            Kernel(gemm, self._product(projections * (1 + 2 * model.kv_share)), 0.0),
            Kernel("fused_rope_elementwise_kernel", 0.0, self._streamed(3 / self.tp, split=False)),
            Kernel(flash, self._product(core) / efficiency, 0.0, 1024),
            Kernel(gemm + "_proj", self._product(projections), 0.0),
            Kernel("elementwise_kernel_residual", 0.0, self._streamed(3), 4096),
        )

    def mlp(self, factor: float = 1.0) -> Work:
        """Return a layer's MLP, `factor` times (2: backward)."""
        model, tokens = self.model, self.tokens
        one = self._product(2 * tokens * model.hidden * model.ffn / self.tp * factor)
        inner = self._moved(3 * tokens * model.ffn / self.tp * BYTES * factor)
        back = "wgrad" if factor > 1 else "fprop"
        return (
            Kernel("rms_norm_kernel", 0.0, self._streamed(3) * factor, 2048),
            Kernel(f"nvjet_hsh_256x128_64x4_1x2_h_bz_{back}", one * (1 + model.gated), 0.0),
            Kernel("silu_elementwise_kernel", 0.0, inner, 8192),
            Kernel(f"nvjet_hsh_128x256_64x4_{back}_down", one, 0.0),
            Kernel("elementwise_kernel_residual", 0.0, self._streamed(3), 4096),
        )

    def router(self) -> Work:
        """Return what precedes the experts: norm, router, permutation of tokens."""
        gate = 2 * self.tokens * self.model.hidden * max(self.model.experts, 1) / self.tp
        return (
            Kernel("rms_norm_kernel", 0.0, self._streamed(3), 2048),
            Kernel("nvjet_hsh_64x64_router", self._product(gate) * 2, 0.0, 32),
            Kernel("moe_permute_gather_kernel", 0.0, self._streamed(3), 512),
        )

    def experts(self, ep: int, factor: float = 1.0) -> Work:
        """Return the grouped products of a rank's experts when all experts get equally much."""
        model = self.model
        tokens = self.tokens * model.top_k / (self.tp if self.sequence_parallel else 1)
        one = self._product(2 * tokens * model.hidden * model.ffn * factor) * 1.15
        inner = self._moved(3 * tokens * model.ffn * BYTES * factor)
        return (
            Kernel("grouped_gemm_cutlass_fc1", one * (1 + model.gated), 0.0, 264),
            Kernel("silu_elementwise_kernel", 0.0, inner, 8192),
            Kernel("grouped_gemm_cutlass_fc2", one, 0.0, 264),
            Kernel("moe_unpermute_scatter_kernel", 0.0, self._streamed(2), 512),
        )

    def embedding(self) -> Work:
        """Return the lookup of embeddings."""
        return (Kernel("embedding_indexSelect", 0.0, self._streamed(2, split=False), 1024),)

    def head(self, factor: float = 1.0) -> Work:
        """Return the output layer's product with the vocabulary."""
        flops = 2 * self.tokens * self.model.hidden * self.model.vocabulary / self.tp * factor
        return (Kernel("nvjet_hsh_256x128_head", self._product(flops), 0.0),)

    def loss(self) -> Work:
        """Return softmax and cross entropy, which read and write logits in fp32."""
        logits = self.tokens * self.model.vocabulary / self.tp
        return (Kernel("cross_entropy_softmax_kernel", 0.0, self._moved(4 * logits * 4), 4096),)

    def gradients(self, parameters: float) -> Work:
        """Return two passes over gradients in fp32: they are scaled, their norm is taken."""
        return (
            Kernel("multi_tensor_apply_kernel_scale", 0.0, self._moved(8 * parameters), 320, 512),
            Kernel("reduce_kernel_norm", 0.0, self._moved(4 * parameters), 320, 512),
        )

    def optimizer(self, parameters: float) -> Work:
        """Return Adam's traffic, 4 + 4 + 4 + 4 bytes read and 14 written a parameter."""
        half = self._moved(30 * parameters) / 2
        return (
            Kernel("multi_tensor_apply_kernel_adam", 0.0, half, 320, 512),
            Kernel("multi_tensor_apply_kernel_adam", 0.0, half, 320, 512),
        )


def total(work: Work) -> tuple[float, float]:
    """Return seconds of products and of memory traffic."""
    return sum(one.flop_s for one in work), sum(one.memory_s for one in work)
