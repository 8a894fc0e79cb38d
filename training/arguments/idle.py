"""Flags that are given and do nothing, because the one that would use them is not.

They end no run: the scripts of other trainers pass `--split` beside `--mock-data`, or the flags of
`--fp16` to a run in bf16. They are said, one line each, so that nobody believes in them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

Condition: TypeAlias = Callable[[argparse.Namespace], bool]


@dataclass(frozen=True)
class _Rule:
    """`names` of the namespace have an effect when `used`, which takes the flags in `needed`."""

    needed: str
    used: Condition
    names: tuple[str, ...]


def _is(name: str, value: object) -> Condition:
    return lambda given: bool(getattr(given, name) == value)


def _has(name: str) -> Condition:
    return lambda given: bool(getattr(given, name))


def _is_interleaved(given: argparse.Namespace) -> bool:
    chunks = given.num_virtual_stages_per_pipeline_rank
    return bool(chunks or given.num_layers_per_virtual_pipeline_stage)


_MOE = (
    "moe_router_topk", "moe_router_pre_softmax", "moe_router_load_balancing_type",
    "moe_aux_loss_coeff", "moe_token_dispatcher_type", "moe_grouped_gemm",
)  # fmt: skip
_SCALING = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
_SWITCHED_OFF = {
    "load_optim": "--no-load-optim",
    "load_rng": "--no-load-rng",
    "overlap_p2p_comm": "--no-overlap-p2p-communication",
}
_TRACING = (
    "trace_dir", "trace_interval", "continuous_trace_iterations", "trace_granularity",
    "trace_compress", "trace_max_bytes", "trace_budget",
)  # fmt: skip

_RULES = (
    _Rule("--group-query-attention", _has("group_query_attention"), ("num_query_groups",)),
    _Rule(
        "--position-embedding-type rope",
        _is("position_embedding_type", "rope"),
        ("rotary_base", "rotary_percent"),
    ),
    _Rule("--num-experts", _has("num_experts"), _MOE),
    _Rule("--fp16", _has("fp16"), _SCALING),
    _Rule("a dynamic loss scale (--loss-scale left out)", _is("loss_scale", None), _SCALING),
    _Rule("--overlap-grad-reduce", _has("overlap_grad_reduce"), ("ddp_bucket_size",)),
    _Rule("an interleaved pipeline", _is_interleaved, ("overlap_p2p_comm",)),
    _Rule(
        "--lr-decay-style WSD",
        _is("lr_decay_style", "WSD"),
        ("lr_wsd_decay_style", "lr_wsd_decay_iters"),
    ),
    _Rule(
        "a learning rate that falls",
        lambda given: bool(given.lr_decay_style != "constant"),
        ("min_lr",),
    ),
    _Rule("--optimizer sgd", _is("optimizer", "sgd"), ("sgd_momentum",)),
    _Rule("--optimizer adam", _is("optimizer", "adam"), ("adam_beta1", "adam_beta2", "adam_eps")),
    _Rule(
        "--optimizer-cpu-offload", _has("optimizer_cpu_offload"), ("optimizer_offload_fraction",)
    ),
    _Rule("--load", _has("load"), ("load_optim", "load_rng")),
    _Rule("--tensorboard-dir", _has("tensorboard_dir"), ("tensorboard_log_interval",)),
    _Rule("--eval-iters of 1 or more", _has("eval_iters"), ("eval_interval",)),
    _Rule("--data-path", _has("data_path"), ("split", "data_cache_path")),
    _Rule("--trace", _has("trace"), _TRACING),
)


def idle_flags(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Iterator[str]:
    """A sentence for every flag that is given, not as it is by default, and has no effect."""
    for rule in _RULES:
        for name in () if rule.used(given) else rule.names:
            if getattr(given, name) != parser.get_default(name):
                option = _SWITCHED_OFF.get(name) or "--" + name.replace("_", "-")
                yield f"{option} has no effect without {rule.needed}"
