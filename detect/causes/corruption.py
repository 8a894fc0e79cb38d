"""Ranks that compute wrongly: their bits differ from those of their replicas.

A probe has every data-parallel replica compute the same tokens with the same weights; at each point
all must have the same checksum. What more than half of the replicas have is right.

    weight      a parameter that differs is damaged where it lies: its rank is named
    activation  of the points of one replica that differ, the earliest names the rank: all that
                follows was computed from it. Ranks of a tensor-parallel group that differ first
                at the same point have summed wrongly together and are named together.

Of two replicas that differ nobody can say which is right: both are named, undecided. Where bits
differ without a majority almost everywhere, kernels are not bit-stable and nobody is named.
Replicas on other kinds of devices are not compared: other kernels add in another order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from detect.report import Cause, Finding, Owner
from detect.text import counted, ranks_text
from megascan.errors import listed

if TYPE_CHECKING:
    from megascan.probes import Point, Prober, Probes

_MOST_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """Ranks whose bits are not their replicas', in one probe."""

    iteration: int
    ranks: tuple[int, ...]
    point: Point
    """The earliest point at which the bits differ."""
    num_points: int
    """Points at which the bits differ."""
    num_replicas: int
    """Replicas that were compared."""
    is_decided: bool
    """Whether a majority says that these ranks are wrong."""


def deviations(probes: Probes) -> list[Deviation]:
    """Return who deviates, probe by probe; empty when all replicas agree everywhere."""
    groups = _replicas(probes)
    return [
        deviation
        for iteration in probes.iterations
        for deviation in _deviations_at(probes, groups, iteration)
    ]


def num_compared(probes: Probes) -> int:
    """Return how many ranks have a replica to be compared with."""
    return sum(len(group) for group in _replicas(probes) if len(group) > 1)


def _replicas(probes: Probes) -> list[list[int]]:
    """Return ranks that must have the same bits: alike on all axes but data, on devices of one
    kind.
    """
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for rank, prober in sorted(probes.probers.items()):
        at = prober.coordinates
        groups[at.tp, at.pp, at.cp, prober.device, prober.points].append(rank)
    return list(groups.values())


def _split_by_share_of_experts(
    ranks: Sequence[int], point: Point, probers: Mapping[int, Prober]
) -> list[list[int]]:
    """Split the ranks of a group by what they hold at a point: at experts, by the share of experts.
    Leave out shares of one rank.
    """
    if not point.is_of_experts:
        return [list(ranks)]
    shares: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        shares[probers[rank].coordinates.ep].append(rank)
    return [share for share in shares.values() if len(share) > 1]


def _deviations_at(
    probes: Probes, groups: Sequence[Sequence[int]], iteration: int
) -> Iterator[Deviation]:
    wrong: dict[int, list[int]] = {}  # by rank: points at which a majority differs from it
    torn: list[tuple[list[int], list[int]]] = []  # ranks, and points at which there is no majority
    num_compared: dict[int, int] = {}
    for group in groups:
        present = [rank for rank in group if iteration in probes.sums[rank]]
        if len(present) < 2:
            continue
        sums = {rank: probes.sums[rank][iteration] for rank in present}
        wrong_here, torn_here = _compare(sums, probes.probers)
        wrong |= wrong_here
        num_compared |= dict.fromkeys(present, len(present))
        if torn_here:
            torn.append((torn_here[0][1], [number for number, _ in torn_here]))
    first_wrong = min(
        (_place_in_model(probes.probers[rank], numbers[0]) for rank, numbers in wrong.items()),
        default=None,
    )
    for ranks, point, num_points in _blamed(wrong, probes.probers):
        yield Deviation(
            iteration=iteration, ranks=ranks, point=point, num_points=num_points,
            num_replicas=num_compared[ranks[0]], is_decided=True,
        )  # fmt: skip
    if not torn:
        return
    first_torn, of_ranks, points = min(
        (_place_in_model(probes.probers[ranks[0]], numbers[0]), ranks, numbers)
        for ranks, numbers in torn
    )
    if first_wrong is not None and first_wrong < first_torn:
        return  # follows from what was decided: shares of the experts have fewer replicas
    yield Deviation(
        iteration=iteration, ranks=tuple(of_ranks),
        point=probes.probers[of_ranks[0]].points[points[0]], num_points=len(points),
        num_replicas=len(of_ranks), is_decided=False,
    )  # fmt: skip


def _compare(
    sums: Mapping[int, tuple[str, ...]], probers: Mapping[int, Prober]
) -> tuple[dict[int, list[int]], list[tuple[int, list[int]]]]:
    """Return the points at which each rank differs from the majority, and the points at which there
    is no majority, with the ranks that were compared.
    """
    wrong: dict[int, list[int]] = {}
    torn: list[tuple[int, list[int]]] = []
    for number, point in enumerate(probers[next(iter(sums))].points):
        for ranks in _split_by_share_of_experts([*sums], point, probers):
            values = {rank: sums[rank][number] for rank in ranks}
            (right, count) = Counter(values.values()).most_common(1)[0]
            if 2 * count <= len(values):
                torn.append((number, ranks))
                continue
            for rank, value in values.items():
                if value != right:
                    wrong.setdefault(rank, []).append(number)
    return wrong, torn


def _place_in_model(prober: Prober, number: int) -> tuple[int, int]:
    """Return where a point stands in the model: its layer, and its place among the layer's
    points.
    """
    layer = prober.points[number].layer
    first = next(at for at, point in enumerate(prober.points) if point.layer == layer)
    return layer, number - first


