"""How far a rank is from its peers, how sure that is, and whom a search names."""

from __future__ import annotations

from dataclasses import dataclass

from detect.thresholds import Origin, limit


@dataclass(frozen=True, kw_only=True)
class _Robust:
    """Medians and scales."""

    mad_to_sigma: float = limit(
        1.4826, "ratio", Origin.MATHEMATICS,
        "standard deviation of a normal law over its median absolute deviation",
    )  # fmt: skip
    cut_sigmas: float = limit(
        3.0, "sigma", Origin.CONVENTION, "at which differences are cut when repetition is measured"
    )
    step_cut_sigmas: float = limit(
        2.5, "sigma", Origin.CONVENTION, "at which steps are cut when noise is measured"
    )
    step_bound_ratio: float = limit(
        1.25, "ratio", Origin.BENCHMARK, "by which the mean square may exceed the median deviation"
    )
    repetition_error: float = limit(
        3.0, "ratio", Origin.MATHEMATICS,
        "standard error of a ratio of mean squared differences, times the root of their number",
    )  # fmt: skip
    min_repetition_iterations: int = limit(
        8, "iterations", Origin.BENCHMARK, "below which noise is not asked whether it repeats"
    )
    trimmed_parts: int = limit(
        3, "parts", Origin.CONVENTION,
        "a centre is the mean of the values without the lowest and highest of so many parts",
    )  # fmt: skip
    centre_loss_ratio: float = limit(
        1.15, "ratio", Origin.MATHEMATICS,
        "standard error of such a centre over that of a mean, normal law (1.25 for a median)",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _NoiseModel:
    """How far a healthy rank strays from its peers."""

    max_degrees: float = limit(
        60.0, "degrees of freedom", Origin.CONVENTION,
        "real noise has heavier tails than a normal law: more are not believed",
    )  # fmt: skip
    min_degrees: float = limit(
        3.0, "degrees of freedom", Origin.CONVENTION, "that a pooled scale is given at least"
    )
    usual_degrees: float = limit(
        12.0, "degrees of freedom", Origin.BENCHMARK,
        "that the usual spread of a class counts for against what the ranks show",
    )  # fmt: skip
    believed_times: float = limit(
        2.0, "times the usual spread", Origin.BENCHMARK,
        "from which on what the ranks differ by takes the place of what is usual",
    )  # fmt: skip
    max_repetition: float = limit(
        0.85, "correlation", Origin.CONVENTION, "of neighbours in time that is believed at most"
    )
    min_own_iterations: int = limit(
        8, "iterations", Origin.CONVENTION, "below which a rank's own noise cannot be told"
    )
    ramp_share: float = limit(
        0.25, "share of the noise by steps", Origin.MATHEMATICS,
        "that is left beside the neighbours in time of a steady rise: of independent values all",
    )  # fmt: skip
    min_side_iterations: int = limit(
        3, "iterations", Origin.MATHEMATICS, "on either side of a step: fewer have no spread"
    )
    level_share: float = limit(
        0.03, "share of the step", Origin.PHYSICS,
        "by which levels before and since it may vary: batches that come late, or a sleep, take as "
        "long each time, and what other processes take of a core varies by a tenth",
    )  # fmt: skip
    inner_share: float = limit(
        0.8, "share of the ranks", Origin.BENCHMARK,
        "closest to their peers, from which the lasting spread is read",
    )  # fmt: skip
    inner_efficiency: float = limit(
        0.65, "ratio", Origin.MATHEMATICS,
        "of that quantile as an estimate of a scale, against a standard deviation",
    )  # fmt: skip
    max_step_ratio: float = limit(
        1.2, "ratio", Origin.BENCHMARK, "by which noise by level may exceed noise by steps"
    )


@dataclass(frozen=True, kw_only=True)
class _Persistence:
    """When a rank was slow."""

    apart_sigmas: float = limit(
        4.0, "sigma", Origin.BENCHMARK, "of sound ranks by which two heaps lie apart at least"
    )
    heaps_widen_ratio: float = limit(
        2.0, "ratio", Origin.MATHEMATICS,
        "times the spread within the heaps is enough where a pair has no sound rank to tell the "
        "noise: halves of normal noise are 2.7 of their own standard deviations apart, not 8",
    )  # fmt: skip
    min_normal: int = limit(
        3, "iterations", Origin.CONVENTION, "at the rank's normal level next to scattered slow ones"
    )
    min_inside_share: float = limit(
        0.7, "share", Origin.CONVENTION,
        "of a stretch's iterations that must lie above the middle between slow and normal",
    )  # fmt: skip
    min_above_share: float = limit(
        0.25, "share of the change", Origin.CONVENTION,
        "by which the slow part lies above the peers: of two ranks that mirror each other, the one "
        "that was slower before its peer changed is not at fault",
    )  # fmt: skip
    min_outside: int = limit(
        3, "iterations", Origin.CONVENTION, "next to a stretch that it is compared with, at least"
    )
    numbers_of_rise: int = limit(
        4, "numbers", Origin.MATHEMATICS, "that describe a rise: two levels, its begin and its end"
    )
    most_tried: int = limit(
        40, "iterations", Origin.CONVENTION, "in which a rise may begin, or end, are tried at first"
    )
    rise_p: float = limit(
        0.01, "probability", Origin.CONVENTION,
        "that a step would look as much like a rise by chance, before it is called one",
    )  # fmt: skip
    switch_penalty: float = limit(
        5.0, "log-likelihood", Origin.BENCHMARK, "that each change of state must gain"
    )
    flapping_penalty: float = limit(
        0.5, "log-likelihood", Origin.BENCHMARK, "the same where changes are the rule"
    )
    max_cost: float = limit(
        8.0, "log-likelihood", Origin.MATHEMATICS,
        "that one iteration can tell: half the square of 4 sigma, so that one odd iteration is no "
        "change of state",
    )  # fmt: skip
    num_refits: int = limit(
        4, "rounds", Origin.CONVENTION, "in which path and levels are fitted to each other"
    )
    worth_charging_p: float = limit(
        0.01, "p-value", Origin.CONVENTION, "larger ones can lead to nothing"
    )
    clearer_p_ratio: float = limit(
        0.25, "ratio", Origin.CONVENTION, "of p-values from which on a shorter account is preferred"
    )
    prior_hits: float = limit(
        0.5, "hits", Origin.MATHEMATICS,
        "and misses that healthy rows are taken to have had before any was seen (Jeffreys)",
    )  # fmt: skip
    own_level_log: float = limit(
        0.02, "log", Origin.BENCHMARK,
        "a rank whose normal level is this close to its peers' is measured by its change",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Search:
    """Which suspects count."""

    interval_sigmas: float = limit(
        1.96, "sigma", Origin.MATHEMATICS, "on either side of a 95 % interval"
    )
    flapping_share: float = limit(
        0.3, "share", Origin.BENCHMARK,
        "of the iterations between first and last episode of a fault that comes and goes",
    )  # fmt: skip
    near_floor_share: float = limit(
        0.75, "share of the floor", Origin.CONVENTION,
        "that an estimate may fall short to when its interval reaches the floor: a floor of 3 % "
        "must not hide a true 3 % in half of the cases",
    )  # fmt: skip
    own_change_share: float = limit(
        0.5, "share of the change", Origin.MATHEMATICS,
        "against its peers that a rank's own values show: less, and it is the peers that changed",
    )  # fmt: skip
    min_own_iterations: int = limit(
        2, "iterations", Origin.MATHEMATICS, "on either side of a change whose spread can be told"
    )
    patience: int = limit(
        4, "suspects", Origin.CONVENTION, "in a row that may be insignificant before a search ends"
    )
    patience_for_hosts: int = limit(
        8, "suspects", Origin.PHYSICS,
        "the same where slow devices are searched for: the ranks of one host, each of which looks "
        "usual beside the others as long as these are in",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Power:
    """What a trace can show."""

    blind_ratio: float = limit(
        2.0, "ratio", Origin.CONVENTION,
        "that slowdowns are tried up to: what shows no smaller one is blind",
    )  # fmt: skip
    healthy_ratio: float = limit(
        1.3, "ratio", Origin.CONVENTION,
        "a window that shows no smaller slowdown of compute says nothing of health",
    )  # fmt: skip
    caveat_ratio: float = limit(
        1.1, "ratio", Origin.CONVENTION,
        "of a step to one without communication that could not be judged, or of all time to what "
        "it would be without its few long iterations: said beside health",
    )  # fmt: skip
    optimizer_share: float = limit(
        0.25, "share of the effect", Origin.PHYSICS,
        "that a lower clock shows in the optimizer, which is bound by memory",
    )  # fmt: skip
    rung_ratio: float = limit(
        1.35,
        "ratio of logarithms",
        Origin.CONVENTION,
        "from one slowdown that is tried to the next",
    )
    together_ratio: float = limit(
        3.0, "ratio", Origin.BENCHMARK,
        "between what mates of a TP group differ by in one phase and in the other, in which they "
        "wait for each other: where they do not, the two are alike",
    )  # fmt: skip
    hidden_lead_log: float = limit(
        0.02, "log", Origin.PHYSICS,
        "by which the slowest of a group is slower than another one of it, where nothing of the "
        "trace tells: sound chips differ by one or two per cent",
    )  # fmt: skip
    max_rows: int = limit(8, "ranks", Origin.CONVENTION, "that are made slow in turn")
    max_searched: int = limit(
        600, "ranks", Origin.CONVENTION,
        "that are searched for one slowdown: of a large job fewer are made slow",
    )  # fmt: skip
    hopeless_ratio: float = limit(
        20.0, "ratio", Origin.CONVENTION, "of which is said no more than that it is out of reach"
    )


ROBUST = _Robust()
NOISE = _NoiseModel()
PERSISTENCE = _Persistence()
SEARCH = _Search()
POWER = _Power()
