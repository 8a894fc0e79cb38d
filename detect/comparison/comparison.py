"""What a comparison of two traces says, as frozen values and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from detect.report import Finding, Owner
from megascan.header import Json

COMPARISON_SCHEMA = 1


class Kind(StrEnum):
    """What is compared."""

    STEP = "step"
    ROLE = "role"
    RANK = "rank"
    LOSS = "loss"
    """Time lost beside compute: loading, garbage collection, gaps."""
    LINK = "link"


class Direction(StrEnum):
    """How it moved, beyond noise and beyond the least change."""

    SLOWER = "slower"
    FASTER = "faster"
    SAME = "same"


class Outcome(StrEnum):
    """The comparison in one word."""

    REGRESSED = "regressed"
    FASTER = "faster"
    SAME = "same"
    INCOMPARABLE = "incomparable"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One quantity in both traces; `ratio` is after over before with its 95 % interval.

    For a rank, `ratio` is how much slower it became than its peers did; for lost time it is one
    plus what it takes more, as a share of the iteration. `before_ns` and `after_ns` are the
    quantity's own times.
    """

    kind: Kind
    subject: str
    ratio: float
    interval: tuple[float, float]
    q_value: float
    before_ns: float
    after_ns: float
    direction: Direction
    ranks: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Json]:
        """One element of the JSON's lists."""
        return {
            "kind": self.kind.value,
            "subject": self.subject,
            "ranks": list(self.ranks),
            "ratio": round(self.ratio, 4),
            "ratio_interval": [round(bound, 4) for bound in self.interval],
            "q_value": self.q_value,
            "before_ns": round(self.before_ns),
            "after_ns": round(self.after_ns),
            "direction": self.direction.value,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class ShareChange:
    """Mean share of all ranks' iterations, before and after (0.25 is a quarter of the time)."""

    name: str
    before: float
    after: float

    def to_json(self) -> dict[str, Json]:
        """One element of the JSON's `shares`."""
        return {
            "name": self.name,
            "before": round(self.before, 5),
            "after": round(self.after, 5),
            "change": round(self.after - self.before, 5),
        }


@dataclass(frozen=True, kw_only=True)
class FindingChanges:
    """Findings of the second trace only, of the first only, and (before, after) of both."""

    new: tuple[Finding, ...] = ()
    gone: tuple[Finding, ...] = ()
    same: tuple[tuple[Finding, Finding], ...] = ()

    def to_json(self) -> dict[str, Json]:
        """The JSON's `findings`."""
        return {
            "new": [finding.to_json() for finding in self.new],
            "gone": [finding.to_json() for finding in self.gone],
            "same": [
                {"before": before.to_json(), "after": after.to_json()}
                for before, after in self.same
            ],
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All changes. `not_compared` says what could not be, and why.

    `least_visible` maps a kind to the smallest change (ratio) that would have been seen with 95 %
    probability.
    """

    before: str
    after: str
    min_change: float
    changes: tuple[Change, ...]
    shares: tuple[ShareChange, ...]
    findings: FindingChanges
    least_visible: dict[Kind, float]
    not_compared: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def of_kind(self, kind: Kind, direction: Direction | None = None) -> tuple[Change, ...]:
        """Changes of one kind, and one direction."""
        return tuple(
            change
            for change in self.changes
            if change.kind == kind and direction in (None, change.direction)
        )

    @property
    def step(self) -> Change | None:
        """The iteration time; None where it could not be compared."""
        return next(iter(self.of_kind(Kind.STEP)), None)

    @property
    def regressions(self) -> tuple[Change, ...]:
        """Everything that got slower."""
        return tuple(change for change in self.changes if change.direction == Direction.SLOWER)

    @property
    def new_faults(self) -> tuple[Finding, ...]:
        """New findings whose owner is a node."""
        return tuple(finding for finding in self.findings.new if finding.owner == Owner.NODE)

    @property
    def outcome(self) -> Outcome:
        """Regressed before faster before same."""
        if self.regressions or self.new_faults:
            return Outcome.REGRESSED
        if not self.changes:
            return Outcome.INCOMPARABLE
        faster = self.step is not None and self.step.direction == Direction.FASTER
        return Outcome.FASTER if faster else Outcome.SAME

    def to_json(self) -> dict[str, Json]:
        """The comparison, schema 1; every change, also those that are none."""
        step = self.step
        return {
            "schema": COMPARISON_SCHEMA,
            "before": self.before,
            "after": self.after,
            "outcome": self.outcome.value,
            "min_change": self.min_change,
            "step": None if step is None else step.to_json(),
            "regressions": [change.to_json() for change in self.regressions],
            "changes": [change.to_json() for change in self.changes],
            "shares": [share.to_json() for share in self.shares],
            "findings": self.findings.to_json(),
            "least_visible": {
                kind.value: round(ratio, 4) for kind, ratio in self.least_visible.items()
            },
            "not_compared": list(self.not_compared),
            "notes": list(self.notes),
        }
