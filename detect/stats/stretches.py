"""Evidence that a rank was slow, and when."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stretch:
    """Best evidence of one rank: iterations [first, last], effect in log units."""

    row: int
    first: int
    last: int
    effect: float
    p_value: float
    normal: float = 0.0
    """The rank's level beside the stretch; 0, its peers', for the whole window."""
    scattered: bool = False
    """Slow in single iterations between first and last, normal in the others."""
    sigma: float = 0.0
    """Of a scattered one: what single iterations of sound ranks vary by."""
