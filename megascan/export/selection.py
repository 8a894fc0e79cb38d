"""What of a timeline is drawn, and what is drawn on top of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megascan.header import Json
from megascan.schema import Kind
from megascan.timeline import equals, numbers


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which spans to write; None stands for all.

    `iterations` leaves out spans that belong to no iteration (a checkpoint after the last one).
    """

    ranks: Collection[int] | None = None
    iterations: Collection[int] | None = None
    kinds: Collection[Kind] | None = None

    @property
    def takes_all(self) -> bool:
        """Whether nothing is left out."""
        return self.ranks is None and self.iterations is None and self.kinds is None

    def words(self) -> str:
        """What is selected, for a message: "ranks 3, 5 and kinds gc"."""
        named = {"ranks": self.ranks, "iterations": self.iterations, "kinds": self.kinds}
        return " and ".join(
            f"{name} {', '.join(map(str, sorted(values)))}"
            for name, values in named.items()
            if values is not None
        )

    def mask(self, spans: pa.Table) -> npt.NDArray[np.bool_]:
        """Rows of `spans` that are written, shape (span,)."""
        chosen = np.ones(spans.num_rows, dtype=np.bool_)
        if self.ranks is not None:
            chosen &= np.isin(numbers(spans, "rank"), sorted(self.ranks))
        if self.iterations is not None:
            chosen &= np.isin(numbers(spans, "iteration"), sorted(self.iterations))
        if self.kinds is not None:
            chosen &= equals(spans, "kind", *(str(kind) for kind in self.kinds))
        return chosen


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A finding to draw: a slice on a track of its own of that rank, on the common clock."""

    rank: int
    start_ns: int
    end_ns: int
    label: str
    args: dict[str, Json] = field(default_factory=dict)