def _blamed(
    wrong: Mapping[int, list[int]], probers: Mapping[int, Prober]
) -> Iterator[tuple[tuple[int, ...], Point, int]]:
    """Return ranks to name with their earliest point and the number of points at which they
    differ.
    """
    by_replica: dict[int, list[int]] = defaultdict(list)
    for rank in wrong:
        by_replica[_replica_of(rank, probers[rank])].append(rank)
    for ranks in by_replica.values():
        earliest = {rank: _place_in_model(probers[rank], wrong[rank][0]) for rank in ranks}
        start = min(earliest.values())
        first = [rank for rank in ranks if earliest[rank] == start]
        point = probers[first[0]].points[wrong[first[0]][0]]
        yield tuple(first), point, max(len(wrong[rank]) for rank in first)
        for rank in ranks:
            points = [probers[rank].points[number] for number in wrong[rank]]
            damaged = [point for point in points if point.is_weight]
            if rank not in first and damaged:
                yield (rank,), damaged[0], len(points)


def _replica_of(rank: int, prober: Prober) -> int:
    """Return the number of a rank's replica: ranks that compute together, so that their bits follow
    from each other's.

    A replica of the model is one data-parallel rank. Data-parallel ranks that share experts, and so
    exchange tokens, are one replica.
    """
    layout = prober.layout
    if layout.ep == 1:
        return prober.coordinates.dp
    return min(layout.coordinates(one).dp for one in layout.group(rank, "ep"))


def findings_of(probes: Probes) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Return the findings on all probes, and notes on what could not be judged."""
    found = deviations(probes)
    num_probes = len(probes.iterations)
    notes: list[str] = []
    if not num_compared(probes):
        notes.append(
            "probes were taken, but no rank has a replica on a device of its kind: with one "
            "data-parallel replica there is nothing to compare bits with"
        )
    torn = [one for one in found if not one.is_decided and one.num_replicas > 2]
    if torn:
        notes.append(
            f"in {counted(len(torn), 'probe')} replicas {listed(torn[0].ranks)} have no majority "
            f"at {torn[0].point.words}: kernels are not bit-stable there (set "
            "torch.use_deterministic_algorithms), or several ranks compute wrongly"
        )
    by_ranks: dict[tuple[tuple[int, ...], bool], list[Deviation]] = defaultdict(list)
    for one in found:
        if one.is_decided or one.num_replicas == 2:
            by_ranks[one.ranks, one.is_decided].append(one)
    findings = [_finding(probes, own, num_probes) for own in by_ranks.values()]
    return tuple(sorted(findings, key=lambda one: one.first_iteration)), tuple(notes)


def _finding(probes: Probes, own: Sequence[Deviation], num_probes: int) -> Finding:
    first = own[0]
    prober = probes.probers[first.ranks[0]]
    iterations = [one.iteration for one in own]
    place = ", ".join(filter(None, (prober.layout.label(prober.rank), f"host {prober.host}")))
    lasting = len(own) == sum(one >= iterations[0] for one in probes.iterations)
    when = f"in {len(own)} of {counted(num_probes, 'probe')} (after iteration {listed(iterations)})"
    if first.is_decided:
        subject = f"{ranks_text(first.ranks)} ({place})"
        verb = "computes" if len(first.ranks) == 1 else "compute together"
        statement = (
            f"{subject} {verb} wrongly {when}: bits differ from those of "
            f"{counted(first.num_replicas - 1, 'replica')}, first at {first.point.words}"
        )
    else:
        statement = (
            f"one of {ranks_text(first.ranks)} computes wrongly {when}: their bits differ, first "
            f"at {first.point.words}; two replicas cannot say which of them is right"
        )
    return Finding(
        ranks=first.ranks,
        cause=Cause.CORRUPTION,
        owner=Owner.NODE if first.is_decided else Owner.UNDECIDED,
        slowdown=1.0,
        slowdown_interval=(1.0, 1.0),
        first_iteration=iterations[0],
        last_iteration=iterations[-1],
        share_of_iterations=len(own) / num_probes,
        q_value=0.0,
        step_time_cost_ratio=1.0,
        statement=statement,
        evidence=_evidence(own, lasting=lasting),
        next_steps=_advice(first, lasting=lasting),
        coordinates=_coordinates(prober),
        host=prober.host,
        device=prober.device,
        num_peers=first.num_replicas - 1,
        onset_in_trace=iterations[0] > probes.iterations[0],
        episodes=tuple((one, one) for one in iterations),
    )


def _evidence(own: Sequence[Deviation], *, lasting: bool) -> tuple[str, ...]:
    points = list(dict.fromkeys(one.point.words for one in own))
    where = (
        f"first at {listed(points, _MOST_NAMED)}; {counted(own[0].num_points, 'point')} differed "
        f"in the first such probe, after iteration {own[0].iteration}"
    )
    course = "in every probe since" if lasting else "not in every later probe: it comes and goes"
    return where, course


def _advice(first: Deviation, *, lasting: bool) -> tuple[str, ...]:
    steps = ["take that device out of the job: what it computes cannot be trusted"]
    if first.point.is_weight:
        steps.append(
            "the weights of that replica are damaged: go back to a checkpoint from before "
            f"iteration {first.iteration}, or copy them from a replica"
        )
    elif lasting:
        steps.append("go back to a checkpoint from before the first such probe")
    return (*steps, "run megascan probe on that host alone, and its vendor's diagnosis")


def _coordinates(prober: Prober) -> dict[str, int]:
    axes = prober.layout.used("dp", "pp", "cp", "ep", "tp")
    return {axis: getattr(prober.coordinates, axis) for axis in axes}
