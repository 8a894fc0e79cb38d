"""Two traces of a job, beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from detect.thresholds import Origin, limit


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """Two traces of a job, beside each other."""

    between_log: float = limit(
        0.003, "log", Origin.BENCHMARK,
        "by which two runs of a healthy job differ even when each is steady",
    )  # fmt: skip
    between_links_log: float = limit(
        0.02, "log", Origin.BENCHMARK, "by which transfers of two runs of a healthy job differ"
    )
    least_noise_log: float = limit(
        0.001, "log", Origin.CONVENTION, "that an iteration's noise is taken for at least"
    )
    min_iterations: int = limit(
        3, "iterations", Origin.MATHEMATICS, "of a trace; fewer say nothing about their own noise"
    )
    min_own_noise: int = limit(
        8, "iterations", Origin.CONVENTION,
        "from which on a rank's own noise and its correlation are measured",
    )  # fmt: skip
    max_correlation: float = limit(
        0.6, "correlation", Origin.CONVENTION, "of neighbouring iterations that is believed"
    )
    max_degrees: int = limit(60, "degrees of freedom", Origin.CONVENTION, "of the t law of a shift")
    visible_degrees: int = limit(
        30, "degrees of freedom", Origin.CONVENTION,
        "of the t law for the smallest visible change; the exact number hardly matters",
    )  # fmt: skip
    small_sample_lack: float = limit(
        0.8, "values", Origin.MATHEMATICS,
        "by which the spread of more values than `SMALL_SAMPLES` has falls short of their number",
    )  # fmt: skip
    confidence: float = limit(0.95, "probability", Origin.CONVENTION, "of the intervals of ratios")
    max_gradient_change: float = limit(
        2.1, "ratio", Origin.PHYSICS,
        "of gradient bytes within one job: float32 instead of bfloat16 doubles them",
    )  # fmt: skip
    least_share: float = limit(
        0.002, "share of an iteration", Origin.CONVENTION,
        "from which on operations are worth a line",
    )  # fmt: skip
    min_peers: int = limit(
        4, "ranks", Origin.MATHEMATICS,
        "of a stage, of which one that moved hardly moves what it is compared with",
    )  # fmt: skip
    least_change: float = limit(
        -0.99, "share", Origin.MATHEMATICS, "of the step that lost time falls by; -1 has no log"
    )
    shown_share: float = limit(
        0.005, "share of all ranks' time", Origin.CONVENTION, "by which a printed share changes"
    )


SMALL_SAMPLES: Mapping[int, float] = {
    2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107,
}  # fmt: skip
"""By number of values, the factor by which their median absolute deviation falls short (Croux and
Rousseeuw 1992, Time-efficient algorithms for two highly robust estimators of scale)."""

COMPARISON = _Comparison()
