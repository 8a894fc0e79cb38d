"""Names, numbers and lists as an operator reads them."""

from __future__ import annotations

from collections.abc import Iterable

from detect.observations import Members


def percent(ratio: float) -> str:
    """1.098 as "9.8 %"; small values keep a digit."""
    value = (ratio - 1.0) * 100
    return f"{value:.0f} %" if value >= 20 else f"{value:.1f} %"


def milliseconds(time_ns: float) -> str:
    """A time in ms, µs or s, three digits."""
    for limit, unit, size in ((1e6, "µs", 1e3), (1e9, "ms", 1e6)):
        if abs(time_ns) < limit:
            return f"{time_ns / size:.3g} {unit}"
    return f"{time_ns / 1e9:.3g} s"


def times(slowdown: float) -> str:
    """1.31 as "1.31x"."""
    return f"{slowdown:.3f}x" if slowdown < 1.1 else f"{slowdown:.2f}x"


def listed(items: Iterable[object], most: int = 8) -> str:
    """1, 2 and 3; long lists end with how many more."""
    words = [str(item) for item in items]
    if len(words) > most:
        return ", ".join(words[:most]) + f" and {len(words) - most} more"
    if len(words) < 2:
        return "".join(words)
    return ", ".join(words[:-1]) + " and " + words[-1]


def counted(number: int, noun: str) -> str:
    """1 peer, 3 peers, 8 passes."""
    ending = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{ending}"


def place(members: Members, row: int) -> str:
    """DP1 PP0 TP1, host n03, GPU 5."""
    parts = [members.labels[row]]
    if members.hosts[row]:
        parts.append(f"host {members.hosts[row]}")
    if members.device_kind == "cuda":
        parts.append(f"GPU {members.device_index[row]}")
    return ", ".join(parts)


def ranks_of(members: Members, row: int) -> str:
    """rank 5, or ranks 4 and 5 for a row that stands for a TP group."""
    return ranks_text(members.workers[row])


def ranks_text(ranks: tuple[int, ...]) -> str:
    """rank 5, or ranks 4 and 5."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed(ranks)}"


def confidence(q_value: float) -> str:
    """How sure, in a word and a number."""
    word = "high" if q_value < 1e-4 else "good" if q_value < 1e-3 else "moderate"
    shown = "below 1e-12" if q_value < 1e-12 else f"{q_value:.1g}"
    return f"{word} (q {shown})"
