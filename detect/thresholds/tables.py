"""All thresholds, subject by subject, for what lists or moves them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING

from detect.thresholds import (
    Origin,
    bursts,
    comparison,
    devices,
    hosts,
    networks,
    observing,
    statistics,
    verdicts,
)
from detect.thresholds.adjustable import DetectorSettings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

TABLES: Mapping[str, DataclassInstance] = {
    name.lower(): table
    for room in (
        observing,
        statistics,
        devices,
        bursts,
        hosts,
        networks,
        verdicts,
        comparison,
    )
    for name, table in vars(room).items()
    if is_dataclass(table) and not isinstance(table, type)
}
"""All tables but the user's settings, by subject."""


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """One row of the tables, for what lists them."""

    subject: str
    name: str
    value: float
    unit: str
    origin: Origin
    meaning: str


def thresholds() -> Iterator[Threshold]:
    """Yield every threshold, the user's settings first."""
    for subject, table in (("settings", DetectorSettings()), *TABLES.items()):
        for one in fields(table):
            yield _row(subject, one, getattr(table, one.name))


def _row(subject: str, one: Field[float], value: float) -> Threshold:
    words = one.metadata
    return Threshold(
        subject=subject,
        name=one.name,
        value=value,
        unit=words["unit"],
        origin=words["origin"],
        meaning=words["meaning"],
    )
