"""Slow devices, and what else lengthens computing: memory, optimizers, peers that differ."""

from __future__ import annotations

import math
from dataclasses import dataclass

from detect.thresholds import Origin, limit


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
    follows_share: float = limit(
        0.3, "share of the spread", Origin.BENCHMARK,
        "of products of matrices in time that their ratio to lookups keeps at most where both "
        "follow the tokens: of sound ranks 0.01 to 0.2",
    )  # fmt: skip
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
        0.6, "share of the effect", Origin.BENCHMARK,
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
    least_beside_further: int = limit(
        2, "ranks", Origin.CONVENTION,
        "of a TP group that would wait in their steps as a second slow one may, and do not",
    )  # fmt: skip
    most_step_of_chips_log: float = limit(
        0.04, "log", Origin.PHYSICS,
        "by which steps of sound chips of one model differ at most: a quarter of what clocks do, "
        "by 15 %; a step that is slower shows its device, however busy its experts are",
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
class _Shared:
    """Devices on which other processes compute."""

    least_share: float = limit(
        0.05, "share of the time", Origin.CONVENTION,
        "for which they do before it is worth a word; of sound ones it was 0 in all readings",
    )  # fmt: skip
    far_ratio: float = limit(
        3.0, "ratio", Origin.CONVENTION,
        "to what most devices have, from which on it is this one's: jobs may share all on purpose",
    )  # fmt: skip
    most_share: float = limit(
        0.5, "share of the lost time", Origin.CONVENTION,
        "of a finding that they take at least, if that is why: NVML samples, and misses copies",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Work:
    """How much devices have done, as they count it themselves."""

    min_windows: int = limit(
        2, "windows", Origin.MATHEMATICS, "after the first, in which the count has a spread"
    )
    noise_log: float = limit(
        0.05, "log", Origin.BENCHMARK,
        "by which the work of sound devices differs: clocks are read at the ends of windows; of 17 "
        "sound pairs 12 differed by less",
    )  # fmt: skip
    not_why_share: float = limit(
        0.5, "share of the log slowdown", Origin.CONVENTION,
        "that more work explains at most for a device to be slow",
    )  # fmt: skip
    why_share: float = limit(
        0.67, "share of the log slowdown", Origin.CONVENTION,
        "that it explains at least for the job to be why",
    )  # fmt: skip
    least_lasting: float = limit(
        0.75, "share of the iterations", Origin.CONVENTION,
        "in which a finding holds: work is counted over all of them",
    )  # fmt: skip


COMPUTE = _Compute()
MEMORY = _Memory()
OPTIMIZER = _Optimizer()
SPELLS = _Spells()
ORDINARY = _Ordinary()
PAIRS = _Pairs()
DEVICE = _Device()
SHARED = _Shared()
WORK = _Work()
ENDS = _Ends()
CHANGED_ENDS = _ChangedEnds()
