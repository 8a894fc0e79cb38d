"""Hosts as units: all ranks of one, and what they do at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from detect.thresholds import Origin, limit


@dataclass(frozen=True, kw_only=True)
class _Hosts:
    """Hosts that are slow as a whole."""

    min_ranks: int = limit(
        2, "rows", Origin.MATHEMATICS, "of a host that are pooled; one is judged by itself"
    )
    least_named_share: float = limit(
        0.5, "share of its ranks", Origin.CONVENTION,
        "that are named for losing time to a host one by one, from which on the host is named",
    )  # fmt: skip
    min_control: int = limit(
        3, "rows", Origin.MATHEMATICS, "of other hosts, or other hosts, that have a spread"
    )
    most_of_host_share: float = limit(
        0.75, "share of its ranks", Origin.CONVENTION,
        "that compute slowly by half of the mean or more; of lost time, all of them do",
    )  # fmt: skip
    spread_log: float = limit(
        0.004, "log", Origin.PHYSICS, "by which the computing of sound ranks differs at least"
    )
    spread_share: float = limit(
        0.002, "share of an iteration", Origin.PHYSICS, "by which lost time differs at least"
    )
    least_share: float = limit(
        0.03, "share of an iteration", Origin.BENCHMARK, "that a slow host costs its ranks at least"
    )
    least_apart_share: float = limit(
        0.01, "share of an iteration", Origin.BENCHMARK,
        "that each rank of a host loses beyond all others where they do not lose alike",
    )  # fmt: skip
    least_doubtful_share: float = limit(
        0.05, "share of an iteration", Origin.BENCHMARK,
        "the same where stages are compared with each other, there is one other host only, "
        "another rank is named, or its lead in launching comes and goes",
    )  # fmt: skip
    least_rest_share: float = limit(
        1.0 / 3.0, "share of the effect", Origin.CONVENTION,
        "that is left of lost time without the longest pause of each rank, which any rank may have",
    )  # fmt: skip
    usual_loads_share: float = limit(
        0.9, "share of the loads", Origin.CONVENTION,
        "of other hosts that are shorter than what loading takes there at most, but for outliers",
    )  # fmt: skip
    loading_ratio: float = limit(
        3.0, "ratio", Origin.BENCHMARK,
        "to these, from which on a load is long: with the documents loading differs by less",
    )  # fmt: skip
    unlike_share: float = limit(
        0.15, "share of an iteration", Origin.BENCHMARK,
        "by which gaps differ between stages of a sound job: a host that is a stage and loses more",
    )  # fmt: skip
    unlike_ratio: float = limit(
        5.0, "ratio", Origin.BENCHMARK, "by which such gaps differ between stages of a sound job"
    )
    in_step_share: float = limit(
        0.02, "share of their mean", Origin.BENCHMARK,
        "by which loads of a host differ in an iteration where what all read from limits them",
    )  # fmt: skip
    least_unconfirmed_log: float = limit(
        math.log(1.08), "log", Origin.BENCHMARK,
        "by which a host's ranks compute slower where neither optimizer nor clocks confirm it",
    )  # fmt: skip
    shared_data_share: float = limit(
        0.5, "share of the effect", Origin.CONVENTION,
        "that ranks of the same replicas show on other hosts where the replicas' data explain it",
    )  # fmt: skip
    min_correlated: int = limit(
        5, "iterations", Origin.CONVENTION, "of which a correlation says something"
    )
    least_correlation: float = limit(
        0.8, "correlation", Origin.BENCHMARK,
        "of what ranks stand still with what other stages compute on the same data, where the data "
        "lengthen both: 0.86 to 0.98 were seen",
    )  # fmt: skip
    correlation_p: float = limit(
        0.01, "probability", Origin.CONVENTION, "of as high a correlation by chance"
    )
    least_rise_share: float = limit(
        0.5, "share of the rise", Origin.CONVENTION,
        "over other hosts that each rank of a host shows, and its own times as they were recorded",
    )  # fmt: skip
    sound_before_share: float = limit(
        0.25, "share of the effect", Origin.CONVENTION,
        "that a host's ranks show before it became slow, at most",
    )  # fmt: skip
    steady_log: float = limit(
        0.06, "log", Origin.BENCHMARK,
        "range over the iterations of what other stages compute, where the passes of one are "
        "compared with them for want of layers",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Changes:
    """Steps that become longer inside the trace while nobody stands out."""

    least_ratio: float = limit(
        1.05, "ratio", Origin.CONVENTION, "of the step since then to that before, at least"
    )
    step_noise_log: float = limit(
        0.005, "log", Origin.PHYSICS, "by which steps of a sound job vary at least"
    )
    outer_share: float = limit(
        0.25, "share of the iterations", Origin.CONVENTION,
        "of either part that may lie beyond the outermost of the other: checkpoints, evaluations",
    )  # fmt: skip
    explains_share: float = limit(
        0.5, "share of the rise", Origin.CONVENTION, "of the step by which what explains it grew"
    )
    long_ratio: float = limit(
        1.2, "ratio", Origin.CONVENTION, "to the usual step of an iteration that is called long"
    )
    lost_share: float = limit(
        0.05, "share of all time", Origin.CONVENTION,
        "lost in such iterations before they are spoken of",
    )  # fmt: skip
    min_long: int = limit(
        2, "iterations", Origin.CONVENTION, "that one rank has to hold up: a single one is chance"
    )
    mostly_share: float = limit(
        0.8, "share of the long iterations", Origin.CONVENTION,
        "that a rank holds up at least; anybody else may hold up the rest",
    )  # fmt: skip
    gap_ratio: float = limit(
        2.0, "ratio", Origin.BENCHMARK,
        "by which the gaps between operations grow on each rank of a host that holds them back",
    )  # fmt: skip
    elsewhere_share: float = limit(
        0.5, "share of the log ratio", Origin.CONVENTION,
        "by which they grow on a rank of any other host at most",
    )  # fmt: skip
    least_gap_ns: float = limit(
        10_000.0, "ns", Origin.PHYSICS, "below which gaps of an iteration are noise of the clock"
    )


@dataclass(frozen=True, kw_only=True)
class _Cores:
    """Threads that could have run and had no core."""

    least_share: float = limit(
        0.05, "share of an iteration", Origin.CONVENTION,
        "for which they wait at least: less is lost between launches that run ahead",
    )  # fmt: skip
    far_ratio: float = limit(
        3.0, "ratio", Origin.BENCHMARK,
        "to what others wait, from which on it is this rank's: on shared cores sound processes "
        "wait now more and now less",
    )  # fmt: skip
    beside_ratio: float = limit(
        2.0, "ratio", Origin.CONVENTION,
        "to what the one of the others waits that waits longest: else more of it is usual than not",
    )  # fmt: skip
    most_share: float = limit(
        0.5, "share of the lost time", Origin.CONVENTION,
        "of a finding that they wait for beyond the others, if that is why",
    )  # fmt: skip
    longest_ahead_share: float = limit(
        0.5, "share of an iteration", Origin.CONVENTION,
        "by which launches may run ahead of a device, so that waiting costs less than it takes",
    )  # fmt: skip
    slack_share: float = limit(
        0.15, "share of an iteration", Origin.BENCHMARK,
        "by which a process on the CPU may wait longer than others without holding them up",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Shortages:
    """Processes that stand still for memory or for a disk."""

    least_share: float = limit(
        0.05, "share of the time", Origin.CONVENTION,
        "for which they stand still at least: less is lost behind other work",
    )  # fmt: skip
    far_ratio: float = limit(
        3.0, "ratio", Origin.BENCHMARK,
        "to what others do, from which on it is this host's: sound ones that read and write alike "
        "were up to twice apart",
    )  # fmt: skip
    most_share: float = limit(
        0.5, "share of the lost time", Origin.CONVENTION,
        "of a finding for which they stand still beyond the others, if that is why",
    )  # fmt: skip
    noted_share: float = limit(
        0.1, "share of the time", Origin.CONVENTION,
        "for which they stand still beyond others, before it is worth a note",
    )  # fmt: skip
    min_readings: int = limit(
        3, "readings", Origin.CONVENTION,
        "that must agree: what stands still in fewer may be a checkpoint or an evaluation",
    )  # fmt: skip
    most_bytes_ratio: float = limit(
        2.0, "ratio", Origin.PHYSICS,
        "to the most that others read, and write, up to which a disk as quick as theirs has nobody "
        "wait for `far_ratio` times as long",
    )  # fmt: skip
    most_memory_ratio: float = limit(
        1.25, "ratio", Origin.CONVENTION,
        "to the most memory that others hold, above which a rank may be short of it by itself",
    )  # fmt: skip
    pages_share: float = limit(
        1.0 / 3.0, "share of the lost time", Origin.BENCHMARK,
        "the same by the least that reading pages back takes: with swap on compressed memory it "
        "took up to twice that, a page of a file on a disk takes ten times as long",
    )  # fmt: skip
    page_ns: float = limit(
        10_000.0, "ns", Origin.BENCHMARK,
        "that a page takes that is read back, at least: 10 to 20 µs were seen with swap on "
        "compressed memory, and disks take longer",
    )  # fmt: skip
    min_page_reads: float = limit(
        10.0, "pages an iteration", Origin.BENCHMARK,
        "read back by the rank of a host that has most: with fewer, waiting is not for the pages "
        "of one of its ranks",
    )  # fmt: skip


HOSTS = _Hosts()
CORES = _Cores()
SHORTAGES = _Shortages()
CHANGES = _Changes()
