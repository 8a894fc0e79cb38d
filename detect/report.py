"""What the detector says: findings and the verdict, as frozen values and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from detect.thresholds.statistics import POWER
from detect.thresholds.verdicts import TRUST
from megascan.header import Json

REPORT_SCHEMA = 1
SHOWN_Q = 1e-12
"""Smaller q-values are shown as below this."""


class Cause(StrEnum):
    """What is slow, or wrong."""

    COMPUTE = "compute"
    LINK = "link"
    HOST = "host"
    LOADER = "loader"
    GC = "gc"
    STAGE_IMBALANCE = "stage_imbalance"
    SEQUENCE_IMBALANCE = "sequence_imbalance"
    CORRUPTION = "corruption"
    """Bits that differ from those of the replicas: no question of time."""
    UNKNOWN = "unknown"


NO_NODES_DOING = frozenset({Cause.STAGE_IMBALANCE, Cause.SEQUENCE_IMBALANCE, Cause.CORRUPTION})
"""Causes for which no policy drains a node: the job's own doing, and what probes show, which the
watch does not read."""


class Owner(StrEnum):
    """Who can mend a finding: look at this hardware, at the job's own settings, or measure more."""

    NODE = "node"
    JOB = "job"
    UNDECIDED = "undecided"


class Confidence(StrEnum):
    """How sure a finding is, the surest first."""

    HIGH = "high"
    GOOD = "good"
    MODERATE = "moderate"
    LOW = "low"

    @classmethod
    def after(cls, num_doubts: int) -> Confidence:
        """Return the confidence that so many doubts leave, each of which takes a step."""
        steps = list(cls)
        return steps[min(num_doubts, len(steps) - 1)]


