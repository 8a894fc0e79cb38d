"""Builds a finding from what a search knows: place, time, cost, headline."""

from __future__ import annotations

from dataclasses import dataclass

from detect.findings.advice import next_steps
from detect.findings.cost import cost_ratio
from detect.findings.timing import When, when
from detect.findings.wording import confidence, percent
from detect.observations import Floats, Observations
from detect.report import Cause, Finding, Owner
from detect.stats.persistence import Course


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A finding before place, time and cost are put in.

    `subject` and `predicate` make the headline: "rank 5 (…)" "computes 1.31x slower than its 3
    peers". `rows` are the ranks' rows in the observations; `saved_ns` (iteration,) is the gain of
    each iteration without it.
    """

    ranks: tuple[int, ...]
    rows: tuple[int, ...]
    cause: Cause
    owner: Owner
    slowdown: float
    interval: tuple[float, float]
    course: Course | None
    q_value: float
    num_peers: int
    saved_ns: Floats
    subject: str
    predicate: str
    evidence: tuple[str, ...]
    is_bound: bool = False
    """Whether the true slowdown may be larger."""


def build_finding(seen: Observations, claim: Claim) -> Finding:
    """The finding of a claim."""
    timing = when(claim.course, seen.iterations)
    replayed = seen.costs.ratio(claim.ranks, claim.cause) if seen.costs else None
    cost = cost_ratio(seen.iteration_ns, claim.saved_ns) if replayed is None else replayed
    middle = timing.episodes[0][0]
    return Finding(
        ranks=claim.ranks,
        cause=claim.cause,
        owner=claim.owner,
        slowdown=claim.slowdown,
        slowdown_interval=claim.interval,
        first_iteration=timing.first,
        last_iteration=timing.last,
        share_of_iterations=timing.share,
        q_value=claim.q_value,
        step_time_cost_ratio=cost,
        headline=_headline(claim, timing, cost),
        evidence=claim.evidence,
        next_steps=next_steps(claim.cause, claim.owner, claim.ranks, middle, seen.members),
        coordinates=_shared_place(seen, claim.rows),
        host=", ".join(sorted({seen.members.hosts[row] for row in claim.rows})),
        device=_device(seen, claim.rows),
        num_peers=claim.num_peers,
        onset_in_trace=timing.begins,
        episodes=timing.episodes,
        cost_is_replayed=replayed is not None,
        slowdown_is_bound=claim.is_bound,
    )


def _headline(claim: Claim, timing: When, cost: float) -> str:
    return (
        f"{claim.subject} {claim.predicate} {timing.words}; {_gain(cost)}; "
        f"confidence {confidence(claim.q_value)}"
    )


def _gain(cost: float) -> str:
    if cost < 1.001:
        return "it hides in time that others spend anyway and costs the step next to nothing"
    faster = f"{cost:.1f}x as fast" if cost >= 1.5 else f"about {percent(cost)} faster"
    return f"without it the job would be {faster}"


def _shared_place(seen: Observations, rows: tuple[int, ...]) -> dict[str, int]:
    """Coordinates that all rows have in common."""
    places = [seen.members.coordinates(row) for row in rows]
    if not places:
        return {}
    return {
        axis: value
        for axis, value in places[0].items()
        if all(place[axis] == value for place in places)
    }


def _device(seen: Observations, rows: tuple[int, ...]) -> str:
    members = seen.members
    return ", ".join(
        sorted({f"{members.devices[row]} #{members.device_index[row]}" for row in rows})
    )
