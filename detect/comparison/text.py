"""A comparison in words, for a CI log: the answer, what moved, what could not be told."""

from __future__ import annotations

import textwrap

from detect.comparison.comparison import Change, Comparison, Direction, Kind, Outcome
from detect.findings.wording import listed, milliseconds, percent
from detect.report import Finding

WIDTH = 100
LABEL = 10
MOST_LINES = 8
MOST_NAMED = 3
SHOWN_KINDS = (Kind.RANK, Kind.LOSS, Kind.ROLE, Kind.LINK)
WORTH_SHOWING = 0.005
"""Changes of a share of time below half a percent of it are not printed."""


def render_text(comparison: Comparison) -> str:
    """First the answer, then the changes, then what was not seen."""
    lines = [_answer(comparison), ""]
    step = comparison.step
    if step is not None:
        lines += _labelled("step", f"{_times(step)}, {_ratio(step)}")
    for kind in SHOWN_KINDS:
        lines += _changes(comparison, kind)
    lines += _shares(comparison)
    lines += _findings(comparison)
    lines += ["", *_could_not_show(comparison)]
    return "\n".join(lines).rstrip() + "\n"


def _answer(comparison: Comparison) -> str:
    least = percent(comparison.min_change)
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
        parts.append(f"an iteration takes {_moved(step)} what it took")
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
    if change.kind == Kind.LOSS:
        return f"takes {percent(change.ratio)} of the iteration more"
    return _moved(change) + (" against its peers" if change.kind == Kind.RANK else "")


def _moved(change: Change) -> str:
    return f"{change.ratio:.3f}x"


def _ratio(change: Change) -> str:
    low, high = change.interval
    return f"{change.ratio:.3f}x (95 % interval {low:.3f} to {high:.3f})"


def _times(change: Change) -> str:
    return f"{milliseconds(change.before_ns)} before, {milliseconds(change.after_ns)} after"


def _changes(comparison: Comparison, kind: Kind) -> list[str]:
    lines = []
    for direction in (Direction.SLOWER, Direction.FASTER):
        changes = _ordered(comparison.of_kind(kind, direction))
        for change in changes[:MOST_LINES]:
            how = _in_words(change) if kind == Kind.LOSS else _ratio(change)
            text = f"{change.subject}: {how}, {_times(change)}"
            lines += _labelled(direction.value, "; ".join([text, *change.notes]))
        if len(changes) > MOST_LINES:
            more = f"{len(changes) - MOST_LINES} more of this kind (see --json)"
            lines += _labelled(direction.value, more)
    return lines


def _shares(comparison: Comparison) -> list[str]:
    moved = [one for one in comparison.shares if abs(one.after - one.before) >= WORTH_SHOWING]
    text = ", ".join(f"{one.name} {one.before:.1%} → {one.after:.1%}" for one in moved)
    return _labelled("shares", f"of all ranks' time: {text}") if text else []


def _findings(comparison: Comparison) -> list[str]:
    found = comparison.findings
    lines: list[str] = []
    for label, findings in (("new", found.new), ("gone", found.gone)):
        for finding in findings:
            lines += _labelled(label, _named(finding))
    for before, after in found.same:
        lines += _labelled(
            "still", f"{_named(after)} (slowdown {before.slowdown:.3f} → {after.slowdown:.3f})"
        )
    return lines


def _named(finding: Finding) -> str:
    return f"finding ({finding.cause}, {finding.owner}): {finding.headline}"


def _could_not_show(comparison: Comparison) -> list[str]:
    lines = ["What this comparison could and could not have shown:"]
    if comparison.least_visible:
        parts = [f"{kind} {percent(ratio)}" for kind, ratio in comparison.least_visible.items()]
        lines += _labelled("power", f"smallest change seen with 95 % probability: {listed(parts)}")
    for reason in comparison.not_compared:
        lines += _labelled("left out", f"not compared: {reason}")
    for note in comparison.notes:
        lines += _labelled("note", note)
    return lines


def _labelled(label: str, text: str) -> list[str]:
    start = f"   {label:<{LABEL}}"
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
