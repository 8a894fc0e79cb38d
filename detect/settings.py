"""What the detector is asked for: how large, how sure, how long."""

from __future__ import annotations

from dataclasses import dataclass

from megascan.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DetectorSettings:
    """Thresholds of a verdict. Raises ConfigError for a value outside its range.

    Example: ``DetectorSettings(min_slowdown=1.05)`` is silent about ranks less than 5 % slow.
    """

    min_slowdown: float = 1.03
    """Effect floor: slower than peers by less than this is never reported (1.03 = 3 %)."""
    false_discovery_rate: float = 0.01
    """Expected share of false names among the names, over all ranks and classes."""
    power: float = 0.95
    """Probability with which a slowdown of the reported minimum size would be found."""
    min_iterations: int = 4
    """A finding must hold in at least so many traced iterations (or in the whole window)."""
    min_share: float = 0.7
    """Share of the iterations of its time span in which a suspect must exceed its peers."""
    num_warmup_iterations: int = 2
    """Iterations from the run's first on that are left out (allocation, compilation)."""
    min_stage_excess: float = 1.10
    """A stage is called heavy when it computes this much longer than the median stage."""
    min_link_slowdown: float = 1.25
    """Effect floor of transfers, which vary more than compute."""
    max_findings: int = 32
    """The search for further findings ends here."""

    def __post_init__(self) -> None:
        for name in ("min_slowdown", "min_stage_excess", "min_link_slowdown"):
            value = getattr(self, name)
            if not 1.0 < value < 100.0:
                raise ConfigError(f"{name} is {value}, expected more than 1, such as 1.03 for 3 %")
        for name in ("false_discovery_rate", "power", "min_share"):
            value = getattr(self, name)
            if not 0.0 < value < 1.0:
                raise ConfigError(f"{name} is {value}, expected a share between 0 and 1")
        for name, least in (("min_iterations", 2), ("num_warmup_iterations", 0)):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{name} is {value}, expected {least} or more")
        if self.max_findings < 1:
            raise ConfigError(f"max_findings is {self.max_findings}, expected 1 or more")