class Verdict(StrEnum):
    """The report in one word; `degraded` when a finding's owner is the node."""

    DEGRADED = "degraded"
    JOB = "job"
    UNDECIDED = "undecided"
    HEALTHY = "healthy"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is slow, with what is known about it.

    `slowdown` is observed over expected time of the class (1.31: takes 31 % longer), with its 95 %
    interval; peers are the expectation. `step_time_cost_ratio` is iteration time now over iteration
    time without the finding, from the first to the last iteration in which it holds. `episodes` are
    the (first, last) iterations of its active stretches: one when it lasts, several when it flaps.
    `statement`, `evidence` and `next_steps` are sentences; `headline` adds how sure it is.
    """

    ranks: tuple[int, ...]
    cause: Cause
    owner: Owner
    slowdown: float
    slowdown_interval: tuple[float, float]
    first_iteration: int
    last_iteration: int
    share_of_iterations: float
    q_value: float
    step_time_cost_ratio: float
    statement: str
    evidence: tuple[str, ...] = ()
    next_steps: tuple[str, ...] = ()
    coordinates: Mapping[str, int] = field(default_factory=dict)
    host: str = ""
    device: str = ""
    num_peers: int = 0
    onset_in_trace: bool = False
    episodes: tuple[tuple[int, int], ...] = ()
    cost_is_replayed: bool = False
    """Whether the cost is from a replay of the dependency graph rather than an estimate."""
    joint_ranks: tuple[int, ...] = ()
    """The finding's ranks and those of other findings that ought to be mended together with it; ()
    if there are none."""
    joint_cost_ratio: float = 1.0
    """Iteration time now over iteration time with all `joint_ranks` mended; 1 where none are."""
    slowdown_is_bound: bool = False
    """Whether the true slowdown may be larger: time that is not the ranks' own is mixed into it."""
    is_read: bool = False
    """Whether the device's own clock shows that it is slow."""
    is_pair: bool = False
    """Whether it is about the connection of two ranks, either of which may be at fault."""
    is_inside: bool = False
    """Whether it is about what stays inside a host, with whomever."""
    slow_passes_ratio: float = 1.0
    """How many times as long as usual single passes take, where a rank is slow now and then."""

    @property
    def confidence(self) -> Confidence:
        """Return how sure the finding is, by chance, and where a node is named, by how often names
        like it were right on ground that nobody had looked at (`TRUST`), and by how many peers a
        slow device was held against. The doubts add up.

        Example: of the names for a connection of two ranks 89 of 100 were right, three steps below
        high: low, however improbable chance is. A host that is blamed for several ranks (98 of 100,
        one step) with a q-value of 0.0005 (one step) is moderate.
        """
        most = (TRUST.high_q, TRUST.good_q, TRUST.moderate_q)
        num_doubts = sum(self.q_value > one for one in most) + self._has_few_peers
        right = self._share_right()
        if right is not None:
            least = (TRUST.high_share, TRUST.good_share, TRUST.moderate_share)
            num_doubts += sum(right < one for one in least)
        return Confidence.after(num_doubts)

    @property
    def _has_few_peers(self) -> bool:
        """Return whether so few devices do the same work as one that is named as slow that they
        hardly show what devices, data or places differ by, and its clock was not read to be low.
        """
        is_device = self.owner is Owner.NODE and self.cause is Cause.COMPUTE
        return is_device and self.num_peers < TRUST.min_peers and not self.is_read

    def _share_right(self) -> float | None:
        """Return which share of the names like this one was right; None where that is not known."""
        if self.owner is not Owner.NODE:
            return None
        costly = "_costly" * (self.step_time_cost_ratio >= TRUST.costly_ratio)
        share: float | None = getattr(TRUST, f"{self.named_as}{costly}", None)
        return share

    @property
    def named_as(self) -> str:
        """Return with which other names this one is counted: `compute`, `link_of_pair`."""
        is_slow_at_times = self.cause is Cause.COMPUTE and self.slow_passes_ratio > 1.0
        words = [
            self.cause.value,
            "at_times" * is_slow_at_times,
            "of_one" * (self.cause is Cause.HOST and len(self.ranks) == 1),
            "of_pair" * self.is_pair,
            "inside" * self.is_inside,
        ]
        return "_".join(filter(None, words))

    @property
    def sureness(self) -> str:
        """Return the confidence and what it rests on: "high (q below 1e-12)"."""
        q_value = "below 1e-12" if self.q_value < SHOWN_Q else f"{self.q_value:.1g}"
        return f"{self.confidence} (q {q_value})"

    @property
    def headline(self) -> str:
        """Return the finding in one sentence, with how sure it is; bits leave nothing to chance."""
        if self.cause is Cause.CORRUPTION:
            return self.statement
        return f"{self.statement}; confidence {self.sureness}"

    @property
    def spot(self) -> tuple[int, int] | None:
        """Return the rank and iteration to look at in a timeline; None if no rank is named."""
        if not self.ranks:
            return None
        return self.ranks[0], self.stretches[0][0]

    @property
    def stretches(self) -> tuple[tuple[int, int], ...]:
        """Return the `episodes`, or else the first and last iteration of the whole finding."""
        return self.episodes or ((self.first_iteration, self.last_iteration),)

    @property
    def lost_share(self) -> float:
        """Return the share of every GPU's time that the finding wastes while it holds.

        Example: an iteration takes 1.25 times what it would: 0.2, on 64 GPUs 307 GPU-hours a day.
        """
        return 1.0 - 1.0 / max(self.step_time_cost_ratio, 1.0)

    def to_json(self) -> dict[str, Json]:
        """Return one element of the report's `findings`."""
        return {
            "ranks": list(self.ranks),
            "cause": self.cause.value,
            "owner": self.owner.value,
            "slowdown": round(self.slowdown, 4),
            "slowdown_is_bound": self.slowdown_is_bound,
            "slowdown_interval": [round(bound, 4) for bound in self.slowdown_interval],
            "first_iteration": self.first_iteration,
            "last_iteration": self.last_iteration,
            "share_of_iterations": round(self.share_of_iterations, 4),
            "q_value": self.q_value,
            "confidence": self.confidence.value,
            "step_time_cost_ratio": round(self.step_time_cost_ratio, 4),
            "cost_is_replayed": self.cost_is_replayed,
            "joint_ranks": list(self.joint_ranks),
            "joint_cost_ratio": round(self.joint_cost_ratio, 4),
            "coordinates": dict(self.coordinates),
            "host": self.host,
            "device": self.device,
            "num_peers": self.num_peers,
            "onset_in_trace": self.onset_in_trace,
            "episodes": [list(episode) for episode in self.episodes],
            "headline": self.headline,
            "evidence": list(self.evidence),
            "next_steps": list(self.next_steps),
        }


@dataclass(frozen=True, kw_only=True)
class ClockAgreement:
    """How well the clocks agree, and so how far transfer times and links can be trusted."""

    method: str
    residual_median_ns: float
    residual_p99_ns: float
    num_components: int
    is_measured: bool = True
    """Whether something that was matched ties the clocks together; if not, residuals say nothing.
    """

    def to_json(self) -> dict[str, Json]:
        """Return the report's `alignment`."""
        return {
            "method": self.method,
            "residual_median_ns": round(self.residual_median_ns, 1),
            "residual_p99_ns": round(self.residual_p99_ns, 1),
            "num_components": self.num_components,
        }


