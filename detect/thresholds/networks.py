"""Connections: pairs, NICs, rails, switches, ports that flap, NVLink, what ports read."""

from __future__ import annotations

from dataclasses import dataclass

from detect.thresholds import Origin, limit


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
    drained_ratio: float = limit(
        1.05, "ratio", Origin.CONVENTION,
        "of a step to the step without it, from which on a host is drained for a pair inside it of "
        "which nobody can tell the end: of 13 such pairs the eight costly ones were right",
    )  # fmt: skip
    late_launch_ns: float = limit(
        100_000.0, "ns a transfer", Origin.PHYSICS,
        "lost where an end's device waits for its host: some launches of ten microseconds each",
    )  # fmt: skip
    least_of_a_host: int = limit(
        2, "connections", Origin.BENCHMARK,
        "of other ranks inside a host that are slow as well, where it is none of them",
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
    least_of_size_share: float = limit(
        0.5, "share of a connection's iterations", Origin.CONVENTION,
        "in which a size of its operations occurs, or else sizes vary: then they are compared by "
        "the byte",
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
class _Tcp:
    """What TCP connections carry while they are busy, by the kernel's account."""

    least_busy_ns: float = limit(
        100_000_000.0, "ns", Origin.PHYSICS,
        "for which a way is busy at least: the kernel counts in ticks of up to 10 ms",
    )  # fmt: skip
    alike_ratio: float = limit(
        1.5, "ratio", Origin.CONVENTION,
        "of bytes within which ways do the same for the job: members of a ring carry as many",
    )  # fmt: skip
    least_others: int = limit(
        2, "ways", Origin.MATHEMATICS,
        "beside slow ones, which show how sound ones differ: the messages of a healthy pipeline "
        "over gloo were carried at 54 to 164 Mbit/s",
    )  # fmt: skip
    named_ratio: float = limit(
        1.33, "ratio", Origin.CONVENTION,
        "by which a way carries less than others: ports fall to half their speed or less",
    )  # fmt: skip
    lone_ratio: float = limit(
        2.25, "ratio", Origin.PHYSICS,
        "beside one other only: ways that share a port carry half as much, and differ a little",
    )  # fmt: skip
    spread_log: float = limit(
        0.08, "log", Origin.CONVENTION, "by which sound ways differ at least, since few tell it"
    )
    least_share: float = limit(
        0.03, "share of an iteration", Origin.CONVENTION,
        "for which a slow way is busy beyond what others would be, before anybody may wait for it",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Degraded:
    """Ports and links that read worse than their equals."""

    most_share: float = limit(
        0.25, "share of the equals", Origin.CONVENTION,
        "that may read worse, or one: of more, whoever built the hosts may have chosen so",
    )  # fmt: skip
    least_sound: int = limit(
        2, "equals", Origin.CONVENTION, "that read alike, before another one is worse"
    )
    least_known_share: float = limit(
        0.5, "share of the ranks, or hosts", Origin.CONVENTION, "that were read"
    )
    least_lasting_share: float = limit(
        0.5, "share of the iterations", Origin.MATHEMATICS,
        "in which a connection is slow whose port typically is: readings count by their median",
    )  # fmt: skip
    most_rate_share: float = limit(
        0.75, "share of the equals' rate", Origin.PHYSICS,
        "at which a port is worse: one that lost a lane of four, or a generation, has no more",
    )  # fmt: skip
    carrying_share: float = limit(
        0.1, "share of what the host's busiest port sends", Origin.CONVENTION,
        "that a port sends on sound hosts if the job uses it: ports for logins and storage do not",
    )  # fmt: skip
    least_errors: float = limit(
        100.0, "errors", Origin.PHYSICS,
        "of a port whose equals have next to none: sound links of 400 Gbit/s show some an hour",
    )  # fmt: skip
    errors_an_hour: float = limit(
        600.0, "errors an hour", Origin.PHYSICS, "the same of a long trace: ten a minute"
    )
    lost_an_hour: float = limit(
        1.0, "lost links an hour", Origin.PHYSICS,
        "of a port whose equals lost none: each stops its connections for seconds",
    )  # fmt: skip
    others_share: float = limit(
        0.01, "share of the errors", Origin.CONVENTION, "that any of its equals may have"
    )
    slower_ratio: float = limit(
        2.0, "ratio", Origin.PHYSICS,
        "by which connections are slower whose port is down, if another port takes them as well",
    )  # fmt: skip
    least_flow_share: float = limit(
        0.7, "share of a port's rate", Origin.PHYSICS,
        "that it carries in rings, if it limits them: large ones reach 0.8 to 0.9",
    )  # fmt: skip
    most_flow_share: float = limit(
        1.05, "share of a port's rate", Origin.PHYSICS,
        "that it carries at most: what seems to carry more does not go through it",
    )  # fmt: skip
    least_cost_ratio: float = limit(
        1.03, "ratio", Origin.CONVENTION,
        "of a step to the one with a sound port, from which on its host is named though rings "
        "through all hosts hide which of them is slow",
    )  # fmt: skip


LINKS = _Links()
NETWORKS = _Networks()
FLAPS = _Flaps()
NVLINKS = _NvLinks()
TCP = _Tcp()
DEGRADED = _Degraded()
