"""What a user may set."""

from __future__ import annotations

from dataclasses import dataclass

from detect.thresholds import Origin, limit
from megascan.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DetectorSettings:
    """Thresholds that a user may set. Raises ConfigError for a value outside its range.

    Example: ``DetectorSettings(min_slowdown=1.05)`` is silent about ranks less than 5 % slow.
    """

    min_slowdown: float = limit(
        1.03, "ratio", Origin.CONVENTION,
        "effect floor: slower than peers by less than this is never reported (1.03 = 3 %)",
    )  # fmt: skip
    false_discovery_rate: float = limit(
        0.01, "share", Origin.CONVENTION,
        "expected share of false names among the names, over all ranks and classes",
    )  # fmt: skip
    power: float = limit(
        0.95, "probability", Origin.CONVENTION,
        "with which a slowdown of the reported minimum size would be found",
    )  # fmt: skip
    min_iterations: int = limit(
        4, "iterations", Origin.BENCHMARK,
        "a finding must hold in at least so many traced iterations (or in most of the window)",
    )  # fmt: skip
    min_share: float = limit(
        0.7, "share", Origin.CONVENTION,
        "of the iterations of its time span in which a suspect must exceed its peers",
    )  # fmt: skip
    num_warmup_iterations: int = limit(
        2, "iterations", Origin.PHYSICS,
        "from the run's first on that are left out (allocation, compilation)",
    )  # fmt: skip
    min_stage_excess: float = limit(
        1.10, "ratio", Origin.CONVENTION,
        "a stage is called heavy when it computes this much longer than the median stage",
    )  # fmt: skip
    min_link_slowdown: float = limit(
        1.25, "ratio", Origin.BENCHMARK, "effect floor of transfers, which vary more than compute"
    )
    max_findings: int = limit(
        32, "rows", Origin.CONVENTION, "the search for further findings ends here"
    )

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
