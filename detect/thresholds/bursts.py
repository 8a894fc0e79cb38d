"""Slowness shorter than an iteration: runs of slow modules, single iterations, lost time."""

from __future__ import annotations

from dataclasses import dataclass

from detect.thresholds import Origin, limit


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
    least_of_lone_ratio: float = limit(
        1.05, "ratio", Origin.BENCHMARK,
        "of its passes, on the mean of all, by which bursts of a lone stage are named: of the last "
        "stage on sound H200 single passes took 1.35 times as long, 1.6 to 3.9 % on the mean",
    )  # fmt: skip
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
        "to what the next host loses in all, for a host that is a stage of its own, or whose "
        "pauses are too few for a proof: of sound ones it was 2.8 at most, of faults 1.5 once, 2.1 "
        "once, and 3 and more",
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
    one_slot_p: float = limit(
        0.01, "probability", Origin.CONVENTION,
        "of so many slow passes in one slot of the schedule at the rate of its others, below which "
        "it is the slot",
    )  # fmt: skip
    prior_hits: float = limit(
        0.5,
        "hits",
        Origin.MATHEMATICS,
        "added to those of the others, and as many misses (Jeffreys)",
    )


@dataclass(frozen=True, kw_only=True)
class _OwnWork:
    """Steps, losses, lookups and output layers of a rank that are longer now and then."""

    most_ratio: float = limit(
        3.0, "times", Origin.PHYSICS,
        "as long as usual such work takes at most on a device that lowers its clock: 1.1 to 2.1 "
        "were seen, and more is rather a pause in it",
    )  # fmt: skip


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


RUNS = _Runs()
BURSTS = _Bursts()
LOSSES = _Losses()
OWN_WORK = _OwnWork()
