"""A window that does not come: which ranks did not write it, and where the others stand.

The job's usual gap is the median of the gaps between the ends of its last windows, by its own
clocks. When the files have been still for `GAPS_UNTIL_HANG` of them, the job hangs, unless every
rank has closed its file. Who lacks the newest window is missing. When nobody has written it, the
files cannot tell who holds the others up: a rank writes a window when it is finished, so a rank's
file holds nothing of what it stands in. PyTorch's flight recorder does (dumped by its watchdog
into the trace folder: `TORCH_FR_DUMP_TEMP_FILE=DIR/nccl_trace_rank_`), and is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from megascan.errors import listed
from megascan.header import Json
from megascan.reader.flight_recorder import Standing, read_standings
from megascan.watch.windows import JobWindow, Progress

GAPS_UNTIL_HANG = 3.0
LEAST_SILENCE_S = 10.0
"""Jobs with windows every few ms do not hang because a disk was slow."""
_KEPT_GAPS = 16


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A job that stands still."""

    silent_s: float
    usual_gap_s: float
    last_iteration: int
    """Last iteration of the newest window that any rank wrote."""
    missing: tuple[int, ...]
    """Ranks without that window."""
    standings: tuple[Standing, ...] = ()

    @property
    def headline(self) -> str:
        """Return what is known, in one sentence."""
        parts = [
            f"no window for {self.silent_s:.0f} s (usually one every {self.usual_gap_s:.3g} s); "
            + (
                f"{_ranks(self.missing)} did not finish the window up to iteration "
                f"{self.last_iteration}, the others did"
                if self.missing
                else f"all ranks finished iteration {self.last_iteration} and none the next window"
            )
        ]
        by_place: dict[str, list[int]] = {}
        for standing in self.standings:
            by_place.setdefault(standing.words, []).append(standing.rank)
        parts += [f"{_ranks(ranks)}: {words}" for words, ranks in sorted(by_place.items())]
        return "; ".join(parts)

    def to_json(self) -> dict[str, Json]:
        """For payloads and the state."""
        return {
            "silent_s": round(self.silent_s, 1),
            "usual_gap_s": round(self.usual_gap_s, 3),
            "last_iteration": self.last_iteration,
            "missing_ranks": list(self.missing),
            "headline": self.headline,
            "standings": [standing.to_json() for standing in self.standings],
        }


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed(ranks)}"


@dataclass
class HangWatch:
    """Knows the usual gap between windows, and notices when it is exceeded."""

    after_s: float | None = None
    """Silence that counts as a hang; None: from the usual gap."""
    hang: Hang | None = None
    _ends_ns: list[int] = field(default_factory=list)

    def take(self, windows: Iterable[JobWindow]) -> None:
        """Note that windows have come."""
        for window in windows:
            if self._ends_ns and window.end_unix_ns < self._ends_ns[-1]:
                self._ends_ns.clear()  # another run
            self._ends_ns = [*self._ends_ns, window.end_unix_ns][-_KEPT_GAPS:]
            self.hang = None

    @property
    def usual_gap_s(self) -> float | None:
        """Median of the last gaps; None before three windows."""
        if len(self._ends_ns) < 3:
            return None
        ends = self._ends_ns
        return median(after - before for before, after in pairwise(ends)) / 1e9

    def patience_s(self) -> float | None:
        """Silence from which the job is said to hang; None while that is not known."""
        if self.after_s is not None:
            return self.after_s
        gap = self.usual_gap_s
        return None if gap is None else max(LEAST_SILENCE_S, GAPS_UNTIL_HANG * gap)

    def look(self, progress: Progress, silent_s: float, folders: Sequence[Path]) -> Hang | None:
        """Return a hang when it is first noticed; `silent_s` is the time since the last write."""
        patience = self.patience_s()
        if patience is None or silent_s < patience or self.hang is not None:
            return None
        self.hang = Hang(
            silent_s=silent_s,
            usual_gap_s=self.usual_gap_s or 0.0,
            last_iteration=progress.newest,
            missing=progress.behind,
            standings=tuple(read_standings(folders)),
        )
        return self.hang
