"""What is said in the end: the job's own causes, consequences, costs, trust."""

from __future__ import annotations

from dataclasses import dataclass

from detect.thresholds import Origin, limit


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
    longest_share: float = limit(
        0.5, "share of what uneven passes make the step longer, log", Origin.CONVENTION,
        "by which a rank's are longer that are nearly always the longest, if they are why",
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
    usual_replay_error: float = limit(
        0.01, "ratio, less 1", Origin.BENCHMARK,
        "of replays, with and without a fault alike; a replay of slow transfers that is longer "
        "than the step by more is wrong about these",
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
    least_of_whole_host_ratio: float = limit(
        1.03, "ratio", Origin.BENCHMARK,
        "the same of all ranks of a host, which a slow one costs as much (`HOSTS.least_share`): of "
        "names that cost less, nearly half were wrong",
    )  # fmt: skip
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

    Shares are of names that three unseen draws of sixteen grounds gave (8,900 jobs), made by people
    who had not read the detector; *costly* names those that cost the step `costly_ratio` and more.
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
    compute: float = limit(0.984, "share", Origin.BENCHMARK, "of names for computing right")
    compute_costly: float = limit(0.999, "share", Origin.BENCHMARK, "of costly ones right")
    compute_at_times: float = limit(
        0.962, "share", Origin.BENCHMARK,
        "of names for computing slowly now and then right: documents may be longer at times, too",
    )  # fmt: skip
    compute_at_times_costly: float = limit(0.988, "share", Origin.BENCHMARK, "of costly ones right")
    host: float = limit(
        0.667, "share", Origin.BENCHMARK, "of names for delays of several ranks by their host right"
    )
    host_costly: float = limit(0.975, "share", Origin.BENCHMARK, "of costly ones right")
    host_of_one: float = limit(
        0.947, "share", Origin.BENCHMARK, "of names for one rank's delays by its host right"
    )
    host_of_one_costly: float = limit(0.992, "share", Origin.BENCHMARK, "of costly ones right")
    loader: float = limit(0.935, "share", Origin.BENCHMARK, "of names for late data right")
    loader_costly: float = limit(0.985, "share", Origin.BENCHMARK, "of costly ones right")
    link: float = limit(
        0.982, "share", Origin.BENCHMARK,
        "of names for all that a rank sends and receives, a host's network or a rail right",
    )  # fmt: skip
    link_costly: float = limit(0.997, "share", Origin.BENCHMARK, "of costly ones right")
    link_inside: float = limit(
        0.86, "share", Origin.BENCHMARK, "of names for what stays inside a host right"
    )
    link_inside_costly: float = limit(0.71, "share", Origin.BENCHMARK, "of costly ones right")
    link_of_pair: float = limit(
        0.583, "share", Origin.BENCHMARK,
        "of names for the connection of two ranks right: often one end alone is at fault",
    )  # fmt: skip
    link_of_pair_costly: float = limit(0.885, "share", Origin.BENCHMARK, "of costly ones right")


EVERYWHERE = _Everywhere()
SHARES = _Shares()
IMBALANCE = _Imbalance()
CONSEQUENCES = _Consequences()
COSTS = _Costs()
TRUST = _Trust()
