"""Records whose fields declare the axes of their arrays, so that all are cut at once.

A matrix has one row a recorded rank, in the order of `Members.ranks`; NaN stands where a rank did
not record a sample. Each field declares its axes with `along`, and `cut` takes rows or iterations
out of all of them:

    cut(seen, "iteration", np.array([False, True, True]))   without the first iteration
    cut(seen, "row", np.array([0, 4]))                      the first and the fifth rank only
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from megascan.arrays import Flags, Integers

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Record = TypeVar("Record", bound=DataclassInstance)


def along(*axes: str) -> Mapping[str, tuple[str, ...]]:
    """Declare the axes of a field's array, tuple, or mapping of arrays, as its metadata."""
    return {"axes": axes}


def cut(record: Record, axis: str, kept: Flags | Integers) -> Record:
    """Return the record with only the places `kept` of one axis, in every field that has it.

    `kept` is one flag a place, or the numbers of the places. Records inside the record are cut,
    too; fields without the axis stay as they are.
    """
    changed: dict[str, Any] = {}
    for one in fields(record):
        value = getattr(record, one.name)
        axes = one.metadata.get("axes", ())
        if axis in axes and value is not None:
            changed[one.name] = _cut_along(value, axes.index(axis), kept)
        elif is_dataclass(value) and not isinstance(value, type):
            changed[one.name] = cut(value, axis, kept)
    return replace(record, **changed) if changed else record


def _cut_along(value: Any, number: int, kept: Flags | Integers) -> Any:
    if isinstance(value, Mapping):
        return {name: _cut_along(one, number, kept) for name, one in value.items()}
    if isinstance(value, tuple):
        return tuple(value[place] for place in np.arange(len(value))[kept])
    return value[(slice(None),) * number + (kept,)]
