"""Every number that decides a verdict: its value, its unit, where it comes from.

What a user may set stands in `DetectorSettings`; the rest stands in one table for each subject,
used as `PAIRS.agrees_share`. `python -m benchmarks.detection.thresholds` moves each number by a
half, down and up, reruns a part of the detection benchmark and writes what changes into
`benchmarks/results/thresholds.md`.

Units: "log" is a natural logarithm of a ratio of times (0.05 is 5.1 % longer); a "share" lies
between 0 and 1; "sigma" counts standard deviations.

To add a threshold: a line in the table of its subject; a new table has its instance among the
others above `TABLES`. A test forbids bare fractions in the rooms `causes`, `observe`, `stats` and
`comparison`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from megascan.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", int, float)


class Origin(StrEnum):
    """Where a number comes from."""

    BENCHMARK = "benchmark"
    """Chosen with the detection benchmarks (benchmarks/results/detection*.md)."""
    PHYSICS = "physics"
    """What devices, hosts and networks do, measured or published."""
    CONVENTION = "convention"
    """Usual practice, or a judgement of what is worth reporting."""
    MATHEMATICS = "mathematics"
    """Follows from a definition: not to be moved."""


def limit(value: T, unit: str, origin: Origin, meaning: str) -> T:
    """Declare a field with its value, unit, origin and meaning."""
    return field(default=value, metadata={"unit": unit, "origin": origin, "meaning": meaning})


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
class _Compute:
    """Ranks that compute slowly."""

    hidden_share: float = limit(
        0.1, "share of the effect", Origin.BENCHMARK,
        "that the device may be slower than its passes, which hold launches and communication that "
        "the trace does not show: the upper bound of the interval",
    )  # fmt: skip
    gpu_noise_log: float = limit(
        0.001, "log", Origin.PHYSICS, "by which an iteration's value on a GPU always varies"
    )
    cpu_noise_log: float = limit(
        0.003, "log", Origin.PHYSICS, "by which an iteration's value on a CPU always varies"
    )
    gpu_spread_log: float = limit(
        0.004, "log", Origin.PHYSICS, "by which sound GPUs differ for good"
    )
    cpu_spread_log: float = limit(
        0.01, "log", Origin.PHYSICS, "by which sound CPUs differ for good"
    )
    gpu_most_log: float = limit(
        0.06, "log", Origin.PHYSICS,
        "by which sound GPUs of one model differ for good at most, one standard deviation: chips "
        "under one power limit span 20 % at most",
    )  # fmt: skip
    cpu_most_log: float = limit(
        0.2, "log", Origin.PHYSICS,
        "the same of processes on shared cores: a core that two threads share gives each 0.6 of it",
    )  # fmt: skip
    tail_degrees: float = limit(
        3.0, "degrees of freedom", Origin.PHYSICS,
        "of the t law of single iterations beyond all that was seen: tails as heavy as those of "
        "kernel times on shared machines",
    )  # fmt: skip
    spread_of_floor_share: float = limit(
        1.0 / 6.0, "share of the floor", Origin.CONVENTION,
        "who asks for small slowdowns takes what is usual for at most so much of them",
    )  # fmt: skip
    mixed_ratio: float = limit(
        1.3, "ratio", Origin.PHYSICS,
        "effect floor where communication is part of CPU time: processes that wait over gloo poll "
        "and copy by a fifth of it; caches and shared memory cost as much",
    )  # fmt: skip
    cache_ratio: float = limit(
        1.1, "ratio", Origin.PHYSICS,
        "by which cold caches and shared memory slow passes on CPUs: less is not worth a word",
    )  # fmt: skip
    shared_core_ratio: float = limit(
        1.7, "ratio", Origin.PHYSICS,
        "by which a second thread on its core slows a process: of two ranks on CPUs, the one that "
        "has a neighbour looks slow by as much",
    )  # fmt: skip
    cache_share: float = limit(
        0.4, "share of the effect", Origin.BENCHMARK,
        "an optimizer that is slower by less says that caches are cold, not that the core is slow",
    )  # fmt: skip
    min_pool: int = limit(
        3, "rows", Origin.MATHEMATICS, "of which the odd one out can be told; fewer have no median"
    )
    one_sided_share: float = limit(
        0.3, "share of the effect", Origin.CONVENTION,
        "a pass that is slower by less than this of the other's effect is not slow",
    )  # fmt: skip
    surely_q: float = limit(
        1e-6, "q-value", Origin.CONVENTION, "below which even one slow pass alone is worth saying"
    )
    lone_floor_log: float = limit(
        0.04, "log", Origin.PHYSICS, "by which stages differ in their layers for their own reasons"
    )


@dataclass(frozen=True, kw_only=True)
class _Memory:
    """Devices whose memory is slow."""

    floor_log: float = limit(
        math.log(1.1), "log", Origin.PHYSICS,
        "effect floor: sound memories of one model differ by a per cent or two, and a clock that "
        "is 1.5 times lower slows what memory bounds by as much as this",
    )  # fmt: skip
    most_matrix_share: float = limit(
        0.5, "share of the effect", Origin.CONVENTION,
        "that matrix products may be slower by: more, and it is the device or the data",
    )  # fmt: skip
    agrees_share: float = limit(
        0.5, "share of the effect", Origin.CONVENTION,
        "that the optimizer shows at least, and the other way round; that what moves memory shows "
        "at least where the device as a whole is slow",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Optimizer:
    """Ranks whose optimizer step alone is slow."""

    floor_log: float = limit(
        math.log(1.35), "log", Origin.PHYSICS,
        "effect floor: the many short kernels of the step take as long as their launches, and "
        "sound hosts of one model launch at speeds that differ by less",
    )  # fmt: skip
    pair_floor_log: float = limit(
        math.log(1.5), "log", Origin.CONVENTION, "the same where there is one peer only"
    )
    noise_log: float = limit(
        0.01, "log", Origin.PHYSICS, "by which the step of a sound device always varies"
    )
    memory_passes_share: float = limit(
        0.15, "share of the log slowdown", Origin.PHYSICS,
        "by which slow memory slows passes at least, a fifth of which moves memory: a step that is "
        "24 times as long beside passes of 1.3 waits",
    )  # fmt: skip
    most_passes_share: float = limit(
        0.5, "share of the effect", Origin.CONVENTION,
        "that its passes may be slower by: more, and it is the device as a whole",
    )  # fmt: skip
    least_gain_ratio: float = limit(
        1.02, "ratio", Origin.BENCHMARK,
        "of the step to that without a slow optimizer step, from which on somebody waits for it",
    )  # fmt: skip
    least_share: float = limit(
        0.01, "share of an iteration", Origin.CONVENTION, "that the excess takes at least"
    )
    confirmed_floor_log: float = limit(
        math.log(1.05), "log", Origin.BENCHMARK,
        "effect floor where the rank's passes are slow as well, more than those of all its peers",
    )  # fmt: skip
    least_passes_log: float = limit(
        math.log(1.02), "log", Origin.BENCHMARK, "by which these passes are slower at least"
    )
    confirmed_sigmas: float = limit(
        10.0, "sigma of the peers", Origin.BENCHMARK,
        "by which such a step stands out: chips differ in passes and steps alike",
    )  # fmt: skip
    awaited_share: float = limit(
        0.5, "share of the excess", Origin.CONVENTION,
        "by which the other ranks wait longer than the slow one: one for whom nobody waits may "
        "wait itself",
    )  # fmt: skip
    together_share: float = limit(
        0.75, "share of the longer excess", Origin.CONVENTION,
        "to which two stages' steps of one replica are longer by the same time: who waits for the "
        "same rank ends with it, and loses as much",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Spells:
    """Devices that are slow in few iterations of a profile."""

    floor_log: float = limit(
        math.log(1.1), "log", Origin.PHYSICS,
        "effect floor: a device at its power limit varies by less from one iteration to the next",
    )  # fmt: skip
    noise_log: float = limit(
        0.004, "log", Origin.PHYSICS, "by which an iteration's kernels always vary"
    )
    agrees_share: float = limit(
        0.5, "share of the effect", Origin.CONVENTION,
        "that a slow part shows at least, and no other rank in any iteration",
    )  # fmt: skip
    parts_share: float = limit(
        0.75, "share of the parts", Origin.PHYSICS,
        "of either pass that a lower clock slows: the others may be bound by memory",
    )  # fmt: skip
    optimizer_share: float = limit(
        0.08, "share of the effect", Origin.BENCHMARK,
        "that the optimizer shows where one iteration alone is slow",
    )  # fmt: skip
    most_share: float = limit(
        0.5, "share of the iterations", Origin.MATHEMATICS,
        "that may be slow: beyond it nobody knows which level is the usual one",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Ordinary:
    """Slow by so little, or in such a place, that no node need be at fault."""

    small_floors: float = limit(
        1.5, "times the floor", Origin.BENCHMARK, "more is no ordinary difference between chips"
    )
    usual_log: float = limit(
        0.0056, "log", Origin.BENCHMARK,
        "sigma of sound devices under load before their own spread is measured (published: up to 3 "
        "%, which a job then shows): with it four that are alike tell one that is 3 % slower",
    )  # fmt: skip
    usual_weight: float = limit(
        1.0, "ranks", Origin.BENCHMARK, "that this counts for beside measured ones"
    )
    steps_alike_ratio: float = limit(
        1.08, "ratio", Origin.BENCHMARK,
        "by which one of few devices is slower from where on its optimizer step confirms it: sound "
        "chips of few ranks were seen up to 1.07",
    )  # fmt: skip
    most_of_two_log: float = limit(
        math.log(1.085), "log", Origin.PHYSICS,
        "by which one of two sound devices may be slower, where no other ranks show how they "
        "differ: twice the sigma of two that differ by the 3 % that a few jobs' devices do",
    )  # fmt: skip
    reach_share: float = limit(
        0.995, "share of sound ranks", Origin.CONVENTION,
        "that are no slower than one more beside few others may be",
    )  # fmt: skip
    little_ratio: float = limit(
        1.1, "ratio", Origin.PHYSICS,
        "that a device may be slower by and be sound, where nothing is gained by mending it, or "
        "it is compared with other stages only",
    )  # fmt: skip
    few_iterations: int = limit(
        10, "iterations", Origin.CONVENTION,
        "below which it may as well be longer data, where nothing is gained by mending it",
    )  # fmt: skip
    worthwhile_ratio: float = limit(
        1.005, "ratio", Origin.CONVENTION,
        "of a step to the step without a finding, below which mending it is no gain",
    )  # fmt: skip
    small_gain_ratio: float = limit(
        1.01, "ratio", Origin.BENCHMARK,
        "of a step to the step without a finding, below which it must be beyond doubt",
    )  # fmt: skip
    many_iterations: int = limit(
        16, "iterations", Origin.BENCHMARK, "from which on such a finding need not be so sure"
    )
    certain_q: float = limit(
        1e-8, "q value", Origin.BENCHMARK, "below which a finding is beyond doubt"
    )
    plain_ratio: float = limit(
        1.2, "ratio", Origin.BENCHMARK, "from which on a slow device is no difference of chips"
    )
    at_times_ratio: float = limit(
        1.1, "ratio", Origin.CONVENTION,
        "by which single passes of a device are slower now and then; chips differ "
        "for good",
    )  # fmt: skip
    far_slower_times: float = limit(
        5.0, "times the excess", Origin.CONVENTION,
        "of a small slowdown, from which on another one may be the reason of both",
    )  # fmt: skip
    rms_factor: float = limit(
        4.5, "times the root mean square", Origin.BENCHMARK,
        "of the sound ranks' distances, from which on a small slowdown stands out",
    )  # fmt: skip
    chance_of_lone: float = limit(
        1e-4, "probability", Origin.BENCHMARK,
        "that one of the ranks of a stage is as slow by chance, where no other rank is slow: sound "
        "ones were at 2e-4 and more",
    )  # fmt: skip
    largest_factor: float = limit(
        3.0, "times the largest", Origin.BENCHMARK,
        "of the sound ranks' distances, from which on a small slowdown stands out",
    )  # fmt: skip
    sound_share: float = limit(
        0.9975, "share of sound ranks", Origin.CONVENTION,
        "that stray from few others by less: of four of them one in a hundred jobs does not",
    )  # fmt: skip
    most_log: float = limit(
        math.log(1.2), "log", Origin.PHYSICS, "by which sound devices of one model differ at most"
    )
    min_peers: int = limit(
        3, "ranks", Origin.CONVENTION, "of which a small slowdown is told from ordinary ones"
    )
    min_ranks: int = limit(
        8, "ranks", Origin.CONVENTION,
        "of all stages, whose median distance from their peers says how sound ones differ",
    )  # fmt: skip
    min_pairs: int = limit(
        8, "pairs", Origin.CONVENTION, "of ranks of one stage before their spread is known"
    )
    few_pairs: int = limit(
        13, "pairs", Origin.CONVENTION, "below which their quarter is a rank or two by chance"
    )
    few_pairs_share: float = limit(
        0.8, "share", Origin.MATHEMATICS,
        "of what so few pairs show: the third of 12, of which three are the slow rank's, lies "
        "further out than a quarter of sound ones",
    )  # fmt: skip
    nearest_share: float = limit(
        0.25, "share of the pairs", Origin.MATHEMATICS,
        "of ranks, the nearest ones: with half of the ranks slow, so many are sound ones",
    )  # fmt: skip
    nearest_sigmas: float = limit(
        0.4506, "sigma", Origin.MATHEMATICS,
        "within which that share of the distances between two draws of a normal law lies",
    )  # fmt: skip
    mostly_share: float = limit(
        0.7, "share of the window", Origin.CONVENTION, "from which on a slowdown is a level"
    )
    alike_share: float = limit(
        0.7, "share of the largest", Origin.CONVENTION,
        "that every rank of a place must reach for the place to be slow alike",
    )  # fmt: skip
    several_at_place: int = limit(
        3, "ranks", Origin.CONVENTION,
        "all slow that have one place in their TP groups, which as many faults would hardly share: "
        "half as slow as the slowest is then slow alike",
    )  # fmt: skip
    position_reach_log: float = limit(
        math.log(1.07), "log", Origin.PHYSICS,
        "what the duties of a TP group's first rank may cost it: 7 %",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Pairs:
    """Which of two ranks is at fault."""

    agrees_share: float = limit(
        0.5, "share of the effect", Origin.CONVENTION, "that a second measure must confirm"
    )
    elsewhere_share: float = limit(
        0.3, "share of the effect", Origin.CONVENTION,
        "that other stages of the replica may show, for the data not to be the reason",
    )  # fmt: skip
    max_phase_ratio: float = limit(
        1.5, "times the effect", Origin.CONVENTION, "that one pass of a slow device may show"
    )
    min_effect_log: float = limit(
        math.log(1.15), "log", Origin.PHYSICS,
        "two sound devices may differ by less, and their optimizers with them",
    )  # fmt: skip
    min_optimizer_log: float = limit(
        0.01, "log", Origin.BENCHMARK, "by which the optimizer of a slow one of a pair is slower"
    )
    min_normal_iterations: int = limit(
        2, "iterations", Origin.MATHEMATICS, "outside the slow ones that make a history"
    )
    least_as_mate: float = limit(
        0.9, "times the mate's effect", Origin.CONVENTION,
        "in one kind of passes, from which on to its inverse a rank may wait there for the mate",
    )  # fmt: skip
    most_apart: float = limit(
        0.7, "times the mate's effect", Origin.CONVENTION,
        "in the other kind, for the mate to be the slow one of the two",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Device:
    """Slow devices told from long data, hidden waiting and hot experts."""

    optimizer_share: float = limit(
        0.08, "share of the effect", Origin.BENCHMARK,
        "that a slow device's optimizer, which is bound by memory, shows at least",
    )  # fmt: skip
    optimizer_share_of_experts: float = limit(
        0.25, "share of the effect", Origin.PHYSICS,
        "that it shows at least where experts may be hot: chips that differ by 2 % show as much",
    )  # fmt: skip
    most_optimizer_log: float = limit(
        math.log(3.0), "log", Origin.PHYSICS,
        "that it may be slower than the passes: more of a device's memory would slow those as well",
    )  # fmt: skip
    most_token_power: float = limit(
        2.0, "power", Origin.PHYSICS,
        "of the number of tokens with which a pass's time grows at most: that of attention grows "
        "with the square, all else in proportion",
    )  # fmt: skip
    sure_sigmas: float = limit(
        3.0, "sigma", Origin.CONVENTION, "of sound ranks by which a slow optimizer stands out"
    )
    alike_log_share: float = limit(
        0.15, "share of the effect", Origin.BENCHMARK,
        "by which the passes of TP mates differ that wait for each other inside them",
    )  # fmt: skip
    optimizer_error_log: float = limit(
        0.002, "log", Origin.PHYSICS, "by which optimizer steps of sound devices always vary"
    )
    least_lookups_share: float = limit(
        0.25, "share of the effect", Origin.PHYSICS,
        "that the lookups of the slow one of a TP group show at least: chips that differ by 2 % "
        "show as much where their group is slow by 8 %",
    )  # fmt: skip
    least_lookup_ns: float = limit(
        30_000.0, "ns", Origin.PHYSICS,
        "that an embedding or a loss takes at least: some 8 us of it no number of tokens lengthens "
        "(benchmarks/results/lookups_h100.md), so it follows them by three quarters or more",
    )  # fmt: skip
    least_spared: float = limit(
        0.08, "share of the log slowdown", Origin.BENCHMARK,
        "by which a lower clock slows attention less than products of matrices, at least; heavier "
        "layers slow both alike within 0.03",
    )  # fmt: skip
    slow_parts_quantile: float = limit(
        0.9, "share of the parts", Origin.CONVENTION,
        "of a pass that are slow by less than its slow parts are; what sound ranks vary by",
    )  # fmt: skip
    quick_part_share: float = limit(
        0.25, "share of the effect", Origin.CONVENTION,
        "by which parts of a pass that nothing slows may differ from those of the peers",
    )  # fmt: skip
    least_parts_share: float = limit(
        0.2, "share of the parts", Origin.CONVENTION,
        "of a pass that are quick, and that are slow, where its device is shared; of the slow ones "
        "that are quick in some iteration",
    )  # fmt: skip
    usual_mates: float = limit(
        2.0, "degrees of freedom", Origin.BENCHMARK,
        "that the usual spread of devices counts for against what steps of mates in sound groups "
        "show: where no group shows it, chips may differ by 5 %",
    )  # fmt: skip
    isolated_share: float = limit(
        0.4, "share of the effect", Origin.BENCHMARK,
        "by which a rank exceeds its TP mates in one pass: they wait for it in the other, which is "
        "no data that all of them share on chips that differ",
    )  # fmt: skip
    least_isolated_log: float = limit(
        0.02, "log", Origin.BENCHMARK, "by which it exceeds them at least"
    )
    alike_share: float = limit(
        0.75, "share of the ranks", Origin.CONVENTION,
        "on the same data that are slow alike, from which on the data may be the reason",
    )  # fmt: skip
    min_hosts_of_replica: int = limit(
        3, "hosts", Origin.CONVENTION,
        "of a replica whose stages are slow alike, from which on that is no matter of devices",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Ends:
    """Ranks of a TP group whose passes end late, where the others wait for them in between."""

    least_of_group_log: float = limit(
        math.log(1.03), "log", Origin.CONVENTION,
        "by which a group is slower than the others of its stage, where there are any",
    )  # fmt: skip
    least_output_log: float = limit(
        math.log(1.1), "log", Origin.PHYSICS,
        "by which its output layer is slower: sound devices of a pair may differ by less",
    )  # fmt: skip
    least_share: float = limit(
        0.02, "share of a forward pass", Origin.BENCHMARK,
        "for which its mates wait in the loss, or by which its backward passes end later: those of "
        "sound ranks differ by 0.003, and by 0.01 in few iterations",
    )  # fmt: skip
    agrees_share: float = limit(
        0.25, "share of the lead", Origin.CONVENTION,
        "by which the other pass must show the same at least",
    )  # fmt: skip
    always_share: float = limit(
        0.9, "share of the iterations", Origin.CONVENTION, "in which it ends last"
    )


@dataclass(frozen=True, kw_only=True)
class _ChangedEnds:
    """Ranks of groups that wait unseen, whose own work is longer where the group is slow."""

    least_iterations: int = limit(
        2, "iterations", Origin.CONVENTION, "in which a group is slow, and in which it is not"
    )
    least_end_share: float = limit(
        0.005, "share of a forward pass", Origin.BENCHMARK,
        "by which passes end later, or begin late, where the group is slow: less is no device that "
        "is 3 % slower",
    )  # fmt: skip
    least_own_share: float = limit(
        0.003, "share of the work", Origin.BENCHMARK,
        "by which lookups, losses, output layers and steps are longer then; of a device 1.2 times "
        "slower whose step is bound by memory it was 0.004",
    )  # fmt: skip
    most_end_share: float = limit(
        0.5, "share of what the group loses", Origin.BENCHMARK,
        "that lies behind the last exchange; of slow devices it was 0.3 at most, of a pause there "
        "it is all",
    )  # fmt: skip
    agrees_p_value: float = limit(
        0.02, "probability", Origin.CONVENTION, "of chance for a second kind of work to agree"
    )
    kinds: int = limit(6, "kinds", Origin.MATHEMATICS, "of work that are tried")


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
        "the same where stages are compared with each other, there is one other host only, or "
        "another rank is named",
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
    device_share: float = limit(
        0.1, "share of the effect", Origin.BENCHMARK,
        "that the optimizer shows where data, or the partition, may make all passes longer",
    )  # fmt: skip
    least_unconfirmed_log: float = limit(
        math.log(1.08), "log", Origin.BENCHMARK,
        "by which a host's ranks compute slower where neither optimizer nor clocks confirm it",
    )  # fmt: skip
    shared_data_share: float = limit(
        0.5, "share of the effect", Origin.CONVENTION,
        "that ranks of the same replicas show on other hosts where the replicas' data explain it",
    )  # fmt: skip
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
    starving_log: float = limit(
        0.15, "log", Origin.BENCHMARK,
        "by which the optimizer's many short kernels are slower on a host that launches late",
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
class _Networks:
    """Hosts whose network is slow."""

    spread_log: float = limit(0.03, "log", Origin.PHYSICS, "by which equal links differ for good")
    min_connections: int = limit(
        2, "connections", Origin.CONVENTION, "that a host's slow network shows in at least"
    )
    sure_sigmas: float = limit(
        4.0, "sigma", Origin.CONVENTION, "by which the connections of a slow network stand out"
    )
    least_quick_hosts: int = limit(
        2, "hosts", Origin.CONVENTION,
        "that are quick inside before another one is not just built otherwise",
    )  # fmt: skip
    outer_share: float = limit(
        0.25, "share of the connections", Origin.CONVENTION,
        "on either side that may lie beyond the gap between slow and quick ones",
    )  # fmt: skip
    alike_ratio: float = limit(
        1.05, "ratio", Origin.BENCHMARK,
        "below which spans of slow and quick transfers last as long by one clock: clocks differ",
    )  # fmt: skip
    unharmed_share: float = limit(
        0.3, "share of the floor", Origin.BENCHMARK,
        "a kind of transfers that is slower by less acquits the network",
    )  # fmt: skip
    min_bytes: int = limit(
        65_536, "bytes", Origin.PHYSICS, "below which a transfer is latency, not bandwidth"
    )
    most_share: float = limit(
        0.6, "share of the iteration", Origin.BENCHMARK,
        "of transfers between hosts, from which on quicker ones shorten it, whatever a replay says",
    )  # fmt: skip
    min_scaled_bytes: int = limit(
        16_777_216, "bytes", Origin.PHYSICS,
        "from which on a ring takes time in proportion to its size: its latency is next to nothing",
    )  # fmt: skip
    max_size_ratio: float = limit(
        4.0, "ratio", Origin.PHYSICS,
        "between neighbouring sizes that are compared by the byte: an embedding's part of a stage",
    )  # fmt: skip
    min_scaled_slowdown: float = limit(
        1.5, "ratio", Origin.PHYSICS,
        "effect floor by the byte: a port that fell to half its speed, or below, takes twice as "
        "long; algorithms that change with the size do less",
    )  # fmt: skip
    min_step_share: float = limit(
        0.005,
        "share of an iteration",
        Origin.BENCHMARK,
        "that a slow network costs one of its ranks",
    )
    most_of_nic: float = limit(
        250.0, "GB/s one way", Origin.PHYSICS,
        "that one connection gets of a host's NICs (eight of 400 Gbit/s carry 400 together): what "
        "is quicker goes over NVLink from host to host, and is no equal of what does not",
    )  # fmt: skip
    rings_agree_share: float = limit(
        0.15, "share of the effect", Origin.BENCHMARK,
        "within which a stage's rings are slower by as much as its host's messages: 0.03 where "
        "that host was slow; rings of unknown size of sound stages differ by a tenth or a third",
    )  # fmt: skip
    culprit_share: float = limit(
        0.5, "share of the slow connections", Origin.CONVENTION,
        "that a rank must be in to be blamed for them, not one of two hosts that cannot be told "
        "apart: of a host with two ranks it is in half",
    )  # fmt: skip
    same_wire_share: float = limit(
        0.5, "share of the groups", Origin.CONVENTION,
        "that join the same hosts and are so quick, beyond which the others of them should be",
    )  # fmt: skip
    caveat_ratio: float = limit(
        1.05, "ratio", Origin.CONVENTION,
        "of a step that a network at half its speed, which could not be seen, would make longer: "
        "said beside health",
    )  # fmt: skip
    half_speed_ratio: float = limit(
        2.0, "ratio", Origin.PHYSICS,
        "by which a port that fell to half its rate transfers slower: what a network that nobody "
        "can see may cost is reckoned so",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Flaps:
    """Connections between hosts that are slow now and then."""

    slow_ratio: float = limit(
        2.0, "ratio", Origin.PHYSICS,
        "of an iteration's transfers to those of quick ones: a port that fell to half its rate",
    )  # fmt: skip
    least_connections: int = limit(
        3, "connections", Origin.CONVENTION, "that are slow before what they share is at fault"
    )
    least_times: int = limit(
        3, "iterations", Origin.CONVENTION, "in which each of two is slow, for these to be enough"
    )
    most_left_share: float = limit(
        0.05, "share of what is lost", Origin.CONVENTION,
        "that connections lose without whoever is named",
    )  # fmt: skip
    least_left_share: float = limit(
        0.1, "share of what is lost", Origin.CONVENTION,
        "that they lose without anybody else, who would be named as well as not",
    )  # fmt: skip
    least_share: float = limit(
        0.02, "share of all time", Origin.CONVENTION, "lost to it before it is spoken of"
    )


@dataclass(frozen=True, kw_only=True)
class _NvLinks:
    """Groups inside a host that communicate at the pace of PCIe."""

    least_share: float = limit(
        0.2, "share of the one-way rate", Origin.PHYSICS,
        "of a device's NVLinks that collectives of 16 MB reach at least; H200s show 0.64 to 0.81",
    )  # fmt: skip
    surely_full_share: float = limit(
        0.45, "share of the one-way rate", Origin.PHYSICS,
        "that no group reaches of which an NVLink is at half its speed: half of 0.81, and a little",
    )  # fmt: skip
    least_ranks: int = limit(2, "ranks", Origin.PHYSICS, "that one slow connection slows")
    least_collectives: int = limit(
        16, "collectives", Origin.BENCHMARK,
        "of a rank and a kind, of which the quickest waited for nobody; of three or four they do "
        "not: up to nine times as long on sound ranks",
    )  # fmt: skip
    alike_ratio: float = limit(
        1.25, "ratio", Origin.CONVENTION,
        "within which the quickest of the others, or of the slow ranks, and their numbers lie",
    )  # fmt: skip
    most_of_pcie: float = limit(
        64.0, "GB/s one way", Origin.PHYSICS,
        "of sixteen lanes of PCIe 5: groups of one host that carry more do so over NVLink",
    )  # fmt: skip
    min_step_share: float = limit(
        0.02, "share of an iteration", Origin.CONVENTION,
        "that would be gained at that rate before it is worth a word",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Runs:
    """Modules in a row that are slow, of one iteration."""

    least_modules: int = limit(
        4, "modules", Origin.CONVENTION, "in a row that are slow before that is no accident"
    )
    most_gap: int = limit(1, "modules", Origin.CONVENTION, "as quick as ever between slow ones")
    least_kinds: int = limit(
        2, "kinds of modules", Origin.PHYSICS,
        "that a slow device slows: of one kind alone it may be what is in its kernels",
    )  # fmt: skip
    least_slow_share: float = limit(
        0.75, "share of a run's modules", Origin.CONVENTION, "that are slow"
    )
    margin_log: float = limit(
        0.05, "log", Origin.CONVENTION, "that a module lies above the slower of the quiet ones"
    )
    margin_sigmas: float = limit(
        5.0, "sigma", Origin.CONVENTION, "of the quiet modules of its kind, that it does so"
    )
    most_sigma_log: float = limit(
        0.04, "log", Origin.BENCHMARK,
        "by which modules of a kind vary on a rank for them to tell: experts and uneven documents "
        "vary by 0.08 and more",
    )  # fmt: skip
    one_factor_share: float = limit(
        0.3, "share of the size", Origin.BENCHMARK,
        "within which half of the modules lie that one factor slows; 0.02 to 0.2 were seen",
    )  # fmt: skip
    sound_passes: int = limit(
        2000, "passes", Origin.BENCHMARK,
        "of sound ranks of any job that have no run: what is known before this job's are counted",
    )  # fmt: skip
    least_share: float = limit(
        0.005, "share of the passes", Origin.CONVENTION,
        "that runs cost on the mean: they miss about as much again, in runs that are too short",
    )  # fmt: skip
    long_modules: int = limit(
        8, "modules", Origin.BENCHMARK,
        "of a run that begins or ends inside a pass, from which on it is no accident by itself",
    )  # fmt: skip
    sound_passes_of_long: int = limit(
        100_000, "passes", Origin.BENCHMARK,
        "of sound ranks of any job that have no such run; 465,000 were seen without one",
    )  # fmt: skip
    least_left_share: float = limit(
        0.1, "share of the busy time", Origin.CONVENTION,
        "that is not lost, however long runs are",
    )  # fmt: skip
    mates_share: float = limit(
        0.75, "share of the size", Origin.CONVENTION,
        "that runs of a TP mate may have that waits inside its own modules",
    )  # fmt: skip
    mostly_cut: float = limit(
        0.5, "share of the runs", Origin.CONVENTION,
        "that begin or end inside passes, or have one size, for that to be said of the row",
    )  # fmt: skip
    most_starved: float = limit(
        0.5, "share of a run's modules", Origin.CONVENTION,
        "that began when they were launched, above which it is the host that was late",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Bursts:
    """Ranks that lose time now and then."""

    min_hits: int = limit(
        2, "iterations", Origin.CONVENTION, "that lose time before it is no accident"
    )
    max_hit_share: float = limit(
        0.9, "share of the iterations", Origin.CONVENTION,
        "with hits, above which it is a level, for the searches of levels to judge",
    )  # fmt: skip
    short_window: int = limit(
        8, "iterations", Origin.CONVENTION,
        "at most, in which heavy pauses are worth a word that are too few for a proof",
    )  # fmt: skip
    min_rows: int = limit(3, "rows", Origin.MATHEMATICS, "of which the odd one out can be told")
    certain_q: float = limit(
        1e-3, "q value", Origin.CONVENTION,
        "below which bursts of one of two or three ranks, of which the others have none, are no "
        "noise of its own",
    )  # fmt: skip
    sure_others: int = limit(
        3, "rows", Origin.BENCHMARK,
        "beside the one with slow bursts for it to be named; of three one may be noisier",
    )  # fmt: skip
    min_pair: int = limit(
        3, "bursts", Origin.CONVENTION, "of one of two rows, and none of the other, worth a word"
    )
    margin_share: float = limit(
        0.02, "share", Origin.BENCHMARK, "of the iteration, or of its passes, that a hit loses"
    )
    margin_sigmas: float = limit(
        6.0, "sigma", Origin.BENCHMARK, "of sound ranks that a hit lies above its peers"
    )
    least_share: float = limit(
        0.01, "share", Origin.BENCHMARK, "of the iteration, lost to pauses on the mean of all"
    )
    least_host_share: float = limit(
        0.03, "share", Origin.BENCHMARK, "of the iteration, lost by a host's ranks on the mean"
    )
    lone_share: float = limit(
        0.05, "share", Origin.CONVENTION,
        "of all time, that a rank loses in three pauses and more, of which no other has any",
    )  # fmt: skip
    sure_host_share: float = limit(
        0.05, "share", Origin.BENCHMARK,
        "the same where the pauses of ranks are counted, not the iterations of their host: pauses "
        "of sound hosts meet several ranks at once, and cost less",
    )  # fmt: skip
    idle_share: float = limit(
        0.5, "share of what slow passes take longer", Origin.CONVENTION,
        "that a device stands idle before its host may be the reason",
    )  # fmt: skip
    alike_starved: float = limit(
        0.05, "share of the operations", Origin.CONVENTION,
        "by which a device may wait for more launches in its slow iterations than in others, and "
        "than its peers, before its host may be the reason",
    )  # fmt: skip
    written_share: float = limit(
        1.0, "share of the iteration", Origin.CONVENTION,
        "that the job's first rank stops for on the mean before a checkpoint is more likely than a "
        "sick host",
    )  # fmt: skip
    one_go_share: float = limit(
        0.5, "share of its ranks", Origin.CONVENTION,
        "of a host that pause in its iterations with pauses, above which an iteration is one pause",
    )  # fmt: skip
    one_rank_share: float = limit(
        0.7, "share of what a host's ranks lose", Origin.BENCHMARK,
        "that one of them may have; where pauses meet whichever rank there is it was half at most",
    )  # fmt: skip
    usual_share: float = limit(
        0.25, "share of iterations", Origin.BENCHMARK,
        "in which others compute as slowly, before an estimate that it costs nothing counts",
    )  # fmt: skip
    noise_ratio: float = limit(
        3.0, "ratio", Origin.BENCHMARK,
        "to what the next host loses in all, for a host that is a stage of its own: of sound ones "
        "it was 2.8 at most, of faults 1.5 once, 2.1 once, and 3 and more",
    )  # fmt: skip
    beyond_noise_ratio: float = limit(
        4.0, "ratio", Origin.BENCHMARK,
        "the same from which no noise, nor work of its stage, is the reason: of sound hosts whose "
        "pauses came more than once none reached it, of faults most are beyond 10",
    )  # fmt: skip
    long_passes_share: float = limit(
        0.5, "share of the passes", Origin.BENCHMARK,
        "in iterations with pauses that are longer: of hosts that pause 0.12 to 0.32, of a slower "
        "level nearly all",
    )  # fmt: skip
    without_one_q: float = limit(
        0.05, "probability", Origin.CONVENTION,
        "of the pauses of a host's ranks but the one that has most, at the rate of other hosts",
    )  # fmt: skip
    most_of_host_share: float = limit(
        0.5, "share of its ranks", Origin.CONVENTION, "that pause before it is the host that stalls"
    )
    shared_storage_share: float = limit(
        0.1, "share of the iterations", Origin.BENCHMARK,
        "in which other loaders have to wait as well: their storage is slow, one and all",
    )  # fmt: skip
    one_loader_share: float = limit(
        0.3, "share of its iterations", Origin.BENCHMARK,
        "in which a single other loader takes as long: two slow ones load from one storage",
    )  # fmt: skip
    least_uneven_share: float = limit(
        0.05, "share of an iteration", Origin.BENCHMARK,
        "that pauses inside passes last on the mean where microbatches vary in length, as what a "
        "pass takes beside its layers does then",
    )  # fmt: skip
    elsewhere_share: float = limit(
        1.0 / 6.0, "share of the rate", Origin.BENCHMARK,
        "of a row's pauses that all others may have before noise may be the reason: sound ranks of "
        "noisy jobs had 0.14 to 0.25 of it, faults 0.16 and less",
    )  # fmt: skip
    others_share: float = limit(
        1.0 / 3.0, "share of the rate", Origin.CONVENTION,
        "of a row's hits that the others may have for the pauses to be the row's alone",
    )  # fmt: skip
    other_end_share: float = limit(
        0.2, "share of the iterations with pauses", Origin.BENCHMARK,
        "in which other hosts pause, too, for a host that holds an end of the pipeline to be alone",
    )  # fmt: skip
    quiet_share: float = limit(
        0.25, "share of the iterations", Origin.CONVENTION,
        "at whose upper end a row's quiet level is read: three quarters may be bursts",
    )  # fmt: skip
    half_sigmas: float = limit(
        0.6745, "sigma", Origin.MATHEMATICS,
        "on either side of a normal law's centre between which half of it lies",
    )  # fmt: skip
    max_pair_share: float = limit(
        0.5, "share of the passes", Origin.MATHEMATICS,
        "of one of two rows that may be slow: beyond it nobody knows which level is the usual one",
    )  # fmt: skip
    one_speed_share: float = limit(
        0.1, "share of the size", Origin.BENCHMARK,
        "within which half of a device's slow passes lie where it has a second speed",
    )  # fmt: skip
    least_of_one_speed: int = limit(
        4, "passes", Origin.CONVENTION, "of one speed before that is no accident"
    )
    stop_ratio: float = limit(
        2.0, "times", Origin.PHYSICS,
        "as long as usual a single pass takes in which somebody stands still: devices that lower "
        "their clocks do so by less, and for longer than a pass",
    )  # fmt: skip
    single_share: float = limit(
        0.8, "share of the slow passes", Origin.CONVENTION,
        "that have no slow one beside them where these are stops",
    )  # fmt: skip
    max_late: int = limit(
        3, "iterations", Origin.CONVENTION,
        "before the end in which what goes on has begun, that no level tells of",
    )  # fmt: skip
    split_share: float = limit(
        0.2, "share of the slow passes", Origin.BENCHMARK,
        "whose microbatch is as quick as ever in its other passes, from which on no data are the "
        "reason; of throttled devices 0.28 and more were seen, of longer data none",
    )  # fmt: skip
    one_kind_p: float = limit(
        0.01, "probability", Origin.CONVENTION,
        "of slow passes of one kind only, below which that is no accident",
    )  # fmt: skip
    prior_hits: float = limit(
        0.5,
        "hits",
        Origin.MATHEMATICS,
        "added to those of the others, and as many misses (Jeffreys)",
    )


@dataclass(frozen=True, kw_only=True)
class _Losses:
    """Time lost next to compute, as shares of an iteration."""

    noise_share: float = limit(
        2e-4, "share of an iteration", Origin.PHYSICS, "by which such times always vary"
    )
    spread_share: float = limit(
        0.003, "share of an iteration", Origin.PHYSICS, "by which sound ranks differ for good"
    )
    gpu_floor_share: float = limit(
        1.0 / 3.0, "share of the compute floor", Origin.CONVENTION,
        "from which on directly measured losses are reported (1 % of a step)",
    )  # fmt: skip
    cpu_floor_share: float = limit(
        1.0, "share of the compute floor", Origin.PHYSICS,
        "the same on CPUs, where processes take time from each other all the while",
    )  # fmt: skip
    least_mean_share: float = limit(
        0.005, "share of the window", Origin.CONVENTION,
        "lost on the mean: a pause of some iterations that costs less is worth no name",
    )  # fmt: skip
    host_bound_share: float = limit(
        0.05, "share of an iteration", Origin.PHYSICS,
        "by which gaps differ between ranks where every device waits for its host, or between "
        "stages of one rank",
    )  # fmt: skip
    loader_ratio: float = limit(
        2.0, "ratio", Origin.BENCHMARK, "by which loading on sound hosts differs with the documents"
    )
    other_end_share: float = limit(
        0.2, "share of its loading", Origin.BENCHMARK,
        "that the other end of the pipeline may take in any iteration for a lone loader to be slow",
    )  # fmt: skip
    varies_ratio: float = limit(
        1.5, "ratio", Origin.CONVENTION,
        "of the longest to the shortest time that a device stands idle in an iteration, from which "
        "on it is nothing that a program asks of its host every time",
    )  # fmt: skip
    least_load_ns: float = limit(
        500e3, "ns an iteration", Origin.CONVENTION,
        "that fetching batches takes at least: less is what ranks get that do not load themselves",
    )  # fmt: skip
    many_gaps_share: float = limit(
        0.1, "share of the operations", Origin.BENCHMARK,
        "launched only just in time, from which on a host's lost time is its pace, and no few "
        "pauses",
    )  # fmt: skip
    most_of_cores_ratio: float = limit(
        10.0, "ratio", Origin.PHYSICS,
        "that sharing its cores with others makes a process's loading longer, at most",
    )  # fmt: skip
    pause_ratio: float = limit(
        5.0, "ratio", Origin.BENCHMARK,
        "of the share of the time in gaps to the share of a profile's kernels launched only just "
        "in time, from which on these gaps are few long pauses",
    )  # fmt: skip
    place_share: float = limit(
        0.5, "share of its excess", Origin.CONVENTION,
        "of lost time that remains over ranks at the same place in other TP groups, where it is "
        "the rank's own",
    )  # fmt: skip
    host_ratio: float = limit(
        1.2, "ratio", Origin.BENCHMARK,
        "by which gaps of devices differ where all hosts work as long in them, on cores that are "
        "not equally fast",
    )  # fmt: skip
    separated_share: float = limit(
        0.9, "share of the pairs", Origin.BENCHMARK,
        "of iterations, one of either rank, in which the slower of two loses more",
    )  # fmt: skip
    held_back_ratio: float = limit(
        1.1, "ratio", Origin.BENCHMARK,
        "of long loads to usual ones, up to which hosts wait in them for their devices (1.00 to "
        "1.05): of storage that is slow for all it is 1.9 and more",
    )  # fmt: skip
    beyond_all_chance: float = limit(
        0.01, "probability", Origin.CONVENTION,
        "that so many loads of one rank or host are the longest of all, if storage that all share "
        "were the reason",
    )  # fmt: skip
    refill_share: float = limit(
        0.5, "share of what it loads longer than its peers", Origin.BENCHMARK,
        "of an iteration, that the device of a late loader finds no work beside that: its queue "
        "is empty after each batch, and that of those who wait for it is full",
    )  # fmt: skip
    least_awaited_share: float = limit(
        0.1, "share of an iteration", Origin.CONVENTION,
        "that a rank loads whose loading nobody else does, while all others wait for it",
    )  # fmt: skip
    awaited_share: float = limit(
        0.5, "share of that loading", Origin.CONVENTION,
        "by which every other rank waits longer than the one that loads",
    )  # fmt: skip
    loads_share: float = limit(
        0.05, "share of the longest", Origin.BENCHMARK,
        "loading of any rank, that ranks of one stage and place must reach to count as loading",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Everywhere:
    """What slows the whole job, so that nobody stands out."""

    data_ratio: float = limit(
        1.1, "ratio", Origin.CONVENTION,
        "of an iteration to one in which nobody waits for data, where ranks take turns",
    )  # fmt: skip
    pauses_ratio: float = limit(
        1.05, "ratio", Origin.CONVENTION, "the same without the pauses of collectors"
    )
    proven_share: float = limit(
        0.5, "share", Origin.CONVENTION,
        "of such a ratio's excess that the iterations must prove, since they differ",
    )  # fmt: skip
    chance: float = limit(
        0.05, "probability", Origin.CONVENTION,
        "of as large a loss in iterations that differ as much, above which nothing is said",
    )  # fmt: skip
    near_share: float = limit(
        0.75, "share of the longest loss", Origin.BENCHMARK, "that counts as a loss like it"
    )
    most_of_one: float = limit(
        0.75, "share of the longest losses", Origin.CONVENTION,
        "to which one rank's may come near if ranks take turns",
    )  # fmt: skip
    left_share: float = limit(
        0.5, "share of the longest losses", Origin.CONVENTION,
        "that must be left without any one host if it is no host's fault",
    )  # fmt: skip
    uneven_ratio: float = limit(
        1.15, "ratio", Origin.BENCHMARK,
        "of a step to one in which all ranks take as long for the same work",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Shares:
    """Ranks that always have more to compute than others of their stage."""

    least_ratio: float = limit(
        1.1, "ratio", Origin.CONVENTION,
        "of an iteration to one in which each stage's work is spread evenly over its ranks",
    )  # fmt: skip
    near_share: float = limit(
        0.5, "share of the busiest rank's excess", Origin.CONVENTION,
        "by which a rank exceeds its stage's mean if it has more to compute as well",
    )  # fmt: skip
    mostly_share: float = limit(
        0.75, "share of the iterations", Origin.CONVENTION, "in which a rank that has more has it"
    )
    alike_ratio: float = limit(
        1.1, "ratio", Origin.PHYSICS,
        "of attention on ranks of busy experts to others', which chips differ by as well",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Links:
    """Connections that transfer slowly."""

    noise_log: float = limit(0.01, "log", Origin.PHYSICS, "by which a transfer always varies")
    spread_log: float = limit(0.03, "log", Origin.PHYSICS, "by which equal links differ for good")
    tail_degrees: float = limit(
        3.0, "degrees of freedom", Origin.PHYSICS,
        "of the t law of an iteration's median transfer on GPUs beyond all that was seen: eight "
        "times the equal links' time is no accident, in two iterations either",
    )  # fmt: skip
    named_slowdown: float = limit(
        1.4, "ratio", Origin.BENCHMARK,
        "from which a link is named: of those that share a port or a switch one may always meet "
        "others and be slower by a third, while ports fall to half their speed or less",
    )  # fmt: skip
    named_in_few: float = limit(
        1.7, "ratio", Origin.BENCHMARK,
        "the same in a window of few iterations: of 44 links named there 40 were slow, by 1.75 and "
        "more, and four sound ones had met others, or late launches, by up to 1.9",
    )  # fmt: skip
    named_beside_one: float = limit(
        2.0, "ratio", Origin.PHYSICS,
        "the same of a connection inside a host that has one equal only, which may be the quick "
        "one: a lane or a port that fell to half its speed",
    )  # fmt: skip
    devices_of_a_nic: int = limit(
        2, "devices", Origin.PHYSICS, "that share a NIC where a host has fewer NICs than GPUs"
    )
    late_launch_ns: float = limit(
        100_000.0, "ns a transfer", Origin.PHYSICS,
        "lost where an end's device waits for its host: some launches of ten microseconds each",
    )  # fmt: skip
    as_long_share: float = limit(
        0.75, "share of the effect", Origin.CONVENTION,
        "that an equal connection's transfer loses if it takes as long as a slow one's",
    )  # fmt: skip
    shared_share: float = limit(
        0.1, "share of the transfers", Origin.BENCHMARK,
        "of equal connections that take as long now and then, from which on a port that they share "
        "may be the reason: 0.18 where pairs of sound ranks shared a NIC, next to 0 elsewhere",
    )  # fmt: skip
    cpu_min_slowdown: float = limit(
        1.5, "ratio", Origin.PHYSICS, "on the CPU a transfer is mostly the system's scheduling"
    )
    cpu_min_step_share: float = limit(
        0.02, "share of an iteration", Origin.CONVENTION, "that a slow link on CPUs must cost"
    )
    all_of_a_rank_share: float = limit(
        0.7, "share", Origin.CONVENTION,
        "of a rank's edges and groups that must be slow before the rank itself is named",
    )  # fmt: skip
    fine_share: float = limit(
        0.3, "share of the effect", Origin.BENCHMARK,
        "that a connection may be slower by and still be a witness for its ends",
    )  # fmt: skip
    witness_rate_ratio: float = limit(
        1.2, "times the slow one's bytes a second", Origin.BENCHMARK,
        "that a connection must carry to be a witness for its ends: what carries no more than the "
        "slow one may be held up by the same port",
    )  # fmt: skip
    bandwidth_share: float = limit(
        0.5, "share of the best kind's", Origin.BENCHMARK,
        "bytes a second below which a kind of transfer usually shows something else than the "
        "bandwidth of a connection that carries more in another kind",
    )  # fmt: skip
    same_loss_share: float = limit(
        0.2, "share of the loss", Origin.BENCHMARK,
        "within which two groups lose the same, so that the less slow one waits for the other",
    )  # fmt: skip
    clock_errors: float = limit(
        2.0, "times the clock error", Origin.MATHEMATICS, "one of each end of a transfer"
    )
    most_clock_share: float = limit(
        0.1, "share of an iteration", Origin.CONVENTION,
        "by which clocks may miss each other if a rank that leaves late is to be believed",
    )  # fmt: skip
    min_axis_share: float = limit(
        0.1, "share", Origin.CONVENTION,
        "operations with less of an axis's transfer time say little about its links",
    )  # fmt: skip
    min_before: int = limit(
        1, "iterations", Origin.MATHEMATICS, "before a change: the noise is that of those since"
    )


@dataclass(frozen=True, kw_only=True)
class _Imbalance:
    """Heavy stages and uneven sequences."""

    replicas_agree_share: float = limit(
        0.5, "share of the excess", Origin.CONVENTION, "by which replicas of a heavy stage differ"
    )
    most_ranks_of_host: int = limit(
        8, "ranks", Origin.PHYSICS, "of one host where a trace does not name hosts"
    )
    multiplicative_log: float = limit(
        0.06, "log", Origin.PHYSICS,
        "forward and backward ratios this close look like a slow device, not a heavy stage",
    )  # fmt: skip
    normal_layers_share: float = limit(
        1.0 / 3.0, "share of the excess", Origin.CONVENTION,
        "that the layers of a heavy stage may show and still count as normal",
    )  # fmt: skip
    least_late_ratio: float = limit(
        1.2, "ratio", Origin.CONVENTION,
        "by which a stage is slow whose two passes are asked whether its host launches late",
    )  # fmt: skip
    most_late_backward: float = limit(
        0.95, "share of the forward's", Origin.PHYSICS,
        "excess of the backward where launches come late: of more work it is 2 (input and weight "
        "gradients), 1 where weights are frozen, 3 where the forward is computed again",
    )  # fmt: skip
    least_late_backward: float = limit(
        0.25, "share of the forward's", Origin.PHYSICS,
        "the same at least: a frozen encoder has no backward at all",
    )  # fmt: skip
    min_sequence_spread_log: float = limit(
        0.06, "log", Origin.PHYSICS,
        "spread over microbatches; an even job shows 0.01 to 0.03, production skew 0.3 and more",
    )  # fmt: skip
    min_sequence_correlation: float = limit(
        0.6, "rank correlation", Origin.BENCHMARK, "between ranks of a replica: the data's doing"
    )
    max_sequence_repetition: float = limit(
        0.6, "rank correlation", Origin.BENCHMARK,
        "of a replica's time with that of the next iteration: data are drawn anew",
    )  # fmt: skip
    least_chance: float = limit(
        0.01, "probability", Origin.CONVENTION,
        "that all ranks of a stage are slow by chance, above which they may be",
    )  # fmt: skip
    min_together: float = limit(
        0.3, "rank correlation", Origin.BENCHMARK,
        "between the microbatches of an iteration, or with the optimizer, from which on devices "
        "may be the reason as well: data are drawn anew for every microbatch",
    )  # fmt: skip
    together_sigmas: float = limit(
        2.0, "sigma", Origin.CONVENTION, "of chance that such a correlation exceeds"
    )
    error_floor_ratio: float = limit(
        1e-4, "ratio", Origin.CONVENTION, "added to standard errors of ratios, which may be nil"
    )
    min_samples: int = limit(8, "samples", Origin.CONVENTION, "that a correlation needs")


@dataclass(frozen=True, kw_only=True)
class _Consequences:
    """What follows from a fault that is already named."""

    victim_share: float = limit(
        0.5, "share of the lateness", Origin.CONVENTION,
        "that lies in communications with a late rank: that rank's victim",
    )  # fmt: skip
    alike_ratio: float = limit(
        1.5, "times the slowdown", Origin.BENCHMARK,
        "loading, or a link, that is slower by no more has one reason with slow computing: the "
        "kernels that transfer run on the slow device, too",
    )  # fmt: skip
    minor_share: float = limit(
        0.25, "share of the cost", Origin.CONVENTION,
        "a link or a loader that costs less than this of what its slow device does goes with it",
    )  # fmt: skip
    awaited_ratio: float = limit(
        2.0, "ratio", Origin.PHYSICS,
        "between what a link is slower by and its members' passes, that wait for it: a slow device "
        "slows what it transfers by no more than what it computes",
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
class _Costs:
    """What a finding costs the step."""

    least_held_share: float = limit(
        0.25, "share of what is lost", Origin.CONVENTION,
        "that a replay's gaps hold of it, for its answer to be about what is lost",
    )  # fmt: skip
    max_saved_share: float = limit(
        0.95, "share of an iteration", Origin.CONVENTION, "that a finding can be said to cost"
    )
    least_recorded_share: float = limit(
        0.5, "share of ranks", Origin.CONVENTION,
        "of those at fault that a replay must have traced itself, or it keeps nothing of the fault",
    )  # fmt: skip
    max_replay_error: float = limit(
        0.06, "ratio, less 1", Origin.BENCHMARK,
        "between the traced step and its replay: in one that is longer than the step, "
        "communication takes what ranks wait for as its own",
    )  # fmt: skip
    max_hidden_share: float = limit(
        0.1, "share of an iteration", Origin.BENCHMARK,
        "that other ranks may spend in no span: a replay keeps such waits and would make the "
        "finding too cheap by as much",
    )  # fmt: skip
    least_waiting_share: float = limit(
        0.5, "share of an optimizer step", Origin.CONVENTION,
        "that the earliest rank waits for the last one to begin, for steps to be replayed as ones "
        "that begin together",
    )  # fmt: skip
    least_waiting_steps: float = limit(
        0.95, "share of optimizer steps", Origin.CONVENTION,
        "that end when the last rank has begun at the earliest, for the same",
    )  # fmt: skip
    most_early_share: float = limit(
        0.02, "share of the wait", Origin.CONVENTION,
        "by which an optimizer step may end before the last rank begins, for clocks are not exact",
    )  # fmt: skip
    most_elsewhere: float = limit(
        2.0, "ratio of excesses", Origin.CONVENTION,
        "of the cost of all findings over that of a host's, above which those of other hosts count "
        "into what mending saves",
    )  # fmt: skip
    exceptional_ratio: float = limit(
        3.0, "ratio", Origin.CONVENTION,
        "of an iteration to the median one, both without the finding, above which it is left out: "
        "one that saves a checkpoint or evaluates says nothing of what a slow device costs",
    )  # fmt: skip
    next_to_nothing_ratio: float = limit(
        1.001, "ratio", Origin.CONVENTION, "below which a finding is said to cost nothing"
    )
    least_of_host_ratio: float = limit(
        1.02,
        "ratio",
        Origin.BENCHMARK,
        "of a step to the one without what a rank loses to its host",
    )
    least_estimated_ratio: float = limit(
        1.005, "ratio", Origin.CONVENTION, "the same where no replay tells, only an estimate"
    )
    least_of_network_ratio: float = limit(
        1.002, "ratio", Origin.BENCHMARK,
        "the same with a quicker network: replays make it too cheap where others use it as well",
    )  # fmt: skip
    as_fast_ratio: float = limit(
        1.5, "ratio", Origin.CONVENTION, "from which on a gain reads better as a multiple"
    )


@dataclass(frozen=True, kw_only=True)
class _Trust:
    """What the confidence of a finding says: chance, how often names like it were right, and how
    many peers show what is ordinary. What falls short of a word's q-value or share takes a step
    down, as few peers do, and steps add up.

    Shares are of names that unseen draws of twelve grounds gave, made by people who had not read
    the detector; *costly* names those that cost the step `costly_ratio` and more.
    """

    high_q: float = limit(1e-4, "q-value", Origin.CONVENTION, "below it chance leaves no doubt")
    good_q: float = limit(1e-3, "q-value", Origin.CONVENTION, "below it confidence is good")
    moderate_q: float = limit(0.05, "q-value", Origin.CONVENTION, "below it confidence is moderate")
    high_share: float = limit(
        0.99, "share", Origin.CONVENTION, "of such names right, from which confidence may be high"
    )
    good_share: float = limit(0.95, "share", Origin.CONVENTION, "the same for good")
    moderate_share: float = limit(0.9, "share", Origin.CONVENTION, "the same for moderate")
    costly_ratio: float = limit(
        1.05, "ratio", Origin.BENCHMARK,
        "iteration time over that without the finding: what costs less is more often wrong",
    )  # fmt: skip
    min_peers: int = limit(
        3, "ranks", Origin.BENCHMARK,
        "that do the same work as a device, below which its name is a step less sure: of 38 costly "
        "ones beside one or two 34 were right",
    )  # fmt: skip
    compute: float = limit(0.96, "share", Origin.BENCHMARK, "of names for computing right")
    compute_costly: float = limit(0.997, "share", Origin.BENCHMARK, "of costly ones right")
    compute_at_times: float = limit(
        0.97, "share", Origin.BENCHMARK,
        "of names for computing slowly now and then right: documents may be longer at times, too",
    )  # fmt: skip
    compute_at_times_costly: float = limit(0.966, "share", Origin.BENCHMARK, "of costly ones right")
    host: float = limit(
        0.929, "share", Origin.BENCHMARK, "of names for delays of several ranks by their host right"
    )
    host_costly: float = limit(0.97, "share", Origin.BENCHMARK, "of costly ones right")
    host_of_one: float = limit(
        0.915, "share", Origin.BENCHMARK, "of names for one rank's delays by its host right"
    )
    host_of_one_costly: float = limit(0.998, "share", Origin.BENCHMARK, "of costly ones right")
    loader: float = limit(0.992, "share", Origin.BENCHMARK, "of names for late data right")
    loader_costly: float = limit(0.99, "share", Origin.BENCHMARK, "of costly ones right")
    link: float = limit(
        0.99, "share", Origin.BENCHMARK,
        "of names for all that a rank sends and receives, a host's network or a rail right",
    )  # fmt: skip
    link_costly: float = limit(0.991, "share", Origin.BENCHMARK, "of costly ones right")
    link_inside: float = limit(
        0.86, "share", Origin.BENCHMARK, "of names for what stays inside a host right"
    )
    link_inside_costly: float = limit(0.71, "share", Origin.BENCHMARK, "of costly ones right")
    link_of_pair: float = limit(
        0.57, "share", Origin.BENCHMARK,
        "of names for the connection of two ranks right: often one end alone is at fault",
    )  # fmt: skip
    link_of_pair_costly: float = limit(0.67, "share", Origin.BENCHMARK, "of costly ones right")


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

WINDOW = _Window()
PASSES = _Passes()
KERNELS = _Kernels()
STALLS = _Stalls()
STARVATION = _Starvation()
PACE = _Pace()
COMPUTE = _Compute()
MEMORY = _Memory()
OPTIMIZER = _Optimizer()
SPELLS = _Spells()
ORDINARY = _Ordinary()
PAIRS = _Pairs()
DEVICE = _Device()
ENDS = _Ends()
CHANGED_ENDS = _ChangedEnds()
HOSTS = _Hosts()
CHANGES = _Changes()
NETWORKS = _Networks()
FLAPS = _Flaps()
NVLINKS = _NvLinks()
RUNS = _Runs()
BURSTS = _Bursts()
LOSSES = _Losses()
EVERYWHERE = _Everywhere()
SHARES = _Shares()
LINKS = _Links()
IMBALANCE = _Imbalance()
CONSEQUENCES = _Consequences()
POWER = _Power()
OCCUPANCY = _Occupancy()
COSTS = _Costs()
TRUST = _Trust()
READINGS = _Readings()
DATA = _Data()
ROBUST = _Robust()
NOISE = _NoiseModel()
PERSISTENCE = _Persistence()
SEARCH = _Search()
COMPARISON = _Comparison()

TABLES: Mapping[str, DataclassInstance] = {
    name.lower(): table
    for name, table in list(globals().items())
    if is_dataclass(table) and not isinstance(table, type)
}
"""All tables but the user's settings, by subject: every instance above."""


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
