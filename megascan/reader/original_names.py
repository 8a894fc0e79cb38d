"""The original MegaScan's event names, and what each is in our words."""

from __future__ import annotations

from dataclasses import dataclass

from megascan.schema import Kind, Phase, Track

STEP = "iteration"


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What an original event becomes; `axis` names the parallel group that works on it."""

    kind: Kind
    name: str
    track: Track = Track.COMPUTE
    phase: str = ""
    op: str = ""
    axis: str = ""
    direction: str = ""


def _work(name: str, phase: Phase = Phase.FORWARD) -> tuple[Operation, ...]:
    return (Operation(kind=Kind.COMPUTE, name=name, phase=phase),)


def _collective(op: str, axis: str = "tp") -> tuple[Operation, ...]:
    return (Operation(kind=Kind.COLLECTIVE, name=op, track=Track.COMMUNICATION, op=op, axis=axis),)


def _message(op: str, direction: str) -> Operation:
    name = f"{op}_{direction}"
    return Operation(
        kind=Kind.P2P,
        name=name,
        track=Track.COMMUNICATION,
        op=op,
        axis="pp",
        direction=direction,
    )


OPERATIONS: dict[str, tuple[Operation, ...]] = {
    STEP: (Operation(kind=Kind.ITERATION, name="iteration"),),
    "recv-warmup": (_message("recv", "forward"),),
    "recv-extra": (_message("recv", "forward"),),
    "send-warmup": (_message("send", "forward"),),
    "exchange-next": (_message("send", "forward"), _message("recv", "backward")),
    "exchange-prev": (_message("send", "backward"), _message("recv", "forward")),
    "send-extra": (_message("send", "backward"),),
    "recv-cooldown": (_message("recv", "backward"),),
    "send-cooldown": (_message("send", "backward"),),
    "forward-warmup": _work("forward"),
    "forward": _work("forward"),
    "backward": _work("backward", Phase.BACKWARD),
    "backward-cooldown": _work("backward", Phase.BACKWARD),
    "loss": _work("loss"),
    "decoder": _work("decoder"),
    "transformer_layer": _work("transformer_layer"),
    "attention": _work("attention"),
    "mlp": _work("mlp"),
    "recompute_mlp": _work("mlp", Phase.RECOMPUTE),
    "_reduce": _collective("all_reduce"),
    "_gather_along_last_dim": _collective("all_gather"),
    "_gather_along_first_dim": _collective("all_gather"),
    "_reduce_scatter_along_last_dim": _collective("reduce_scatter"),
    "_reduce_scatter_along_first_dim": _collective("reduce_scatter"),
    "allreduce": _collective("all_reduce", "dp"),
    "optimizer": (Operation(kind=Kind.OPTIMIZER, name="optimizer"),),
    "grad-sync": (Operation(kind=Kind.OPTIMIZER, name="grad_sync"),),
}
"""Events that are two messages at once become two spans of the same times, as ours are. `_reduce`
is labelled with a larger group than it works on: it is a tensor-parallel all-reduce. `allreduce`
(gradients, then a device synchronisation) ends together on data-parallel peers."""


def operations_of(name: str) -> tuple[Operation, ...]:
    """Our words for an original event; one we do not know keeps its name, as compute."""
    return OPERATIONS.get(name) or _work(name)