@dataclass(frozen=True, kw_only=True)
class Report:
    """Verdict on one traced window.

    `minimum_detectable` maps a class to the slowdown that would have been found with the settings'
    power; a class that could not be judged is absent and `notes` says why.
    """

    world_size: int
    iterations: tuple[int, int]
    num_iterations: int
    findings: tuple[Finding, ...]
    minimum_detectable: Mapping[str, float]
    minimum_named_slowdown: float | None = None
    """Smallest slowdown of compute for which a node would have been named; None if none would."""
    limited_by: Mapping[str, str] = field(default_factory=dict)
    """By class, what keeps the class's `minimum_detectable` from being smaller."""
    iteration_ns: float
    alignment: ClockAgreement | None = None
    completeness: Mapping[str, Json] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unrecorded_ranks: tuple[int, ...] = ()
    """Ranks with a file but without an iteration in it: missing, and not healthy."""
    unseen_ranks: tuple[int, ...] = ()
    """Ranks that would not be found however slowly they computed, while other ranks would."""
    hides: tuple[str, ...] = ()
    """Faults of a size that matters that could not have been seen, each as part of a sentence."""
    caveats: tuple[str, ...] = ()
    """Faults worth a word that could not have been seen, each as part of a sentence."""
    source: str = ""
    min_slowdown: float = 1.03
    """Compute less slow than this was not to be reported."""
    false_discovery_rate: float = 0.01
    """Expected share of false names among the names."""
    power: float = 0.95
    """Probability with which a slowdown of the minimum size would have been found."""

    def with_look(self, command: Callable[[int, int], str | None]) -> Report:
        """Add to every finding the command that shows its rank and iteration, where there is one.

        `command` comes from the caller, who has read the trace and knows its file.
        """
        findings = []
        for finding in self.findings:
            shown = None if finding.spot is None else command(*finding.spot)
            steps = (f"look at the spot: {shown}",) if shown else ()
            findings.append(replace(finding, next_steps=(*finding.next_steps, *steps)))
        return replace(self, findings=tuple(findings))

    @property
    def shows_enough(self) -> bool:
        """Return whether finding nothing says something: the smallest slowdown of compute that
        would have been found is too small to matter, or within two rungs of what the user asked.
        """
        least = self.minimum_detectable.get(Cause.COMPUTE.value, math.inf)
        enough = max(POWER.healthy_ratio, self.min_slowdown ** (POWER.rung_ratio**2))
        return bool(least < min(enough, POWER.blind_ratio))

    @property
    def judged(self) -> bool:
        """Return whether finding nothing means health: faults of any rank would have been found."""
        return self.shows_enough and not self.unseen_ranks and not self.hides

    @property
    def verdict(self) -> Verdict:
        """Return the gravest of: node, undecided, job, healthy."""
        owners = {finding.owner for finding in self.findings}
        if Owner.NODE in owners:
            return Verdict.DEGRADED
        if Owner.UNDECIDED in owners or not self.judged:
            return Verdict.UNDECIDED
        return Verdict.JOB if owners else Verdict.HEALTHY

    @property
    def minimum_detectable_slowdown(self) -> float | None:
        """Return the smallest detectable slowdown of compute; None if compute could not be judged.

        Compute is the class that every trace has.
        """
        return self.minimum_detectable.get(Cause.COMPUTE.value)

    def to_json(self) -> dict[str, Json]:
        """Return the JSON report, schema 1."""
        least, named = self.minimum_detectable_slowdown, self.minimum_named_slowdown
        return {
            "schema": REPORT_SCHEMA,
            "world_size": self.world_size,
            "iterations": list(self.iterations),
            "num_iterations": self.num_iterations,
            "verdict": self.verdict.value,
            "findings": [finding.to_json() for finding in self.findings],
            "min_slowdown": self.min_slowdown,
            "false_discovery_rate": self.false_discovery_rate,
            "minimum_detectable_slowdown": None if least is None else round(least, 4),
            "minimum_named_slowdown": None if named is None else round(named, 4),
            "minimum_detectable_by_class": {
                name: round(value, 4) for name, value in self.minimum_detectable.items()
            },
            "iteration_ns": round(self.iteration_ns),
            "alignment": None if self.alignment is None else self.alignment.to_json(),
            "completeness": dict(self.completeness),
            "unrecorded_ranks": list(self.unrecorded_ranks),
            "caveats": list(self.caveats),
            "notes": list(self.notes),
        }
