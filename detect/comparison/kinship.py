"""Tell traces of one job from traces of different ones, which no comparison can call slower.

A job may change between two traces: more replicas, layers, microbatches, another pipeline. What it
keeps is what one rank does for one token: the devices it runs on and, where TP and CP are the same,
the bytes of an activation, which show in the messages between stages and the collectives of tensor
parallelism. Where there are neither, the gradients of a rank show the size of its model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from detect.observe.transfers import bytes_text
from megascan.errors import listed
from megascan.schema import Kind
from megascan.timeline import codes, equals, numbers
from megascan.vocabulary import axis_of_group, is_data_parallel

if TYPE_CHECKING:
    from detect.comparison.measures import Side

MOST_GRADIENT_CHANGE = 2.1
"""Gradients in float32 instead of bfloat16 are twice as large and the same model's."""
_REDUCTIONS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class Traffic:
    """What the ranks of a job send: sizes by (axis, operation), and what a rank reduces.

    `gradient_bytes` is over its replicas, in an iteration, the median of ranks and iterations; 0
    where it is not known.
    """

    sizes: Mapping[tuple[str, str], frozenset[int]] = field(default_factory=dict)
    gradient_bytes: float = 0.0


def traffic_of(spans: pa.Table) -> Traffic:
    """Return what the communication of a timeline shows of its job."""
    spans = spans.filter(pa.array(equals(spans, "kind", Kind.COLLECTIVE, Kind.P2P)))
    size = numbers(spans, "size_bytes")
    group, groups = codes(spans, "group")
    op, ops = codes(spans, "op")
    found: dict[tuple[str, str], set[int]] = {}
    kinds = np.unique(np.stack([group, op, size]), axis=1)
    for of_group, of_op, of_size in kinds.T.tolist():
        if of_size > 0:
            axis = axis_of_group(groups[of_group])
            found.setdefault((axis, ops[of_op]), set()).add(of_size)
    over_replicas = np.array([is_data_parallel(name) for name in groups] or [False])[group]
    reduced = over_replicas & equals(spans, "op", *_REDUCTIONS) & (size > 0)
    keys = np.stack([numbers(spans, "rank")[reduced], numbers(spans, "iteration")[reduced]])
    owner = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)
    totals = np.bincount(owner, weights=size[reduced])
    return Traffic(
        {name: frozenset(sizes) for name, sizes in found.items()},
        float(np.median(totals)) if len(totals) else 0.0,
    )


def differences(before: Side, after: Side) -> tuple[str, ...]:
    """Return what shows that two traces are of different jobs; empty for one job."""
    return (*_devices(before, after), *_sizes(before, after))


def _devices(before: Side, after: Side) -> Iterator[str]:
    old, new = (set(side.members.devices) - {""} for side in (before, after))
    if old and new and not old & new:
        yield f"devices ({listed(sorted(old))} before, {listed(sorted(new))} after)"


def _sizes(before: Side, after: Side) -> Iterator[str]:
    old, new = before.members.layout, after.members.layout
    if (old.tp, old.cp) != (new.tp, new.cp):
        return
    sizes = before.traffic.sizes, after.traffic.sizes
    shared = [name for name in sorted(set(sizes[0]) & set(sizes[1])) if name[0] in ("tp", "pp")]
    tensor_ops = [{op for axis, op in one if axis == "tp"} for one in sizes]
    for name in shared:
        then, now = (max(one[name]) for one in sizes)
        alike = {then}
        if tensor_ops[0] != tensor_ops[1]:  # sequence parallelism cuts an activation into TP parts
            alike |= {then * old.tp, then // old.tp}
        if now not in alike:
            yield f"{' '.join(name)} ({bytes_text(then)} before, {bytes_text(now)} after)"
            return
    if not shared and old == new:
        yield from _gradients(before.traffic.gradient_bytes, after.traffic.gradient_bytes)


def _gradients(then: float, now: float) -> Iterator[str]:
    if then and now and abs(np.log(now / then)) > np.log(MOST_GRADIENT_CHANGE):
        yield f"gradients of a rank ({bytes_text(then)} before, {bytes_text(now)} after)"
