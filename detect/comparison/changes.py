"""Declare what a comparison of two traces says, and write it as JSON and as text for a CI log."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from detect.report import Finding, Owner
from detect.text import labelled, milliseconds, percent
from detect.thresholds.comparison import COMPARISON
from megascan.errors import listed
from megascan.header import Json

COMPARISON_SCHEMA = 1


class Quantity(StrEnum):
    """What is compared."""

    STEP = "step"
    ROLE = "role"
    RANK = "rank"
    LOSS = "loss"
    """Time lost outside compute: loading, garbage collection, gaps."""
    LINK = "link"


class Direction(StrEnum):
    """How a quantity moved, beyond noise and beyond the least change."""

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

    For a rank, `ratio` is how much slower it became than its peers did; for lost time it is 1 plus
    the time lost more, as a share of the iteration. `before_ns` and `after_ns` are the quantity's
    own times.
    """

    kind: Quantity
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
        """Return one element of the JSON's `changes` and `regressions`."""
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
        """Return one element of the JSON's `shares`."""
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
        """Return the JSON's `findings`."""
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
    """All changes. `not_compared` says what could not be compared, and why.

    `least_visible` maps a kind to the smallest change (ratio) that would have been seen with 95 %
    probability.
    """

    before: str
    after: str
    min_change: float
    changes: tuple[Change, ...]
    shares: tuple[ShareChange, ...]
    findings: FindingChanges
    least_visible: dict[Quantity, float]
    not_compared: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    strangers: tuple[str, ...] = ()
    """What shows that the traces are of different jobs; if set, nothing counts as slower."""

    def of_kind(self, kind: Quantity, direction: Direction | None = None) -> tuple[Change, ...]:
        """Return the changes of one kind, of one direction if that is given."""
        return tuple(
            change
            for change in self.changes
            if change.kind == kind and direction in (None, change.direction)
        )

    @property
    def step(self) -> Change | None:
        """Return the iteration time; None where it could not be compared."""
        return next(iter(self.of_kind(Quantity.STEP)), None)

    @property
    def regressions(self) -> tuple[Change, ...]:
        """Return everything that got slower."""
        if self.strangers:
            return ()
        return tuple(change for change in self.changes if change.direction == Direction.SLOWER)

    @property
    def new_faults(self) -> tuple[Finding, ...]:
        """Return new findings whose owner is a node."""
        if self.strangers:
            return ()
        return tuple(finding for finding in self.findings.new if finding.owner == Owner.NODE)

    @property
    def outcome(self) -> Outcome:
        """Return the gravest of: regressed, faster, same."""
        if self.regressions or self.new_faults:
            return Outcome.REGRESSED
        if not self.changes or self.strangers:
            return Outcome.INCOMPARABLE
        faster = self.step is not None and self.step.direction == Direction.FASTER
        return Outcome.FASTER if faster else Outcome.SAME

    def to_json(self) -> dict[str, Json]:
        """Return the comparison, schema 1, with every quantity compared, moved or not."""
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
            "strangers": list(self.strangers),
            "notes": list(self.notes),
        }


MOST_LINES = 8
MOST_NAMED = 3
SHOWN_KINDS = (Quantity.RANK, Quantity.LOSS, Quantity.ROLE, Quantity.LINK)


def render_text(comparison: Comparison) -> str:
    """Return the comparison in words: the answer, the changes, what could not be seen."""
    lines = [_answer(comparison), ""]
    step = comparison.step
    if step is not None:
        lines += labelled("step", f"{_times(step)}, {_ratio(step)}")
    if not comparison.strangers:
        for kind in SHOWN_KINDS:
            lines += _changes(comparison, kind)
        lines += _shares(comparison)
        lines += _findings(comparison)
    lines += ["", *_could_not_show(comparison)]
    return "\n".join(lines).rstrip() + "\n"


