"""How long, on what, and at which learning rate is trained."""

from __future__ import annotations

from dataclasses import dataclass

from training.arguments.flags import flag


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """Batch sizes, the length of the run and its seed."""

    micro_batch_size: int | None = flag(None, "samples of one microbatch on one rank")
    global_batch_size: int | None = flag(
        None, "samples of one iteration; left out: micro-batch size x data-parallel size"
    )
    train_iters: int | None = flag(None, "iterations to train, counted from the very first run")
    exit_interval: int | None = flag(None, "end after the first iteration divisible by this")
    eval_interval: int = flag(1000, "iterations between two evaluations on the validation set")
    eval_iters: int = flag(100, "iterations of one evaluation; 0: never evaluate")
    seed: int = flag(1234, "seed of weights, dropout and the order of the data")


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Adam or SGD and its learning-rate schedule."""

    optimizer: str = flag("adam", "optimizer", choices=("adam", "sgd"))
    lr: float | None = flag(None, "highest learning rate")
    min_lr: float = flag(0.0, "lowest learning rate after warm-up")
    lr_decay_style: str = flag(
        "linear",
        "how the learning rate falls",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = flag(
        None, "iterations over which it falls; left out: --train-iters"
    )
    lr_wsd_decay_style: str = flag(
        "exponential",
        "shape of the last phase with WSD",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_wsd_decay_iters: int | None = flag(None, "iterations of the last phase with WSD")
    lr_warmup_fraction: float | None = flag(
        None, "share of --lr-decay-iters in which the learning rate rises"
    )
    lr_warmup_iters: int = flag(0, "iterations in which the learning rate rises")
    lr_warmup_init: float = flag(0.0, "learning rate at the start of the warm-up")
    weight_decay: float = flag(0.01, "weight decay")
    clip_grad: float = flag(1.0, "largest norm of the gradient; 0: no limit")
    adam_beta1: float = flag(0.9, "decay of Adam's first moment")
    adam_beta2: float = flag(0.999, "decay of Adam's second moment")
    adam_eps: float = flag(1e-8, "Adam's epsilon")
    sgd_momentum: float = flag(0.9, "momentum of SGD")
    optimizer_cpu_offload: bool = flag(False, "keep optimizer state and step on the CPU")
    optimizer_offload_fraction: float = flag(1.0, "share of it that is offloaded")


@dataclass(frozen=True, kw_only=True)
class PrecisionSettings:
    """Number formats; without a switch everything is float32."""

    bf16: bool = flag(False, "train in bfloat16")
    fp16: bool = flag(False, "train in float16 with loss scaling")
    loss_scale: float | None = flag(None, "constant loss scale; left out: dynamic (fp16)")
    initial_loss_scale: float = flag(2**32, "first dynamic loss scale")
    min_loss_scale: float = flag(1.0, "lowest dynamic loss scale")
    loss_scale_window: float = flag(1000, "iterations after which the loss scale is raised")
    hysteresis: int = flag(2, "overflows until the loss scale is lowered")
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, "sum gradients in float32 (always so with --bf16)"
    )
