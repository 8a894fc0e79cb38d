"""When a finding holds, as iterations and as words."""

from __future__ import annotations

from dataclasses import dataclass

from detect.observations import Ints
from detect.stats.persistence import Course


@dataclass(frozen=True)
class When:
    """First and last iteration, episodes, and whether the trace shows the beginning."""

    first: int
    last: int
    share: float
    episodes: tuple[tuple[int, int], ...]
    begins: bool
    ends: bool

    @property
    def words(self) -> str:
        """Ending of a headline: "since iteration 45"."""
        if len(self.episodes) > 1:
            return f"on and off between iterations {self.first} and {self.last}"
        if self.begins and self.ends:
            return f"in iterations {self.first} to {self.last}"
        if self.begins:
            return f"since iteration {self.first}"
        if self.ends:
            return f"until iteration {self.last}"
        return f"in all traced iterations ({self.first} to {self.last})"


def when(course: Course | None, iterations: Ints) -> When:
    """Course in slots to iterations; None is the whole window."""
    last_slot = len(iterations) - 1
    episodes = course.episodes if course is not None else ((0, last_slot),)
    first, last = episodes[0][0], episodes[-1][1]
    return When(
        first=int(iterations[first]),
        last=int(iterations[last]),
        share=1.0 if course is None else course.share,
        episodes=tuple((int(iterations[one]), int(iterations[end])) for one, end in episodes),
        begins=first > 0,
        ends=last < last_slot,
    )