def _answer(comparison: Comparison) -> str:
    least = percent(comparison.min_change)
    if comparison.strangers:
        return (
            f"INCOMPARABLE: the traces are of different jobs, by their "
            f"{listed(comparison.strangers)}; what differs between jobs is no regression."
        )
    if comparison.outcome == Outcome.INCOMPARABLE:
        return "INCOMPARABLE: the two traces have nothing in common that could be compared."
    if comparison.outcome == Outcome.REGRESSED:
        return f"REGRESSED: {_what_regressed(comparison)}."
    step = comparison.step
    if comparison.outcome == Outcome.FASTER and step is not None:
        return (
            f"FASTER: {_times(step)}, {_ratio(step)}; no rank, operation or link is slower by "
            f"{least} or more."
        )
    return f"SAME: no rank, operation, link or iteration is slower by {least} or more."


def _what_regressed(comparison: Comparison) -> str:
    parts = []
    step = comparison.step
    if step is not None and step.direction == Direction.SLOWER:
        parts.append(f"an iteration takes {_factor(step)} what it took")
    slower = [one for kind in SHOWN_KINDS
              for one in _ordered(comparison.of_kind(kind, Direction.SLOWER))]  # fmt: skip
    parts += [f"{change.subject} {_in_words(change)}" for change in slower[:MOST_NAMED]]
    if len(slower) > MOST_NAMED:
        parts.append(f"{len(slower) - MOST_NAMED} more below")
    if not slower:
        parts += [f"new: {finding.headline}" for finding in comparison.new_faults[:1]]
    return "; ".join(parts)


def _ordered(changes: tuple[Change, ...]) -> list[Change]:
    return sorted(changes, key=lambda one: -abs(one.after_ns - one.before_ns))


def _in_words(change: Change) -> str:
    if change.kind == Quantity.LOSS:
        return f"takes {percent(change.ratio)} of the iteration more"
    return _factor(change) + (" against its peers" if change.kind == Quantity.RANK else "")


def _factor(change: Change) -> str:
    return f"{change.ratio:.3f}x"


def _ratio(change: Change) -> str:
    low, high = change.interval
    return f"{change.ratio:.3f}x (95 % interval {low:.3f} to {high:.3f})"


def _times(change: Change) -> str:
    return f"{milliseconds(change.before_ns)} before, {milliseconds(change.after_ns)} after"


def _changes(comparison: Comparison, kind: Quantity) -> list[str]:
    lines = []
    for direction in (Direction.SLOWER, Direction.FASTER):
        changes, texts = _ordered(comparison.of_kind(kind, direction)), []
        for change in changes[:MOST_LINES]:
            how = _in_words(change) if kind == Quantity.LOSS else _ratio(change)
            text = f"{change.subject}: {how}, {_times(change)}"
            texts.append("; ".join([text, *change.notes]))
        if len(changes) > MOST_LINES:
            texts.append(f"{len(changes) - MOST_LINES} more of this kind (see --json)")
        lines += labelled(direction.value, *texts)
    return lines


def _shares(comparison: Comparison) -> list[str]:
    least = COMPARISON.shown_share
    moved = [one for one in comparison.shares if abs(one.after - one.before) >= least]
    text = ", ".join(f"{one.name} {one.before:.1%} → {one.after:.1%}" for one in moved)
    return labelled("shares", f"of all ranks' time: {text}") if text else []


def _findings(comparison: Comparison) -> list[str]:
    found = comparison.findings
    still = [
        f"{_named(after)} (slowdown {before.slowdown:.3f} → {after.slowdown:.3f})"
        for before, after in found.same
    ]
    lines = labelled("new", *map(_named, found.new)) + labelled("gone", *map(_named, found.gone))
    return lines + labelled("still", *still)


def _named(finding: Finding) -> str:
    return f"finding ({finding.cause}, {finding.owner}): {finding.headline}"


def _could_not_show(comparison: Comparison) -> list[str]:
    lines = ["What this comparison could and could not have shown:"]
    if comparison.least_visible:
        parts = [f"{kind} {percent(ratio)}" for kind, ratio in comparison.least_visible.items()]
        lines += labelled("power", f"smallest change seen with 95 % probability: {listed(parts)}")
    left_out = [f"not compared: {reason}" for reason in comparison.not_compared]
    return lines + labelled("left out", *left_out) + labelled("note", *comparison.notes)
