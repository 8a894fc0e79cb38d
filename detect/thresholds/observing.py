"""What is taken from spans: iterations, passes, kernels, stops, launches, data, counters."""

from __future__ import annotations

import math
from dataclasses import dataclass

from detect.thresholds import Origin, limit


@dataclass(frozen=True, kw_only=True)
class _Window:
    """Which iterations are judged."""

    min_iterations: int = limit(
        2, "iterations", Origin.MATHEMATICS, "a verdict needs: noise cannot be told from one"
    )
    warm_ratio: float = limit(
        1.15, "ratio", Origin.PHYSICS,
        "a leading iteration whose compute is so far above the rest's is still warming up",
    )  # fmt: skip
    min_kept: int = limit(
        3, "iterations", Origin.CONVENTION, "are kept whatever looks like warm-up"
    )
    cpu_time_share: float = limit(
        0.9, "share", Origin.CONVENTION, "of passes with CPU time, from which on CPU time is used"
    )
    one_iteration_ratio: float = limit(
        1.1, "ratio", Origin.CONVENTION,
        "by which a rank computes slower in a single iteration before it is worth a word",
    )  # fmt: skip
    passes_share: float = limit(
        0.9, "share", Origin.PHYSICS,
        "of the passes of a single iteration that a slow device lengthens: what a rank does once "
        "lengthens one or two",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Passes:
    """Which part of a pass is the rank's own time."""

    least_segment_share: float = limit(
        0.003, "share of an iteration", Origin.CONVENTION,
        "that a stretch between communications takes at least to be compared",
    )  # fmt: skip
    backward_ratio: float = limit(
        2.0, "times the median stretch", Origin.PHYSICS,
        "a backward pass takes twice a forward pass, and its communication may be hidden",
    )  # fmt: skip
    max_pause_share: float = limit(
        0.002, "share", Origin.BENCHMARK,
        "a pass with more garbage collection in it says nothing about compute",
    )  # fmt: skip
    max_collected_share: float = limit(
        0.5, "share of the iterations", Origin.CONVENTION,
        "in which some rank collects garbage: where more, they are judged all the same",
    )  # fmt: skip
    layers_alike_ratio: float = limit(
        1.15, "ratio", Origin.PHYSICS,
        "layers of one rank that differ by more are of two kinds (dense and expert)",
    )  # fmt: skip
    entangled_share: float = limit(
        0.5, "share", Origin.CONVENTION,
        "of a phase's passes that must hold overlapped collectives before own times are estimated",
    )  # fmt: skip
    shortest_quantile: float = limit(
        0.05, "share", Origin.BENCHMARK,
        "quantile of a module's collective time that stands for one without any waiting",
    )  # fmt: skip
    last_reach_share: float = limit(
        0.02, "share of the lead", Origin.BENCHMARK,
        "a collective that is longer than the shortest by no more did not wait",
    )  # fmt: skip
    min_exact_modules: int = limit(
        5, "modules", Origin.CONVENTION, "without waiting, from which on a rank's ratio is believed"
    )
    max_hidden_ratio: float = limit(
        1.15, "ratio", Origin.BENCHMARK,
        "weight gradients that end within a wait shorten a module by no more",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Kernels:
    """When the kernel sequences of two ranks are the same work."""

    quickest_share: float = limit(
        0.05, "share of the collectives", Origin.CONVENTION,
        "without counterparts that are as quick as what is taken for the quickest",
    )  # fmt: skip
    num_parts: int = limit(
        8, "parts", Origin.CONVENTION,
        "of about equal time that a pass's kernels are cut into; their median is the pass's value",
    )  # fmt: skip
    least_alike_share: float = limit(
        0.9, "share", Origin.PHYSICS,
        "of a rank's compute time in kernels that its peers launch as often; below it the data or "
        "the model part differ, and equal launches may last longer, too",
    )  # fmt: skip
    least_log: float = limit(
        math.log(1.05), "log", Origin.PHYSICS,
        "by which products of matrices are slow before that alone makes it the node's: sound chips "
        "of one model differ by less",
    )  # fmt: skip
    least_layers_share: float = limit(
        0.5, "share", Origin.CONVENTION,
        "of a stage's compute time in kernels that every stage launches: its layers",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Stalls:
    """When a device stood still inside a pass."""

    min_modules: int = limit(
        4,
        "modules",
        Origin.CONVENTION,
        "of a pass, from which on their median says what is typical",
    )
    tolerance_share: float = limit(
        0.1, "share", Origin.BENCHMARK, "by which a pass may exceed what follows from its modules"
    )
    most_tokens_ratio: float = limit(
        2.0, "ratio", Origin.CONVENTION,
        "of the time that experts typically take, up to which more tokens explain it",
    )  # fmt: skip
    max_rest_ratio: float = limit(
        2.0, "ratio", Origin.PHYSICS,
        "by which ranks of a stage differ in the rest of a pass (the first of a TP group sums the "
        "losses)",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Starvation:
    """When a device waits for its host."""

    plain_pace_log: float = limit(
        math.log(1.5), "log", Origin.CONVENTION,
        "by which a host that launches more slowly than its peers' is more than a little slower",
    )  # fmt: skip
    far_ratio: float = limit(
        1.5, "ratio", Origin.BENCHMARK,
        "of a starved rank's work to that of any other of its stage, from which on hosts that are "
        "all late do not explain it",
    )  # fmt: skip
    lead_ns: int = limit(
        20_000, "ns", Origin.PHYSICS,
        "a host that is less ahead than a few launches take (5 to 10 µs each) starves its device",
    )  # fmt: skip
    lead_share: float = limit(
        0.5, "share of the operation", Origin.BENCHMARK, "a host that is less ahead starves, too"
    )
    starved_share: float = limit(
        0.7, "share of operations", Origin.BENCHMARK, "launched just in time: a starved device"
    )
    fed_share: float = limit(
        0.5, "share of operations", Origin.BENCHMARK, "launched just in time: a device that is fed"
    )
    well_fed_share: float = limit(
        0.2, "share of operations", Origin.BENCHMARK,
        "launched just in time on its peers, beside whom a device of which half were is starved",
    )  # fmt: skip
    host_bound_share: float = limit(
        0.8, "share of operations", Origin.BENCHMARK, "launched just in time on the usual rank"
    )
    at_work_share: float = limit(
        0.1, "share of the work", Origin.PHYSICS,
        "of a device that launching it takes at most where no host can be why work takes longer; "
        "where hosts hold up devices it was half and more",
    )  # fmt: skip
    launched_ns: int = limit(
        200_000, "ns", Origin.PHYSICS,
        "that launching a layer takes: some 30 kernels of 5 to 10 µs; shorter ones may be late",
    )  # fmt: skip
    more_share: float = limit(
        0.2, "share of operations", Origin.CONVENTION,
        "launched just in time, by which a device that waits for its host exceeds its peers",
    )  # fmt: skip
    slower_share: float = limit(
        0.4, "share of the slowdown", Origin.BENCHMARK,
        "by which a starved device's host launches more slowly than the others, if that is why",
    )  # fmt: skip
    stopped_share: float = limit(
        0.7, "share of the slowdown", Origin.BENCHMARK,
        "that a device whose host stops between launches stands still for, if that is why",
    )  # fmt: skip
    off_core_share: float = limit(
        0.5, "share of the time that it is busy for longer", Origin.CONVENTION,
        "that a process on a CPU is off its core for, if that is why",
    )  # fmt: skip
    stopped_in_each_share: float = limit(
        0.5, "share of the usual slowdown", Origin.BENCHMARK,
        "that it stands still for in every iteration: collections of garbage come in some",
    )  # fmt: skip
    loads_most_ratio: float = limit(
        2.0, "ratio", Origin.CONVENTION, "a rank that loads longer than its TP group's others"
    )


@dataclass(frozen=True, kw_only=True)
class _Pace:
    """Hosts that launch slowly."""

    quick_share: float = limit(
        0.25, "share of the steps", Origin.CONVENTION,
        "from launch to launch that are quicker than the value of a rank: pauses are no pace",
    )  # fmt: skip
    most_lead_ns: int = limit(
        5_000_000, "ns", Origin.PHYSICS,
        "ahead of its device that no queue is full: it holds 1,024 launches of 5 µs and more; a "
        "host that is further ahead may be held back, whatever its own pace",
    )  # fmt: skip
    stop_ratio: float = limit(
        3.0, "ratio", Origin.PHYSICS,
        "of the rank's typical step of the kind: a host that stands still between two launches; "
        "another process has its core for milliseconds, a step takes tenths of one",
    )  # fmt: skip
    stop_ns: int = limit(
        2_000_000, "ns", Origin.PHYSICS,
        "from one launch of a kernel to the next: launching takes hundredths of a ms, a layer's "
        "Python tenths, and the scheduler gives another process 3 ms and more",
    )  # fmt: skip
    held_up_ratio: float = limit(
        2.0, "ratio", Origin.PHYSICS,
        "of its peers' time to launch the same passes: another process that has half of its core",
    )  # fmt: skip
    prepares_steps: float = limit(
        10.0, "of its later launches", Origin.BENCHMARK,
        "that a pass's first one takes as long as where a program compiles or plans there: 40 on "
        "two H200; a layer of which no module was recorded takes a few",
    )  # fmt: skip
    busy_share: float = limit(
        0.6, "share of an iteration", Origin.BENCHMARK,
        "that launching its passes takes, from which on a device has gaps whenever its host is a "
        "little late",
    )  # fmt: skip
    spread_log: float = limit(
        0.03, "log", Origin.PHYSICS, "by which the launching of sound hosts differs at least"
    )
    prior_degrees: float = limit(
        4.0, "degrees of freedom", Origin.CONVENTION,
        "with which that counts beside the spread of a job's own hosts",
    )  # fmt: skip
    slow_log: float = limit(
        math.log(1.35), "log", Origin.BENCHMARK,
        "by which each rank of a host that launches slowly exceeds those of all others: processors "
        "of one model, and a few iterations on sound hosts, differ by less",
    )  # fmt: skip
    slow_host_log: float = limit(
        math.log(1.2), "log", Origin.BENCHMARK,
        "the same of a host all of whose ranks do, and which loses time or is waited for: of sound "
        "hosts none exceeded the others by more than 1.12",
    )  # fmt: skip
    sound_log: float = limit(
        math.log(1.12), "log", Origin.BENCHMARK,
        "by which it exceeded them before it became slow, at most: quiet hosts differ by no more, "
        "and load that comes and goes was there before",
    )  # fmt: skip
    other_stage_log: float = limit(
        math.log(1.7), "log", Origin.BENCHMARK,
        "the same where other hosts hold other stages, which have other operations to launch: "
        "sound ones differed by up to 1.61",
    )  # fmt: skip
    wander_share: float = limit(
        0.35, "share of the median", Origin.BENCHMARK,
        "by which that lead varies (standard deviation): 0.01 to 0.27 where a host is slow for "
        "good, 0.4 and more where load of others comes and goes",
    )  # fmt: skip
    follows_share: float = limit(
        0.7, "ratio of logs", Origin.BENCHMARK,
        "of how much longer a device's passes are and its host launches, either way, where all "
        "devices wait for their hosts: 0.95 where launching is all there is",
    )  # fmt: skip
    least_share: float = limit(
        0.02, "share of an iteration", Origin.BENCHMARK,
        "that its devices stand still for it before slow launching is worth a name",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Readings:
    """Device readings that are worth a sentence."""

    clock_share: float = limit(
        0.04, "share", Origin.CONVENTION, "by which a clock differs from the peers' median"
    )
    power_share: float = limit(
        0.15, "share", Origin.PHYSICS, "by which power differs: it follows the load"
    )
    most_times: float = limit(
        3.0, "times the log slowdown", Origin.PHYSICS,
        "that a clock may be lower by where experts wait for others inside passes; else 2",
    )  # fmt: skip
    temperature_degrees: float = limit(
        15.0, "°C", Origin.PHYSICS, "by which devices of one node differ by their place in the air"
    )


@dataclass(frozen=True, kw_only=True)
class _Occupancy:
    """Ranks for whom all others wait."""

    least_share: float = limit(
        0.1, "share of an iteration", Origin.BENCHMARK,
        "by which a rank is busy longer than its peers before everybody's waiting is its doing",
    )  # fmt: skip
    spread_times: float = limit(
        3.0, "times the spread", Origin.CONVENTION,
        "of the other ranks' own time, which the suspect must exceed",
    )  # fmt: skip
    mostly_share: float = limit(
        0.8, "share of the iterations", Origin.CONVENTION,
        "in which the suspect waits least of all ranks and is busier than its peers",
    )  # fmt: skip
    waiting_share: float = limit(
        0.05, "share of an iteration", Origin.BENCHMARK,
        "that every other rank waits longer than the suspect",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Data:
    """The share of the data in a rank's times."""

    min_spread_log: float = limit(
        0.01, "log", Origin.BENCHMARK, "below which a regression would only add noise"
    )
    min_correlation: float = limit(
        0.4, "correlation", Origin.BENCHMARK, "from which on the data's share is taken out"
    )
    min_samples: int = limit(8, "samples", Origin.CONVENTION, "that a regression needs")
    max_sigmas: float = limit(
        6.0, "sigma", Origin.CONVENTION, "at which samples of the regression are cut"
    )
    min_replicas: int = limit(
        3, "replicas", Origin.MATHEMATICS, "of which the odd one out can be told"
    )
    min_ranks: int = limit(
        4, "ranks", Origin.MATHEMATICS, "in which one fault hardly moves the median"
    )
    alike_share: float = limit(
        0.75, "share of the slowest", Origin.CONVENTION,
        "that the least slow rank of a position must reach for the position to cost it",
    )  # fmt: skip
    level_sigmas: float = limit(
        5.0, "sigma", Origin.CONVENTION,
        "by which a replica's data may by chance be longer over the whole window",
    )  # fmt: skip


WINDOW = _Window()
PASSES = _Passes()
KERNELS = _Kernels()
STALLS = _Stalls()
STARVATION = _Starvation()
PACE = _Pace()
READINGS = _Readings()
OCCUPANCY = _Occupancy()
DATA = _Data()
